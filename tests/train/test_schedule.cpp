#include "train/settings/schedule.h"

#include "tests/support/check.h"

using namespace crossply;

TEST_CASE("schedule: the multiplier of every kind, by hand, from the first step of the warm-up to behind the last") {
  // W = 2, K = 6, a floor of 0.2, D = 2: steps 0 to 6, of which the last is behind the end.
  const double half = std::sqrt(0.5);
  const double cosine[] = {1, (1 + half) / 2, 0.5, (1 - half) / 2, 0};  // q = 0, 1/4, 1/2, 3/4, 1
  const double cooled[] = {0, 0, 0, 0.5, 1};                            // p
  for (const std::string& name : schedules) {
    CAPTURE(name);
    const Schedule schedule{schedule_kind(name), 2, 6, 0.2, 2};
    const bool from_zero = name == "cosine" || name == "cosine_from_zero";
    CHECK(schedule.at(0) == (from_zero ? 0 : 0.5));
    CHECK(schedule.at(1) == (from_zero ? 0.5 : 1));
    for (int64_t k = 2; k <= 6; ++k) {
      const double q = static_cast<double>(k - 2) / 4, c = cosine[k - 2], p = cooled[k - 2];
      const double want = name == "constant"     ? 1
                          : name == "linear"     ? 1 - 0.8 * q
                          : name == "cosine"     ? std::max(0.2, c)
                          : name == "wsd_linear" ? 1 - 0.8 * p
                          : name == "wsd_sqrt"   ? 1 - 0.8 * std::sqrt(p)
                                                 : 0.2 + 0.8 * c;
      CHECK(schedule.at(k) == doctest::Approx(want).epsilon(1e-14));
    }
    CHECK(Schedule{schedule_kind(name), 0, 1, 0}.at(0) == 1);
  }
  CHECK_THROWS_AS(schedule_kind("staircase"), Error);
}
