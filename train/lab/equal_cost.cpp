#include "train/lab/equal_cost.h"

#include <algorithm>
#include <cmath>

#include "engine/rng.h"
#include "eval/statistics.h"

namespace crossply {
namespace {

constexpr int repeats = 10'000;

struct Point {
  double x, y, weight;  // the logarithm of steps, a loss that does not rise with them
};

// Neighbours whose losses rise have their common mean, by seeds.
std::vector<Point> falling(const std::vector<Point>& points) {
  std::vector<std::vector<Point>> pools;
  const auto mean = [](const std::vector<Point>& pool) {
    double sum = 0, weight = 0;
    for (const Point& point : pool) sum += point.weight * point.y, weight += point.weight;
    return sum / weight;
  };
  for (const Point& point : points) {
    pools.push_back({point});
    while (pools.size() > 1 && mean(pools.back()) >= mean(pools[pools.size() - 2])) {
      std::vector<Point>& into = pools[pools.size() - 2];
      into.insert(into.end(), pools.back().begin(), pools.back().end());
      pools.pop_back();
    }
  }
  std::vector<Point> out;
  for (const std::vector<Point>& pool : pools) {  // in the middle of its steps
    double x = 0;
    for (const Point& point : pool) x += point.x / static_cast<double>(pool.size());
    out.push_back({x, mean(pool), 1});
  }
  return out;
}

// shortest, longest: of the budgets, which pools may have drawn inwards.
Worth at(const std::vector<Point>& points, double loss, double shortest, double longest) {
  Worth out;
  if (points.size() < 2) return out;
  if (loss > points.front().y) return {shortest, -1};
  if (loss < points.back().y) return {longest, 1};
  size_t i = 1;
  while (points[i].y > loss) ++i;
  const Point &a = points[i - 1], &b = points[i];
  out.times = std::exp(a.x + (b.x - a.x) * (a.y - loss) / (a.y - b.y));
  return out;
}

void add_deviations(std::vector<double>& pool, const std::vector<double>& losses) {
  const auto n = static_cast<double>(losses.size());
  const double mean = spread_of(losses).mean;
  if (n < 2) return;
  for (const double loss : losses) pool.push_back((loss - mean) * std::sqrt(n / (n - 1)));
}

// What the mean of n seeds is off by, in one repeat.
double resampled_error(size_t n, const std::vector<double>& pool, Random& random) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += pool[static_cast<size_t>(random.below(std::ssize(pool)))];
  return sum / static_cast<double>(n);
}

}  // namespace

Worth worth_of(std::vector<Budget> budgets, const std::vector<double>& losses) {
  std::erase_if(budgets, [](const Budget& budget) { return budget.losses.empty(); });
  std::ranges::sort(budgets, {}, &Budget::times);
  if (budgets.size() < 2 || losses.empty()) return {};
  std::vector<Point> means;
  std::vector<double> pool;
  for (const Budget& budget : budgets) {
    means.push_back({std::log(budget.times), spread_of(budget.losses).mean, static_cast<double>(budget.losses.size())});
    add_deviations(pool, budget.losses);
  }
  add_deviations(pool, losses);
  const double mean = spread_of(losses).mean, shortest = budgets.front().times, longest = budgets.back().times;
  Worth out = at(falling(means), mean, shortest, longest);
  if (pool.empty()) return out;
  Random random(0, stream_of("worth"));
  std::vector<double> drawn;
  for (int i = 0; i < repeats; ++i) {
    std::vector<Point> points = means;
    for (size_t k = 0; k < points.size(); ++k) points[k].y += resampled_error(budgets[k].losses.size(), pool, random);
    const double loss = mean + resampled_error(losses.size(), pool, random);
    const double times = at(falling(points), loss, shortest, longest).times;
    if (std::isfinite(times)) drawn.push_back(times);
  }
  if (drawn.size() < repeats / 2) return out;
  std::ranges::sort(drawn);
  out.low = drawn[drawn.size() / 40], out.high = drawn[drawn.size() - 1 - drawn.size() / 40];
  out.low_open = out.low <= shortest, out.high_open = out.high >= longest;
  return out;
}

}  // namespace crossply
