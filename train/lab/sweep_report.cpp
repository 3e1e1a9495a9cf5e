#include "train/lab/sweep_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/curve.h"
#include "cli/dots.h"
#include "cli/format.h"
#include "engine/io/file.h"
#include "engine/io/json.h"

namespace crossply {
namespace {

using nlohmann::json;
using Cells = std::vector<std::string>;

constexpr const char* about =
    "loss: mean test loss over the reported seeds, of the half of the test set by which nothing was chosen. "
    "difference: from the first architecture; +- half of an interval by which all arms of a table together raise a "
    "false alarm once in twenty tables (Dunnett's test; by Welch's where an arm's spread is unlike the others'). "
    "steps: "
    "the first architecture would need so many times the steps for this loss, by its own runs of other lengths, each "
    "trained to its end; in brackets 95 % of repeats with seeds drawn anew. a FLOP, a second, a byte of memory: the "
    "same over the arm's cost, so that above 1 it is worth it. FLOPs and bytes: a token, forward and backward, of the "
    "tape; bytes: every tensor that an op names, once. time: of a step, one beside the other on an idle machine. "
    "tried: "
    "learning rates. basin: the rate times that, or by that, costs 0.01 nats. further: three seeds more of the best "
    "three, which look better than they are, and of those whose spread is unlike the others'.";

std::string four(double value) { return std::isfinite(value) ? format_number("%.4f", value) : "-"; }
std::string two(double value) { return std::isfinite(value) ? format_number("%.2f", value) : "-"; }
std::string times(double value) { return std::isfinite(value) ? format_number("%.2fx", value) : "-"; }

std::string difference_text(const ReportRow& row) {
  if (row.lost > 0) return str(row.lost, " of ", row.arm.seeds.size(), " diverged");
  if (!row.judged) return "";
  if (!std::isfinite(row.verdict.difference)) return "-";
  const std::string size = format_number("%+.4f", row.verdict.difference);
  return row.verdict.tested ? size + " +- " + four(row.verdict.interval) : size;
}

std::string found_text(const ReportRow& row) {
  if (!row.judged || !row.verdict.tested) return "";
  return !row.verdict.found ? "no" : row.verdict.difference < 0 ? "lower" : "higher";
}

// "1.31 (1.20 to 1.45)", "more than 2".
std::string worth_text(const Worth& worth, double over) {
  if (!std::isfinite(worth.times) || !std::isfinite(over)) return "-";
  const std::string size = two(worth.times / over);
  if (worth.beyond != 0) return (worth.beyond > 0 ? "more than " : "less than ") + size;
  return std::isfinite(worth.low) ? str(size, " (", two(worth.low / over), " to ", two(worth.high / over), ")") : size;
}

struct Costs {
  double flops, bytes, seconds, memory;
};
Costs costs_of(const ReportRow& row, const ReportRow& backbone) {
  const auto ratio = [](double a, double b) { return b > 0 ? a / b : NAN; };
  return {ratio(row.planned.accounting.flops_per_token, backbone.planned.accounting.flops_per_token),
          ratio(row.planned.bytes_per_token, backbone.planned.bytes_per_token),
          row.time.seconds > 0 ? row.time.ratio : NAN,
          ratio(static_cast<double>(row.planned.memory), static_cast<double>(backbone.planned.memory))};
}

const ReportRow& backbone_of(const std::vector<ReportRow>& rows, const ReportRow& row) {
  const auto found = std::ranges::find_if(rows, [&](const ReportRow& one) { return one.arm.name == row.backbone; });
  return found == rows.end() ? row : *found;
}

double share_of_pairs(const Comparison& comparison, const Arm& arm) {
  double sum = 0;
  int64_t n = 0;
  for (const size_t i : arm.seeds) {
    const std::string& pairs = comparison.runs[i].pairs;
    const json all = pairs.empty() ? json() : known_json(pairs);
    if (!all.is_object() || !all.contains("right") || !all.contains("pairs")) continue;
    sum += all["right"].get<double>() / all["pairs"].get<double>(), ++n;
  }
  return n > 0 ? sum / static_cast<double>(n) : NAN;
}

ReportRow row_of(const std::vector<SweepTable>& tables, const SweepTable& table, const Arm& arm) {
  const Comparison& comparison = table.comparison;
  ReportRow row{arm, plan_training(comparison.runs[arm.seeds[0]].plan)};
  const ArmLosses losses = losses_of(comparison, arm);
  const Spread spread = spread_of(losses.losses());
  row.loss = spread.mean, row.sd = spread.sd;
  row.done = std::ssize(losses.seeds), row.lost = row.done - spread.n;
  row.tried = std::ranges::count_if(arm.sweep, [&](size_t i) { return !is_unfinished(comparison.runs[i]); });
  row.worth = worth_of(budgets_of(tables, table), losses.losses());
  if (const auto time = table.times.find(arm.arch); time != table.times.end()) row.time = time->second;
  Arm further = arm;
  further.seeds = arm.more;
  row.further = spread_of(losses_of(comparison, further).losses()).mean;
  row.pairs = share_of_pairs(comparison, arm);
  return row;
}

std::vector<const SweepTable*> whole_tables(const std::vector<SweepTable>& tables) {
  std::vector<const SweepTable*> out;
  for (const SweepTable& table : tables)
    if (table.planned.of.empty()) out.push_back(&table);
  return out;
}

// --- the lines in front of a table -------------------------------------------------------------------------------

std::string settings_of(const SweepTable& table) {
  const TrainPlan& plan = table.comparison.runs[0].plan;
  const int64_t L = plan.config.num_hidden_layers;
  return str(L, L == 1 ? " layer" : " layers", " of width ", plan.config.hidden_size, ", ", plan.steps, " steps of ",
             plan.batch * plan.accumulate, " sequences of ", plan.data.seq_len, " tokens, ",
             format_count(plan.steps * plan.tokens_per_step()), " tokens in all");
}

std::string families_text(const SweepTable& table) {
  std::string out;
  const std::vector<Arm> arms = arms_of(table.comparison);
  for (const Family& family : families_of_architectures(table.comparison, arms)) {
    const FamilyVerdict& v = family.verdict;
    const double seen = detectable_difference(v);
    if (!std::isfinite(seen)) continue;
    out += str("Against ", family.yardstick->name, ": a difference of ", four(seen),
               " would be found in 80 % of repeats with ", v.fewest_seeds, " seeds an arm and ", v.backbone_seeds,
               " of ", family.yardstick->name, "; deviations ", four(v.backbone_sd), " and ", four(v.arms_sd),
               v.blocks ? " of what arms and seeds leave" : "", "; critical value ", format_number("%.3f", v.critical));
    if (std::isfinite(v.correlation)) out += "; losses of one seed correlate by " + two(v.correlation);
    out += ".\n";
  }
  return out;
}

std::string controls_text(const SweepTable& table) {
  std::string out;
  const std::vector<Arm> arms = arms_of(table.comparison);
  for (const Family& family : families_of_controls(table.comparison, arms)) {
    const Arm& arm = *family.arms[0];
    out += str("* ", format_markdown(arm.name), ": ", verdict_text(table.comparison, family, arm), "\n");
  }
  return out.empty() ? ""
                     : "What the routers' learning is worth, against the same with frozen routers:\n\n" + out + "\n";
}

// --- the page ----------------------------------------------------------------------------------------------------

std::string markdown_table(const std::vector<ReportRow>& rows) {
  const Cells head = {"architecture", "loss",   "deviation",  "difference", "found",   "steps", "a FLOP",
                      "a second",     "a byte", "parameters", "FLOPs",      "bytes",   "time",  "memory",
                      "lr",           "basin",  "tried",      "seeds",      "further", "pairs"};
  std::string out = format_markdown_row(head) + "|";
  for (size_t i = 0; i < head.size(); ++i) out += "---|";
  out += "\n";
  for (const ReportRow& row : rows) {
    const Costs cost = costs_of(row, backbone_of(rows, row));
    out += format_markdown_row({row.arm.name,
                                four(row.loss),
                                four(row.sd),
                                difference_text(row),
                                found_text(row),
                                worth_text(row.worth, 1),
                                worth_text(row.worth, cost.flops),
                                worth_text(row.worth, cost.seconds),
                                worth_text(row.worth, cost.memory),
                                format_count(row.planned.accounting.parameters),
                                times(cost.flops),
                                times(cost.bytes),
                                times(cost.seconds),
                                times(cost.memory),
                                rates_text(row.arm) + (row.arm.at_edge ? " (edge)" : ""),
                                basins_text(row.arm),
                                str(row.tried),
                                str(row.done - row.lost, " of ", row.arm.seeds.size()),
                                four(row.further),
                                std::isfinite(row.pairs) ? format_number("%.1f %%", 100 * row.pairs) : "-"});
  }
  return out + "\n";
}

std::string budgets_text(const std::vector<SweepTable>& tables, const SweepTable& table) {
  std::string out;
  for (const Budget& budget : budgets_of(tables, table)) {
    const Spread spread = spread_of(budget.losses);
    if (spread.n > 0)
      out +=
          format_markdown_row({format_number("%g", budget.times), four(spread.mean), four(spread.sd), str(spread.n)});
  }
  return out.empty() ? ""
                     : format_markdown_row({"times the steps", "loss", "deviation", "seeds"}) + "|---|---|---|---|\n" +
                           out + "\n";
}

// Differences from the first architecture, a dot for each seed; the interval is around their mean.
std::string picture_of(const SweepTable& table, const std::vector<ReportRow>& rows) {
  DotChart chart{table.planned.name + ": " + settings_of(table),
                 "difference of test loss, nats (left: better); mean, interval, one dot per seed",
                 {{"", {}}},
                 false,
                 true};
  for (const ReportRow& row : rows) {
    if (!row.judged || row.done == row.lost) continue;
    DotRow dots{row.arm.name, {}, row.verdict.interval, row.verdict.difference};
    const double yardstick = row.loss - row.verdict.difference;
    for (const double loss : losses_of(table.comparison, row.arm).losses()) dots.values.push_back(loss - yardstick);
    chart.groups[0].rows.push_back(dots);
  }
  return dots_svg(chart);
}

std::string picture_of_budgets(const std::vector<SweepTable>& tables, const SweepTable& table) {
  Curve curve{table.comparison.runs[0].choice.text, {}, {}};
  std::vector<Budget> budgets = budgets_of(tables, table);
  std::ranges::sort(budgets, {}, &Budget::times);
  const auto steps = static_cast<double>(table.comparison.runs[0].plan.steps);
  for (const Budget& budget : budgets) {
    const Spread spread = spread_of(budget.losses);
    if (spread.n == 0) continue;
    curve.x.push_back(budget.times * steps), curve.y.push_back(spread.mean);
    const double sd = std::isfinite(spread.sd) ? spread.sd : 0;
    curve.low.push_back(spread.mean - sd), curve.high.push_back(spread.mean + sd);
  }
  curve.marks_x = curve.x, curve.marks_y = curve.y;
  return curve_svg(table.planned.name + ": what steps are worth", "steps", {{"test loss", "", {curve}}}, true);
}

json json_of(const SweepTable& table, const ReportRow& row, const ReportRow& backbone) {
  const Costs cost = costs_of(row, backbone);
  return {{"table", table.planned.name},
          {"architecture", row.arm.arch},
          {"optimizer", row.arm.optimizer},
          {"loss", number_or_null(row.loss)},
          {"loss_sd", number_or_null(row.sd)},
          {"seeds", row.arm.seeds.size()},
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
          {"further_loss", number_or_null(row.further)},
          {"minimal_pairs", number_or_null(row.pairs)}};
}

std::string csv_of(const json& rows) {
  std::string out, head;
  for (const json& row : rows) {
    std::string line;
    const bool first = out.empty();
    for (const auto& [key, value] : row.items()) {
      std::string cell = value.is_string() ? value.get<std::string>() : value.is_null() ? "" : json_text(value);
      if (cell.find_first_of(",\"\n") != std::string::npos) {
        for (size_t at = 0; (at = cell.find('"', at)) != std::string::npos; at += 2) cell.insert(at, 1, '"');
        cell = '"' + cell + '"';
      }
      if (first) head += (head.empty() ? "" : ",") + key;
      line += (line.empty() ? "" : ",") + cell;
    }
    out += line + "\n";
  }
  return head + "\n" + out;
}

}  // namespace

std::vector<ReportRow> rows_of(const std::vector<SweepTable>& tables, const SweepTable& table) {
  const std::vector<Arm> arms = arms_of(table.comparison);
  const std::vector<Family> families = families_of_architectures(table.comparison, arms);
  std::vector<ReportRow> rows;
  for (const Arm& arm : arms) {
    ReportRow row = row_of(tables, table, arm);
    if (row.done == 0 && row.tried == 0) continue;
    for (const Arm& other : arms)
      if (other.arch == arms[0].arch && other.optimizer == arm.optimizer) row.backbone = other.name;
    for (const Family& family : families)
      if (std::ranges::any_of(family.arms, [&](const Arm* one) { return one->name == arm.name; }))
        row.judged = true, row.verdict = family.of(arm);
    rows.push_back(std::move(row));
  }
  std::ranges::stable_sort(rows, {}, [](const ReportRow& row) { return std::isnan(row.loss) ? INFINITY : row.loss; });
  return rows;
}

std::string sweep_summary(const std::vector<SweepTable>& tables) {
  std::string out;
  for (const SweepTable* table : whole_tables(tables)) {
    const std::vector<ReportRow> rows = rows_of(tables, *table);
    std::vector<Cells> cells = {{"architecture", "loss", "difference", "found", "steps", "a FLOP", "a second"}};
    for (const ReportRow& row : rows) {
      const Costs cost = costs_of(row, backbone_of(rows, row));
      const auto short_worth = [&](double over) {
        const double size = row.worth.times / over;
        return (row.worth.beyond > 0 ? ">" : row.worth.beyond < 0 ? "<" : "") + two(size);
      };
      cells.push_back({row.arm.name, four(row.loss), difference_text(row), found_text(row), short_worth(1),
                       short_worth(cost.flops), short_worth(cost.seconds)});
    }
    out += str("\n", table->planned.name, ": ", settings_of(*table), "\n") + wrap(families_text(*table), 80, 0) +
           (rows.empty() ? "nothing has ended yet\n" : format_table(cells));
  }
  return out;
}

std::string place_of(const std::vector<SweepTable>& tables, const SweepTable& table, const std::string& arch) {
  const std::vector<ReportRow> rows = rows_of(tables, table);
  std::string out;
  for (size_t i = 0; i < rows.size(); ++i) {
    const ReportRow& row = rows[i];
    if (row.arm.arch != arch) continue;
    const Costs cost = costs_of(row, backbone_of(rows, row));
    out += str(table.planned.name, ": ", row.arm.name, " is number ", i + 1, " of ", rows.size(), ", at ",
               four(row.loss), ", ", difference_text(row), row.verdict.found ? ", which is more than chance" : "",
               "; worth ", worth_text(row.worth, 1), " times the steps, for ", times(cost.flops), " the FLOPs, ",
               times(cost.seconds), " the time, ", times(cost.memory), " the memory\n");
  }
  return out;
}

void write_sweep_report(const std::vector<SweepTable>& tables, const std::string& out, const std::string& notes) {
  std::string page = "# Sweep\n\n" + notes + std::string(about) + "\n\n";
  json all = json::array();
  for (const SweepTable* table : whole_tables(tables)) {
    const std::vector<ReportRow> rows = rows_of(tables, *table);
    const std::string& name = table->planned.name;
    page += str("## ", name, "\n\n", settings_of(*table), ".\n", families_text(*table), "\n![differences](", name,
                ".svg)\n\n") +
            markdown_table(rows) + controls_text(*table);
    write_file_atomically(out + "/" + name + ".svg", picture_of(*table, rows));
    if (budgets_of(tables, *table).size() > 1) {
      page += str("![steps](", name, "-steps.svg)\n\n") + budgets_text(tables, *table);
      write_file_atomically(out + "/" + name + "-steps.svg", picture_of_budgets(tables, *table));
    }
    for (const ReportRow& row : rows) all.push_back(json_of(*table, row, backbone_of(rows, row)));
  }
  write_file_atomically(out + "/report.md", page);
  write_file_atomically(
      out + "/results.json",
      json_text_mended(json{{"format", "crossply sweep"}, {"about", about}, {"rows", all}}, 2) + "\n");
  write_file_atomically(out + "/results.csv", csv_of(all));
}

}  // namespace crossply
