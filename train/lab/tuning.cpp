#include "train/lab/tuning.h"

#include <algorithm>

#include "cli/bounds.h"
#include "cli/format.h"
#include "engine/numbers.h"

namespace crossply {
namespace {

constexpr size_t max_beyond = 3;  // rates that are added to a grid

// The place of the lowest loss; none: tried.size().
size_t best_of(const std::vector<Tried>& tried) {
  size_t best = tried.size();
  for (size_t i = 0; i < tried.size(); ++i)
    if (std::isfinite(tried[i].loss) && (best == tried.size() || tried[i].loss < tried[best].loss)) best = i;
  return best;
}

bool is_edge(const std::vector<Tried>& tried, size_t place) {
  return tried.size() > 1 && (place == 0 || place + 1 == tried.size());
}

}  // namespace

double readable_rate(double rate) { return parse_number(format_number("%.3g", rate)).value_or(0); }

RateChoice choose_rate(const std::vector<Tried>& tried) {
  RateChoice out;
  const size_t i = best_of(tried);
  if (i == tried.size()) return out;
  out.best = out.rate = tried[i].rate, out.loss = tried[i].loss;
  out.at_edge = is_edge(tried, i);
  if (i == 0 || i + 1 == tried.size() || !std::isfinite(tried[i - 1].loss) || !std::isfinite(tried[i + 1].loss))
    return out;
  // y = y_i + slope x + bend x^2 with x = ln(rate / best), from the two chords at the best.
  const double left = std::log(tried[i - 1].rate / out.best), right = std::log(tried[i + 1].rate / out.best);
  const double of_left = (tried[i - 1].loss - tried[i].loss) / left,
               of_right = (tried[i + 1].loss - tried[i].loss) / right;
  const double bend = (of_right - of_left) / (right - left), slope = of_left - bend * left;
  if (!(bend > 0)) return out;  // three equal losses
  out.rate = readable_rate(out.best * std::exp(-slope / (2 * bend)));
  out.loss -= slope * slope / (4 * bend);
  out.basin = std::exp(std::sqrt(basin_height / bend));
  return out;
}

std::optional<double> rate_beyond(const std::vector<Tried>& tried, size_t asked) {
  const size_t i = best_of(tried);
  if (i == tried.size() || !is_edge(tried, i) || tried.size() >= asked + max_beyond ||
      !std::ranges::all_of(tried, &Tried::ended))
    return {};
  const double edge = tried[i].rate, neighbour = tried[i == 0 ? 1 : i - 1].rate;
  const double beyond = readable_rate(edge * std::clamp(edge / neighbour, 0.1, 10.0));
  if (!(beyond > 0 && beyond <= max_number)) return {};
  return beyond;
}

}  // namespace crossply
