#include "kernels/block/swiglu.h"

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;

template <class S>
void swiglu_forward_cpu(S* out, const S* gate, const S* up, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 a, b;
    load(a, gate + i, part);
    load(b, up + i, part);
    Vec16 e = -a;
    exp_in_place(e);
    store(out + i, a / (1.f + e) * b, part);
  });
}

// All is read before anything is written: dgate may be gate, and dup up.
template <bool add_gate, bool add_up, class S>
void swiglu_backward_cpu(S* dgate, S* dup, const S* dout, const S* gate, const S* up, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 a, b, dy;
    load(a, gate + i, part);
    load(b, up + i, part);
    load(dy, dout + i, part);
    Vec16 e = -a;
    exp_in_place(e);
    const Vec16 s = 1.f / (1.f + e);
    const Vec16 dg = dy * b * s * (1.f + a * (e * s));  // e s is 1 - s without the cancellation
    const Vec16 du = dy * a * s;
    store_or_accumulate<add_gate>(dgate + i, dg, part);
    store_or_accumulate<add_up>(dup + i, du, part);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void swiglu_forward(const Tensor& out, const Tensor& gate, const Tensor& up, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(gate.numel() == n && up.numel() == n, out, gate, up);
  dispatch(
      stream, out.dtype, [&] { swiglu_forward_cuda(out, gate, up); },
      [&]<class S>(S) { swiglu_forward_cpu(out.as<S>(), gate.as<S>(), up.as<S>(), n); },
      [&]<class T>(T) { swiglu_forward_ref(out.as<T>(), gate.as<T>(), up.as<T>(), n); });
}

void swiglu_backward(const Grad& dgate, const Grad& dup, const Tensor& dout, const Tensor& gate, const Tensor& up,
                     Stream stream) {
  const int64_t n = dout.numel();
  CHECK_SHAPES(dgate.numel() == n && dup.numel() == n && gate.numel() == n && up.numel() == n, dgate, dup, dout, gate,
               up);
  dispatch(
      stream, dout.dtype, [&] { swiglu_backward_cuda(dgate, dup, dout, gate, up); },
      [&]<class S>(S) {
        with_flag(dgate.accumulate, [&](auto add_gate) {
          with_flag(dup.accumulate, [&](auto add_up) {
            swiglu_backward_cpu<add_gate, add_up>(dgate.as<S>(), dup.as<S>(), dout.as<S>(), gate.as<S>(), up.as<S>(),
                                                  n);
          });
        });
      },
      [&]<class T>(T) {
        swiglu_backward_ref(dgate.as<T>(), dup.as<T>(), dout.as<T>(), gate.as<T>(), up.as<T>(), n, dgate.accumulate,
                            dup.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Swiglu : Node {
  const char* op() const override { return "swiglu"; }
  void forward(const Step&, Stream stream) override { swiglu_forward(output(), input(0), input(1), stream); }
  void backward(const Step&, Stream stream) override {
    swiglu_backward(gradient(0), gradient(1), doutput(), input(0), input(1), stream);
  }
  bool grads_overwrite_inputs() const override { return true; }
};

}  // namespace

Value* swiglu(Tape& t, const std::string& name, Value* gate, Value* up) {
  CHECK_THAT(gate->shape == up->shape, name, ": gate ", gate->shape.str(), " up ", up->shape.str());
  auto node = make_node<Swiglu>(name, {gate, up}, {t.activation(name, gate->shape)});
  node->backward_reads = {gate, up};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
