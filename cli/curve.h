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
  bool reference = false;  // a bound, say: thin, dashed and grey, behind the others; best the last of them
  int look = -1;           // which colour, dash and mark, from 0; -1: as its name says (cli/look.h)
};

// One plot; several stand below each other on the same x axis.
struct Panel {
  std::string caption, marks;  // what the lines and the marks are; up to a comma or colon the title of the y axis
  std::vector<Curve> curves;
  bool shares = false;  // y goes from 0 to 1, and is shown in percent
  bool log_y = false;   // a logarithmic axis in any case, for what is above 0
  bool whole = false;   // nothing is cut off, however it rises, and the axis is linear unless log_y
  size_t smooth = 0;    // points that a running mean takes; 0: a fiftieth of the curve, where it has more than 200
};

// Points that are not finite are left out. A curve that is smoothed is drawn as its running mean, centred and narrower
// at both ends, and where there are fewer than five curves, also as it is, pale, unless it has a band. Up to 28 curves
// look different; the names stand beside the curves' ends, in their order. Values that span a decade or more stand on a
// logarithmic axis (but not shares); what rises above three times the highest start is cut off, and so is a steep start
// that would take half of the height, where no logarithmic axis is asked for. Points are thinned out: at most one per
// pixel, and about 50 kB for each panel. Where all x are whole, as layers are, so are the ticks. Text may be any bytes.
std::string curve_svg(const std::string& title, const std::string& x_label, const std::vector<Panel>& panels,
                      bool log_x = false);
void write_curve_svg(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::vector<Panel>& panels, bool log_x = false);

}  // namespace crossply
