#include "cli/svg.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string_view>

#include "engine/check.h"
#include "engine/io/control_characters.h"
#include "engine/io/printable.h"

namespace crossply::svg {

namespace {

struct Shade {
  const char *light, *dark;
};
// Paper, text from strong to weak, lines, the colours of curves, and the ink of maps of tokens.
constexpr Shade shades[] = {{"#ffffff", "#0d1117"}, {"#1f2933", "#e6edf3"}, {"#52606d", "#a9b6c2"},
                            {"#616e7c", "#93a1ae"}, {"#e4e7eb", "#2a323c"}, {"#9aa3ad", "#6b7785"},
                            {"#cbd2d9", "#3d4753"}, {"#0072B2", "#4ba3e3"}, {"#D55E00", "#ff8a3d"},
                            {"#009E73", "#2dc79a"}, {"#CC79A7", "#e6a3cb"}, {"#E69F00", "#f2b632"},
                            {"#56B4E9", "#9bd8ff"}, {"#000000", "#f0f0f0"}, {"#08306c", "#9ecbff"}};

}  // namespace

std::string fixed(double v, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, v);
  return text;
}

std::string with_true_minus(std::string number) {
  for (size_t at = 0; (at = number.find('-', at)) != std::string::npos; ++at) number.replace(at, 1, "\u2212");
  return number;
}

std::string shown(double v, int decimals) { return with_true_minus(fixed(v, decimals)); }

std::string px(double v) { return fixed(v, 1); }

std::string escaped(const std::string& text, size_t most) {
  std::vector<std::string> characters;
  for (size_t at = 0; at < text.size();) {
    const auto [length, code] = first_character(std::string_view(text).substr(at));
    const char c = text[at];
    const bool unsafe = is_control(code) && code > 0x7F;  // C1, and what reorders the text behind it
    if (length == 0 || code == 0xFFFE || code == 0xFFFF || unsafe) characters.push_back("\xEF\xBF\xBD");
    else if (length > 1) characters.push_back(text.substr(at, length));
    else if (c == '&') characters.push_back("&amp;");
    else if (c == '<') characters.push_back("&lt;");
    else if (c == '>') characters.push_back("&gt;");
    else characters.push_back(std::string(1, static_cast<unsigned char>(c) < 0x20 || c == 0x7F ? ' ' : c));
    at += std::max<size_t>(1, length);
  }
  std::string out;
  const size_t left_out = characters.size() > most ? characters.size() - most + 1 : 0, begin = (most - 1) / 2;
  for (size_t i = 0; i < characters.size(); ++i) {
    if (left_out > 0 && i == begin) out += "\xE2\x80\xA6";  // an ellipsis
    if (left_out == 0 || i < begin || i >= begin + left_out) out += characters[i];
  }
  return out;
}

std::string text(double x, double y, const std::string& style, const std::string& words, size_t most) {
  return "<text x=\"" + px(x) + "\" y=\"" + px(y) + "\" " + style + ">" + escaped(words, most) + "</text>\n";
}

std::string rectangle(double x, double y, double width, double height, const std::string& style) {
  return "<rect x=\"" + px(x) + "\" y=\"" + px(y) + "\" width=\"" + px(width) + "\" height=\"" + px(height) + "\" " +
         style + "/>\n";
}

std::string frame(double x, double y, double width, double height) {
  return rectangle(x - 0.5, y - 0.5, width + 1, height + 1, "fill=\"none\" stroke=\"#cbd2d9\"");
}

std::string document(double width, double height, const std::string& title, const std::string& elements) {
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + fixed(width, 0) + " " + fixed(height, 0) +
         "\" role=\"img\" font-size=\"12\" "
         "fill=\"#52606d\" font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\">\n"
         "<title>" +
         escaped(title) +
         "</title>\n"
         "<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#ffffff\"/>\n" +
         elements + "</svg>\n";
}

std::string dark(const std::string& picture) {
  std::string out = picture;
  for (const Shade& shade : shades) {
    const std::string from = "=\"" + std::string(shade.light) + "\"", to = "=\"" + std::string(shade.dark) + "\"";
    for (size_t at = 0; (at = out.find(from, at)) != std::string::npos; at += to.size())
      out.replace(at, from.size(), to);
  }
  return out;
}

std::string dark_rules(const std::string& selector) {
  std::string out;
  for (const Shade& shade : shades)
    for (const std::string what : {"fill", "stroke"})
      out += selector + " [" + what + "=\"" + shade.light + "\"] { " + what + ": " + shade.dark + "; }\n";
  return out;
}

std::string with_ids(const std::string& picture, const std::string& prefix) {
  std::string out;
  for (size_t at = 0; at < picture.size();) {
    const size_t open = std::min(picture.find('<', at), picture.size());
    out.append(picture, at, open - at);
    size_t end = open;
    for (bool quoted = false; end < picture.size() && (quoted || picture[end] != '>'); ++end)
      quoted ^= picture[end] == '"';
    std::string tag = picture.substr(open, end - open);
    for (const std::string name : {" id=\"", "url(#", "href=\"#"})
      for (size_t k = tag.find(name); k != std::string::npos; k = tag.find(name, k + name.size()))
        tag.insert(k + name.size(), prefix);
    out += tag;
    at = end;
  }
  return out;
}

std::string below_each_other(const std::string& title, const std::vector<std::string>& documents) {
  const std::string box = "viewBox=\"0 0 ", start = "<svg ";
  double width = 0, height = 0;
  std::string elements;
  for (size_t i = 0; i < documents.size(); ++i) {
    const std::string one = with_ids(documents[i], str("part", i, "-"));
    double own_width = 0, own_height = 0;
    std::istringstream(one.substr(one.find(box) + box.size())) >> own_width >> own_height;
    const std::string place = str("x=\"0\" y=\"", px(height), "\" width=\"", px(own_width), "\" height=\"");
    elements += start + place + px(own_height) + "\" " + one.substr(start.size());
    width = std::max(width, own_width), height += own_height;
  }
  return document(width, height, title, elements);
}

}  // namespace crossply::svg
