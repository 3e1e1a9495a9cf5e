// What hyper_read.cpp and hyper_read_backward.cpp share: the parameters as a token needs them, and the checks.
#pragma once

#include <algorithm>
#include <array>

#include "kernels/depth/streams/hyper.h"
#include "kernels/depth/streams/hyper_token.h"

namespace crossply::hyper {

// What every token needs of the parameters; the coefficients lie as in coef.
template <int E>
struct ReadPlan {
  float constant[E * (E + 2)];  // the static part
  float scale[E * (E + 2)];     // of the tanh
  float offset[E + 2];          // norm_bias . projection
  // The projections (E+2,C) with the norm's gain folded in. For LayerNorm their own means are removed: that changes no
  // product with a normalised stream, and saves the backward the mean of dNh. Null for static connections.
  float* projection = nullptr;
  bool centred;
  float eps = 0;
};

template <int E>
ReadPlan<E> plan_read(const HyperWeights<float*>& w, HyperNorm norm, int64_t C) {
  ReadPlan<E> plan{};
  for (int i = 0; i < E; ++i) {
    std::copy_n(w.static_alpha + i * (E + 1), E + 1, plan.constant + i * (E + 2));
    plan.constant[i * (E + 2) + E + 1] = w.static_beta[i];
  }
  if (w.alpha_proj == nullptr) return plan;
  plan.projection = scratch_f32(static_cast<size_t>((E + 2) * C));
  plan.centred = norm != HyperNorm::rmsnorm;
  for (int i = 0; i < E; ++i)
    for (int j = 0; j < E + 2; ++j) plan.scale[i * (E + 2) + j] = j <= E ? *w.alpha_scale : *w.beta_scale;
  for (int j = 0; j < E + 2; ++j) {
    float* p = plan.projection + j * C;
    float mean = 0;
    for (int64_t c = 0; c < C; ++c) {
      const float weight = hyper_projection(w, c, j, E);
      if (w.norm_bias != nullptr) plan.offset[j] += w.norm_bias[c] * weight;
      p[c] = w.norm_weight != nullptr ? w.norm_weight[c] * weight : weight;
      mean += p[c] / static_cast<float>(C);
    }
    for (int64_t c = 0; c < C && plan.centred; ++c) p[c] -= mean;
  }
  return plan;
}

// Every member has data exactly if it is wanted, or, for gradients, if it may have; and then the right size.
inline void check_weights(const HyperWeights<Tensor>& w, const StreamsSize& z, HyperNorm norm, bool dynamic,
                          bool gradients) {
  const int64_t E = z.E, C = z.C;
  const int64_t affine = dynamic && norm != HyperNorm::layernorm_no_affine ? C : 0;
  const HyperWeights<int64_t> wanted{E * (E + 1),
                                     E,
                                     dynamic ? C * (E + 1) : 0,
                                     dynamic ? C : 0,
                                     dynamic,
                                     dynamic,
                                     affine,
                                     norm == HyperNorm::layernorm ? affine : 0};
  const std::array<const char*, 8> names{"static_alpha", "static_beta", "alpha_proj",  "beta_proj",
                                         "alpha_scale",  "beta_scale",  "norm_weight", "norm_bias"};
  for (size_t i = 0; i < names.size(); ++i) {
    const Tensor t = w.list()[i];
    const int64_t size = wanted.list()[i];
    CHECK_THAT((t.data != nullptr) == (size > 0) || (gradients && t.data == nullptr), names[i],
               size > 0 ? " is missing" : " has data, but no place");
    CHECK_THAT(t.data == nullptr || t.numel() == size, names[i], " ", t.str(), " for ", E, " streams of ", C);
  }
}

inline void check_stats(const Tensor& stats, const Tensor& streams) {
  const int64_t E = streams.dim(2);
  CHECK_SHAPES(stats.data != nullptr && stats.shape == Shape({streams.dim(0), streams.dim(1), E, E + 4}), stats,
               streams);
}

}  // namespace crossply::hyper
