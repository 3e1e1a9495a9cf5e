#include "kernels/block/layernorm.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

// sums: the lanes of sum_c inp, or of sum_c (inp - mean)^2, a row each.
template <bool squares, int64_t rows, class S>
void add_rows(Vec16* sums, S* out, const S* inp, const float* mean, int64_t C) {
  Vec16 sum[rows] = {};
  for_vectors(0, C, [&](int64_t c, auto part) {
    if (!squares) fetch_to_write<rows>(out, C, c);
    for (int64_t n = 0; n < rows; ++n) {
      Vec16 x;
      load(x, inp + n * C + c, part);
      if (squares) {
        x -= mean[n];
        clear_beyond(x, part);
      }
      sum[n] += squares ? x * x : x;
    }
  });
  for (int64_t n = 0; n < rows; ++n) sums[n] = sum[n];
}

// Gain and bias, (C) each; null without.
struct Affine {
  const float *weight, *bias;
};

template <bool gain, int64_t rows, class S>
void write_rows(S* out, const S* inp, Affine affine, const float* mean, const float* rstd, int64_t C) {
  for_vectors(0, C, [=](int64_t c, auto part) {
    Vec16 w, b{};
    if (gain) load(w, affine.weight + c, part);
    if (gain && affine.bias != nullptr) load(b, affine.bias + c, part);
    for (int64_t n = 0; n < rows; ++n) {
      Vec16 x;
      load(x, inp + n * C + c, part);
      x = (x - mean[n]) * rstd[n];
      store(out + n * C + c, gain ? x * w + b : x, part);
    }
  });
}

// At most max_rows.
template <bool gain, class S>
void forward_rows(S* out, float* mean, float* rstd, const S* inp, Affine affine, int64_t rows, int64_t C, float eps) {
  Vec16 lanes[max_rows] = {}, sums;
  float m[max_rows], r[max_rows];
  by_fours(rows,
           [&](int64_t n, auto count) { add_rows<false, count>(lanes + n, out + n * C, inp + n * C, nullptr, C); });
  sums_of_lanes(sums, lanes);
  store(m, sums / static_cast<float>(C));
  by_fours(rows, [&](int64_t n, auto count) { add_rows<true, count>(lanes + n, out + n * C, inp + n * C, m + n, C); });
  sums_of_lanes(sums, lanes);
  store(r, sums);
#pragma omp simd
  for (int64_t n = 0; n < max_rows; ++n) r[n] = 1.f / std::sqrt(r[n] / static_cast<float>(C) + eps);
  std::copy(m, m + rows, mean);
  std::copy(r, r + rows, rstd);
  by_fours(rows,
           [&](int64_t n, auto count) { write_rows<gain, count>(out + n * C, inp + n * C, affine, m + n, r + n, C); });
}

template <bool gain, class S>
void layernorm_forward_cpu(S* out, float* mean, float* rstd, const S* inp, Affine affine, int64_t rows, int64_t C,
                           float eps) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for_row_groups(begin, end, C, [=](int64_t n, int64_t count) {
      forward_rows<gain>(out + n * C, mean + n, rstd + n, inp + n * C, affine, count, C, eps);
    });
  });
}

// The gradients of gain and bias so far, (C) each; dbias null without.
struct AffineSums {
  float *dweight, *dbias;
};

// ones and outs: the lanes of sum_c u and of sum_c u (inp - mean), a row each, with u = dout * weight.
template <bool gain, int64_t rows, class S>
void add_gradients(Vec16* ones, Vec16* outs, AffineSums sums, S* dinp, const S* dout, const S* inp, const float* weight,
                   const float* mean, const float* rstd, int64_t C) {
  Vec16 one[rows] = {}, along_out[rows] = {};
  for_vectors(0, C, [&](int64_t c, auto part) {
    fetch_to_write<rows>(dinp, C, c);
    Vec16 w, dw, db{};
    if (gain) load(w, weight + c, part), load(dw, sums.dweight + c, part);
    if (gain && sums.dbias != nullptr) load(db, sums.dbias + c, part);
    for (int64_t n = 0; n < rows; ++n) {
      Vec16 dy, x;
      load(dy, dout + n * C + c, part);
      load(x, inp + n * C + c, part);
      x -= mean[n];
      if (gain) dw += dy * x * rstd[n], db += dy, dy *= w;
      one[n] += dy;
      along_out[n] += dy * x;
    }
    if (gain) store(sums.dweight + c, dw, part);
    if (gain && sums.dbias != nullptr) store(sums.dbias + c, db, part);
  });
  for (int64_t n = 0; n < rows; ++n) ones[n] = one[n], outs[n] = along_out[n];
}

