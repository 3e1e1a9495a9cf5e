// Heat maps as pictures: that nothing is lost, nothing lies on something else, and nothing leaves the paper.
#include "eval/inside/heat_map.h"

#include <regex>
#include <set>

#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

HeatMap map_of(const std::string& caption, size_t rows, size_t columns,
               const std::function<double(size_t, size_t)>& number) {
  HeatMap map{caption, {}};
  for (size_t r = 0; r < rows; ++r) {
    map.rows.emplace_back();
    for (size_t c = 0; c < columns; ++c) map.rows.back().push_back(number(r, c));
  }
  return map;
}

std::string picture(const HeatMapBand& band) { return heat_map_svg("title", "row", "column", {band}); }

// Every match's groups, as numbers.
std::vector<std::vector<double>> numbers_in(const std::string& svg, const char* pattern) {
  const std::regex regex(pattern);
  std::vector<std::vector<double>> all;
  for (std::sregex_iterator at(svg.begin(), svg.end(), regex), end; at != end; ++at) {
    all.emplace_back();
    for (size_t i = 1; i < at->size(); ++i) all.back().push_back(std::stod((*at)[i]));
  }
  return all;
}

std::pair<double, double> paper(const std::string& svg) {
  const auto size = numbers_in(svg, "viewBox=\"0 0 (\\d+) (\\d+)\"");
  REQUIRE(size.size() == 1);
  return {size[0][0], size[0][1]};
}

// x, y, width, height of every map.
std::vector<std::vector<double>> frames(const std::string& svg) {
  return numbers_in(svg, "x=\"([-0-9.]+)\" y=\"([-0-9.]+)\" width=\"([0-9.]+)\" height=\"([0-9.]+)\" fill=\"none\"");
}

void check_apart(const std::string& svg, size_t maps) {
  const auto [width, height] = paper(svg);
  const auto all = frames(svg);
  REQUIRE(all.size() == maps);
  for (size_t i = 0; i < maps; ++i) {
    CHECK(all[i][0] > 20);
    CHECK(all[i][0] + all[i][2] <= width);
    CHECK(all[i][1] + all[i][3] <= height);
    for (size_t k = 0; k < i; ++k) {
      const bool beside = all[k][0] + all[k][2] < all[i][0] || all[i][0] + all[i][2] < all[k][0];
      const bool below = all[k][1] + all[k][3] + 40 < all[i][1];
      CHECK_MESSAGE((beside || below), i << " lies on " << k);
    }
  }
}

}  // namespace

TEST_CASE("heat map: whatever their sizes and number, maps stand apart on paper of one width") {
  for (const HeatScale scale : {HeatScale::counts, HeatScale::shares, HeatScale::signs})
    for (const size_t rows : {1u, 2u, 8u, 33u, 128u})
      for (const size_t columns : {1u, 3u, 12u, 128u})
        for (const size_t maps : {1u, 2u, 8u, 13u}) {
          CAPTURE(rows);
          CAPTURE(columns);
          CAPTURE(maps);
          if (rows * columns * maps > 40000) continue;
          HeatMapBand band{"band", {}, scale, "unit"};
          for (size_t i = 0; i < maps; ++i)
            band.maps.push_back(map_of(str("map ", i), rows - i % 2 * (rows / 2), columns,
                                       [](size_t r, size_t c) { return 0.1 * static_cast<double>(r + c); }));
          const std::string svg = picture(band);
          check_apart(svg, maps);
          CHECK(paper(svg).first == 920);
        }
}

TEST_CASE("heat map: eight small maps wrap, with rows named again in every line") {
  HeatMapBand band{"band", {}, HeatScale::shares};
  for (int i = 0; i < 8; ++i) band.maps.push_back(map_of(str("layer ", i), 8, 8, [](size_t, size_t) { return 0.5; }));
  const std::string svg = picture(band);
  std::set<double> tops;
  for (const auto& frame : frames(svg)) tops.insert(frame[1]);
  CHECK(tops.size() == 3);
  const std::regex seven(">7</text>");
  CHECK(std::distance(std::sregex_iterator(svg.begin(), svg.end(), seven), {}) == 8 + 3);  // columns, and rows
  CHECK(has(svg, ">0.50<"));                                                               // there is room for numbers
}

TEST_CASE("heat map: rows and columns have names, escaped and cut, or numbers from anywhere") {
  HeatMap map = map_of("map", 2, 3, [](size_t, size_t) { return 1; });
  map.row_names = {"<script>\"&", std::string(200, 'x')},
  map.column_names = {"a", "a much longer name than", "\xFF\x01"};
  const std::string svg = picture({"band", {map}, HeatScale::shares});
  for (const char* part : {">&lt;script&gt;\"&amp;<", ">a</text>", "rotate(-90", ">\xEF\xBF\xBD <"})
    CHECK_MESSAGE(has(svg, part), part);
  check_has_none(svg, {"<script", "xxxxxxxxxxxxxxxx", "much longer name than"});
  check_apart(svg, 1);
  HeatMap numbered = map_of("map", 2, 3, [](size_t, size_t) { return NAN; });
  numbered.first_row = 5, numbered.first_column = 17;
  const std::string numbers = picture({"band", {numbered}, HeatScale::shares});
  check_has(numbers, {">5<", ">6<", ">17<", ">19<"});
  CHECK(!has(numbers, ">7<"));
  // Maps of other rows than the first one's say so themselves.
  const std::string both = picture({"band", {map, numbered}, HeatScale::shares});
  CHECK(has(both, ">6<"));
  CHECK(!has(both, "nan"));
}

