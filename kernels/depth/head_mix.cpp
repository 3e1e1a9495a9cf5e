#include "kernels/depth/head_mix.h"

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t lanes = lanes_of<Vec16>,
                  columns = 4 * lanes;  // a mixture's block of columns stays in registers while the sources pass
constexpr int heads_at_once = 4;
using Vec = Vec16;

template <class S>
struct Data {
  const std::vector<const S*>& u;
  const float* weight;
  HeadMixSize z;
  const float* weights(int64_t n) const { return weight + (z.shared ? 0 : n * z.K * z.S); }
};

// -----------------------------------------------------------------------------------------------------------------
// Mixing: heads h0 .. h0+R of one token into m, m + stride, ...

template <int R, class S>
void mix_token(float* m, int64_t stride, const Data<S>& of, int64_t n, int64_t h0) {
  const HeadMixSize& z = of.z;
  const float* w = of.weights(n) + h0 * z.S;
  int64_t c = 0;
  for (; c + columns <= z.C; c += columns) {
    Vec sum[R][4] = {};
    for (int64_t s = 0; s < z.S; ++s) {
      const S* u = of.u[static_cast<size_t>(s)] + n * z.C + c;
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
template <class S>
void mix_tile(float* m, int64_t stride, const Data<S>& of, int64_t n0, int64_t rows) {
  const HeadMixSize& z = of.z;
  for (int64_t n = 0; n < rows; ++n) {
    int64_t h = 0;
    for (; h + heads_at_once <= z.K; h += heads_at_once)
      mix_token<heads_at_once>(m + h * stride + n * z.C, stride, of, n0 + n, h);
    for (; h < z.K; ++h) mix_token<1>(m + h * stride + n * z.C, stride, of, n0 + n, h);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Keys and values of one head side by side, so that both are one product: kv (rows, 2D) of head h, in `to`.

template <class S>
void join_heads(float* to, const S* k, const S* v, const HeadMixSize& z, int64_t h, int64_t n0, int64_t rows) {
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t from = ((n0 + n) * z.K + h) * z.D;
    copy_row(to + n * 2 * z.D, k + from, z.D);
    copy_row(to + n * 2 * z.D + z.D, v + from, z.D);
  }
}
template <class S>
void split_heads(S* k, S* v, const float* from, const HeadMixSize& z, int64_t h, int64_t n0, int64_t rows) {
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t to = ((n0 + n) * z.K + h) * z.D;
    copy_row(k + to, from + n * 2 * z.D, z.D);
    copy_row(v + to, from + n * 2 * z.D + z.D, z.D);
  }
}

// The row of wk or wv that is row r of the joined weights (K, 2D, C).
template <class T>
T* joined_row(T* wk, T* wv, const HeadMixSize& z, int64_t r) {
  const int64_t h = r / (2 * z.D), d = r % (2 * z.D);
  return d < z.D ? wk + (h * z.D + d) * z.C : wv + (h * z.D + d - z.D) * z.C;
}

// The joined weights with the gain in every row, in scratch slot 0.
template <class S>
float* fold_gain(const float* gain, const S* wk, const S* wv, const HeadMixSize& z) {
  const int64_t rows = 2 * z.K * z.D;
  float* wg = scratch_f32(static_cast<size_t>(rows * z.C), 0);
  parallel_for(rows, 256, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const S* from = joined_row(wk, wv, z, r);
#pragma omp simd
      for (int64_t c = 0; c < z.C; ++c) wg[r * z.C + c] = gain[c] * from[c];
    }
  });
  return wg;
}

// Tokens whose streams of a few heads stay in the L2 cache.
int64_t tile_tokens(const HeadMixSize& z) { return std::clamp<int64_t>(32768 / z.C, 16, 128); }

template <class S>
void head_mix_forward_cpu(S* k, S* v, const Data<S>& of, const float* gain, const S* wk, const S* wv) {
  const HeadMixSize& z = of.z;
  const float* wg = fold_gain(gain, wk, wv, z);
  const int64_t tile = tile_tokens(z), tiles = ceil_div(z.N, tile);
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

// -----------------------------------------------------------------------------------------------------------------
// The gradients of a token's sources, and of the weights on them. du is a sum over all heads, R of them at a time:
// until the last it is kept in floats.

template <class S>
struct SourceRow {
  S* du;          // (C)
  const S* u;     // (C)
  float* so_far;  // (C)
  bool accumulate, first, last;

  template <class T>
  void begin(T& sum, int64_t c) const {
    if (!first) load(sum, so_far + c);
    else if (accumulate) load(sum, du + c);
  }
  template <class T>
  void end(const T& sum, int64_t c) const {
    if (last) store(du + c, sum);
    else store(so_far + c, sum);
  }
};

// R heads' part of a row, from their dm at dm, dm + stride, ... Weights and their gradients lie z.S apart; the latter
// are added to.
template <int R, class S>
void unmix_row(SourceRow<S> row, float* dweight, const float* dm, int64_t stride, const float* w,
               const HeadMixSize& z) {
  Vec dot[R] = {};
  float rest[R] = {};
  int64_t c = 0;
  for (; c + lanes <= z.C; c += lanes) {
    Vec x, sum{};
    load(x, row.u + c);
    row.begin(sum, c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Vec g;
      load(g, dm + r * stride + c);
      dot[r] += g * x;
      sum += w[r * z.S] * g;
    }
    row.end(sum, c);
  }
  for (; c < z.C; ++c) {
    float sum = 0;
    row.begin(sum, c);
    for (int r = 0; r < R; ++r) {
      rest[r] += dm[r * stride + c] * row.u[c];
      sum += w[r * z.S] * dm[r * stride + c];
    }
    row.end(sum, c);
  }
  for (int r = 0; r < R; ++r) dweight[r * z.S] += rest[r] + sum_of_lanes(dot[r]);
}

// Tokens n0 .. n0+rows. dkv: their gradients as join_heads leaves them, one head after the other, `apart` floats apart;
// wg: the folded weights; dm: scratch, (K, rows, C) and a row.
template <class S>
void unmix_tile(const std::vector<Grad>& dsources, const std::vector<S*>& du, float* dweight, const float* dkv,
                int64_t apart, const float* wg, float* dm, const Data<S>& of, int64_t n0, int64_t rows) {
  const HeadMixSize& z = of.z;
  const int64_t stride = rows * z.C, width = 2 * z.D;
  for (int64_t h = 0; h < z.K; ++h)
    gemm(dm + h * stride, {dkv + h * apart, width, 1}, {wg + h * width * z.C, z.C, 1}, rows, z.C, width, false);
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t s = 0; s < z.S; ++s) {
      const size_t i = static_cast<size_t>(s);
      const int64_t at = (n0 + n) * z.C;
      SourceRow<S> row{du[i] + at, of.u[i] + at, dm + z.K * stride, dsources[i].accumulate, true, false};
      for (int64_t h = 0; h < z.K; h += heads_at_once, row.first = false) {
        const int64_t R = std::min<int64_t>(heads_at_once, z.K - h);
        float* dw = dweight + ((z.shared ? 0 : n0 + n) * z.K + h) * z.S + s;
        const float *w = of.weights(n0 + n) + h * z.S + s, *g = dm + h * stride + n * z.C;
        row.last = h + R == z.K;
        if (R == 4) unmix_row<4>(row, dw, g, stride, w, z);
        else if (R == 3) unmix_row<3>(row, dw, g, stride, w, z);
        else if (R == 2) unmix_row<2>(row, dw, g, stride, w, z);
        else unmix_row<1>(row, dw, g, stride, w, z);
      }
    }
  }
}

