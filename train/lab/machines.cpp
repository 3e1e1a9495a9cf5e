#include "train/lab/machines.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/format.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "train/run/environment.h"
#include "train/run/inputs.h"
#include "train/step/trainer.h"

namespace crossply {
namespace {

using nlohmann::json;

// Of the first steps: the order of sums differs between kinds of CPU, and each step carries on what the last one
// rounded. In bf16 every value is rounded to three digits.
constexpr double rounding_f32 = 1e-3, rounding_bf16 = 2e-2;

// What is compared of a finished run of the backbone.
struct Finished {
  std::vector<double> first;  // losses
  double loss = NAN;
  uint64_t seed = 0;
  bool chooses = false;  // its seed is the one that chooses among learning rates
  std::string optimizer, origin;
  bool bf16 = false;
};
using Backbone = std::map<std::string, Finished>;  // by the name of the run's directory

Backbone finished_backbone(const SweepTable& table, const std::string& sweep) {
  Backbone out;
  for (const std::string& path : record_paths(records_in(sweep, table.planned))) {
    const json record = read_json(path);
    if (text_at(record, "name") != table.comparison.runs[0].choice.text || text_at(record, "state") != "done") continue;
    Finished run;
    run.first = recorded_losses(record);
    if (const json loss = record.value("test_loss", json()); loss.is_number()) run.loss = loss.get<double>();
    const json flags = record.value("flags", json::object()), seed = flags.value("seed", json());
    if (seed.is_number_unsigned()) run.seed = seed.get<uint64_t>();
    run.chooses = table.comparison.choosing_seed && seed == json(*table.comparison.choosing_seed);
    run.optimizer = text_at(flags, "optimizer"), run.bf16 = text_at(flags, "dtype") == "bf16";
    run.origin = origin_of(record.value("environment", json()));
    out[text_at(record, "directory")] = std::move(run);
  }
  return out;
}

// As a share of the loss; NaN where there are no losses to compare.
double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  const size_t n = std::min({a.size(), b.size(), compared_steps});
  double most = n > 0 ? 0 : NAN;
  for (size_t i = 0; i < n; ++i) most = std::max(most, std::abs(a[i] - b[i]) / std::abs(a[i]));
  return most;
}

bool beyond_rounding(double difference, bool bf16) { return !(difference <= (bf16 ? rounding_bf16 : rounding_f32)); }

// What two sweeps have in common of the backbone with one optimizer. Their chosen learning rates may differ in the last
// digit, so that runs of one seed count as the same.
struct Common {
  std::vector<double> ours, theirs;  // losses of the reported seeds
  double rounding = NAN;             // of first losses, at the same rates
  bool bf16 = false;
};

std::map<std::string, Common> common_runs(const Backbone& ours, const Backbone& theirs) {
  std::map<std::string, Common> out;
  for (const auto& [name, run] : theirs) {
    Common& common = out[run.optimizer];
    if (const auto same = ours.find(name); same != ours.end()) {
      const double difference = largest_difference(same->second.first, run.first);
      if (std::isfinite(difference)) common.rounding = std::fmax(common.rounding, difference);
      common.bf16 = run.bf16;
    }
    for (const auto& [_, other] : ours)
      if (!run.chooses && !other.chooses && run.seed == other.seed && run.optimizer == other.optimizer)
        common.ours.push_back(other.loss), common.theirs.push_back(run.loss);
  }
  return out;
}

std::set<std::string> origins_in(const Backbone& runs) {
  std::set<std::string> out;
  for (const auto& [_, run] : runs) out.insert(run.origin);
  return out;
}

std::string joined(const std::set<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : " and ") + text;
  return out;
}

