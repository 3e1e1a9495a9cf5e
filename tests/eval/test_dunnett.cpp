#include "eval/dunnett.h"

#include "eval/statistics.h"

#include "engine/rng.h"
#include "tests/support/check.h"
#include "tests/support/tier.h"

using namespace crossply;
using namespace crossply::test;

namespace {

ArmLosses arm_of(const std::vector<double>& losses, uint64_t first_seed = 1) {
  ArmLosses arm;
  for (size_t i = 0; i < losses.size(); ++i) arm.seeds.push_back({first_seed + i, losses[i]});
  return arm;
}

// Tables of noise around 3, whose arms have these deviations.
class Tables {
 public:
  Tables(size_t backbone_seeds, std::vector<double> deviations)
      : backbone_seeds_(backbone_seeds), deviations_(std::move(deviations)) {}
  // The share with an alarm, where unsteady arms get three more seeds. shift: of the first arm.
  double alarms(int64_t count, double shift = 0, size_t arms_looked_at = SIZE_MAX) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      const ArmLosses backbone = arm_of(draw(backbone_seeds_, 1));
      std::vector<ArmLosses> arms;
      for (const double deviation : deviations_) arms.push_back(arm_of(draw(3, deviation)));
      for (SeedLoss& seed : arms[0].seeds) seed.loss += shift;
      for (const size_t place : unsteady(arms)) {
        arms[place].unsteady = true;
        for (const double loss : draw(3, deviations_[place]))
          arms[place].seeds.push_back({100, loss + (place == 0 ? shift : 0)});
      }
      const FamilyVerdict verdict = against_backbone(backbone, arms);
      bool any = false;
      for (size_t k = 0; k < std::min(arms.size(), arms_looked_at); ++k) any |= verdict.arms[k].found;
      found += any;
    }
    return static_cast<double>(found) / static_cast<double>(count);
  }

 private:
  std::vector<double> draw(size_t n, double deviation) {
    std::vector<double> out;
    for (size_t i = 0; i < n; ++i) out.push_back(3 + 0.02 * deviation * random_normal(7, 0, index_++));
    return out;
  }
  size_t backbone_seeds_;
  std::vector<double> deviations_;
  uint64_t index_ = 0;
};

}  // namespace

TEST_CASE("dunnett: the critical values are those of Dunnett's tables") {
  // Two-sided, 5 %, equal sizes; p arms, v degrees of freedom in all: Dunnett 1964, table 2.
  struct Row {
    int64_t arms, degrees;
    double critical;
  };
  for (const Row& row : std::vector<Row>{{1, 10, 2.23},
                                         {2, 10, 2.57},
                                         {3, 10, 2.76},
                                         {5, 10, 2.99},
                                         {9, 10, 3.24},
                                         {2, 20, 2.38},
                                         {5, 20, 2.73},
                                         {9, 20, 2.95},
                                         {3, 60, 2.41},
                                         {9, 60, 2.77}}) {
    CAPTURE(row.arms);
    CAPTURE(row.degrees);
    const std::vector<int64_t> n(static_cast<size_t>(row.arms), 5);
    CHECK(std::abs(dunnett_critical(5, 0, n, row.degrees) - row.critical) < 0.02);
  }
}

TEST_CASE("dunnett: Cochran's limits are those of the tables") {
  // 1 %: k variances of v degrees of freedom each (Eisenhart, Hastay and Wallis 1947, table 15.1).
  struct Row {
    size_t k;
    int64_t degrees;
    double limit;
  };
  for (const Row& row : std::vector<Row>{
           {2, 2, 0.9950}, {5, 2, 0.7885}, {10, 2, 0.5358}, {20, 2, 0.3297}, {10, 5, 0.3572}, {3, 10, 0.6743}}) {
    CAPTURE(row.k);
    CHECK(std::abs(cochran_limit(std::vector<int64_t>(row.k, row.degrees)) - row.limit) < 0.004);
  }
}

