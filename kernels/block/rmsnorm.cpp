#include "kernels/block/rmsnorm.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

// sums: the lanes of sum_c inp^2, a row each.
template <int64_t rows, class S>
void add_squares(Vec16* sums, S* out, const S* inp, int64_t C) {
  Vec16 sum[rows] = {};
  for_vectors(0, C, [&](int64_t c, auto part) {
    fetch_to_write<rows>(out, C, c);
    for (int64_t n = 0; n < rows; ++n) {
      Vec16 x;
      load(x, inp + n * C + c, part);
      sum[n] += x * x;
    }
  });
  for (int64_t n = 0; n < rows; ++n) sums[n] = sum[n];
}

template <bool gain, int64_t rows, class S>
void scale_rows(S* out, const float* rstd, const S* inp, const float* weight, int64_t C) {
  for_vectors(0, C, [=](int64_t c, auto part) {
    Vec16 x, w;
    if (gain) load(w, weight + c, part);
    for (int64_t n = 0; n < rows; ++n) {
      load(x, inp + n * C + c, part);
      store(out + n * C + c, gain ? w * x * rstd[n] : x * rstd[n], part);
    }
  });
}

// At most max_rows.
template <bool gain, class S>
void forward_rows(S* out, float* rstd, const S* inp, const float* weight, int64_t rows, int64_t C, float eps) {
  Vec16 lanes[max_rows] = {}, sums;
  by_fours(rows, [&](int64_t n, auto count) { add_squares<count>(lanes + n, out + n * C, inp + n * C, C); });
  sums_of_lanes(sums, lanes);
  float r[max_rows];
  store(r, sums);
#pragma omp simd
  for (int64_t n = 0; n < max_rows; ++n) r[n] = 1.f / std::sqrt(r[n] / static_cast<float>(C) + eps);
  std::copy(r, r + rows, rstd);
  by_fours(rows, [&](int64_t n, auto count) { scale_rows<gain, count>(out + n * C, r + n, inp + n * C, weight, C); });
}

template <bool gain, class S>
void rmsnorm_forward_cpu(S* out, float* rstd, const S* inp, const float* weight, int64_t rows, int64_t C, float eps) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for_row_groups(begin, end, C, [=](int64_t n, int64_t count) {
      forward_rows<gain>(out + n * C, rstd + n, inp + n * C, weight, count, C, eps);
    });
  });
}

// dots: the lanes of sum_c dout weight inp, a row each.
template <bool gain, int64_t rows, class S>
void add_products(Vec16* dots, float* dweight, S* dinp, const S* dout, const S* inp, const float* weight,
                  const float* rstd, int64_t C) {
  Vec16 dot[rows] = {};
  for_vectors(0, C, [&](int64_t c, auto part) {
    Vec16 dw, w, dy, x;
    fetch_to_write<rows>(dinp, C, c);
    if (gain) load(dw, dweight + c, part), load(w, weight + c, part);
    for (int64_t n = 0; n < rows; ++n) {
      load(dy, dout + n * C + c, part);
      load(x, inp + n * C + c, part);
      const Vec16 g = dy * x;
      dot[n] += gain ? g * w : g;
      if (gain) dw += g * rstd[n];
    }
    if (gain) store(dweight + c, dw, part);
  });
  for (int64_t n = 0; n < rows; ++n) dots[n] = dot[n];
}

template <bool gain, bool accumulate, int64_t rows, class S>
void write_gradients(S* dinp, const S* dout, const S* inp, const float* weight, const float* rstd, const float* mean,
                     int64_t C) {
  for_vectors(0, C, [=](int64_t c, auto part) {
    Vec16 w, dy, x;
    if (gain) load(w, weight + c, part);
    for (int64_t n = 0; n < rows; ++n) {
      load(dy, dout + n * C + c, part);
      load(x, inp + n * C + c, part);
      const Vec16 d = rstd[n] * ((gain ? dy * w : dy) - x * mean[n]);
      store_or_accumulate<accumulate>(dinp + n * C + c, d, part);
    }
  });
}

// At most max_rows.
template <bool gain, bool accumulate, class S>
void backward_rows(S* dinp, float* dweight, const S* dout, const S* inp, const float* weight, const float* rstd,
                   int64_t rows, int64_t C) {
  Vec16 lanes[max_rows] = {}, sums;
  by_fours(rows, [&](int64_t n, auto count) {
    add_products<gain, count>(lanes + n, dweight, dinp + n * C, dout + n * C, inp + n * C, weight, rstd + n, C);
  });
  sums_of_lanes(sums, lanes);
  float mean[max_rows];
  store(mean, sums);
  for (int64_t n = 0; n < rows; ++n) mean[n] *= rstd[n] * rstd[n] / static_cast<float>(C);
  by_fours(rows, [&](int64_t n, auto count) {
    write_gradients<gain, accumulate, count>(dinp + n * C, dout + n * C, inp + n * C, weight, rstd + n, mean + n, C);
  });
}

