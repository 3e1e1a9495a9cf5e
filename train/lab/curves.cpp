// curves: the curves of finished or running runs in one picture, and their last losses as a table. A run is named after
// its directory, or as the command line says; the directory of a comparison stands for its runs, of several learning
// rates for those at each architecture's best. Runs of one name, which differ in their seeds and in nothing else, are
// one curve: their mean, in a band of one standard deviation to both sides. Only the number of blocks may be another,
// which a note says: Inheritune ends with as many as a seed needs.
//
// --against compares all runs with one: differences, and what each needs for that one's final loss. --y routing and
// --y maps draw what evaluations say of routing.
//
//   curves --out fig.svg runs/llama runs/lime comparison
//   curves --out fig.svg --against llama --x flops runs/llama runs/lime
//   curves --out fig.svg random=runs/a/seed_1 random=runs/a/seed_2 inherited=runs/b/seed_1 inherited=runs/b/seed_2
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/look.h"
#include "cli/needs.h"
#include "cli/picture.h"
#include "cli/program.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "eval/statistics.h"
#include "train/lab/against.h"
#include "train/lab/routing_curves.h"
#include "train/run/environment.h"
#include "train/run/run_curves.h"
#include "train/settings/settings.h"

using namespace crossply;

namespace {

using nlohmann::json;

struct Options {
  std::vector<std::string> runs;  // DIR or NAME=DIR
  std::string out, title, loss = "test", x = "step", y = "loss", against;
  int64_t smooth = 0;
  bool log_x = false, log_y = false;
};

struct Groups {
  std::vector<CurveGroup> all;
  std::string notes;
};

// What the numbers of --x are multiplied with.
double factor_of(const Options& o, const std::string& dir) {
  if (o.x != "flops") return 1;
  const std::string path = dir + "/environment.jsonl";
  const double factor = recorded_flops_per_token(path);
  if (std::isnan(factor))
    fail(Exit::bad_data, path, ": has no \"flops_per_token\", which --x flops needs; take --x tokens, or resume the ",
         "run, which records it");
  return factor;
}

// Where both are finite.
SteppedCurve losses_over(const RunCurves& all, const std::string& axis, bool test, double flops_per_token) {
  const std::vector<double>&steps = test ? all.test_step : all.step, &losses = test ? all.test_loss : all.loss;
  const std::vector<double>& xs = axis == "step"      ? steps
                                  : axis == "seconds" ? (test ? all.test_seconds : all.seconds)
                                                      : (test ? all.test_tokens : all.tokens);
  SteppedCurve curve;
  for (size_t i = 0; i < steps.size(); ++i) {
    const double x = axis == "flops" ? flops_per_token * xs[i] : xs[i];
    if (!std::isfinite(losses[i]) || !std::isfinite(x)) continue;
    curve.step.push_back(steps[i]), curve.x.push_back(x), curve.y.push_back(losses[i]);
  }
  return curve;
}

CurveRun read_run(const Options& o, const std::string& dir) {
  const std::string path = dir + "/metrics.jsonl";
  if (!path_exists(path))
    fail(Exit::no_input, path, ": no such file; ", dir, " must be a run directory, or that of a comparison");
  const bool test = o.loss == "test";
  const RunCurves all = read_curves(path);
  factor_of(o, dir);  // throws where --x needs FLOPs that are not recorded
  const double flops = recorded_flops_per_token(dir + "/environment.jsonl");
  CurveRun run{dir, {}, read_run_settings(dir)};
  for (const auto& [axis, label] : x_labels) run.over[axis] = losses_over(all, axis, test, flops);
  run.losses = run.over.at(o.x);
  for (size_t i = 0; i < all.test_step.size() && test; ++i)
    if (const double n = all.test_sequences[i]; std::isfinite(n)) run.sequences[all.test_step[i]] = n;
  if (run.losses.x.empty())
    run.missing = !run.over.at("step").x.empty()
                      ? str(path, ": its lines have no number of ", o.x, ", which --x needs")
                      : str(path, ": it has no ", test ? "test" : "training", " loss yet",
                            test && !all.step.empty() ? "; --loss train draws what there is" : "");
  else run.last = run.losses.y.back();
  if (test) return run;
  if (const double last = last_loss(all); std::isfinite(last)) run.last = last;
  run.width = all.width;
  return run;
}

// "runs/lime/" is "lime".
std::string last_part(const std::string& dir) {
  const std::string full = std::filesystem::path(absolute_path(dir) + "/.").lexically_normal().string();
  const std::string trimmed = full.substr(0, full.find_last_not_of('/') + 1);
  return trimmed.substr(trimmed.rfind('/') + 1);
}

void add_run(Groups& groups, const CurveGroup& like, const CurveRun& run) {
  if (!run.missing.empty()) fail(Exit::bad_data, run.missing);
  auto group =
      std::find_if(groups.all.begin(), groups.all.end(), [&](const CurveGroup& g) { return g.path == like.path; });
  if (group == groups.all.end()) group = groups.all.insert(groups.all.end(), like);
  group->runs.push_back(run);
}

// The arms of a comparison, by its results.json.
struct Arms {
  json all;
  json choosing_seed;   // whose runs are not drawn; null: none
  bool choice = false;  // of several rates: only those that are judged are drawn

