// Two runs compared: by the difference of their losses, and by what each needs to reach the same loss.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cli/curve.h"

namespace crossply {

// A loss over an x axis. sequences: test sequences that it is the mean of; 0 of a training loss, or where nobody says.
struct MeasuredLoss {
  std::vector<double> x, y, sequences, step;  // as many of each
};

// b - a at the places of b, where both are means over equally many sequences: a's loss there is measured, or on the
// line between the points around it. A curve without a name.
Curve difference_of(const MeasuredLoss& b, const MeasuredLoss& a);

// The mean of every point and the n - 1 before it, which knows nothing of later steps; without the first n - 1 points.
MeasuredLoss mean_of_last(const MeasuredLoss& loss, size_t n);

// The last point that is over as many sequences as the first one. The last evaluation of a run may be over more.
size_t last_comparable(const MeasuredLoss& loss);

// Where a loss is reached for good, by points over so many sequences: on the line between the points around it. A point
// below it that a later one is above may be chance.
struct Reached {
  enum class How { there, before_first, never, not_for_good } how;
  double x;             // where it is there
  double lowest, last;  // of all these points
};
Reached reach(const MeasuredLoss& loss, double wanted, double sequences);

// A run, or the mean of several, for the comparison.
struct RunLosses {
  std::string name;
  double last = 0, error = 0, sequences = 0;      // its last loss, the standard error over seeds (NaN: one seed)
  std::map<std::string, MeasuredLoss> over = {};  // "step", "tokens", "flops", "seconds"
  std::map<std::string, std::string> lacks = {};  // of an axis that is not there: why, and what to do
};
// A table of differences, and of what each run needs to reach the loss of `a`, with a line for each number that is
// missing. loss: "test loss", or how training losses are averaged.
std::string comparison_against(const RunLosses& a, const std::vector<RunLosses>& others, const std::string& loss);

}  // namespace crossply
