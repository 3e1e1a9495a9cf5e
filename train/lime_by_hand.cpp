// lime_by_hand: LIMe trained without the tape, as one file to read. Every pointer says its shape, forward and backward
// go through the same numbered steps, and every call is a plain loop in a header of kernels/. It compiles alone, from
// the root:
//
//   g++ -std=c++20 -O3 -march=native -ffast-math -fno-finite-math-only -I. train/lime_by_hand.cpp -o lime_by_hand
//
// In about a minute on one core it learns to simplify (7+5)/4=1/4=3, modulo 11. With --llama the layers are not routed,
// which leaves a LLaMA. tests/train/test_lime_by_hand.cpp holds loss, gradients and updates against those of the tape.
//
//   x_0     = embed[token]                                              layers l = 0 .. L-1; weights are (out, in)
//   q, k, v = Wq h, Wk h, Wv h       with h = rmsnorm(x_l)              q and k are then rotated by position (RoPE)
//   k~[h]   = sum_{s <= l} sum_{h'} W_l[h, s K + h'] k_s[h']            LIMe: heads of all layers so far; v~ alike
//   mid     = x_l + Wo attention(q, k~, v~)
//   x_{l+1} = mid + Wdown (silu(Wgate h) * Wup h)                       with h = rmsnorm(mid)
//   loss    = mean over scored tokens of cross_entropy(embed rmsnorm(x_L), next token)
//
// Letters: B batch, T time, N = B T, C width, V vocabulary, L layers, H query heads, K key/value heads, D head width,
// F feed-forward width. dX is the gradient of the loss by X.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "engine/rng.h"
#include "kernels/attention/attention.h"
#include "kernels/block/add.h"
#include "kernels/block/cross_entropy.h"
#include "kernels/block/embedding.h"
#include "kernels/block/matmul.h"
#include "kernels/block/rmsnorm.h"
#include "kernels/block/rope.h"
#include "kernels/block/swiglu.h"
#include "kernels/depth/route.h"
#include "kernels/optim/adamw.h"

