// Line charts as self-contained SVG files: the picture of a run, written by the run.
#pragma once

#include <string>
#include <vector>

namespace crossply {

struct Curve {
  std::string name;
  std::vector<double> x, y;                        // as many of each
  std::vector<double> marks_x = {}, marks_y = {};  // points of their own in the same colour, on a thin line
  bool broken_off = false;                         // a cross stands where it ends
  std::vector<double> low = {}, high = {};         // around y, as many or none: a translucent band
};

// One plot; several stand below each other on the same x axis.
struct Panel {
  std::string caption, marks;  // what the lines and the marks are
  std::vector<Curve> curves;
  bool shares = false;  // y goes from 0 to 1, and is shown in percent
};

// Points that are not finite are left out. A curve of more than 200 points is
// drawn as its running mean over a fiftieth of it, and where there are fewer than five curves, also as it is, pale. Up
// to 28 curves look different; the names stand beside the curves' ends, in their order. Values that span a decade or
// more stand on a logarithmic axis (but not shares); what rises above three times the highest start is cut off, and so
// is a steep start that would take half of the height. Points are thinned out: at most one per pixel, and about 50 kB
// for each panel. Text may be any bytes.
void write_curve_svg(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::vector<Panel>& panels);

}  // namespace crossply
