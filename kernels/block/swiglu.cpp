#include "kernels/block/swiglu.h"

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;

template <class S>
void swiglu_forward_cpu(S* out, const S* gate, const S* up, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
    for_vectors(begin, end, [=](int64_t i, auto part) {
      Vec16 a, b;
      load(a, gate + i, part);
      load(b, up + i, part);
      Vec16 e = -a;
      exp_in_place(e);
      store(out + i, a / (1.f + e) * b, part);
    });
  });
}

template <class S, bool acc_gate, bool acc_up>
void swiglu_backward_cpu(S* dgate, S* dup, const S* dout, const S* gate, const S* up, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
    for_vectors(begin, end, [=](int64_t i, auto part) {
      Vec16 a, b, dy, before;
      load(a, gate + i, part);
      load(b, up + i, part);
      load(dy, dout + i, part);
      Vec16 e = -a;
      exp_in_place(e);
      const Vec16 s = 1.f / (1.f + e);
      Vec16 dg = dy * b * s * (1.f + a * (e * s));  // e s is 1 - s without the cancellation
      Vec16 du = dy * a * s;
      if (acc_gate) load(before, dgate + i, part), dg += before;
      store(dgate + i, dg, part);
      if (acc_up) load(before, dup + i, part), du += before;
      store(dup + i, du, part);
    });
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void swiglu_forward(const Tensor& out, const Tensor& gate, const Tensor& up, Stream stream) {
  const int64_t n = out.numel();
  CHECK_THAT(gate.numel() == n && up.numel() == n, "swiglu_forward: out ", out.str(), " gate ", gate.str(), " up ",
             up.str());
  if (stream.backend == Backend::cuda) return swiglu_forward_cuda(out, gate, up);
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using S = decltype(storage);
      swiglu_forward_cpu(out.as<S>(), gate.as<S>(), up.as<S>(), n);
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    swiglu_forward_ref(out.as<T>(), gate.as<T>(), up.as<T>(), n);
  });
}

void swiglu_backward(const Tensor& dgate, const Tensor& dup, const Tensor& dout, const Tensor& gate, const Tensor& up,
                     bool acc_gate, bool acc_up, Stream stream) {
  const int64_t n = dout.numel();
  CHECK_THAT(dgate.numel() == n && dup.numel() == n && gate.numel() == n && up.numel() == n, "swiglu_backward: dgate ",
             dgate.str(), " dup ", dup.str(), " dout ", dout.str(), " gate ", gate.str(), " up ", up.str());
  if (stream.backend == Backend::cuda) return swiglu_backward_cuda(dgate, dup, dout, gate, up, acc_gate, acc_up);
  if (stream.backend == Backend::cpu)
    return with_storage(dout.dtype, [&](auto storage) {
      using S = decltype(storage);
      auto backward = acc_gate ? acc_up ? swiglu_backward_cpu<S, true, true> : swiglu_backward_cpu<S, true, false>
                      : acc_up ? swiglu_backward_cpu<S, false, true>
                               : swiglu_backward_cpu<S, false, false>;
      backward(dgate.as<S>(), dup.as<S>(), dout.as<S>(), gate.as<S>(), up.as<S>(), n);
    });
  with_real(dout.dtype, [&](auto real) {
    using T = decltype(real);
    swiglu_backward_ref(dgate.as<T>(), dup.as<T>(), dout.as<T>(), gate.as<T>(), up.as<T>(), n, acc_gate, acc_up);
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
    swiglu_backward(dinput(0), dinput(1), doutput(), input(0), input(1), acc[0], acc[1], stream);
  }
};

}  // namespace

Value* swiglu(Tape& t, const std::string& name, Value* gate, Value* up) {
  CHECK_THAT(gate->shape == up->shape, name, ": gate ", gate->shape.str(), " up ", up->shape.str());
  auto node = make_node<Swiglu>(name, {gate, up}, {t.activation(name, gate->shape)});
  node->keep = {gate, up};
  node->grads_over_inputs = true;
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
