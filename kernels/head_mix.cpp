#include "kernels/head_mix.h"

#include "kernels/cpu.h"
#include "kernels/gemm.h"
#include "kernels/vec.h"

namespace crossply {
namespace {

constexpr int64_t lanes = lanes_of<Vec16>,
                  columns = 4 * lanes;  // a mixture's block of columns stays in registers while the sources pass
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

// Tokens n0 .. n0+rows. dkv: their gradients as join_heads leaves them, one head after the other, `apart` floats apart;
// wg: the folded weights; dm: scratch (heads_at_once, rows, C).
void unmix_tile(const std::vector<float*>& du, float* dweight, const float* dkv, int64_t apart, const float* wg,
                float* dm, const Data& of, int64_t n0, int64_t rows, const std::vector<bool>& acc) {
  const HeadMixSize& z = of.z;
  const int64_t stride = rows * z.C, width = 2 * z.D;
  for (int64_t h0 = 0; h0 < z.K; h0 += heads_at_once) {
    const int64_t R = std::min<int64_t>(heads_at_once, z.K - h0);
    for (int64_t h = h0; h < h0 + R; ++h)
      gemm(dm + (h - h0) * stride, {dkv + h * apart, width, 1}, {wg + h * width * z.C, z.C, 1}, rows, z.C, width,
           false);
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
// Keys and values of one head side by side, so that both are one product: kv (rows, 2D) of head h, in `to`.

void join_heads(float* to, const float* k, const float* v, const HeadMixSize& z, int64_t h, int64_t n0, int64_t rows) {
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t from = ((n0 + n) * z.K + h) * z.D;
    std::copy_n(k + from, z.D, to + n * 2 * z.D);
    std::copy_n(v + from, z.D, to + n * 2 * z.D + z.D);
  }
}
void split_heads(float* k, float* v, const float* from, const HeadMixSize& z, int64_t h, int64_t n0, int64_t rows) {
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t to = ((n0 + n) * z.K + h) * z.D;
    std::copy_n(from + n * 2 * z.D, z.D, k + to);
    std::copy_n(from + n * 2 * z.D + z.D, z.D, v + to);
  }
}

// The row of wk or wv that is row r of the joined weights (K, 2D, C).
template <class Float>
Float* joined_row(Float* wk, Float* wv, const HeadMixSize& z, int64_t r) {
  const int64_t h = r / (2 * z.D), d = r % (2 * z.D);
  return d < z.D ? wk + (h * z.D + d) * z.C : wv + (h * z.D + d - z.D) * z.C;
}

// The joined weights with the gain in every row, in scratch slot 0.
float* fold_gain(const float* gain, const float* wk, const float* wv, const HeadMixSize& z) {
  const int64_t rows = 2 * z.K * z.D;
  float* wg = scratch_f32(static_cast<size_t>(rows * z.C), 0);
  parallel_for(rows, 256, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = joined_row(wk, wv, z, r);
#pragma omp simd
      for (int64_t c = 0; c < z.C; ++c) wg[r * z.C + c] = gain[c] * from[c];
    }
  });
  return wg;
}

// Tokens whose streams of a few heads stay in the L2 cache.
int64_t tile_tokens(const HeadMixSize& z) { return std::clamp<int64_t>(32768 / z.C, 16, 128); }

void forward_cpu(float* k, float* v, const Data& of, const float* gain, const float* wk, const float* wv) {
  const HeadMixSize& z = of.z;
  const float* wg = fold_gain(gain, wk, wv, z);
  const int64_t tile = tile_tokens(z), tiles = (z.N + tile - 1) / tile;
  parallel_for(tiles, 1, [=, &of](int64_t begin, int64_t end) {
    float* m = scratch_f32(static_cast<size_t>(z.K * tile * z.C), 1);
    float* kv = scratch_f32(static_cast<size_t>(tile * 2 * z.D), 2);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n0 = t * tile, rows = std::min(tile, z.N - n0);
      mix_tile(m, tile * z.C, of, n0, rows);
      for (int64_t h = 0; h < z.K; ++h) {
        gemm(kv, {m + h * tile * z.C, z.C, 1}, {wg + h * 2 * z.D * z.C, 1, z.C}, rows, 2 * z.D, z.C, false);
        split_heads(k, v, kv, z, h, n0, rows);
      }
    }
  });
}

// G_h = dkv_h^T m_h over a chunk of tokens, added to what earlier chunks left, in blocks of columns: a task for each
// head and block. g: (K, blocks, 2D, width), the last block narrower in its own memory.
constexpr int64_t block_width = 128;
void correlate(float* g, const float* dkv, const float* m, const HeadMixSize& z, int64_t chunk, int64_t count,
               bool add) {
  const int64_t blocks = (z.C + block_width - 1) / block_width;
  parallel_for(z.K * blocks, 1, [=, &z](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i / blocks, c0 = i % blocks * block_width;
      gemm(g + h * 2 * z.D * z.C + c0 * 2 * z.D, {dkv + h * chunk * 2 * z.D, 1, 2 * z.D},
           {m + h * chunk * z.C + c0, z.C, 1}, 2 * z.D, std::min(block_width, z.C - c0), count, add);
    }
  });
}

