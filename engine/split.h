// Lists as people write them in flags.
#pragma once

#include <string>
#include <vector>

namespace crossply {

// "a,b,,c" is a, b, "" and c; "" is one empty item.
inline std::string join_commas(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ",") + item;
  return text;
}
inline std::vector<std::string> split_commas(const std::string& text) {
  std::vector<std::string> items(1);
  for (const char c : text)
    if (c == ',') items.emplace_back();
    else items.back() += c;
  return items;
}

}  // namespace crossply
