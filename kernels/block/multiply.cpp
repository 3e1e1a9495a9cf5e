#include "kernels/block/multiply.h"

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;

template <class S>
void multiply_forward_cpu(S* out, const S* a, const S* b, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x, y;
    load(x, a + i, part);
    load(y, b + i, part);
    store(out + i, x * y, part);
  });
}

// All is read before anything is written: da may be a, and db b.
template <bool add_a, bool add_b, class S>
void multiply_backward_cpu(S* da, S* db, const S* dout, const S* a, const S* b, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x, y, d;
    load(x, a + i, part);
    load(y, b + i, part);
    load(d, dout + i, part);
    store_or_accumulate<add_a>(da + i, d * y, part);
    store_or_accumulate<add_b>(db + i, d * x, part);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void multiply_forward(const Tensor& out, const Tensor& a, const Tensor& b, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(a.numel() == n && b.numel() == n, out, a, b);
  dispatch(
      stream, out.dtype, [&] { multiply_forward_cuda(out, a, b); },
      [&]<class S>(S) { multiply_forward_cpu(out.as<S>(), a.as<S>(), b.as<S>(), n); },
      [&]<class T>(T) { multiply_forward_ref(out.as<T>(), a.as<T>(), b.as<T>(), n); });
}

void multiply_backward(const Grad& da, const Grad& db, const Tensor& dout, const Tensor& a, const Tensor& b,
                       Stream stream) {
  const int64_t n = dout.numel();
  CHECK_SHAPES(da.numel() == n && db.numel() == n && a.numel() == n && b.numel() == n, da, db, dout, a, b);
  dispatch(
      stream, dout.dtype, [&] { multiply_backward_cuda(da, db, dout, a, b); },
      [&]<class S>(S) {
        with_flag(da.accumulate, [&](auto add_a) {
          with_flag(db.accumulate, [&](auto add_b) {
            multiply_backward_cpu<add_a, add_b>(da.as<S>(), db.as<S>(), dout.as<S>(), a.as<S>(), b.as<S>(), n);
          });
        });
      },
      [&]<class T>(T) {
        multiply_backward_ref(da.as<T>(), db.as<T>(), dout.as<T>(), a.as<T>(), b.as<T>(), n, da.accumulate,
                              db.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Multiply : Node {
  const char* op() const override { return "multiply"; }
  void forward(const Step&, Stream stream) override { multiply_forward(output(), input(0), input(1), stream); }
  void backward(const Step&, Stream stream) override {
    multiply_backward(gradient(0), gradient(1), doutput(), input(0), input(1), stream);
  }
  bool grads_overwrite_inputs() const override { return true; }
};

}  // namespace

Value* multiply(Tape& t, const std::string& name, Value* a, Value* b) {
  CHECK_THAT(a->shape.numel() == b->shape.numel(), name, ": ", a->shape.str(), " and ", b->shape.str());
  auto node = make_node<Multiply>(name, {a, b}, {t.activation(name, a->shape)});
  node->backward_reads = {a, b};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
