#include "train/lab/against.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/check.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/statistics.h"
#include "train/lab/equal_loss.h"
#include "train/run/environment.h"

namespace crossply {

using nlohmann::json;

Differences loss_differences(const std::vector<CurveGroup>& groups, bool test) {
  Differences differences;
  std::vector<std::string> keys = {"data", "seq"};
  if (test) keys = {"data", "val_data", "seq", "test_samples", "test_part", "eval_samples", "eval_rule"};
  for (const std::string& key : keys) {
    std::set<std::string> values, rows;
    for (const CurveGroup& group : groups)
      for (const CurveRun& run : group.runs) {
        if (run.settings.is_null()) continue;
        const json value = run.settings.value(key, key == "eval_rule"   ? json("first")
                                                   : key == "test_part" ? json("all")
                                                                        : json());
        values.insert(json_text(value));
        rows.insert(group.name + ": " + (value == 0 && key == "eval_samples" ? "0 (all)" : json_text(value)));
      }
    if (values.size() > 1) differences.emplace_back(key, rows);
  }
  return differences;
}

namespace {

// Where a run's seconds were measured: machine and device; null where it does not say.
json where_run(const CurveGroup& group) {
  json of = recorded_environment(group.runs[0].dir + "/environment.jsonl");
  if (of.is_object()) of.erase("build");
  return of;
}

// The mean of a group's runs over an axis.
MeasuredLoss measured_loss(const CurveGroup& group, const std::string& axis) {
  std::vector<SteppedCurve> losses;
  for (const CurveRun& run : group.runs) losses.push_back(run.over.at(axis));
  const MeanCurve mean = mean_of(losses);
  MeasuredLoss out{mean.curve.x, mean.curve.y, {}, mean.step};
  for (const double step : mean.step) {
    const auto of = [&](const CurveRun& run) {
      const auto found = run.sequences.find(step);
      return found == run.sequences.end() ? 0 : found->second;
    };
    const double first = of(group.runs[0]);
    const bool same = std::ranges::all_of(group.runs, [&](const CurveRun& run) { return of(run) == first; });
    out.sequences.push_back(same ? first : NAN);
  }
  return out;
}

// So many steps are averaged: of the training loss a fiftieth of the reference run, where --smooth says nothing, but
// enough that single steps do not decide.
double steps_averaged(const Against& o, const CurveGroup& reference) {
  constexpr double fewest = 10;
  if (o.loss == "test" || o.smooth > 0)
    return std::max<double>(1, static_cast<double>(o.smooth));  // evaluations, steps
  return std::max(fewest, std::round(reference.runs[0].losses.step.back() / 50));
}

RunLosses compared_run(const CurveGroup& group, double steps) {
  RunLosses out{group.name};
  double width = 1;
  for (const CurveRun& run : group.runs) width = std::max(width, run.width);
  const auto points = static_cast<size_t>(std::max(1.0, std::round(steps / width)));
  std::vector<double> last;
  for (const CurveRun& run : group.runs) {
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

const CurveGroup& reference_of(const Against& o, const std::vector<CurveGroup>& groups) {
  std::string names;
  for (const CurveGroup& group : groups) {
    if (group.name == o.name) return group;
    names += (names.empty() ? "" : ", ") + group.name;
  }
  fail(Exit::usage, "--against ", printable(o.name), ": no run has this name; the names are: ", printable(names));
}

void refuse_other_losses(const Against& o, const std::vector<CurveGroup>& groups) {
  std::string keys;
  for (const auto& [key, rows] : loss_differences(groups, o.loss == "test")) keys += (keys.empty() ? "" : ", ") + key;
  if (keys.empty()) return;
  fail(Exit::usage, "--against ", printable(o.name), ": the runs' losses are not of the same sequences: ", keys,
       o.loss == "test" ? " differs; train with the same, or leave out --against" : " differs; leave out --against");
}

}  // namespace

std::string compare_against(const Against& o, const std::vector<CurveGroup>& groups, const std::vector<int>& looks,
                            std::vector<Panel>& panels) {
  refuse_other_losses(o, groups);
  const CurveGroup& first = reference_of(o, groups);
  const double steps = steps_averaged(o, first);
  const RunLosses a = compared_run(first, steps);
  const json place = where_run(first);
  std::vector<RunLosses> others;
  Panel panel{str(o.loss, " loss minus ", first.name, "'s"), "", {}};
  panel.whole = true, panel.smooth = panels[0].smooth;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (&groups[i] == &first) continue;
    others.push_back(compared_run(groups[i], steps));
    if (const json other = where_run(groups[i]); !place.is_null() && !other.is_null() && place != other)
      others.back().lacks.emplace("seconds", str("it ran on another machine than ", first.name));
    Curve difference = difference_of(measured_loss(groups[i], o.x), measured_loss(first, o.x));
    difference.name = groups[i].name, difference.look = looks[i];
    if (!difference.x.empty()) panel.curves.push_back(difference);
  }
  if (others.empty()) fail(Exit::usage, "--against ", printable(o.name), ": there is no other run; name one more");
  if (!panel.curves.empty()) {
    const std::vector<double>& x = panels[0].curves[0].x;
    panel.curves.push_back({"", {x.front(), x.back()}, {0, 0}});
    panel.curves.back().reference = true;
    panels.push_back(panel);
  }
  const std::string average = o.loss == "test" ? (steps > 1 ? str(" (mean over ", steps, " evaluations)") : "")
                                               : str(" (mean over ", steps, steps == 1 ? " step)" : " steps)");
  return comparison_against(a, others, o.loss + (o.loss == "train" ? "ing" : "") + " loss" + average);
}

}  // namespace crossply
