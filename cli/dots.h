// Dot charts as a self-contained SVG file: a line for each setting, a dot for each seed, their mean and its interval.
#pragma once

#include <cmath>
#include <string>
#include <vector>

namespace crossply {

struct DotRow {
  std::string label;
  std::vector<double> values;  // by seed
  double half = NAN;           // of the interval around the mean; NaN: none is drawn
  double mean = NAN;           // NaN: that of the values
  double middle() const;
};
struct DotGroup {
  std::string caption;  // may be empty
  std::vector<DotRow> rows;
};
struct DotChart {
  std::string title, x_label;
  std::vector<DotGroup> groups;
  bool shares = false;      // x goes from 0 to 1, and is shown in percent
  bool difference = false;  // a line at 0; where the interval leaves it out there is colour, blue below and red above
};

// Each row ends with its mean and half of its interval. Rows without values are left out.
std::string dots_svg(const DotChart& chart);

}  // namespace crossply
