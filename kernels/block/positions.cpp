#include "kernels/block/positions.h"

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

template <class S>
void positions_forward_cpu(S* out, const S* inp, const float* weight, int64_t rows, int64_t T, int64_t C) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for_vectors(0, C, [=](int64_t c, auto part) {
        Vec16 x, p;
        load(x, inp + n * C + c, part);
        load(p, weight + n % T * C + c, part);
        store(out + n * C + c, x + p, part);
      });
  });
}

template <class S>
void positions_backward_cpu(float* dweight, const S* dout, int64_t B, int64_t T, int64_t C) {
  parallel_for(T, 32768 / (B * C), [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t b = 0; b < B; ++b)
        for_vectors(0, C, [=](int64_t c, auto part) {
          Vec16 x, sum;
          load(x, dout + (b * T + t) * C + c, part);
          load(sum, dweight + t * C + c, part);
          store(dweight + t * C + c, sum + x, part);
        });
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void positions_forward(const Tensor& out, const Tensor& inp, const Tensor& weight, int64_t pos, Stream stream) {
  CHECK_SHAPES(inp.shape.rank == 3 && out.shape == inp.shape && weight.shape.rank == 2 && weight.dim(1) == inp.dim(2),
               out, inp, weight);
  const int64_t B = inp.dim(0), T = inp.dim(1), C = inp.dim(2);
  CHECK_THAT(pos >= 0 && pos + T <= weight.dim(0), T, " positions from ", pos, " of ", weight.dim(0));
  dispatch(
      stream, out.dtype, [&] { positions_forward_cuda(out, inp, weight, pos); },
      [&]<class S>(S) { positions_forward_cpu(out.as<S>(), inp.as<S>(), weight.as<float>() + pos * C, B * T, T, C); },
      [&]<class X>(X) { positions_forward_ref(out.as<X>(), inp.as<X>(), weight.as<X>(), B, T, C, pos); });
}

void positions_backward(const Tensor& dweight, const Tensor& dout, Stream stream) {
  CHECK_SHAPES(
      dout.shape.rank == 3 && dweight.shape.rank == 2 && dweight.dim(1) == dout.dim(2) && dout.dim(1) <= dweight.dim(0),
      dweight, dout);
  const int64_t B = dout.dim(0), T = dout.dim(1), C = dout.dim(2);
  dispatch(
      stream, dout.dtype, [&] { positions_backward_cuda(dweight, dout); },
      [&]<class S>(S) { positions_backward_cpu(dweight.as<float>(), dout.as<S>(), B, T, C); },
      [&]<class X>(X) { positions_backward_ref(dweight.as<X>(), dout.as<X>(), B, T, C); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Positions : Node {
  const char* op() const override { return "positions"; }
  void forward(const Step& step, Stream stream) override {
    positions_forward(output(), input(0), input(1), step.position, stream);
  }
  void backward(const Step&, Stream stream) override { positions_backward(dinput(1), doutput(), stream); }
  bool in_place() const override { return true; }
};

}  // namespace

Value* positions(Tape& t, const std::string& name, Value* inp, Value* weight) {
  CHECK_THAT(inp->shape.rank == 3 && inp->shape[2] == weight->shape[1] && inp->shape[1] <= weight->shape[0], name,
             ": inp ", inp->shape.str(), " weight ", weight->shape.str());
  return t.record(make_node<Positions>(name, {inp, weight}, {t.activation(name, inp->shape)}));
}

}  // namespace ops
}  // namespace crossply