namespace crossply::by_hand {

#ifdef LIME_BY_HAND_TEST  // the test includes this file
using real = double;
#else
using real = float;
#endif

constexpr double norm_eps = 1e-6, rope_theta = 10000;
constexpr double beta1 = 0.9, beta2 = 0.95, adam_eps = 1e-8, weight_decay = 0.01, clip = 1;

constexpr int operators = 2;  // of an expression

struct Config {
  int64_t B = 16, T = 2 * operators * (operators + 1) + 1;  // a solution has T + 1 tokens
  int64_t C = 32, V = 21, L = 4, H = 4, K = 4, D = 8, F = 128;
  bool routing = true;  // false: LLaMA
};

// -----------------------------------------------------------------------------------------------------------------
// Memory: one allocation each for parameters, gradients, both moments, and activations. A function that lays one out
// runs twice: without memory to count, with it to point.

struct Cursor {
  real* memory;  // or null
  int64_t used = 0;
  // The next pointers, each to `count` numbers.
  void take(int64_t count, std::initializer_list<real**> pointers) {
    for (real** pointer : pointers) {
      *pointer = memory == nullptr ? nullptr : memory + used;
      used += count;
    }
  }
};

struct LayerWeights {
  real* norm1;                // (C)
  real *wq, *wk, *wv;         // (H D, C), (K D, C), (K D, C)
  real* wo;                   // (C, H D)
  real* router;               // (K, (l+1) K), column s K + h' for head h' of layer s; layer 0, and a LLaMA, have none
  real* norm2;                // (C)
  real *wgate, *wup, *wdown;  // (F, C), (F, C), (C, F)
};
struct Weights {
  real* embed;  // (V, C), which is the output head, too
  std::vector<LayerWeights> layers;
  real* norm;  // (C)
};

enum class Kind { embed, gain, matrix, kv_matrix, router };  // decides how a parameter starts, its rate and its decay
struct Row {
  std::string name;  // Hugging Face's
  Kind kind;
  int64_t begin, count;  // where it lies
};

std::vector<Row> lay_out(Weights& w, const Config& c, real* memory) {
  std::vector<Row> table;
  Cursor cursor{memory};
  auto take = [&](real*& pointer, const std::string& name, Kind kind, int64_t count) {
    table.push_back({name + ".weight", kind, cursor.used, count});
    cursor.take(count, {&pointer});
  };
  take(w.embed, "model.embed_tokens", Kind::embed, c.V * c.C);
  w.layers.assign(static_cast<size_t>(c.L), {});
  for (int64_t l = 0; l < c.L; ++l) {
    LayerWeights& layer = w.layers[l];
    const std::string at = "model.layers." + std::to_string(l) + ".";
    take(layer.norm1, at + "input_layernorm", Kind::gain, c.C);
    take(layer.wq, at + "self_attn.q_proj", Kind::matrix, c.H * c.D * c.C);
    take(layer.wk, at + "self_attn.k_proj", Kind::kv_matrix, c.K * c.D * c.C);
    take(layer.wv, at + "self_attn.v_proj", Kind::kv_matrix, c.K * c.D * c.C);
    take(layer.wo, at + "self_attn.o_proj", Kind::matrix, c.C * c.H * c.D);
    if (c.routing && l > 0) take(layer.router, at + "self_attn.lime_router", Kind::router, c.K * (l + 1) * c.K);
    take(layer.norm2, at + "post_attention_layernorm", Kind::gain, c.C);
    take(layer.wgate, at + "mlp.gate_proj", Kind::matrix, c.F * c.C);
    take(layer.wup, at + "mlp.up_proj", Kind::matrix, c.F * c.C);
    take(layer.wdown, at + "mlp.down_proj", Kind::matrix, c.C * c.F);
  }
  take(w.norm, "model.norm", Kind::gain, c.C);
  return table;
}

// What the backward needs of the forward. The keys of all layers are one slab (L, B, T, K, D), and so are the values:
//
//   forward of layer 2     keys  [  k_0  |  k_1  |  k_2  |   .   ]
//                                 \_____________________/
//                                  writes k_2, then reads the prefix, without a copy: k~_2 = W_2 (k_0, k_1, k_2)
//
//   backward of layer 2    keys  [  k_0  |  k_1  | dk~_2 | dk~_3 ]
//                                                 \_____________/
//                                  k_2 is read for the last time and makes room for dk~_2; then the suffix is read,
//                                  dk_2 = what every reader of k_2 passes back (kernels/depth/route.md)
struct LayerActivations {
  real *norm1, *rstd1;       // (B, T, C), (B, T)
  real* q;                   // (B, T, H, D), rotated
  real *own_k, *own_v;       // (B, T, K, D), this layer's blocks of the slabs; keys rotated
  real *k, *v;               // (B, T, K, D), what its attention reads: a mixture, or where there is no router its own
  real *heads, *lse;         // (B, T, H, D), (B, H, T): the output of attention, and its log-sum-exp
  real* mid;                 // (B, T, C), the residual stream between attention and feed-forward
  real *norm2, *rstd2;       // (B, T, C), (B, T)
  real *gate, *up, *hidden;  // (B, T, F)
};
// Gradients of activations. All layers use the same memory in turn.
struct ActivationGradients {
  real *dx, *dnorm;             // (B, T, C)
  real *dq, *dheads, *dk, *dv;  // (B, T, H, D) twice, (B, T, K, D) twice
  real *dgate, *dup, *dhidden;  // (B, T, F)
};
struct Activations {
  real *keys, *values;   // (L, B, T, K, D)
  std::vector<real*> x;  // (B, T, C), the residual stream into layer 0 .. L-1, and x[L] out of the last
  std::vector<LayerActivations> layers;
  real *norm, *rstd, *losses;  // (B, T, C), (B, T), (B, T)
  ActivationGradients d;
};

// Returns how many numbers that is.
int64_t lay_out(Activations& a, const Config& c, real* memory) {
  const int64_t N = c.B * c.T;
  Cursor cursor{memory};
  a.x.assign(static_cast<size_t>(c.L + 1), nullptr);
  a.layers.assign(static_cast<size_t>(c.L), {});
  for (real*& x : a.x) cursor.take(N * c.C, {&x});
  for (LayerActivations& layer : a.layers) cursor.take(N * c.K * c.D, {&layer.own_k});  // side by side: a slab
  for (LayerActivations& layer : a.layers) cursor.take(N * c.K * c.D, {&layer.own_v});
  a.keys = a.layers[0].own_k, a.values = a.layers[0].own_v;
  for (LayerActivations& layer : a.layers) {
    layer.k = layer.own_k, layer.v = layer.own_v;
    if (c.routing && &layer != &a.layers[0]) cursor.take(N * c.K * c.D, {&layer.k, &layer.v});
    cursor.take(N * c.C, {&layer.norm1, &layer.mid, &layer.norm2});
    cursor.take(N * c.H * c.D, {&layer.q, &layer.heads});
    cursor.take(N * c.F, {&layer.gate, &layer.up, &layer.hidden});
    cursor.take(N, {&layer.rstd1, &layer.rstd2});
    cursor.take(N * c.H, {&layer.lse});
  }
  cursor.take(N * c.C, {&a.norm, &a.d.dx, &a.d.dnorm});
  cursor.take(N, {&a.rstd, &a.losses});
  cursor.take(N * c.H * c.D, {&a.d.dq, &a.d.dheads});
  cursor.take(N * c.K * c.D, {&a.d.dk, &a.d.dv});
  cursor.take(N * c.F, {&a.d.dgate, &a.d.dup, &a.d.dhidden});
  return cursor.used;
}

struct Model {
  Config c;
  Weights w, dw;           // pointers into parameters and into gradients
  Activations a;           // pointers into activations
  std::vector<Row> table;  // of parameters; gradients and moments lie alike
  std::vector<real> parameters, gradients, moment1, moment2, activations;
  std::vector<real> rope;       // (T, D), cosines and sines
  std::vector<Router> routers;  // how each layer reads the slabs (kernels/depth/route.h)
  int64_t step = 0;             // updates done

