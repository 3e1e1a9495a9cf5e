// A figure as a file of the kind that its name says: .svg, or .png and .pdf by a program that draws SVG.
#pragma once

#include <string>

namespace crossply {

// PNG and PDF: by rsvg-convert, or else by Python with cairosvg (the variable PYTHON names another Python). Throws
// Exit::no_input where neither is there, with what to install.
void write_picture(const std::string& path, const std::string& svg);

// Whether a file begins as such a picture does, so that a new one may replace it.
bool begins_as_picture(const std::string& path);

}  // namespace crossply