TEST_CASE("dunnett: differences, errors and intervals by hand") {
  const ArmLosses backbone = arm_of({3, 3.1, 2.9}), arm = arm_of({3.4, 3.5, 3.6}, 4);
  const FamilyVerdict one = against_backbone(backbone, {arm});
  CHECK(one.arms_sd == doctest::Approx(0.1));
  CHECK(one.arms_degrees == 4);
  CHECK(one.backbone_degrees == 0);
  CHECK(one.critical == doctest::Approx(2.776).epsilon(0.02));  // of one arm it is Student's
  CHECK(one.arms[0].difference == doctest::Approx(0.5));
  CHECK(one.arms[0].error == doctest::Approx(0.1 * std::sqrt(2.0 / 3)));
  CHECK(one.arms[0].found);
  CHECK(!one.blocks);
  CHECK(std::isnan(one.correlation));
  CHECK(!against_backbone(backbone, {arm_of({3.1, 3.0, 2.95}, 4)}).arms[0].found);
}

TEST_CASE("dunnett: seeds that all arms have are blocks") {
  const ArmLosses backbone = arm_of({2, 3, 4}), arm = arm_of({1.98, 2.978, 3.98});
  const FamilyVerdict one = against_backbone(backbone, {arm});
  // Of one arm it is Student's test of the differences -0.02, -0.022, -0.02.
  CHECK(one.blocks);
  CHECK(one.arms_degrees == 2);
  CHECK(one.arms[0].error == doctest::Approx(0.002 / 3));
  CHECK(one.arms[0].interval == doctest::Approx(4.3027 * 0.002 / 3).epsilon(0.03));
  CHECK(one.arms[0].found);
  CHECK(one.correlation == doctest::Approx(1).epsilon(1e-4));
  CHECK(!against_backbone(backbone, {arm_of({1.98, 2.978, 3.98}, 2)}).blocks);
  const FamilyVerdict two = against_backbone(backbone, {arm, arm_of({2.01, 3.01, 4.04})});
  CHECK(two.arms_degrees == 4);
  double squares = 0;
  const double rows[3][3] = {{2, 3, 4}, {1.98, 2.978, 3.98}, {2.01, 3.01, 4.04}};
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j) {
      double row = 0, column = 0, all = 0;
      for (int k = 0; k < 3; ++k) {
        row += rows[i][k] / 3, column += rows[k][j] / 3;
        for (int l = 0; l < 3; ++l) all += rows[k][l] / 9;
      }
      squares += std::pow(rows[i][j] - row - column + all, 2);
    }
  CHECK(two.arms_sd == doctest::Approx(std::sqrt(squares / 4)));
}

TEST_CASE("dunnett: arms beside a family add to its deviation, where they have the same seeds") {
  const ArmLosses backbone = arm_of({2, 3, 4}), arm = arm_of({1.98, 2.978, 3.98}), beside = arm_of({2.01, 3.01, 4.04});
  const FamilyVerdict both = against_backbone(backbone, {arm, beside});
  ArmLosses wild = beside;
  wild.unsteady = true;
  const FamilyVerdict one =
      against_backbone(backbone, {arm}, {beside, arm_of({2, 3}), arm_of({2, 3, 4}, 2), arm_of({2, NAN, 4}), wild});
  CHECK(one.arms.size() == 1);
  CHECK(one.arms_degrees == 4);
  CHECK(one.arms_sd == both.arms_sd);
  CHECK(one.critical == dunnett_critical(3, 0, {3}, 4));
  CHECK(one.arms[0].error == both.arms[0].error);
  // Without blocks nothing is added.
  const FamilyVerdict apart = against_backbone(backbone, {arm_of({1.98, 2.978, 3.98}, 4)}, {beside});
  CHECK(apart.arms_degrees == 4);
  CHECK(apart.arms_sd == doctest::Approx(1).epsilon(0.01));
}