  explicit Model(const Config& config) : c(config), table(lay_out(w, c, nullptr)) {
    const auto total = static_cast<size_t>(table.back().begin + table.back().count);
    for (auto* flat : {&parameters, &gradients, &moment1, &moment2}) flat->assign(total, 0);
    activations.assign(static_cast<size_t>(lay_out(a, c, nullptr)), 0);
    lay_out(w, c, parameters.data());
    lay_out(dw, c, gradients.data());
    lay_out(a, c, activations.data());
    for (int64_t t = 0; t < c.T; ++t)
      for (int64_t j = 0; j < c.D; ++j) {
        const double angle = static_cast<double>(t) * std::pow(rope_theta, -2.0 * (j % (c.D / 2)) / c.D);
        rope.push_back(static_cast<real>(j < c.D / 2 ? std::cos(angle) : std::sin(angle)));
      }
    for (int l = 0; l < c.L; ++l) {
      Router router;  // of layer 0: without a weight, from itself, which is the identity
      for (int s = 0; s <= l; ++s) router.sources.push_back(s);
      const Shape shape{c.K, (l + 1) * c.K};
      if (w.layers[l].router) router.weight = view(w.layers[l].router, shape);
      if (w.layers[l].router) router.dweight = view(dw.layers[l].router, shape);
      routers.push_back(router);
    }
  }
  Model(const Model&) = delete;  // the pointers would stay behind
};

// Matrices start small and normal, gains at 1; LIMe's key and value projections uniform, its routers as
// [ random | identity ], so that every layer first sees its own heads, and something of all others.
void initialise(Model& model, uint64_t seed) {
  const Config& c = model.c;
  for (const Row& row : model.table) {
    const int64_t columns = row.count / c.K;  // of a router
    for (int64_t i = 0; i < row.count; ++i) {
      const uint64_t stream = stream_of(row.name), index = static_cast<uint64_t>(i);
      const double uniform = 2 * random_uniform(seed, stream, index) - 1;
      double start = 0.02 * random_normal(seed, stream, index);
      if (row.kind == Kind::gain) start = 1;
      // Uniform in +-1/sqrt(C): torch's start of a linear layer. In +-sqrt(3/n): the n numbers of variance 1/n.
      if (row.kind == Kind::kv_matrix && c.routing) start = uniform / std::sqrt(c.C);
      if (row.kind == Kind::router) {
        const int64_t own = i % columns - (columns - c.K);  // which of the own heads, if one of them
        start = own < 0 ? uniform * std::sqrt(3.0 / static_cast<double>(columns)) : own == i / columns;
      }
      model.parameters[static_cast<size_t>(row.begin + i)] = static_cast<real>(start);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// A layer. Its backward is its forward from the last line to the first, with the same numbers. It gets in dx the
// gradient of the residual stream that the layer wrote, x_{l+1}, and leaves there that of the one it read, x_l. Where a
// backward ends in true it adds to a gradient, because the forward had another reader, which has set it; where it ends
// in false it sets it. Gradients of weights are always added to.

void layer_forward(Model& model, int64_t l) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  const int64_t N = B * T;
  const LayerWeights& w = model.w.layers[l];
  const Activations& all = model.a;
  const LayerActivations& a = all.layers[l];
  const std::vector<int>& sources = model.routers[l].sources;

  /* 1*/ rmsnorm_forward_ref(a.norm1, a.rstd1, all.x[l], w.norm1, N, C, norm_eps);
  /* 2*/ matmul_forward_ref(a.q, a.norm1, w.wq, N, C, H * D);
  /* 2*/ matmul_forward_ref(a.own_k, a.norm1, w.wk, N, C, K * D);
  /* 2*/ matmul_forward_ref(a.own_v, a.norm1, w.wv, N, C, K * D);
  /* 3*/ rope_forward_ref(a.q, a.q, model.rope.data(), B, T, H, D, 0);
  /* 3*/ rope_forward_ref(a.own_k, a.own_k, model.rope.data(), B, T, K, D, 0);
  if (w.router) {
    /* 4*/ route_forward_ref(a.k, all.keys, w.router, sources, (l + 1) * K, N, K, D);
    /* 4*/ route_forward_ref(a.v, all.values, w.router, sources, (l + 1) * K, N, K, D);
  }
  /* 5*/ attention_forward_ref(a.heads, a.lse, a.q, a.k, a.v, B, T, H, K, D, 1 / std::sqrt(D));
  /* 6*/ matmul_forward_ref(a.mid, a.heads, w.wo, N, H * D, C);
  /* 7*/ add_forward_ref(a.mid, a.mid, all.x[l], N * C);

  /* 8*/ rmsnorm_forward_ref(a.norm2, a.rstd2, a.mid, w.norm2, N, C, norm_eps);
  /* 9*/ matmul_forward_ref(a.gate, a.norm2, w.wgate, N, C, F);
  /* 9*/ matmul_forward_ref(a.up, a.norm2, w.wup, N, C, F);
  /*10*/ swiglu_forward_ref(a.hidden, a.gate, a.up, N * F);
  /*11*/ matmul_forward_ref(all.x[l + 1], a.hidden, w.wdown, N, F, C);
  /*12*/ add_forward_ref(all.x[l + 1], all.x[l + 1], a.mid, N * C);
}

void layer_backward(Model& model, int64_t l) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  const int64_t N = B * T;
  const LayerWeights &w = model.w.layers[l], &dw = model.dw.layers[l];
  const Activations& all = model.a;
  const LayerActivations& a = all.layers[l];
  const auto [dx, dnorm, dq, dheads, dk, dv, dgate, dup, dhidden] = all.d;

  // 12: a sum passes its gradient on to both terms, so dx already is that of mid, but for what 8 adds.
  /*11*/ matmul_backward_weight_ref(dw.wdown, dx, a.hidden, N, F, C);      // dWdown += dx^T hidden
  /*11*/ matmul_backward_input_ref(dhidden, dx, w.wdown, N, F, C, false);  // dhidden = dx Wdown
  /*10*/ swiglu_backward_ref(dgate, dup, dhidden, a.gate, a.up, N * F, false, false);
  /* 9*/ matmul_backward_weight_ref(dw.wgate, dgate, a.norm2, N, C, F);
  /* 9*/ matmul_backward_weight_ref(dw.wup, dup, a.norm2, N, C, F);
  /* 9*/ matmul_backward_input_ref(dnorm, dgate, w.wgate, N, C, F, false);  // dnorm2 = dgate Wgate
  /* 9*/ matmul_backward_input_ref(dnorm, dup, w.wup, N, C, F, true);       //        + dup Wup
  /* 8*/ rmsnorm_backward_ref(dx, dw.norm2, dnorm, a.mid, w.norm2, a.rstd2, N, C, true);

  // 7: likewise, dx already is the gradient of x_l, but for what 1 adds.
  /* 6*/ matmul_backward_weight_ref(dw.wo, dx, a.heads, N, H * D, C);
  /* 6*/ matmul_backward_input_ref(dheads, dx, w.wo, N, H * D, C, false);
  /* 5*/ attention_backward_ref(dq, dk, dv, dheads, a.heads, a.q, a.k, a.v, a.lse, B, T, H, K, D, 1 / std::sqrt(D),
                                false, false, false);
  // 4: so far dk is that of the mixture k~_l. What 3 needs is that of k_l, which this layer and all above have read.
  // Those above have left the gradients of their mixtures in the slab, so one sum over them has everything.
  if (routing) {
    /* 4*/ route_backward_ref(dk, all.keys, dk, model.routers, static_cast<int>(l), N, K, D);
    /* 4*/ route_backward_ref(dv, all.values, dv, model.routers, static_cast<int>(l), N, K, D);
  }
  /* 3*/ rope_backward_ref(dq, dq, model.rope.data(), B, T, H, D, 0, false);
  /* 3*/ rope_backward_ref(dk, dk, model.rope.data(), B, T, K, D, 0, false);
  /* 2*/ matmul_backward_weight_ref(dw.wq, dq, a.norm1, N, C, H * D);
  /* 2*/ matmul_backward_weight_ref(dw.wk, dk, a.norm1, N, C, K * D);
  /* 2*/ matmul_backward_weight_ref(dw.wv, dv, a.norm1, N, C, K * D);
  /* 2*/ matmul_backward_input_ref(dnorm, dq, w.wq, N, C, H * D, false);  // dnorm1 = dq Wq
  /* 2*/ matmul_backward_input_ref(dnorm, dk, w.wk, N, C, K * D, true);   //        + dk Wk
  /* 2*/ matmul_backward_input_ref(dnorm, dv, w.wv, N, C, K * D, true);   //        + dv Wv
  /* 1*/ rmsnorm_backward_ref(dx, dw.norm1, dnorm, all.x[l], w.norm1, a.rstd1, N, C, true);
}

// -----------------------------------------------------------------------------------------------------------------
// The whole model. tokens, targets: (B, T); a target of -1 is not scored.

// Up to the final norm; the logits are norm embed^T.
void forward(Model& model, const int32_t* tokens) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  const Activations& a = model.a;
  embedding_forward_ref(a.x[0], model.w.embed, tokens, B * T, C);
  for (int64_t l = 0; l < L; ++l) layer_forward(model, l);
  rmsnorm_forward_ref(a.norm, a.rstd, a.x[L], model.w.norm, B * T, C, norm_eps);
}

// Returns the mean loss over the scored tokens; its gradients are added to model.gradients.
double forward_backward(Model& model, const int32_t* tokens, const int32_t* targets) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  const Activations& a = model.a;
  const int64_t N = B * T;
  const double scale = 1.0 / static_cast<double>(N - std::count(targets, targets + N, -1));
  forward(model, tokens);
  // The first step back is taken with the loss itself: dnorm = scale (softmax(logits) - onehot(target)) embed.
  cross_entropy_forward_backward_ref(a.losses, a.d.dnorm, model.dw.embed, a.norm, model.w.embed, targets, scale, N, V,
                                     C);
  rmsnorm_backward_ref(a.d.dx, model.dw.norm, a.d.dnorm, a.x[L], model.w.norm, a.rstd, N, C, false);
  for (int64_t l = L - 1; l >= 0; --l) layer_backward(model, l);
  embedding_backward_ref(model.dw.embed, a.d.dx, tokens, N, C);  // beside what the output head has added
  return scale * std::accumulate(a.losses, a.losses + N, 0.0);
}

