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
#include <numeric>
#include <set>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/look.h"
#include "cli/needs.h"
#include "cli/picture.h"
#include "cli/program.h"
#include "engine/file.h"
#include "engine/json.h"
#include "engine/printable.h"
#include "eval/statistics.h"
#include "models/json_file.h"
#include "train/environment.h"
#include "train/equal_loss.h"
#include "train/options.h"
#include "train/routing_curves.h"
#include "train/run_curves.h"

using namespace crossply;

namespace {

using nlohmann::json;

struct Options {
  std::vector<std::string> runs;  // DIR or NAME=DIR
  std::string out, title, loss = "test", x = "step", y = "loss", against;
  int64_t smooth = 0;
  bool log_x = false, log_y = false;
};

// What --x takes, and what the axis then says.
const std::map<std::string, std::string> x_labels = {{"step", "step"},
                                                     {"tokens", "tokens"},
                                                     {"flops", "FLOPs of training"},
                                                     {"seconds", "seconds of training, without pauses"}};

// A run, its losses by step, and its flags.json; null where there is none.
struct Run {
  std::string dir;
  SteppedCurve losses;  // over --x
  json settings;
  std::map<std::string, SteppedCurve> over = {};  // over every axis that there is
  std::map<double, double> sequences = {};        // by step, of the test loss
  double last = NAN, width = 1;  // the loss of the last step; steps that a point of `losses` stands for
  std::string missing = "";      // why there are no losses
};
// The runs of one name.
struct Group {
  std::string name, path;  // path: a name that no other has
  bool named = true;       // by the command line, which could name it otherwise
  std::vector<Run> runs = {};
};
struct Groups {
  std::vector<Group> all;
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

Run read_run(const Options& o, const std::string& dir) {
  const std::string path = dir + "/metrics.jsonl";
  if (!path_exists(path))
    fail(Exit::no_input, path, ": no such file; ", dir, " must be a run directory, or that of a comparison");
  const bool test = o.loss == "test";
  const RunCurves all = read_curves(path);
  factor_of(o, dir);
  const double flops = recorded_flops_per_token(dir + "/environment.jsonl");
  Run run{dir, {}, read_run_settings(dir)};
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

void add_run(Groups& groups, const Group& like, const Run& run) {
  if (!run.missing.empty()) fail(Exit::bad_data, run.missing);
  auto group = std::find_if(groups.all.begin(), groups.all.end(), [&](const Group& g) { return g.path == like.path; });
  if (group == groups.all.end()) group = groups.all.insert(groups.all.end(), like);
  group->runs.push_back(run);
}

// Of each architecture of a comparison of several rates the one it is judged at; the first one where there is none yet.
std::map<std::string, json> chosen_rates(const json& comparison, const std::string& path, std::string& notes) {
  std::map<std::string, json> rates;
  const json listed = comparison.value("rates", json());
  if (!listed.is_array() || listed.size() < 2) return rates;
  for (const json& arm : comparison.value("architectures", json::array())) {
    if (!arm.is_object() || !holds<std::string>(arm.value("name", json())))
      fail(Exit::bad_data, path, ": an architecture has no \"name\"");
    const std::string name = arm["name"];
    const json lr = arm.value("lr", json()), rate = lr.is_number() ? lr : listed[0];
    rates[name] = rate;
    notes += str("note: of '", name, "' the runs at lr ", rate.dump(),
                 lr.is_null()                              ? ", the first one; none is done yet\n"
                 : arm.value("lr_settled", json()) == true ? ", its best\n"
                                                           : ", the best so far\n");
  }
  return rates;
}

// The runs that results.json of a comparison names, but for those that have no losses yet.
void add_comparison(const Options& o, Groups& groups, const std::string& name, const std::string& dir) {
  const std::string path = dir + "/results.json";
  const json all = read_json(path), runs = all.is_object() ? all.value("runs", json()) : json();
  if (!runs.is_array()) fail(Exit::bad_data, path, ": is not of a comparison: \"runs\" is missing");
  const std::map<std::string, json> rates = chosen_rates(all, path, groups.notes);
  const size_t before = groups.all.size();
  for (const json& run : runs) {
    if (!run.is_object() || !holds<std::string>(run.value("name", json())) ||
        !holds<std::string>(run.value("directory", json())))
      fail(Exit::bad_data, path, ": a run has no \"name\" or no \"directory\"");
    const std::string own = run["name"], place = dir + "/" + run["directory"].get<std::string>();
    const auto rate = rates.find(own);
    if (rate != rates.end() && run.value("lr", json()) != rate->second) continue;
    if (!path_exists(place + "/metrics.jsonl")) continue;
    const Run read = read_run(o, place);
    if (read.missing.empty())
      add_run(groups, {name.empty() ? own : name + " " + own, (name.empty() ? dir : name) + " " + own, false}, read);
    else groups.notes += "note: passed over: " + read.missing + "\n";
  }
  if (groups.all.size() == before)
    fail(Exit::bad_data, path, ": no run of this comparison has a ", o.loss == "test" ? "test" : "training",
         " loss yet");
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
  for (const Group& group : groups.all) ++times[group.name];
  for (Group& group : groups.all)
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
std::string check_flags(const Group& group) {
  std::string note;
  const Run* first = nullptr;
  for (const Run& run : group.runs) {
    if (run.settings.is_null()) continue;
    if (first == nullptr) first = &run;
    const json was = first->settings.flatten(), is = run.settings.flatten();
    for (const auto& [key, value] : is.items()) {
      const json old = was.value(key, json());
      if (old == value || may_differ(key, old, value)) continue;
      if (!is_depth(key))
        fail(Exit::usage, "'", printable(group.name),
             "' is the name of runs that differ in more than the seed: ", key.substr(1), " is ", old.dump(), " in ",
             first->dir, ", ", value.dump(), " in ", run.dir, "; give them names of their own");
      note = str("note: '", group.name, "' is the mean of models of different depth, such as ", old.dump(), " and ",
                 value.dump(), " blocks\n");
    }
  }
  return note;
}

using Differences = std::vector<std::pair<std::string, std::set<std::string>>>;

// Of the flags that say what losses are of, those that the runs have otherwise, with a row for each value.
Differences loss_differences(const std::vector<Group>& groups, bool test) {
  Differences differences;
  std::vector<std::string> keys = {"data", "seq"};
  if (test) keys = {"data", "val_data", "seq", "test_samples", "eval_samples", "eval_rule"};
  for (const std::string& key : keys) {
    std::set<std::string> values, rows;
    for (const Group& group : groups)
      for (const Run& run : group.runs) {
        if (run.settings.is_null()) continue;
        const json value = run.settings.value(key, key == "eval_rule" ? json("first") : json());
        values.insert(value.dump());
        rows.insert(group.name + ": " + (value == 0 && key == "eval_samples" ? "0 (all)" : value.dump()));
      }
    if (values.size() > 1) differences.emplace_back(key, rows);
  }
  return differences;
}

std::string test_notes(const std::vector<Group>& groups) {
  std::string notes;
  for (const auto& [key, rows] : loss_differences(groups, true)) {
    notes += str("note: the test losses are not of the same sequences, ", key, " differs:\n");
    for (const std::string& row : rows) notes += "  " + row + "\n";
  }
  return notes;
}

// A line for each name whose runs were tested on files that they trained on.
std::string validation_notes(const std::vector<Group>& groups) {
  std::string notes;
  for (const Group& group : groups) {
    ValidationFiles files;
    for (const Run& run : group.runs)
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
Curve curve_of(const Group& group, std::string& notes) {
  std::vector<SteppedCurve> losses;
  for (const Run& run : group.runs) losses.push_back(run.losses);
  MeanCurve mean = mean_of(losses);
  if (mean.curve.x.empty()) fail(Exit::bad_data, "'", printable(group.name), "': its runs have no step in common");
  mean.curve.name = group.name;
  const double end = losses[0].step.back();
  for (const Run& run : group.runs) {
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

std::string table_of(const std::vector<Group>& groups, const std::string& loss) {
  std::vector<std::vector<std::string>> rows = {{"run", "seeds", "steps", loss + " loss", "+-"}};
  for (const Group& group : groups) {
    std::vector<double> last;
    for (const Run& run : group.runs) last.push_back(run.last);
    const Spread s = spread_of(last);
    rows.push_back({group.name, std::to_string(last.size()),
                    format_count(static_cast<int64_t>(group.runs[0].losses.step.back())), format_number("%.4f", s.mean),
                    std::isnan(s.sd) ? "-" : format_number("%.4f", s.sd)});
  }
  return format_table(rows);
}

// --smooth in points of the curves. A long run's stand for several steps each; one picture has one number of points.
size_t points_to_smooth(const Options& o, const std::vector<Group>& groups, std::string& notes) {
  double width = 1;
  for (const Group& group : groups)
    for (const Run& run : group.runs) width = std::max(width, run.width);
  const double points = o.smooth == 0 ? 0 : std::max(1.0, std::round(static_cast<double>(o.smooth) / width));
  if (o.smooth > 1 && width > 1)
    notes += str("note: a point of the longest curve is the mean of ", width, " steps: --smooth ", o.smooth,
                 " draws the mean of ", points, points == 1 ? " point\n" : " points around each\n");
  return static_cast<size_t>(points);
}

std::string architecture_of(const Group& group) {
  const json& settings = group.runs[0].settings;
  for (const char* place : {"/config/crossply/arch", "/config/model_type"})
    if (const json::json_pointer at(place); settings.contains(at) && holds<std::string>(settings.at(at)))
      return settings.at(at).get<std::string>();
  return "";
}

// Curves of architectures that are all different have these' looks, whatever they are called; -1: by their names.
std::vector<int> choose_looks(const std::vector<Group>& groups) {
  std::vector<std::string> names;
  std::set<std::string> different;
  for (const Group& group : groups) names.push_back(architecture_of(group)), different.insert(names.back());
  return different.size() == groups.size() ? looks_of(names) : std::vector<int>(groups.size(), -1);
}

// "arith:4: llama, lime", where --title says nothing else.
std::string title_of(const Options& o, const std::vector<Group>& groups) {
  if (!o.title.empty()) return o.title;
  std::string names, data;
  for (const Group& group : groups) {
    names += (names.empty() ? "" : ", ") + group.name;
    const json of = group.runs[0].settings.is_object() ? group.runs[0].settings.value("data", json()) : json();
    const std::string own = holds<std::string>(of) ? of.get<std::string>() : "";
    data = data.empty() || data == own ? own : "several data sets";
  }
  return data + (data.empty() ? "" : ": ") + names;
}

std::string x_title(const Options& o) { return x_labels.at(o.x) + (o.log_x ? "; logarithmic" : ""); }

// Where a run's seconds were measured: machine and device; null where it does not say.
json where_run(const Group& group) {
  json of = recorded_environment(group.runs[0].dir + "/environment.jsonl");
  if (of.is_object()) of.erase("build");
  return of;
}

// An older picture may go, any other file stays.
void check_replaceable(const std::string& path) {
  const std::filesystem::file_type type = type_of(path);
  if (path.empty() || type == std::filesystem::file_type::not_found) return;
  if (type != std::filesystem::file_type::regular || !begins_as_picture(path))
    fail(Exit::usage, "--out ", path, " exists and is no picture; move it away or choose another name");
}

// -----------------------------------------------------------------------------------------------------------------
// --against

// The mean of a group's runs over an axis.
MeasuredLoss measured_loss(const Group& group, const std::string& axis) {
  std::vector<SteppedCurve> losses;
  for (const Run& run : group.runs) losses.push_back(run.over.at(axis));
  const MeanCurve mean = mean_of(losses);
  MeasuredLoss out{mean.curve.x, mean.curve.y, {}, mean.step};
  for (const double step : mean.step) {
    const auto of = [&](const Run& run) {
      const auto found = run.sequences.find(step);
      return found == run.sequences.end() ? 0 : found->second;
    };
    const double first = of(group.runs[0]);
    const bool same = std::ranges::all_of(group.runs, [&](const Run& run) { return of(run) == first; });
    out.sequences.push_back(same ? first : NAN);
  }
  return out;
}

// So many steps are averaged: of the training loss a fiftieth of the reference run, where --smooth says nothing, but
// enough that single steps do not decide.
double steps_averaged(const Options& o, const Group& reference) {
  constexpr double fewest = 10;
  if (o.loss == "test" || o.smooth > 0)
    return std::max<double>(1, static_cast<double>(o.smooth));  // evaluations, steps
  return std::max(fewest, std::round(reference.runs[0].losses.step.back() / 50));
}

ComparedRun compared_run(const Options& o, const Group& group, double steps) {
  ComparedRun out{group.name};
  double width = 1;
  for (const Run& run : group.runs) width = std::max(width, run.width);
  const auto points = static_cast<size_t>(std::max(1.0, std::round(steps / width)));
  std::vector<double> last;
  for (const Run& run : group.runs) {
    const std::vector<double>& y = run.over.at("step").y;
    const auto n = static_cast<std::ptrdiff_t>(std::min(points, y.size()));
    last.push_back(points == 1 ? run.last : std::accumulate(y.end() - n, y.end(), 0.0) / static_cast<double>(n));
  }
  const Spread spread = spread_of(last);
  out.last = spread.mean, out.error = spread.error();
  for (const auto& [axis, label] : x_labels) {
    const MeasuredLoss measured = mean_of_last(measured_loss(group, axis), points);
    if (!measured.x.empty()) out.over[axis] = measured;
    else if (axis == "flops")
      out.lacks[axis] =
          str(group.runs[0].dir, "/environment.jsonl has no \"flops_per_token\"; resume the run, which ", "records it");
    else out.lacks[axis] = str(group.runs[0].dir, "/metrics.jsonl has no number of ", axis);
  }
  if (!out.over.contains("step"))
    fail(Exit::usage, "--against: '", printable(group.name), "' has fewer than the ", points,
         " points that are averaged; give a smaller --smooth");
  out.sequences = out.over.at("step").sequences.back();
  return out;
}

const Group& reference_of(const Options& o, const std::vector<Group>& groups) {
  std::string names;
  for (const Group& group : groups) {
    if (group.name == o.against) return group;
    names += (names.empty() ? "" : ", ") + group.name;
  }
  fail(Exit::usage, "--against ", printable(o.against), ": no run has this name; the names are: ", printable(names));
}

void refuse_other_losses(const Options& o, const std::vector<Group>& groups) {
  std::string keys;
  for (const auto& [key, rows] : loss_differences(groups, o.loss == "test")) keys += (keys.empty() ? "" : ", ") + key;
  if (keys.empty()) return;
  fail(Exit::usage, "--against ", printable(o.against), ": the runs' losses are not of the same sequences: ", keys,
       o.loss == "test" ? " differs; train with the same, or leave out --against" : " differs; leave out --against");
}

// Adds what it says to the picture, and returns it as text.
std::string compare_against(const Options& o, const std::vector<Group>& groups, const std::vector<int>& looks,
                            std::vector<Panel>& panels) {
  refuse_other_losses(o, groups);
  const Group& first = reference_of(o, groups);
  const double steps = steps_averaged(o, first);
  const ComparedRun a = compared_run(o, first, steps);
  const json place = where_run(first);
  std::vector<ComparedRun> others;
  Panel panel{str(o.loss, " loss minus ", first.name, "'s"), "", {}};
  panel.whole = true, panel.smooth = panels[0].smooth;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (&groups[i] == &first) continue;
    others.push_back(compared_run(o, groups[i], steps));
    if (const json other = where_run(groups[i]); !place.is_null() && !other.is_null() && place != other)
      others.back().lacks.emplace("seconds", str("it ran on another machine than ", first.name));
    Curve difference = difference_of(measured_loss(groups[i], o.x), measured_loss(first, o.x));
    difference.name = groups[i].name, difference.look = looks[i];
    if (!difference.x.empty()) panel.curves.push_back(difference);
  }
  if (others.empty()) fail(Exit::usage, "--against ", printable(o.against), ": there is no other run; name one more");
  if (!panel.curves.empty()) {
    const std::vector<double>& x = panels[0].curves[0].x;
    panel.curves.push_back({"", {x.front(), x.back()}, {0, 0}});
    panel.curves.back().reference = true;
    panels.push_back(panel);
  }
  const std::string average = o.loss == "test" ? (steps > 1 ? str(" (mean over ", steps, " evaluations)") : "")
                                               : str(" (mean over ", steps, " steps)");
  return comparison_against(a, others, o.loss + (o.loss == "train" ? "ing" : "") + " loss" + average);
}

// -----------------------------------------------------------------------------------------------------------------
// --y routing and --y maps

Exit draw_routing(const Options& o, const std::vector<Group>& groups) {
  const std::vector<int> looks = choose_looks(groups);
  std::vector<RoutedRuns> all;
  std::string notes;
  for (size_t i = 0; i < groups.size(); ++i) {
    RoutedRuns routed{groups[i].name, looks[i]};
    for (const Run& run : groups[i].runs) {
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
  for (const Group& group : groups) {
    notes += check_flags(group);
    curves.push_back(curve_of(group, notes));
  }
  const std::vector<int> looks = choose_looks(groups);
  for (size_t i = 0; i < curves.size(); ++i) curves[i].look = looks[i];
  const size_t smooth = points_to_smooth(o, groups, notes);
  if (o.loss == "test") notes += test_notes(groups) + validation_notes(groups);
  std::printf("%s%s loss: of each run the last; mean and standard deviation over the seeds\n%s",
              printable(table_of(groups, o.loss)).c_str(), o.loss.c_str(), printable(notes).c_str());
  const bool bands = std::any_of(curves.begin(), curves.end(), [](const Curve& curve) { return !curve.low.empty(); });
  Panel panel{o.loss + " loss" + (bands ? std::string(", ") + about_bands : ""), "", curves};
  panel.log_y = o.log_y, panel.smooth = smooth;
  std::vector<Panel> panels = {panel};
  if (!o.against.empty()) std::printf("%s", printable(compare_against(o, groups, looks, panels)).c_str());
  if (o.out.empty()) return Exit::done;
  write_picture(o.out, curve_svg(title_of(o, groups), x_title(o), panels, o.log_x));
  std::printf("picture: %s\n", printable(o.out).c_str());
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The losses of several runs as a table and, with --out, as a picture. Runs of one name are averaged.",
               "curves");
  Options o;
  auto flags = [&] {
    app.add_option("runs", o.runs, "directories of runs or of comparisons; NAME=DIR names the curve")
        ->type_name("[NAME=]DIR...")
        ->required();
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
    needs(app, app.add_flag("--log-x", o.log_x, "logarithmic x axis"), picture);
    needs(app, app.add_flag("--log-y", o.log_y, "logarithmic y axis (which losses over a decade have anyway)"),
          picture);
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
