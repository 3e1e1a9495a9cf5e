#include "dev/figures/experiments.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <tuple>

#include "cli/curve.h"
#include "cli/format.h"
#include "dev/figures/page.h"
#include "dev/figures/transfer.h"
#include "engine/io/file.h"
#include "train/lab/comparison.h"
#include "train/run/run_curves.h"

namespace crossply::figures {
namespace {

namespace fs = std::filesystem;

ComparedArms against(const std::string& name, const RecordedArm& baseline, const std::vector<LabelledArm>& arms) {
  return {"against " + name, baseline, arms};
}

std::vector<RecordedArm> arms_of(const std::vector<ComparedArms>& groups) {
  std::vector<RecordedArm> all;
  for (const ComparedArms& group : groups) {
    all.push_back(group.baseline);
    for (const LabelledArm& one : group.arms) all.push_back(one.arm);
  }
  return all;
}

// What is compared with arms of other records, of their seeds alone: a table's rows are then of the same batches.
RecordedArm of_same_seeds(RecordedArm arm, const Record& record) {
  const auto is_other = [&](uint64_t seed) {
    return std::ranges::none_of(record.arms, [&](const RecordedArm& one) { return one.runs.contains(seed); });
  };
  std::erase_if(arm.runs, [&](const auto& run) { return is_other(run.first); });
  std::erase_if(arm.lost, is_other);
  return arm;
}

// --- Twelve architectures

// LLaMA's losses from one seed by how many times the tokens of the comparison it saw, each with a schedule of its own.
using Frontier = std::vector<std::pair<double, double>>;

// What a baseline reaches with so many times its work, between the lengths at which it was trained; NaN beyond them.
double loss_at(const Frontier& frontier, double work) {
  for (size_t i = 1; i < frontier.size(); ++i) {
    const auto [x0, y0] = frontier[i - 1];
    const auto [x1, y1] = frontier[i];
    if (work >= x0 && work <= x1) return y0 + (y1 - y0) * std::log(work / x0) / std::log(x1 / x0);
  }
  return NAN;
}

// The other way round: how many times the work a baseline needs to reach a loss; NaN beyond its lengths.
double work_at(const Frontier& frontier, double loss) {
  for (size_t i = 1; i < frontier.size(); ++i) {
    const auto [x0, y0] = frontier[i - 1];
    const auto [x1, y1] = frontier[i];
    if (loss <= y0 && loss >= y1 && y0 > y1) return x0 * std::pow(x1 / x0, (y0 - loss) / (y0 - y1));
  }
  return NAN;
}

// Its longer runs, read once for all who ask.
std::vector<RecordedArm> longer_llamas(const Page& page, const RecordedArm& llama) {
  std::vector<RecordedArm> longer;
  for (const char* steps : {"640", "1024", "2048"})
    if (const auto record = page.record(str("../twelve/llama-", steps, "-steps"))) {
      longer.push_back(record->arm("llama"));
      if (longer.back().lr != llama.lr)
        fail(Exit::bad_data, record->path, ": is not of LLaMA's best rate, ", lr_text(llama.lr));
    }
  return longer;
}

Frontier frontier_of(const std::vector<RecordedArm>& longer, const RecordedArm& llama, uint64_t seed) {
  const RecordedRun& base = llama.runs.at(seed);
  Frontier frontier = {{1, base.test_loss}};
  for (const RecordedArm& arm : longer)
    if (const auto run = arm.runs.find(seed); run != arm.runs.end())
      frontier.emplace_back(static_cast<double>(run->second.tokens) / static_cast<double>(base.tokens),
                            run->second.test_loss);
  return frontier;
}

// The difference from what LLaMA reaches with so many times the work, seed by seed: "-0.123 ± 0.010", "-" if unknown.
std::string difference_at(const std::vector<RecordedArm>& longer, const RecordedArm& arm, const RecordedArm& llama,
                          double work) {
  std::vector<double> values;
  for (const auto& [seed, run] : arm.runs) {
    if (!llama.runs.contains(seed)) continue;
    const double value = run.test_loss - loss_at(frontier_of(longer, llama, seed), work);
    if (std::isfinite(value)) values.push_back(value);
  }
  const Spread spread = spread_of(values);
  if (spread.n == 0) return "-";
  return (spread.mean < 0 ? "-" : "+") + format_number("%.3f", std::abs(spread.mean)) +
         (spread.n > 1 ? format_number(" ± %.3f", spread.sd) : "");
}

// How many times an arm's tokens LLaMA needs for the same loss, seed by seed: "1.80x ± 0.10".
std::string tokens_needed(const std::vector<RecordedArm>& longer, const RecordedArm& arm, const RecordedArm& llama) {
  std::vector<double> values;
  for (const auto& [seed, run] : arm.runs)
    if (llama.runs.contains(seed))
      if (const double times = work_at(frontier_of(longer, llama, seed), run.test_loss); std::isfinite(times))
        values.push_back(times);
  const Spread spread = spread_of(values);
  if (spread.n == 0) return "-";
  return format_number("%.2fx", spread.mean) + (spread.n > 1 ? format_number(" ± %.2f", spread.sd) : "") +
         (spread.n < static_cast<int64_t>(arm.runs.size()) ? str(" (", spread.n, " seeds)") : "");
}

// Of a step, alone on the machine, relative to LLaMA's; NaN where that was not measured.
double relative_time(const std::optional<Record>& speed, const std::string& name) {
  const auto rate = [&](const std::string& wanted) {
    for (const RecordedArm& arm : speed->arms)
      if (arm.name == wanted) return arm.runs.begin()->second.tokens_per_second;
    return static_cast<double>(NAN);
  };
  return speed ? rate("llama") / rate(name) : NAN;
}

// What the difference is once LLaMA is given the FLOPs, or the time, that the other takes.
void equal_work(Page& page, const RecordedArm& llama, const std::vector<RecordedArm>& arms) {
  const std::vector<RecordedArm> longer = longer_llamas(page, llama);
  const auto speed = page.record("speed");
  std::string table = format_markdown_row({"", "FLOPs", "time", "memory", "at equal tokens", "at equal FLOPs",
                                           "at equal time", "tokens that LLaMA needs"}) +
                      "|---|---|---|---|---|---|---|---|\n";
  for (const RecordedArm& arm : arms) {
    const RecordedRun &run = arm.runs.begin()->second, &one = llama.runs.begin()->second;
    const double flops = run.flops_per_token / one.flops_per_token, time = relative_time(speed, arm.name);
    table += format_markdown_row({arm.name, format_number("%.3fx", flops),
                                  std::isfinite(time) ? format_number("%.2fx", time) : "-",
                                  format_number("%.2fx", run.memory / one.memory), difference_at(longer, arm, llama, 1),
                                  difference_at(longer, arm, llama, flops), difference_at(longer, arm, llama, time),
                                  tokens_needed(longer, arm, llama)});
  }
  page.markdown(
      "## Equal FLOPs, equal time\n\nDifferences from LLaMA's test loss, mean ± standard deviation over the "
      "seeds. LLaMA with more work: interpolated, in the\nlogarithm of the work, between runs of 512, 640, "
      "1,024 and 2,048 steps, each with a schedule of its own; time: of a step,\nalone on the machine; last: how "
      "many times the tokens LLaMA needs for the same loss; -: not measured, or beyond these runs.\n\n" +
      table + "\n");
}

// Four times the tokens, at the rates that were best with one.
void longer(Page& page) {
  const auto llama = page.record("llama-2048-steps");
  if (!llama) return;
  std::vector<LabelledArm> all = arms_but(*llama, "");
  for (const char* name : {"lime", "lime_dynamic", "hyper", "resformer"})
    if (const auto record = page.record(std::string(name) + "-2048-steps")) {
      all.push_back({name, record->arm(name)});
      all[0].arm = of_same_seeds(all[0].arm, *record);
    }
  if (all.size() < 2) return;
  page.curves("longer.svg", "Code, four times the tokens", all);
  page.differences("longer-differences.svg", "Code, four times the tokens, against LLaMA", {{"", all[0].arm, all}});
}

void twelve(Page& page) {
  const auto record = page.record("equal-tokens");
  if (!record) return;
  std::vector<LabelledArm> all = arms_but(*record, "");
  page.curves("curves.svg", "Code, equal tokens", all);
  page.differences("differences.svg", "Code: twelve architectures, against LLaMA", {{"", record->arm("llama"), all}});
  // What papers say of each other.
  const auto named = [&](const char* baseline, std::initializer_list<const char*> names) {
    ComparedArms group = against(baseline, record->arm(baseline), {});
    for (const char* name : names) group.arms.push_back({name, record->arm(name)});
    return group;
  };
  page.differences("pairs.svg", "Code: architectures against each other",
                   {named("hyper", {"lime", "lime_static", "lime_dynamic"}), named("lime_static", {"lime_dynamic"}),
                    named("resformer", {"satformer", "mudd"}), named("denseformer", {"mudd"}),
                    named("sla", {"vertical"}), named("ala", {"vertical"})},
                   record->arms);
  longer(page);
  equal_work(page, record->arm("llama"), record->arms);
}

// --- Groups of variants, whose defaults and baselines are in other records

std::optional<Record> text_record(const Page& page) { return page.record("../twelve/equal-tokens"); }

void newer(Page& page) {
  const auto base = text_record(page), record = page.record("equal-tokens");
  if (!base || !record) return;
  const RecordedArm llama = of_same_seeds(base->arm("llama"), *record);
  std::vector<LabelledArm> all = {{"llama", llama}};
  for (const LabelledArm& arm : arms_but(*record, "")) all.push_back(arm);
  // Their forerunners, over the same seeds.
  for (const char* name : {"vertical", "hyper", "resformer"})
    all.push_back({name, of_same_seeds(base->arm(name), *record)});
  page.curves("curves.svg", "Code, equal tokens, newer connections", all);
  page.differences("differences.svg", "Code: newer connections and their forerunners, against LLaMA",
                   {{"", llama, all}});
  std::vector<LabelledArm> mhcs;
  for (const char* name : {"mhc", "mhc-variants"})
    if (const auto other = page.record(name))
      for (const LabelledArm& arm : arms_but(*other, "")) mhcs.push_back(arm);
  const char *mhc = "mhc", *blocks = "attnres", *whole = "attnres:attn_res_block_size=0";
  std::vector<ComparedArms> pairs = {
      against("hyper", of_same_seeds(base->arm("hyper"), *record), {{mhc, record->arm(mhc)}}),
      against(blocks, record->arm(blocks), {{whole, record->arm(whole)}})};
  if (!mhcs.empty()) pairs.push_back(against(mhc, record->arm(mhc), mhcs));
  all.insert(all.end(), mhcs.begin(), mhcs.end());
  const std::vector<RecordedArm> arms = arms_of({{"", llama, all}});
  page.differences("pairs.svg", "Code: newer connections against each other", pairs, arms);
  equal_work(page, llama, arms);
}

void routers(Page& page) {
  const auto base = text_record(page), record = page.record("ablation");
  if (!base || !record) return;
  const LabelledArm full{"lime: full", of_same_seeds(base->arm("lime"), *record)};
  const RecordedArm llama = of_same_seeds(base->arm("llama"), *record);
  std::vector<LabelledArm> arms = {full};
  for (const LabelledArm& arm : arms_but(*record, "")) arms.push_back(arm);
  arms.push_back({"llama", llama});
  page.differences("differences.svg", "Code: LIMe's routers, against LLaMA", {{"", llama, arms}});
  const auto reading = [&](const char* which, int j) -> LabelledArm {
    const std::string name = str("lime:routing=", which, ":window=", j);
    return {name, record->arm(name)};
  };
  std::vector<ComparedArms> pairs;
  for (const int j : {2, 4, 6}) {
    const LabelledArm last = reading("last", j);
    pairs.push_back(against(last.label, last.arm, {reading("first", j), full}));
    for (int more = j + 2; more <= 6; more += 2) pairs.back().arms.push_back(reading("last", more));
  }
  pairs.push_back(against("lime: full", full.arm, {reading("first", 2), reading("first", 4), reading("first", 6)}));
  page.differences("pairs.svg", "Code: LIMe reading the first layers, all, or the last", pairs, record->arms);
}

void variants(Page& page) {
  const auto base = text_record(page);
  if (!base) return;
  std::vector<ComparedArms> groups, pairs;
  for (const char* name : {"satformer", "resformer", "denseformer", "hyper", "mudd"})
    if (const auto record = page.record(name)) {
      const RecordedArm usual = of_same_seeds(base->arm(name), *record);
      pairs.push_back(against(name, usual, arms_but(*record, name)));
      groups.push_back({name, of_same_seeds(base->arm("llama"), *record), pairs.back().arms});
      groups.back().arms.insert(groups.back().arms.begin(), {std::string(name) + " (default)", usual});
    }
  page.differences("differences.svg", "Code: variants, against LLaMA", groups);
  page.differences("pairs.svg", "Code: variants, against the default", pairs);
}

// A default and what a paper or its code has in its place, some of which other experiments have trained.
void literal(Page& page) {
  const auto base = text_record(page);
  if (!base) return;
  std::vector<ComparedArms> groups;
  const auto add = [&](const std::string& file, const std::string& name, const std::string& only) {
    const auto record = page.record(file);
    if (!record) return;
    ComparedArms group = against(name, of_same_seeds(base->arm(name), *record), {});
    for (const LabelledArm& arm : arms_but(*record, name))
      if (only.empty() || arm.label == only) group.arms.push_back(arm);
    groups.push_back(group);
  };
  add("../routers/ablation", "lime", "lime:kv_init=normal");
  for (const char* name : {"lime_static", "lime_dynamic", "hyper", "vertical", "resformer", "satformer"})
    add(name, name, "");
  add("../variants/denseformer", "denseformer", "denseformer:dilation=4:period=5");
  add("mudd", "mudd", "");
  if (const auto plain = page.record("gpt2"))
    if (const auto scaled = page.record("gpt2-index-scaling"))
      groups.push_back(
          against("gpt2", plain->arm("gpt2"), {{"gpt2: logits divided by the layer", scaled->arm("gpt2")}}));
  page.differences("differences.svg", "Code: what the literal choices cost", groups, arms_of(groups));
}

// --- Depth

void depth(Page& page) {
  std::map<std::string, Curve> curves;
  std::vector<ComparedArms> groups;
  for (const int layers : {8, 16, 32})
    if (const auto record = page.record(str("layers-", layers))) {
      const RecordedArm llama = record->arm("llama");
      groups.push_back({str(layers, " layers"), llama, arms_but(*record, "")});
      for (const LabelledArm& arm : arms_but(*record, "llama")) {
        const Spread d = spread_of(differences_of(arm.arm, llama, test_loss_of));
        Curve& curve = curves.try_emplace(arm.label, Curve{arm.label, {}, {}}).first->second;
        curve.x.push_back(layers), curve.y.push_back(d.mean);
        if (d.n > 1) curve.low.push_back(d.mean - d.sd), curve.high.push_back(d.mean + d.sd);
      }
    }
  if (groups.empty()) return;
  std::vector<Curve> all;
  for (auto& [name, curve] : curves) {
    if (curve.low.size() != curve.x.size()) curve.low.clear(), curve.high.clear();
    all.push_back(curve);
  }
  const bool bands = std::ranges::any_of(all, [](const Curve& curve) { return !curve.low.empty(); });
  const std::string caption =
      std::string("difference of test losses") + (bands ? str("; ", about_bands) : "; one seed");
  page.picture("depth.svg",
               curve_svg("Code: the gain over LLaMA by depth", "layers", {{caption, "", all, false, false, true}}));
  page.markdown("![The gain over LLaMA by depth](depth.svg)\n\n");
  page.differences("differences.svg", "Code: depth, against LLaMA of as many layers", groups);
}

// --- Generated tasks

void arith(Page& page) {
  const std::pair<const char*, const char*> settings[] = {{"base", "4 operators, 6,000 updates of 64, rate 0.001"},
                                                          {"rate", "three times the rate"},
                                                          {"batch-512", "750 updates of 512"},
                                                          {"decay", "weight decay 0.1"},
                                                          {"untied", "untied head"},
                                                          {"router-rate", "routers at the base rate"},
                                                          {"warm-up", "no warm-up"},
                                                          {"bf16", "bf16"},
                                                          {"integers", "integers instead of residues"},
                                                          {"tiers", "one model for 4 to 6 operators"},
                                                          {"operators-5", "5 operators"},
                                                          {"operators-6", "6 operators"},
                                                          {"updates-7812", "6 operators, 7,812 updates of 512"}};
  std::vector<DotGroup> groups;
  for (const auto& [name, caption] : settings) {
    const auto record = page.record(name);
    if (!record) continue;
    groups.push_back({caption, {}});
    for (const RecordedArm& arm : record->arms) groups.back().rows.push_back({arm.name, values_of(arm, answers_of)});
    page.curves(std::string(name) + ".svg", std::string("Arithmetic, ") + caption, arms_but(*record, ""));
  }
  page.answers("seeds.svg", "The arithmetic task: every seed", groups);
}

void prosqa(Page& page) {
  const auto record = page.record("prosqa");
  if (!record) return;
  DotGroup all{"all test questions", {}}, hard{"those where counting mentions fails", {}};
  for (const RecordedArm& arm : record->arms) {
    all.rows.push_back({arm.name, values_of(arm, answers_of)});
    hard.rows.push_back({arm.name, values_of(arm, hard_answers_of)});
  }
  page.curves("curves.svg", "ProsQA from scratch", arms_but(*record, ""));
  page.differences("losses.svg", "ProsQA: test losses, of reasoning and answers, against LLaMA",
                   {{"", record->arm("llama"), arms_but(*record, "")}});
  page.answers("seeds.svg", "ProsQA: every seed", {all, hard});
}

// --- Optimizers

// An optimizer with its settings: its arms of LLaMA and LIMe.
struct OptimizerSetting {
  std::string label;
  RecordedArm llama, lime;
};

// Every rate that an arm's own seed has tried, with its loss on the validation half.
std::string tried_rates(const RecordedArm& arm) {
  std::string out;
  for (const RecordedRate& one : arm.tried)
    out += (out.empty() ? "" : ", ") + lr_text(one.rate) + " " +
           (std::isfinite(one.test_loss) ? format_number("%.3f", one.test_loss) : "diverged");
  return out;
}

double best_of_tried(const RecordedArm& arm) {
  double best = INFINITY;
  for (const RecordedRate& one : arm.tried) best = std::min(best, one.test_loss);
  return best;
}

std::string loss_of(const RecordedArm& arm) {
  const Spread loss = spread_of(values_of(arm, test_loss_of));
  return format_number("%.3f", loss.mean) + (loss.n > 1 ? format_number(" ± %.3f", loss.sd) : "");
}

// Arms against a baseline, as rows of the figure and of the table.
void add_family(DotGroup& dots, std::string& table, const RecordedArm& baseline, const std::vector<LabelledArm>& arms) {
  const FamilyVerdict family = judge(baseline, arms);
  for (size_t i = 0; i < arms.size(); ++i) {
    const Verdict& verdict = family.arms[i];
    dots.rows.push_back(dots_of(arms[i], baseline, verdict));
    table += format_markdown_row({dots.caption, arms[i].label, difference_text(verdict, "%.3f"),
                                  verdict_text(arms[i].arm, baseline, verdict), format_number("%.4f", family.arms_sd),
                                  str(family.arms_degrees), format_number("%.3f", family.critical),
                                  format_number("%.3f", detectable_difference(family))});
  }
}

// AdamW with the betas and decays that were tried, then the others.
std::vector<OptimizerSetting> optimizer_settings(const Page& page, const Record& record) {
  const auto of = [&](const std::string& label, const Record& from, const std::string& suffix) {
    return OptimizerSetting{label, from.arm("llama" + suffix), from.arm("lime" + suffix)};
  };
  std::vector<OptimizerSetting> all = {of("adamw, betas 0.9, 0.95, decay 0.1", record, " adamw")};
  for (const auto& [name, label] : {std::pair("adamw-betas-0.9-0.99", "adamw, betas 0.9, 0.99"),
                                    {"adamw-betas-0.8-0.95", "adamw, betas 0.8, 0.95"},
                                    {"adamw-decay-0", "adamw, decay 0"},
                                    {"adamw-decay-0.4", "adamw, decay 0.4"}})
    if (const auto other = page.record(name)) all.push_back(of(label, *other, ""));
  std::stable_sort(all.begin(), all.end(), [](const OptimizerSetting& a, const OptimizerSetting& b) {
    return best_of_tried(a.llama) + best_of_tried(a.lime) < best_of_tried(b.llama) + best_of_tried(b.lime);
  });
  all.push_back(of("muon", record, " muon")), all.push_back(of("normuon", record, " normuon"));
  return all;
}

// How much longer the best AdamW trains for the same loss.
std::string tokens_for_the_same_loss(const Page& page, const std::vector<OptimizerSetting>& all) {
  std::vector<RecordedArm> longer;
  for (const int steps : {450, 600, 1200})
    if (const auto record = page.record(str("adamw-", steps, "-steps"))) longer.push_back(record->arm("llama"));
  if (longer.empty()) return "";
  std::string table = format_markdown_row({"LLaMA", "test loss", "lr"}) + "|---|---|---|\n";
  for (const RecordedArm& arm : longer)
    table += format_markdown_row(
        {str(format_count(arm.runs.begin()->second.tokens), " tokens"), loss_of(arm), rates_of(arm)});
  table += "\n" + format_markdown_row({"for the loss of", "tokens that AdamW needs"}) + "|---|---|\n";
  for (const OptimizerSetting& one : all)
    if (!one.label.starts_with("adamw"))
      table += format_markdown_row({one.label, tokens_needed(longer, one.llama, all[0].llama)});
  return "## More tokens for AdamW\n\n" + all[0].label +
         ", with more steps, each at its best of three rates. Between them in the logarithm of the tokens, seed by "
         "seed:\nmean ± standard deviation.\n\n" +
         table + "\n";
}

void recipe(Page& page) {
  const auto record = page.record("optimizers");
  if (!record) return;
  const std::vector<OptimizerSetting> all = optimizer_settings(page, *record);
  const OptimizerSetting& best = all[0];
  std::vector<LabelledArm> drawn;
  std::string losses = format_markdown_row({"", "LLaMA", "LIMe"}) + "|---|---|---|\n", tried;
  std::vector<LabelledArm> llamas, limes;  // of the other optimizers
  for (const OptimizerSetting& one : all) {
    losses += format_markdown_row({one.label, loss_of(one.llama), loss_of(one.lime)});
    for (const RecordedArm& arm : {one.llama, one.lime})
      tried +=
          format_markdown_row({one.label, arm.name.substr(0, arm.name.find(' ')), rates_of(arm), tried_rates(arm)});
    const bool adamw = one.label.starts_with("adamw");
    if (adamw && &one != &best) continue;
    drawn.push_back({"llama " + one.label, one.llama}), drawn.push_back({"lime " + one.label, one.lime});
    if (!adamw) llamas.push_back({one.label, one.llama}), limes.push_back({one.label, one.lime});
  }
  const OptimizerSetting &muon = all[all.size() - 2], &normuon = all.back();
  std::string table = format_markdown_row({"", "", "difference", "", "deviation", "degrees of freedom",
                                           "critical value", "80 % of repeats would find"}) +
                      "|---|---|---|---|---|---|---|---|\n";
  std::vector<DotGroup> groups = {{"LLaMA, against AdamW", {}},
                                  {"LIMe, against AdamW", {}},
                                  {"NorMuon against Muon", {}},
                                  {"LIMe against LLaMA", {}}};
  add_family(groups[0], table, best.llama, llamas), add_family(groups[1], table, best.lime, limes);
  add_family(groups[2], table, muon.llama, {{"llama", normuon.llama}});
  add_family(groups[2], table, muon.lime, {{"lime", normuon.lime}});
  for (const OptimizerSetting& one : {best, muon, normuon})
    add_family(groups[3], table, one.llama, {{one.label, one.lime}});
  page.curves("curves.svg", "English, three optimizers", drawn);
  page.picture("differences.svg", dots_svg({"English: optimizers", about_differences, groups, false, true}));
  page.markdown(
      "## Test loss\n\nMean ± standard deviation over the reported seeds, on the test half. AdamW by its loss on the "
      "validation half, best first.\n\n" +
      losses + "\n## Differences\n\n![differences](differences.svg)\n\nAgainst AdamW: " + best.label +
      ", which the validation half chose. Muon and NorMuon are one family against AdamW; else each line is one.\n\n" +
      table + "\n" + tokens_for_the_same_loss(page, all) +
      "## Rates that were tried\n\nOne seed, on the validation half: rate and loss. Of muon and normuon the rate is "
      "`--muon-lr`; all their other parameters\nhave AdamW's usual betas.\n\n" +
      format_markdown_row({"", "", "best lr", "tried"}) + "|---|---|---|---|\n" + tried + "\n");
}

// Operator-1 and its two halves against the plain model, by depth and optimizer.
void operator1(Page& page) {
  const std::pair<const char*, const char*> halves[] = {{"llama:loop=anchor", "Operator-1"},
                                                        {"llama:loop=anchor:loop_norm=none", "the anchor alone"},
                                                        {"llama:loop=anchor:loop_alpha=0", "the norm alone"}};
  std::vector<ComparedArms> groups;
  for (const char* d : {"4", "6", "8", "12"}) {
    const auto record = page.record(str("d", d));
    for (const std::string optimizer : {"adamw", "muon"}) {
      const auto find = [&](const std::string& arch) {
        return std::ranges::find_if(record->arms, [&](const RecordedArm& arm) {
          return arm.name.substr(0, arm.name.find(' ')) == arch && arm.runs.begin()->second.optimizer == optimizer;
        });
      };
      if (!record || find("llama") == record->arms.end()) continue;
      ComparedArms group{str("d = ", d, ", ", optimizer), *find("llama"), {}};
      for (const auto& [arch, label] : halves)
        if (const auto arm = find(arch); arm != record->arms.end()) group.arms.push_back({label, *arm});
      groups.push_back(group);
    }
  }
  if (!groups.empty()) page.differences("differences.svg", "Operator-1: test losses, against LLaMA", groups);
}

// What the newest models put beside a LLaMA.
void depth_2026(Page& page) {
  const auto record = page.record("d6");
  if (!record) return;
  page.curves("curves.svg", "Depth in 2026, on English", arms_but(*record, ""));
  page.differences("differences.svg", "Depth in 2026: test losses, against LLaMA",
                   {{"", record->arm("llama"), arms_but(*record, "llama")}});
}

void small(Page& page) {
  const auto record = page.record("small");
  if (!record) return;
  page.curves("curves.svg", "A small experiment, to be repeated", arms_but(*record, ""));
  page.differences("differences.svg", "A small experiment: test losses, against LLaMA",
                   {{"", record->arm("llama"), arms_but(*record, "")}});
}

// --- What all of it took

// Hours of training in every record below the directory.
std::string budget_of(const std::string& directory, const std::vector<std::string>& names) {
  std::vector<std::string> paths;
  std::error_code ignored;
  for (const std::string& name : names)
    for (const auto& entry : fs::directory_iterator(directory + "/" + name, ignored))
      if (entry.path().extension() == ".json") paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  std::string out = format_markdown_row({"record", "runs", "done", "tokens", "hours"}) + "|---|---|---|---|---|\n";
  double hours = 0;
  for (const std::string& path : paths) {
    const Record record = read_record(path);
    double own = 0;
    int64_t tokens = 0, done = 0;
    for (const RecordedRun& run : record.runs) {
      own += std::isfinite(run.seconds) ? run.seconds / 3600 : 0;
      tokens += run.tokens, done += run.state == "done";
    }
    hours += own;
    out +=
        format_markdown_row({fs::path(path).lexically_relative(directory).string(), str(record.runs.size()), str(done),
                             format_number("%.3gM", static_cast<double>(tokens) / 1e6), format_number("%.2f", own)});
  }
  return out + format_markdown_row({"**all**", "", "", "", format_number("**%.2f**", hours)});
}

}  // namespace

void draw_experiments(const std::string& directory) {
  std::error_code ignored;
  if (!fs::is_directory(directory, ignored))
    fail(Exit::no_input, directory, ": no such directory; start figures where the project is, or name the directory");
  const std::tuple<const char*, const char*, void (*)(Page&)> pages[] = {
      {"arith", "The arithmetic task", arith},
      {"twelve", "Twelve architectures on code", twelve},
      {"newer", "Connections of the largest open models", newer},
      {"routers", "LIMe's routers", routers},
      {"variants", "Variants of SATFormer, ResFormer, DenseFormer, hyper-connections and MUDDFormer", variants},
      {"literal", "What the literal choices cost", literal},
      {"depth", "Depth at a fixed width", depth},
      {"prosqa", "ProsQA from scratch", prosqa},
      {"recipe", "AdamW, Muon and NorMuon", recipe},
      {"operator1", "Operator-1: one norm and one addition", operator1},
      {"depth_2026", "What the newest models put beside a LLaMA", depth_2026},
      {"transfer", "The best learning rate by width and depth", transfer},
      {"small", "A small experiment", small}};
  std::vector<std::string> names;
  for (const auto& [name, title, draw] : pages) {
    Page page(directory + "/" + name, title);
    draw(page);
    page.finish();
    names.push_back(name);
  }
  write_file_atomically(
      directory + "/budget.md",
      "# What the experiments took\n\nWritten by `make figures`. Hours: of training, without tests of "
      "losses and answers, summed over runs\nthat mostly ran two at a time, a core each, beside other "
      "work.\n\n" +
          budget_of(directory, names));
}

}  // namespace crossply::figures
