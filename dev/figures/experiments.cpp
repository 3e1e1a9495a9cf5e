#include "dev/figures/experiments.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>

#include "cli/curve.h"
#include "cli/format.h"
#include "dev/figures/page.h"
#include "engine/file.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;

// --- Twelve architectures

// What a yardstick reaches with so many times its work, between the lengths at which it was trained; NaN beyond them.
double loss_at(const std::vector<std::pair<double, double>>& work_and_loss, double work) {
  for (size_t i = 1; i < work_and_loss.size(); ++i) {
    const auto [x0, y0] = work_and_loss[i - 1];
    const auto [x1, y1] = work_and_loss[i];
    if (work >= x0 && work <= x1) return y0 + (y1 - y0) * std::log(work / x0) / std::log(x1 / x0);
  }
  return NAN;
}

// LLaMA's mean losses by how many times the tokens of the comparison it saw, each with a schedule of its own.
std::vector<std::pair<double, double>> longer_llamas(const Page& page, const RecordedArm& llama) {
  const double tokens = static_cast<double>(llama.runs.begin()->second.tokens);
  std::vector<std::pair<double, double>> frontier = {{1, spread_of(values_of(llama, test_loss_of)).mean}};
  for (const char* name : {"llama-640-steps", "llama-768-steps", "llama-1024-steps"})
    if (const auto record = page.record(name)) {
      const RecordedArm arm = record->arm("llama");
      frontier.emplace_back(static_cast<double>(arm.runs.begin()->second.tokens) / tokens,
                            spread_of(values_of(arm, test_loss_of)).mean);
    }
  return frontier;
}

std::string signed_or_dash(double value) {
  if (!std::isfinite(value)) return "-";
  return (value < 0 ? "-" : "+") + format_number("%.3f", std::abs(value));
}

// What the difference is once LLaMA is given the FLOPs, or the time, that the other takes.
void equal_work(Page& page, const Record& record) {
  const RecordedArm llama = record.arm("llama");
  const auto frontier = longer_llamas(page, llama);
  const auto speed = page.record("speed");
  if (frontier.size() < 2 || !speed) return;
  const RecordedRun &one = llama.runs.begin()->second, &timed = speed->arm("llama").runs.begin()->second;
  std::string table = format_markdown_row({"", "FLOPs", "time", "memory", "against LLaMA at equal tokens",
                                           "at equal FLOPs", "at equal time"}) +
                      "|---|---|---|---|---|---|---|\n";
  for (const RecordedArm& arm : record.arms()) {
    const RecordedRun& run = arm.runs.begin()->second;
    const double loss = spread_of(values_of(arm, test_loss_of)).mean;
    const double flops = run.flops_per_token / one.flops_per_token;
    const double time = timed.tokens_per_second / speed->arm(arm.name).runs.begin()->second.tokens_per_second;
    table +=
        format_markdown_row({arm.name, format_number("%.3fx", flops), format_number("%.2fx", time),
                             format_number("%.2fx", run.memory / one.memory), signed_or_dash(loss - frontier[0].second),
                             signed_or_dash(loss - loss_at(frontier, flops)),
                             signed_or_dash(loss - loss_at(frontier, std::max(1.0, time)))});
  }
  page.markdown(
      "## Equal FLOPs, equal time\n\nLLaMA's loss with more tokens is interpolated, in the logarithm of the work, "
      "between runs of 512, 640, 768 and 1,024\nsteps that each have their own schedule; time: of a step, alone "
      "on the machine.\n\n" +
      table + "\n");
}

void twelve(Page& page) {
  const auto record = page.record("equal-tokens");
  if (!record) return;
  std::vector<LabelledArm> all = arms_but(*record, "");
  page.curves("curves.svg", "Twelve architectures, equal tokens", all);
  page.differences("differences.svg", "Twelve architectures against LLaMA", {{"", record->arm("llama"), all}});
  equal_work(page, *record);
}

// --- Groups of variants, whose defaults and yardsticks are in other records

std::optional<Record> text_record(const Page& page) { return page.record("../twelve/equal-tokens"); }

