// Pictures of attention over a text that can be read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace crossply {

// Which tokens a row or a column of a map stands for: `bin` of n, a power of two; the last one for what is left.
struct TokenBins {
  int64_t n, bin = 1;
  // The smallest bins that leave at most `most` rows.
  static TokenBins at_most(int64_t n, double most);
  int64_t count() const { return (n + bin - 1) / bin; }
  int64_t size(int64_t i) const { return std::min(bin, n - i * bin); }
  std::string name(int64_t i) const;  // "17", "32-47"
};
// Adds weight * P, shares of attention (rows, rows), to `to`, whose bins are those of P or several of them in one. A
// cell gets the sum over a bin's columns and the mean over its rows, so a row still sums to 1.
void add_binned(std::vector<double>* to, const TokenBins& bins, const double* P, const TokenBins& of_P, double weight);

// Of one head, or the mean of several: row t has the shares of tokens 0 .. t, or of all.
struct TokenMap {
  std::string caption;
  std::vector<std::vector<double>> rows;
};

// Maps of one text, as many beside each other as fit.
struct TokenMapBand {
  std::string caption;
  std::vector<std::string> tokens;  // as token_label gives them
  std::vector<TokenMap> maps;       // of as many rows each as there are tokens
  bool small = false;               // cells too small for all labels: only every few have one
};

// A token for a label: in one line, with visible spaces, safe for a terminal, of at most 12 characters.
std::string token_label(const std::string& token);

// One band below the other, as a self-contained SVG file; shades from 0, white, to 1 in all of them. Rows are the
// tokens that look, columns those that they look at. Text may be any bytes.
std::string token_map_svg(const std::string& title, const std::vector<TokenMapBand>& bands);

}  // namespace crossply
