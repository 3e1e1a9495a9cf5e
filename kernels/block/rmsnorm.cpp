#include "kernels/block/rmsnorm.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

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

// At most most_rows.
template <bool gain, class S>
void forward_rows(S* out, float* rstd, const S* inp, const float* weight, int64_t rows, int64_t C, float eps) {
  Vec16 lanes[most_rows] = {}, sums;
  by_fours(rows, [&](int64_t n, auto count) { add_squares<count>(lanes + n, out + n * C, inp + n * C, C); });
  sums_of_lanes(sums, lanes);
  float r[most_rows];
  store(r, sums);
#pragma omp simd
  for (int64_t n = 0; n < most_rows; ++n) r[n] = 1.f / std::sqrt(r[n] / static_cast<float>(C) + eps);
  std::copy(r, r + rows, rstd);
  by_fours(rows, [&](int64_t n, auto count) { scale_rows<gain, count>(out + n * C, r + n, inp + n * C, weight, C); });
}

template <class S, bool gain>
void rmsnorm_forward_cpu(S* out, float* rstd, const S* inp, const float* weight, int64_t rows, int64_t C, float eps) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin, count; n < end; n += count) {
      count = std::min(rows_at_once(C), end - n);
      forward_rows<gain>(out + n * C, rstd + n, inp + n * C, weight, count, C, eps);
    }
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

template <bool gain, bool acc, int64_t rows, class S>
void write_gradients(S* dinp, const S* dout, const S* inp, const float* weight, const float* rstd, const float* mean,
                     int64_t C) {
  for_vectors(0, C, [=](int64_t c, auto part) {
    Vec16 w, dy, x, before;
    if (gain) load(w, weight + c, part);
    for (int64_t n = 0; n < rows; ++n) {
      load(dy, dout + n * C + c, part);
      load(x, inp + n * C + c, part);
      Vec16 d = rstd[n] * ((gain ? dy * w : dy) - x * mean[n]);
      if (acc) load(before, dinp + n * C + c, part), d += before;
      store(dinp + n * C + c, d, part);
    }
  });
}

// At most most_rows.
template <bool gain, bool acc, class S>
void backward_rows(S* dinp, float* dweight, const S* dout, const S* inp, const float* weight, const float* rstd,
                   int64_t rows, int64_t C) {
  Vec16 lanes[most_rows] = {}, sums;
  by_fours(rows, [&](int64_t n, auto count) {
    add_products<gain, count>(lanes + n, dweight, dinp + n * C, dout + n * C, inp + n * C, weight, rstd + n, C);
  });
  sums_of_lanes(sums, lanes);
  float mean[most_rows];
  store(mean, sums);
  for (int64_t n = 0; n < rows; ++n) mean[n] *= rstd[n] * rstd[n] / static_cast<float>(C);
  by_fours(rows, [&](int64_t n, auto count) {
    write_gradients<gain, acc, count>(dinp + n * C, dout + n * C, inp + n * C, weight, rstd + n, mean + n, C);
  });
}

template <class S, bool gain, bool acc>
void rmsnorm_backward_cpu(S* dinp, float* dweight, const S* dout, const S* inp, const float* weight, const float* rstd,
                          int64_t rows, int64_t C) {
  // One partial dweight per block of rows; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(rows / 64, 1, 64);
  float* partial = gain ? scratch_f32(static_cast<size_t>(blocks * C)) : nullptr;
  parallel_for(blocks, rows * C <= 32768 ? blocks : 1, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      float* dw = gain ? partial + b * C : nullptr;
      if (gain) std::fill(dw, dw + C, 0.f);
      const int64_t last = rows * (b + 1) / blocks;
      for (int64_t n = rows * b / blocks, count; n < last; n += count) {
        count = std::min(rows_at_once(C), last - n);
        backward_rows<gain, acc>(dinp + n * C, dw, dout + n * C, inp + n * C, weight, rstd + n, count, C);
      }
    }
  });
  for (int64_t b = 0; b < blocks && gain; ++b) {
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) dweight[c] += partial[b * C + c];
  }
}

int64_t width_of(const Tensor& inp, const Tensor& weight) {
  if (weight.data != nullptr) return weight.numel();
  CHECK_THAT(inp.shape.rank >= 1, "rmsnorm: inp ", inp.str());
  return inp.dim(inp.shape.rank - 1);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, double eps,
                     Stream stream) {
  const int64_t C = width_of(inp, weight), rows = rstd.numel();
  CHECK_THAT(inp.numel() == rows * C && out.numel() == rows * C, "rmsnorm_forward: out ", out.str(), " rstd ",
             rstd.str(), " inp ", inp.str(), " weight ", weight.str());
  if (stream.backend == Backend::cuda) return rmsnorm_forward_cuda(out, rstd, inp, weight, C, eps);
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using S = decltype(storage);
      auto forward = weight.data != nullptr ? rmsnorm_forward_cpu<S, true> : rmsnorm_forward_cpu<S, false>;
      forward(out.as<S>(), rstd.as<float>(), inp.as<S>(), data_or_null<float>(weight), rows, C,
              static_cast<float>(eps));
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    rmsnorm_forward_ref(out.as<T>(), rstd.as<T>(), inp.as<T>(), data_or_null<T>(weight), rows, C, eps);
  });
}

void rmsnorm_backward(const Tensor& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                      const Tensor& weight, const Tensor& rstd, bool acc, Stream stream) {
  const int64_t C = width_of(inp, weight), rows = rstd.numel();
  CHECK_THAT(inp.numel() == rows * C && dinp.numel() == rows * C && dout.numel() == rows * C, "rmsnorm_backward: dinp ",
             dinp.str(), " dout ", dout.str(), " inp ", inp.str(), " weight ", weight.str());
  const bool gain = weight.data != nullptr;
  CHECK_THAT(gain ? dweight.numel() == C : dweight.data == nullptr, "rmsnorm_backward: dweight ", dweight.str(),
             " weight ", weight.str());
  if (stream.backend == Backend::cuda) return rmsnorm_backward_cuda(dinp, dweight, dout, inp, weight, rstd, C, acc);
  if (stream.backend == Backend::cpu)
    return with_storage(dinp.dtype, [&](auto storage) {
      using S = decltype(storage);
      auto backward = gain  ? acc ? rmsnorm_backward_cpu<S, true, true> : rmsnorm_backward_cpu<S, true, false>
                       : acc ? rmsnorm_backward_cpu<S, false, true>
                            : rmsnorm_backward_cpu<S, false, false>;
      backward(dinp.as<S>(), data_or_null<float>(dweight), dout.as<S>(), inp.as<S>(), data_or_null<float>(weight),
               rstd.as<float>(), rows, C);
    });
  with_real(dinp.dtype, [&](auto real) {
    using T = decltype(real);
    rmsnorm_backward_ref(dinp.as<T>(), data_or_null<T>(dweight), dout.as<T>(), inp.as<T>(), data_or_null<T>(weight),
                         rstd.as<T>(), rows, C, acc);
  });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct RmsNorm : Node {  // in[1]: the gain, if it has one
  double eps = 0;
  const char* op() const override { return "rmsnorm"; }
  void forward(const Step&, Stream stream) override {
    rmsnorm_forward(output(), saved[0]->tensor, input(0), in.size() > 1 ? input(1) : Tensor{}, eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    const bool gain = in.size() > 1;
    rmsnorm_backward(dinput(0), gain ? dinput(1) : Tensor{}, doutput(), input(0), gain ? input(1) : Tensor{},
                     saved[0]->tensor, acc[0], stream);
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
  node->keep = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
