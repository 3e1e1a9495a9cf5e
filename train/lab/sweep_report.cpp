#include "train/lab/sweep_report.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/curve.h"
#include "cli/dots.h"
#include "cli/format.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "eval/inside/analysis.h"
#include "eval/interactions.h"
#include "models/combined.h"
#include "models/disk/config_json.h"

namespace crossply {
namespace {

using nlohmann::json;
using Cells = std::vector<std::string>;

constexpr size_t screen = 80;  // columns
constexpr const char* about =
    "* **loss**: the mean test loss of the reported seeds. If learning rates were chosen, it is of the second half of "
    "the test set; the first half chose them. **deviation**: the standard deviation over seeds.\n"
    "* **difference**: from the first architecture, with half of its interval. All arms of a table are judged together "
    "by Dunnett's test: of twenty tables whose arms are all equal, one has a false alarm. If the first architecture "
    "has eight seeds or more, it has its own deviation; and if deviations of arms then differ more than chance allows, "
    "each arm has its own. Otherwise, where all arms have the same seeds, these are compared seed by seed. "
    "**found**: the interval leaves out 0.\n"
    "* **steps**: how many times the steps the first architecture needs for this loss. This is read from its runs with "
    "other numbers of steps, each trained to its end. In brackets: a 95 % interval; \"less\" or \"more\": it goes on "
    "beyond the budgets.\n"
    "* **per FLOP**, **per second**, **per memory**: steps divided by the arm's FLOPs, time and memory. Above 1, the "
    "arm is worth its cost.\n"
    "* **FLOPs**, **bytes moved**: of a token, forward and backward. Bytes count each tensor once for each op that "
    "reads or writes it. **time**: of a step, measured beside a step of the first architecture. **memory**: of the "
    "plan.\n"
    "* **lr**: the learning rate. (edge): the best one is the smallest or the largest that was tried. **basin**: a "
    "learning rate so many times larger or smaller costs 0.01 nats. **tried**: learning rates. A control has those of "
    "its architecture.\n"
    "* **further**: the mean of three more seeds, for the three best, which look better than they are. An arm whose "
    "spread is unlike the others' is judged with three more seeds. **pairs**: accuracy on minimal pairs.\n"
    "* An arm of which a seed diverged is not judged, and stands last.\n";

std::string four(double value) { return std::isfinite(value) ? format_number("%.4f", value) : "-"; }
std::string two(double value) { return std::isfinite(value) ? format_number("%.2f", value) : "-"; }
std::string times(double value) { return std::isfinite(value) ? format_number("%.2fx", value) : "-"; }

std::string difference_text(const ReportRow& row) {
  if (row.lost > 0) return str(row.lost, " of ", row.seeds, " diverged");
  if (row.done == 0 && row.arm.settled && !row.arm.works) return str("diverged at all ", row.tried, " learning rates");
  if (!row.judged) return "";
  if (!std::isfinite(row.verdict.difference)) return "-";
  const std::string size = format_number("%+.4f", row.verdict.difference);
  return row.verdict.tested ? size + " +- " + four(row.verdict.interval) : size;
}

std::string found_text(const ReportRow& row) {
  if (!row.judged || !row.verdict.tested) return "";
  return !row.verdict.found ? "no" : row.verdict.difference < 0 ? "lower" : "higher";
}

// "1.31 (1.20 to 1.45)", "1.31 (1.20 to more)", "more than 2".
std::string worth_text(const Worth& worth, double over) {
  if (!std::isfinite(worth.times) || !std::isfinite(over)) return "-";
  const std::string size = two(worth.times / over);
  if (worth.beyond != 0) return (worth.beyond > 0 ? "more than " : "less than ") + size;
  if (!std::isfinite(worth.low)) return size;
  return str(size, " (", worth.low_open ? "less" : two(worth.low / over), " to ",
             worth.high_open ? "more" : two(worth.high / over), ")");
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

// family: that judges the arm; null: none does.
ReportRow row_of(const SweepTable& table, const Arm& arm, const Family* family) {
  const Comparison& comparison = table.comparison;
  ReportRow row{arm, plan_training(comparison.runs[arm.seeds[0]].plan)};
  const ArmLosses losses = family != nullptr ? family->losses_of(arm) : losses_of(comparison, arm);
  const Spread spread = spread_of(losses.losses());
  row.losses = losses.losses(), row.loss = spread.mean, row.sd = spread.sd;
  row.seeds = std::ssize(arm.seeds) + (losses.unsteady ? std::ssize(arm.more) : 0);
  row.done = std::ssize(losses.seeds), row.lost = row.done - spread.n;
  row.tried = std::ranges::count_if(arm.sweep, [&](size_t i) { return !is_unfinished(comparison.runs[i]); });
  if (const auto time = table.times.find(arm.name); time != table.times.end()) row.time = time->second;
  if (!losses.unsteady) row.further = further_spread(comparison, arm).mean;
  row.pairs = share_of_pairs(comparison, arm);
  if (family != nullptr) row.judged = true, row.verdict = family->of(arm);
  return row;
}

// --- the lines in front of a table -------------------------------------------------------------------------------

std::string settings_of(const SweepTable& table) {
  const TrainPlan& plan = table.comparison.runs[0].plan;
  const int64_t L = plan.config.num_hidden_layers;
  return str(L, L == 1 ? " layer" : " layers", " of width ", plan.config.hidden_size, ", ", plan.steps, " steps of ",
             plan.batch * plan.accumulate, " sequences of ", plan.data.seq_len, " tokens, ",
             format_count(plan.steps * plan.tokens_per_step()), " tokens in all");
}

std::string families_text(const std::vector<ReportFamily>& families) {
  std::string out;
  for (const auto& [backbone, v, detectable] : families) {
    if (!std::isfinite(detectable)) continue;
    out += str("Against ", backbone, ", 80 % of repeats would find a difference of ", four(detectable), ": ",
               v.fewest_seeds(), v.fewest_seeds() == 1 ? " seed" : " seeds", " of each arm, ", v.backbone_seeds, " of ",
               backbone, ", standard deviations ", four(v.arms_sd), " and ", four(v.backbone_sd),
               v.blocks ? " after the means of arms and of seeds were taken off" : "", ", critical value ",
               format_number("%.3f", v.critical));
    if (std::isfinite(v.correlation)) out += ", losses of one seed correlate by " + two(v.correlation);
    out += ".\n";
    if (std::isfinite(v.prior_degrees))
      out += "The arms' deviations differ more than chance allows: each has its own, moderated by all others.\n";
  }
  return out;
}

// Where nothing is judged, why.
std::string lost_backbones(const std::vector<ReportRow>& rows) {
  std::string out;
  for (const ReportRow& row : rows)
    if (row.arm.name == row.backbone && row.lost > 0)
      out += str(row.lost, " of ", row.seeds, " seeds of ", row.arm.name,
                 " diverged: nothing can be judged against it. Lower its learning rates.\n");
  return out;
}

std::string controls_text(const std::vector<ReportControl>& controls) {
  std::string out;
  for (const ReportControl& one : controls) out += str("* ", format_markdown(one.name), ": ", one.words, "\n");
  return out.empty()
             ? ""
             : "Against the same with frozen routers and scalars, which shows what their learning is worth:\n\n" + out +
                   "\n";
}

// --- combinations --------------------------------------------------------------------------------------------------

// Those among the arms whose parts and backbone are among them, too, with the same options, and have ended.
std::vector<Combination> combinations_among(const SweepTable& table, const std::vector<const Arm*>& arms) {
  const auto config = [&](const Arm* arm) -> const Config& { return table.comparison.runs[arm->seeds[0]].plan.config; };
  const auto place_of = [&](const Config& wanted) {
    const json text = to_json(wanted);
    return static_cast<size_t>(
        std::ranges::find_if(arms, [&](const Arm* arm) { return to_json(config(arm)) == text; }) - arms.begin());
  };
  std::vector<Combination> out;
  for (size_t i = 0; i < arms.size(); ++i) {
    const Config& whole = config(arms[i]);
    if (!is_combined(whole.arch)) continue;
    Config plain = whole;
    plain.arch = config(arms[0]).arch, plain.options = config(arms[0]).options;
    Combination one{i, {}};
    for (const std::string& part : parts_of(whole.arch)) one.parts.push_back(place_of(part_config(whole, part)));
    std::vector<size_t> needed = one.parts;
    needed.insert(needed.end(), {i, 0});
    const auto has_ended = [&](size_t place) {
      return place < arms.size() && std::ranges::none_of(arms[place]->seeds, [&](size_t k) {
               return is_unfinished(table.comparison.runs[k]);
             });
    };
    if (place_of(plain) == 0 && std::ranges::all_of(needed, has_ended)) out.push_back(one);
  }
  return out;
}

// Of each optimizer, whose first architecture comes first.
std::vector<CombinedArm> combined_arms(const SweepTable& table) {
  const std::vector<Arm> arms = arms_of(table.comparison);
  std::vector<CombinedArm> out;
  for (const std::string& optimizer : optimizers_of(table.comparison)) {
    std::vector<const Arm*> list;
    for (const Arm& arm : arms)
      if (arm.optimizer == optimizer && arm.arch.find('@') == std::string::npos) list.push_back(&arm);
    std::vector<ArmLosses> losses;
    for (const Arm* arm : list) losses.push_back(losses_of(table.comparison, *arm));
    const std::vector<Combination> combinations = combinations_among(table, list);
    const std::vector<Interaction> found = interactions(losses, combinations);
    for (size_t i = 0; i < found.size(); ++i)
      if (found[i].tested) out.push_back({list[combinations[i].whole]->name, found[i]});
  }
  return out;
}

std::string interactions_text(const std::vector<CombinedArm>& arms) {
  if (arms.empty()) return "";
  std::string out =
      "Is the gain of a combination the sum of its parts' gains? The interaction is its loss less those of its parts, "
      "plus the first architecture's for each part but one. Above 0 the parts do the same work in part, below 0 they "
      "need each other. All interactions are judged together.\n\n" +
      format_markdown_row({"combination", "interaction", "found", "80 % would find"}) + "|---|---|---|---|\n";
  for (const auto& [name, one] : arms)
    out += format_markdown_row({name, format_number("%+.4f", one.value) + " +- " + four(one.interval),
                                !one.found      ? "no"
                                : one.value < 0 ? "below 0"
                                                : "above 0",
                                four(one.detectable)});
  return out + "\n";
}

std::string figure_of_interactions(const std::string& title, const std::vector<CombinedArm>& arms) {
  DotChart chart{title + ": interactions",
                 "nats (left: the parts need each other; right: they do the same work)",
                 {{"", {}}},
                 false,
                 true};
  for (const auto& [name, one] : arms) chart.groups[0].rows.push_back({name, {one.value}, one.interval, one.value});
  return dots_svg(chart);
}

// --- the page ----------------------------------------------------------------------------------------------------

// A column of the page: its head, and its cell in a row.
struct Column {
  const char* head;
  std::function<std::string(const ReportRow& row, const Costs& cost)> cell;
};

// Those in which there is something to see.
std::string markdown_table(const std::vector<ReportRow>& rows, const std::vector<Column>& columns) {
  std::vector<Cells> lines(rows.size() + 1);
  for (const Column& column : columns) {
    Cells cells = {column.head};
    for (const ReportRow& row : rows) cells.push_back(column.cell(row, costs_of(rows, row)));
    if (std::all_of(cells.begin() + 1, cells.end(), [](const std::string& cell) { return cell == "-"; })) continue;
    for (size_t i = 0; i < cells.size(); ++i) lines[i].push_back(cells[i]);
  }
  std::string out = format_markdown_row(lines[0]) + "|";
  for (size_t i = 0; i < lines[0].size(); ++i) out += "---|";
  out += "\n";
  for (size_t i = 1; i < lines.size(); ++i) out += format_markdown_row(lines[i]);
  return out + "\n";
}

std::string losses_table(const std::vector<ReportRow>& rows) {
  using R = const ReportRow&;
  using C = const Costs&;
  return markdown_table(
      rows,
      {{"architecture", [](R row, C) { return row.arm.name; }},
       {"loss", [](R row, C) { return four(row.loss); }},
       {"deviation", [](R row, C) { return four(row.sd); }},
       {"difference", [](R row, C) { return difference_text(row); }},
       {"found", [](R row, C) { return found_text(row); }},
       {"steps", [](R row, C) { return worth_text(row.worth, 1); }},
       {"per FLOP", [](R row, C cost) { return worth_text(row.worth, cost.flops); }},
       {"per second", [](R row, C cost) { return worth_text(row.worth, cost.seconds); }},
       {"per memory", [](R row, C cost) { return worth_text(row.worth, cost.memory); }},
       {"seeds", [](R row, C) { return str(row.done - row.lost, " of ", row.seeds); }},
       {"further", [](R row, C) { return four(row.further); }},
       {"pairs", [](R row, C) { return std::isfinite(row.pairs) ? format_number("%.1f %%", 100 * row.pairs) : "-"; }}});
}

std::string costs_table(const std::vector<ReportRow>& rows) {
  using R = const ReportRow&;
  using C = const Costs&;
  return markdown_table(rows,
                        {{"architecture", [](R row, C) { return row.arm.name; }},
                         {"parameters", [](R row, C) { return format_count(row.planned.accounting.parameters); }},
                         {"FLOPs", [](R, C cost) { return times(cost.flops); }},
                         {"bytes moved", [](R, C cost) { return times(cost.bytes); }},
                         {"time", [](R, C cost) { return times(cost.seconds); }},
                         {"memory", [](R, C cost) { return times(cost.memory); }},
                         {"lr", [](R row, C) { return rates_text(row.arm) + (row.arm.at_edge ? " (edge)" : ""); }},
                         {"basin", [](R row, C) { return basins_text(row.arm); }},
                         {"tried", [](R row, C) { return row.tried == 0 ? "-" : str(row.tried); }}});
}

std::string budgets_text(const std::map<std::string, std::vector<Budget>>& of) {
  std::string out;
  for (const auto& [optimizer, budgets] : of)
    for (const Budget& budget : budgets) {
      const Spread spread = spread_of(budget.losses);
      if (spread.n > 0)
        out += format_markdown_row(
            {optimizer, format_number("%g", budget.times), four(spread.mean), four(spread.sd), str(spread.n)});
    }
  return out.empty() ? ""
                     : format_markdown_row({"optimizer", "times the steps", "loss", "deviation", "seeds"}) +
                           "|---|---|---|---|---|\n" + out + "\n";
}

// Differences from the first architecture, a dot for each seed; the interval is around their mean.
std::string figure_of(const SweepTable& table, const std::vector<ReportRow>& rows) {
  DotChart chart{table.planned.name + ": " + settings_of(table),
                 "difference of test loss, nats (left: better); mean, interval, one dot per seed",
                 {{"", {}}},
                 false,
                 true};
  for (const ReportRow& row : rows) {
    if (!row.judged || row.done == row.lost) continue;
    DotRow dots{row.arm.name, {}, row.verdict.interval, row.verdict.difference};
    for (const double loss : row.losses) dots.values.push_back(loss - backbone_of(rows, row).loss);
    chart.groups[0].rows.push_back(dots);
  }
  return dots_svg(chart);
}

Curve curve_of_budgets(const std::string& name, const std::vector<Budget>& budgets, double steps) {
  Curve curve{name, {}, {}};
  for (const Budget& budget : budgets) {
    const Spread spread = spread_of(budget.losses);
    if (spread.n == 0) continue;
    curve.x.push_back(budget.times * steps), curve.y.push_back(spread.mean);
    const double sd = std::isfinite(spread.sd) ? spread.sd : 0;
    curve.low.push_back(spread.mean - sd), curve.high.push_back(spread.mean + sd);
  }
  curve.marks_x = curve.x, curve.marks_y = curve.y;
  return curve;
}

// The backbone's losses by steps, and dashed the losses of the other arms.
std::string figure_of_budgets(const SweepTable& table, const std::map<std::string, std::vector<Budget>>& of,
                              const std::vector<ReportRow>& rows) {
  const auto steps = static_cast<double>(table.comparison.runs[0].plan.steps);
  const std::string& backbone = table.comparison.runs[0].choice.text;
  std::vector<Curve> curves;
  for (const auto& [optimizer, budgets] : of)
    curves.push_back(curve_of_budgets(of.size() > 1 ? backbone + " " + optimizer : backbone, budgets, steps));
  const Curve first = curves[0];
  for (const ReportRow& row : rows) {
    if (!row.judged || row.lost > 0 || !std::isfinite(row.loss) || first.x.empty()) continue;
    curves.push_back({row.arm.name, {first.x.front(), first.x.back()}, {row.loss, row.loss}});
    curves.back().reference = true;
  }
  return curve_svg(table.planned.name + ": what steps are worth", "steps",
                   {{"test loss, mean over seeds in a band of one standard deviation; dashed: the others",
                     "numbers of steps that were trained", curves}},
                   true);
}

// The lowest loss first, arms that lost a seed last; arms of which nothing is known are left out.
std::vector<ReportRow> rows_of(const SweepTable& table, const std::vector<Arm>& arms,
                               const std::vector<Family>& families,
                               const std::map<std::string, std::vector<Budget>>& budgets) {
  std::vector<ReportRow> rows;
  for (const Arm& arm : arms) {
    const auto family = std::ranges::find_if(families, [&](const Family& one) { return one.has(arm); });
    ReportRow row = row_of(table, arm, family == families.end() ? nullptr : &*family);
    if (row.done == 0 && row.tried == 0) continue;
    for (const Arm& other : arms)
      if (other.arch == arms[0].arch && other.optimizer == arm.optimizer) row.backbone = other.name;
    if (row.lost == 0) row.worth = worth_of(budgets.at(arm.optimizer), row.losses);
    if (arm.name == row.backbone && std::isfinite(row.worth.times)) row.worth = {1};
    rows.push_back(std::move(row));
  }
  std::ranges::stable_sort(
      rows, {}, [](const ReportRow& row) { return row.lost > 0 || std::isnan(row.loss) ? INFINITY : row.loss; });
  return rows;
}

// As many columns as fit on a screen, three at least.
std::string fitting_table(std::vector<Cells> rows) {
  while (true) {
    const std::string text = format_table(rows);
    if (text.find('\n') <= screen || rows[0].size() <= 3) return text;
    for (Cells& row : rows) row.pop_back();
  }
}

}  // namespace

const ReportRow& backbone_of(const std::vector<ReportRow>& rows, const ReportRow& row) {
  const auto found = std::ranges::find_if(rows, [&](const ReportRow& one) { return one.arm.name == row.backbone; });
  return found == rows.end() ? row : *found;
}

Costs costs_of(const std::vector<ReportRow>& rows, const ReportRow& row) {
  const ReportRow& backbone = backbone_of(rows, row);
  const auto ratio = [](double a, double b) { return b > 0 ? a / b : NAN; };
  const bool timed = row.time.seconds > 0, same = row.arm.arch == backbone.arm.arch;  // whose own ratio is noise
  return {ratio(row.planned.accounting.flops_per_token, backbone.planned.accounting.flops_per_token),
          ratio(row.planned.bytes_per_token, backbone.planned.bytes_per_token),
          !timed ? NAN
          : same ? 1
                 : row.time.ratio,
          ratio(static_cast<double>(row.planned.memory), static_cast<double>(backbone.planned.memory))};
}

std::vector<ReportTable> report_of(const std::vector<SweepTable>& tables) {
  std::vector<ReportTable> out;
  for (const SweepTable& table : tables) {
    if (!table.planned.of.empty()) continue;
    const std::vector<Arm> arms = arms_of(table.comparison);
    const std::vector<Family> families = families_of_architectures(table.comparison, arms);
    ReportTable one{&table, {}, {}, {}, {}, combined_arms(table)};
    for (const std::string& optimizer : optimizers_of(table.comparison))
      one.budgets[optimizer] = budgets_of(tables, table, optimizer);
    one.rows = rows_of(table, arms, families, one.budgets);
    for (const Family& family : families)
      one.families.push_back({family.baseline->name, family.verdict, detectable_difference(family.verdict)});
    for (const Family& family : families_of_controls(table.comparison, arms))
      one.controls.push_back({family.arms[0]->name, family.baseline->name, family.verdict.arms[0],
                              verdict_text(table.comparison, family, *family.arms[0])});
    out.push_back(std::move(one));
  }
  return out;
}

std::string sweep_summary(const std::vector<ReportTable>& report) {
  std::string out;
  for (const auto& [table, budgets, rows, families, controls, combined] : report) {
    std::vector<Cells> cells = {{"architecture", "loss", "difference", "found", "steps", "per FLOP", "per second"}};
    for (const ReportRow& row : rows) {
      const Costs cost = costs_of(rows, row);
      const auto short_worth = [&](double over) {
        const double size = row.worth.times / over;
        if (!std::isfinite(size)) return std::string("-");
        return (row.worth.beyond > 0 ? ">" : row.worth.beyond < 0 ? "<" : "") + two(size);
      };
      cells.push_back({row.arm.name, four(row.loss), difference_text(row), found_text(row), short_worth(1),
                       short_worth(cost.flops), short_worth(cost.seconds)});
    }
    out += "\n" + wrap(str(table->planned.name, ": ", settings_of(*table)), screen, 0) + "\n" +
           wrap(families_text(families) + lost_backbones(rows), screen, 0) +
           (rows.empty() ? "nothing has ended yet\n" : fitting_table(cells));
  }
  return out;
}

// Among the rows of its optimizer that are no controls and no twins of others; "" of those.
std::string number_of(const std::vector<ReportRow>& rows, const ReportRow& row) {
  const auto counts = [&](const ReportRow& one) {
    return one.arm.optimizer == row.arm.optimizer && one.arm.arch.find('@') == std::string::npos;
  };
  if (!counts(row)) return "";
  const auto before = std::count_if(rows.data(), &row, counts);
  return str(" is number ", before + 1, " of ", std::ranges::count_if(rows, counts), ", with a loss of ");
}

std::string place_of(const ReportTable& of, const std::string& arch) {
  const std::vector<ReportRow>& rows = of.rows;
  std::string out;
  for (const ReportRow& row : rows) {
    if (row.arm.arch != arch) continue;
    const Costs cost = costs_of(rows, row);
    const std::string number = number_of(rows, row);
    out += str(out.empty() ? "" : "\n", of.table->planned.name, ": ", row.arm.name,
               number.empty() ? " has a loss of " : number, four(row.loss));
    if (row.judged) out += ", a difference of " + difference_text(row);
    if (row.verdict.tested) out += row.verdict.found ? " (found)" : " (not found)";
    if (std::isfinite(row.worth.times)) out += "; worth " + worth_text(row.worth, 1) + " times the steps";
    out += "; " + times(cost.flops) + " the FLOPs, ";
    if (std::isfinite(cost.seconds)) out += times(cost.seconds) + " the time, ";
    out += times(cost.memory) + " the memory";
  }
  return out;
}

void write_sweep_report(const std::vector<ReportTable>& report, const std::string& out, const ReportOrigins& origins) {
  std::string page = "# Sweep\n\nCells by CPU and commit:\n\n";
  for (const auto& [origin, cells] : origins.cells) page += str("* ", origin, ": ", cells, "\n");
  page += origins.notes + "\n";
  std::string waiting;
  for (const auto& [table, budgets, rows, families, controls, combined] : report) {
    const std::string& name = table->planned.name;
    if (rows.empty()) {
      waiting += (waiting.empty() ? "" : ", ") + name;
      continue;
    }
    page += str("## ", name, "\n\n", settings_of(*table), ".\n", families_text(families), lost_backbones(rows), "\n");
    const auto figure = [&](const char* what, const std::string& file, const std::string& svg) {
      page += str("![", what, "](", file, ".svg)\n\n");
      write_file_atomically(out + "/" + file + ".svg", svg);
    };
    if (std::ranges::any_of(rows, &ReportRow::judged)) figure("differences", name, figure_of(*table, rows));
    page += losses_table(rows) + costs_table(rows) + controls_text(controls) + interactions_text(combined);
    if (!combined.empty()) figure("interactions", name + "-interactions", figure_of_interactions(name, combined));
    if (budgets.begin()->second.size() > 1) {
      figure("steps", name + "-steps", figure_of_budgets(*table, budgets, rows));
      page += budgets_text(budgets);
    }
  }
  if (!waiting.empty()) page += "Tables of which nothing has ended yet: " + waiting + ".\n\n";
  write_file_atomically(out + "/report.md", page + "## How to read this page\n\n" + about);
  write_file_atomically(out + "/results.json", sweep_json(report, origins, about));
  write_file_atomically(out + "/results.csv", sweep_csv(report));
}

}  // namespace crossply
