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

template <int64_t rows, class S>
void write_rows(S* out, const S* inp, const float* mean, const float* rstd, int64_t C) {
  for_vectors(0, C, [=](int64_t c, auto part) {
    for (int64_t n = 0; n < rows; ++n) {
      Vec16 x;
      load(x, inp + n * C + c, part);
      store(out + n * C + c, (x - mean[n]) * rstd[n], part);
    }
  });
}

// At most most_rows.
template <class S>
void forward_rows(S* out, float* mean, float* rstd, const S* inp, int64_t rows, int64_t C, float eps) {
  Vec16 lanes[most_rows] = {}, sums;
  float m[most_rows], r[most_rows];
  by_fours(rows,
           [&](int64_t n, auto count) { add_rows<false, count>(lanes + n, out + n * C, inp + n * C, nullptr, C); });
  sums_of_lanes(sums, lanes);
  store(m, sums / static_cast<float>(C));
  by_fours(rows, [&](int64_t n, auto count) { add_rows<true, count>(lanes + n, out + n * C, inp + n * C, m + n, C); });
  sums_of_lanes(sums, lanes);
  store(r, sums);
#pragma omp simd
  for (int64_t n = 0; n < most_rows; ++n) r[n] = 1.f / std::sqrt(r[n] / static_cast<float>(C) + eps);
  std::copy(m, m + rows, mean);
  std::copy(r, r + rows, rstd);
  by_fours(rows, [&](int64_t n, auto count) { write_rows<count>(out + n * C, inp + n * C, m + n, r + n, C); });
}

template <class S>
void layernorm_forward_cpu(S* out, float* mean, float* rstd, const S* inp, int64_t rows, int64_t C, float eps) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for_row_groups(begin, end, C, [=](int64_t n, int64_t count) {
      forward_rows(out + n * C, mean + n, rstd + n, inp + n * C, count, C, eps);
    });
  });
}

// ones and outs: the lanes of sum_c dout and of sum_c dout (inp - mean), a row each.
template <int64_t rows, class S>
void add_gradients(Vec16* ones, Vec16* outs, S* dinp, const S* dout, const S* inp, const float* mean, int64_t C) {
  Vec16 one[rows] = {}, along_out[rows] = {};
  for_vectors(0, C, [&](int64_t c, auto part) {
    fetch_to_write<rows>(dinp, C, c);
    for (int64_t n = 0; n < rows; ++n) {
      Vec16 dy, x;
      load(dy, dout + n * C + c, part);
      load(x, inp + n * C + c, part);
      one[n] += dy;
      along_out[n] += dy * (x - mean[n]);
    }
  });
  for (int64_t n = 0; n < rows; ++n) ones[n] = one[n], outs[n] = along_out[n];
}

template <bool add, int64_t rows, class S>
void write_gradients(S* dinp, const S* dout, const S* inp, const float* mean, const float* rstd, const float* along_one,
                     const float* along_out, int64_t C) {
  for_vectors(0, C, [=](int64_t c, auto part) {
    for (int64_t n = 0; n < rows; ++n) {
      Vec16 dy, x;
      load(dy, dout + n * C + c, part);
      load(x, inp + n * C + c, part);
      const Vec16 d = rstd[n] * (dy - along_one[n] - (x - mean[n]) * along_out[n]);
      store_or_add<add>(dinp + n * C + c, d, part);
    }
  });
}

// At most most_rows.
template <bool add, class S>
void backward_rows(S* dinp, const S* dout, const S* inp, const float* mean, const float* rstd, int64_t rows,
                   int64_t C) {
  Vec16 ones[most_rows] = {}, outs[most_rows] = {}, sums;
  by_fours(rows, [&](int64_t n, auto count) {
    add_gradients<count>(ones + n, outs + n, dinp + n * C, dout + n * C, inp + n * C, mean + n, C);
  });
  float along_one[most_rows], along_out[most_rows];
  sums_of_lanes(sums, ones);
  store(along_one, sums / static_cast<float>(C));
  sums_of_lanes(sums, outs);
  store(along_out, sums);
  for (int64_t n = 0; n < rows; ++n) along_out[n] *= rstd[n] * rstd[n] / static_cast<float>(C);
  by_fours(rows, [&](int64_t n, auto count) {
    write_gradients<add, count>(dinp + n * C, dout + n * C, inp + n * C, mean + n, rstd + n, along_one + n,
                                along_out + n, C);
  });
}

template <bool add, class S>
void layernorm_backward_cpu(S* dinp, const S* dout, const S* inp, const float* mean, const float* rstd, int64_t rows,
                            int64_t C) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for_row_groups(begin, end, C, [=](int64_t n, int64_t count) {
      backward_rows<add>(dinp + n * C, dout + n * C, inp + n * C, mean + n, rstd + n, count, C);
    });
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void layernorm_forward(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp, double eps,
                       Stream stream) {
  const auto [rows, C] = rows_of(inp);
  CHECK_SHAPES(out.numel() == rows * C && mean.numel() == rows && rstd.numel() == rows, out, mean, rstd, inp);
  dispatch(
      stream, out.dtype, [&] { layernorm_forward_cuda(out, mean, rstd, inp, C, eps); },
      [&]<class S>(S) {
        layernorm_forward_cpu(out.as<S>(), mean.as<float>(), rstd.as<float>(), inp.as<S>(), rows, C,
                              static_cast<float>(eps));
      },
      [&]<class T>(T) { layernorm_forward_ref(out.as<T>(), mean.as<T>(), rstd.as<T>(), inp.as<T>(), rows, C, eps); });
}

void layernorm_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, const Tensor& mean, const Tensor& rstd,
                        Stream stream) {
  const auto [rows, C] = rows_of(inp);
  CHECK_SHAPES(dinp.numel() == rows * C && dout.numel() == rows * C && mean.numel() == rows && rstd.numel() == rows,
               dinp, dout, inp, mean, rstd);
  dispatch(
      stream, dinp.dtype, [&] { layernorm_backward_cuda(dinp, dout, inp, mean, rstd, C); },
      [&]<class S>(S) {
        with_flag(dinp.add, [&](auto add) {
          layernorm_backward_cpu<add>(dinp.as<S>(), dout.as<S>(), inp.as<S>(), mean.as<float>(), rstd.as<float>(), rows,
                                      C);
        });
      },
      [&]<class T>(T) {
        layernorm_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), mean.as<T>(), rstd.as<T>(), rows, C, dinp.add);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct LayerNorm : Node {
  double eps = 0;
  const char* op() const override { return "layernorm"; }
  void forward(const Step&, Stream stream) override {
    layernorm_forward(output(), saved[0]->tensor, saved[1]->tensor, input(0), eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    layernorm_backward(gradient(0), doutput(), input(0), saved[0]->tensor, saved[1]->tensor, stream);
  }
};

}  // namespace

Value* layernorm(Tape& t, const std::string& name, Value* inp, double eps) {
  const Shape rows{inp->shape.numel() / inp->shape[inp->shape.rank - 1]};
  auto node = make_node<LayerNorm>(name, {inp}, {t.activation(name, inp->shape)});
  node->eps = eps;
  node->saved = {t.statistic(name + ".mean", rows), t.statistic(name + ".rstd", rows)};
  node->keep = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
