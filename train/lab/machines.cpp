#include "train/lab/machines.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"

namespace crossply {
namespace {

using nlohmann::json;

// Losses of the same 20 steps: the order of sums differs between kinds of CPU, and each step carries on what the last
// one rounded. In bf16 every value is rounded to three digits.
constexpr double rounding_f32 = 1e-3, rounding_bf16 = 2e-2;

// What is compared of a finished run of the backbone.
struct Finished {
  std::vector<double> first;
  double loss = NAN;
  std::string seed;  // with the optimizer; "" of the one that chooses among the rates
  std::string machine;
  bool bf16 = false;
};

std::string text_at(const json& object, const char* key) {
  return object.is_object() && object.contains(key) && object[key].is_string() ? object[key].get<std::string>() : "";
}

// By the name of the run's directory.
std::map<std::string, Finished> finished_backbone(const SweepTable& table, const std::string& records) {
  std::map<std::string, Finished> out;
  for (const std::string& path : record_paths(records)) {
    const json record = read_json(path);
    if (text_at(record, "name") != table.comparison.runs[0].choice.text || text_at(record, "state") != "done") continue;
    Finished run;
    for (const json& loss : record.value("first_losses", json::array()))
      if (loss.is_number()) run.first.push_back(loss.get<double>());
    if (const json loss = record.value("test_loss", json()); loss.is_number()) run.loss = loss.get<double>();
    const json environment = record.value("environment", json::object());
    run.machine = text_at(environment.value("machine", json::object()), "cpu") + ", commit " +
                  text_at(environment.value("build", json::object()), "commit");
    const json flags = record.value("flags", json::object()), seed = flags.value("seed", json());
    if (seed != json(table.comparison.choosing_seed.value_or(-1)))
      run.seed = text_at(flags, "optimizer") + " " + json_text(seed);
    run.bf16 = text_at(flags, "dtype") == "bf16";
    out[text_at(record, "directory")] = std::move(run);
  }
  return out;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    most = std::max(most, std::abs(a[i] - b[i]) / std::abs(a[i]));
  return most;
}

// The losses of the reported seeds that both have: their rates may differ in the last digit.
std::pair<Spread, Spread> common_seeds(const std::map<std::string, Finished>& ours,
                                       const std::map<std::string, Finished>& theirs) {
  std::vector<double> a, b;
  for (const auto& [_, run] : theirs)
    for (const auto& [__, other] : ours)
      if (!run.seed.empty() && run.seed == other.seed) a.push_back(other.loss), b.push_back(run.loss);
  return {spread_of(a), spread_of(b)};
}

std::string compare_machines(const SweepTable& table, const std::string& here, const std::string& there,
                             int64_t tests) {
  const auto records = [&](const std::string& sweep) { return sweep + "/" + table.planned.name + "/records"; };
  const auto ours = finished_backbone(table, records(here)), theirs = finished_backbone(table, records(there));
  double rounding = 0;
  bool bf16 = false, any = false;
  std::string machines;
  for (const auto& [name, run] : theirs) {
    const auto same = ours.find(name);
    if (same == ours.end()) continue;
    rounding = std::max(rounding, largest_difference(same->second.first, run.first));
    any = true, bf16 = run.bf16, machines = same->second.machine + "; " + run.machine;
  }
  const std::string &name = table.planned.name, &backbone = table.comparison.runs[0].choice.text;
  const auto [of_a, of_b] = common_seeds(ours, theirs);
  if (!any || of_a.n < 2 || of_b.n < 2)
    fail(Exit::usage, there, ": fewer than two seeds of ", backbone, " in table ", name, " are also in ", here,
         ", so that nobody can say whether these losses may stand in one table; --part trains them on every machine");
  const Verdict verdict = welch(of_b, of_a, tests);
  const std::string said =
      str(name, ": ", machines, ": 20 steps differ by up to ", format_number("%.2g", rounding), " of the loss, ",
          of_a.n, " seeds on average by ", format_number("%+.4f", verdict.difference), " (chance alone: up to ",
          format_number("%.4f", verdict.interval), ")");
  if (rounding > (bf16 ? rounding_bf16 : rounding_f32) || std::abs(verdict.difference) > verdict.interval)
    fail(Exit::usage, there, " is not merged with ", here, ". ", said);
  return said + ".\n";
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
      const std::string there = other + "/" + table.planned.name + "/records";
      if (!path_exists(there)) continue;
      if (table.planned.of.empty()) notes += compare_machines(table, first, other, tests);
      take_records(table.comparison, there);
    }
  }
  return notes.empty() ? "" : "Machines:\n\n" + notes + "\n";
}

}  // namespace crossply
