#include "kernels/select_heads.h"

#include <limits>

#include "kernels/cpu.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

void select_heads_forward_cpu(float* out, const std::vector<const float*>& sources,
                              const std::vector<HeadChoice>& choice, int64_t N, int64_t K, int64_t D) {
  const int64_t J = static_cast<int64_t>(choice.size());
  parallel_for(N, grain / (J * D), [=, &sources, &choice](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* y = out + n * J * D;
      for (const HeadChoice& c : choice) {
        std::copy_n(sources[static_cast<size_t>(c.source)] + (n * K + c.head) * D, D, y);
        y += D;
      }
    }
  });
}

void add(float* y, const float* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += x[i];
}

void select_heads_backward_cpu(float* dsource, const float* dout, const std::vector<HeadChoice>& choice, int source,
                               int64_t N, int64_t K, int64_t D, bool acc) {
  // Which heads of dout each head of this source gathers: each of its elements is then written while it is in cache.
  std::vector<std::vector<int64_t>> readers(static_cast<size_t>(K));
  const int64_t J = static_cast<int64_t>(choice.size());
  for (int64_t j = 0; j < J; ++j) {
    const HeadChoice& c = choice[static_cast<size_t>(j)];
    if (c.source == source) readers[static_cast<size_t>(c.head)].push_back(j);
  }
  parallel_for(N, grain / (K * D), [=, &readers](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* dx = dsource + n * K * D;
      const float* dy = dout + n * J * D;
      for (const std::vector<int64_t>& js : readers) {
        size_t i = 0;
        if (!acc && js.empty()) std::fill_n(dx, D, 0.f);
        if (!acc && !js.empty()) std::copy_n(dy + js[i++] * D, D, dx);
        for (; i < js.size(); ++i) add(dx, dy + js[i] * D, D);
        dx += D;
      }
    }
  });
}

void check_choice(const char* name, const std::vector<HeadChoice>& choice, int sources, int64_t K) {
  for (const HeadChoice& c : choice)
    CHECK_THAT(c.source >= 0 && c.source < sources && c.head >= 0 && c.head < K, name, ": head ", c.head, " of source ",
               c.source, " for ", sources, " sources of ", K, " heads");
}

// wide (B,T,J,D) is out or its gradient.
void check_shapes(const char* name, const Tensor& wide, const Tensor& source, const std::vector<HeadChoice>& choice) {
  const Shape &w = wide.shape, &s = source.shape;
  CHECK_THAT(w.rank == 4 && s.rank == 4 && w[0] == s[0] && w[1] == s[1] && w[3] == s[3] && w[3] >= 1 && s[2] >= 1 &&
                 !choice.empty() && w[2] == static_cast<int64_t>(choice.size()),
             name, ": ", choice.size(), " choices ", wide.str(), " from ", source.str());
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes and choices, choose the backend.

void select_heads_forward(const Tensor& out, const std::vector<Tensor>& sources, const std::vector<HeadChoice>& choice,
                          Stream stream) {
  CHECK_THAT(!sources.empty(), "select_heads_forward: no sources");
  for (const Tensor& source : sources) {
    check_shapes("select_heads_forward", out, source, choice);
    CHECK_THAT(source.shape == sources[0].shape, "select_heads_forward: sources ", sources[0].str(), " and ",
               source.str());
  }
  const int64_t N = out.dim(0) * out.dim(1), K = sources[0].dim(2), D = out.dim(3);
  check_choice("select_heads_forward", choice, static_cast<int>(sources.size()), K);
  if (stream.backend == Backend::cpu)
    return select_heads_forward_cpu(out.as<float>(), pointers<const float>(sources), choice, N, K, D);
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    select_heads_forward_ref(out.as<T>(), pointers<const T>(sources), choice, N, K, D);
  });
}

void select_heads_backward(const Tensor& dsource, const Tensor& dout, const std::vector<HeadChoice>& choice, int source,
                           bool acc, Stream stream) {
  check_shapes("select_heads_backward", dout, dsource, choice);
  const int64_t N = dout.dim(0) * dout.dim(1), K = dsource.dim(2), D = dout.dim(3);
  check_choice("select_heads_backward", choice, std::numeric_limits<int>::max(), K);
  if (stream.backend == Backend::cpu)
    return select_heads_backward_cpu(dsource.as<float>(), dout.as<float>(), choice, source, N, K, D, acc);
  with_real(dout.dtype, [&](auto real) {
    using T = decltype(real);
    select_heads_backward_ref(dsource.as<T>(), dout.as<T>(), choice, source, N, K, D, acc);
  });
}

}  // namespace crossply
