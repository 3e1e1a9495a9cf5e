#include "eval/inside/token_map.h"

#include <cmath>
#include <map>

#include "cli/svg.h"
#include "engine/io/printable.h"

namespace crossply {

using namespace svg;

namespace {

constexpr double page = 920, edge = 24, row_labels = 88, column_labels = 84, gap_of_maps = 20, min_pitch = 156,
                 legend_height = 40;
constexpr double min_cell = 10, min_small_cell = 4, max_cell = 20, max_side = 640, small_label = 20;
constexpr size_t max_titles = 40000;  // of a figure's cells: a page stays of a size that browsers like
constexpr int shades = 24;
constexpr const char* ink = "#08306c";  // no colour of a heat map's: on a dark page it is light (cli/svg.h)

// Of 1: the square root, so that small shares are seen too.
int shade_of(double share) { return static_cast<int>(std::lround(shades * std::sqrt(std::clamp(share, 0.0, 1.0)))); }

struct MapLayout {
  int64_t beside;      // maps in a row
  double cell, pitch;  // pixels: of a token, and from one map to the next
};

// As many maps beside each other as leave the labels readable, or the cells.
MapLayout layout_of(size_t tokens, size_t maps, bool small) {
  const double least = small ? min_small_cell : min_cell;
  const auto n = static_cast<double>(tokens), width = page - 2 * edge - row_labels;
  const auto cell_of = [&](int64_t beside) {
    return std::floor((width / static_cast<double>(beside) - gap_of_maps) / n);
  };
  int64_t beside = 1;
  while (beside < static_cast<int64_t>(maps) && cell_of(beside + 1) > least &&
         width / static_cast<double>(beside + 1) >= min_pitch)
    ++beside;
  const double cell = std::clamp(std::min(cell_of(beside), std::floor(max_side / n)), least, max_cell);
  return {beside, cell, std::max(n * cell + gap_of_maps, min_pitch)};
}

// The cells of each shade are one path.
std::string draw_cells(const TokenMap& map, double x, double y, double cell) {
  std::map<int, std::string> paths;
  const std::string side = fixed(cell, 0);
  for (size_t t = 0; t < map.rows.size(); ++t)
    for (size_t j = 0; j < map.rows[t].size(); ++j)
      if (const int shade = shade_of(map.rows[t][j]); shade > 0)
        paths[shade] += "M" + fixed(x + static_cast<double>(j) * cell, 0) + " " +
                        fixed(y + static_cast<double>(t) * cell, 0) + "h" + side + "v" + side + "h-" + side + "z";
  std::string out;
  for (const auto& [shade, path] : paths)
    out += "<path fill-opacity=\"" + fixed(static_cast<double>(shade) / shades, 2) + "\" d=\"" + path + "\"/>\n";
  return out;
}

// A title for each cell, "row: column 0.41", which a browser shows under the pointer.
std::string cell_titles(const TokenMap& map, const std::vector<std::string>& tokens, double x, double y, double cell) {
  std::string out = "<g fill-opacity=\"0\">\n";
  const std::string side = fixed(cell, 0);
  for (size_t t = 0; t < map.rows.size(); ++t)
    for (size_t j = 0; j < map.rows[t].size(); ++j)
      out += "<path d=\"M" + fixed(x + static_cast<double>(j) * cell, 0) + " " +
             fixed(y + static_cast<double>(t) * cell, 0) + "h" + side + "v" + side + "h-" + side + "\"><title>" +
             escaped(tokens[t], 20) + ": " + escaped(tokens[j], 20) + " " + fixed(map.rows[t][j], 2) +
             "</title></path>\n";
  return out + "</g>\n";
}

// first: in its line.
std::string draw_token_map(const TokenMap& map, const TokenMapBand& band, double x, double y, double cell, bool first,
                           bool titled) {
  const std::vector<std::string>& tokens = band.tokens;
  const double side = static_cast<double>(tokens.size()) * cell;
  const std::string font = "font-size=\"" + fixed(std::clamp(cell - 1, 9.0, 11.0), 0) + "\"";
  const auto every = static_cast<size_t>(band.small ? std::ceil(small_label / cell) : 1);
  std::string out = text(x, y - 6, "fill=\"#1f2933\"", map.caption,
                         static_cast<size_t>(std::max(side, min_pitch - gap_of_maps) / 6) + 2);
  out += "<g fill=\"" + std::string(ink) + "\" shape-rendering=\"crispEdges\">\n" + draw_cells(map, x, y, cell) +
         "</g>\n" + (titled ? cell_titles(map, tokens, x, y, cell) : "");
  out += frame(x, y, side, side);
  for (size_t t = 0; t < tokens.size(); t += every) {
    const double middle = (static_cast<double>(t) + 0.5) * cell;
    if (first) out += text(x - 6, y + middle + cell * 0.3, "text-anchor=\"end\" " + font, tokens[t]);
    const std::string at = px(x + middle + cell * 0.3) + " " + px(y + side + 6);
    out += text(x + middle + cell * 0.3, y + side + 6,
                "text-anchor=\"end\" " + font + " transform=\"rotate(-90 " + at + ")\"", tokens[t]);
  }
  return out;
}

std::string draw_shades(double x, double y) {
  std::string out = text(x, y + 11, "font-size=\"11\"", "share of attention:");
  x += 112;
  for (const double share : {0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0}) {
    out += "<rect x=\"" + px(x) + "\" y=\"" + px(y) + "\" width=\"14\" height=\"14\" stroke=\"#cbd2d9\" fill=\"" + ink +
           "\" fill-opacity=\"" + fixed(static_cast<double>(shade_of(share)) / shades, 2) + "\"/>\n";
    out += text(x + 18, y + 11, "font-size=\"11\"",
                fixed(share, share < 0.1 && share > 0   ? 2
                             : share == 0.25            ? 2
                             : share == 0 || share == 1 ? 0
                                                        : 1));
    x += 56;
  }
  return out + text(x, y + 11, "font-size=\"11\"", "rows: the token that looks; columns: what it looks at");
}

}  // namespace

TokenBins TokenBins::at_most(int64_t n, double most) {
  TokenBins bins{n};
  while (static_cast<double>(bins.count()) > most && bins.bin < n) bins.bin *= 2;
  return bins;
}

std::string TokenBins::name(int64_t i) const {
  const std::string first = std::to_string(i * bin);
  return size(i) == 1 ? first : first + "-" + std::to_string(i * bin + size(i) - 1);
}

void add_binned(std::vector<double>* to, const TokenBins& bins, const double* P, const TokenBins& of_P, double weight) {
  const int64_t n = of_P.count(), factor = bins.bin / of_P.bin;
  for (int64_t t = 0; t < n; ++t) {
    const double of_row = weight * static_cast<double>(of_P.size(t)) / static_cast<double>(bins.size(t / factor));
    double* row = to->data() + t / factor * bins.count();
    for (int64_t j = 0; j < n; ++j) row[j / factor] += of_row * P[t * n + j];
  }
}

std::string token_label(const std::string& token) {
  std::string label;
  for (const char c : printable(token)) {
    if (c == ' ') label += "\xC2\xB7";  // a middle dot
    else if (c == '\n') label += "\\n";
    else if (c == '\t') label += "\\t";
    else label += c;
  }
  std::string cut;
  size_t count = 0;
  for (size_t at = 0; at < label.size(); ++count) {
    const size_t length = std::max<size_t>(1, first_character(std::string_view(label).substr(at)).length);
    if (count == 11 && at + length < label.size()) return cut + "\xE2\x80\xA6";
    cut += label.substr(at, length), at += length;
  }
  return cut;
}

std::string token_map_svg(const std::string& title, const std::vector<TokenMapBand>& bands) {
  std::string out = text(edge, 34, "font-size=\"18\" font-weight=\"600\" fill=\"#1f2933\"", title, 80);
  double y = 52;
  out += draw_shades(edge, y);
  y += legend_height;
  size_t cells = 0;
  for (const TokenMapBand& band : bands)
    for (const TokenMap& map : band.maps)
      for (const auto& row : map.rows) cells += row.size();
  for (const TokenMapBand& band : bands) {
    const MapLayout layout = layout_of(std::max<size_t>(1, band.tokens.size()), band.maps.size(), band.small);
    const double side = static_cast<double>(band.tokens.size()) * layout.cell;
    out += text(edge, y, "font-size=\"13\" font-weight=\"600\"", band.caption, 120);
    y += 34;
    for (size_t i = 0; i < band.maps.size(); ++i) {
      const auto column = static_cast<double>(static_cast<int64_t>(i) % layout.beside);
      out += draw_token_map(band.maps[i], band, edge + row_labels + column * layout.pitch, y, layout.cell, column == 0,
                            cells <= max_titles);
      if (static_cast<int64_t>(i + 1) % layout.beside == 0 || i + 1 == band.maps.size()) y += side + column_labels;
    }
  }
  return document(page, y, title, out);
}

}  // namespace crossply
