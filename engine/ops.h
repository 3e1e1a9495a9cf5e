// The vocabulary models are written in. Each function records one node and returns its output. Names are those of the
// dump: "L3.attn.q". Shapes are checked here, when the model is built.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/tape.h"

namespace crossply::ops {

// weight (V, C), tokens (B, T) i32 -> (B, T, C)
Value* embedding(Tape& t, const std::string& name, Value* tokens, Value* weight);
// inp (..., in), weight (out, in) -> `shape`, whose size is rows * out
Value* linear(Tape& t, const std::string& name, Value* inp, Value* weight, Shape shape);
// Over the last weight->shape[0] elements: the model width, or the head width for q/k norms.
Value* rmsnorm(Tape& t, const std::string& name, Value* inp, Value* weight, double eps);
// Rotates (B, T, H, D) in place; the table is rope_positions'.
Value* rope(Tape& t, const std::string& name, Value* inp, Value* table);
// cos and sin for positions 0 .. count-1 at head width D: (count, D), a constant of the tape
Value* rope_positions(Tape& t, int64_t count, int64_t D, double theta);
// Causal, grouped heads: q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D). On a generation tape the keys and values
// are appended to caches of the tape's length, and the queries see all of them.
Value* attention(Tape& t, const std::string& name, Value* q, Value* k, Value* v);
Value* swiglu(Tape& t, const std::string& name, Value* gate, Value* up);
Value* add(Tape& t, const std::string& name, Value* a, Value* b);
// The head and the loss in one node: inp (B, T, C), weight (V, C), targets (B, T) i32 -> losses (B, T), 0 where the
// target is -1. A training forward also writes the gradients of grad_scale * sum(losses).
Value* cross_entropy(Tape& t, const std::string& name, Value* inp, Value* weight, Value* targets);

// LIMe's router (kernels/route.h) over one slab: how every layer reads the keys (or the values) of the layers so far.
// One object per slab, shared by its nodes, because the backward of layer l gathers from all layers above it.
class DepthRouter {
 public:
  DepthRouter(Tape& t, const std::string& name, int64_t layers, Shape slice);
  // Layer `layer` has written `own`, which moves into the slab; returns what the layer's attention uses: for layer 0
  // `own` itself, else the mixture of `sources` by weight (K, (layer+1)*K), or their plain mean if weight is null.
  Value* route(const std::string& name, int layer, Value* own, Value* weight, std::vector<int> sources);

  struct Reader {
    Value* weight;
    std::vector<int> sources;
  };

 private:
  Tape& tape_;
  Slab slab_;
  std::shared_ptr<std::vector<Reader>> readers_;
};

}  // namespace crossply::ops