std::string compare_sweeps(const SweepTable& table, const std::string& here, const std::string& there, int64_t tests) {
  const Backbone ours = finished_backbone(table, here), theirs = finished_backbone(table, there);
  const std::string &name = table.planned.name, &backbone = table.comparison.runs[0].choice.text;
  std::set<std::string> origins = origins_in(ours);
  origins.merge(origins_in(theirs));
  if (origins.size() == 1) return "";
  std::string notes;
  std::map<std::string, Common> all = common_runs(ours, theirs);
  if (all.empty()) all[""] = {};
  for (const auto& [optimizer, common] : all) {
    const Spread a = spread_of(common.ours), b = spread_of(common.theirs);
    if (std::isnan(common.rounding) || a.n < 2 || b.n < 2)
      fail(Exit::usage, there, ": fewer than two seeds of ", backbone, " in table ", name, " are also in ", here,
           ", so that nobody can say whether these losses may stand in one table; --part trains them on every machine");
    const Verdict verdict = welch(b, a, tests * static_cast<int64_t>(all.size()));
    const std::string said = str(name, ", ", backbone, " with ", optimizer, ": ", joined(origins_in(ours)), " and ",
                                 joined(origins_in(theirs)), ": the losses of ", compared_steps,
                                 " steps differ by up to ", format_number("%.2g", common.rounding), " of the loss, ",
                                 a.n, " seeds on average by ", format_number("%+.4f", verdict.difference),
                                 " (chance alone: up to ", format_number("%.4f", verdict.interval), ")");
    if (beyond_rounding(common.rounding, common.bf16) || std::abs(verdict.difference) > verdict.interval)
      fail(Exit::usage, there, " is not merged with ", here, ". ", said);
    notes += "* " + said + ".\n";
  }
  return notes;
}

// The training losses of the first steps of a run, here and now.
std::vector<double> repeated_losses(const ComparedRun& run) {
  TrainPlan trial = run.plan;
  trial.resume = false, trial.out.clear();
  const auto [plan, data] = open_inputs(trial);
  Trainer trainer(plan, *data.train);
  std::vector<double> out;
  for (size_t i = 0; i < std::min(compared_steps, static_cast<size_t>(plan.steps)); ++i)
    out.push_back(trainer.step().loss);
  return out;
}

}  // namespace

std::string merge_sweeps(std::vector<SweepTable>& tables, const std::string& first,
                         const std::vector<std::string>& others) {
  std::string notes;
  const SweepPlan plan = read_sweep_plan(plan_in(first));
  const int64_t tests = std::max<int64_t>(1, std::ssize(tables) * std::ssize(others));
  for (const std::string& other : others) {
    if (read_sweep_plan(plan_in(other)).text != plan.text)
      fail(Exit::usage, other, " is a sweep of another plan than ", first, "; compare ", plan_in(other), " with ",
           plan_in(first));
    for (SweepTable& table : tables) {
      const std::string there = records_in(other, table.planned);
      if (!path_exists(there)) continue;
      notes += compare_sweeps(table, first, other, tests);
      take_records(table.comparison, there);
    }
  }
  return notes;
}

std::vector<std::string> check_origins(const SweepTable& table) {
  const Comparison& comparison = table.comparison;
  std::vector<std::string> notes;
  std::set<std::string> seen = {this_origin()};
  for (const ComparedRun& run : comparison.runs) {
    if (run.choice.text != comparison.runs[0].choice.text || !is_done(run) || first_losses(run).empty()) continue;
    const std::string origin = origin_of(environment_of(comparison, run));
    if (!seen.insert(origin).second) continue;
    const double rounding = largest_difference(first_losses(run), repeated_losses(run));
    const std::string said =
        str(table.planned.name, ": cells of ", origin, ": ", compared_steps, " steps of ", run_directory(run),
            " differ here by up to ", format_number("%.2g", rounding), " of the loss");
    if (beyond_rounding(rounding, run.plan.dtype == "bf16"))
      fail(Exit::usage, said, ", which is more than rounding; train all cells with one commit, on one kind of CPU");
    notes.push_back(said + ".");
  }
  return notes;
}

std::map<std::string, int64_t> origins_of(const std::vector<SweepTable>& tables) {
  std::map<std::string, int64_t> cells;
  for (const SweepTable& table : tables)
    for (const ComparedRun& run : table.comparison.runs)
      if (!is_unfinished(run)) ++cells[origin_of(environment_of(table.comparison, run))];
  return cells;
}

}  // namespace crossply
