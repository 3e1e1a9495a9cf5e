// curves: the curves of finished or running runs in one picture, and their last losses as a table. Runs of one name,
// which differ in their seeds and in nothing else, are one curve: their mean. Only the number of blocks may be another,
// which a note says: Inheritune ends with as many as a seed needs.
//
//   curves --out fig.svg random=runs/a/seed_1 random=runs/a/seed_2 inherited=runs/b/seed_1 inherited=runs/b/seed_2
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/format.h"
#include "cli/program.h"
#include "engine/file.h"
#include "engine/printable.h"
#include "eval/spread.h"
#include "train/curve.h"
#include "train/options.h"
#include "train/run_curves.h"

using namespace crossply;

namespace {

using nlohmann::json;

struct Options {
  std::vector<std::string> runs;  // NAME=DIR
  std::string out, title, loss = "test";
};

// A run and its flags.json; null where there is none.
struct Run {
  std::string dir;
  Curve curve;
  json settings;
};
// The runs of one name.
struct Group {
  std::string name;
  std::vector<Run> runs;
};

Run read_run(const std::string& name, const std::string& dir, bool test) {
  const std::string path = dir + "/metrics.jsonl";
  if (!path_exists(path)) fail(Exit::no_input, path, ": no such file; ", dir, " must be a run directory");
  const RunCurves all = read_curves(path);
  Curve curve{name, test ? all.test_step : all.step, test ? all.test_loss : all.loss};
  if (curve.x.empty()) fail(Exit::bad_data, path, ": it has no ", test ? "test" : "training", " loss yet");
  return {dir, curve, read_run_settings(dir)};
}

std::vector<Group> read_groups(const Options& o) {
  std::vector<Group> groups;
  for (const std::string& run : o.runs) {
    const size_t equals = run.find('=');
    if (equals == 0 || equals == std::string::npos || equals + 1 == run.size())
      fail(Exit::usage, "'", excerpt(run), "' is not NAME=DIR");
    const std::string name = run.substr(0, equals);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.name == name; });
    if (group == groups.end()) group = groups.insert(groups.end(), {name, {}});
    group->runs.push_back(read_run(name, run.substr(equals + 1), o.loss == "test"));
  }
  return groups;
}

// Whether runs of one name may have this each its own: it does not touch the numbers, or is made by the seed, too.
bool may_differ(const std::string& key, const json& a, const json& b) {
  static const std::set<std::string> free = {"/seed",         "/preset",         "/plan",       "/eval_every",
                                             "/eval_samples", "/answer_samples", "/save_every", "/keep"};
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
      note = str("note: '", printable(group.name), "' is the mean of models of different depth, such as ", old.dump(),
                 " and ", value.dump(), " blocks\n");
    }
  }
  return note;
}

// A line for each flag that says what test losses are of, where the runs have it otherwise.
std::string test_notes(const std::vector<Group>& groups) {
  std::string notes;
  for (const char* key : {"data", "val_data", "seq", "test_samples", "eval_samples"}) {
    std::set<std::string> values, rows;
    for (const Group& group : groups)
      for (const Run& run : group.runs) {
        if (run.settings.is_null()) continue;
        const json value = run.settings.value(key, json());
        values.insert(value.dump());
        rows.insert(group.name + ": " + (value == 0 && key == std::string("eval_samples") ? "0 (all)" : value.dump()));
      }
    if (values.size() < 2) continue;
    notes += str("note: the test losses are not of the same sequences, ", key, " differs:\n");
    for (const std::string& row : rows) notes += "  " + printable(row) + "\n";
  }
  return notes;
}

// At the steps that all of them have, of which the last one is everybody's last.
Curve mean_of(const Group& group) {
  std::map<double, std::vector<double>> at;
  for (const Run& run : group.runs)
    for (size_t i = 0; i < run.curve.x.size(); ++i) at[run.curve.x[i]].push_back(run.curve.y[i]);
  Curve mean{group.name, {}, {}};
  for (const auto& [x, values] : at) {
    if (values.size() != group.runs.size()) continue;
    mean.x.push_back(x);
    mean.y.push_back(spread_of(values).mean);
  }
  if (mean.x.empty()) fail(Exit::bad_data, "'", printable(group.name), "': its runs have no step in common");
  for (const Run& run : group.runs)
    if (run.curve.x.back() != group.runs[0].curve.x.back())
      fail(Exit::usage, "'", printable(group.name), "': ", group.runs[0].dir, " ends at step ",
           group.runs[0].curve.x.back(), ", ", run.dir, " at step ", run.curve.x.back(),
           "; finish them, or give them names of their own");
  return mean;
}

std::string table_of(const std::vector<Group>& groups, const std::string& loss) {
  std::vector<std::vector<std::string>> rows = {{"run", "seeds", "steps", loss + " loss", "+-"}};
  for (const Group& group : groups) {
    std::vector<double> last;
    for (const Run& run : group.runs) last.push_back(run.curve.y.back());
    const Spread s = spread_of(last);
    rows.push_back({group.name, std::to_string(last.size()),
                    format_count(static_cast<int64_t>(group.runs[0].curve.x.back())), format_number("%.4f", s.mean),
                    std::isnan(s.deviation) ? "-" : format_number("%.4f", s.deviation)});
  }
  return format_table(rows);
}

// An older picture may go, any other file stays.
void check_replaceable(const std::string& path) {
  std::error_code ignored;
  if (path.empty() || !std::filesystem::exists(path, ignored)) return;
  std::string start(4, ' ');
  if (std::filesystem::is_regular_file(path, ignored)) std::ifstream(path).read(start.data(), std::ssize(start));
  if (start != "<svg")
    fail(Exit::usage, "--out ", path, " exists and is no picture; move it away or choose another name");
}

Exit run(const Options& o) {
  check_replaceable(o.out);
  const std::vector<Group> groups = read_groups(o);
  std::vector<Curve> curves;
  std::string notes;
  for (const Group& group : groups) {
    notes += check_flags(group);
    curves.push_back(mean_of(group));
  }
  if (o.loss == "test") notes += test_notes(groups);
  std::printf("%s%s loss: the last one of each run, their mean and standard deviation over the seeds\n%s",
              table_of(groups, o.loss).c_str(), o.loss.c_str(), notes.c_str());
  if (o.out.empty()) return Exit::done;
  write_curve_svg(o.out, o.title, "step", {{o.loss + " loss", "", curves}});
  std::printf("picture: %s\n", printable(o.out).c_str());
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The losses of several runs as a table and, with --out, as a picture. Runs of one name are averaged.",
               "curves");
  Options o;
  auto flags = [&] {
    app.add_option("runs", o.runs, "runs: a name for the curve, and the run's directory")
        ->type_name("NAME=DIR...")
        ->required();
    add_text(app, "--out", o.out, "FILE", "the picture, an SVG file");
    add_text(app, "--title", o.title, "TEXT", "its title");
    add_choice(app, "--loss", o.loss, {"test", "train"}, "test or train");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