TEST_CASE("dunnett: a backbone of many seeds has a deviation of its own") {
  const ArmLosses backbone = arm_of({3, 3.3, 2.7, 3, 3.3, 2.7, 3, 3.3, 2.7});
  const FamilyVerdict two = against_backbone(backbone, {arm_of({3.01, 3.0, 2.99}), arm_of({3.2, 3.21, 3.22})});
  CHECK(two.backbone_degrees == 8);
  CHECK(two.backbone_sd == doctest::Approx(std::sqrt(0.54 / 8)));
  CHECK(two.arms_sd == doctest::Approx(0.01));
  CHECK(two.arms[1].error == doctest::Approx(std::sqrt(0.54 / 8 / 9 + 0.0001 / 3)));
}

TEST_CASE("dunnett: a seed that diverged ends the test of its arm alone") {
  const ArmLosses backbone = arm_of({3, 3.1, 2.9});
  const FamilyVerdict verdict = against_backbone(backbone, {arm_of({9, NAN, 9}), arm_of({4, 4.1, 4.2}, 4)});
  CHECK(!verdict.arms[0].tested);
  CHECK(!verdict.arms[0].found);
  CHECK(verdict.arms[1].found);
  CHECK(verdict.arms_degrees == 4);
  const FamilyVerdict none = against_backbone(arm_of({NAN, 3, 3}), {arm_of({4, 4.1, 4.2})});
  CHECK(!none.arms[0].tested);
  CHECK(!against_backbone(arm_of({3}), {arm_of({4})}).arms[0].tested);  // nothing to know a deviation from
}

TEST_CASE("dunnett: against a backbone with a deviation of its own, unlike arms have moderated deviations") {
  std::vector<ArmLosses> arms(10, arm_of({3.0, 3.01, 2.99}));
  arms[4] = arm_of({3.0, 4.0, 2.0});
  const FamilyVerdict verdict = against_backbone(arm_of({3, 3.01, 2.99, 3, 3, 3.01, 2.99, 3}), arms);
  CHECK(std::isfinite(verdict.prior_degrees));
  CHECK(verdict.arms[4].tested);
  CHECK(verdict.arms[4].error > 10 * verdict.arms[3].error);
  CHECK(verdict.arms[4].interval == doctest::Approx(verdict.critical * verdict.arms[4].error));
  CHECK(detectable_difference(verdict) > 0);
}

TEST_CASE("dunnett: an arm unlike the others is tested by its own deviation") {
  std::vector<ArmLosses> arms(10, arm_of({3.0, 3.01, 2.99}));
  arms[4] = arm_of({3.0, 4.0, 2.0});
  CHECK(unsteady(arms) == std::vector<size_t>{4});
  arms[4].unsteady = true;
  const FamilyVerdict verdict = against_backbone(arm_of({3, 3.01, 2.99, 3.01, 2.99}), arms);
  CHECK(verdict.arms_sd == doctest::Approx(0.01));
  CHECK(verdict.arms[4].tested);
  CHECK(verdict.arms[4].welch);
  CHECK(!verdict.arms[3].welch);
  CHECK(verdict.arms[4].error > 0.5);
  CHECK(verdict.arms[4].interval > 5);  // two degrees of freedom at a level of 99.5 %
}

TEST_CASE("dunnett: arms against controls of their own are one list with one deviation") {
  const ArmLosses a{"a", {{1, 2.0}, {2, 2.2}, {3, 2.1}}}, a0{"a@frozen", {{1, 2.5}, {2, 2.7}, {3, 2.6}}};
  const ArmLosses b{"b", {{1, 2.0}, {2, 2.1}, {3, NAN}}}, b0{"b@frozen", {{1, 2.5}, {2, 2.5}, {3, 2.5}}};
  const std::vector<FamilyVerdict> verdicts = against_controls({{a0, a}, {b0, b}});
  REQUIRE(verdicts.size() == 2);
  CHECK(verdicts[0].arms_sd == doctest::Approx(0.1));
  CHECK(verdicts[0].arms_degrees == 4);
  CHECK(verdicts[0].critical == doctest::Approx(student_t(std::sqrt(0.95), 4)));
  CHECK(verdicts[0].arms[0].difference == doctest::Approx(-0.5));
  CHECK(verdicts[0].arms[0].interval == doctest::Approx(student_t(std::sqrt(0.95), 4) * 0.1 * std::sqrt(2.0 / 3)));
  CHECK(verdicts[0].arms[0].found);
  CHECK(!verdicts[1].arms[0].tested);  // a seed of it diverged
  CHECK(against_controls({}).empty());
}