// One step of AdamW with the gradients, clipped to a global norm of 1, which are then zero again.
void update(Model& model, double lr) {
  double squares = 0;
  for (real g : model.gradients) squares += static_cast<double>(g) * static_cast<double>(g);
  const AdamwConstants constants{beta1, beta2, adam_eps};
  const AdamwNumbers numbers =
      adamw_numbers(constants, ++model.step, lr, std::min(1.0, clip / (std::sqrt(squares) + 1e-6)));
  for (const Row& row : model.table) {
    const bool decays = row.kind == Kind::matrix || row.kind == Kind::kv_matrix;
    const double lr_mul = row.kind == Kind::router ? 10 : 1;  // routers learn ten times as fast
    adamw_row_ref(model.parameters.data(), model.moment1.data(), model.moment2.data(), model.gradients.data(), numbers,
                  AdamwRow{row.begin, row.begin + row.count, lr_mul, decays ? weight_decay : 0}, constants);
  }
  std::fill(model.gradients.begin(), model.gradients.end(), real(0));
}

// -----------------------------------------------------------------------------------------------------------------
// The task: simplify an expression over the integers modulo 11, one operator at a time, as in (7+5)/4=1/4=3; where X is
// ten and the semicolon ends the solution. The prompt goes to the first =, and only what follows it is scored.

