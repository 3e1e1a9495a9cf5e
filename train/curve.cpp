#include "train/curve.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "engine/file.h"

namespace crossply {
namespace {

constexpr double width = 920, height = 480, left = 64, top = 82, bottom = height - 58;
constexpr size_t smooth_above = 200;  // points; fewer are drawn as they are

constexpr size_t pale_below = 5;      // curves; of more, only the means are drawn
constexpr double most_points = 3500;  // of the whole file, at about 12 bytes each

// The colours of Okabe and Ito, which remain distinct for colour-blind readers; after six of them, another dash.
constexpr const char* colours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"};
constexpr const char* dashes[] = {"", "7 3", "2 2", "9 3 2 3"};

const char* colour_of(size_t i) { return colours[i % std::size(colours)]; }

// The look of curve i.
std::string stroke(size_t i, const std::string& stroke_width) {
  const std::string dash = dashes[i / std::size(colours) % std::size(dashes)];
  return "stroke=\"" + std::string(colour_of(i)) + "\" stroke-width=\"" + stroke_width + "\"" +
         (dash.empty() ? "" : " stroke-dasharray=\"" + dash + "\"");
}

struct Point {
  double x, y;
};
using Line = std::vector<Point>;

struct Axis {
  double low, high, from, to;  // values, and the pixels they go to
  bool logarithmic;
  double pixel(double v) const {
    const double t = logarithmic ? std::log(v / low) / std::log(high / low) : (v - low) / (high - low);
    return from + t * (to - from);
  }
};

std::string fixed(double v, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, v);
  return text;
}

std::string px(double v) { return fixed(v, 1); }

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '&') out += "&amp;";
    else if (c == '<') out += "&lt;";
    else if (c == '>') out += "&gt;";
    else out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out;
}

// A tick's label: 0.25, 4, 15k, 1.5M, 2e+09. Its unit suits `size`, the largest on the axis, its decimals suit `step`.
std::string label_of(double v, double size, double step) {
  if (size >= 1e9 || step < 1e-5) {
    char text[64];
    std::snprintf(text, sizeof text, "%.4g", v);
    return text;
  }
  const double unit = size >= 1e6 ? 1e6 : size >= 1e4 ? 1e3 : 1;
  const int decimals = std::max(0, static_cast<int>(-std::floor(std::log10(step / unit) + 1e-9)));
  return v == 0 ? "0" : fixed(v / unit, decimals) + (unit == 1e6 ? "M" : unit == 1e3 ? "k" : "");
}

// About `count` ticks at 1, 2 or 5 times a power of ten.
std::vector<std::pair<double, std::string>> linear_ticks(const Axis& axis, int count) {
  const double rough = (axis.high - axis.low) / count, power = std::pow(10.0, std::floor(std::log10(rough)));
  const double step = power * (rough < 1.5 * power ? 1 : rough < 3.5 * power ? 2 : rough < 7.5 * power ? 5 : 10);
  std::vector<std::pair<double, std::string>> ticks;
  const double first = std::ceil(axis.low / step - 1e-6), last = std::floor(axis.high / step + 1e-6);
  for (int i = 0; i <= 2 * count && first + i <= last; ++i) {
    const double v = (first + i) * step;
    ticks.emplace_back(v, label_of(v, std::max(std::abs(axis.low), std::abs(axis.high)), step));
  }
  return ticks;
}

// Powers of ten; where there are few, also 2 and 5 times them; within less than a decade, like a linear axis.
std::vector<std::pair<double, std::string>> ticks_of(const Axis& axis, int count) {
  if (!axis.logarithmic) return linear_ticks(axis, count);
  const double decades = std::log10(axis.high / axis.low);
  if (decades < 1) return linear_ticks(axis, count);
  std::vector<std::pair<double, std::string>> ticks;
  const int stride = std::max(1, static_cast<int>(decades / count));
  for (int e = static_cast<int>(std::floor(std::log10(axis.low))); e <= std::log10(axis.high); e += stride) {
    for (double factor : {1.0, 2.0, 5.0}) {
      const double v = factor * std::pow(10.0, e);
      if ((factor > 1 && decades > 3) || v < axis.low * 0.999 || v > axis.high * 1.001) continue;
      ticks.emplace_back(v, label_of(v, v, v));
    }
  }
  return ticks;
}

