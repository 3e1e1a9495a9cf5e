#include "eval/inside/heat_map.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "cli/svg.h"
#include "eval/statistics.h"

namespace crossply {

using namespace svg;

namespace {

constexpr double usual_width = 920, beside_names = 36, title_height = 56, caption_height = 44;
constexpr double between_maps = 40, map_foot = 50, between_lines = 24, legend_width = 110, letter_width = 6.4,
                 small_letter_width = 5.8;
constexpr double comfortable_map = 200, comfortable_cell = 25;  // as wide as they are rather than beside another one
constexpr size_t longest_name = 16;                             // characters

struct Colour {
  double red, green, blue;
  // 0 to 1, as the eye sees it.
  double luminance() const {
    const auto linear = [](double part) { return std::pow(part / 255, 2.2); };
    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  }
  const char* contrast() const { return luminance() < 0.22 ? on_deep : on_pale; }
  std::string text() const {
    char text[8];
    std::snprintf(text, sizeof text, "#%02x%02x%02x", static_cast<int>(std::lround(red)),
                  static_cast<int>(std::lround(green)), static_cast<int>(std::lround(blue)));
    return text;
  }
};
// From pale to dark, with a lightness that falls evenly, so that it also reads in grey. Pale is no white, which is what
// has no number; of signs it is a grey, which belongs to neither.
constexpr Colour above[] = {{232, 241, 250}, {198, 219, 239}, {107, 174, 214}, {33, 113, 181}, {8, 48, 107}};
constexpr Colour ramp_above_zero[] = {{244, 244, 244}, {198, 219, 239}, {107, 174, 214}, {33, 113, 181}, {8, 48, 107}};
constexpr Colour ramp_below_zero[] = {{244, 244, 244}, {253, 219, 199}, {244, 165, 130}, {214, 96, 77}, {103, 0, 31}};

std::string fixed_without_minus_zero(double v, int decimals) {
  const std::string text = fixed(v, decimals);
  return text.find_first_not_of("-0.") == std::string::npos ? fixed(0, decimals) : text;
}

struct Scale {
  HeatScale kind;
  double largest = 0;  // magnitude
  int power = 0;       // of ten: the unit of the numbers
  int decimals = 0;

  // Of the way from pale to dark; below 0 for a negative number.
  double share(double v) const {
    if (kind == HeatScale::counts) return largest > 1 ? std::log(std::max(v, 1.0)) / std::log(largest) : 0;
    const double share = largest > 0 ? v / largest : 0;
    return kind == HeatScale::signs ? share : std::max(share, 0.0);
  }
  Colour colour(double share) const {
    const Colour* ramp = kind != HeatScale::signs ? above : share < 0 ? ramp_below_zero : ramp_above_zero;
    const double at = std::min(std::abs(share), 1.0) * (std::size(above) - 1);
    const size_t i = std::min(static_cast<size_t>(at), std::size(above) - 2);
    const double t = at - static_cast<double>(i);
    const auto mixed = [&](double Colour::*part) { return ramp[i].*part * (1 - t) + ramp[i + 1].*part * t; };
    return {mixed(&Colour::red), mixed(&Colour::green), mixed(&Colour::blue)};
  }
  std::string number(double v) const {
    if (kind != HeatScale::counts) return fixed_without_minus_zero(v / std::pow(10.0, power), decimals);
    if (v >= 999.5e3) return fixed(v / 1e6, v < 9.95e6 ? 1 : 0) + "M";
    if (v >= 9999.5) return fixed(v / 1e3, 0) + "k";
    return fixed_without_minus_zero(v, v < 9.95 ? 1 : 0);
  }
};

Scale scale_of(const HeatMapBand& band) {
  Scale scale{band.scale, band.top};
  for (const HeatMap& map : band.maps)
    for (const auto& numbers : map.rows)
      for (const double v : numbers)
        if (std::isfinite(v)) scale.largest = std::max(scale.largest, scale.kind == HeatScale::signs ? std::abs(v) : v);
  if (scale.kind == HeatScale::counts || scale.largest < 1e-290) return scale;
  if (scale.largest < 0.1 || scale.largest >= 1e4)
    scale.power = 3 * static_cast<int>(std::floor(std::log10(scale.largest) / 3 + 1e-9));
  const double told = scale.largest / std::pow(10.0, scale.power);
  scale.decimals = told < 9.995 ? 2 : told < 99.95 ? 1 : 0;
  return scale;
}

struct Size {
  size_t rows = 1, columns = 1;
};

Size size_of(const HeatMap& map) {
  Size size{std::max<size_t>(1, map.rows.size()), 1};
  for (const auto& row : map.rows) size.columns = std::max(size.columns, row.size());
  return size;
}

// How a band lies on the page, in pixels.
struct BandLayout {
  double between = between_maps;       // pixels: of maps in a line, without names
  double names = 28, foot = map_foot;  // room for the rows' names, and below a map for those of the columns
  bool own_names = false;              // the rows of each map, not only of the first in a line
  bool turned = false;                 // the columns' names
  size_t per_line = 1;                 // maps
  Size most;                           // of a map
  double cell_width = 0, cell_height = 0;
  bool numbers = false;  // in the cells