const std::string letters = "_?;+-*/()=0123456789X";  // a token is a place in it; the ids are those of data/arith.h
const std::string digits = letters.substr(10);

// Replaces one number x of the state by (a op b) of the same value: op and b are drawn, a is solved for.
std::string expand(const std::string& state, Random& random) {
  constexpr int inverse[11] = {0, 1, 6, 4, 3, 9, 2, 8, 7, 5, 10};  // b inverse[b] = 1, modulo 11
  std::vector<size_t> numbers;                                     // where they stand
  for (size_t i = 0; i < state.size(); ++i)
    if (digits.find(state[i]) != std::string::npos) numbers.push_back(i);
  const size_t at = numbers[random.below(static_cast<int64_t>(numbers.size()))];
  const auto x = static_cast<int>(digits.find(state[at]));
  const char op = "+-*/"[random.below(4)];
  const int least = op == '*' || op == '/';  // nothing divided by 0 is x, and a 0 is 0 whatever a is
  const int b = least + static_cast<int>(random.below(11 - least));
  const int a = op == '+' ? x - b + 11 : op == '-' ? x + b : op == '*' ? x * inverse[b] : x * b;
  std::string text = {digits[a % 11], op, digits[b]};
  if (state.size() > 1) text = "(" + text + ")";
  return state.substr(0, at) + text + state.substr(at + 1);
}

