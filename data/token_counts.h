// How often each token stands in encoded text: what shows a tokenizer that does not fit it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace crossply {

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
