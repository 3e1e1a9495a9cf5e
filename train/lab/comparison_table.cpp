// What a comparison shows people: the table on the terminal, results.md, compare.svg.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/svg.h"
#include "data/source.h"
#include "engine/device.h"
#include "engine/io/file.h"
#include "train/lab/comparison.h"

namespace crossply {
namespace {

// Whole below `exact_below`, then with four digits: 66,496 and 124.4M.
std::string short_count(int64_t count, int64_t exact_below) {
  if (count < exact_below) return format_count(count);
  const double value = static_cast<double>(count);
  const double unit = value >= 1e9 ? 1e9 : value >= 1e6 ? 1e6 : 1e3;
  return format_number("%.4g", value / unit) + (unit == 1e9 ? "G" : unit == 1e6 ? "M" : "k");
}

// Three digits behind the point, four where there are no others: 2.413, 0.0741.
std::string loss_text(double loss) {
  return format_number(std::abs(loss) >= 1000 ? "%.4g" : std::abs(loss) < 0.1 ? "%.4f" : "%.3f", loss);
}
std::string four_digits(double loss) { return format_number("%.4f", loss); }
std::string percent_text(double share) { return format_number("%.1f %%", 100 * share); }
std::string ratio_text(double ratio) { return std::isfinite(ratio) ? format_number("%.2fx", ratio) : "-"; }

using Text = std::string (*)(double);

// With its step, where that is not the run's last: "0.640 @1800".
std::string measured_text(const ComparedRun& run, const Measured& number, Text text) {
  if (!std::isfinite(number.value)) return "-";
  return text(number.value) + (is_done(run) ? "" : str(" @", number.step));
}

// A comparison and its arms, of which the first is the baseline. several: seeds or rates.
struct View {
  explicit View(const Comparison& c)
      : comparison(c), arms(arms_of(c)), seeds(seeds_of(c)), several(c.runs.size() > arms.size()) {}
  const ComparedRun& first_of(const Arm& arm) const { return comparison.runs[arm.seeds[0]]; }
  std::string number(const Arm& arm, Measure measure, Text text, Text with_spread) const;
  std::string rate(const Arm& arm, int64_t exact_below) const;
  size_t tried(const Arm& arm) const {
    const auto ended = [&](size_t i) { return !is_unfinished(comparison.runs[i]); };
    return arm.axes.empty() ? 1 : static_cast<size_t>(std::ranges::count_if(arm.sweep, ended));
  }
  bool has_choice() const {
    return std::any_of(arms.begin(), arms.end(), [](const Arm& arm) { return !arm.axes.empty(); });
  }
  std::string seeds_done(const Arm& arm) const;
  bool is_task() const {
    return std::any_of(comparison.runs.begin(), comparison.runs.end(),
                       [](const ComparedRun& run) { return std::isfinite(answers(run).value); });
  }
  bool side_by_side() const {
    return std::any_of(comparison.runs.begin(), comparison.runs.end(),
                       [](const ComparedRun& run) { return run.side_by_side > 1; });
  }
  const Comparison& comparison;
  const std::vector<Arm> arms;
  const std::vector<uint64_t> seeds;
  const bool several;
};

// "1.3120 +- 0.0041" over seeds; where none is done, what the first one has.
std::string View::number(const Arm& arm, Measure measure, Text text, Text with_spread) const {
  if (arm.seeds.empty()) return "-";
  if (arm.seeds.size() == 1) return measured_text(first_of(arm), measure(first_of(arm)), text);
  const Spread spread = spread_over(comparison, arm, measure);
  if (spread.n == 0) return measured_text(first_of(arm), measure(first_of(arm)), text);
  if (spread.n == 1) return with_spread(spread.mean);
  std::string mean = with_spread(spread.mean);
  if (mean.ends_with(" %")) mean.resize(mean.size() - 2);
  return mean + " +- " + with_spread(spread.sd);
}

std::string View::rate(const Arm& arm, int64_t exact_below) const {
  const double rate = tokens_per_second_of(comparison, arm);
  return rate > 0 ? short_count(static_cast<int64_t>(rate), exact_below) : "-";
}

std::string View::seeds_done(const Arm& arm) const {
  const auto done =
      std::count_if(arm.seeds.begin(), arm.seeds.end(), [&](size_t i) { return is_done(comparison.runs[i]); });
  const size_t all = arm.seeds.size();
  return static_cast<size_t>(done) == all ? str(all) : str(done, " of ", all);
}

struct Column {
  std::string name;
  int rank;  // of those that do not fit, the highest are left out first
  std::vector<std::string> cells;
};

std::vector<Column> columns_of(const View& view) {
  std::vector<Column> columns;
  auto add = [&](const std::string& name, int rank, auto&& text) {
    columns.push_back({name, rank, {}});
    for (const Arm& arm : view.arms) columns.back().cells.push_back(text(arm));
  };
  auto number = [&](Measure measure, Text text, Text with_spread) {
    return [=, &view](const Arm& arm) { return view.number(arm, measure, text, with_spread); };
  };
  auto count = [&](const Arm& arm) { return short_count(view.first_of(arm).result.accounting.parameters, 10'000'000); };
  auto matrix = [&](const Arm& arm) { return short_count(view.first_of(arm).result.accounting.matrix, 10'000'000); };
  auto flops = [&](const Arm& arm) {
    return format_number("%.4g", view.first_of(arm).result.accounting.flops_per_token);
  };
  auto memory = [&](const Arm& arm) { return ratio_text(relative_memory(view.comparison, view.first_of(arm))); };
  add("architecture", 0, [](const Arm& arm) { return arm.name; });
  add("parameters", 2, count);
  add("in matrices", 9, matrix);
  add("FLOP/token", 8, flops);
  if (!view.side_by_side()) add("tokens/s", 4, [&](const Arm& arm) { return view.rate(arm, 1'000'000); });
  add("memory", 5, memory);
  if (view.has_choice() || optimizers_of(view.comparison).size() > 1)
    add("lr", 1, [&](const Arm& arm) { return rates_text(arm); });
  if (view.seeds.size() > 1) add("seeds", 1, [&](const Arm& arm) { return view.seeds_done(arm); });
  add("train loss", 7, number(train_loss, loss_text, four_digits));
  add("test loss", 1, number(test_loss, loss_text, four_digits));
  if (!view.is_task()) return columns;
  add("answers", 3, number(answers, percent_text, percent_text));
  add("valid", 6, number(steps_valid, percent_text, percent_text));
  return columns;
}

size_t width_of(const std::vector<Column>& columns) {
  size_t width = 0;
  for (const Column& column : columns) {
    size_t widest = column.name.size();
    for (const std::string& cell : column.cells) widest = std::max(widest, cell.size());
    width += widest + (width > 0 ? 2 : 0);
  }
  return width;
}

std::string table_of(const std::vector<Column>& columns, size_t rows) {
  std::vector<std::vector<std::string>> table(rows + 1);
  for (const Column& column : columns) {
    table[0].push_back(column.name);
    for (size_t i = 0; i < rows; ++i) table[i + 1].push_back(column.cells[i]);
  }
  return format_table(table);
}

std::string list_of_seeds(const View& view) {
  std::string list;
  for (const uint64_t seed : view.seeds) list += (list.empty() ? "" : ", ") + std::to_string(seed);
  return list;
}

std::string list_of(const std::vector<double>& rates) {
  std::string list;
  for (const double rate : rates) list += (list.empty() ? "" : ", ") + lr_text(rate);
  return list;
}

// Arms, each with its verdict against another.
struct Verdicts {
  std::string title;
  std::vector<std::pair<std::string, std::string>> lines;
};

// What could be found at all: "; 80 % of repeats would find 0.0310"; "" where nothing can.
std::string detectable_text(const Family& family) {
  const double difference = detectable_difference(family.verdict);
  return std::isfinite(difference) ? "; 80 % of repeats would find " + four_digits(difference) : "";
}

// "over 3 seeds", "over 3 seeds and 12 of llama".
std::string seeds_text(const Family& family) {
  const size_t seeds = family.arms[0]->seeds.size(), own = family.baseline->seeds.size();
  return str("over ", seeds, " seeds", own == seeds ? "" : str(" and ", own, " of ", family.baseline->name));
}

// Architectures against the first of them, by optimizer; against their controls; and optimizers against the first of
// them, by architecture.
std::vector<Verdicts> verdicts(const View& view) {
  if (view.seeds.size() < 2) return {};
  std::vector<Verdicts> all;
  const auto add = [&](const std::vector<Family>& families) {
    for (const Family& family : families) {
      all.push_back(
          {str("test loss against ", family.baseline->name, ", ", seeds_text(family), detectable_text(family), ":"),
           {}});
      for (const Arm* arm : family.arms)
        all.back().lines.emplace_back(arm->name, verdict_text(view.comparison, family, *arm));
    }
  };
  add(families_of_architectures(view.comparison, view.arms));
  add(families_of_controls(view.comparison, view.arms));
  add(families_of_optimizers(view.comparison, view.arms));
  return all;
}

std::string text_of(const Verdicts& one, size_t width) {
  std::string out = wrap(one.title, width, 0) + "\n";
  size_t longest = 0;
  for (const auto& line : one.lines) longest = std::max(longest, line.first.size());
  for (const auto& [name, verdict] : one.lines)
    out += "  " + name + ":" + std::string(longest - name.size() + 1, ' ') +
           wrap(verdict, std::max<size_t>(30, width - std::min(width, longest + 4)), longest + 4) + "\n";
  return out;
}

// What Rules::more_seeds has added, once it has ended.
std::string further_seeds(const View& view) {
  std::string out;
  for (const Arm& arm : view.arms) {
    const Spread fresh = further_spread(view.comparison, arm);
    if (arm.more.empty() || fresh.n < static_cast<int64_t>(arm.more.size())) continue;
    out += str("* ", format_markdown(arm.name), ": ", four_digits(spread_over(view.comparison, arm, test_loss).mean),
               ", then ", four_digits(fresh.mean), "\n");
  }
  return out.empty() ? ""
                     : "Of the best arms, and of those whose spread is unlike the others', three fresh seeds; the "
                       "best of many looks better than it is:\n\n" +
                           out + "\n";
}

// How verdicts come about, and what they do not say.
std::string notes_on_verdicts(const View& view) {
  std::string out =
      "Difference: of means over seeds; +- half of its interval. Seeds that all arms have are blocks, since one seed "
      "gives all the same batches. Each list is judged as a whole (Dunnett's test, with "
      "simulated critical values): of twenty lists of equal arms, one would have a false alarm. Not significant: these "
      "seeds cannot tell, which does not show that they are equal. An arm of a deviation unlike the others' (Cochran's "
      "test, 1 %) is judged by its own (Welch's test). Arms against their controls are one list.";
  for (const Family& family : families_of_architectures(view.comparison, view.arms)) {
    const FamilyVerdict& v = family.verdict;
    if (!std::isfinite(v.critical)) continue;
    const bool unlike = std::isfinite(v.prior_degrees);
    out += str(" Against ", family.baseline->name, ": ", unlike ? "deviations unlike each other, moderated by " : "",
               unlike ? "the common one" : "deviation", v.blocks ? " of what arms and seeds leave " : " ",
               four_digits(v.arms_sd), " (", v.arms_degrees, " degrees of freedom), critical value ",
               format_number("%.3f", v.critical));
    if (std::isfinite(v.correlation))
      out += str(", losses of the same seed correlate by ", format_number("%.2f", v.correlation));
    out += ".";
  }
  return out;
}

std::string notes_on_spread(const View& view) {
  return std::string("mean +- standard deviation over the seeds") +
         (parse_data_spec(view.comparison.data).kind == DataSpec::Kind::generated ? ", which also draw the task's data."
                                                                                  : ".");
}

// "llama, lime adamw": those that are so, between commas.
template <class Is>
std::string names_of(const View& view, Is&& is) {
  std::string names;
  for (const Arm& arm : view.arms)
    if (is(arm)) names += (names.empty() ? "" : ", ") + arm.name;
  return names;
}

std::string at_edge(const View& view) {
  return names_of(view, [](const Arm& arm) { return arm.settled && arm.at_edge; });
}

// Where the rates come from.
std::string notes_on_rates(const View& view) {
  const Comparison& comparison = view.comparison;
  std::string out = str("lr: by the test losses of seed ", *comparison.choosing_seed,
                        " on the first half of the test set, of ", list_of(comparison.rates), ". ");
  if (!comparison.muon_rates.empty())
    out += str("Of Muon's matrices first muon-lr, of ", list_of(comparison.muon_rates), " at lr ",
               lr_text(middle_rate(comparison.rates)),
               ", and then, at the best of these, lr, also half of that and twice. ");
  out +=
      "A parabola through the best rate and its neighbours, in the logarithm of the rate, has its lowest point at the "
      "rate that is chosen; basin: the rate times that, or by that, costs 0.01 nats. While the best is at an edge a "
      "rate beyond it is tried, three at most, and there is no parabola; tried: all rates of an arm. The seeds that "
      "are reported chose nothing, and are tested on the second half.";
  if (comparison.rules.hold_decay) out += " Weight decay times rate is the same at all rates.";
  const std::string open = names_of(view, [](const Arm& arm) { return !arm.settled; });
  const std::string edge = at_edge(view);
  if (!open.empty()) out += " Not all rates are done, so that the best may be another: " + open + ".";
  if (!edge.empty()) out += " At the edge of all that were tried, so that one beyond may be better: " + edge + ".";
  return out;
}

// "all 1,000 test sequences; before the last step over 512, evenly spread".
std::string test_part(const Settings& settings, int64_t size) {
  if (size == 0)
    return settings.eval_samples > 0 ? str("at most ", format_count(settings.eval_samples), " test sequences")
                                     : "all test sequences";
  const int64_t tested = sequences_tested(settings, size, true), before = sequences_tested(settings, size, false);
  const bool first = settings.eval_rule == "first";
  std::string text = tested == size ? str("all ", format_count(size), " test sequences")
                     : first ? str("the first ", format_count(tested), " of ", format_count(size), " test sequences")
                             : str(format_count(tested), " of ", format_count(size), " test sequences, evenly spread");
  if (before < tested) text += str("; before the last step over ", format_count(before), ", evenly spread");
  return text;
}

// What the test numbers are of, and how much of a difference between them may be chance.
std::string notes_on_tests(const View& view) {
  const Comparison& comparison = view.comparison;
  const Settings& settings = comparison.runs[0].plan;
  const int64_t size = test_size_of(comparison, view.first_of(view.arms[0]));
  const auto part = [&](int64_t samples, const std::string& what) {
    if (size == 0) return str("at most ", format_count(samples), " ", what);
    if (samples >= size) return str("all ", format_count(size), " ", what);
    return str("the first ", format_count(samples), " of ", format_count(size), " ", what);
  };
  std::string out = "test loss: over " + test_part(settings, size) + ".\n";
  if (comparison.choosing_seed)
    out += str("These are the second half of the test set; seed ", *comparison.choosing_seed,
               ", which chooses, is tested on the first.\n");
  if (!comparison.data_note.empty()) out += comparison.data_note + ".\n";
  if (view.is_task()) {
    const int64_t prompts = size > 0 ? std::min(settings.answer_samples, size) : settings.answer_samples;
    double error = 0;  // two standard errors
    for (const ComparedRun& run : comparison.runs)
      if (const double p = answers(run).value; std::isfinite(p))
        error = std::max(error, 2 * std::sqrt(p * (1 - p) / static_cast<double>(prompts)));
    const double chance = chance_of(comparison.data);
    out += "answers: to " + part(settings.answer_samples, "test prompts");
    if (std::isfinite(chance)) out += "; guessing gets " + percent_text(chance);
    if (error > 0) out += ";\nsampling error (two standard errors) " + format_number("up to %.1f points", 100 * error);
    out += ".\n";
  }
  if (view.seeds.size() > 1) return out;
  return out + "All runs have one seed: another may order close architectures otherwise.\n";
}

// Which arms diverged at a rate that so is not their best: "diverged at lr 0.01: llama, lime".
std::string diverged_at_rates(const View& view) {
  std::map<double, std::string> names;
  for (const Arm& arm : view.arms)
    for (const size_t i : arm.sweep) {
      const ComparedRun& run = view.comparison.runs[i];
      if (!arm.works || !diverged(run)) continue;
      std::string& list = names[rate_of(run)];
      list += (list.empty() ? "" : ", ") + arm.name;
    }
  std::string out;
  for (const auto& [rate, list] : names) out += "diverged at lr " + lr_text(rate) + ": " + list + "\n";
  return out;
}

// The runs that did not end well; of those that have not begun, where there are several of an arm, how many.
std::string remarks(const View& view) {
  std::string out = diverged_at_rates(view);
  for (const Arm& arm : view.arms)
    for (const ComparedRun& run : view.comparison.runs) {
      const bool tries = chooses(view.comparison, run), waits = run.state == RunState::waiting;
      if (!is_of(run, arm) || is_done(run) || (waits && view.several)) continue;
      if (!(arm.works && tries && diverged(run))) out += run_name(view.comparison, run) + ": " + remark(run) + "\n";
    }
  if (view.comparison.choosing_seed && !at_edge(view).empty())
    out += wrap("the best lr is at the edge of all that were tried: " + at_edge(view), 80, 0) + "\n";
  const int64_t left = runs_unfinished(view.comparison);
  if (view.several && left > 0) out += str(left, left == 1 ? " run is" : " runs are", " still to be done\n");
  return out;
}

std::vector<std::string> markdown_cells(const View& view, const Arm& arm) {
  const ComparedRun& run = view.first_of(arm);
  const TrainResult& r = run.result;
  const double time = relative_time(view.comparison, arm.seeds);
  const auto number = [&](Measure measure, Text text) { return view.number(arm, measure, text, text); };
  std::vector<std::string> cells = {arm.name,
                                    format_count(r.accounting.parameters),
                                    format_count(r.accounting.matrix),
                                    format_number("%.6g", r.accounting.flops_per_token),
                                    view.rate(arm, std::numeric_limits<int64_t>::max()),
                                    std::isfinite(time) ? format_number("~%.1fx", time) : "-",
                                    format_bytes(static_cast<double>(r.memory)),
                                    ratio_text(relative_memory(view.comparison, run)),
                                    number(train_loss, four_digits),
                                    number(test_loss, four_digits),
                                    number(answers, percent_text),
                                    number(steps_valid, percent_text)};
  if (view.several)
    cells.insert(cells.end(), {rates_text(arm), basins_text(arm), str(view.tried(arm)), view.seeds_done(arm)});
  else cells.push_back(is_done(run) ? "done" : remark(run));
  return cells;
}

// The runs that were begun, or will be for certain: by arm, then by rate, the seed that chooses before the others.
std::vector<size_t> listed_runs(const View& view) {
  const std::vector<ComparedRun>& runs = view.comparison.runs;
  const auto order = [&](size_t i) {
    const bool reported = !chooses(view.comparison, runs[i]);
    return std::tuple(rate_of(runs[i]), reported, runs[i].plan.lr, runs[i].plan.seed, i);
  };
  std::vector<size_t> all;
  for (const Arm& arm : view.arms) {
    std::vector<size_t> own;
    for (size_t i = 0; i < runs.size(); ++i)
      if (is_of(runs[i], arm) && (runs[i].state != RunState::waiting || chooses(view.comparison, runs[i])))
        own.push_back(i);
    std::sort(own.begin(), own.end(), [&](size_t a, size_t b) { return order(a) < order(b); });
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

// The last cell without room for more: with all that is needed to find a run.
std::string table_of_runs(const View& view) {
  std::string out = "## Runs\n\n" +
                    format_markdown_row({"architecture", "optimizer", "lr", "seed", "train loss", "test loss",
                                         "answers", "steps valid", "directory", "state"}) +
                    "|---|---|---|---|---|---|---|---|---|---|\n";
  for (const size_t i : listed_runs(view)) {
    const ComparedRun& run = view.comparison.runs[i];
    const bool tries = chooses(view.comparison, run);
    const auto number = [&](Measure measure, Text text) { return measured_text(run, measure(run), text); };
    out += format_markdown_row(
        {run.choice.text, run.plan.optimizer, rates_text(run.plan.optimizer, run.plan.lr, run.plan.muon.lr),
         std::to_string(run.plan.seed) + (tries ? ", chooses" : ""), number(train_loss, four_digits),
         number(test_loss, four_digits), number(answers, percent_text), number(steps_valid, percent_text),
         run_directory(run), is_done(run) ? "done" : remark(run)});
  }
  return out + "\n";
}

// The runs that are drawn: the reported ones; before the first of these has begun, one that chooses their rate, if
// possible the best so far.
std::vector<size_t> drawn_runs(const View& view, const Arm& arm) {
  const auto begun = [&](size_t i) { return view.comparison.runs[i].state != RunState::waiting; };
  if (std::any_of(arm.seeds.begin(), arm.seeds.end(), begun)) return arm.seeds;
  std::vector<size_t> drawn;
  const auto loss = [&](size_t i) {
    const ComparedRun& run = view.comparison.runs[i];
    return is_done(run) ? run.result.test_loss : INFINITY;
  };
  for (const size_t i : arm.sweep)
    if (begun(i) && (drawn.empty() || loss(i) < loss(drawn[0]))) drawn = {i};
  return drawn;
}

std::string curve_name(const View& view, const Arm& arm) {
  if (view.several) return arm.name + (view.has_choice() ? " lr " + rates_text(arm) : "");
  const ComparedRun& run = view.first_of(arm);
  return arm.name + (is_done(run) ? "" : str(" (", name_of(run.state), ")"));
}

// The mean over the arm's runs that are done, with a band; over those that run while none is. An only run is its curve.
Curve mean_curve(const View& view, const Arm& arm, std::vector<double> RunCurves::*x,
                 std::vector<double> RunCurves::*y) {
  std::vector<SteppedCurve> lines;
  const std::vector<size_t> drawn = drawn_runs(view, arm);
  const bool any_done =
      std::any_of(drawn.begin(), drawn.end(), [&](size_t i) { return is_done(view.comparison.runs[i]); });
  for (const size_t i : drawn) {
    const ComparedRun& run = view.comparison.runs[i];
    const RunCurves& curves = run.result.curves;
    const bool begun = !any_done && run.state == RunState::running && !curves.step.empty();
    if (drawn.size() == 1 || is_done(run) || begun) lines.push_back({curves.*x, curves.*x, curves.*y});
  }
  Curve mean = mean_of(lines).curve;
  mean.name = curve_name(view, arm);
  mean.broken_off = drawn.size() == 1 && view.comparison.runs[drawn[0]].state == RunState::failed;
  return mean;
}

// "arith:4: llama, lime; seed 42": the task and the models that are drawn, or how many, where the names are too long.
std::string figure_title(const View& view, const std::vector<std::string>& drawn) {
  std::string names;
  for (const std::string& name : drawn) names += (names.empty() ? "" : ", ") + name;
  if (names.size() > 40) names = str(drawn.size(), " architectures");
  return str(short_name(view.comparison.data), ": ", names, view.seeds.size() > 1 ? "; seeds " : "; seed ",
             list_of_seeds(view));
}

// Of one seed the training loss with the test loss as marks. Of several, the test loss, which is judged, has a plot of
// its own for its bands; those of the training loss would be of the batches' noise.
void draw(const View& view) {
  const bool several = view.seeds.size() > 1;
  const std::string bands = several ? std::string(", ") + about_bands : "";
  Panel test{"test loss" + bands, "", {}}, right{"correct answers to test prompts" + bands, "", {}, true};
  Panel train{several ? "training loss, mean over the seeds" : "training loss", "test loss", {}};
  std::vector<std::string> drawn;
  for (const Arm& arm : view.arms) {
    if (drawn_runs(view, arm).empty()) continue;
    drawn.push_back(arm.name);
    Curve loss = mean_curve(view, arm, &RunCurves::step, &RunCurves::loss);
    test.curves.push_back(mean_curve(view, arm, &RunCurves::test_step, &RunCurves::test_loss));
    right.curves.push_back(mean_curve(view, arm, &RunCurves::answer_step, &RunCurves::answers));
    if (several) loss.low.clear(), loss.high.clear();
    else loss.marks_x = test.curves.back().x, loss.marks_y = test.curves.back().y;
    train.curves.push_back(loss);
  }
  std::vector<Panel> panels = {train};
  if (several) panels.insert(panels.begin(), test);
  const auto has_points = [](const Curve& curve) { return !curve.x.empty(); };
  if (std::any_of(right.curves.begin(), right.curves.end(), has_points)) panels.push_back(right);
  const Comparison& comparison = view.comparison;
  const std::string picture = curve_svg(figure_title(view, drawn), "step", panels);
  write_file_atomically(comparison.out + "/compare.svg", picture);
  write_file_atomically(comparison.out + "/compare-dark.svg", svg::dark(picture));
}

}  // namespace

std::string results_table(const Comparison& comparison, size_t width) {
  const View view(comparison);
  std::vector<Column> columns = columns_of(view);
  while (columns.size() > 2 && width_of(columns) > width) {
    columns.erase(std::max_element(columns.begin(), columns.end(),
                                   [](const Column& a, const Column& b) { return a.rank < b.rank; }));
  }
  return table_of(columns, view.arms.size()) + remarks(view);
}

std::string results_verdicts(const Comparison& comparison, size_t width) {
  const View view(comparison);
  std::string out;
  for (const Verdicts& one : verdicts(view)) out += (out.empty() ? "" : "\n") + text_of(one, width);
  return out;
}

// ", adamw, muon, lr 0.001, 0.002, muon-lr 0.01, 0.02". AdamW alone is not named, nor is its rate where it has one.
static std::string optimizers_and_rates(const Comparison& comparison) {
  const std::vector<std::string> names = optimizers_of(comparison);
  if (names == std::vector<std::string>{"adamw"})
    return comparison.rates.size() > 1 ? ", lr " + list_of(comparison.rates) : "";
  std::string out;
  for (const std::string& name : names) out += ", " + name;
  return out + ", lr " + list_of(comparison.rates) + ", muon-lr " + list_of(comparison.muon_rates);
}

std::string results_markdown(const Comparison& comparison) {
  const View view(comparison);
  const Settings& settings = comparison.runs[0].plan;
  const std::string seeds = (view.seeds.size() > 1 ? "seeds " : "seed ") + list_of_seeds(view);
  std::string out = "# " + format_markdown(short_name(comparison.data)) + "\n\n" +
                    str(settings.steps, " steps of ", settings.batch * settings.accumulate, " sequences of ",
                        settings.data.seq_len, " tokens, ", seeds, optimizers_and_rates(comparison),
                        "; all settings: results.json.\n\n![loss](compare.svg)\n\nAs PNG or PDF: `curves --out "
                        "figure.pdf DIR`, of this directory.\n\n");
  std::vector<std::string> head = {"architecture", "parameters", "in matrices", "FLOP/token",
                                   "tokens/s",     "time",       "memory",      "relative memory",
                                   "train loss",   "test loss",  "answers",     "steps valid"};
  if (view.several) head.insert(head.end(), {"lr", "basin", "tried", "seeds"});
  else head.push_back("state");
  out += format_markdown_row(head) + "|";
  for (size_t i = 0; i < head.size(); ++i) out += "---|";
  out += "\n";
  for (const Arm& arm : view.arms) out += format_markdown_row(markdown_cells(view, arm));
  out += "\n";
  if (view.seeds.size() > 1) {
    out += "In the table: " + notes_on_spread(view) + " In the picture: " + about_bands + ".\n\n";
    for (const Verdicts& one : verdicts(view)) {
      out += format_markdown(one.title) + "\n\n";
      for (const auto& [name, verdict] : one.lines) out += "* " + format_markdown(name) + ": " + verdict + "\n";
      out += "\n";
    }
    out += further_seeds(view);
    if (view.arms.size() > 1) out += notes_on_verdicts(view) + "\n\n";
  }
  if (view.has_choice()) out += notes_on_rates(view) + "\n\n";
  if (view.several) out += table_of_runs(view);
  return out + "time and relative memory: against " + format_markdown(comparison.runs[0].choice.text) +
         (view.side_by_side() ? ". Runs were trained side by side, so there are no tokens/s and times; "
                              : ". tokens/s and time: the architectures ran one after the other, so whatever else the "
                                "machine did is in them; ") +
         "`make bench-architectures` measures in turn. @N: after step N. FLOP/token: forward and backward. memory: of "
         "the model and its activations, without the program's own.\n"
         "train loss: mean of the last fiftieth of the steps. answers: the final answer is correct; steps valid: so is "
         "every generated step.\n\n" +
         notes_on_tests(view);
}

std::string draw_comparison(const Comparison& comparison) {
  return io_error_of([&] { draw(View(comparison)); });
}

std::string write_results(const Comparison& comparison) {
  // results.json first: --resume needs it.
  return first_io_error_of([&] { write_file_atomically(comparison.out + "/results.json", results_json(comparison)); },
                           [&] { write_file_atomically(comparison.out + "/results.md", results_markdown(comparison)); },
                           [&] { draw(View(comparison)); });
}

}  // namespace crossply
