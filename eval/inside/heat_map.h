// Tables of numbers as colours, in a self-contained SVG file: what stands beside each other has one scale.
#pragma once

#include <string>
#include <vector>

namespace crossply {

struct HeatMap {
  std::string caption;
  std::vector<std::vector<double>> rows;  // from the top; NaN stays white
};

// counts: logarithmic, from 1, pale, to the largest number, dark. shares: linear, from 0. signs: linear in both
// directions from 0, white, with a colour for each sign.
enum class HeatScale { counts, shares, signs };

// Maps beside each other with one scale of colours.
struct HeatMapBand {
  std::string caption;
  std::vector<HeatMap> maps;
  HeatScale scale = HeatScale::counts;
};

// One band below the other. row and column: what a row and a column is, numbered from 0. The numbers stand in the cells
// where there is room. Text may be any bytes. Returns the file's contents.
std::string heat_map_svg(const std::string& title, const std::string& row, const std::string& column,
                         const std::vector<HeatMapBand>& bands);

}  // namespace crossply
