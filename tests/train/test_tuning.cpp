// The best of several learning rates, and the next one.
#include "train/lab/tuning.h"

#include <functional>

#include "tests/support/check.h"

using namespace crossply;

namespace {

std::vector<Tried> tried(const std::vector<double>& rates, const std::function<double(double)>& loss) {
  std::vector<Tried> out;
  for (const double rate : rates) out.push_back({rate, loss(rate), true});
  return out;
}

double bowl(double rate) { return 3 + 0.25 * std::pow(std::log(rate / 2.5e-3), 2); }

}  // namespace

TEST_CASE("tuning: a parabola in the logarithm of the rate is found exactly, on any grid around its lowest point") {
  for (const std::vector<double>& rates :
       {std::vector{1e-3, 2e-3, 4e-3}, {1.4e-3, 2.8e-3, 5.6e-3}, {5e-4, 2e-3, 1e-2, 1}}) {
    const RateChoice choice = choose_rate(tried(rates, bowl));
    CHECK(choice.rate == 2.5e-3);
    CHECK(choice.basin == doctest::Approx(std::exp(std::sqrt(0.01 / 0.25))));
    CHECK(choice.loss == doctest::Approx(3));
    CHECK(!choice.at_edge);
  }
  // Three digits, so that people can read it.
  CHECK(choose_rate(tried({1e-3, 2e-3, 4e-3}, [](double rate) {
          return std::pow(std::log(rate / 2.34567e-3), 2);
        })).rate == 2.35e-3);
}

TEST_CASE("tuning: at an edge, or beside a rate that diverged, the best of the tried is the choice") {
  const RateChoice edge = choose_rate(tried({4e-3, 8e-3, 16e-3}, bowl));
  CHECK(edge.rate == 4e-3);
  CHECK(edge.at_edge);
  CHECK(edge.loss == bowl(4e-3));
  CHECK(std::isnan(edge.basin));
  const RateChoice beside =
      choose_rate(tried({1e-3, 4e-3, 8e-3}, [](double rate) { return rate > 5e-3 ? NAN : bowl(rate); }));
  CHECK(beside.rate == 4e-3);
  CHECK(!beside.at_edge);
  CHECK(std::isnan(choose_rate(tried({1e-3, 2e-3}, [](double) { return NAN; })).rate));
  CHECK(choose_rate(tried({1e-3}, bowl)).rate == 1e-3);
  CHECK(!choose_rate(tried({1e-3}, bowl)).at_edge);
  CHECK(choose_rate(tried({1e-3, 2e-3, 4e-3}, [](double) { return 1.0; })).rate == 1e-3);  // the first of equals
}

TEST_CASE("tuning: the next rate lies as far beyond an edge as its neighbour, up to ten times, three times at most") {
  const auto falling = [](double rate) { return -rate; };
  CHECK(rate_beyond(tried({1e-3, 2e-3}, falling), 2) == 4e-3);
  CHECK(rate_beyond(tried({1e-3, 2e-3}, [](double rate) { return rate; }), 2) == 5e-4);
  CHECK(rate_beyond(tried({1e-3, 1}, falling), 2) == 10.0);
  CHECK(rate_beyond(tried({1e-3, 2e-3, 4e-3, 8e-3}, falling), 2) == 16e-3);
  CHECK(!rate_beyond(tried({1e-3, 2e-3, 4e-3, 8e-3, 16e-3}, falling), 2));
  CHECK(!rate_beyond(tried({1e-3, 2e-3, 4e-3}, bowl), 3).has_value());
  std::vector<Tried> open = tried({1e-3, 2e-3}, falling);
  open[0].ended = false;
  CHECK(!rate_beyond(open, 2));
  CHECK(!rate_beyond(tried({1e-3}, falling), 1));
  CHECK(!rate_beyond({}, 0));
}