// From G the gradients of the weights and of the gain, a block of columns after the other.
void finish_weights(float* dgain, float* dwk, float* dwv, const float* g, const float* gain, const float* wk,
                    const float* wv, const HeadMixSize& z) {
  const int64_t head = 2 * z.D, blocks = (z.C + block_width - 1) / block_width;
  parallel_for(blocks, z.K * head * z.C <= 32768 ? blocks : 1, [=, &z](int64_t begin, int64_t end) {
    for (int64_t c0 = begin * block_width; c0 < std::min(z.C, end * block_width); c0 += block_width) {
      const int64_t width = std::min(block_width, z.C - c0);
      for (int64_t r = 0; r < z.K * head; ++r) {
        const float *w = joined_row(wk, wv, z, r) + c0,
                    *from = g + r / head * head * z.C + c0 * head + r % head * width;
        float* to = joined_row(dwk, dwv, z, r) + c0;
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) {
          to[c] += from[c] * gain[c0 + c];
          dgain[c0 + c] += from[c] * w[c];
        }
      }
    }
  });
}

void backward_cpu(const std::vector<float*>& du, float* dweight, float* dgain, float* dwk, float* dwv, const float* dk,
                  const float* dv, const Data& of, const float* gain, const float* wk, const float* wv,
                  const std::vector<bool>& acc) {
  const HeadMixSize& z = of.z;
  const int64_t weights = z.K * z.S, tile = tile_tokens(z), tiles = (z.N + tile - 1) / tile;
  const int64_t chunk = std::clamp<int64_t>((int64_t{1} << 19) / (z.K * z.C) / tile, 1, 512 / tile) * tile;  // tokens
  const int64_t head = chunk * 2 * z.D;
  const float* wg = fold_gain(gain, wk, wv, z);
  float* m = scratch_f32(static_cast<size_t>(z.K * chunk * (z.C + 2 * z.D)), 1);
  float* dkv = m + z.K * chunk * z.C;
  float* g = scratch_f32(static_cast<size_t>(2 * z.K * z.D * z.C), 2);
  float* partial = z.shared ? scratch_f32(static_cast<size_t>(tiles * weights), 7) : nullptr;
  std::fill_n(z.shared ? partial : dweight, (z.shared ? tiles : z.N) * weights, 0.f);
  for (int64_t n0 = 0; n0 < z.N; n0 += chunk) {
    const int64_t count = std::min(chunk, z.N - n0);
    parallel_for((count + tile - 1) / tile, 1, [=, &of, &du, &acc](int64_t begin, int64_t end) {
      float* dm = scratch_f32(static_cast<size_t>(heads_at_once * tile * z.C), 3);
      for (int64_t t = begin; t < end; ++t) {
        const int64_t first = t * tile, rows = std::min(tile, count - first);
        mix_tile(m + first * z.C, chunk * z.C, of, n0 + first, rows);
        for (int64_t h = 0; h < z.K; ++h) join_heads(dkv + h * head + first * 2 * z.D, dk, dv, z, h, n0 + first, rows);
        float* dw = z.shared ? partial + (n0 + first) / tile * weights : dweight;
        unmix_tile(du, dw, dkv + first * 2 * z.D, head, wg, dm, of, n0 + first, rows, acc);
      }
    });
    correlate(g, dkv, m, z, chunk, count, n0 > 0);
  }
  for (int64_t t = 0; t < tiles && z.shared; ++t)
    for (int64_t i = 0; i < weights; ++i) dweight[i] = (t > 0 ? dweight[i] : 0.f) + partial[t * weights + i];
  finish_weights(dgain, dwk, dwv, g, gain, wk, wv, z);
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

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void head_mix_forward(const Tensor& k, const Tensor& v, const HeadMix& m, Stream stream) {
  const HeadMixSize z = check(k, v, m);
  if (stream.backend == Backend::cpu)
    return forward_cpu(k.as<float>(), v.as<float>(), {pointers<const float>(m.sources), m.weight.as<float>(), z},
                       m.gain.as<float>(), m.wk.as<float>(), m.wv.as<float>());
  with_real(k.dtype, [&](auto real) {
    using T = decltype(real);
    head_mix_forward_ref(k.as<T>(), v.as<T>(), pointers<const T>(m.sources), m.weight.as<T>(), m.gain.as<T>(),
                         m.wk.as<T>(), m.wv.as<T>(), z);
  });
}

void head_mix_backward(const HeadMix& d, const Tensor& dk, const Tensor& dv, const HeadMix& m,
                       const std::vector<bool>& acc, Stream stream) {
  const HeadMixSize z = check(dk, dv, m);
  CHECK_THAT(d.sources.size() == m.sources.size() && acc.size() == m.sources.size() &&
                 d.weight.shape == m.weight.shape && d.gain.shape == m.gain.shape && d.wk.shape == m.wk.shape &&
                 d.wv.shape == m.wv.shape,
             "head_mix_backward: gradients of other shapes");
  for (const Tensor& du : d.sources) CHECK_THAT(du.numel() == z.N * z.C, "head_mix_backward: source ", du.str());
  with_real(dk.dtype, [&](auto real) {
    using T = decltype(real);
    std::vector<T*> du;
    for (const Tensor& tensor : d.sources) du.push_back(tensor.as<T>());
    if (stream.backend == Backend::cpu) {
      if constexpr (std::is_same_v<T, float>)
        return backward_cpu(du, d.weight.as<T>(), d.gain.as<T>(), d.wk.as<T>(), d.wv.as<T>(), dk.as<T>(), dv.as<T>(),
                            {pointers<const T>(m.sources), m.weight.as<T>(), z}, m.gain.as<T>(), m.wk.as<T>(),
                            m.wv.as<T>(), acc);
    }
    head_mix_backward_ref(du, d.weight.as<T>(), d.gain.as<T>(), d.wk.as<T>(), d.wv.as<T>(), dk.as<T>(), dv.as<T>(),
                          pointers<const T>(m.sources), m.weight.as<T>(), m.gain.as<T>(), m.wk.as<T>(), m.wv.as<T>(), z,
                          acc);
  });
}

}  // namespace crossply
