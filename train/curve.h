// Line charts as self-contained SVG files: the picture of a run, written by the run.
#pragma once

#include <string>
#include <vector>

namespace crossply {

struct Curve {
  std::string name;
  std::vector<double> x, y;  // as many of each
};

// Points that are not finite, or not positive on a logarithmic x axis, are left out. A curve of more than 200 points is
// drawn twice: as it is, pale, and as a running mean over a fiftieth of it. The file holds at most one point per pixel.
void write_curve_svg(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::string& y_label, const std::vector<Curve>& curves, bool log_x = false);

}  // namespace crossply