  // The one that a run is of; null where there is none.
  const json* of(const json& run) const {
    for (const json& arm : all)
      if (arm.value("arch", arm["name"]) == run["name"] &&
          arm.value("optimizer", json("adamw")) == run.value("optimizer", json("adamw")))
        return &arm;
    return nullptr;
  }
  bool draws(const json& run, const json& arm) const {
    if (!choice) return true;
    const auto same = [&](const char* key) { return run.value(key, json()) == arm.value(key, json()); };
    return (choosing_seed.is_null() || run.value("seed", json()) != choosing_seed) && same("lr") && same("muon_lr");
  }
};

Arms read_arms(const json& comparison, const std::string& path, std::string& notes) {
  const json rates = comparison.value("rates", json()), muon_rates = comparison.value("muon_rates", json());
  const auto several = [](const json& list) { return list.is_array() && list.size() > 1; };
  Arms arms{comparison.value("architectures", json::array()), comparison.value("choosing_seed", json()),
            several(rates) || several(muon_rates)};
  for (json& arm : arms.all) {
    if (!arm.is_object() || !holds<std::string>(arm.value("name", json())))
      fail(Exit::bad_data, path, ": an architecture has no \"name\"");
    if (!arms.choice) continue;
    const bool muon = arm.value("muon_lr", json()).is_number(), known = muon || arm.value("lr", json()).is_number();
    if (!known && rates.is_array()) arm["lr"] = rates[0];
    notes += str("note: of '", arm["name"].get<std::string>(), "' the runs at lr ", json_text(arm["lr"]),
                 muon ? ", muon " + json_text(arm["muon_lr"]) : "",
                 !known                                    ? ", the first one; none is done yet\n"
                 : arm.value("lr_settled", json()) == true ? ", its best\n"
                                                           : ", the best so far\n");
  }
  return arms;
}

// The runs that results.json of a comparison names, but for those that have no losses yet.
void add_comparison(const Options& o, Groups& groups, const std::string& name, const std::string& dir) {
  const std::string path = dir + "/results.json";
  const json all = read_json(path), runs = all.is_object() ? all.value("runs", json()) : json();
  if (!runs.is_array()) fail(Exit::bad_data, path, ": is not of a comparison: \"runs\" is missing");
  const Arms arms = read_arms(all, path, groups.notes);
  const size_t before = groups.all.size();
  std::vector<std::pair<const json*, json>> drawn;  // by arm, in their order, and those without one
  for (const json& run : runs) {
    if (!run.is_object() || !holds<std::string>(run.value("name", json())) ||
        !holds<std::string>(run.value("directory", json())))
      fail(Exit::bad_data, path, ": a run has no \"name\" or no \"directory\"");
    const json* arm = arms.of(run);
    if (arm == nullptr || arms.draws(run, *arm)) drawn.emplace_back(arm, run);
  }
  std::ranges::stable_sort(drawn, {}, [](const auto& one) { return one.first; });
  for (const auto& [arm, run] : drawn) {
    const std::string own = arm == nullptr ? run["name"] : (*arm)["name"];
    const std::string place = dir + "/" + run["directory"].get<std::string>();
    if (!path_exists(place + "/metrics.jsonl")) continue;
    const CurveRun read = read_run(o, place);
    if (read.missing.empty())
      add_run(groups, {name.empty() ? own : name + " " + own, (name.empty() ? dir : name) + " " + own, false}, read);
    else groups.notes += "note: passed over: " + read.missing + "\n";
  }
  if (groups.all.size() == before)
    fail(Exit::bad_data, path, ": no run of this comparison has a ", o.loss == "test" ? "test" : "training",
         " loss yet", arms.choosing_seed.is_null() ? "" : "; those that choose a learning rate are not drawn");
}

// Throws Exit::io where that cannot be known: nothing is taken for absent that may be there.
std::filesystem::file_type type_of(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_type type = std::filesystem::status(path, error).type();
  const bool unknown = type == std::filesystem::file_type::none && error.value() != ENAMETOOLONG;
  if (unknown) fail_io("inspect", path, error.value());
  return type;
}

void add_argument(const Options& o, Groups& groups, const std::string& argument) {
  const size_t equals = argument.find('=');
  const bool plain = type_of(argument) == std::filesystem::file_type::directory;
  if (!plain && (equals == 0 || equals == std::string::npos || equals + 1 == argument.size()))
    fail(Exit::usage, "'", excerpt(argument), "' is no directory, and is not NAME=DIR");
  const std::string name = plain ? "" : argument.substr(0, equals),
                    dir = plain ? argument : argument.substr(equals + 1);
  if (!path_exists(dir + "/metrics.jsonl") && path_exists(dir + "/results.json"))
    return add_comparison(o, groups, name, dir);
  if (plain) add_run(groups, {last_part(dir), dir, false}, read_run(o, dir));
  else add_run(groups, {name, name + "=", true}, read_run(o, dir));
}

// Of groups that nobody named, those whose names others have, too, get longer ones.
Groups read_groups(const Options& o) {
  Groups groups;
  for (const std::string& argument : o.runs) add_argument(o, groups, argument);
  std::map<std::string, int> times;
  for (const CurveGroup& group : groups.all) ++times[group.name];
  for (CurveGroup& group : groups.all)
    if (!group.named && times[group.name] > 1) group.name = group.path;
  return groups;
}

// Whether runs of one name may have this each its own: it does not touch the numbers, or is made by the seed, too.
bool may_differ(const std::string& key, const json& a, const json& b) {
  static const std::set<std::string> free = {"/seed",         "/preset",    "/plan",        "/eval_every",
                                             "/eval_samples", "/eval_rule", "/tensorboard", "/answer_samples",
                                             "/save_every",   "/keep",      "/csv"};
  return free.contains(key) || ((key == "/init" || key == "/teacher") && a != "" && b != "");
}
bool is_depth(const std::string& key) { return key == "/config/n_layer" || key == "/config/num_hidden_layers"; }

// Throws Exit::usage where runs of one name have other flags. Returns a note where they have other numbers of blocks.
std::string check_flags(const CurveGroup& group) {
  std::string note;
  const CurveRun* first = nullptr;
  for (const CurveRun& run : group.runs) {
    if (run.settings.is_null()) continue;
    if (first == nullptr) first = &run;
    const json was = first->settings.flatten(), is = run.settings.flatten();
    for (const auto& [key, value] : is.items()) {
      const json old = was.value(key, json());
      if (old == value || may_differ(key, old, value)) continue;
      if (!is_depth(key))
        fail(Exit::usage, "'", printable(group.name),
             "' is the name of runs that differ in more than the seed: ", key.substr(1), " is ", json_text(old), " in ",
             first->dir, ", ", json_text(value), " in ", run.dir, "; give them names of their own");
      note = str("note: '", group.name, "' is the mean of models of different depth, such as ", json_text(old), " and ",
                 json_text(value), " blocks\n");
    }
  }
  return note;
}

std::string test_notes(const std::vector<CurveGroup>& groups) {
  std::string notes;
  for (const auto& [key, rows] : loss_differences(groups, true)) {
    notes += str("note: the test losses are not of the same sequences, ", key, " differs:\n");
    for (const std::string& row : rows) notes += "  " + row + "\n";
  }
  return notes;
}

// FLOPs are those of the tape.
std::string newton_schulz_note(const std::vector<CurveGroup>& groups) {
  std::string names;
  for (const CurveGroup& group : groups)
    if (const json& settings = group.runs[0].settings;
        settings.is_object() && settings.value("optimizer", json("adamw")) != "adamw")
      names += (names.empty() ? "'" : "', '") + group.name;
  return names.empty() ? ""
                       : "note: FLOPs leave out those of Newton-Schulz, which Muon computes beside them: " + names +
                             "'; a run's log has their share\n";
}

// A line for each name whose runs were tested on files that they trained on.
std::string validation_notes(const std::vector<CurveGroup>& groups) {
  std::string notes;
  for (const CurveGroup& group : groups) {
    ValidationFiles files;
    for (const CurveRun& run : group.runs)
      if (files.trained_on == 0) files = recorded_validation_files(run.dir + "/environment.jsonl");
    if (files.trained_on > 0)
      notes += str("note: '", group.name, "': ", files.trained_on, " of ", files.all, " validation file",
                   files.all == 1 ? "" : "s", files.trained_on == 1 ? " is" : " are",
                   " among the training files: the test loss is of tokens that the model trained on\n");
  }
  return notes;
}

// At the steps that all of them have. Where the command line named them, their last one must be everybody's; else a
// note says where the curve ends.
Curve curve_of(const CurveGroup& group, std::string& notes) {
  std::vector<SteppedCurve> losses;
  for (const CurveRun& run : group.runs) losses.push_back(run.losses);
  MeanCurve mean = mean_of(losses);
  if (mean.curve.x.empty()) fail(Exit::bad_data, "'", printable(group.name), "': its runs have no step in common");
  mean.curve.name = group.name;
  const double end = losses[0].step.back();
  for (const CurveRun& run : group.runs) {
    if (run.losses.step.back() == end) continue;
    if (group.named)
      fail(Exit::usage, "'", printable(group.name), "': ", group.runs[0].dir, " ends at step ", end, ", ", run.dir,
           " at step ", run.losses.step.back(), "; finish them, or give them names of their own");
    notes += str("note: the runs of '", group.name, "' do not end together; their curve ends at step ",
                 mean.step.back(), ", the table has the last loss of each\n");
    break;
  }
  return mean.curve;
}

std::string table_of(const std::vector<CurveGroup>& groups, const std::string& loss) {
  std::vector<std::vector<std::string>> rows = {{"run", "seeds", "steps", loss + " loss", "+-"}};
  for (const CurveGroup& group : groups) {
    std::vector<double> last;
    for (const CurveRun& run : group.runs) last.push_back(run.last);
    const Spread s = spread_of(last);
    rows.push_back({group.name, std::to_string(last.size()),
                    format_count(static_cast<int64_t>(group.runs[0].losses.step.back())), format_number("%.4f", s.mean),
                    std::isnan(s.sd) ? "-" : format_number("%.4f", s.sd)});
  }
  return format_table(rows);
}

// --smooth in points of the curves. A long run's stand for several steps each; one picture has one number of points.
size_t points_to_smooth(const Options& o, const std::vector<CurveGroup>& groups, std::string& notes) {
  double width = 1;
  for (const CurveGroup& group : groups)
    for (const CurveRun& run : group.runs) width = std::max(width, run.width);
  const double points = o.smooth == 0 ? 0 : std::max(1.0, std::round(static_cast<double>(o.smooth) / width));
  if (o.smooth > 1 && width > 1)
    notes += str("note: a point of the longest curve is the mean of ", width, " steps: --smooth ", o.smooth,
                 " draws the mean of ", points, points == 1 ? " point\n" : " points around each\n");
  return static_cast<size_t>(points);
}

std::string architecture_of(const CurveGroup& group) {
  const json& settings = group.runs[0].settings;
  for (const char* place : {"/config/crossply/arch", "/config/model_type"})
    if (const json::json_pointer at(place); settings.contains(at) && holds<std::string>(settings.at(at)))
      return settings.at(at).get<std::string>();
  return "";
}

// Curves of architectures that are all different have these' looks, whatever they are called; -1: by their names.
std::vector<int> choose_looks(const std::vector<CurveGroup>& groups) {
  std::vector<std::string> names;
  std::set<std::string> different;
  for (const CurveGroup& group : groups) names.push_back(architecture_of(group)), different.insert(names.back());
  return different.size() == groups.size() ? looks_of(names) : std::vector<int>(groups.size(), -1);
}

// "arith:4: llama, lime", where --title says nothing else.
std::string title_of(const Options& o, const std::vector<CurveGroup>& groups) {
  if (!o.title.empty()) return o.title;
  std::string names, data;
  for (const CurveGroup& group : groups) {
    names += (names.empty() ? "" : ", ") + group.name;
    const json of = group.runs[0].settings.is_object() ? group.runs[0].settings.value("data", json()) : json();
    const std::string own = holds<std::string>(of) ? short_name(of.get<std::string>()) : "";
    data = data.empty() || data == own ? own : "several data sets";
  }
  return data + (data.empty() ? "" : ": ") + names;
}

std::string x_title(const Options& o) { return x_labels.at(o.x) + (o.log_x ? "; logarithmic" : ""); }

// An older picture may go, any other file stays.
void check_replaceable(const std::string& path) {
  const std::filesystem::file_type type = type_of(path);
  if (path.empty() || type == std::filesystem::file_type::not_found) return;
  if (type != std::filesystem::file_type::regular || !begins_as_picture(path))
    fail(Exit::usage, "--out ", path, " exists and is no picture; move it away or choose another name");
}

// -----------------------------------------------------------------------------------------------------------------
// --y routing and --y maps

Exit draw_routing(const Options& o, const std::vector<CurveGroup>& groups) {
  const std::vector<int> looks = choose_looks(groups);
  std::vector<RoutedRuns> all;
  std::string notes;
  for (size_t i = 0; i < groups.size(); ++i) {
    RoutedRuns routed{groups[i].name, looks[i]};
    for (const CurveRun& run : groups[i].runs) {
      const std::string path = run.dir + "/metrics.jsonl";
      auto points = read_routing(path, o.x == "flops" ? "tokens" : o.x, factor_of(o, run.dir));
      if (!points.empty()) routed.runs.push_back(std::move(points));
      else notes += str("note: passed over: ", path, ": no evaluation has \"routing\"\n");
    }
    if (!routed.runs.empty()) all.push_back(std::move(routed));
  }
  if (all.empty())
    fail(Exit::bad_data, "--y ", o.y, ": no evaluation of these runs has \"routing\": their layers read the layer ",
         "below alone, or an older version trained them; analyze --what routing reads checkpoints");
  const std::vector<RoutedNumber> numbers = routed_numbers(all);
  const std::vector<Panel> panels = routing_panels(numbers, all);
  std::printf("%s%s", printable(routing_table(numbers, all)).c_str(), printable(notes).c_str());
  if (o.out.empty()) return Exit::done;
  if (o.y == "routing" && panels.empty())
    fail(Exit::bad_data, "--y routing: no number of these runs changes; leave out --out for the table");
  write_picture(o.out, o.y == "maps" ? routing_maps_svg(title_of(o, groups), all)
                                     : curve_svg(title_of(o, groups), x_title(o), panels, o.log_x));
  std::printf("picture: %s\n", printable(o.out).c_str());
  return Exit::done;
}

// -----------------------------------------------------------------------------------------------------------------

Exit run(const Options& o) {
  check_replaceable(o.out);
  const auto [groups, read_notes] = read_groups(o);
  if (o.y != "loss") return draw_routing(o, groups);
  std::vector<Curve> curves;
  std::string notes = read_notes;
  for (const CurveGroup& group : groups) {
    notes += check_flags(group);
    curves.push_back(curve_of(group, notes));
  }
  const std::vector<int> looks = choose_looks(groups);
  for (size_t i = 0; i < curves.size(); ++i) curves[i].look = looks[i];
  const size_t smooth = points_to_smooth(o, groups, notes);
  if (o.loss == "test") notes += test_notes(groups) + validation_notes(groups);
  if (o.x == "flops" || !o.against.empty()) notes += newton_schulz_note(groups);
  const bool several = std::ranges::any_of(groups, [](const CurveGroup& group) { return group.runs.size() > 1; });
  std::printf("%s%s loss: of each run the last%s\n%s", printable(table_of(groups, o.loss)).c_str(), o.loss.c_str(),
              several ? "; mean and standard deviation over the seeds" : "", printable(notes).c_str());
  const bool bands = std::any_of(curves.begin(), curves.end(), [](const Curve& curve) { return !curve.low.empty(); });
  Panel panel{o.loss + " loss" + (bands ? std::string(", ") + about_bands : ""), "", curves};
  panel.log_y = o.log_y, panel.smooth = smooth;
  std::vector<Panel> panels = {panel};
  if (!o.against.empty())
    std::printf("%s", printable(compare_against({o.against, o.loss, o.x, o.smooth}, groups, looks, panels)).c_str());
  if (o.out.empty()) return Exit::done;
  write_picture(o.out, curve_svg(title_of(o, groups), x_title(o), panels, o.log_x));
  std::printf("picture: %s\n", printable(o.out).c_str());
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app("The losses of several runs as a table and, with --out, as a picture. Runs of one name are averaged.",
                  "curves");
  Options o;
  auto flags = [&] {
    add_texts(app, "runs", o.runs, "[NAME=]DIR...", "directories of runs or of comparisons; NAME=DIR names the curve")
        .required();
    add_text(app, "--out", o.out, "FILE", "the picture: a name in .svg, .png or .pdf");
    const std::vector<Need> picture = {{"--out"}}, losses = {{"--y", {"loss"}}};
    needs(app, add_text(app, "--title", o.title, "TEXT", "its title (default: the data and the runs' names)"), picture);
    add_choice(
        app, "--y", o.y, {"loss", "routing", "maps"},
        "loss; or what the connections across depth do, at each evaluation: routing, a panel for each number, or "
        "maps, at up to eight evaluations");
    needs(app, add_choice(app, "--loss", o.loss, {"test", "train"}, "test or train"), losses);
    needs(app,
          add_text(app, "--against", o.against, "NAME",
                   "compare with the run of this name: differences of losses, and the tokens, FLOPs and seconds until "
                   "its final loss; with --loss train, of means over --smooth steps"),
          losses);
    needs(app,
          add_choice(
              app, "--x", o.x, {"step", "tokens", "flops", "seconds"},
              "step, tokens, flops (of training) or seconds (of training, over all its parts, without the pauses)"),
          picture);
    needs(app,
          add_integer(app, "--smooth", o.smooth, 0, max_size,
                      "draw the mean of N points around each: steps of the training loss, evaluations of the test "
                      "loss; as they are, pale, behind it where there are few curves (1: no mean; 0: a fiftieth of "
                      "long curves)"),
          {{"--out"}, {"--against"}});
    needs(app, add_switch(app, "--log-x", o.log_x, "logarithmic x axis"), picture);
    needs(app, add_switch(app, "--log-y", o.log_y, "logarithmic y axis (which losses over a decade have anyway)"),
          picture);
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
