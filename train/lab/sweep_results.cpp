// results.json and results.csv of a sweep.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "engine/io/json.h"
#include "train/lab/sweep_report.h"

namespace crossply {
namespace {

using nlohmann::json;

double basin_of(const Arm& arm, bool muon) {
  const auto axis = std::ranges::find(arm.axes, muon, &RateAxis::muon);
  return axis == arm.axes.end() ? NAN : axis->choice.basin;
}

json json_of(const ReportTable& of, const ReportRow& row) {
  const Costs cost = costs_of(of.rows, row);
  return {{"table", of.table->planned.name},
          {"architecture", row.arm.arch},
          {"optimizer", row.arm.optimizer},
          {"loss", number_or_null(row.loss)},
          {"loss_sd", number_or_null(row.sd)},
          {"losses", row.losses},  // of the seeds
          {"seeds", row.seeds},
          {"seeds_done", row.done - row.lost},
          {"seeds_diverged", row.lost},
          {"compared_with", row.judged ? json(row.backbone) : json()},
          {"difference", number_or_null(row.verdict.difference)},
          {"interval", number_or_null(row.verdict.interval)},
          {"found", row.verdict.tested ? json(row.verdict.found) : json()},
          {"steps_worth", number_or_null(row.worth.times)},
          {"steps_worth_low", number_or_null(row.worth.low)},
          {"steps_worth_high", number_or_null(row.worth.high)},
          {"steps_worth_beyond", row.worth.beyond},
          {"steps_worth_low_open", row.worth.low_open},
          {"steps_worth_high_open", row.worth.high_open},
          {"parameters", row.planned.accounting.parameters},
          {"flops_per_token", row.planned.accounting.flops_per_token},
          {"bytes_per_token", row.planned.bytes_per_token},
          {"memory_bytes", row.planned.memory},
          {"step_seconds", row.time.seconds > 0 ? json(row.time.seconds) : json()},
          {"relative_flops", number_or_null(cost.flops)},
          {"relative_bytes", number_or_null(cost.bytes)},
          {"relative_time", number_or_null(cost.seconds)},
          {"relative_memory", number_or_null(cost.memory)},
          {"lr", number_or_null(row.arm.lr)},
          {"muon_lr", number_or_null(row.arm.muon_lr)},
          {"rate_at_edge", row.arm.at_edge},
          {"rates_tried", row.tried},
          {"basin", number_or_null(basin_of(row.arm, false))},
          {"muon_basin", number_or_null(basin_of(row.arm, true))},
          {"further_loss", number_or_null(row.further)},
          {"minimal_pairs", number_or_null(row.pairs)}};
}

std::string csv_of(const json& rows) {
  std::string out, head;
  for (const json& row : rows) {
    std::string line;
    const bool first = out.empty();
    for (const auto& [key, value] : row.items()) {
      if (value.is_array()) continue;  // is in the JSON alone
      const std::string cell = value.is_string() ? csv_field(value.get<std::string>())
                               : value.is_null() ? ""
                                                 : json_text(value);
      if (first) head += (head.empty() ? "" : ",") + key;
      line += (line.empty() ? "" : ",") + cell;
    }
    out += line + "\n";
  }
  return head + "\n" + out;
}

// What is judged of a table, its budgets, and the smallest difference that it could find.
json json_of(const ReportTable& of) {
  json budgets = json::array(), families = json::array(), controls = json::array();
  for (const auto& [optimizer, list] : of.budgets)
    for (const Budget& budget : list)
      if (const Spread spread = spread_of(budget.losses); spread.n > 0)
        budgets.push_back({{"optimizer", optimizer},
                           {"times", budget.times},
                           {"loss", spread.mean},
                           {"loss_sd", number_or_null(spread.sd)},
                           {"seeds", spread.n}});
  for (const auto& [backbone, v, detectable] : of.families)
    families.push_back({{"compared_with", backbone},
                        {"detectable", number_or_null(detectable)},
                        {"critical", number_or_null(v.critical)},
                        {"arms_sd", number_or_null(v.arms_sd)},
                        {"compared_with_sd", number_or_null(v.backbone_sd)},
                        {"correlation", number_or_null(v.correlation)}});
  for (const ReportControl& one : of.controls)
    controls.push_back({{"architecture", one.name},
                        {"compared_with", one.control},
                        {"difference", number_or_null(one.verdict.difference)},
                        {"interval", number_or_null(one.verdict.interval)},
                        {"found", one.verdict.tested ? json(one.verdict.found) : json()}});
  return {{"table", of.table->planned.name},
          {"steps", of.table->comparison.runs[0].plan.steps},
          {"families", families},
          {"controls", controls},
          {"budgets", budgets}};
}

json rows_of(const std::vector<ReportTable>& report) {
  json out = json::array();
  for (const ReportTable& of : report)
    for (const ReportRow& row : of.rows) out.push_back(json_of(of, row));
  return out;
}

}  // namespace

std::string sweep_json(const std::vector<ReportTable>& report, const ReportOrigins& origins, const std::string& about) {
  json tables = json::array(), combinations = json::array();
  for (const ReportTable& of : report) {
    tables.push_back(json_of(of));
    for (const auto& [arm, one] : of.combined)
      combinations.push_back({{"table", of.table->planned.name},
                              {"combination", arm},
                              {"interaction", number_or_null(one.value)},
                              {"interval", number_or_null(one.interval)},
                              {"found", one.found},
                              {"detectable", number_or_null(one.detectable)}});
  }
  json results = {{"format", "crossply sweep"},
                  {"about", about},
                  {"cells", origins.cells},
                  {"tables", tables},
                  {"rows", rows_of(report)}};
  if (!combinations.empty()) results["combinations"] = combinations;
  return json_text_mended(results, 2) + "\n";
}

std::string sweep_csv(const std::vector<ReportTable>& report) { return csv_of(rows_of(report)); }

}  // namespace crossply
