// Where documents begin in a row of tokens, for attention that stays within one (--documents): behind each end-of-text
// token (what prepare and nanoGPT write) or at it (the shards of llm.c and modded-nanogpt begin documents with it). The
// first token of a row begins one in any case.
#pragma once

#include <cstdint>

namespace crossply {

struct DocumentMark {
  int32_t eot = -1;  // the end-of-text token; -1: a row is one document
  bool before = false;
  bool any() const { return eot >= 0; }
};

// bounds (T, 2): of each of T tokens the position at which its document begins, and that at which the next one does.
void find_bounds(int32_t* bounds, const int32_t* tokens, int64_t T, const DocumentMark& mark);

}  // namespace crossply
