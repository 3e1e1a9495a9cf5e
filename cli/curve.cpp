#include "cli/curve.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "cli/look.h"
#include "cli/svg.h"
#include "engine/io/file.h"

namespace crossply {

using namespace svg;

namespace {

constexpr double width = 920, left = 80, indent = 24, title_height = 82, foot = 58;
constexpr double only_panel = 340, panel_of_many = 300, between_panels = 76;
constexpr double line_of_text = 19;
constexpr size_t smooth_above = 200;                     // points; fewer are drawn as they are
constexpr size_t marks_up_to = 30;                       // points; of more, every so manyth
constexpr size_t pale_below = 5;                         // curves; of more, only the means are drawn
constexpr double max_points = 3500;                      // of a panel, at about 12 bytes each
constexpr size_t longest_name = 32, longest_title = 84;  // characters, by the room there is

constexpr const char* grey = "#616e7c";  // of references

// The look of curve i.
std::string stroke(size_t i, const std::string& stroke_width) {
  const std::string dash = dash_of_look(i);
  return "stroke=\"" + std::string(colour_of_look(i)) + "\" stroke-width=\"" + stroke_width + "\"" +
         (dash.empty() ? "" : " stroke-dasharray=\"" + dash + "\"");
}

struct Point {
  double x, y;
};
using Line = std::vector<Point>;

struct Axis {
  double low, high, from, to;  // values, and the pixels they go to
  bool logarithmic;
  bool whole = false;  // of whole numbers: there is nothing between them
  double pixel(double v) const {
    const double t =
        logarithmic ? std::log(std::max(v, 1e-100) / low) / std::log(high / low) : (v - low) / (high - low);
    return from + std::clamp(t, -9.0, 10.0) * (to - from);  // far outside: cut off, however far
  }
};

// A tick's label: 0.25, 4, 15k, 1.5M, 2e9. Its unit suits `size`, the largest on the axis, its decimals suit `step`.
std::string label_of(double v, double size, double step) {
  if (size >= 1e9 || step < 1e-5) {
    char text[64];
    std::snprintf(text, sizeof text, "%.4g", v);
    std::string label = text;
    if (const size_t plus = label.find("e+"); plus != std::string::npos)
      label.erase(plus + 1, label[plus + 2] == '0' ? 2 : 1);
    return with_true_minus(label);
  }
  const double unit = size >= 1e6 ? 1e6 : size >= 1e4 ? 1e3 : 1;
  const int decimals = std::max(0, static_cast<int>(-std::floor(std::log10(step / unit) + 1e-9)));
  return v == 0 ? "0" : shown(v / unit, decimals) + (unit == 1e6 ? "M" : unit == 1e3 ? "k" : "");
}

// About `count` ticks at 1, 2 or 5 times a power of ten.
std::vector<std::pair<double, std::string>> linear_ticks(const Axis& axis, int count) {
  const double rough = (axis.high - axis.low) / count, power = std::pow(10.0, std::floor(std::log10(rough)));
  const double nice = power * (rough < 1.5 * power ? 1 : rough < 3.5 * power ? 2 : rough < 7.5 * power ? 5 : 10);
  const double step = axis.whole ? std::max(nice, 1.0) : nice;
  std::vector<std::pair<double, std::string>> ticks;
  const double first = std::ceil(axis.low / step - 1e-6), last = std::floor(axis.high / step + 1e-6);
  for (int i = 0; i <= 2 * count && first + i <= last; ++i) {
    const double v = (first + i) * step;
    ticks.emplace_back(v, label_of(v, std::max(std::abs(axis.low), std::abs(axis.high)), step));
  }
  return ticks;
}

// Powers of ten; where there are few, also 2 and 5 times them; within a part of a decade as on a linear axis.
std::vector<std::pair<double, std::string>> ticks_of(const Axis& axis, int count) {
  if (!axis.logarithmic) return linear_ticks(axis, count);
  const double decades = std::log10(axis.high / axis.low);
  std::vector<std::pair<double, std::string>> ticks;
  const int stride = std::max(1, static_cast<int>(decades / count));
  for (int e = static_cast<int>(std::floor(std::log10(axis.low))); e <= std::log10(axis.high); e += stride) {
    for (double factor : {1.0, 2.0, 5.0}) {
      const double v = factor * std::pow(10.0, e);
      if ((factor > 1 && decades > 3) || v < axis.low * 0.999 || v > axis.high * 1.001) continue;
      ticks.emplace_back(v, label_of(v, v, v));
    }
  }
  return ticks.size() < 3 ? linear_ticks(axis, count) : ticks;
}

// Which axes are logarithmic whatever the values; what is not above 0 has no place there.
struct Logs {
  bool x, y;
};

// The points that can be drawn, by x. Beyond 1e100 the arithmetic of the axes would overflow.
Line drawable(const Curve& curve, const std::vector<double>& xs, const std::vector<double>& ys, Logs logs) {
  CHECK_THAT(xs.size() == ys.size(), curve.name, ": ", xs.size(), " x and ", ys.size(), " y");
  Line out;
  for (size_t i = 0; i < xs.size(); ++i) {
    const double x = xs[i], y = ys[i];
    const bool placed = (x > 1e-100 || !logs.x) && (y > 1e-100 || !logs.y);
    if (std::abs(x) < 1e100 && std::abs(y) < 1e100 && placed) out.push_back({x, y});
  }
  std::stable_sort(out.begin(), out.end(), [](const Point& a, const Point& b) { return a.x < b.x; });
  return out;
}

// The mean over `window` points around each. The window is cut off at the end and narrow at the start, where curves are
// steep and a wide mean would lie beside them.
Line smoothed(const Line& line, size_t window) {
  std::vector<double> sum(line.size() + 1, 0.0);
  double lowest = INFINITY;  // no mean is below it, but the difference of two large sums may be
  for (size_t i = 0; i < line.size(); ++i) sum[i + 1] = sum[i] + line[i].y, lowest = std::min(lowest, line[i].y);
  Line out = line;
  const size_t half = window / 2;
  for (size_t i = 0; i < line.size(); ++i) {
    const size_t reach = std::min(half, i / 4), end = std::min(line.size(), i + reach + 1);
    out[i].y = std::max(lowest, (sum[end] - sum[i - reach]) / static_cast<double>(end - (i - reach)));
  }
  return out;
}

// Averages all points that fall on the same column, `column_width` pixels wide.
Line decimated(const Line& line, const Axis& x, double column_width) {
  const auto column_of = [&](const Point& p) { return std::floor((x.pixel(p.x) - x.from) / column_width); };
  Line out;
  for (size_t i = 0; i < line.size();) {
    const double column = column_of(line[i]);
    Point mean{0, 0};
    size_t end = i;
    for (; end < line.size() && column_of(line[end]) == column; ++end) {
      mean.x += line[end].x, mean.y += line[end].y;
    }
    const double n = static_cast<double>(end - i);
    out.push_back({mean.x / n, mean.y / n});
    i = end;
  }
  return out;
}

struct Extent {
  double low = INFINITY, high = -INFINITY;
};

Extent range_of(const std::vector<Line>& lines, double Point::*value) {
  Extent range;
  for (const Line& line : lines)
    for (const Point& p : line) range = {std::min(range.low, p.*value), std::max(range.high, p.*value)};
  return range;
}

// The smallest axis that shows the range, with some air around it; up to 1 if it is empty.
Axis fit(Extent range, double from, double to, bool logarithmic, double air) {
  auto [low, high] = range;
  if (low > high) low = logarithmic ? 0.1 : 0, high = 1;
  const double middle = std::abs(low) / 2 + std::abs(high) / 2;
  if (high - low <= 1e-9 * middle) {  // one value: give it a neighbourhood
    const double room = 0.1 * middle;
    if (middle > 1e-100) low -= room, high += room;
    else low = logarithmic ? 0.1 : 0, high = 1;
  }
  if (logarithmic) {
    const double margin = std::pow(high / low, air);
    return {low / margin, high * margin, from, to, true};
  }
  if (low > 0 && low < 0.03 * high) low = 0;  // step 1 of thousands: begin at zero
  const double margin = air * (high - low);
  return {low - margin, high + margin, from, to, false};
}

std::string polyline(const Line& line, const Axis& x, const Axis& y, const std::string& style) {
  std::string out = "<polyline fill=\"none\" stroke-linejoin=\"round\" " + style + " points=\"";
  for (const Point& p : line) out += px(x.pixel(p.x)) + "," + px(y.pixel(p.y)) + " ";
  return out + "\"/>\n";
}

std::string reference_stroke(const std::string& stroke_width) {
  return "stroke=\"" + std::string(grey) + "\" stroke-width=\"" + stroke_width + "\" stroke-dasharray=\"6 4\"";
}

// The mark of curve i: disc, square, triangle or diamond, as its dash.
std::string mark(size_t i, double x, double y, bool hollow) {
  const std::string colour = colour_of_look(i), at = px(x) + " " + px(y);
  const std::string paint = hollow ? "fill=\"#ffffff\" stroke=\"" + colour + "\" " : "fill=\"" + colour + "\" ";
  switch (mark_of_look(i)) {
    case 0: return "<circle r=\"3\" " + paint + "cx=\"" + px(x) + "\" cy=\"" + px(y) + "\"/>\n";
    case 1: return "<path " + paint + "d=\"M" + at + "m-2.7-2.7h5.4v5.4h-5.4z\"/>\n";
    case 2: return "<path " + paint + "d=\"M" + at + "m0-3.6l3.4 6h-6.8z\"/>\n";
    default: return "<path " + paint + "d=\"M" + at + "m0-3.8l3.8 3.8-3.8 3.8-3.8-3.8z\"/>\n";
  }
}

std::string marks(size_t i, const Line& line, const Axis& x, const Axis& y, bool hollow) {
  std::string out;
  const size_t stride = (line.size() + marks_up_to - 1) / marks_up_to;
  for (size_t k = 0; k < line.size(); k += stride) out += mark(i, x.pixel(line[k].x), y.pixel(line[k].y), hollow);
  return out;
}

// Percent where `shares`, which go from 0 to 1.
std::string axes(const Axis& x, const Axis& y, bool shares) {
  std::string out;
  const Axis shown = shares ? Axis{100 * y.low, 100 * y.high, y.from, y.to, false} : y;
  for (const auto& [v, label] : ticks_of(shown, 6)) {
    const std::string at = px(shown.pixel(v));
    out += "<path stroke=\"#e4e7eb\" d=\"M" + px(x.from) + " " + at + "H" + px(x.to) + "\"/>\n";
    out += text(x.from - 10, shown.pixel(v) + 4, "text-anchor=\"end\"", label + (shares ? " %" : ""));
  }
  for (const auto& [v, label] : ticks_of(x, 7)) {
    const std::string at = px(x.pixel(v));
    out += "<path stroke=\"#9aa3ad\" d=\"M" + at + " " + px(y.from) + "v5\"/>\n";
    out += text(x.pixel(v), y.from + 20, "text-anchor=\"middle\"", label);
  }
  return out + "<path stroke=\"#9aa3ad\" d=\"M" + px(x.from) + " " + px(y.from) + "H" + px(x.to) + "\"/>\n";
}

std::vector<int> looks_of_curves(const std::vector<Curve>& curves) {
  std::vector<std::string> names;
  for (const Curve& curve : curves) names.push_back(curve.reference ? "" : curve.name);
  std::vector<int> out = looks_of(names);
  for (size_t i = 0; i < curves.size(); ++i)
    if (curves[i].look >= 0) out[i] = curves[i].look;
  return out;
}

// The curves as they are drawn: pale in the background as they are, on top their means, and the marked points.
struct Drawing {
  std::vector<Line> pale, means, marked;
  std::vector<Line> low, high;  // of bands: empty where a curve has none
  std::vector<bool> reference;
  std::vector<size_t> look;
  bool smooth = false, crowded = false;
};

Drawing thin_out(const Panel& panel, const std::vector<Line>& raw, const std::vector<Line>& marked, const Axis& x,
                 Logs logs) {
  const std::vector<Curve>& curves = panel.curves;
  Drawing out;
  out.crowded = raw.size() >= pale_below;
  const double lines = static_cast<double>(raw.size()) * (out.crowded ? 1 : 2);
  const std::vector<int> own_looks = looks_of_curves(curves);
  const double column = std::max(1.0, lines * (x.to - x.from) / max_points);
  const auto window = [&](const Line& line) {
    return panel.smooth > 0 ? panel.smooth : line.size() > smooth_above ? line.size() / 50 : 1;
  };
  const auto thinned = [&](const Line& line) { return decimated(smoothed(line, window(line)), x, column); };
  for (size_t i = 0; i < raw.size(); ++i) {
    const Line& line = raw[i];
    const bool smooth = window(line) > 1, band = !curves[i].low.empty();
    out.smooth |= smooth;
    out.reference.push_back(curves[i].reference);
    out.look.push_back(static_cast<size_t>(own_looks[i]));
    out.means.push_back(thinned(line));
    out.pale.push_back(smooth && !out.crowded && !band ? decimated(line, x, column) : Line());
    out.low.push_back(band ? thinned(drawable(curves[i], curves[i].x, curves[i].low, logs)) : Line());
    out.high.push_back(band ? thinned(drawable(curves[i], curves[i].x, curves[i].high, logs)) : Line());
  }
  for (const Line& line : marked) out.marked.push_back(decimated(line, x, column));
  return out;
}

// Where curve i ends, in pixels: its line, or its marks if it has only those. If it ends above or below the picture: at
// the edge, where it leaves. Not a number if it has no points.
Point end_of(const Drawing& drawing, size_t i, const Axis& x, const Axis& y) {
  const Line& line = drawing.means[i].empty() ? drawing.marked[i] : drawing.means[i];
  if (line.empty()) return {NAN, y.from};
  size_t last = line.size() - 1;
  const auto outside = [&](size_t k) { return line[k].y < y.low || line[k].y > y.high; };
  while (last > 0 && outside(last) && outside(last - 1)) --last;
  return {x.pixel(line[last].x), std::clamp(y.pixel(line[last].y), y.to, y.from)};
}

// Moves heights, which are sorted, as little as possible until they are a line of text apart: those that would meet
// stand together around their mean.
void spread(std::vector<double>& heights, double top, double bottom) {
  struct Group {
    double mean, count;
  };
  const double line = std::min(line_of_text, (bottom - top) / std::max<double>(1, static_cast<double>(heights.size())));
  const auto held = [&](Group g) {  // inside the plot
    const double half = line * (g.count - 1) / 2;
    return Group{std::min(std::max(g.mean, top + half), bottom - half), g.count};
  };
  std::vector<Group> groups;
  for (const double height : heights) {
    Group group = held({height, 1});
    while (!groups.empty() && group.mean - groups.back().mean < line * (group.count + groups.back().count) / 2) {
      const Group& last = groups.back();
      const double count = group.count + last.count;
      group = held({(group.mean * group.count + last.mean * last.count) / count, count});
      groups.pop_back();
    }
    groups.push_back(group);
  }
  size_t next = 0;
  for (const Group& group : groups)
    for (double k = 0; k < group.count; ++k) heights[next++] = group.mean + line * (k - (group.count - 1) / 2);
}

// Names at the right, each as near as possible to the height at which its curve ends, and a thin line from there.
std::string legend(const std::vector<Curve>& curves, const Drawing& drawing, const Axis& x, const Axis& y) {
  std::vector<size_t> order(curves.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::vector<Point> ends;
  for (size_t i : order) ends.push_back(end_of(drawing, i, x, y));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ends[a].y < ends[b].y; });
  std::vector<double> at;
  for (size_t i : order) at.push_back(ends[i].y);
  spread(at, y.to, y.from);
  std::string out;
  for (size_t k = 0; k < order.size(); ++k) {
    const size_t i = order[k];
    const std::string colour = curves[i].reference ? grey : colour_of_look(drawing.look[i]);
    const std::string thin = "<path fill=\"none\" stroke=\"" + colour + "\" stroke-opacity=\"0.6\" ";
    const std::string height = px(ends[i].y), name = px(x.to + 23) + " " + px(at[k]);
    if (ends[i].x < x.to - 4)  // it ends earlier than others
      out += thin + "stroke-dasharray=\"1 4\" d=\"M" + px(ends[i].x + 5) + " " + height + "H" + px(x.to) + "\"/>\n";
    if (!std::isnan(ends[i].x)) out += thin + "d=\"M" + px(x.to + 3) + " " + height + "L" + name + "\"/>\n";
    out += "<path " + (curves[i].reference ? reference_stroke("1.5") : stroke(drawing.look[i], "3")) + " d=\"M" +
           px(x.to + 24) + " " + px(at[k]) + "h24\"/>\n";
    out += text(x.to + 54, at[k] + 4.5, "fill=\"#1f2933\" font-size=\"13\"", curves[i].name, longest_name);
  }
  return out;
}

bool is_wide(const Extent& range) { return range.low > 0 && range.high >= 10 * range.low; }  // for a logarithmic axis

// Without the steep start, where that would press the rest together: of many smooth curves the first twentieth; of few,
// the first tenth if that takes half of the height. keep: not even then, as where a logarithmic axis gives it room.
std::vector<Line> without_start(const Drawing& drawing, bool shares, bool keep) {
  std::vector<Line> whole = drawing.means;
  for (const auto* more : {&drawing.pale, &drawing.low, &drawing.high})
    whole.insert(whole.end(), more->begin(), more->end());
  if (!drawing.smooth || keep) return whole;
  std::vector<Line> rest = whole;
  for (Line& line : rest)
    line.erase(line.begin(), line.begin() + static_cast<std::ptrdiff_t>(line.size() / (drawing.crowded ? 20 : 10)));
  if (drawing.crowded) return rest;
  const Extent all = range_of(whole, &Point::y), end = range_of(rest, &Point::y);
  return !shares && !is_wide(all) && end.high - end.low < (all.high - all.low) / 2 ? rest : whole;
}

// Everything but the steep start; of losses nothing above three times the highest start, to which a run that diverges
// would press all others flat.
Extent shown_range(const Drawing& drawing, const std::vector<Line>& raw, const Panel& panel, bool keep_start) {
  std::vector<Line> shown = without_start(drawing, panel.shares, keep_start || panel.whole);
  shown.insert(shown.end(), drawing.marked.begin(), drawing.marked.end());
  double highest_start = 0;
  for (const Line& line : raw) highest_start = std::max(highest_start, line.empty() ? 0 : line.front().y);
  const auto too_high = [&](const Point& p) { return highest_start > 0 && p.y > 3 * highest_start; };
  for (Line& line : shown)
    if (!panel.shares && !panel.whole) std::erase_if(line, too_high);
  return range_of(shown, &Point::y);
}

bool any_outside(const std::vector<Line>& lines, const Axis& y) {
  for (const Line& line : lines)
    for (const Point& p : line)
      if (p.y < y.low || p.y > y.high) return true;
  return false;
}

std::string draw_bands(const Drawing& drawing, const Axis& x, const Axis& y) {
  std::string out;
  for (size_t i = 0; i < drawing.low.size(); ++i) {
    if (drawing.low[i].empty()) continue;
    Line outline = drawing.high[i];
    outline.insert(outline.end(), drawing.low[i].rbegin(), drawing.low[i].rend());
    out += "<polygon fill=\"" + std::string(colour_of_look(drawing.look[i])) + "\" fill-opacity=\"0.18\" points=\"";
    for (const Point& p : outline) out += px(x.pixel(p.x)) + "," + px(y.pixel(p.y)) + " ";
    out += "\"/>\n";
  }
  return out;
}

std::string draw_lines(const Drawing& drawing, const Axis& x, const Axis& y) {
  std::string out = draw_bands(drawing, x, y);
  for (size_t i = 0; i < drawing.means.size(); ++i)
    if (drawing.reference[i]) out += polyline(drawing.means[i], x, y, reference_stroke("1.5"));
  for (size_t i = 0; i < drawing.pale.size(); ++i)
    if (!drawing.pale[i].empty())
      out += polyline(drawing.pale[i], x, y,
                      "stroke=\"" + std::string(colour_of_look(drawing.look[i])) + "\" stroke-opacity=\"0.3\"");
  for (size_t i = 0; i < drawing.marked.size(); ++i)
    if (drawing.marked[i].size() > 1) out += polyline(drawing.marked[i], x, y, stroke(drawing.look[i], "1"));
  for (size_t i = 0; i < drawing.means.size(); ++i) {
    const Line& mean = drawing.means[i];
    if (drawing.reference[i]) continue;
    if (mean.size() > 1) out += polyline(mean, x, y, stroke(drawing.look[i], "2"));
    if (mean.size() <= marks_up_to) out += marks(drawing.look[i], mean, x, y, false);
  }
  for (size_t i = 0; i < drawing.marked.size(); ++i) out += marks(drawing.look[i], drawing.marked[i], x, y, true);
  return out;
}

// A cross where a run broke off; at the edge where it had left the picture.
std::string crosses(const std::vector<Curve>& curves, const Drawing& drawing, const Axis& x, const Axis& y) {
  std::string out;
  for (size_t i = 0; i < curves.size(); ++i) {
    const Point end = end_of(drawing, i, x, y);
    if (!curves[i].broken_off || std::isnan(end.x)) continue;
    out += "<path fill=\"none\" stroke=\"" + std::string(colour_of_look(drawing.look[i])) +
           "\" stroke-width=\"2\" d=\"M" + px(end.x) + " " + px(end.y) + "m-4-4l8 8m0-8l-8 8\"/>\n";
  }
  return out;
}

// Of "test loss, mean over the seeds" the first part: what is drawn.
std::string y_title(const std::string& caption) { return caption.substr(0, caption.find_first_of(",;:")); }

// Room for labels such as -0.0004 between the axis and its title.
double x_of_y_title(const Axis& y) {
  for (const auto& [v, label] : ticks_of(y, 6))
    if (label.size() > 6 + (label.starts_with("\u2212") ? 2 : 0)) return indent / 2;
  return indent;
}

std::string y_axis_title(const std::string& title, double x, double middle, double height) {
  const std::string turned = "text-anchor=\"middle\" transform=\"rotate(-90 " + px(x) + " " + px(middle) + ")\"";
  return text(x, middle, turned + " font-size=\"13\"", title, static_cast<size_t>(height / 6.6));
}

std::string draw_panel(const Panel& panel, size_t number, Axis x, double top, double bottom) {
  const Logs logs{x.logarithmic, panel.log_y};
  std::vector<Line> raw, marked;
  for (const Curve& curve : panel.curves) {
    raw.push_back(drawable(curve, curve.x, curve.y, logs));
    marked.push_back(drawable(curve, curve.marks_x, curve.marks_y, logs));
  }
  const Drawing drawing = thin_out(panel, raw, marked, x, logs);
  Extent range = shown_range(drawing, raw, panel, logs.x || logs.y);
  const bool empty = range.low > range.high;
  const bool log_y = !panel.shares && (panel.log_y || (!panel.whole && is_wide(range)));
  if (panel.shares) range = {std::min(range.low, 0.0), std::max(range.high, 0.05)};
  const Axis y = fit(range, bottom, top, log_y, 0.04);
  const bool has_marks = std::any_of(marked.begin(), marked.end(), [](const Line& line) { return !line.empty(); });
  const std::string window = panel.smooth > 0 ? str(panel.smooth, " points") : "a fiftieth of the run";
  const std::string caption = panel.caption + (drawing.smooth ? ", running mean over " + window : "") +
                              (has_marks ? "; marks: " + panel.marks : "") + (log_y ? "; logarithmic" : "");
  const std::string title = y_title(panel.caption);
  std::string out = axes(x, y, panel.shares) + y_axis_title(title, x_of_y_title(y), (top + bottom) / 2, bottom - top);
  if (caption != title) out += text(indent, top - 20, "font-size=\"13\"", caption);
  const std::string id = "plot" + std::to_string(number), corner = "x=\"" + px(x.from) + "\" y=\"" + px(top) + "\" ";
  const std::string size = "width=\"" + px(x.to - x.from + 3) + "\" height=\"" + px(bottom - top) + "\"";
  const bool cut = any_outside(drawing.means, y) || any_outside(drawing.pale, y) || any_outside(drawing.marked, y) ||
                   any_outside(drawing.low, y) || any_outside(drawing.high, y);
  if (cut)
    out += "<clipPath id=\"" + id + "\"><rect " + corner + size + "/></clipPath>\n<g clip-path=\"url(#" + id + ")\">\n";
  out += draw_lines(drawing, x, y) + (cut ? "</g>\n" : "");
  const std::string middle = "text-anchor=\"middle\" font-size=\"13\"";
  if (empty) out += text((x.from + x.to) / 2, (top + bottom) / 2, middle, "no data");
  return out + crosses(panel.curves, drawing, x, y) + legend(panel.curves, drawing, x, y);
}

}  // namespace