// A solution of T + 1 tokens. One prompt in eight is held out, drawn for tests only, the others for training only.
std::string draw_solution(Random& random, bool held_out) {
  while (true) {
    std::string state(1, digits[random.below(11)]), solution = state + ";";
    for (int i = 0; i < operators; ++i) {
      state = expand(state, random);
      solution = state + "=" + solution;
    }
    if ((stream_of(state) % 8 == 0) == held_out) return solution;
  }
}

// tokens, targets: (B, T), each target the token that follows, or -1 in the prompt.
void draw_batch(const Config& c, Random& random, bool held_out, int32_t* tokens, int32_t* targets) {
  for (int64_t b = 0; b < c.B; ++b) {
    const std::string text = draw_solution(random, held_out);
    for (int64_t t = 0; t < c.T; ++t) {
      tokens[b * c.T + t] = static_cast<int32_t>(letters.find(text[t]));
      targets[b * c.T + t] =
          t < static_cast<int64_t>(text.find('=')) ? -1 : static_cast<int32_t>(letters.find(text[t + 1]));
    }
  }
}

// The fraction of held-out samples whose every scored token is the most likely one: where greedy generation would write
// the whole solution, step for step.
double solved(Model& model, int batches) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  std::vector<int32_t> tokens(static_cast<size_t>(B * T)), targets(tokens.size());
  std::vector<real> logits(static_cast<size_t>(B * T * V));
  Random random(1, stream_of("test"));  // always the same samples
  int64_t right = 0;
  for (int batch = 0; batch < batches; ++batch) {
    draw_batch(model.c, random, true, tokens.data(), targets.data());
    forward(model, tokens.data());
    matmul_forward_ref(logits.data(), model.a.norm, model.w.embed, B * T, C, V);
    for (int64_t b = 0; b < B; ++b) {
      bool all = true;
      for (int64_t n = b * T; n < (b + 1) * T; ++n)
        all &= targets[n] < 0 || std::max_element(&logits[n * V], &logits[n * V] + V) - &logits[n * V] == targets[n];
      right += all;
    }
  }
  return static_cast<double>(right) / static_cast<double>(batches * B);
}

}  // namespace crossply::by_hand

