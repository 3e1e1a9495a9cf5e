#include "kernels/head_mix.h"

#include "kernels/cpu.h"
#include "kernels/gemm.h"
#include "kernels/vec.h"

namespace crossply {
namespace {

constexpr int64_t lanes = lanes_of<Vec16>, columns = 4 * lanes;  // a mixture's block of columns stays in registers while the sources pass
constexpr int64_t tile = 64;                        // tokens whose sources stay in the L2 cache
constexpr int heads_at_once = 4;
using Vec = Vec16;

struct Data {
  std::vector<const float*> u;
  const float* weight;
  HeadMixSize z;
  const float* weights(int64_t n) const { return weight + (z.shared ? 0 : n * z.K * z.S); }
};

// -----------------------------------------------------------------------------------------------------------------
// Mixing: heads h0 .. h0+R of one token into m, m + stride, ...

template <int R>
void mix_token(float* m, int64_t stride, const Data& of, int64_t n, int64_t h0) {
  const HeadMixSize& z = of.z;
  const float* w = of.weights(n) + h0 * z.S;
  int64_t c = 0;
  for (; c + columns <= z.C; c += columns) {
    Vec sum[R][4] = {};
    for (int64_t s = 0; s < z.S; ++s) {
      const float* u = of.u[static_cast<size_t>(s)] + n * z.C + c;
      Vec x[4];
      for (int i = 0; i < 4; ++i) load(x[i], u + i * lanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < 4; ++i) sum[r][i] += w[r * z.S + s] * x[i];
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 4; ++i) store(m + r * stride + c + i * lanes, sum[r][i]);
  }
  for (; c < z.C; ++c)
    for (int r = 0; r < R; ++r) {
      float sum = 0;
      for (int64_t s = 0; s < z.S; ++s) sum += w[r * z.S + s] * of.u[static_cast<size_t>(s)][n * z.C + c];
      m[r * stride + c] = sum;
    }
}

// All heads of tokens n0 .. n0+rows: head h at m + h * stride, (rows, C) each.
void mix_tile(float* m, int64_t stride, const Data& of, int64_t n0, int64_t rows) {
  const HeadMixSize& z = of.z;
  for (int64_t n = 0; n < rows; ++n) {
    int64_t h = 0;
    for (; h + heads_at_once <= z.K; h += heads_at_once)
      mix_token<heads_at_once>(m + h * stride + n * z.C, stride, of, n0 + n, h);
    for (; h < z.K; ++h) mix_token<1>(m + h * stride + n * z.C, stride, of, n0 + n, h);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// The gradients of one token's weights and sources, from R heads' dm at dm, dm + stride, ... dweight is added to.

template <int R>
void unmix_token(const std::vector<float*>& du, float* dweight, const float* dm, int64_t stride, const Data& of,
                 int64_t n, int64_t h0, const std::vector<bool>& acc) {
  const HeadMixSize& z = of.z;
  const float* w = of.weights(n) + h0 * z.S;
  for (int64_t s = 0; s < z.S; ++s) {
    const float* u = of.u[static_cast<size_t>(s)] + n * z.C;
    float* d = du[static_cast<size_t>(s)] + n * z.C;
    const bool add = acc[static_cast<size_t>(s)] || h0 > 0;
    Vec dot[R] = {};
    float rest[R] = {};
    int64_t c = 0;
    for (; c + lanes <= z.C; c += lanes) {
      Vec x, sum{};
      load(x, u + c);
      if (add) load(sum, d + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vec g;
        load(g, dm + r * stride + c);
        dot[r] += g * x;
        sum += w[r * z.S + s] * g;
      }
      store(d + c, sum);
    }
    for (; c < z.C; ++c) {
      float sum = add ? d[c] : 0.f;
      for (int r = 0; r < R; ++r) {
        rest[r] += dm[r * stride + c] * u[c];
        sum += w[r * z.S + s] * dm[r * stride + c];
      }
      d[c] = sum;
    }
    for (int r = 0; r < R; ++r) {
      dweight[(h0 + r) * z.S + s] += rest[r] + sum_of_lanes(dot[r]);
    }
  }
}

// Tokens n0 .. n0+rows. wg: the folded weights (2, K*D, C); dm: scratch (heads_at_once, tile, C).
void unmix_tile(const std::vector<float*>& du, float* dweight, const float* dk, const float* dv, const float* wg,
                float* dm, const Data& of, int64_t n0, int64_t rows, const std::vector<bool>& acc) {
  const HeadMixSize& z = of.z;
  const int64_t stride = tile * z.C, row = z.K * z.D;
  for (int64_t h0 = 0; h0 < z.K; h0 += heads_at_once) {
    const int64_t R = std::min<int64_t>(heads_at_once, z.K - h0);
    for (int64_t h = h0; h < h0 + R; ++h) {
      const int64_t from = n0 * row + h * z.D;
      float* to = dm + (h - h0) * stride;
      gemm(to, {dk + from, row, 1}, {wg + h * z.D * z.C, z.C, 1}, rows, z.C, z.D, false);
      gemm(to, {dv + from, row, 1}, {wg + (row + h * z.D) * z.C, z.C, 1}, rows, z.C, z.D, true);
    }
    for (int64_t n = 0; n < rows; ++n) {
      float* dw = dweight + (z.shared ? 0 : (n0 + n) * z.K * z.S);
      const float* g = dm + n * z.C;
      if (R == 4) unmix_token<4>(du, dw, g, stride, of, n0 + n, h0, acc);
      else if (R == 3) unmix_token<3>(du, dw, g, stride, of, n0 + n, h0, acc);
      else if (R == 2) unmix_token<2>(du, dw, g, stride, of, n0 + n, h0, acc);
      else unmix_token<1>(du, dw, g, stride, of, n0 + n, h0, acc);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------

// wk and wv with the gain in every row: (2, K*D, C), in scratch slot 0.
float* fold_gain(const float* gain, const float* wk, const float* wv, const HeadMixSize& z) {
  const int64_t rows = z.K * z.D;
  float* wg = scratch_f32(static_cast<size_t>(2 * rows * z.C), 0);
  parallel_for(2 * rows, 256, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = r < rows ? wk + r * z.C : wv + (r - rows) * z.C;
#pragma omp simd
      for (int64_t c = 0; c < z.C; ++c) wg[r * z.C + c] = gain[c] * from[c];
    }
  });
  return wg;
}

void forward_cpu(float* k, float* v, const Data& of, const float* gain, const float* wk, const float* wv) {
  const HeadMixSize& z = of.z;
  const float* wg = fold_gain(gain, wk, wv, z);
  const int64_t rows_at_once = 2 * tile, tiles = (z.N + rows_at_once - 1) / rows_at_once, row = z.K * z.D;
  parallel_for(tiles, 1, [=, &of](int64_t begin, int64_t end) {
    float* m = scratch_f32(static_cast<size_t>(z.K * rows_at_once * z.C), 1);
    float* out = scratch_f32(static_cast<size_t>(rows_at_once * z.D), 2);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n0 = t * rows_at_once, rows = std::min(rows_at_once, z.N - n0);
      mix_tile(m, rows_at_once * z.C, of, n0, rows);
      for (int64_t i = 0; i < 2 * z.K; ++i) {  // the keys' heads, then the values'
        const int64_t h = i % z.K;
        gemm(out, {m + h * rows_at_once * z.C, z.C, 1}, {wg + (i / z.K * row + h * z.D) * z.C, 1, z.C}, rows, z.D, z.C, false);
        float* to = (i < z.K ? k : v) + n0 * row + h * z.D;
        for (int64_t n = 0; n < rows; ++n) std::copy_n(out + n * z.D, z.D, to + n * row);
      }
    }
  });
}

void backward_cpu(const std::vector<float*>& du, float* dweight, float* dgain, float* dwk, float* dwv, const float* dk,
                  const float* dv, const Data& of, const float* gain, const float* wk, const float* wv,
                  const std::vector<bool>& acc) {
  const HeadMixSize& z = of.z;
  const int64_t row = z.K * z.D, weights = z.K * z.S, tiles = (z.N + tile - 1) / tile;
  const int64_t chunk = std::clamp<int64_t>((int64_t{1} << 19) / (z.K * z.C) / tile, 1, 8) * tile;  // tokens
  const float* wg = fold_gain(gain, wk, wv, z);
  float* m = scratch_f32(static_cast<size_t>(z.K * chunk * z.C), 1);
  float* g = scratch_f32(static_cast<size_t>(2 * row * z.C), 2);  // G of the keys and of the values: (2, K*D, C)
  float* partial = z.shared ? scratch_f32(static_cast<size_t>(tiles * weights), 7) : nullptr;
  std::fill_n(z.shared ? partial : dweight, (z.shared ? tiles : z.N) * weights, 0.f);
  for (int64_t n0 = 0; n0 < z.N; n0 += chunk) {
    const int64_t count = std::min(chunk, z.N - n0), part = (count + tile - 1) / tile;
    parallel_for(part, 1, [=, &of, &du, &acc](int64_t begin, int64_t end) {
      float* dm = scratch_f32(static_cast<size_t>(heads_at_once * tile * z.C), 3);
      for (int64_t t = begin; t < end; ++t) {
        const int64_t first = t * tile, rows = std::min(tile, count - first);
        mix_tile(m + first * z.C, chunk * z.C, of, n0 + first, rows);
        float* dw = z.shared ? partial + (n0 + first) / tile * weights : dweight;
        unmix_tile(du, dw, dk, dv, wg, dm, of, n0 + first, rows, acc);
      }
    });
    for (int64_t i = 0; i < 2 * z.K; ++i) {
      const int64_t h = i % z.K;
      gemm(g + (i / z.K * row + h * z.D) * z.C, {(i < z.K ? dk : dv) + n0 * row + h * z.D, 1, row},
           {m + h * chunk * z.C, z.C, 1}, z.D, z.C, count, n0 > 0);
    }
  }
  for (int64_t t = 0; t < tiles && z.shared; ++t)
    for (int64_t i = 0; i < weights; ++i) dweight[i] = (t > 0 ? dweight[i] : 0.f) + partial[t * weights + i];
  for (int64_t r = 0; r < 2 * row; ++r) {
    const float *from = g + r * z.C, *w = r < row ? wk + r * z.C : wv + (r - row) * z.C;
    float* to = r < row ? dwk + r * z.C : dwv + (r - row) * z.C;
#pragma omp simd
    for (int64_t c = 0; c < z.C; ++c) to[c] += from[c] * gain[c], dgain[c] += from[c] * w[c];
  }
}

HeadMixSize check(const Tensor& k, const Tensor& v, const HeadMix& m) {
  CHECK_THAT(k.shape.rank == 4 && v.shape == k.shape && !m.sources.empty(), "head_mix: k ", k.str(), " v ", v.str());
  const int64_t K = k.dim(2), D = k.dim(3), N = k.dim(0) * k.dim(1), C = m.gain.numel();
  const int64_t S = static_cast<int64_t>(m.sources.size());
  const bool shared = m.weight.shape == Shape{K, S};
  CHECK_THAT((shared || m.weight.numel() == N * K * S) && m.wk.shape == (Shape{K * D, C}) && m.wv.shape == m.wk.shape,
             "head_mix: weight ", m.weight.str(), " wk ", m.wk.str(), " wv ", m.wv.str(), " k ", k.str());
  for (const Tensor& u : m.sources) CHECK_THAT(u.numel() == N * C, "head_mix: source ", u.str(), " k ", k.str());
  return {N, S, K, D, C, shared};
}

template <class T>
std::vector<const T*> pointers(const std::vector<Tensor>& tensors) {
  std::vector<const T*> list;
  for (const Tensor& tensor : tensors) list.push_back(tensor.as<T>());
  return list;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void head_mix_forward(const Tensor& k, const Tensor& v, const HeadMix& m, Stream stream) {
  const HeadMixSize z = check(k, v, m);
  if (stream.backend == Backend::cpu)
    return forward_cpu(k.as<float>(), v.as<float>(), {pointers<float>(m.sources), m.weight.as<float>(), z},
                       m.gain.as<float>(), m.wk.as<float>(), m.wv.as<float>());
  with_real(k.dtype, [&](auto real) {
    using T = decltype(real);
    head_mix_forward_ref(k.as<T>(), v.as<T>(), pointers<T>(m.sources), m.weight.as<T>(), m.gain.as<T>(), m.wk.as<T>(),
                         m.wv.as<T>(), z);
  });
}

void head_mix_backward(const HeadMix& d, const Tensor& dk, const Tensor& dv, const HeadMix& m,
                       const std::vector<bool>& acc, Stream stream) {
  const HeadMixSize z = check(dk, dv, m);
  CHECK_THAT(d.sources.size() == m.sources.size() && acc.size() == m.sources.size() && d.weight.shape == m.weight.shape &&
                 d.gain.shape == m.gain.shape && d.wk.shape == m.wk.shape && d.wv.shape == m.wv.shape,
             "head_mix_backward: gradients of other shapes");
  with_real(dk.dtype, [&](auto real) {
    using T = decltype(real);
    std::vector<T*> du;
    for (const Tensor& tensor : d.sources) du.push_back(tensor.as<T>());
    if (stream.backend == Backend::cpu) {
      if constexpr (std::is_same_v<T, float>)
        return backward_cpu(du, d.weight.as<T>(), d.gain.as<T>(), d.wk.as<T>(), d.wv.as<T>(), dk.as<T>(), dv.as<T>(),
                            {pointers<T>(m.sources), m.weight.as<T>(), z}, m.gain.as<T>(), m.wk.as<T>(), m.wv.as<T>(), acc);
    }
    head_mix_backward_ref(du, d.weight.as<T>(), d.gain.as<T>(), d.wk.as<T>(), d.wv.as<T>(), dk.as<T>(), dv.as<T>(),
                          pointers<T>(m.sources), m.weight.as<T>(), m.gain.as<T>(), m.wk.as<T>(), m.wv.as<T>(), z, acc);
  });
}

}  // namespace crossply