// The points that can be drawn, by x. Beyond 1e100 the arithmetic of the axes would overflow.
Line drawable(const Curve& curve, bool log_x) {
  CHECK_THAT(curve.x.size() == curve.y.size(), curve.name, ": ", curve.x.size(), " x and ", curve.y.size(), " y");
  Line out;
  for (size_t i = 0; i < curve.x.size(); ++i) {
    const double x = curve.x[i], y = curve.y[i];
    if (std::abs(x) < 1e100 && std::abs(y) < 1e100 && (!log_x || x > 1e-100)) out.push_back({x, y});
  }
  std::stable_sort(out.begin(), out.end(), [](const Point& a, const Point& b) { return a.x < b.x; });
  return out;
}

// The mean over the neighbours. The window is cut off at the end and narrow at the start, where curves are steep and a
// wide mean would lie beside them.
Line smoothed(const Line& line) {
  std::vector<double> sum(line.size() + 1, 0.0);
  for (size_t i = 0; i < line.size(); ++i) sum[i + 1] = sum[i] + line[i].y;
  Line out = line;
  const size_t half = line.size() / 100;
  for (size_t i = 0; i < line.size(); ++i) {
    const size_t reach = std::min(half, i / 4), end = std::min(line.size(), i + reach + 1);
    out[i].y = (sum[end] - sum[i - reach]) / static_cast<double>(end - (i - reach));
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

// The smallest axis that shows all values, with some air around them; 0 to 1 if there are none.
Axis fit(const std::vector<Line>& lines, double Point::*value, double from, double to, bool logarithmic, double air) {
  double low = INFINITY, high = -INFINITY;
  for (const Line& line : lines) {
    for (const Point& p : line) low = std::min(low, p.*value), high = std::max(high, p.*value);
  }
  if (low > high) low = logarithmic ? 1 : 0, high = logarithmic ? 10 : 1;
  const double middle = std::abs(low) / 2 + std::abs(high) / 2;
  if (high - low <= 1e-9 * middle) {  // one value: give it a neighbourhood
    const double room = middle > 1e-100 ? 0.1 * middle : 1;
    low -= room, high += room;
  }
  if (!logarithmic && low > 0 && low < 0.03 * high) low = 0;  // step 1 of thousands: begin at zero
  const double margin = logarithmic ? 0 : air * (high - low);
  return {low - margin, high + margin, from, to, logarithmic};
}

std::string polyline(const Line& line, const Axis& x, const Axis& y, const std::string& style) {
  std::string out = "<polyline fill=\"none\" stroke-linejoin=\"round\" " + style + " points=\"";
  for (const Point& p : line) out += px(x.pixel(p.x)) + "," + px(y.pixel(p.y)) + " ";
  return out + "\"/>\n";
}

std::string text(double x, double y, const std::string& style, const std::string& words) {
  return "<text x=\"" + px(x) + "\" y=\"" + px(y) + "\" " + style + ">" + escaped(words) + "</text>\n";
}

std::string axes(const Axis& x, const Axis& y) {
  std::string out;
  for (const auto& [v, label] : ticks_of(y, 6)) {
    const std::string at = px(y.pixel(v));
    out += "<path stroke=\"#e4e7eb\" d=\"M" + px(x.from) + " " + at + "H" + px(x.to) + "\"/>\n";
    out += text(x.from - 10, y.pixel(v) + 4, "text-anchor=\"end\"", label);
  }
  for (const auto& [v, label] : ticks_of(x, 7)) {
    const std::string at = px(x.pixel(v));
    out += "<path stroke=\"#9aa3ad\" d=\"M" + at + " " + px(bottom) + "v5\"/>\n";
    out += text(x.pixel(v), bottom + 20, "text-anchor=\"middle\"", label);
  }
  return out + "<path stroke=\"#9aa3ad\" d=\"M" + px(x.from) + " " + px(bottom) + "H" + px(x.to) + "\"/>\n";
}

// Names at the right, each as near as possible to the height at which its curve ends.
std::string legend(const std::vector<Curve>& curves, const std::vector<Line>& means, const Axis& x, const Axis& y) {
  std::vector<size_t> order(curves.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto height_of = [&](size_t i) { return means[i].empty() ? bottom : y.pixel(means[i].back().y); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return height_of(a) < height_of(b); });
  const double line_height = std::min(19.0, (bottom - top) / std::max<double>(1, static_cast<double>(order.size())));
  std::vector<double> at;
  for (size_t i : order) at.push_back(std::max(height_of(i), at.empty() ? top : at.back() + line_height));
  double limit = bottom;  // push those that slid off the bottom up again
  for (size_t k = at.size(); k-- > 0; limit = at[k] - line_height) at[k] = std::min(at[k], limit);
  std::string out;
  for (size_t k = 0; k < order.size(); ++k) {
    const size_t i = order[k];
    out += "<path " + stroke(i, "3") + " d=\"M" + px(x.to + 14) + " " + px(at[k]) + "h24\"/>\n";
    out += text(x.to + 44, at[k] + 4.5, "fill=\"#1f2933\" font-size=\"13\"", curves[i].name);
  }
  return out;
}

// The curves as they are drawn: pale in the background as they are, and on top their means.
struct Drawing {
  std::vector<Line> pale, means;
  bool smooth = false, crowded = false;
};

Drawing thin_out(const std::vector<Line>& raw, const Axis& x) {
  Drawing out;
  out.crowded = raw.size() >= pale_below;
  const double lines = static_cast<double>(raw.size()) * (out.crowded ? 1 : 2);
  const double column = std::max(1.0, lines * (x.to - x.from) / most_points);
  for (const Line& line : raw) {
    const bool smooth = line.size() > smooth_above;
    out.smooth |= smooth;
    out.means.push_back(decimated(smooth ? smoothed(line) : line, x, column));
    out.pale.push_back(smooth && !out.crowded ? decimated(line, x, column) : Line());
  }
  return out;
}

// Shows everything; but of many smooth curves not the steep start (a twentieth), which would press the rest together.
Axis y_axis(const Drawing& drawing) {
  std::vector<Line> shown = drawing.means;
  shown.insert(shown.end(), drawing.pale.begin(), drawing.pale.end());
  for (Line& line : shown) {
    const auto start = static_cast<std::ptrdiff_t>(line.size() / 20);
    if (drawing.crowded && drawing.smooth) line.erase(line.begin(), line.begin() + start);
  }
  return fit(shown, &Point::y, bottom, top, false, 0.04);
}

std::string draw(const Drawing& drawing, const Axis& x, const Axis& y) {
  const std::string corner = "x=\"" + px(x.from) + "\" y=\"" + px(y.to) + "\" ";
  const std::string size = "width=\"" + px(x.to - x.from + 3) + "\" height=\"" + px(y.from - y.to) + "\"";
  const bool cut = drawing.crowded && drawing.smooth;
  std::string out;
  if (cut) out += "<clipPath id=\"plot\"><rect " + corner + size + "/></clipPath>\n<g clip-path=\"url(#plot)\">\n";
  for (size_t i = 0; i < drawing.pale.size(); ++i)
    if (!drawing.pale[i].empty()) out += polyline(drawing.pale[i], x, y, stroke(i, "1") + " stroke-opacity=\"0.3\"");
  for (size_t i = 0; i < drawing.means.size(); ++i) {
    const Line& mean = drawing.means[i];
    if (mean.size() > 1) out += polyline(mean, x, y, stroke(i, "2"));
    for (const Point& p : mean.size() <= 30 ? mean : Line()) {
      const std::string centre = "cx=\"" + px(x.pixel(p.x)) + "\" cy=\"" + px(y.pixel(p.y)) + "\"";
      out += "<circle r=\"3\" fill=\"" + std::string(colour_of(i)) + "\" " + centre + "/>\n";
    }
  }
  return out + (cut ? "</g>\n" : "");
}

}  // namespace

void write_curve_svg(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::string& y_label, const std::vector<Curve>& curves, bool log_x) {
  size_t longest = 0;
  std::vector<Line> raw;
  for (const Curve& curve : curves) {
    longest = std::max(longest, curve.name.size());
    raw.push_back(drawable(curve, log_x));
  }
  const double right = width - std::min(300.0, 66 + 7.2 * static_cast<double>(longest));  // 7.2: a wide letter
  const Axis x = fit(raw, &Point::x, left, right, log_x, 0);
  const Drawing drawing = thin_out(raw, x);
  const Axis y = y_axis(drawing);
  const bool empty = std::all_of(raw.begin(), raw.end(), [](const Line& line) { return line.empty(); });
  const std::string size = fixed(width, 0) + " " + fixed(height, 0), middle = "text-anchor=\"middle\" font-size=\"13\"";
  const std::string caption = y_label + (drawing.smooth ? ", running mean over a fiftieth of the run" : "");
  const std::string svg =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + size + "\" role=\"img\" font-size=\"12\" "
      "fill=\"#52606d\" font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\">\n"
      "<title>" + escaped(title) + "</title>\n"
      "<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#ffffff\"/>\n" +
      text(left - 40, 36, "font-size=\"18\" font-weight=\"600\" fill=\"#1f2933\"", title) +
      text(left - 40, 62, "font-size=\"13\"", caption) + axes(x, y) + draw(drawing, x, y) +
      legend(curves, drawing.means, x, y) + text((left + right) / 2, height - 16, middle, x_label) +
      (empty ? text((left + right) / 2, (top + bottom) / 2, middle, "no data") : "") + "</svg>\n";
  write_file_atomically(path, svg);
}

}  // namespace crossply
