// Ops with many inputs: a struct of them, templated on the type that stands for each. A model fills it with Value*, the
// tape makes it Tensor (or Grad, for gradients), and the loops see pointers. Those of streams/ are here, too, because
// ops.h, which models see, records all of them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace crossply {

// The number values[index].
template <class Vector>
struct Element {
  Vector values{};
  int64_t index = 0;
};

// One of the K heads of one of several sources (select_heads.h).
struct HeadChoice {
  int source;
  int64_t head;
};

// LIMe v1 (head_mix.h): S sources of type A, the rest of type P.
template <class A, class P = A>
struct HeadMix {
  std::vector<A> sources{};  // (B,T,C)
  P weight{};                // (K,S), or (B,T,K,S)
  P gain{};                  // (C)
  P wk{}, wv{};              // (K*D,C)
};

// MUDDFormer's W ways over S sources (multiway_mix.h): activations of type A, parameters of type P. Plain: gains and
// post are empty, and there is no skip.
template <class A, class P = A>
struct MultiwayMix {
  std::vector<A> sources{};        // S of (B,T,C)
  std::vector<P> gains{}, post{};  // S of (C), W of (C)
  A weight{};                      // (B,T,W*S)
  P base{};                        // (W,S)
  A skip{};                        // (B,T,C)
};

// to = from, member by member: activation(from's) and parameter(from's). Keeps the memory that to's lists have.
template <class To, class From, class A, class P>
void map_members(To& to, const From& from, A&& activation, P&& parameter) {
  const auto map_list = [](auto& out, const auto& in, auto& f) {
    out.clear();
    for (const auto& member : in) out.push_back(f(member));
  };
  map_list(to.sources, from.sources, activation);
  map_list(to.gains, from.gains, parameter);
  map_list(to.post, from.post, parameter);
  to.weight = activation(from.weight), to.base = parameter(from.base), to.skip = activation(from.skip);
}

// The parameters around one sublayer of hyper-connections (hyper/hyper.h), or their gradients. Static connections have
// only the first two.
template <class P>
struct HyperWeights {
  P static_alpha{};  // (E,E+1)
  P static_beta{};   // (E)
  P alpha_proj{};    // (C,E+1)
  P beta_proj{};     // (C)
  P alpha_scale{};   // (1)
  P beta_scale{};    // (1)
  P norm_weight{};   // (C), for HyperNorm::layernorm and rmsnorm
  P norm_bias{};     // (C), for HyperNorm::layernorm

  std::array<P, 8> list() const {
    return {static_alpha, static_beta, alpha_proj, beta_proj, alpha_scale, beta_scale, norm_weight, norm_bias};
  }
};

// f of every member.
template <class P, class F>
auto mapped(const HyperWeights<P>& w, F&& f) {
  return HyperWeights<decltype(f(w.static_alpha))>{f(w.static_alpha), f(w.static_beta), f(w.alpha_proj),
                                                   f(w.beta_proj),    f(w.alpha_scale), f(w.beta_scale),
                                                   f(w.norm_weight),  f(w.norm_bias)};
}

// Manifold-constrained hyper-connections (hyper/mhc.h): what a read takes and leaves, activations of type A (streams,
// out) and statistics; its parameters, or their gradients; and what kind of mixing it is.
template <class A, class P = A>
struct MhcRead {
  A streams{};                  // (B,T,E,C)
  P squares{};                  // (B,T), or none
  A out{};                      // (B,T,C), or none
  P coef{}, pre{}, z{}, rho{};  // (B,T,E,E+2) or none, (B,T,E), (B,T,M), (B,T)
};
template <class P>
struct MhcWeights {
  P fn{};     // (M,E*C)
  P base{};   // (M)
  P scale{};  // one for each group of rows
};
template <class P, class F>
auto mapped(const MhcWeights<P>& w, F&& f) {
  return MhcWeights<decltype(f(w.fn))>{f(w.fn), f(w.base), f(w.scale)};
}
enum class Mixing { merge, identity, permutations, sinkhorn };

// The network around one sublayer of gated residual streams (hyper/gated_streams.h), R its hidden width.
template <class P>
struct GatedWeights {
  P norm{};    // (E*C)
  P down{};    // (R,E*C)
  P up{};      // (E*C,R)
  P inject{};  // (E,E*C), or none: nothing is written behind the last read
};

constexpr int64_t max_permuted_streams = 4;
constexpr int64_t max_sinkhorn_iterations = 64;

constexpr int64_t permutations_of(int64_t E) { return E < 2 ? 1 : E * permutations_of(E - 1); }
// Rows of fn, M, and their groups.
constexpr int64_t mhc_rows(Mixing mixing, int64_t E) {
  return mixing == Mixing::merge          ? E
         : mixing == Mixing::identity     ? 2 * E
         : mixing == Mixing::permutations ? 2 * E + permutations_of(E)
                                          : E * (E + 2);
}
constexpr int64_t mhc_groups(Mixing mixing) { return mixing == Mixing::merge ? 1 : mixing == Mixing::identity ? 2 : 3; }

struct MhcForm {
  Mixing mixing;
  int64_t iterations;    // of Sinkhorn
  double eps, norm_eps;  // added to what must not be 0; to the mean square
};

}  // namespace crossply