TEST_CASE("heat map: numbers are short, and equal in unit and decimals") {
  const auto texts = [](HeatScale scale, const std::vector<double>& row) {
    return picture({"b", {{"m", {row}}}, scale});
  };
  const auto check = [](const std::string& svg, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) CHECK_MESSAGE(has(svg, ">" + part + "<"), part << " is not in " << svg);
  };
  check(texts(HeatScale::shares, {0.5, 0.123, 0}), {"0.50", "0.12", "0.00"});
  check(texts(HeatScale::shares, {0.0123, 0.00091}), {"12.3", "0.9", "\xC3\x97 1e\u22123"});
  check(texts(HeatScale::shares, {12345, 99}), {"12.3", "0.1", "\xC3\x97 1e3"});
  check(texts(HeatScale::shares, {150, 1.6}), {"150", "2"});
  check(texts(HeatScale::signs, {-1.5, 0.25, -0.001}), {"\u22121.50", "0.25", "0.00", "1.50", "blue", "red"});
  check(texts(HeatScale::counts, {1, 12.4, 1234, 56789, 2.5e6}), {"1.0", "12", "1234", "57k", "2.5M"});
  for (const double v : {0.0, 1e-300, 1e300, 5e-324, -7.0})
    for (const HeatScale scale : {HeatScale::counts, HeatScale::shares, HeatScale::signs}) {
      const std::string svg = texts(scale, {v, v, NAN, INFINITY});
      check_has_none(svg, {"nan", "inf", "-0.00", "\u22120.00"});
    }
}

TEST_CASE("heat map: every cell has a title, and a mean can stand beside the heads") {
  HeatMap map = map_of("map", 2, 3, [](size_t r, size_t c) { return static_cast<double>(r) - static_cast<double>(c); });
  map.rows[1][2] = NAN;
  add_mean_column(map);
  CHECK(map.rows[0] == std::vector<double>{0, -1, -2, -1});
  CHECK(map.rows[1][3] == 0.5);
  CHECK(map.column_names == std::vector<std::string>{"0", "1", "2", "mean"});
  const std::string svg = picture({"band", {map}, HeatScale::signs});
  for (const char* title : {"<title>row 0; column 2: \u22122<", "<title>row 1; column mean: 0.5<"})
    CHECK_MESSAGE(has(svg, title), title);
  const std::regex titles("<title>row ");
  CHECK(std::distance(std::sregex_iterator(svg.begin(), svg.end(), titles), {}) == 7);
}

TEST_CASE("heat map: the sign can be seen without colours, and what is no number stays white") {
  const auto triangle = [](size_t r, size_t c) { return c > r ? NAN : r % 2 == 0 ? 0.5 : -0.5; };
  const std::string svg = picture({"band", {map_of("map", 40, 40, triangle)}, HeatScale::signs});
  const std::regex cells("zM|z\"|z'"), dashes("M[0-9. ]+h[0-9.]+(?=M|\")");
  CHECK(std::distance(std::sregex_iterator(svg.begin(), svg.end(), cells), {}) == 40 * 41 / 2);
  CHECK(std::distance(std::sregex_iterator(svg.begin(), svg.end(), dashes), {}) == 20 * 42 / 2);
  CHECK(svg.size() < 160000);  // with a title for each cell
  const std::string shares = picture({"band", {map_of("map", 40, 40, triangle)}, HeatScale::shares});
  CHECK(std::distance(std::sregex_iterator(shares.begin(), shares.end(), dashes), {}) == 0);
}

TEST_CASE("heat map: a long word beside a single row stays below the caption") {
  const HeatMapBand band{"band", {{"one", {{1}}}, {"two", {{1}}}}};
  const std::string svg = heat_map_svg("title", "attention layer", "a rather long column", {band});
  std::smatch place;
  REQUIRE(std::regex_search(svg, place, std::regex("rotate\\(-90 24 ([0-9.]+)\\)")));
  const double frame = 56 + 44;  // where the map begins
  CHECK(std::stod(place[1]) - 6.4 * 15 / 2 >= frame);
  std::vector<double> columns;
  const std::regex of_column("<text x=\"([0-9.]+)\"[^>]*>a rather long column<");
  for (std::sregex_iterator at(svg.begin(), svg.end(), of_column), end; at != end; ++at)
    columns.push_back(std::stod((*at)[1]));
  REQUIRE(columns.size() == 2);
  CHECK(columns[1] - columns[0] > 6.4 * 20);
}

TEST_CASE("heat map: bands of one quantity may end at the same number") {
  HeatMapBand band{"band", {{"map", {{0.2}}}}, HeatScale::shares};
  CHECK(has(picture(band), "fill=\"#08306b\""));
  band.top = 1;
  CHECK(!has(picture(band), "fill=\"#08306b\""));
  CHECK(has(picture(band), ">1.00<"));
  band.maps[0].rows = {{2}};  // nothing lies beyond its end
  CHECK(has(picture(band), ">2.00<"));
}
