#include "eval/inside/heat_map.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/svg.h"

namespace crossply {

using namespace svg;

namespace {

constexpr double least_width = 640, usual_width = 920, left = 64, title_height = 56, caption_height = 44;
constexpr double between_maps = 48, band_foot = 50, legend_width = 96, ticks_apart = 24;

struct Colour {
  double red, green, blue;
};
// From pale to dark, with a lightness that falls evenly, so that it also reads in grey.
constexpr Colour above[] = {{247, 251, 255}, {198, 219, 239}, {107, 174, 214}, {33, 113, 181}, {8, 48, 107}};

constexpr Colour below[] = {{247, 251, 255}, {253, 219, 199}, {244, 165, 130}, {214, 96, 77}, {103, 0, 31}};

std::string colour_at(double share) {
  const Colour* ramp = share < 0 ? below : above;
  const double at = std::min(std::abs(share), 1.0) * (std::size(above) - 1);
  const size_t i = std::min(static_cast<size_t>(at), std::size(above) - 2);
  const double t = at - static_cast<double>(i);
  const auto mixed = [&](double Colour::*part) {
    return static_cast<int>(std::lround(ramp[i].*part * (1 - t) + ramp[i + 1].*part * t));
  };
  char text[8];
  std::snprintf(text, sizeof text, "#%02x%02x%02x", mixed(&Colour::red), mixed(&Colour::green), mixed(&Colour::blue));
  return text;
}

struct Scale {
  HeatScale kind = HeatScale::counts;
  double largest = 1;  // magnitude
  // Of the way from pale to dark; below 0 for a negative number.
  double share(double v) const {
    if (kind != HeatScale::counts) return largest > 0 ? v / largest : 0;
    return largest > 1 ? std::log(std::max(v, 1.0)) / std::log(largest) : 0;
  }
};

struct Cells {
  double width, height;
  bool numbers() const { return width >= 25 && height >= 14; }
};

struct Size {
  size_t rows = 1, columns = 1;
};

Size size_of(const HeatMap& map) {
  Size size{std::max<size_t>(1, map.rows.size()), 1};
  for (const auto& row : map.rows) size.columns = std::max(size.columns, row.size());
  return size;
}

std::string rectangle(double x, double y, double width, double height, const std::string& fill) {
  return "<rect x=\"" + px(x) + "\" y=\"" + px(y) + "\" width=\"" + px(width) + "\" height=\"" + px(height) +
         "\" fill=\"" + fill + "\"/>\n";
}

std::string number_of(double v, HeatScale kind) {
  if (kind != HeatScale::counts) return fixed(v, std::abs(v) < 9.995 ? 2 : 0);
  return fixed(v, v < 9.95 ? 1 : 0);
}

// Every n-th number along an axis, so that they stand at least `apart` pixels from each other.
size_t stride_of(double cell, double apart) {
  size_t stride = 1;
  for (const size_t factor : {2u, 5u, 10u, 20u, 50u, 100u, 1000u})
    if (static_cast<double>(stride) * cell < apart) stride = factor;
  return stride;
}

std::string draw_map(const HeatMap& map, const Scale& scale, const Cells& cells, double x, double y,
                     const std::string& column) {
  const Size size = size_of(map);
  const double width = static_cast<double>(size.columns) * cells.width;
  const double height = static_cast<double>(size.rows) * cells.height;
  const size_t longest = static_cast<size_t>(width / 7) + 4;  // 7: a letter
  std::string out = text(x, y - 8, "fill=\"#1f2933\"", map.caption, longest);
  out += "<rect x=\"" + px(x - 0.5) + "\" y=\"" + px(y - 0.5) + "\" width=\"" + px(width + 1) + "\" height=\"" +
         px(height + 1) + "\" fill=\"none\" stroke=\"#cbd2d9\"/>\n";
  const double gap = cells.numbers() ? 1 : 0;
  for (size_t r = 0; r < map.rows.size(); ++r) {
    const double top = y + static_cast<double>(r) * cells.height;
    for (size_t c = 0; c < map.rows[r].size(); ++c) {
      const double v = map.rows[r][c], at = x + static_cast<double>(c) * cells.width, share = scale.share(v);
      if (!std::isfinite(v)) continue;
      out += rectangle(at, top, cells.width - gap, cells.height - gap, colour_at(share));
      const std::string fill = std::abs(share) > 0.55 ? "#ffffff" : "#1f2933";
      if (cells.numbers())
        out += text(at + cells.width / 2, top + cells.height / 2 + 3.5,
                    "text-anchor=\"middle\" font-size=\"10\" fill=\"" + fill + "\"", number_of(v, scale.kind));
    }
  }
  for (size_t c = 0, step = stride_of(cells.width, ticks_apart); c < size.columns; c += step)
    out += text(x + (static_cast<double>(c) + 0.5) * cells.width, y + height + 15,
                "text-anchor=\"middle\" font-size=\"11\"", std::to_string(c));
  return out + text(x + width / 2, y + height + 31, "text-anchor=\"middle\"", column);
}

// A bar of the scale's colours from the largest number down to 0, or to its negative.
std::string draw_linear_legend(const Scale& scale, double x, double y, double height) {
  constexpr int steps = 40;
  const double bottom = scale.kind == HeatScale::signs ? -1 : 0;
  std::string out;
  for (int i = 0; i < steps; ++i)
    out +=
        rectangle(x, y + height * i / steps, 14, height / steps + 0.3, colour_at(1 + (bottom - 1) * (i + 0.5) / steps));
  for (const double share : {1.0, (1 + bottom) / 2, bottom})
    out += text(x + 20, y + height * (1 - share) / (1 - bottom) + 4, "font-size=\"11\"",
                number_of(share * scale.largest, scale.kind));
  return out;
}

// A bar of the scale's colours, with numbers at 1, 2, 5, 10, ... and at its upper end.
std::string draw_legend(const Scale& scale, double x, double y, double height) {
  if (scale.kind != HeatScale::counts) return draw_linear_legend(scale, x, y, height);
  constexpr int steps = 40;
  std::string out;
  for (int i = 0; i < steps; ++i)
    out += rectangle(x, y + height * i / steps, 14, height / steps + 0.3, colour_at(1 - (i + 0.5) / steps));
  const auto label = [&](double v) {
    const double at = y + height * (1 - scale.share(v));
    return text(x + 20, at + 4, "font-size=\"11\"", v == std::floor(v) ? fixed(v, 0) : number_of(v, scale.kind));
  };
  double lowest = height;  // the place of the last label
  for (double power = 1; power <= scale.largest; power *= 10)
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double v = factor * power, at = height * (1 - scale.share(v));
      if (v > scale.largest || at < 12 || (v > 1 && lowest - at < 12)) continue;
      out += label(v), lowest = at;
    }
  return out + (scale.largest > 1 ? label(scale.largest) : "");
}

std::string row_names(const Cells& cells, size_t rows, double y, const std::string& row) {
  std::string out;
  for (size_t r = 0, step = stride_of(cells.height, 14); r < rows; r += step)
    out += text(left - 8, y + (static_cast<double>(r) + 0.5) * cells.height + 4, "text-anchor=\"end\" font-size=\"11\"",
                std::to_string(r));
  const double middle = y + static_cast<double>(rows) * cells.height / 2;
  const std::string turned = "text-anchor=\"middle\" transform=\"rotate(-90 24 " + px(middle) + ")\"";
  return out + text(24, middle, turned, row);
}

}  // namespace

