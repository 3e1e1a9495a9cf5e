// Tables of numbers as colours, in a self-contained SVG file: what stands beside each other has one scale.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossply {

struct HeatMap {
  std::string caption;
  std::vector<std::vector<double>> rows;  // from the top; NaN stays white
  // Of all rows and columns, or none, which are then numbered.
  std::vector<std::string> row_names = {}, column_names = {};
  int64_t first_row = 0, first_column = 0;  // where the numbers begin
};

// A last column, "mean": of each row's numbers that are finite.
void add_mean_column(HeatMap& map);

// counts: logarithmic, from 1, pale, to the largest number, dark. shares: linear, from 0. signs: linear in both
// directions from 0, almost white, with a colour for each sign; where there is no room for numbers, those below 0 have
// a dash, for readers without colours.
enum class HeatScale { counts, shares, signs };

// Maps with one scale of colours, beside each other, in as many lines as they need.
struct HeatMapBand {
  std::string caption;
  std::vector<HeatMap> maps;
  HeatScale scale = HeatScale::counts;
  std::string legend = {};  // beside the colours: what they say, and its unit
  double top = 0;           // where the colours end, if no number is larger: 1 for shares of bands to be compared
  std::string column = {};  // what a column is, where that is not the picture's
};

// One band below the other. row and column: what a row and a column is. The numbers stand in the cells where there is
// room, all with the same decimals; very small and very large ones in the unit that the legend says. Text may be any
// bytes; names that are long lose their middle. Returns the file's contents.
std::string heat_map_svg(const std::string& title, const std::string& row, const std::string& column,
                         const std::vector<HeatMapBand>& bands);

}  // namespace crossply