template <bool gain, bool accumulate, class S>
void rmsnorm_backward_cpu(S* dinp, float* dweight, const S* dout, const S* inp, const float* weight, const float* rstd,
                          int64_t rows, int64_t C) {
  // One partial dweight per block of rows; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(rows / 64, 1, 64);
  float* partial = gain ? scratch_f32(static_cast<size_t>(blocks * C)) : nullptr;
  parallel_for(blocks, rows * C <= 32768 ? blocks : 1, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      float* dw = gain ? partial + b * C : nullptr;
      if (gain) std::fill(dw, dw + C, 0.f);
      for_row_groups(rows * b / blocks, rows * (b + 1) / blocks, C, [=](int64_t n, int64_t count) {
        backward_rows<gain, accumulate>(dinp + n * C, dw, dout + n * C, inp + n * C, weight, rstd + n, count, C);
      });
    }
  });
  for (int64_t b = 0; b < blocks && gain; ++b) {
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) dweight[c] += partial[b * C + c];
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, double eps,
                     Stream stream) {
  const auto [rows, C] = rows_of(inp);
  const bool gain = weight.data != nullptr;
  CHECK_SHAPES(out.numel() == rows * C && rstd.numel() == rows && (!gain || weight.numel() == C), out, rstd, inp,
               weight);
  dispatch(
      stream, out.dtype, [&] { rmsnorm_forward_cuda(out, rstd, inp, weight, C, eps); },
      [&]<class S>(S) {
        with_flag(gain, [&](auto with_gain) {
          rmsnorm_forward_cpu<with_gain>(out.as<S>(), rstd.as<float>(), inp.as<S>(), data_or_null<float>(weight), rows,
                                         C, static_cast<float>(eps));
        });
      },
      [&]<class T>(T) {
        rmsnorm_forward_ref(out.as<T>(), rstd.as<T>(), inp.as<T>(), data_or_null<T>(weight), rows, C, eps);
      });
}

void rmsnorm_backward(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                      const Tensor& weight, const Tensor& rstd, Stream stream) {
  const auto [rows, C] = rows_of(inp);
  const bool gain = weight.data != nullptr;
  CHECK_SHAPES(dinp.numel() == rows * C && dout.numel() == rows * C && rstd.numel() == rows, dinp, dout, inp, rstd);
  CHECK_SHAPES(gain ? weight.numel() == C && dweight.numel() == C : dweight.data == nullptr, dweight, inp, weight);
  dispatch(
      stream, dinp.dtype, [&] { rmsnorm_backward_cuda(dinp, dweight, dout, inp, weight, rstd, C); },
      [&]<class S>(S) {
        with_flag(gain, [&](auto with_gain) {
          with_flag(dinp.accumulate, [&](auto accumulate) {
            rmsnorm_backward_cpu<with_gain, accumulate>(dinp.as<S>(), data_or_null<float>(dweight), dout.as<S>(),
                                                        inp.as<S>(), data_or_null<float>(weight), rstd.as<float>(),
                                                        rows, C);
          });
        });
      },
      [&]<class T>(T) {
        rmsnorm_backward_ref(dinp.as<T>(), data_or_null<T>(dweight), dout.as<T>(), inp.as<T>(), data_or_null<T>(weight),
                             rstd.as<T>(), rows, C, dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct RmsNorm : Node {  // in[1]: the gain, if it has one
  double eps = 0;
  std::string setting() const override { return str(eps); }
  const char* op() const override { return "rmsnorm"; }
  void forward(const Step&, Stream stream) override {
    rmsnorm_forward(output(), saved[0]->tensor, input(0), in.size() > 1 ? input(1) : Tensor{}, eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    const bool gain = in.size() > 1;
    rmsnorm_backward(gradient(0), gain ? dinput(1) : Tensor{}, doutput(), input(0), gain ? input(1) : Tensor{},
                     saved[0]->tensor, stream);
  }
};

}  // namespace

Value* rmsnorm(Tape& t, const std::string& name, Value* inp, Value* weight, double eps) {
  const int64_t C = inp->shape[inp->shape.rank - 1];
  CHECK_THAT(weight == nullptr || weight->shape[0] == C, name, ": inp ", inp->shape.str(), " weight ",
             weight->shape.str());
  auto node = make_node<RmsNorm>(name, {inp}, {t.activation(name, inp->shape)});
  if (weight != nullptr) node->in.push_back(weight);
  node->eps = eps;
  node->saved = {t.statistic(name + ".rstd", Shape{inp->shape.numel() / C})};
  node->backward_reads = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