std::string heat_map_svg(const std::string& title, const std::string& row, const std::string& column,
                         const std::vector<HeatMapBand>& bands) {
  Size all{1, 0};  // the most rows of a map, and the columns of all maps of a band
  size_t maps = 1;
  for (const HeatMapBand& band : bands) {
    size_t columns = 0;
    for (const HeatMap& map : band.maps)
      all.rows = std::max(all.rows, size_of(map).rows), columns += size_of(map).columns;
    all.columns = std::max({all.columns, columns, size_t{1}}), maps = std::max(maps, band.maps.size());
  }
  const double gaps = static_cast<double>(maps - 1) * between_maps, beside = left + legend_width;
  const Cells cells{std::clamp((usual_width - beside - gaps) / static_cast<double>(all.columns), 5.0, 32.0),
                    std::clamp(440 / static_cast<double>(all.rows), 5.0, 20.0)};
  const double plot = static_cast<double>(all.columns) * cells.width + gaps;
  const double height = static_cast<double>(all.rows) * cells.height;
  double y = title_height;
  std::string elements = text(24, 34, "font-size=\"18\" font-weight=\"600\" fill=\"#1f2933\"", title, 80);
  for (const HeatMapBand& band : bands) {
    Scale scale{band.scale, band.scale == HeatScale::counts ? 1.0 : 0.0};
    for (const HeatMap& map : band.maps)
      for (const auto& numbers : map.rows)
        for (const double v : numbers)
          if (std::isfinite(v))
            scale.largest = std::max(scale.largest, band.scale == HeatScale::signs ? std::abs(v) : v);
    elements += text(24, y + 12, "font-size=\"13\" font-weight=\"600\"", band.caption);
    y += caption_height;
    elements += row_names(cells, all.rows, y, row);
    double x = left;
    for (const HeatMap& map : band.maps) {
      elements += draw_map(map, scale, cells, x, y, column);
      x += static_cast<double>(size_of(map).columns) * cells.width + between_maps;
    }
    elements += draw_legend(scale, left + plot + 24, y, height);
    y += height + band_foot;
  }
  return document(std::max(least_width, plot + beside), y, title, elements);
}

}  // namespace crossply
