#include "kernels/block/rope.h"

#include <cmath>

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

// One token: out and inp are (H, 2h), row is (2h).
template <bool accumulate, class S>
void rotate_token(S* out, const S* inp, const float* row, int64_t H, int64_t h, float sign) {
  for (int64_t head = 0; head < H; ++head) {
    const S* x = inp + head * 2 * h;
    S* y = out + head * 2 * h;
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) {
      const float c = row[j], s = sign * row[j + h], x0 = x[j], x1 = x[j + h];
      const float y0 = x0 * c - x1 * s, y1 = x1 * c + x0 * s;
      y[j] = accumulate ? y[j] + y0 : y0;
      y[j + h] = accumulate ? y[j + h] + y1 : y1;
    }
  }
}

// The same for heads whose halves are whole vectors.
template <bool accumulate, class S>
void rotate_long_heads(S* out, const S* inp, const float* row, int64_t H, int64_t h, float sign) {
  Vec16 c, s, x0, x1;
  for (int64_t j = 0; j < h; j += 16) {
    load(c, row + j);
    load(s, row + h + j);
    s *= sign;
    for (int64_t i = j; i < H * 2 * h; i += 2 * h) {
      load(x0, inp + i);
      load(x1, inp + i + h);
      const Vec16 y0 = x0 * c - x1 * s, y1 = x1 * c + x0 * s;
      store_or_accumulate<accumulate>(out + i, y0, Whole{});
      store_or_accumulate<accumulate>(out + i + h, y1, Whole{});
    }
  }
}

// And for heads of 8 and of 16 numbers, two or one in a vector: cosines * x + (-sines, sines) * x with its halves
// exchanged.
template <bool accumulate, int64_t D, class S>
void rotate_short_heads(S* out, const S* inp, const float* row, int64_t H, float sign) {
  Vec16 c, s;
  Vec8 low, high;
  if constexpr (D == 16) {
    load(low, row), load(high, row + 8);
    join(c, low, low), join(s, -high, high);
  } else {
    Vec8 both;
    load(both, row);
    low = __builtin_shufflevector(both, both, 0, 1, 2, 3, 0, 1, 2, 3);
    high = __builtin_shufflevector(-both, both, 4, 5, 6, 7, 12, 13, 14, 15);
    join(c, low, low), join(s, high, high);
  }
  s *= sign;
  for_vectors(0, H * D, [=](int64_t i, auto part) {
    Vec16 x, exchanged;
    Vec8 x0, x1;
    load(x, inp + i, part);
    split(x0, x1, x);
    if constexpr (D == 16) {
      join(exchanged, x1, x0);
    } else {
      x0 = __builtin_shufflevector(x0, x0, 4, 5, 6, 7, 0, 1, 2, 3);
      x1 = __builtin_shufflevector(x1, x1, 4, 5, 6, 7, 0, 1, 2, 3);
      join(exchanged, x0, x1);
    }
    store_or_accumulate<accumulate>(out + i, x * c + exchanged * s, part);
  });
}

// sign = 1 turns forward, -1 turns back.
template <bool accumulate, class S>
void rope_cpu(S* out, const S* inp, const float* table, const Shape& shape, int64_t pos, float sign) {
  const int64_t T = shape[1], H = shape[2], D = shape[3];
  parallel_for(shape[0] * T, 32768 / (H * D), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* row = table + (pos + n % T) * D;
      const S* x = inp + n * H * D;
      S* y = out + n * H * D;
      if (D == 8) rotate_short_heads<accumulate, 8>(y, x, row, H, sign);
      else if (D == 16) rotate_short_heads<accumulate, 16>(y, x, row, H, sign);
      else if (D % 32 == 0) rotate_long_heads<accumulate>(y, x, row, H, D / 2, sign);
      else rotate_token<accumulate>(y, x, row, H, D / 2, sign);
    }
  });
}

// Both entry points.
void turn(const Grad& out, const Tensor& inp, const Tensor& table, int64_t pos, float sign, Stream stream) {
  const int64_t T = inp.dim(1), H = inp.dim(2), D = inp.dim(3);
  CHECK_SHAPES(inp.shape.rank == 4 && out.shape == inp.shape && H * D > 0 && D % 2 == 0, out, inp);
  CHECK_THAT(table.shape.rank == 2 && table.dim(1) == D && pos >= 0 && pos + T <= table.dim(0), inp.str(), " table ",
             table.str(), " pos ", pos);
  dispatch(
      stream, out.dtype, [&] { rope_cuda(out, inp, table, pos, sign); },
      [&]<class S>(S) {
        with_flag(out.accumulate, [&](auto accumulate) {
          rope_cpu<accumulate>(out.as<S>(), inp.as<S>(), table.as<float>(), inp.shape, pos, sign);
        });
      },
      [&]<class X>(X) {
        const X *x = inp.as<X>(), *row = table.as<X>();
        if (sign > 0) rope_forward_ref(out.as<X>(), x, row, inp.dim(0), T, H, D, pos);
        else rope_backward_ref(out.as<X>(), x, row, inp.dim(0), T, H, D, pos, out.accumulate);
      });
}

}  // namespace

std::vector<double> rope_table(int64_t positions, const std::vector<double>& frequencies, double factor) {
  const auto h = static_cast<int64_t>(frequencies.size()), D = 2 * h;
  CHECK_THAT(positions >= 0 && D > 0, "rope_table: positions ", positions, " D ", D);
  std::vector<double> table(static_cast<size_t>(positions * D));
  for (int64_t j = 0; j < h; ++j) {
    const double w = frequencies[static_cast<size_t>(j)];
    for (int64_t t = 0; t < positions; ++t) {
      table[static_cast<size_t>(t * D + j)] = factor * std::cos(static_cast<double>(t) * w);
      table[static_cast<size_t>(t * D + j + h)] = factor * std::sin(static_cast<double>(t) * w);
    }
  }
  return table;
}

void rope_forward(const Tensor& out, const Tensor& inp, const Tensor& table, int64_t pos, Stream stream) {
  turn({out, false}, inp, table, pos, 1.f, stream);
}

void rope_backward(const Grad& dinp, const Tensor& dout, const Tensor& table, int64_t pos, Stream stream) {
  turn(dinp, dout, table, pos, -1.f, stream);
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Rope : Node {
  const char* op() const override { return "rope"; }
  void forward(const Step& step, Stream stream) override {
    rope_forward(output(), input(0), reads[0]->tensor, step.position, stream);
  }
  void backward(const Step&, Stream stream) override {
    rope_backward({dinput(0), false}, doutput(), reads[0]->tensor, 0, stream);  // in place: always set
  }
  bool in_place() const override { return true; }
};

}  // namespace

Value* rope_positions(Tape& t, int64_t count, const std::vector<double>& frequencies, double factor) {
  return t.constant("rope", Shape{count, 2 * static_cast<int64_t>(frequencies.size())},
                    rope_table(count, frequencies, factor));
}

Value* rope(Tape& t, const std::string& name, Value* inp, Value* table) {
  CHECK_THAT(inp->shape.rank == 4 && inp->shape[3] == table->shape[1], name, ": inp ", inp->shape.str(), " table ",
             table->shape.str());
  auto node = make_node<Rope>(name, {inp}, {t.activation(name, inp->shape)});
  node->reads = {table};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