// G_h = dkv_h^T m_h over a chunk of tokens, added to what earlier chunks left, in blocks of columns: a task for each
// head and block. g: (K, blocks, 2D, width), the last block narrower in its own memory.
constexpr int64_t block_width = 128;
void correlate(float* g, const float* dkv, const float* m, const HeadMixSize& z, int64_t chunk, int64_t count,
               bool accumulate) {
  const int64_t blocks = ceil_div(z.C, block_width);
  parallel_for(z.K * blocks, 1, [=, &z](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i / blocks, c0 = i % blocks * block_width;
      gemm(g + h * 2 * z.D * z.C + c0 * 2 * z.D, {dkv + h * chunk * 2 * z.D, 1, 2 * z.D},
           {m + h * chunk * z.C + c0, z.C, 1}, 2 * z.D, std::min(block_width, z.C - c0), count, accumulate);
    }
  });
}

// From G the gradients of the weights and of the gain, a block of columns after the other.
template <class S>
void finish_weights(float* dgain, float* dwk, float* dwv, const float* g, const float* gain, const S* wk, const S* wv,
                    const HeadMixSize& z) {
  const int64_t head = 2 * z.D, blocks = ceil_div(z.C, block_width);
  parallel_for(blocks, z.K * head * z.C <= 32768 ? blocks : 1, [=, &z](int64_t begin, int64_t end) {
    for (int64_t c0 = begin * block_width; c0 < std::min(z.C, end * block_width); c0 += block_width) {
      const int64_t width = std::min(block_width, z.C - c0);
      for (int64_t r = 0; r < z.K * head; ++r) {
        const S* w = joined_row(wk, wv, z, r) + c0;
        const float* from = g + r / head * head * z.C + c0 * head + r % head * width;
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

template <class S>
void head_mix_backward_cpu(const std::vector<Grad>& dsources, float* dweight, float* dgain, float* dwk, float* dwv,
                           const S* dk, const S* dv, const Data<S>& of, const float* gain, const S* wk, const S* wv) {
  const HeadMixSize& z = of.z;
  const std::vector<S*>& du = data_of<S>(dsources);
  const int64_t weights = z.K * z.S, tile = tile_tokens(z), tiles = ceil_div(z.N, tile);
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
    parallel_for(ceil_div(count, tile), 1, [=, &of, &dsources, &du](int64_t begin, int64_t end) {
      float* dm = scratch_f32(static_cast<size_t>((z.K * tile + 1) * z.C), 3);
      for (int64_t t = begin; t < end; ++t) {
        const int64_t first = t * tile, rows = std::min(tile, count - first);
        mix_tile(m + first * z.C, chunk * z.C, of, n0 + first, rows);
        for (int64_t h = 0; h < z.K; ++h) join_heads(dkv + h * head + first * 2 * z.D, dk, dv, z, h, n0 + first, rows);
        float* dw = z.shared ? partial + (n0 + first) / tile * weights : dweight;
        unmix_tile(dsources, du, dw, dkv + first * 2 * z.D, head, wg, dm, of, n0 + first, rows);
      }
    });
    correlate(g, dkv, m, z, chunk, count, n0 > 0);
  }
  for (int64_t t = 0; t < tiles && z.shared; ++t)
    for (int64_t i = 0; i < weights; ++i) dweight[i] = (t > 0 ? dweight[i] : 0.f) + partial[t * weights + i];
  finish_weights(dgain, dwk, dwv, g, gain, wk, wv, z);
}

HeadMixSize check(const Tensor& k, const Tensor& v, const HeadMix<Tensor>& m) {
  CHECK_SHAPES(k.shape.rank == 4 && v.shape == k.shape, k, v);
  const auto& [sources, weight, gain, wk, wv] = m;
  const int64_t K = k.dim(2), D = k.dim(3), N = k.dim(0) * k.dim(1), C = gain.numel();
  const int64_t S = static_cast<int64_t>(sources.size());
  const bool shared = weight.shape == Shape{K, S};
  CHECK_THAT(S > 0, "no sources for ", k.str());
  CHECK_SHAPES((shared || weight.numel() == N * K * S) && wk.shape == (Shape{K * D, C}) && wv.shape == wk.shape, k,
               weight, gain, wk, wv);
  for (const Tensor& source : sources) CHECK_SHAPES(source.numel() == N * C, source, gain, k);
  return {N, S, K, D, C, shared};
}

void check_gradients(const HeadMix<Grad, Tensor>& d, const HeadMix<Tensor>& m) {
  const auto& [dsources, dweight, dgain, dwk, dwv] = d;
  CHECK_THAT(dsources.size() == m.sources.size(), dsources.size(), " gradients of ", m.sources.size(), " sources");
  CHECK_SHAPES(dweight.shape == m.weight.shape && dgain.shape == m.gain.shape, dweight, m.weight, dgain, m.gain);
  CHECK_SHAPES(dwk.shape == m.wk.shape && dwv.shape == m.wv.shape, dwk, m.wk, dwv, m.wv);
  for (const Grad& du : dsources) CHECK_SHAPES(du.numel() == m.sources[0].numel(), du, m.sources[0]);
}

template <class T>
HeadMix<const T*> pointers_of(const HeadMix<Tensor>& m) {
  return {data_of<const T>(m.sources), m.weight.as<T>(), m.gain.as<T>(), m.wk.as<T>(), m.wv.as<T>()};
}

template <class T>
void backward_ref(const HeadMix<Grad, Tensor>& d, const Tensor& dk, const Tensor& dv, const HeadMix<Tensor>& m,
                  const HeadMixSize& z) {
  for (const Grad& du : d.sources)
    if (!du.accumulate) std::fill_n(du.as<T>(), du.numel(), T(0));
  std::fill_n(d.weight.as<T>(), d.weight.numel(), T(0));
  head_mix_backward_ref<T>({data_of<T>(d.sources), d.weight.as<T>(), d.gain.as<T>(), d.wk.as<T>(), d.wv.as<T>()},
                           dk.as<T>(), dv.as<T>(), pointers_of<T>(m), z);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void head_mix_forward(const Tensor& k, const Tensor& v, const HeadMix<Tensor>& m, Stream stream) {
  const HeadMixSize z = check(k, v, m);
  dispatch(
      stream, k.dtype, [&] { head_mix_forward_cuda(k, v, m, z); },
      [&]<class S>(S) {
        const Data<S> of{data_of<const S>(m.sources), m.weight.as<float>(), z};
        head_mix_forward_cpu(k.as<S>(), v.as<S>(), of, m.gain.as<float>(), m.wk.as<S>(), m.wv.as<S>());
      },
      [&]<class T>(T) { head_mix_forward_ref(k.as<T>(), v.as<T>(), pointers_of<T>(m), z); });
}

void head_mix_backward(const HeadMix<Grad, Tensor>& d, const Tensor& dk, const Tensor& dv, const HeadMix<Tensor>& m,
                       Stream stream) {
  const HeadMixSize z = check(dk, dv, m);
  check_gradients(d, m);
  dispatch(
      stream, dk.dtype, [&] { head_mix_backward_cuda(d, dk, dv, m, z); },
      [&]<class S>(S) {
        const Data<S> of{data_of<const S>(m.sources), m.weight.as<float>(), z};
        head_mix_backward_cpu(d.sources, d.weight.as<float>(), d.gain.as<float>(), d.wk.as<float>(), d.wv.as<float>(),
                              dk.as<S>(), dv.as<S>(), of, m.gain.as<float>(), m.wk.as<S>(), m.wv.as<S>());
      },
      [&]<class T>(T) { backward_ref<T>(d, dk, dv, m, z); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct HeadMixNode : Node {  // in: the sources, weight, gain, wk, wv; out: keys, values
  size_t S = 0;
  HeadMix<Tensor> tensors;
  HeadMix<Grad, Tensor> gradients;

  const char* op() const override { return "head_mix"; }
  void prepare() override {
    const Dtype dtype = in[0]->dtype;
    tensors = {{}, input(S), input(S + 1), matmul_weight(in[S + 2], dtype), matmul_weight(in[S + 3], dtype)};
    gradients = {{}, grad_of(in[S]), grad_of(in[S + 1]), grad_of(in[S + 2]), grad_of(in[S + 3])};
    for (size_t s = 0; s < S; ++s) {
      tensors.sources.push_back(input(s));
      if (!grad_modes.empty()) gradients.sources.push_back(gradient(s));  // empty on a tape that only goes forward
    }
  }
  void forward(const Step&, Stream stream) override { head_mix_forward(output(), out[1]->tensor, tensors, stream); }
  void backward(const Step&, Stream stream) override {
    check_only_reader(S);
    head_mix_backward(gradients, doutput(), out[1]->grad->tensor, tensors, stream);
  }
  bool reads_bf16_copy(size_t i) const override { return i >= S + 2 && in[0]->dtype == Dtype::bf16; }
  double flops() const override {  // the mixtures, then the two projections
    const double heads = static_cast<double>(out[0]->shape[2]), rows = static_cast<double>(in[0]->shape.numel());
    return 2.0 * rows * heads * static_cast<double>(S) + 4.0 * rows * heads * static_cast<double>(out[0]->shape[3]);
  }
  ScratchBytes scratch() const override {
    const Shape &stream = in[0]->shape, &heads = out[0]->shape;
    const auto sources = static_cast<int64_t>(S);
    return head_mix_scratch({stream[0] * stream[1], sources, heads[2], heads[3], stream[2], false}, in[0]->dtype);
  }
};

}  // namespace

std::pair<Value*, Value*> head_mix(Tape& t, const std::string& name, const HeadMix<Value*>& m, int64_t K) {
  const Shape& stream = m.sources.at(0)->shape;
  const Shape heads{stream[0], stream[1], K, m.wk->shape[0] / K};
  Value *k = t.activation(name + ".k", heads), *v = t.activation(name + ".v", heads);
  auto node = make_node<HeadMixNode>(name, joined(m.sources, {m.weight, m.gain, m.wk, m.wv}), {k, v});
  node->S = m.sources.size();
  node->backward_reads = joined(m.sources, {m.weight});
  t.record(std::move(node));
  return {k, v};
}

}  // namespace ops
}  // namespace crossply