#ifndef LIME_BY_HAND_TEST
int main(int argc, char** argv) {
  using namespace crossply::by_hand;
  const bool llama = argc == 2 && std::string(argv[1]) == "--llama";
  if (argc > 1 && !llama) return std::fprintf(stderr, "usage: lime_by_hand [--llama]\n"), 64;
  constexpr long steps = 3000, warmup = 100, every = 250;
  constexpr double peak_lr = 3e-3;
  Config c;
  c.routing = !llama;
  Model model(c);
  initialise(model, 42);
  std::printf("%s: %zu parameters, %.1f MB of activations\n", llama ? "LLaMA" : "LIMe", model.parameters.size(),
              1e-6 * static_cast<double>(model.activations.size() * sizeof(real)));

  std::vector<int32_t> tokens(static_cast<size_t>(c.B * c.T)), targets(tokens.size());
  crossply::Random random(42, crossply::stream_of("train"));
  const auto start = std::chrono::steady_clock::now();
  double loss = 0;  // mean of the steps since the line before
  for (long step = 1; step <= steps; ++step) {
    draw_batch(c, random, false, tokens.data(), targets.data());
    loss += forward_backward(model, tokens.data(), targets.data()) / every;
    if (!std::isfinite(loss))
      return std::fprintf(stderr, "lime_by_hand: the loss of step %ld is not finite\n", step), 77;
    // The rate rises in a line during the warm-up, then falls in a line to 0.
    update(model, peak_lr * std::min(static_cast<double>(step) / warmup,
                                     static_cast<double>(steps + 1 - step) / (steps + 1 - warmup)));
    if (step % every != 0) continue;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("step %4ld  loss %.4f  held-out samples solved %5.1f %%  %6.0f tokens/s\n", step, loss,
                100 * solved(model, 32), static_cast<double>(step * c.B * c.T) / seconds.count());
    std::fflush(stdout);
    loss = 0;
  }
}
#endif