std::string curve_svg(const std::string& title, const std::string& x_label, const std::vector<Panel>& panels,
                      bool log_x) {
  size_t longest = 0, max_names = 0;
  std::vector<Line> all;
  for (const Panel& panel : panels) {
    max_names = std::max(max_names, panel.curves.size());
    for (const Curve& curve : panel.curves) {
      longest = std::max(longest, std::min(curve.name.size(), longest_name));
      all.push_back(drawable(curve, curve.x, curve.y, {log_x, panel.log_y}));
      all.push_back(drawable(curve, curve.marks_x, curve.marks_y, {log_x, panel.log_y}));
    }
  }
  const double right = width - (76 + 7.2 * static_cast<double>(longest));  // 7.2: a wide letter
  Axis x = fit(range_of(all, &Point::x), left, right, log_x, 0);
  x.whole = std::ranges::all_of(all, [](const Line& line) {
    return std::ranges::all_of(line, [](const Point& p) { return p.x == std::floor(p.x); });
  });
  if (const Extent range = range_of(all, &Point::x); x.whole && !log_x && range.low == range.high)
    x.low = range.low - 0.5, x.high = range.high + 0.5;  // one place, one tick, in the middle
  const double plot =
      std::max(panels.size() == 1 ? only_panel : panel_of_many, line_of_text * static_cast<double>(max_names));
  double top = title_height;
  std::string plots;
  for (size_t i = 0; i < panels.size(); ++i, top += plot + between_panels)
    plots += draw_panel(panels[i], i, x, top, top + plot);
  const double height = top - between_panels + foot;
  const std::string middle = "text-anchor=\"middle\" font-size=\"13\"";
  const std::string heading = "font-size=\"18\" font-weight=\"600\" fill=\"#1f2933\"";
  const std::string elements =
      text(indent, 36, heading, title, longest_title) + plots + text((left + right) / 2, height - 16, middle, x_label);
  return document(width, height, title, elements);
}

void write_curve_svg(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::vector<Panel>& panels, bool log_x) {
  write_file_atomically(path, curve_svg(title, x_label, panels, log_x));
}

}  // namespace crossply
