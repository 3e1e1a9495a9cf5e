#include "cli/dots.h"

#include <algorithm>
#include <cmath>

#include "cli/svg.h"

namespace crossply {

using namespace svg;

namespace {

constexpr double chart_width = 860, label_width = 290, right = 160, row_height = 20, top = 44, caption_height = 26;
constexpr const char *blue = "#0072B2", *red = "#D55E00", *dim = "#52606d";

struct Scale {
  double low, high;
  double at(double x) const { return label_width + (x - low) / (high - low) * (chart_width - label_width - right); }
};

// 1, 2 or 5 times a power of ten, about a sixth of the range.
double tick_step(double range) {
  const double raw = range / 6, unit = std::pow(10, std::floor(std::log10(raw)));
  return unit * (raw / unit < 1.5 ? 1 : raw / unit < 3.5 ? 2 : raw / unit < 7.5 ? 5 : 10);
}

Scale scale_of(const DotChart& chart) {
  double low = chart.difference ? 0 : INFINITY, high = chart.difference ? 0 : -INFINITY;
  if (chart.shares && !chart.difference) low = 0, high = 1;
  for (const DotGroup& group : chart.groups)
    for (const DotRow& row : group.rows) {
      const double half = std::isfinite(row.half) ? row.half : 0, middle = row.middle();
      low = std::fmin(low, middle - half), high = std::fmax(high, middle + half);
      for (const double value : row.values) low = std::min(low, value), high = std::max(high, value);
    }
  if (!(low <= high)) low = 0, high = 1;
  const double edge = chart.shares && !chart.difference ? 0 : std::max(0.05 * (high - low), 1e-9);
  return {low - edge, high + edge};
}

std::string line(double x1, double y1, double x2, double y2, const std::string& style) {
  return "<path d=\"M" + px(x1) + " " + px(y1) + "L" + px(x2) + " " + px(y2) + "\" " + style + "/>\n";
}

std::string number(const DotChart& chart, double value, bool sign) {
  const double shown = chart.shares ? 100 * value : value;
  std::string out = fixed(std::abs(shown), chart.shares ? 1 : 3);
  if (sign) out = (shown < 0 ? "\u2212" : "+") + out;
  return out;
}

std::string axis(const DotChart& chart, const Scale& scale, double bottom) {
  std::string out;
  const double step = tick_step(scale.high - scale.low);
  const int decimals = static_cast<int>(std::max(0.0, std::ceil(-std::log10(chart.shares ? 100 * step : step) - 1e-9)));
  for (double v = std::ceil(scale.low / step) * step; v <= scale.high + 1e-9 * step; v += step) {
    const double at = chart.shares ? 100 * v : v;
    out += line(scale.at(v), top, scale.at(v), bottom, "stroke=\"#e4e7eb\"");
    out += text(scale.at(v), bottom + 16, "text-anchor=\"middle\" font-size=\"11\"",
                shown(std::abs(at) < 1e-9 ? 0 : at, decimals) + (chart.shares ? " %" : ""));
  }
  if (chart.difference)
    out += line(scale.at(0), top, scale.at(0), bottom, "stroke=\"#1f2933\" stroke-dasharray=\"3 3\"");
  return out + text((label_width + chart_width - right) / 2, bottom + 36, "text-anchor=\"middle\"", chart.x_label);
}

std::string row_svg(const DotChart& chart, const Scale& scale, const DotRow& row, double y) {
  const double middle = row.middle();
  const bool known = std::isfinite(row.half), tells = known && std::abs(middle) > row.half;
  const std::string colour = !chart.difference ? blue : !tells ? dim : middle < 0 ? blue : red;
  std::string out = text(label_width - 10, y + 4, "text-anchor=\"end\" fill=\"#1f2933\"", row.label, 36);
  if (known)
    out += line(scale.at(middle - row.half), y, scale.at(middle + row.half), y,
                "stroke=\"" + colour + "\" stroke-width=\"1.4\"");
  for (const double value : row.values)
    out += "<circle cx=\"" + px(scale.at(value)) + "\" cy=\"" + px(y) + "\" r=\"3.2\" fill=\"" + colour +
           "\" fill-opacity=\"0.4\"/>\n";
  out += line(scale.at(middle), y - 6, scale.at(middle), y + 6, "stroke=\"" + colour + "\" stroke-width=\"2.4\"");
  const std::string mean = number(chart, middle, chart.difference);
  return out + text(chart_width - right + 12, y + 4, "fill=\"" + colour + (tells ? "\" font-weight=\"600\"" : "\""),
                    mean + (known                    ? " \u00B1 " + number(chart, row.half, false)
                            : row.values.size() == 1 ? " (one seed)"
                                                     : ""));
}

}  // namespace

double DotRow::middle() const {
  if (std::isfinite(mean)) return mean;
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

std::string dots_svg(const DotChart& chart) {
  const Scale scale = scale_of(chart);
  std::string rows;
  double y = top;
  for (const DotGroup& group : chart.groups) {
    const bool any = std::ranges::any_of(group.rows, [](const DotRow& row) { return std::isfinite(row.middle()); });
    if (!any) continue;
    y += group.caption.empty() ? 6 : caption_height;
    if (!group.caption.empty()) rows += text(24, y - 4, "font-weight=\"600\" fill=\"#1f2933\"", group.caption, 110);
    for (const DotRow& row : group.rows) {
      if (!std::isfinite(row.middle())) continue;
      rows += row_svg(chart, scale, row, y + row_height / 2);
      y += row_height;
    }
  }
  const double bottom = y + 6;
  return document(chart_width, bottom + 50, chart.title,
                  text(24, 28, "font-size=\"15\" font-weight=\"600\" fill=\"#1f2933\"", chart.title, 105) +
                      axis(chart, scale, bottom) + rows);
}

}  // namespace crossply
