#include "cli/curve.h"

#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity(), nan_value = std::numeric_limits<double>::quiet_NaN();

// Every tag is closed by its own kind, every attribute is quoted, and text holds no stray markup.
void check_well_formed(const std::string& svg) {
  std::vector<std::string> open;
  size_t at = 0;
  while (at < svg.size()) {
    if (svg[at] == '&') {
      const std::string entity = svg.substr(at, svg.find(';', at) - at + 1);
      CHECK_MESSAGE((entity == "&amp;" || entity == "&lt;" || entity == "&gt;"), entity);
    }
    CHECK(svg[at] != '>');
    if (svg[at++] != '<') continue;
    size_t end = at;
    for (bool quoted = false; end < svg.size() && (quoted || svg[end] != '>'); ++end) quoted ^= svg[end] == '"';
    REQUIRE(end < svg.size());
    const std::string tag = svg.substr(at, end - at), name = tag.substr(0, tag.find(' '));
    if (name[0] == '/') {
      REQUIRE(!open.empty());
      CHECK(name.substr(1) == open.back());
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  CHECK(open.empty());
}

std::string svg_of_panels(const std::vector<Panel>& panels, const std::string& title = "title") {
  const TempDir dir;
  write_curve_svg(dir.file("svg"), title, "step", panels);
  const std::string svg = read_text(dir.file("svg"));
  check_well_formed(svg);
  CHECK(svg.rfind("<svg xmlns=", 0) == 0);
  CHECK(has(svg, "fill=\"#ffffff\""));
  check_has_none(svg, {"nan", "inf", "NaN"});
  return svg;
}

std::string svg_of(const std::vector<Curve>& curves, const std::string& title = "title") {
  return svg_of_panels({{"loss", "", curves}}, title);
}

// The points of the k-th line in the file.
std::vector<std::pair<double, double>> points_of(const std::string& svg, size_t k) {
  size_t at = 0;
  for (size_t i = 0; i <= k; ++i) at = svg.find("<polyline", at) + 1;
  REQUIRE(at != 0);
  at = svg.find("points=\"", at) + 8;
  std::istringstream in(svg.substr(at, svg.find('"', at) - at));
  std::vector<std::pair<double, double>> points;
  double x, y;
  char comma;
  while (in >> x >> comma >> y) points.emplace_back(x, y);
  return points;
}

Curve noisy(size_t n) {
  Curve curve{"noisy", {}, random_vector<double>(static_cast<int64_t>(n), 7, 0.3)};
  for (size_t i = 0; i < n; ++i) {
    curve.x.push_back(static_cast<double>(i + 1));
    curve.y[i] += 2 + 3 / std::sqrt(static_cast<double>(i + 1));
  }
  return curve;
}

}  // namespace

TEST_CASE("curve: a few points are drawn where they belong, in proportion") {
  const std::string svg = svg_of({{"a", {0, 10, 40}, {1, 3, 2}}});
  const auto p = points_of(svg, 0);
  REQUIRE(p.size() == 3);
  CHECK(count_of(svg, "<polyline") == 1);
  CHECK(count_of(svg, "<circle") == 3);
  // Pixels are written with one decimal.
  CHECK(std::abs((p[1].first - p[0].first) * 4 - (p[2].first - p[0].first)) < 0.5);
  CHECK(std::abs((p[1].second - p[0].second) - 2 * (p[2].second - p[0].second)) < 0.3);
  CHECK(p[1].second < p[0].second);  // upwards
  for (const char* label : {">0<", ">10<", ">40<", ">1.5<", ">3.0<", ">a<", ">step<", ">loss<"}) {
    CHECK_MESSAGE(has(svg, label), label);
  }
}

TEST_CASE("curve: many points become at most one per pixel, and a smooth line on top") {
  for (size_t n : {201, 5000, 300000}) {
    CAPTURE(n);
    const std::string svg = svg_of({noisy(n)});
    REQUIRE(count_of(svg, "<polyline") == 2);
    const auto raw = points_of(svg, 0), mean = points_of(svg, 1);
    CHECK(mean.size() <= 1000);
    CHECK(raw.size() <= 1000);
    CHECK(mean.size() >= 100);
    CHECK(svg.size() < 50000);
    const auto roughness = [](const std::vector<std::pair<double, double>>& p) {
      double sum = 0;  // of the last half, where the curve itself is flat
      for (size_t i = p.size() / 2; i + 1 < p.size(); ++i) sum += std::abs(p[i + 1].second - p[i].second);
      return sum;
    };
    if (n > 1000) CHECK(roughness(mean) < 0.5 * roughness(raw));
    CHECK(std::is_sorted(mean.begin(), mean.end(), [](auto& a, auto& b) { return a.first < b.first; }));
  }
  CHECK(count_of(svg_of({noisy(200)}), "<polyline") == 1);
}

TEST_CASE("curve: a running mean of a straight line stays on it, but for the cut window at the end") {
  Curve line{"line", {}, {}};
  for (int i = 0; i < 1000; ++i) line.x.push_back(i), line.y.push_back(5.0 - 0.001 * i);
  const std::string svg = svg_of({line});
  const auto raw = points_of(svg, 0), mean = points_of(svg, 1);
  REQUIRE(raw.size() == mean.size());
  for (size_t i = 0; i < raw.size() * 98 / 100; ++i) CHECK(std::abs(raw[i].second - mean[i].second) < 0.11);
}

TEST_CASE("curve: nothing, one point, constants, and what cannot be drawn") {
  CHECK(has(svg_of({}), "no data"));
  CHECK(has(svg_of({{"empty", {}, {}}}), "no data"));
  CHECK(count_of(svg_of({{"one", {5}, {2}}}), "<circle") == 1);
  for (double v : {0.0, -3.0, 1e-30, 1e30, 1e99, 123456789.0}) {
    CAPTURE(v);
    CHECK(points_of(svg_of({{"constant", {1, 2, 3}, {v, v, v}}}), 0).size() == 3);
    CHECK(points_of(svg_of({{"nearly", {1, 2, 3}, {v, v * (1 + 1e-15), v}}}), 0).size() == 3);
  }
  const Curve holes{"holes", {1, 2, nan_value, 4, 5, inf, 7}, {nan_value, 1, 1, inf, 2, 3, -inf}};
  CHECK(points_of(svg_of({holes}), 0).size() == 2);
  CHECK(has(svg_of({{"huge", {1, 2}, {1e308, -1e308}}}), "no data"));
  CHECK(count_of(svg_of({{"same x", {3, 3, 3}, {1, 2, 3}}}), "<circle") == 1);
}

TEST_CASE("curve: names and titles are text, not markup, and many curves have their own look") {
  const std::string svg = svg_of({{"<b>&\"\x01", {1, 2}, {1, 2}}}, "a < b & c");
  check_has(svg, {"a &lt; b &amp; c", "&lt;b&gt;&amp;\" <"});
  std::vector<Curve> many;
  for (int i = 0; i < 12; ++i) many.push_back({str("curve ", i), {0, 1}, {1.0 * i, 2.0}});
  const std::string all = svg_of(many);
  CHECK(count_of(all, "<polyline") == 12);
  CHECK(count_of(all, "stroke-dasharray") == 18);  // nine lines of twelve, and their legends
  for (int i = 0; i < 12; ++i) CHECK(has(all, str(">curve ", i, "<")));
}

TEST_CASE(
    "curve: fourteen noisy curves are fourteen smooth lines of different looks, named in the order of their ends") {
  std::vector<Curve> curves;
  for (int i = 0; i < 14; ++i) {
    curves.push_back(noisy(3000));
    curves.back().name = str("curve ", i);
    for (double& y : curves.back().y) y += 0.05 * (i * 5 % 14);
  }
  const std::string svg = svg_of(curves);
  CHECK(svg.size() < 60000);
  REQUIRE(count_of(svg, "<polyline") == 14);
  CHECK(has(svg, ">loss, running mean over a fiftieth of the run<"));
  std::vector<std::string> looks;
  for (size_t at = svg.find("<polyline"); at != std::string::npos; at = svg.find("<polyline", at + 1))
    looks.push_back(svg.substr(at, svg.find("points", at) - at));
  std::sort(looks.begin(), looks.end());
  CHECK(std::adjacent_find(looks.begin(), looks.end()) == looks.end());
  std::vector<size_t> names(14);  // curve i ends i * 5 % 14 places above the lowest, and so does its name
  for (size_t i = 0; i < 14; ++i) names[13 - i * 5 % 14] = svg.find(str(">curve ", i, "<"));
  CHECK(std::is_sorted(names.begin(), names.end()));
  // The steep start is cut off; what follows fills the height.
  CHECK(count_of(svg, "clip-path=") == 1);
  const auto points = points_of(svg, 0);
  CHECK(points.size() > 200);
  CHECK(points.front().second < 82);
  CHECK(points[points.size() / 10].second > 82);
}

TEST_CASE("curve: ticks carry readable numbers") {
  const auto check_labels = [](const Curve& curve, const std::vector<std::string>& labels) {
    const std::string svg = svg_of({curve});
    for (const std::string& label : labels) CHECK_MESSAGE(has(svg, ">" + label + "<"), label);
  };
  const auto across = [](double low, double high) { return Curve{"a", {low, high}, {1, 2}}; };
  check_labels(across(1, 20000), {"0", "2k", "10k", "20k"});
  check_labels(across(0, 2e6), {"0", "0.2M", "1.0M", "2.0M"});
  check_labels(across(0, 0.004), {"0", "0.0005", "0.0040"});
  check_labels(across(-50, 50), {"\u221240", "0", "40"});
  check_labels(across(0, 1e-7), {"0", "4e\u221208"});
  check_labels(across(0, 4e9), {"0", "2e9"});
  check_labels(across(0, 2e15), {"0", "1e15"});
  check_labels({"logarithmic", {1, 2}, {1e6, 1}}, {"1", "100", "10k", "1M"});
  check_labels({"logarithmic", {1, 2}, {60, 1}}, {"1", "20", "50"});
}

namespace {

// A loss that falls from 3 to about `end`, over `n` steps.
Curve falling(const std::string& name, double end, int n = 3000) {
  Curve curve{name, {}, {}};
  for (int i = 1; i <= n; ++i) {
    curve.x.push_back(i);
    curve.y.push_back(end + (3 - end) * std::exp(-i / 200.0));
  }
  return curve;
}

// The heights of the names, from top to bottom.
std::vector<double> heights_of_names(const std::string& svg) {
  std::vector<double> heights;
  const std::string name = "font-size=\"13\">curve";
  for (size_t at = svg.find(name); at != std::string::npos; at = svg.find(name, at + 1))
    heights.push_back(std::stod(svg.substr(svg.rfind(" y=\"", at) + 4)));
  return heights;
}

}  // namespace

TEST_CASE("curve: what XML forbids, and what is no UTF-8, is replaced") {
  const std::string good = "\xC3\xA4 \xE2\x82\xAC \xF0\x9F\x98\x80 \xEF\xBF\xBD \xEF\xBF\xBC";
  const std::string replacement = "\xEF\xBF\xBD";
  CHECK(has(svg_of({{good, {1, 2}, {1, 2}}}, good), ">" + good + "<"));
  const std::vector<std::string> bad = {"\xEF\xBF\xBF",      // U+FFFF
                                        "\xEF\xBF\xBE",      // U+FFFE
                                        "\xED\xA0\x80",      // a surrogate
                                        "\xC0\x80",          // overlong
                                        "\xE0\x80\x80",      // overlong
                                        "\xF4\x90\x80\x80",  // beyond U+10FFFF
                                        "\xF8\x90\x80\x80",  // begins with no first byte
                                        "\xFF",
                                        "\x80",
                                        "\xE2\x82"};
  for (const std::string& text : bad) {
    const std::string svg = svg_of({{"a" + text + "b", {1, 2}, {1, 2}}}, text);
    CHECK(!has(svg, text + "b"));
    check_has(svg, {">a" + replacement, "<title>" + replacement});
  }
  CHECK(has(svg_of({{std::string("a\0b\x7F", 4), {1, 2}, {1, 2}}}), ">a b <"));
}

TEST_CASE("curve: long names and titles lose their middle, not their room") {
  const std::string name = "curve " + std::string(300, 'x') + " end";
  const std::string svg = svg_of({{name, {1, 2}, {1, 2}}}, name);
  check_has(svg, {">curve xxx", "xxx end<"});
  CHECK(svg.find(std::string(100, 'x')) == svg.find("<title>") + 13);  // whole only there
  CHECK(svg.find(std::string(100, 'x'), svg.find("</title>")) == std::string::npos);
}

TEST_CASE("curve: a decade of values stands on a logarithmic axis, less does not, and shares never do") {
  const std::string decade = svg_of({falling("a", 0.1)});
  CHECK(has(decade, "; logarithmic<"));
  check_has(decade, {">0.1<", ">0.2<", ">0.5<", ">1<", ">2<"});
  const auto points = points_of(svg_of({{"a", {1, 2, 3}, {1, 0.1, 0.01}}}), 0);
  CHECK(std::abs((points[0].second - points[1].second) - (points[1].second - points[2].second)) < 0.2);
  CHECK(!has(svg_of({falling("a", 0.5)}), "logarithmic"));
  CHECK(!has(svg_of({{"a", {1, 2, 3}, {-1, 0.1, 10}}}), "logarithmic"));
  const std::string shares = svg_of_panels({{"answers", "", {{"a", {1, 2, 3}, {0.01, 0.1, 0.9}}}, true}});
  CHECK(!has(shares, "logarithmic"));
  check_has(shares, {">0 %<", ">80 %<"});
  const std::string none = svg_of_panels({{"answers", "", {{"a", {1, 2}, {0, 0}}}, true}});
  CHECK(has(none, ">0 %<"));
  CHECK(!has(none, ">\u2212"));
}

TEST_CASE("curve: a start that takes half of the height is cut off, a gradual one is not") {
  const std::string steep = svg_of({falling("a", 2), falling("b", 2.1)});
  CHECK(count_of(steep, "clip-path=") == 1);
  const auto points = points_of(steep, 0);
  CHECK(points.front().second < 82);
  CHECK(points[points.size() / 10].second > 82);
  Curve gradual{"a", {}, {}};
  for (int i = 1; i <= 3000; ++i) gradual.x.push_back(i), gradual.y.push_back(3 - i / 3000.0);
  CHECK(count_of(svg_of({gradual}), "clip-path=") == 0);
}

TEST_CASE("curve: marks lie on the same axes, hollow, on a thin line, and the caption says what they are") {
  Curve curve{"a", {0, 10}, {1, 3}, {5, 10}, {2, 4}};
  const std::string svg = svg_of_panels({{"training loss", "test loss", {curve}}});
  CHECK(has(svg, ">training loss; marks: test loss<"));
  CHECK(count_of(svg, "<circle r=\"3\" fill=\"#ffffff\"") == 2);
  const auto thin = points_of(svg, 0), line = points_of(svg, 1);
  CHECK(thin[1].first == line[1].first);
  CHECK(std::abs(thin[0].second - (line[0].second + line[1].second) / 2) < 0.11);
  CHECK(thin[1].second < line[1].second);  // the axis has room for it
  curve.marks_x.clear(), curve.marks_y.clear();
  for (int i = 0; i < 5000; ++i) curve.marks_x.push_back(0.002 * i), curve.marks_y.push_back(2);
  CHECK(count_of(svg_of({curve}), "fill=\"#ffffff\" stroke") <= 30);
}

TEST_CASE("curve: a band lies around its curve, translucent and in its colour, and the axis has room for it") {
  Curve curve{"a", {0, 10, 20}, {2, 2, 2}};
  curve.low = {1, 1.5, 2}, curve.high = {3, 2.5, 2};
  const std::string svg = svg_of({{"b", {0, 20}, {2, 2.1}}, curve});
  CHECK(count_of(svg, "<polygon fill=\"#D55E00\" fill-opacity=\"0.18\"") == 1);
  CHECK(svg.find("<polygon") < svg.find("<polyline"));  // below the lines
  const std::string outline = svg.substr(svg.find("points=\"", svg.find("<polygon")));
  CHECK(count_of(outline.substr(0, outline.find('/')), ",") == 6);
  CHECK(count_of(svg, "clip-path=") == 0);
  curve.low[1] = nan_value;  // is left out
  svg_of({curve});
}

TEST_CASE("curve: logarithmic axes that are asked for leave out what is not above 0, and keep a steep start") {
  const TempDir dir;
  const auto picture = [&](const Panel& panel, bool log_x) {
    write_curve_svg(dir.file("svg"), "title", "step", {panel}, log_x);
    const std::string svg = read_text(dir.file("svg"));
    check_well_formed(svg);
    check_has_none(svg, {"nan", "inf"});
    return svg;
  };
  Panel panel{"loss", "", {{"a", {0, 1, 10, 100, 200}, {9, 4, 3, 2, -1}}}};
  panel.log_y = true;
  const std::string svg = picture(panel, true);
  const auto p = points_of(svg, 0);
  REQUIRE(p.size() == 3);
  CHECK(std::abs(p[1].first - (p[0].first + p[2].first) / 2) < 0.11);
  CHECK(std::abs((p[0].second - p[1].second) / (p[1].second - p[2].second) - std::log(4.0 / 3) / std::log(3.0 / 2)) <
        0.01);
  CHECK(has(svg, "; logarithmic<"));
  for (const char* label : {">2.0<", ">3.0<", ">10<", ">100<"})  // half a decade has more than one tick
    CHECK_MESSAGE(has(svg, label), label);
  Panel steep{"loss", "", {falling("a", 2)}};
  CHECK(count_of(picture(steep, false), "clip-path=") == 1);
  CHECK(count_of(picture(steep, true), "clip-path=") == 0);
  for (const Panel& nothing : {Panel{"loss", "", {}}, Panel{"loss", "", {{"a", {0, -1}, {1, 1}}}}})
    CHECK(has(picture(nothing, true), "no data"));
}

TEST_CASE("curve: a running mean of so many points") {
  Panel panel{"loss", "", {{"a", {}, {}}}};
  for (int i = 0; i < 100; ++i) panel.curves[0].x.push_back(i), panel.curves[0].y.push_back(i % 2);
  CHECK(count_of(svg_of_panels({panel}), "<polyline") == 1);
  panel.smooth = 20;
  const std::string svg = svg_of_panels({panel});
  CHECK(has(svg, ">loss, running mean over 20 points<"));
  REQUIRE(count_of(svg, "<polyline") == 2);
  const auto raw = points_of(svg, 0), mean = points_of(svg, 1);
  REQUIRE(mean.size() == 100);
  const double height = std::abs(raw[51].second - raw[50].second);
  for (size_t i = 60; i < 90; ++i)
    CHECK(std::abs(mean[i].second - (raw[50].second + raw[51].second) / 2) < 0.04 * height);
  panel.curves[0] = noisy(1000);
  panel.smooth = 1;
  CHECK(count_of(svg_of_panels({panel}), "<polyline") == 1);
}

TEST_CASE("curve: two panels share the x axis and stand below each other") {
  const Panel above{"loss", "", {{"a", {0, 100}, {3, 1}}}}, below{"answers", "", {{"a", {50, 100}, {0, 0.5}}}, true};
  const std::string svg = svg_of_panels({above, below});
  const auto loss = points_of(svg, 0), answers = points_of(svg, 1);
  CHECK(answers[1].first == loss[1].first);
  CHECK(std::abs(answers[0].first - (loss[0].first + loss[1].first) / 2) < 0.11);
  CHECK(std::min(answers[0].second, answers[1].second) > std::max(loss[0].second, loss[1].second) + 50);
  CHECK(svg.find(">loss<") < svg.find(">answers<"));
}

TEST_CASE("curve: of thirteen curves, one diverging and one short, every one can be seen and read") {
  std::vector<Curve> curves;
  for (int i = 0; i < 13; ++i) {
    curves.push_back(falling(str("curve ", i), 1 + 0.001 * i));  // ends nearly at one height
    for (int k = 300; k <= 3000; k += 300) curves.back().marks_x.push_back(k), curves.back().marks_y.push_back(1.1);
  }
  curves[3] = falling("curve short", 1, 400);
  for (int i = 400; i < 430; ++i) curves[5].y[static_cast<size_t>(i)] = std::exp(i - 400.0);
  curves[5].x.resize(430), curves[5].y.resize(430);
  curves[5].broken_off = true;
  const std::string svg = svg_of(curves);
  const std::vector<double> heights = heights_of_names(svg);
  REQUIRE(heights.size() == 13);
  for (size_t i = 1; i < 13; ++i) CHECK(heights[i] - heights[i - 1] >= 14);
  CHECK(heights.front() > 70);
  CHECK(heights.back() < 440);
  CHECK(count_of(svg, "stroke-dasharray=\"1 4\"") == 2);  // from the ends of those two to their names
  CHECK(count_of(svg, "m-4-4l8 8m0-8l-8 8") == 1);        // the cross
  CHECK(count_of(svg, "clip-path=") == 1);
  // The one that diverges is cut off; the others keep more than half of the height.
  const auto points = points_of(svg, 13);
  CHECK(points.back().second - points.front().second > 170);
  CHECK(svg.size() < 60000);
}

TEST_CASE("curve: whole numbers, such as layers, have no ticks between them") {
  const std::string svg = svg_of({{"a", {0, 1, 2, 3}, {1, 2, 3, 4}}, {"b", {0, 1}, {1, 2}}});
  check_has(svg, {">0<", ">1<", ">2<", ">3<"});
  CHECK(count_of(svg, "text-anchor=\"middle\">") == 4);
  CHECK(count_of(svg_of({{"a", {0, 0.5, 3}, {1, 2, 3}}}), "text-anchor=\"middle\">") == 7);
}

TEST_CASE("curve: a reference is thin and grey without marks, and a panel may be shown whole") {
  Curve bound{"bound", {0, 1, 2}, {9, 9, 9}};
  bound.reference = true;
  const std::string svg = svg_of({{"a", {0, 1, 2}, {1, 2, 3}}, bound});
  CHECK(count_of(svg, "<polyline") == 2);
  CHECK(count_of(svg, "stroke=\"#616e7c\" stroke-width=\"1.5\" stroke-dasharray=\"6 4\"") == 2);  // and in the legend
  CHECK(count_of(svg, "<circle") == 3);
  CHECK(!has(svg, "#D55E00"));
  Panel rising{"gates", "", {{"a", {0, 1, 2}, {1, 2, 8}}}};
  CHECK(count_of(svg_of_panels({rising}), "clip-path=") == 1);
  rising.whole = true;
  CHECK(count_of(svg_of_panels({rising}), "clip-path=") == 0);
}

TEST_CASE("curve: of one layer there is one tick, and what is 0 is not below it") {
  const std::string svg = svg_of({{"a", {0}, {0}}, {"b", {0}, {0}}});
  CHECK(count_of(svg, "text-anchor=\"middle\">") == 1);
  check_has_none(svg, {">\u22121<", ">\u22121.0<", ">\u22120.5<"});
}

TEST_CASE("curve: a look of its own stays, whoever stands beside the curve") {
  Curve second{"second", {0, 1, 2}, {1, 2, 3}};
  second.look = 1;
  const std::string alone = svg_of({second});
  CHECK(count_of(alone, "#D55E00") == count_of(svg_of({{"first", {0, 1, 2}, {3, 2, 1}}, second}), "#D55E00"));
  CHECK(count_of(alone, "#0072B2") == 0);
}

TEST_CASE("curve: what falls by many decades has means above 0, on a logarithmic axis that ends") {
  Panel panel{"caption", "", {{"a", {}, {}}}};
  for (int i = 0; i < 1000; ++i) panel.curves[0].x.push_back(i), panel.curves[0].y.push_back(i < 20 ? 190 : 1e-16);
  panel.log_y = true;
  const std::string svg = svg_of_panels({panel});
  CHECK(svg.size() < 100'000);
}

TEST_CASE("curve: a logarithmic axis of nothing, of 0 and of next to nothing ends") {
  for (const std::vector<double>& y : {std::vector<double>{}, {0, 0}, {1e-300, 1e-300}, {0, 1e-120}, {-1, 0}, {0, 5}}) {
    Panel panel{"caption", "", {{"a", {}, y}}};
    for (size_t i = 0; i < y.size(); ++i) panel.curves[0].x.push_back(static_cast<double>(i));
    for (const bool marks : {false, true}) {
      if (marks) panel.curves[0].marks_x = panel.curves[0].x, panel.curves[0].marks_y = y;
      panel.log_y = true;
      CHECK(svg_of_panels({panel}).size() < 20'000);
    }
  }
}