void routers(Page& page) {
  const auto base = text_record(page), record = page.record("ablation");
  if (!base || !record) return;
  std::vector<LabelledArm> arms = {{"lime: full", base->arm("lime")}};
  for (const LabelledArm& arm : arms_but(*record, "")) arms.push_back(arm);
  arms.push_back({"llama", base->arm("llama")});
  page.differences("differences.svg", "LIMe's routers, against LLaMA", {{"", base->arm("llama"), arms}});
}

void variants(Page& page) {
  const auto base = text_record(page);
  if (!base) return;
  std::vector<ComparedArms> groups;
  for (const char* name : {"satformer", "resformer", "denseformer", "hyper", "mudd"})
    if (const auto record = page.record(name)) {
      ComparedArms group{name, base->arm("llama"), {{std::string(name) + " (default)", base->arm(name)}}};
      for (const LabelledArm& arm : arms_but(*record, name)) group.arms.push_back(arm);
      groups.push_back(group);
    }
  page.differences("differences.svg", "Variants, against LLaMA", groups);
}

// A default and what a paper or its code has in its place.
void literal(Page& page) {
  const auto base = text_record(page);
  if (!base) return;
  std::vector<ComparedArms> groups;
  for (const char* name :
       {"lime", "lime_static", "lime_dynamic", "hyper", "vertical", "resformer", "satformer", "denseformer", "mudd"})
    if (const auto record = page.record(name))
      groups.push_back(
          {std::string("against ") + name + " with its defaults", base->arm(name), arms_but(*record, name)});
  if (const auto record = page.record("gpt2"))
    if (const auto scaled = page.record("gpt2-index-scaling"))
      groups.push_back(
          {"against gpt2", record->arm("gpt2"), {{"gpt2: logits divided by the layer", scaled->arm("gpt2")}}});
  page.differences("differences.svg", "What the literal choices cost", groups);
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
  page.picture(
      "depth.svg",
      curve_svg("The gain over LLaMA by depth", "layers",
                {{"difference of test losses; mean \u00B1 one standard deviation", "", all, false, false, true}}));
  page.markdown("![The gain over LLaMA by depth](depth.svg)\n\n");
  page.differences("differences.svg", "Depth, against LLaMA of as many layers", groups);
}

// --- Generated tasks

void arith(Page& page) {
  const std::pair<const char*, const char*> settings[] = {{"base", "4 operators, 6,000 updates of 64, rate 0.001"},
                                                          {"rate", "three times the rate"},
                                                          {"batch-512", "750 updates of 512"},
                                                          {"batch-16", "24,000 updates of 16"},
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
    for (const RecordedArm& arm : record->arms()) groups.back().rows.push_back({arm.name, values_of(arm, answers_of)});
    page.curves(std::string(name) + ".svg", caption, arms_but(*record, ""));
  }
  page.answers("seeds.svg", "The arithmetic task: every seed", groups);
}

void prosqa(Page& page) {
  const auto record = page.record("prosqa");
  if (!record) return;
  DotGroup group;
  for (const RecordedArm& arm : record->arms()) group.rows.push_back({arm.name, values_of(arm, answers_of)});
  page.curves("curves.svg", "ProsQA from scratch", arms_but(*record, ""));
  page.answers("seeds.svg", "ProsQA: every seed", {group});
}

void small(Page& page) {
  const auto record = page.record("small");
  if (!record) return;
  page.curves("curves.svg", "A small experiment, to be repeated", arms_but(*record, ""));
}

// --- What all of it took

// Hours of training in every record below the directory.
std::string budget_of(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
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
      tokens += run.tokens, done += run.done;
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
      {"routers", "LIMe's routers", routers},
      {"variants", "Variants of SATFormer, ResFormer, DenseFormer, hyper-connections and MUDDFormer", variants},
      {"literal", "What the literal choices cost", literal},
      {"depth", "Depth at a fixed width", depth},
      {"prosqa", "ProsQA from scratch", prosqa},
      {"small", "A small experiment", small}};
  for (const auto& [name, title, draw] : pages) {
    Page page(directory + "/" + name, title);
    draw(page);
    page.finish();
  }
  write_file_atomically(
      directory + "/budget.md",
      "# What the experiments took\n\nWritten by `make figures`. Hours: of training, summed over runs "
      "that mostly ran two at a time, a core each.\n\n" +
          budget_of(directory));
}

}  // namespace crossply
