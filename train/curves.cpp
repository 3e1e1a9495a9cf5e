// curves: the curves of finished or running runs in one picture, and their last losses as a table. Runs of one name,
// which differ in their seeds, are one curve: their mean.
//
//   curves --out fig.svg random=runs/a/seed_1 random=runs/a/seed_2 inherited=runs/b/seed_1 inherited=runs/b/seed_2
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "cli/format.h"
#include "cli/program.h"
#include "engine/file.h"
#include "engine/printable.h"
#include "train/curve.h"
#include "train/run_curves.h"

using namespace crossply;

namespace {

struct Options {
  std::vector<std::string> runs;  // NAME=DIR
  std::string out, title, loss = "test";
};

// The runs of one name.
struct Group {
  std::string name;
  std::vector<Curve> curves;
};

struct Spread {
  double mean = 0, deviation = NAN;  // of a sample; NaN for a single number
};
Spread spread_of(const std::vector<double>& values) {
  Spread s;
  const auto n = static_cast<double>(values.size());
  for (const double value : values) s.mean += value / n;
  double squares = 0;
  for (const double value : values) squares += (value - s.mean) * (value - s.mean);
  if (values.size() > 1) s.deviation = std::sqrt(squares / (n - 1));
  return s;
}

Curve read_run(const std::string& name, const std::string& dir, bool test) {
  const std::string path = dir + "/metrics.jsonl";
  if (!path_exists(path)) fail(Exit::no_input, path, ": no such file; ", dir, " must be a run directory");
  const RunCurves run = read_curves(path);
  Curve curve{name, test ? run.test_step : run.step, test ? run.test_loss : run.loss};
  if (curve.x.empty()) fail(Exit::bad_data, path, ": it has no ", test ? "test" : "training", " loss yet");
  return curve;
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
    group->curves.push_back(read_run(name, run.substr(equals + 1), o.loss == "test"));
  }
  return groups;
}

// At the steps that all of them have.
Curve mean_of(const Group& group) {
  std::map<double, std::vector<double>> at;
  for (const Curve& curve : group.curves)
    for (size_t i = 0; i < curve.x.size(); ++i) at[curve.x[i]].push_back(curve.y[i]);
  Curve mean{group.name, {}, {}};
  for (const auto& [x, values] : at) {
    if (values.size() != group.curves.size()) continue;
    mean.x.push_back(x);
    mean.y.push_back(spread_of(values).mean);
  }
  return mean;
}

std::string table_of(const std::vector<Group>& groups, const std::string& loss) {
  std::vector<std::vector<std::string>> rows = {{"run", "seeds", "steps", loss + " loss", "+-"}};
  for (const Group& group : groups) {
    std::vector<double> last;
    double least = INFINITY, most = 0;
    for (const Curve& curve : group.curves) {
      last.push_back(curve.y.back());
      least = std::min(least, curve.x.back()), most = std::max(most, curve.x.back());
    }
    const Spread s = spread_of(last);
    const std::string steps = format_count(static_cast<int64_t>(least)), to = format_count(static_cast<int64_t>(most));
    rows.push_back({group.name, std::to_string(last.size()), least == most ? steps : steps + " to " + to,
                    format_number("%.4f", s.mean), std::isnan(s.deviation) ? "-" : format_number("%.4f", s.deviation)});
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
  for (const Group& group : groups) curves.push_back(mean_of(group));
  std::printf("%s%s loss: the last one of each run, their mean and standard deviation over the seeds\n",
              table_of(groups, o.loss).c_str(), o.loss.c_str());
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
