#include "eval/inside/scatter.h"

#include <algorithm>
#include <cmath>

#include "cli/svg.h"

namespace crossply {

using namespace svg;

namespace {

constexpr double picture_width = 920, scatter_edge = 24, title_room = 52, legend_line = 20, gap_of_panels = 12;
constexpr double largest_panel = 280;
constexpr size_t panels_beside = 6;

// The colours of Okabe and Ito without the yellow; 7 and 6 have no common factor, so that 12 classes look different.
constexpr const char* class_colours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"};
// From its place: a disc (a line of no length with round ends), an upright and a lying cross, a triangle, a square and
// a diamond.
constexpr const char* class_marks[] = {"h0",
                                       "m-2 0h4m-2-2v4",
                                       "m-1.6-1.6l3.2 3.2m0-3.2l-3.2 3.2",
                                       "m0-2l1.9 3.4h-3.8z",
                                       "m-1.6-1.6h3.2v3.2h-3.2z",
                                       "m0-2.3l2.3 2.3-2.3 2.3-2.3-2.3z"};

std::string marks_of(size_t c, const std::string& path) {
  const size_t mark = c % std::size(class_marks);
  return "<path d=\"" + path + "\" fill=\"none\" stroke=\"" + class_colours[c % std::size(class_colours)] +
         "\" stroke-width=\"" + (mark == 0 ? "3.2" : "0.9") + "\" stroke-linecap=\"round\" stroke-opacity=\"0.8\"/>\n";
}

std::string mark_at(size_t c, double x, double y) {
  return "M" + px(x) + " " + px(y) + class_marks[c % std::size(class_marks)];
}

std::string panel_of(const ScatterPanel& panel, double x, double y, double size) {
  std::string out = text(x, y - 6, "font-size=\"11\"", panel.caption, static_cast<size_t>(size / 6));
  out += rectangle(x, y, size, size, "fill=\"none\" stroke=\"#cbd2d9\"");
  PlanePoint low{INFINITY, INFINITY}, high{-INFINITY, -INFINITY};
  for (const auto& points : panel.classes)
    for (const PlanePoint& p : points) {
      low = {std::min(low.x, p.x), std::min(low.y, p.y)};
      high = {std::max(high.x, p.x), std::max(high.y, p.y)};
    }
  const double span = std::max({high.x - low.x, high.y - low.y, 1e-300});
  const PlanePoint middle{(low.x + high.x) / 2, (low.y + high.y) / 2};
  for (size_t c = 0; c < panel.classes.size(); ++c) {
    std::string path;
    for (const PlanePoint& p : panel.classes[c])
      path += mark_at(c, x + size / 2 + (p.x - middle.x) / span * (size - 12),
                      y + size / 2 - (p.y - middle.y) / span * (size - 12));
    if (!path.empty()) out += marks_of(c, path);
  }
  return out;
}

// Adds the lines that it takes to y.
std::string legend_of(const std::vector<std::string>& classes, double* y) {
  std::string out;
  double x = scatter_edge;
  for (size_t c = 0; c < classes.size(); ++c) {
    const double width = 34 + 7.5 * static_cast<double>(std::min<size_t>(classes[c].size(), 24));
    if (x + width > picture_width - scatter_edge && x > scatter_edge) x = scatter_edge, *y += legend_line;
    out += marks_of(c, mark_at(c, x + 6, *y)) + text(x + 16, *y + 4, "fill=\"#1f2933\"", classes[c], 24);
    x += width;
  }
  *y += legend_line;
  return out;
}

}  // namespace

std::string scatter_svg(const std::string& title, const std::vector<std::string>& classes,
                        const std::vector<ScatterRow>& rows) {
  size_t beside = 1;
  for (const ScatterRow& row : rows) beside = std::max(beside, std::min(panels_beside, row.panels.size()));
  const double size = std::min(
      largest_panel, (picture_width - 2 * scatter_edge + gap_of_panels) / static_cast<double>(beside) - gap_of_panels);
  double y = title_room + 6;
  std::string elements = text(scatter_edge, 34, "font-size=\"18\" font-weight=\"600\" fill=\"#1f2933\"", title, 80);
  elements += legend_of(classes, &y);
  for (const ScatterRow& row : rows) {
    elements += text(scatter_edge, y + 14, "font-size=\"13\" font-weight=\"600\"", row.caption, 100);
    y += 38;
    for (size_t i = 0; i < row.panels.size(); ++i) {
      elements += panel_of(row.panels[i],
                           scatter_edge + static_cast<double>(i % panels_beside) * (size + gap_of_panels), y, size);
      if (i % panels_beside == panels_beside - 1 || i + 1 == row.panels.size()) y += size + 26;
    }
  }
  return document(picture_width, y, title, elements);
}

}  // namespace crossply
