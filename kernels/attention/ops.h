// Attention as a node: the rules are those of kernels/block/ops.h.
#pragma once

#include <string>

#include "engine/tape.h"

namespace crossply::ops {

struct Attended {
  double divisor = 1;          // the logits are q k / (sqrt(D) divisor)
  int64_t window = 0;          // AttentionMask's
  Value* documents = nullptr;  // likewise, (B, T, 2) i32; null: each row is one. Not on a generation tape
};

// Causal, grouped heads: q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D). On a generation tape the keys and values
// are appended to caches of the tape's length, and the queries see all of them; who attends to the same two values
// shares their caches.
//
// slot_keys, slot_values: more of (B, T, K, D), the same number of each. In one softmax with the sequence, a token
// attends to its own one of each as well (depth_merge.h).
Value* attention(Tape& t, const std::string& name, Value* q, Value* k, Value* v, const Attended& how = {},
                 const std::vector<Value*>& slot_keys = {}, const std::vector<Value*>& slot_values = {});

// What it records: in is q, k, v, then slots' keys and values; without slots the weights are the softmax of scale q k.
// For those who look at a tape.
struct AttentionNode : Node {
  double scale = 0;
  int64_t window = 0;
  std::string setting() const override { return str(scale, " ", window); }
};

}  // namespace crossply::ops