template <bool gain, bool accumulate, int64_t rows, class S>
void write_gradients(S* dinp, const S* dout, const S* inp, const float* weight, const float* mean, const float* rstd,
                     const float* along_one, const float* along_out, int64_t C) {
  for_vectors(0, C, [=](int64_t c, auto part) {
    Vec16 w;
    if (gain) load(w, weight + c, part);
    for (int64_t n = 0; n < rows; ++n) {
      Vec16 dy, x;
      load(dy, dout + n * C + c, part);
      load(x, inp + n * C + c, part);
      const Vec16 d = rstd[n] * ((gain ? dy * w : dy) - along_one[n] - (x - mean[n]) * along_out[n]);
      store_or_accumulate<accumulate>(dinp + n * C + c, d, part);
    }
  });
}

// At most max_rows.
template <bool gain, bool accumulate, class S>
void backward_rows(S* dinp, AffineSums affine, const S* dout, const S* inp, const float* weight, const float* mean,
                   const float* rstd, int64_t rows, int64_t C) {
  Vec16 ones[max_rows] = {}, outs[max_rows] = {}, sums;
  by_fours(rows, [&](int64_t n, auto count) {
    add_gradients<gain, count>(ones + n, outs + n, affine, dinp + n * C, dout + n * C, inp + n * C, weight, mean + n,
                               rstd + n, C);
  });
  float along_one[max_rows], along_out[max_rows];
  sums_of_lanes(sums, ones);
  store(along_one, sums / static_cast<float>(C));
  sums_of_lanes(sums, outs);
  store(along_out, sums);
  for (int64_t n = 0; n < rows; ++n) along_out[n] *= rstd[n] * rstd[n] / static_cast<float>(C);
  by_fours(rows, [&](int64_t n, auto count) {
    write_gradients<gain, accumulate, count>(dinp + n * C, dout + n * C, inp + n * C, weight, mean + n, rstd + n,
                                             along_one + n, along_out + n, C);
  });
}

template <bool gain, bool accumulate, class S>
void layernorm_backward_cpu(S* dinp, AffineSums affine, const S* dout, const S* inp, const float* weight,
                            const float* mean, const float* rstd, int64_t rows, int64_t C) {
  // One partial dweight and dbias per block of rows; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(rows / 64, 1, 64);
  float* partial = gain ? scratch_f32(static_cast<size_t>(2 * blocks * C)) : nullptr;
  parallel_for(blocks, rows * C <= 32768 ? blocks : 1, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      AffineSums sums{nullptr, nullptr};
      if (gain) {
        sums.dweight = partial + 2 * b * C;
        std::fill(sums.dweight, sums.dweight + 2 * C, 0.f);
        if (affine.dbias != nullptr) sums.dbias = sums.dweight + C;
      }
      for_row_groups(rows * b / blocks, rows * (b + 1) / blocks, C, [=](int64_t n, int64_t count) {
        backward_rows<gain, accumulate>(dinp + n * C, sums, dout + n * C, inp + n * C, weight, mean + n, rstd + n,
                                        count, C);
      });
    }
  });
  for (int64_t b = 0; b < blocks && gain; ++b) {
    const float *dw = partial + 2 * b * C, *db = dw + C;
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) affine.dweight[c] += dw[c];
    if (affine.dbias == nullptr) continue;
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) affine.dbias[c] += db[c];
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void layernorm_forward(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp,
                       const Tensor& weight, const Tensor& bias, double eps, Stream stream) {
  const auto [rows, C] = rows_of(inp);
  const bool gain = weight.data != nullptr, biased = bias.data != nullptr;
  CHECK_SHAPES(out.numel() == rows * C && mean.numel() == rows && rstd.numel() == rows, out, mean, rstd, inp);
  CHECK_SHAPES((!gain || weight.numel() == C) && (!biased || (gain && bias.numel() == C)), inp, weight, bias);
  dispatch(
      stream, out.dtype, [&] { layernorm_forward_cuda(out, mean, rstd, inp, weight, bias, C, eps); },
      [&]<class S>(S) {
        const Affine affine{data_or_null<float>(weight), data_or_null<float>(bias)};
        with_flag(gain, [&](auto with_gain) {
          layernorm_forward_cpu<with_gain>(out.as<S>(), mean.as<float>(), rstd.as<float>(), inp.as<S>(), affine, rows,
                                           C, static_cast<float>(eps));
        });
      },
      [&]<class T>(T) {
        layernorm_forward_ref(out.as<T>(), mean.as<T>(), rstd.as<T>(), inp.as<T>(), data_or_null<T>(weight),
                              data_or_null<T>(bias), rows, C, eps);
      });
}

