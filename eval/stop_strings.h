// Stop strings: a row ends before the first of them that its text has, wherever the tokens end.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace crossply {

class StopStrings {
 public:
  // None of them empty.
  explicit StopStrings(std::vector<std::string> list) : list_(std::move(list)) {}
  // Continues the text. Returns what of it is certain to stay: what may be the beginning of a stop string is held back.
  std::string add(std::string_view text);
  // Was there one? Then nothing more is taken.
  bool found() const { return found_; }
  // At the end of the text: what was held back.
  std::string finish();

 private:
  std::vector<std::string> list_;
  std::string held_;
  bool found_ = false;
};

}  // namespace crossply
