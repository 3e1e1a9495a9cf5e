// The ops with which layers reach other layers. Same rules as in ops.h: each function records one node and returns its
// output, and shapes are checked here.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/tape.h"
#include "kernels/depth/members.h"

namespace crossply {
struct Router;
}

namespace crossply::ops {

// LIMe's router (route.h) over one slab: how every layer reads the keys (or the values) of the layers so far.
// One object per slab, shared by its nodes, because the backward of layer l gathers from all layers above it.
class DepthRouter {
 public:
  DepthRouter(Tape& t, const std::string& name, int64_t layers, Shape slice);
  // Layer `layer` has written `own`, which moves into the slab; returns what the layer's attention uses: for layer 0
  // `own` itself, else the mixture of `sources` by weight (K, (layer+1)*K), or their plain mean if weight is null.
  // IN PLACE: takes own. Layer 0's result stays in the slab, so no op may work in place on it: rotate before routing,
  // or rotate a copy.
  Value* route(const std::string& name, int layer, Value* own, Value* weight, std::vector<int> sources);

 private:
  Tape& tape_;
  Slab slab_;
  std::shared_ptr<std::vector<Router>> routers_;
  std::vector<Node*> nodes_;  // each adds to the gradients of later weights
};

// The residual streams (B, T, C) of all layers so far, as the sources of mixtures (depth_mix.h). Nothing is
// copied: mixtures read the streams where they are, and the backward of a source gathers from all its readers.
class DepthHistory {
 public:
  // by_norm: for attend(), else for mix(). eps: added to the squared norms.
  DepthHistory(Tape& t, bool by_norm, double eps = 0) : tape_(t), by_norm_(by_norm), eps_(eps) {}
  // x becomes the next source. IN PLACE: use the returned value (the same memory) instead of x from now on.
  Value* add(const std::string& name, Value* x);
  // DenseFormer: sum over i of weight[i] * source[sources[i]]; weight (1, S).
  Value* mix(const std::string& name, const std::vector<int>& sources, Value* weight);
  // Vertical attention: the weights are softmax over i of scores[i] - ln |source|, per token; scores (S), or null for
  // all 0.
  Value* attend(const std::string& name, const std::vector<int>& sources, Value* scores);

 private:
  Tape& tape_;
  bool by_norm_;
  double eps_;
  std::vector<Node*> nodes_;  // of the sources
};

// The same with attention over depth (query_mix.h): what mixtures read is what layers have put out, weighted per token
// by a trained query. eps: added to a row's mean square.
class QueryHistory {
 public:
  QueryHistory(Tape& t, double eps) : tape_(t), eps_(eps) {}
  // x becomes the next source. IN PLACE: use the returned value (the same memory) instead of x from now on.
  Value* add(const std::string& name, Value* x);
  // The sources' mixture by the query proj * gain, both of C numbers.
  Value* mix(const std::string& name, const std::vector<int>& sources, Value* proj, Value* gain);

 private:
  Tape& tape_;
  double eps_;
  std::vector<Node*> nodes_;  // of the sources
};

// A short vector times factor (1).
Value* scale(Tape& t, const std::string& name, Value* inp, Value* factor);
// One number for each head: inp (..., K, D) times factor (K), a parameter, a constant (tape.constant) or a value.
Value* head_scale(Tape& t, const std::string& name, Value* inp, Value* factor);
// SATFormer's gates over (B, T, K): relu, sigmoid, softmax, softmax_sigmoid, tanh, identity.
Value* gate(Tape& t, const std::string& name, Value* inp, const std::string& kind);
// factor * sigmoid of a small product with the first channels of inp (B, T, C): weight (K, G) -> (B, T, K).
Value* channel_gate(Tape& t, const std::string& name, Value* inp, Value* weight, double factor);
// Engram's write (engram_gate.h): to each of the streams (B, T, E, C), or one (B, T, C), the token's value as far as
// the stream agrees with its key. kv (B, T, E+1, C): the keys, then the value; gains (E, C). eps: of both norms.
Value* engram_gate(Tape& t, const std::string& name, Value* streams, Value* kv, Value* q_gain, Value* k_gain,
                   double eps);

// Value residuals: own * v + first * v1, both (B, T, K, D), with one scalar for all tokens. IN PLACE: takes v,
// unless own is trained.
using Scalar = Element<Value*>;
Value* value_mix(Tape& t, const std::string& name, Value* v, Value* v1, Scalar own, Scalar first);
// v + alpha * v1 with alpha (B, T, K). IN PLACE: takes v.
Value* gated_mix(Tape& t, const std::string& name, Value* v, Value* v1, Value* alpha);

// Output head j is head `head` of sources[source], each (B, T, K, D) -> (B, T, choice.size(), D).
using Head = HeadChoice;
Value* select_heads(Tape& t, const std::string& name, const std::vector<Value*>& sources,
                    const std::vector<Head>& choice);

// Hyper-connections (kernels/depth/streams/hyper.h): E residual streams (B, T, E, C).
Value* streams_expand(Tape& t, const std::string& name, Value* x, int64_t E);
Value* streams_sum(Tape& t, const std::string& name, Value* streams);
// Null where a connection has no such parameter.
using HyperParameters = HyperWeights<Value*>;
struct HyperRead {
  Value *x, *coef;  // what the sublayer reads (B, T, C); the token's coefficients (B, T, E, E+2)
};
// norm: layernorm_no_affine, layernorm or rmsnorm, of the dynamic branch, with this epsilon.
HyperRead hyper_read(Tape& t, const std::string& name, Value* streams, const HyperParameters& p,
                     const std::string& norm, double eps);
Value* hyper_write(Tape& t, const std::string& name, Value* streams, Value* coef, Value* y);
// The same with the squares (B, T) that an mHC read of these streams wants, and, if it reads on, what the next sublayer
// reads by this one's coefficients (B, T, C), else null.
struct HyperWritten {
  Value *streams, *squares, *x;
};
HyperWritten hyper_write_on(Tape& t, const std::string& name, Value* streams, Value* coef, Value* y, bool reads);
// mHC (kernels/depth/streams/mhc.h): coefficients, null for a merge, and, if it reads, x. squares: the streams', or
// null.
HyperRead mhc_read(Tape& t, const std::string& name, Value* streams, Value* squares, const MhcWeights<Value*>& p,
                   const MhcForm& form, bool reads);

// Gated residual streams (kernels/depth/streams/gated_streams.h): what the sublayer reads (B, T, C), and the logits of
// the factors by which its output is injected (B, T, E), null without p.inject. eps: of the streams' norms.
struct GatedReadOutputs {
  Value *x, *inject;
};
GatedReadOutputs gated_read(Tape& t, const std::string& name, Value* streams, const GatedWeights<Value*>& p,
                            double eps);
Value* gated_inject(Tape& t, const std::string& name, Value* streams, Value* logits, Value* y);

// MUDDFormer's ways over sources: the outputs. eps: of the prepost norm.
std::vector<Value*> multiway_mix(Tape& t, const std::string& name, const MultiwayMix<Value*>& m, double eps);

// LIMe v1: keys and values (B, T, K, D), each head projected from its own mixture of the sources.
std::pair<Value*, Value*> head_mix(Tape& t, const std::string& name, const HeadMix<Value*>& m, int64_t K);

}  // namespace crossply::ops
