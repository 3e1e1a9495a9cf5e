#include "train/curve.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity(), nan_value = std::numeric_limits<double>::quiet_NaN();

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size())) ++n;
  return n;
}

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

std::string svg_of(const std::vector<Curve>& curves, bool log_x = false, const std::string& title = "title") {
  const std::string path = (std::filesystem::temp_directory_path() / str("crossply-curve-", ::getpid())).string();
  write_curve_svg(path, title, "step", "loss", curves, log_x);
  std::ifstream in(path);
  const std::string svg(std::istreambuf_iterator<char>(in), {});
  std::filesystem::remove(path);
  check_well_formed(svg);
  CHECK(svg.rfind("<svg xmlns=", 0) == 0);
  CHECK(svg.find("fill=\"#ffffff\"") != std::string::npos);
  for (const char* word : {"nan", "inf", "NaN"}) CHECK_MESSAGE(svg.find(word) == std::string::npos, svg);
  return svg;
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
  CHECK(count(svg, "<polyline") == 1);
  CHECK(count(svg, "<circle") == 3);
  // Pixels are written with one decimal.
  CHECK(std::abs((p[1].first - p[0].first) * 4 - (p[2].first - p[0].first)) < 0.5);
  CHECK(std::abs((p[1].second - p[0].second) - 2 * (p[2].second - p[0].second)) < 0.3);
  CHECK(p[1].second < p[0].second);  // upwards
  for (const char* label : {">0<", ">10<", ">40<", ">1.5<", ">3.0<", ">a<", ">step<", ">loss<"}) {
    CHECK_MESSAGE(svg.find(label) != std::string::npos, label);
  }
}

TEST_CASE("curve: many points become at most one per pixel, and a smooth line on top") {
  for (size_t n : {201, 5000, 300000}) {
    for (bool log_x : {false, true}) {
      CAPTURE(n);
      const std::string svg = svg_of({noisy(n)}, log_x);
      REQUIRE(count(svg, "<polyline") == 2);
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
  }
  CHECK(count(svg_of({noisy(200)}), "<polyline") == 1);
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
  CHECK(svg_of({}).find("no data") != std::string::npos);
  CHECK(svg_of({{"empty", {}, {}}}).find("no data") != std::string::npos);
  CHECK(count(svg_of({{"one", {5}, {2}}}), "<circle") == 1);
  CHECK(count(svg_of({{"one", {5}, {2}}}, true), "<circle") == 1);
  for (double v : {0.0, -3.0, 1e-30, 1e30, 1e99, 123456789.0}) {
    CAPTURE(v);
    CHECK(points_of(svg_of({{"constant", {1, 2, 3}, {v, v, v}}}), 0).size() == 3);
    CHECK(points_of(svg_of({{"nearly", {1, 2, 3}, {v, v * (1 + 1e-15), v}}}), 0).size() == 3);
  }
  const Curve holes{"holes", {1, 2, nan_value, 4, 5, inf, 7}, {nan_value, 1, 1, inf, 2, 3, -inf}};
  CHECK(points_of(svg_of({holes}), 0).size() == 2);
  CHECK(svg_of({{"huge", {1, 2}, {1e308, -1e308}}}).find("no data") != std::string::npos);
  CHECK(points_of(svg_of({{"not positive", {-1, 0, 1, 10}, {1, 1, 1, 1}}}, true), 0).size() == 2);
  CHECK(count(svg_of({{"same x", {3, 3, 3}, {1, 2, 3}}}), "<circle") == 1);
}

TEST_CASE("curve: names and titles are text, not markup, and many curves have their own look") {
  const std::string svg = svg_of({{"<b>&\"\x01", {1, 2}, {1, 2}}}, false, "a < b & c");
  CHECK(svg.find("a &lt; b &amp; c") != std::string::npos);
  CHECK(svg.find("&lt;b&gt;&amp;\" <") != std::string::npos);
  std::vector<Curve> many;
  for (int i = 0; i < 12; ++i) many.push_back({str("curve ", i), {0, 1}, {1.0 * i, 2.0}});
  const std::string all = svg_of(many);
  CHECK(count(all, "<polyline") == 12);
  CHECK(count(all, "stroke-dasharray") == 12);  // six lines and their six legends
  for (int i = 0; i < 12; ++i) CHECK(all.find(str(">curve ", i, "<")) != std::string::npos);
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
  REQUIRE(count(svg, "<polyline") == 14);
  CHECK(svg.find(">loss, running mean over a fiftieth of the run<") != std::string::npos);
  std::vector<std::string> looks;
  for (size_t at = svg.find("<polyline"); at != std::string::npos; at = svg.find("<polyline", at + 1))
    looks.push_back(svg.substr(at, svg.find("points", at) - at));
  std::sort(looks.begin(), looks.end());
  CHECK(std::adjacent_find(looks.begin(), looks.end()) == looks.end());
  std::vector<size_t> names(14);  // curve i ends i * 5 % 14 places above the lowest, and so does its name
  for (size_t i = 0; i < 14; ++i) names[13 - i * 5 % 14] = svg.find(str(">curve ", i, "<"));
  CHECK(std::is_sorted(names.begin(), names.end()));
  // The steep start is cut off; what follows fills the height.
  CHECK(count(svg, "clip-path=") == 1);
  const auto points = points_of(svg, 0);
  CHECK(points.size() > 200);
  CHECK(points.front().second < 82);
  CHECK(points[points.size() / 10].second > 82);
}

TEST_CASE("curve: ticks carry readable numbers") {
  const auto check_labels = [](double low, double high, bool log_x, const std::vector<std::string>& labels) {
    const std::string svg = svg_of({{"a", {low, high}, {1, 2}}}, log_x);
    for (const std::string& label : labels) CHECK_MESSAGE(svg.find(">" + label + "<") != std::string::npos, label);
  };
  check_labels(1, 20000, false, {"0", "2k", "10k", "20k"});
  check_labels(0, 2e6, false, {"0", "0.2M", "1.0M", "2.0M"});
  check_labels(0, 0.004, false, {"0", "0.0005", "0.0040"});
  check_labels(-50, 50, false, {"-40", "0", "40"});
  check_labels(0, 1e-7, false, {"0", "4e-08"});
  check_labels(1, 1e6, true, {"1", "100", "10k", "1M"});
  check_labels(1, 60, true, {"1", "20", "50"});
  check_labels(120, 180, true, {"120", "150", "180"});
}
