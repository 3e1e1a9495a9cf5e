#include "kernels/block/top_k.h"

#include <functional>

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t top_k_grain = 16384;

// Positive floats are ordered as their bits are, so that one integer holds an entry and, inverted, its index.
uint64_t top_k_key(float x, int64_t m) {
  const uint32_t bits = x != x ? 0x7FFFFFFFu : std::bit_cast<uint32_t>(x);
  return static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(m));
}

// The keys of at most k entries come first in `keys`, which has room for 2 k and is cut to k whenever it is full: what
// is not above the k-th largest so far is passed over. Returns how many they are.
int64_t largest_keys(uint64_t* keys, const float* inp, int64_t width, int64_t k) {
  float least = 0;
  int64_t count = 0;
  const auto cut = [&] {
    std::nth_element(keys, keys + k - 1, keys + count, std::greater<>());
    count = k;
    least = std::bit_cast<float>(static_cast<uint32_t>(keys[k - 1] >> 32));
  };
  for (int64_t begin = 0; begin < width; begin += 16) {
    const int64_t end = std::min(width, begin + 16);
    int above = 0;
#pragma omp simd reduction(+ : above)
    for (int64_t m = begin; m < end; ++m) above += !(inp[m] <= least);
    for (int64_t m = begin; above > 0 && m < end; ++m) {
      if (inp[m] <= least || inp[m] <= 0) continue;  // the second where `least` is NaN
      keys[count++] = top_k_key(inp[m], m);
      if (count == 2 * k) cut();
    }
  }
  if (count > k) cut();
  return count;
}

template <class S>
void top_k_forward_cpu(S* out, const S* inp, int64_t rows, int64_t width, int64_t k) {
  parallel_for(rows, top_k_grain / width, [=](int64_t begin, int64_t end) {
    auto* keys = reinterpret_cast<uint64_t*>(scratch_f32(static_cast<size_t>(4 * k), 1));
    float* floats = scratch_f32(static_cast<size_t>(width), 3);
    for (int64_t n = begin; n < end; ++n) {
      const S* row = inp + n * width;
      const int64_t count = largest_keys(keys, read_floats(floats, row, width), width, k);
      std::fill_n(out + n * width, width, S(0.f));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t m = 0xFFFFFFFFu - static_cast<uint32_t>(keys[i]);
        out[n * width + m] = row[m];
      }
    }
  });
}

template <bool accumulate, class S>
void top_k_backward_cpu(S* dinp, const S* dout, const S* out, int64_t n) {
  for_elements(n, top_k_grain, [=](int64_t i, auto part) {
    Vec16 y, dy;
    load(y, out + i, part);
    load(dy, dout + i, part);
    put_where_less(y, Vec16{}, y, dy);
    store_or_accumulate<accumulate>(dinp + i, y, part);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void top_k_forward(const Tensor& out, const Tensor& inp, int64_t k, Stream stream) {
  const auto [rows, width] = rows_of(inp);
  CHECK_SHAPES(out.numel() == inp.numel(), out, inp);
  CHECK_THAT(k >= 1 && k <= width && width < int64_t{1} << 32, "the ", k, " largest of ", width);
  dispatch(
      stream, inp.dtype, [&] { top_k_forward_cuda(out, inp, width, k); },
      [&]<class S>(S) { top_k_forward_cpu(out.as<S>(), inp.as<S>(), rows, width, k); },
      [&]<class T>(T) { top_k_forward_ref(out.as<T>(), inp.as<T>(), rows, width, k); });
}

void top_k_backward(const Grad& dinp, const Tensor& dout, const Tensor& out, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_SHAPES(dout.numel() == n && out.numel() == n, dinp, dout, out);
  dispatch(
      stream, dinp.dtype, [&] { top_k_backward_cuda(dinp, dout, out); },
      [&]<class S>(S) {
        with_flag(dinp.accumulate,
                  [&](auto accumulate) { top_k_backward_cpu<accumulate>(dinp.as<S>(), dout.as<S>(), out.as<S>(), n); });
      },
      [&]<class T>(T) { top_k_backward_ref(dinp.as<T>(), dout.as<T>(), out.as<T>(), n, dinp.accumulate); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct TopK : Node {
  int64_t k = 1;
  const char* op() const override { return "top_k"; }
  void forward(const Step&, Stream stream) override { top_k_forward(output(), input(0), k, stream); }
  void backward(const Step&, Stream stream) override { top_k_backward(gradient(0), doutput(), output(), stream); }
};

}  // namespace

Value* top_k(Tape& t, const std::string& name, Value* inp, int64_t k) {
  CHECK_THAT(k >= 1 && k <= inp->shape[inp->shape.rank - 1], name, ": the ", k, " largest of ", inp->shape.str());
  auto node = make_node<TopK>(name, {inp}, {t.activation(name, inp->shape)});
  node->k = k;
  node->backward_reads = {node->out[0]};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