void layernorm_backward(const Grad& dinp, const Tensor& dweight, const Tensor& dbias, const Tensor& dout,
                        const Tensor& inp, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                        Stream stream) {
  const auto [rows, C] = rows_of(inp);
  const bool gain = weight.data != nullptr, biased = dbias.data != nullptr;
  CHECK_SHAPES(dinp.numel() == rows * C && dout.numel() == rows * C && mean.numel() == rows && rstd.numel() == rows,
               dinp, dout, inp, mean, rstd);
  CHECK_SHAPES(gain ? weight.numel() == C && dweight.numel() == C : dweight.data == nullptr, dweight, inp, weight);
  CHECK_SHAPES(!biased || (gain && dbias.numel() == C), dbias, inp);
  dispatch(
      stream, dinp.dtype, [&] { layernorm_backward_cuda(dinp, dweight, dbias, dout, inp, weight, mean, rstd, C); },
      [&]<class S>(S) {
        const AffineSums affine{data_or_null<float>(dweight), data_or_null<float>(dbias)};
        with_flag(gain, [&](auto with_gain) {
          with_flag(dinp.accumulate, [&](auto accumulate) {
            layernorm_backward_cpu<with_gain, accumulate>(dinp.as<S>(), affine, dout.as<S>(), inp.as<S>(),
                                                          data_or_null<float>(weight), mean.as<float>(),
                                                          rstd.as<float>(), rows, C);
          });
        });
      },
      [&]<class T>(T) {
        layernorm_backward_ref(dinp.as<T>(), data_or_null<T>(dweight), data_or_null<T>(dbias), dout.as<T>(),
                               inp.as<T>(), data_or_null<T>(weight), mean.as<T>(), rstd.as<T>(), rows, C,
                               dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct LayerNorm : Node {  // in[1]: the gain, in[2]: the bias, if it has them
  double eps = 0;
  std::string setting() const override { return str(eps); }
  const char* op() const override { return "layernorm"; }
  void forward(const Step&, Stream stream) override {
    layernorm_forward(output(), saved[0]->tensor, saved[1]->tensor, input(0), part(1), part(2), eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    layernorm_backward(gradient(0), dpart(1), dpart(2), doutput(), input(0), part(1), saved[0]->tensor,
                       saved[1]->tensor, stream);
  }
  Tensor part(size_t i) const { return i < in.size() ? input(i) : Tensor{}; }
  Tensor dpart(size_t i) const { return i < in.size() ? dinput(i) : Tensor{}; }
};

}  // namespace

Value* layernorm(Tape& t, const std::string& name, Value* inp, Value* weight, Value* bias, double eps) {
  const int64_t C = inp->shape[inp->shape.rank - 1];
  const Shape rows{inp->shape.numel() / C};
  auto node = make_node<LayerNorm>(name, present({inp, weight, bias}), {t.activation(name, inp->shape)});
  for (size_t i = 1; i < node->in.size(); ++i)
    CHECK_THAT(weight != nullptr && node->in[i]->shape == Shape{C}, name, ": inp ", inp->shape.str(), ", then ",
               node->in[i]->shape.str());
  node->eps = eps;
  node->saved = {t.statistic(name + ".mean", rows), t.statistic(name + ".rstd", rows)};
  node->backward_reads = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