  double left() const { return beside_names + names; }
  double gap() const { return between + (own_names ? names : 0); }
  double width(const HeatMap& map) const { return static_cast<double>(size_of(map).columns) * cell_width; }
  double height(const HeatMap& map) const { return static_cast<double>(size_of(map).rows) * cell_height; }
};

// In pixels.
double widest_name(const std::vector<std::string>& names) {
  size_t most = 0;
  for (const std::string& name : names) most = std::max(most, std::min(name.size(), longest_name));
  return small_letter_width * static_cast<double>(most);
}

// As many maps in a line as are still comfortable to read, and about as many in each.
void choose_lines(BandLayout* layout, size_t maps) {
  const auto columns = static_cast<double>(layout->most.columns);
  const double room = usual_width - layout->left() - legend_width;
  const double cell = std::clamp(comfortable_map / columns, 5.0, comfortable_cell);
  const auto fit = static_cast<size_t>((room + layout->gap()) / (columns * cell + layout->gap()));
  const size_t lines = (maps + std::max<size_t>(1, fit) - 1) / std::max<size_t>(1, fit);
  layout->per_line = (maps + std::max<size_t>(1, lines) - 1) / std::max<size_t>(1, lines);
}

size_t longest_number(const HeatMapBand& band, const Scale& scale) {
  size_t most = 1;
  for (const HeatMap& map : band.maps)
    for (const auto& numbers : map.rows)
      for (const double v : numbers)
        if (std::isfinite(v)) most = std::max(most, scale.number(v).size());
  return most;
}

void choose_cells(BandLayout* layout, const HeatMapBand& band, const Scale& scale) {
  double columns = 1;  // of the widest line
  for (size_t i = 0; i < band.maps.size(); i += layout->per_line) {
    double line = 0;
    for (size_t k = i; k < std::min(i + layout->per_line, band.maps.size()); ++k)
      line += static_cast<double>(size_of(band.maps[k]).columns);
    columns = std::max(columns, line);
  }
  const double gaps = static_cast<double>(std::max<size_t>(1, layout->per_line) - 1) * layout->gap();
  const double room = usual_width - layout->left() - legend_width - gaps;
  const auto rows = static_cast<double>(layout->most.rows);
  layout->cell_width = std::clamp(room / columns, 3.0, 44.0);
  layout->cell_height = std::clamp(440 / rows, 5.0, 20.0);
  const double text_width = 3 + 5.6 * static_cast<double>(longest_number(band, scale));
  layout->numbers = layout->cell_width >= text_width && layout->cell_height >= 14;
  if (!layout->numbers && layout->most.rows >= 12 && layout->most.columns >= 12)  // square, as what it compares
    layout->cell_width = layout->cell_height = std::min(layout->cell_width, std::max(layout->cell_height, 640 / rows));
  for (double* size : {&layout->cell_width, &layout->cell_height})
    *size = std::floor(*size * 10) / 10;  // as px() writes it: no gaps between cells
}

// In pixels, of what a row or a column is.
double label_width(const std::string& label) { return letter_width * static_cast<double>(label.size()); }

BandLayout layout_of(const HeatMapBand& band, const Scale& scale, const std::string& column) {
  BandLayout layout;
  double column_names = 0;
  for (const HeatMap& map : band.maps) {
    const Size size = size_of(map);
    layout.most = {std::max(layout.most.rows, size.rows), std::max(layout.most.columns, size.columns)};
    layout.names = std::max(layout.names, 10 + widest_name(map.row_names));
    column_names = std::max(column_names, widest_name(map.column_names));
    const HeatMap& first = band.maps[0];
    layout.own_names |= map.row_names != first.row_names || map.first_row != first.first_row;
  }
  size_t fewest = layout.most.columns;
  for (const HeatMap& map : band.maps) fewest = std::min(fewest, size_of(map).columns);
  const double narrowest =
      std::clamp(comfortable_map / static_cast<double>(layout.most.columns), 5.0, comfortable_cell) *
      static_cast<double>(fewest);
  layout.between = std::max(between_maps, label_width(column) + 12 - narrowest);  // labels do not touch
  choose_lines(&layout, band.maps.size());
  choose_cells(&layout, band, scale);
  layout.turned = column_names > layout.cell_width - 4;
  if (layout.turned) layout.foot += std::max(0.0, column_names - 12);
  return layout;
}

// Every n-th number along an axis, so that they stand at least `apart` pixels from each other.
size_t stride_of(double cell, double apart) {
  size_t stride = 1;
  for (const size_t factor : {2u, 5u, 10u, 20u, 50u, 100u, 1000u})
    if (static_cast<double>(stride) * cell < apart) stride = factor;
  return stride;
}

// Names, or numbers where there are none.
std::string name_of(const std::vector<std::string>& names, int64_t first, size_t i) {
  return i < names.size() ? names[i] : std::to_string(first + static_cast<int64_t>(i));
}

std::string filled(double x, double y, double width, double height, const Colour& colour) {
  return rectangle(x, y, width, height, "fill=\"" + colour.text() + "\"");
}

std::string row_names(const HeatMap& map, const BandLayout& layout, double x, double y) {
  std::string out;
  for (size_t r = 0, step = stride_of(layout.cell_height, 11); r < size_of(map).rows; r += step)
    out += text(x - 8, y + (static_cast<double>(r) + 0.5) * layout.cell_height + 4,
                "text-anchor=\"end\" font-size=\"11\"", name_of(map.row_names, map.first_row, r), longest_name);
  return out;
}

std::string column_names(const HeatMap& map, const BandLayout& layout, double x, double y) {
  std::string out;
  const double apart = layout.turned ? 11 : map.column_names.empty() ? 24 : 0;
  for (size_t c = 0, step = stride_of(layout.cell_width, apart); c < size_of(map).columns; c += step) {
    const double at = x + (static_cast<double>(c) + 0.5) * layout.cell_width;
    const std::string name = name_of(map.column_names, map.first_column, c);
    const std::string turn = " transform=\"rotate(-90 " + px(at + 4) + " " + px(y + 6) + ")\"";
    out += layout.turned ? text(at + 4, y + 6, "text-anchor=\"end\" font-size=\"11\"" + turn, name, longest_name)
                         : text(at, y + 15, "text-anchor=\"middle\" font-size=\"11\"", name, longest_name);
  }
  return out;
}

// What the axes are: "layer" and "head".
struct Axes {
  std::string row, column;
};

// "layer 3; head mean: 0.412", which a browser shows under the pointer.
std::string cell_title(const HeatMap& map, const Axes& axes, size_t r, size_t c) {
  char number[32];
  std::snprintf(number, sizeof number, "%.4g", map.rows[r][c]);
  const auto place = [](const std::string& axis, const std::string& name) {
    return escaped(axis, 40) + " " + escaped(name, longest_name);
  };
  return "<title>" + place(axes.row, name_of(map.row_names, map.first_row, r)) + "; " +
         place(axes.column, name_of(map.column_names, map.first_column, c)) + ": " + with_true_minus(number) +
         "</title>";
}

// Cells without numbers and with a title each, as long as a page stays of a size that browsers like.
constexpr size_t max_titled_cells = 1600;

std::string titled_cells(const HeatMap& map, const Axes& axes, const BandLayout& layout, double x, double y) {
  size_t cells = 0;
  for (const auto& row : map.rows) cells += row.size();
  if (cells > max_titled_cells) return "";
  std::string out = "<g fill-opacity=\"0\">\n";
  for (size_t r = 0; r < map.rows.size(); ++r)
    for (size_t c = 0; c < map.rows[r].size(); ++c)
      if (std::isfinite(map.rows[r][c]))
        out += "<path d=\"M" + px(x + static_cast<double>(c) * layout.cell_width) + " " +
               px(y + static_cast<double>(r) * layout.cell_height) + "h" + px(layout.cell_width) + "v" +
               px(layout.cell_height) + "h-" + px(layout.cell_width) + "\">" + cell_title(map, axes, r, c) +
               "</path>\n";
  return out + "</g>\n";
}

// Cells with their numbers.
std::string numbered_cells(const HeatMap& map, const Scale& scale, const BandLayout& layout, double x, double y) {
  std::string out;
  for (size_t r = 0; r < map.rows.size(); ++r)
    for (size_t c = 0; c < map.rows[r].size(); ++c) {
      const double v = map.rows[r][c], width = layout.cell_width, height = layout.cell_height;
      if (!std::isfinite(v)) continue;
      const double left = x + static_cast<double>(c) * width, top = y + static_cast<double>(r) * height;
      const Colour colour = scale.colour(scale.share(v));
      out += filled(left, top, width - 1, height - 1, colour);
      out += text(left + width / 2, top + height / 2 + 3.5,
                  "text-anchor=\"middle\" font-size=\"10\" fill=\"" + std::string(colour.contrast()) + "\"",
                  with_true_minus(scale.number(v)));
    }
  return out;
}

// The same without, of 64 colours, all cells of a colour in one path: maps may have ten thousands of cells.
std::string plain_cells(const HeatMap& map, const Scale& scale, const BandLayout& layout, double x, double y) {
  const double width = layout.cell_width, height = layout.cell_height, dash = std::min(width / 2, 7.0);
  const std::string cell = "h" + px(width) + "v" + px(height) + "h-" + px(width) + "z";
  const bool dashes = scale.kind == HeatScale::signs && width >= 5 && height >= 5;
  std::map<std::string, std::string> paths, dash_paths;  // by colour
  for (size_t r = 0; r < map.rows.size(); ++r)
    for (size_t c = 0; c < map.rows[r].size(); ++c) {
      if (!std::isfinite(map.rows[r][c])) continue;
      const double left = x + static_cast<double>(c) * width, top = y + static_cast<double>(r) * height;
      const double share = std::round(64 * scale.share(map.rows[r][c])) / 64;
      const Colour colour = scale.colour(share);
      paths[colour.text()] += "M" + px(left) + " " + px(top) + cell;
      if (dashes && share < -0.05)
        dash_paths[colour.contrast()] +=
            "M" + px(left + (width - dash) / 2) + " " + px(top + height / 2) + "h" + px(dash);
    }
  std::string out;
  for (const auto& [colour, path] : paths)
    out += "<path fill=\"" + colour + "\" shape-rendering=\"crispEdges\" d=\"" + path + "\"/>\n";
  for (const auto& [colour, path] : dash_paths) out += "<path stroke=\"" + colour + "\" d=\"" + path + "\"/>\n";
  return out;
}

std::string draw_map(const HeatMap& map, const Scale& scale, const BandLayout& layout, double x, double y, double room,
                     const Axes& axes) {
  const double width = layout.width(map), height = layout.height(map);
  std::string out = text(x, y - 8, "fill=\"#1f2933\"", map.caption, static_cast<size_t>(room / letter_width));
  out += frame(x, y, width, height);
  out += layout.numbers ? numbered_cells(map, scale, layout, x, y) : plain_cells(map, scale, layout, x, y);
  out += titled_cells(map, axes, layout, x, y);
  out += column_names(map, layout, x, y + height);
  return out + text(x + width / 2, y + height + layout.foot - 19, "text-anchor=\"middle\"", axes.column);
}

// Where numbers stand beside the bar of colours: the ends and the middle; of counts 1, 2, 5, 10, ... and the largest.
std::vector<double> legend_numbers(const Scale& scale, double height) {
  if (scale.kind == HeatScale::shares) return {scale.largest, scale.largest / 2, 0};
  if (scale.kind == HeatScale::signs) return {scale.largest, 0, -scale.largest};
  std::vector<double> numbers;
  double lowest = height + 12;  // the place of the last one
  for (double power = 1; power <= scale.largest; power *= 10)
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double v = factor * power, at = height * (1 - scale.share(v));
      if (v > scale.largest || at < 12 || lowest - at < 12) continue;
      numbers.push_back(v), lowest = at;
    }
  if (scale.largest > 1) numbers.push_back(scale.largest);
  return numbers;
}

// A bar of the scale's colours from the largest number down to 1, 0 or its negative.
std::string draw_legend(const Scale& scale, const std::string& words, double x, double y, double height) {
  constexpr int steps = 40;
  const double lowest = scale.kind == HeatScale::signs ? -1 : 0;
  std::string out;
  for (int i = 0; i < steps; ++i)
    out +=
        filled(x, y + height * i / steps, 14, height / steps + 0.3, scale.colour(1 + (lowest - 1) * (i + 0.5) / steps));
  const std::string small = "font-size=\"11\"";
  for (const double v : legend_numbers(scale, height)) {
    const bool whole = scale.kind == HeatScale::counts && v == std::floor(v) && v < 9999.5;
    const double at = y + height * (1 - scale.share(v)) / (1 - lowest);
    out += text(x + 20, at + 4, small, whole ? fixed(v, 0) : with_true_minus(scale.number(v)));
  }
  if (scale.kind == HeatScale::signs)
    out += text(x + 20, y + 17, small, "blue") + text(x + 20, y + height - 9, small, "red");
  if (scale.power != 0) out += text(x, y - 8, small, "\xC3\x97 1e" + with_true_minus(std::to_string(scale.power)));
  const double middle = y + height / 2;
  return out +
         text(x + 66, middle,
              "text-anchor=\"middle\" " + small + " transform=\"rotate(90 " + px(x + 66) + " " + px(middle) + ")\"",
              words, static_cast<size_t>(std::max(height, 90.0) / 5.6));
}

struct Drawn {
  std::string elements;
  double right, bottom;
};

Drawn draw_band(const HeatMapBand& band, const std::string& row, const std::string& column, double y) {
  const Scale scale = scale_of(band);
  const BandLayout layout = layout_of(band, scale, column);
  Drawn out{text(24, y + 12, "font-size=\"13\" font-weight=\"600\" fill=\"#1f2933\"", band.caption, 130), 0, y};
  y += caption_height;
  const double first_line = y;
  double first_height = layout.cell_height;
  for (size_t i = 0; i < band.maps.size(); ++i) {
    const bool begins = i % layout.per_line == 0;
    if (i > 0 && begins) y = out.bottom + between_lines;
    double x = layout.left();
    for (size_t k = i - i % layout.per_line; k < i; ++k) x += layout.width(band.maps[k]) + layout.gap();
    const HeatMap& map = band.maps[i];
    const double height = layout.height(map), turned = label_width(row);
    if (begins) {  // beside the middle, but of a low map from its top, beneath which there is room
      const double middle = y + std::max(height, turned) / 2;
      out.elements += text(24, middle, "text-anchor=\"middle\" transform=\"rotate(-90 24 " + px(middle) + ")\"", row);
    }
    if (begins || layout.own_names) out.elements += row_names(map, layout, x, y);
    const double room = band.maps.size() == 1 ? usual_width - x - legend_width : layout.width(map) + layout.gap() - 8;
    out.elements += draw_map(map, scale, layout, x, y, room, {row, column});
    out.right = std::max(out.right, x + layout.width(map));
    out.bottom = std::max({out.bottom, y + height + layout.foot, y + turned + 8});
    if (i < layout.per_line) first_height = std::max(first_height, height);
  }
  const double legend = std::clamp(first_height, 60.0, 240.0);
  out.elements += draw_legend(scale, band.legend, out.right + 24, first_line, legend);
  return {out.elements, out.right + legend_width, std::max(out.bottom, first_line + legend + 24)};
}

}  // namespace

void add_mean_column(HeatMap& map) {
  const size_t columns = size_of(map).columns;
  if (map.column_names.empty())
    for (size_t c = 0; c < columns; ++c) map.column_names.push_back(name_of({}, map.first_column, c));
  map.column_names.push_back("mean");
  for (auto& row : map.rows) {
    const double mean = mean_of_finite(row);
    row.resize(columns, NAN);
    row.push_back(mean);
  }
}

std::string heat_map_svg(const std::string& title, const std::string& row, const std::string& column,
                         const std::vector<HeatMapBand>& bands) {
  double y = title_height, width = usual_width;
  std::string elements = text(24, 34, "font-size=\"18\" font-weight=\"600\" fill=\"#1f2933\"", title, 80);
  for (const HeatMapBand& band : bands) {
    const Drawn drawn = draw_band(band, row, band.column.empty() ? column : band.column, y);
    elements += drawn.elements;
    y = drawn.bottom;
    width = std::max(width, drawn.right);
  }
  return document(width, y, title, elements);
}

}  // namespace crossply
