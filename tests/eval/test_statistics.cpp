#include "eval/statistics.h"

#include "tests/support/check.h"

using namespace crossply;

TEST_CASE("statistics: Student's 95 % quantiles are those of the tables") {
  const std::pair<int64_t, double> table[] = {{1, 12.7062}, {2, 4.3027},  {3, 3.1824},  {4, 2.7764},  {5, 2.5706},
                                              {9, 2.2622},  {10, 2.2281}, {30, 2.0423}, {99, 1.9842}, {1000, 1.9623}};
  for (const auto& [degrees, t] : table) CHECK(std::abs(student_t(0.95, degrees) - t) < 5e-5);
}

TEST_CASE("statistics: mean, sample standard deviation, and the mean's error") {
  const Spread none = spread_of({}), one = spread_of({3}), four = spread_of({1, 2, 4, 5});
  CHECK(none.n == 0);
  CHECK(std::isnan(none.mean));
  CHECK(one.mean == 3);
  CHECK(std::isnan(one.sd));
  CHECK(four.mean == 3);
  CHECK(four.sd == doctest::Approx(std::sqrt(10.0 / 3)));
  CHECK(four.error() == doctest::Approx(std::sqrt(10.0 / 12)));
}

TEST_CASE("statistics: the mean of what is finite") {
  CHECK(mean_of_finite(std::vector{1.0, std::numeric_limits<double>::quiet_NaN(), 3.0}) == 2);
  CHECK(mean_of_finite(std::vector{-std::numeric_limits<double>::infinity(), 5.0}) == 5);
  CHECK(std::isnan(mean_of_finite({})));
}
