// An architecture has one colour and one dash in all figures.
#include "cli/look.h"

#include <doctest/doctest.h>

#include <set>

#include "cli/curve.h"
#include "cli/svg.h"
#include "models/registry.h"

using namespace crossply;

namespace {

std::vector<size_t> count(const std::string& text, const std::vector<std::string>& parts) {
  std::vector<size_t> counts;
  for (const std::string& part : parts) {
    counts.push_back(0);
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++counts.back();
  }
  return counts;
}

}  // namespace

TEST_CASE("looks: every architecture has one of its own") {
  std::set<int> looks_taken;
  for (const Architecture& architecture : architectures()) {
    if (architecture.draft) continue;
    const int look = look_of_architecture(architecture.name);
    CHECK_MESSAGE(look >= 0, architecture.name, " has no look: add it to the end of the table in cli/look.cpp");
    CHECK(looks_taken.insert(look).second);
  }
  CHECK(look_of_architecture("none") == -1);
}

TEST_CASE("looks: 28 differ in colour or dash") {
  std::set<std::string> all;
  for (size_t look = 0; look < number_of_looks; ++look)
    all.insert(std::string(colour_of_look(look)) + "/" + dash_of_look(look));
  CHECK(all.size() == number_of_looks);
}

TEST_CASE("looks: of a figure, by name, whatever the order and the others") {
  const int llama = look_of_architecture("llama"), lime = look_of_architecture("lime");
  CHECK(looks_of({"lime", "llama"}) == std::vector<int>{lime, llama});
  CHECK(looks_of({"gpt2", "lime lr 0.001"})[1] == lime);
  // A variant has the colour of its architecture and another dash, also where it comes first.
  const std::vector<int> variants = looks_of({"lime:window=2", "lime", "lime:window=4"});
  CHECK(variants[1] == lime);
  for (const size_t i : {size_t{0}, size_t{2}}) {
    CHECK(variants[i] != lime);
    CHECK(colour_of_look(static_cast<size_t>(variants[i])) == colour_of_look(static_cast<size_t>(lime)));
  }
  CHECK(variants[0] != variants[2]);
  // Others take what nobody has.
  CHECK(looks_of({"random", "llama"}) == std::vector<int>{1, llama});
  CHECK(looks_of({"a", "b", "c"}) == std::vector<int>{0, 1, 2});
  std::vector<std::string> many(40, "lime");
  const std::vector<int> all = looks_of(many);
  CHECK(std::set<int>(all.begin(), all.begin() + 28).size() == 28);
  for (const int look : all) CHECK((look >= 0 && look < static_cast<int>(number_of_looks)));
}

TEST_CASE("looks: two figures draw an architecture alike") {
  const Curve llama{"llama", {0, 1}, {1, 2}}, lime{"lime", {0, 1}, {2, 1}};
  const std::string colour = colour_of_look(static_cast<size_t>(look_of_architecture("lime")));
  for (const std::vector<Curve>& curves : {std::vector<Curve>{llama, lime}, {lime}, {lime, llama}})
    CHECK(count(curve_svg("t", "x", {{"y", "", curves}}), {"stroke=\"" + colour + "\" stroke-width=\"2\""})[0] == 1);
}

TEST_CASE("figures: numbers have true minus signs, and the y axis has its title") {
  const std::string picture = curve_svg("t", "x", {{"change, of all", "", {{"a", {0, 1, 2}, {-2, 0, 2}}}}});
  CHECK(picture.find(">\u22122") != std::string::npos);
  CHECK(picture.find(">-2") == std::string::npos);
  CHECK(count(picture, {"rotate(-90", ">change<", ">change, of all<"}) == std::vector<size_t>{1, 1, 1});
}

TEST_CASE("figures: the title of the y axis leaves room for long labels") {
  const auto picture = [](double y) { return curve_svg("t", "x", {{"change", "", {{"a", {0, 1, 2}, {-y, 0, y}}}}}); };
  CHECK(picture(2).find("rotate(-90 24.0 ") != std::string::npos);
  CHECK(picture(0.0005).find("rotate(-90 12.0 ") != std::string::npos);
}

TEST_CASE("figures: the dark variant has the same marks in other colours") {
  const std::string picture = curve_svg("t", "x", {{"y", "", {{"llama", {0, 1}, {1, 2}}}}}), dark = svg::dark(picture);
  CHECK(count(picture, {"<polyline", "<text"}) == count(dark, {"<polyline", "<text"}));
  for (const char* colour : {"#ffffff", "#1f2933", "#0072B2"}) {
    CHECK(picture.find(colour) != std::string::npos);
    CHECK(dark.find(colour) == std::string::npos);
    CHECK(svg::dark_rules("svg").find(colour) != std::string::npos);
  }
  CHECK(svg::dark(dark) == dark);
}
