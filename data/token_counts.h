// What encoded text consists of: special tokens, and how often each token stands there, which shows a tokenizer that
// does not fit the text.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/documents.h"
#include "data/tokenizer.h"

namespace crossply {

// Of documents, as state.json and manifest.json keep them.
struct SpecialCounts {
  int64_t begun = 0, ended = 0;  // those that had their begin or end token themselves
  int64_t inside = 0;            // special tokens elsewhere in them
  void add(const Document& document) { begun += document.begun, ended += document.ended, inside += document.special; }
  nlohmann::ordered_json json() const;
  // Throws the library's exception where it is no such object.
  void read(const nlohmann::ordered_json& object);
};

// Words between white space of ASCII, as wc -w counts them.
int64_t words_in(std::string_view text);

class TokenCounts {
 public:
  explicit TokenCounts(int64_t vocab_size) : counts_(static_cast<size_t>(vocab_size)) {}
  // Each id is below vocab_size.
  void add(const std::vector<int32_t>& ids);
  // A line that names the token of more than half of all; "" where there is none. Then the tokens have an entropy of at
  // least 1 bit: whatever has less has such a token.
  std::string warning(const Tokenizer& tokenizer) const;

 private:
  std::vector<int64_t> counts_;
  int64_t all_ = 0;
};

}  // namespace crossply
