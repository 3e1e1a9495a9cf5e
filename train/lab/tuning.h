// Which learning rate is the best of those that were tried, and which is tried next. Rates are compared by their
// logarithms.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

namespace crossply {

// A rate that was tried, or is to be.
struct Tried {
  double rate;
  double loss = NAN;  // not finite: it diverged, or has not ended
  bool ended = false;
};

// What comes out of rates in ascending order.
struct RateChoice {
  double best = NAN;     // the rate of the lowest loss; NaN: none is finite
  double rate = NAN;     // by the parabola; the best itself where there is none
  double loss = NAN;     // at that rate
  double basin = NAN;    // the loss rises by basin_height where the rate is so many times larger, or smaller
  bool at_edge = false;  // the best is the smallest or the largest of several
};
constexpr double basin_height = 0.01;  // nats

// The parabola goes through the best and its two neighbours. There is none at an edge, or beside a rate that diverged.
RateChoice choose_rate(const std::vector<Tried>& tried);

// The next rate, once all have ended, while the best is at an edge: as far beyond it as it is from its neighbour, but
// not more than ten times. asked: how many there were at first; three more are tried at most. Three digits, so that
// people can read it.
std::optional<double> rate_beyond(const std::vector<Tried>& tried, size_t asked);

// With three digits.
double readable_rate(double rate);

}  // namespace crossply
