// The parts that every picture of ours has, as text of an SVG file.
#pragma once

#include <string>
#include <vector>

namespace crossply::svg {

std::string fixed(double v, int decimals);
// The same for readers: with a true minus sign.
std::string shown(double v, int decimals);
std::string with_true_minus(std::string number);
// A length or a place in pixels.
std::string px(double v);
// Text for the inside of an element. Of more than `most` characters, the middle ones are left out. What XML cannot hold
// becomes a space (ASCII control characters) or U+FFFD; so do the others of engine/io/control_characters.h.
std::string escaped(const std::string& text, size_t most = std::string::npos);
// A <text> element; style: further attributes.
std::string text(double x, double y, const std::string& style, const std::string& words, size_t most = 200);
// A <rect> element; style: its other attributes. A frame is thin and grey, around the inside.
std::string rectangle(double x, double y, double width, double height, const std::string& style);
std::string frame(double x, double y, double width, double height);
// The whole file: elements on white, dark text, for programs that read aloud a title.
std::string document(double width, double height, const std::string& title, const std::string& elements);
// A whole file of ours for dark pages: paper, text, lines and curves in their dark colours.
std::string dark(const std::string& picture);
// The same as rules of a style sheet, for pictures inside of what `selector` names.
std::string dark_rules(const std::string& selector);
// Text in coloured cells, which keep their colours on a dark page, and so does the text.
constexpr const char *on_pale = "#102a43", *on_deep = "#fefefe";
// A whole file with this in front of the names that its elements have for each other, such as of what cuts a line off:
// where several stand on one page, each name may be there once. What is no tag stays.
std::string with_ids(const std::string& picture, const std::string& prefix);
// Whole files of document(), one below the other, as one.
std::string below_each_other(const std::string& title, const std::vector<std::string>& documents);

}  // namespace crossply::svg
