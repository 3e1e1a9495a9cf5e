#include "dev/figures/transfer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

#include "cli/curve.h"
#include "cli/format.h"
#include "train/lab/comparison.h"

namespace crossply::figures {
namespace {

constexpr const char* base_name = "C = 64, L = 4";

// Of one size and optimizer, in ascending order of rates.
struct RateLine {
  std::string label;
  std::map<uint64_t, std::vector<Tried>> seeds;
  std::vector<Tried> mean = {};  // over the seeds; not finite where one diverged
  RateChoice best = {};
  double base_rate = NAN;  // the best of the base shape, by the mean and by seed
  std::map<uint64_t, double> base_rates = {};
};

RateLine line_of(const std::string& label, const Record& record, const std::string& optimizer) {
  std::map<double, std::map<uint64_t, double>> losses;
  for (const RecordedRun& run : record.runs)
    if (run.optimizer == optimizer && (run.state == "done" || run.state == "failed"))
      losses[std::isfinite(run.muon_lr) ? run.muon_lr : run.lr][run.seed] = run.state == "done" ? run.test_loss : NAN;
  RateLine line{label, {}};
  for (const auto& [rate, by_seed] : losses) {
    double sum = 0;
    for (const auto& [seed, loss] : by_seed) sum += loss, line.seeds[seed].push_back({rate, loss, true});
    line.mean.push_back({rate, sum / static_cast<double>(by_seed.size()), true});
  }
  line.best = choose_rate(line.mean);
  return line;
}

// How far a rate is from another, in factors of 2.
std::string moved(double rate, double from) { return format_number("%+.2f", std::log2(rate / from)); }

// By the mean over the seeds, in brackets by each seed alone.
std::string moved(const RateLine& line) {
  std::string each;
  for (const auto& [seed, tried] : line.seeds)
    if (const auto base = line.base_rates.find(seed); base != line.base_rates.end())
      each += (each.empty() ? "" : ", ") + moved(choose_rate(tried).rate, base->second);
  return moved(line.best.rate, line.base_rate) + (line.base_rates.size() > 1 ? " (" + each + ")" : "");
}

// The loss at a rate, by a parabola through the three that are nearest, in the logarithm of the rate, as choose_rate()
// has it; NaN beside one that diverged.
double loss_at(const std::vector<Tried>& tried, double rate) {
  if (tried.size() < 3) return NAN;
  const auto distance = [&](const Tried& one) { return std::abs(std::log(one.rate / rate)); };
  const auto nearest = std::ranges::min_element(tried, {}, distance) - tried.begin();
  const auto first = std::clamp<std::ptrdiff_t>(nearest - 1, 0, std::ssize(tried) - 3);
  double loss = 0;
  for (const Tried& one : std::span(tried).subspan(static_cast<size_t>(first), 3)) {
    double share = 1;  // 1 at its own rate, 0 at the other two
    for (const Tried& other : std::span(tried).subspan(static_cast<size_t>(first), 3))
      if (&other != &one) share *= std::log(rate / other.rate) / std::log(one.rate / other.rate);
    loss += share * one.loss;
  }
  return loss;
}

std::string row_of(const RateLine& line, const std::string& rules) {
  const double price = loss_at(line.mean, line.base_rate) - line.best.loss;
  const bool own = line.label == base_name;
  return format_markdown_row({line.label, rules, lr_text(line.best.rate) + (line.best.at_edge ? " (edge)" : ""),
                              own ? "" : moved(line), format_number("%.3f", line.best.loss),
                              own                    ? ""
                              : std::isfinite(price) ? format_number("%+.3f", price)
                                                     : "diverges nearby"});
}

Curve curve_of(const RateLine& line, int look) {
  Curve curve{line.label, {}, {}};
  for (const Tried& one : line.mean) curve.x.push_back(one.rate), curve.y.push_back(one.loss);
  curve.broken_off = !line.mean.empty() && !std::isfinite(line.mean.back().loss);
  curve.marks_x = {line.best.rate}, curve.marks_y = {line.best.loss};
  curve.look = look;
  return curve;
}

// Widths or depths with one optimizer: a picture of what the rules change, and a table.
void draw_family(Page& page, const std::string& subject, const std::string& optimizer, const std::string& file,
                 const std::vector<std::pair<std::string, std::string>>& sizes) {
  const auto base_record = page.record("base");
  if (!base_record) return;
  const RateLine base = line_of(base_name, *base_record, optimizer);
  std::string table = format_markdown_row({"", "", "best rate", "moved", "loss there", "more at the base's rate"}) +
                      "|---|---|---|---|---|---|\n" + row_of(base, "");
  std::vector<Panel> panels;
  for (const auto& [rule, caption] : {std::pair{"none", "without rules"}, {"completep", "with --transfer"}}) {
    Panel panel{str("test loss, ", caption), "the best rate", {curve_of(base, 0)}};
    for (const auto& [label, name] : sizes)
      if (const auto record = page.record(name + "-" + rule)) {
        RateLine line = line_of(label, *record, optimizer);
        line.base_rate = base.best.rate;
        for (const auto& [seed, tried] : base.seeds) line.base_rates[seed] = choose_rate(tried).rate;
        panel.curves.push_back(curve_of(line, static_cast<int>(panel.curves.size())));
        table += row_of(line, caption);
      }
    if (panel.curves.size() > 1) panels.push_back(panel);
  }
  if (panels.empty() || base.mean.empty()) return;
  const bool adamw = optimizer == "adamw";
  const std::string title = str("The best learning rate by ", subject, adamw ? ", AdamW" : ", Muon");
  page.picture(file, curve_svg(title, str("learning rate, ", adamw ? "--lr" : "--muon-lr"), panels, true));
  page.markdown("## " + title + "\n\n![" + title + "](" + file + ")\n\n" + table + "\n");
}

}  // namespace

void transfer(Page& page) {
  if (!page.record("base")) return;
  page.markdown(
      "LLaMA on English. The base shape is C = 64, L = 4, heads of 16; there the rules change nothing. Loss: on the\n"
      "test set, mean over the seeds. Best rate: the lowest point of a parabola through the best rate and those "
      "beside\n"
      "it, in the logarithm of the rate. Moved: from the base's best rate, in factors of 2; in brackets each seed\n"
      "against the same seed of the base. Last: what it costs to keep the base's best rate.\n\n");
  for (const std::string optimizer : {"adamw", "muon"}) {
    draw_family(page, "width", optimizer, "width-" + optimizer + ".svg",
                {{"C = 128, L = 4", "width-128"}, {"C = 256, L = 4", "width-256"}});
    draw_family(page, "depth", optimizer, "depth-" + optimizer + ".svg",
                {{"C = 64, L = 8", "layers-8"}, {"C = 64, L = 16", "layers-16"}});
  }
}

}  // namespace crossply::figures
