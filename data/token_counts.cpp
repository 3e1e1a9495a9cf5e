#include "data/token_counts.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "engine/check.h"
#include "engine/io/printable.h"

namespace crossply {

nlohmann::ordered_json SpecialCounts::json() const {
  return {{"begun_already", begun}, {"ended_already", ended}, {"inside", inside}};
}

void SpecialCounts::read(const nlohmann::ordered_json& object) {
  object.at("begun_already").get_to(begun);
  object.at("ended_already").get_to(ended);
  object.at("inside").get_to(inside);
}

int64_t words_in(std::string_view text) {
  int64_t words = 0;
  bool inside = false;
  for (const char c : text) {
    const bool space = c == ' ' || (c >= '\t' && c <= '\r');
    words += inside && space;
    inside = !space;
  }
  return words + inside;
}

void TokenCounts::add(const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) ++counts_[static_cast<size_t>(id)];
  all_ += std::ssize(ids);
}

std::string TokenCounts::warning(const Tokenizer& tokenizer) const {
  const auto most = std::max_element(counts_.begin(), counts_.end());
  if (most == counts_.end() || 2 * *most <= all_) return "";
  const auto id = static_cast<int32_t>(most - counts_.begin());
  char percent[32];
  std::snprintf(percent, sizeof percent, "%.1f", 100. * static_cast<double>(*most) / static_cast<double>(all_));
  return str("warning: ", percent, " % of the tokens are one and the same, ", id, " (\"",
             excerpt(tokenizer.name_of(id)), "\"); check that the tokenizer fits the text");
}

}  // namespace crossply
