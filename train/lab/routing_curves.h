// Routing over training, as tables and figures: what runs said of it (eval/inside/routing/routing_summary.h).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cli/curve.h"
#include "eval/inside/routing/routing.h"

namespace crossply {

// One evaluation. What is no number is NaN, or not there.
struct RoutingPoint {
  double step, x;  // x: its place on the axis
  std::map<std::string, double> numbers = {};
  std::map<std::string, std::vector<double>> curves = {};
  std::map<std::string, RoutingRows> maps = {};
};
// Of a metrics.jsonl, the evaluations that have a "routing". axis: the key of x, which is multiplied by factor. Throws
// Exit::io as read_curves.
std::vector<RoutingPoint> read_routing(const std::string& path, const std::string& axis, double factor);

// The runs of one name.
struct RoutedRuns {
  std::string name;
  int look;
  std::vector<std::vector<RoutingPoint>> runs = {};
};
// A number over the evaluations: the mean of the runs of one name.
struct RoutedNumber {
  std::string number;  // "entropy.alpha"
  size_t runs;         // which of all
  Curve curve;
};
std::vector<RoutedNumber> routed_numbers(const std::vector<RoutedRuns>& all);
// The first and the last of each.
std::string routing_table(const std::vector<RoutedNumber>& numbers, const std::vector<RoutedRuns>& all);
// A panel for each kind of number, with a curve for each map; without numbers that never change.
std::vector<Panel> routing_panels(const std::vector<RoutedNumber>& numbers, const std::vector<RoutedRuns>& all);
// Of each name's first run: its maps at up to eight evaluations, and its curves over all of them.
std::string routing_maps_svg(const std::string& title, const std::vector<RoutedRuns>& all);

}  // namespace crossply
