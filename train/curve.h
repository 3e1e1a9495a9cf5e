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
// drawn as its running mean over a fiftieth of it, and where there are fewer than five curves, also as it is, pale. Up
// to 24 curves look different; the names stand beside the curves' ends, in their order. Points are thinned out: at most
// one per pixel, and a file of at most about 50 kB.
void write_curve_svg(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::string& y_label, const std::vector<Curve>& curves, bool log_x = false);

}  // namespace crossply
