// Labels of tokens from a file, such as a language model's that was asked about each token.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace crossply {

struct TokenLabels {
  std::string file;                       // "": none
  std::map<int32_t, std::string> labels;  // by token
};

// Reads a CSV file. Its first line names the columns: id, a token of 0 .. vocab - 1, and label, one of
// feature_labels(); other columns are passed over. A value may stand in quotes, with two for one. "": no file. Throws
// Exit::bad_data with file, line and values for the first row that is not so, or that labels a token again.
TokenLabels read_token_labels(const std::string& path, int64_t vocab);

}  // namespace crossply
