#include "eval/stop_strings.h"

#include <algorithm>
#include <utility>

namespace crossply {

std::string StopStrings::add(std::string_view text) {
  if (found_) return "";
  held_ += text;
  size_t first = std::string::npos, waits = 0;  // where a stop string begins; bytes that may be the beginning of one
  for (const std::string& stop : list_) {
    first = std::min(first, held_.find(stop));
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > waits; --n)
      if (held_.ends_with(std::string_view(stop).substr(0, n))) waits = n;
  }
  found_ = first != std::string::npos;
  std::string shown = held_.substr(0, found_ ? first : held_.size() - waits);
  held_ = found_ ? "" : held_.substr(shown.size());
  return shown;
}

std::string StopStrings::finish() { return std::exchange(held_, ""); }

}  // namespace crossply
