// Pictures of attention over a text that can be read.
#pragma once

#include <string>
#include <vector>

namespace crossply {

// Of one head, or the mean of several: row t has the shares of tokens 0 .. t.
struct TokenMap {
  std::string caption;
  std::vector<std::vector<double>> rows;
};

// Maps of one text, as many beside each other as fit.
struct TokenMapBand {
  std::string caption;
  std::vector<std::string> tokens;  // as token_label gives them
  std::vector<TokenMap> maps;       // of as many rows each as there are tokens
};

// A token for a label: in one line, with visible spaces, safe for a terminal, of at most 12 characters.
std::string token_label(const std::string& token);

// One band below the other, as a self-contained SVG file; shades from 0, white, to 1 in all of them. Rows are the
// tokens that look, columns those that they look at. Text may be any bytes.
std::string token_map_svg(const std::string& title, const std::vector<TokenMapBand>& bands);

}  // namespace crossply
