// What deviations of many arms have in common.
#include "eval/deviations.h"

#include "engine/rng.h"
#include "eval/draw.h"
#include "tests/support/check.h"

using namespace crossply;

TEST_CASE("deviations: digamma and trigamma are those of the tables") {
  CHECK(digamma(1) == doctest::Approx(-0.57721566490153).epsilon(1e-11));
  CHECK(digamma(0.5) == doctest::Approx(-1.96351002602142).epsilon(1e-11));
  CHECK(digamma(20) == doctest::Approx(2.97052399224214).epsilon(1e-11));
  CHECK(trigamma(1) == doctest::Approx(1.64493406684823).epsilon(1e-11));
  CHECK(trigamma(0.5) == doctest::Approx(4.93480220054468).epsilon(1e-11));
  CHECK(trigamma(20) == doctest::Approx(0.05127082293520).epsilon(1e-10));
}

TEST_CASE("deviations: equal ones are mostly taken for equal, unequal ones are not, and what they share is found") {
  int equal = 0, unlike_found = 0;
  double logs = 0;
  Draw draw("test of deviations");
  for (int table = 0; table < 200; ++table) {
    std::vector<double> same, unlike;
    for (int i = 0; i < 26; ++i) {
      same.push_back(4 * draw.variance(2));
      unlike.push_back(4 / draw.variance(3) * draw.variance(5));
    }
    equal += common_variance(same, std::vector<int64_t>(26, 2)).equal();
    const CommonVariance common = common_variance(unlike, std::vector<int64_t>(26, 5));
    unlike_found += !common.equal();
    logs += std::log(common.variance / 4) / 200;
    CHECK(common.moderated(common.variance, 5) == doctest::Approx(common.variance));
    CHECK(common.moderated(0, 5) > 0);
  }
  CHECK(equal > 130);
  CHECK(equal < 170);
  CHECK(unlike_found > 180);
  CHECK(std::abs(logs) < 0.1);
}

TEST_CASE("deviations: few arms, or arms without any, have one") {
  CHECK(common_variance({1, 100}, {2, 2}).equal());
  CHECK(common_variance({1, 100}, {2, 4}).variance == doctest::Approx(402.0 / 6));
  CHECK(common_variance({0, 0, 0, 0}, {2, 2, 2, 2}).equal());
  CHECK(common_variance({0, 0, 0, 0}, {2, 2, 2, 2}).moderated(0, 2) == 0);
}
