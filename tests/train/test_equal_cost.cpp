// What a loss is worth in the backbone's steps.
#include "train/lab/equal_cost.h"

#include "tests/support/check.h"

using namespace crossply;

TEST_CASE("equal cost: a loss on the curve is worth its steps, between budgets on a line in their logarithm") {
  const std::vector<Budget> budgets = {{2, {3.0, 3.0}}, {0.5, {4.0, 4.0}}, {1, {3.5, 3.5}}};  // in any order
  CHECK(worth_of(budgets, {3.5}).times == doctest::Approx(1));
  CHECK(worth_of(budgets, {4.0}).times == doctest::Approx(0.5));
  CHECK(worth_of(budgets, {3.25}).times == doctest::Approx(std::sqrt(2)));
  CHECK(worth_of(budgets, {3.25}).high_open == false);
  const Worth exact = worth_of(budgets, {3.2, 3.3});
  CHECK(exact.times == doctest::Approx(std::sqrt(2)));
  CHECK(exact.low < exact.times);
  CHECK(exact.high > exact.times);
  CHECK(exact.beyond == 0);
  CHECK(worth_of(budgets, {2.9}).beyond == 1);
  CHECK(worth_of(budgets, {2.9}).times == doctest::Approx(2));
  CHECK(worth_of(budgets, {4.1}).beyond == -1);
  const Worth near_the_end = worth_of(budgets, {2.9, 3.2});
  CHECK(near_the_end.high == doctest::Approx(2));
  CHECK(near_the_end.high_open);
  CHECK(!near_the_end.low_open);
  CHECK(worth_of(budgets, {3.5, 3.5}).low == doctest::Approx(1));  // nothing varies
}

TEST_CASE("equal cost: means that rise with the steps are pooled, and without a curve there is no answer") {
  // 3.6 and 3.4 are one point of 3.5, half-way between 1 and 4 times the steps.
  const Worth worth = worth_of({{0.5, {4.0}}, {1, {3.4}}, {4, {3.6}}, {8, {3.0}}}, {3.5});
  CHECK(worth.times == doctest::Approx(2));
  CHECK(std::isnan(worth.low));  // of one seed each
  // Of a pool at the end, too, "more than" names the longest budget.
  CHECK(worth_of({{0.5, {4.0}}, {1, {3.4}}, {2, {3.5}}}, {3.0}).times == doctest::Approx(2));
  CHECK(std::isnan(worth_of({{1, {3.5}}}, {3.5}).times));
  CHECK(std::isnan(worth_of({{1, {3.5}}, {2, {}}}, {3.5}).times));
  CHECK(std::isnan(worth_of({{1, {3.5}}, {2, {3.0}}}, {}).times));
  CHECK(std::isnan(worth_of({{1, {3.0}}, {2, {3.5}}}, {3.2}).times));
}

TEST_CASE("equal cost: the interval holds the truth about as often as it says") {
  // A line of .5 nats for each doubling, seeds of a deviation of .05; an arm worth 1.2 times the steps.
  uint64_t state = 1;
  const auto uniform = [&] {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<double>(state >> 11) * 0x1p-53;
  };
  const auto noise = [&] {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return 0.05 * sum;
  };
  const auto losses = [&](double times, int seeds) {
    std::vector<double> out;
    for (int i = 0; i < seeds; ++i) out.push_back(3 - 0.5 * std::log2(times) + noise());
    return out;
  };
  int held = 0;
  constexpr int tables = 400;
  for (int i = 0; i < tables; ++i) {
    std::vector<Budget> budgets;
    for (const double times : {0.5, 0.7, 1.4, 2.0}) budgets.push_back({times, losses(times, 3)});
    budgets.push_back({1, losses(1, 12)});
    const Worth worth = worth_of(budgets, losses(1.2, 3));
    held += worth.low <= 1.2 && 1.2 <= worth.high;
  }
  MESSAGE(held << " of " << tables);
  CHECK(held >= 0.92 * tables);  // 95 % less three standard deviations of a share of 400
  CHECK(held <= 0.98 * tables);
}
