// Interactions of combinations (eval/interactions.h).
#include "eval/interactions.h"

#include "engine/rng.h"
#include "tests/support/check.h"

using namespace crossply;

namespace {

ArmLosses arm_of(const std::string& name, const std::vector<double>& losses) {
  ArmLosses arm{name, {}};
  for (size_t i = 0; i < losses.size(); ++i) arm.seeds.push_back({i + 1, losses[i]});
  return arm;
}

// A table of `pairs` disjoint pairs of arms: 12 seeds of the backbone, 6 of all others, and the share of tables with an
// interaction that is found. unequal: deviations are drawn, too, as inverses of chi-square with 8 degrees of
// freedom.
double share_found(int64_t pairs, double interaction, bool unequal, int tables = 2000) {
  int found = 0;
  for (int t = 0; t < tables; ++t) {
    uint64_t drawn = 0;
    const auto normal = [&] { return random_normal(7, static_cast<uint64_t>(t), drawn++); };
    const auto arm = [&](double mean, int seeds) {
      double chi = 0;
      for (int i = 0; i < 8; ++i) {
        const double x = normal();
        chi += x * x;
      }
      const double sd = unequal ? std::sqrt(8 / chi) : 1;
      std::vector<double> losses;
      for (int i = 0; i < seeds; ++i) losses.push_back(mean + sd * normal());
      return arm_of("arm", losses);
    };
    std::vector<ArmLosses> arms = {arm(0, 12)};
    std::vector<Combination> list;
    for (int64_t p = 0; p < pairs; ++p) {
      const size_t at = arms.size();
      arms.push_back(arm(-1, 6)), arms.push_back(arm(-2, 6)), arms.push_back(arm(-3 + interaction, 6));
      list.push_back({at + 2, {at, at + 1}});
    }
    const std::vector<Interaction> all = interactions(arms, list);
    found += std::ranges::any_of(all, [](const Interaction& one) { return one.found; });
  }
  return static_cast<double>(found) / tables;
}

}  // namespace

TEST_CASE("interactions: by hand, of two parts and of three") {
  const std::vector<ArmLosses> arms = {arm_of("0", {5, 5.2}), arm_of("a", {4, 4.2}),    arm_of("b", {4.5, 4.7}),
                                       arm_of("c", {4.8, 5}), arm_of("ab", {3.9, 4.1}), arm_of("abc", {3.7, 3.9})};
  const std::vector<Interaction> all = interactions(arms, {{4, {1, 2}}, {5, {1, 2, 3}}});
  CHECK(all[0].value == doctest::Approx(4.0 - 4.1 - 4.6 + 5.1));
  CHECK(all[1].value == doctest::Approx(3.8 - 4.1 - 4.6 - 4.9 + 2 * 5.1));
  const double variance = 0.02;  // of each arm, so also the pooled one, of 6 degrees of freedom
  CHECK(all[0].error == doctest::Approx(std::sqrt(variance * 4 / 2)));
  CHECK(all[1].error == doctest::Approx(std::sqrt(variance * (4 + 4.0) / 2)));
  CHECK(all[0].interval == doctest::Approx(student_t(std::sqrt(0.95), 6) * all[0].error));
  CHECK((all[0].tested && !all[0].found));
}

TEST_CASE("interactions: a seed that diverged, or an arm without one, is not tested") {
  std::vector<ArmLosses> arms = {arm_of("0", {5, 5.2}), arm_of("a", {4, NAN}), arm_of("b", {4.5, 4.7}),
                                 arm_of("ab", {})};
  CHECK_FALSE(interactions(arms, {{3, {1, 2}}})[0].tested);
  arms[1] = arm_of("a", {4, 4.1});
  CHECK_FALSE(interactions(arms, {{3, {1, 2}}})[0].tested);
  CHECK(interactions({}, {}).empty());
}

TEST_CASE("interactions: one table of twenty without any raises an alarm, and what is named is found in 80 of 100") {
  CHECK(share_found(10, 0, false) == doctest::Approx(0.05).epsilon(0.3));  // 0.035 to 0.065; an error is 0.005
  const double unequal = share_found(10, 0, true);
  CHECK(unequal < 0.08);
  const auto seen = [] {
    std::vector<ArmLosses> arms;
    uint64_t drawn = 0;
    for (int a = 0; a < 31; ++a) {
      std::vector<double> losses;
      for (int i = 0; i < (a == 0 ? 12 : 6); ++i) losses.push_back(random_normal(3, 1, drawn++));
      arms.push_back(arm_of("arm", losses));
    }
    std::vector<Combination> list;
    for (size_t p = 0; p < 10; ++p) list.push_back({3 * p + 3, {3 * p + 1, 3 * p + 2}});
    return interactions(arms, list)[0].detectable;
  }();
  CHECK(share_found(1, seen, false, 500) > 0.75);  // alone it is found more easily than among ten
}