TEST_CASE("dunnett: of tables of nothing but noise, one in twenty raises an alarm") {
  const double equal = Tables(12, std::vector<double>(26, 1.0)).alarms(10'000);
  MESSAGE("equal deviations: " << equal);
  CHECK((equal > 0.04 && equal < 0.06));
  const double few = Tables(3, std::vector<double>(3, 1.0)).alarms(10'000);
  MESSAGE("three arms and a backbone of the same three seeds: " << few);
  CHECK((few > 0.04 && few < 0.06));
}

TEST_CASE("dunnett: where arms' deviations are unlike each other, still at most one table in twelve raises an alarm") {
  // dev/experiments/twelve: what deviations of three seeds say of the true ones, over their root mean square; the
  // backbone's own is 1.
  const std::vector<double> of_twelve = {0.92, 0.365, 0.48, 0.83, 1.43, 1.19, 1.21, 0.86, 1.14, 0.455, 1.39};
  std::vector<double> arms;
  for (size_t i = 0; i < 26; ++i) arms.push_back(of_twelve[i % of_twelve.size()]);
  const double unequal = Tables(12, arms).alarms(everything() ? 10'000 : 2'000);
  MESSAGE("unequal deviations: " << unequal);
  CHECK(unequal < 0.08);
}

TEST_CASE("dunnett: against controls of their own, arms whose deviations are unlike each other, too") {
  const std::vector<double> of_twelve = {0.92, 0.365, 0.48, 0.83, 1.43, 1.19, 1.21, 0.86, 1.14, 0.455, 1.39};
  const auto alarms = [](const std::vector<double>& deviations) {
    const int64_t count = everything() ? 10'000 : 2'000;
    uint64_t index = 0;
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      std::vector<std::pair<ArmLosses, ArmLosses>> pairs;
      for (const double deviation : deviations) {
        const auto draw = [&] {
          std::vector<double> out;
          for (int k = 0; k < 3; ++k) out.push_back(3 + deviation * random_normal(8, 0, index++));
          return arm_of(out);
        };
        const ArmLosses control = draw();
        pairs.emplace_back(control, draw());
      }
      bool any = false;
      for (const FamilyVerdict& verdict : against_controls(pairs)) any |= verdict.arms[0].found;
      found += any;
    }
    return static_cast<double>(found) / static_cast<double>(count);
  };
  const double equal = alarms(std::vector<double>(11, 1.0)), unequal = alarms(of_twelve);
  MESSAGE("equal deviations: " << equal << ", unequal: " << unequal);
  CHECK((equal > 0.035 && equal < 0.065));
  CHECK(unequal < 0.08);
}

TEST_CASE("dunnett: the difference that could be seen is seen in four of five tables") {
  const ArmLosses backbone = arm_of({3, 3.02, 2.98, 3, 3.02, 2.98, 3, 3.02, 2.98, 3, 3.02, 2.98});
  std::vector<ArmLosses> arms(26, arm_of({3.02, 3, 2.98}));
  const FamilyVerdict verdict = against_backbone(backbone, arms);
  Tables tables(12, std::vector<double>(26, 1.0));
  // Of deviations 0.02, as arms_sd; the backbone's is a little less than that.
  const double detectable = detectable_difference(verdict), seen = tables.alarms(2'000, detectable, 1);
  MESSAGE("of " << detectable << ": " << seen);
  CHECK((seen > 0.77 && seen < 0.83));
}
