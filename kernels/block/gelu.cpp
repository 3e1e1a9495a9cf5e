#include "kernels/block/gelu.h"

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;

// z = |x|, at most 12, where Phi(-z) is 2e-33: farther out come denormal numbers, which are slow. NaN stays NaN.
struct Tail {
  Vec16 z, area, bell;
};
inline void normal_tail(Tail& tail, const Vec16& x) {
  const Vec16 most = Vec16{} + 12.f;
  Vec16 z = x < 0.f ? -x : x;
  z = z > most ? most : z;
  const Vec16 t = 1.f / (1.f + 0.34f * z);
  Vec16 q, bell = -0.5f * z * z;
  tail_polynomial<Vec16>(q, t - 0.5f);
  exp_in_place(bell);
  tail = {z, bell * t * q, bell};
}

template <class S>
void gelu_forward_cpu(S* out, const S* inp, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x;
    Tail tail;
    load(x, inp + i, part);
    normal_tail(tail, x);
    const Vec16 ramp = x < 0.f ? Vec16{} : x;
    store(out + i, ramp - tail.z * tail.area, part);
  });
}

template <bool add, class S>
void gelu_backward_cpu(S* dinp, const S* dout, const S* inp, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x, dy;
    Tail tail;
    load(x, inp + i, part);
    load(dy, dout + i, part);
    normal_tail(tail, x);
    const Vec16 slope = tail.area - tail.z * tail.bell * 0.398942280f;  // at -z; at z it is 1 minus that
    store_or_add<add>(dinp + i, dy * (x < 0.f ? slope : 1.f - slope), part);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void gelu_forward(const Tensor& out, const Tensor& inp, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(inp.numel() == n, out, inp);
  dispatch(
      stream, out.dtype, [&] { gelu_forward_cuda(out, inp); },
      [&]<class S>(S) { gelu_forward_cpu(out.as<S>(), inp.as<S>(), n); },
      [&]<class T>(T) { gelu_forward_ref(out.as<T>(), inp.as<T>(), n); });
}

void gelu_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_SHAPES(dout.numel() == n && inp.numel() == n, dinp, dout, inp);
  dispatch(
      stream, dinp.dtype, [&] { gelu_backward_cuda(dinp, dout, inp); },
      [&]<class S>(S) {
        with_flag(dinp.add, [&](auto add) { gelu_backward_cpu<add>(dinp.as<S>(), dout.as<S>(), inp.as<S>(), n); });
      },
      [&]<class T>(T) { gelu_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), n, dinp.add); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Gelu : Node {
  const char* op() const override { return "gelu"; }
  void forward(const Step&, Stream stream) override { gelu_forward(output(), input(0), stream); }
  void backward(const Step&, Stream stream) override { gelu_backward(gradient(0), doutput(), input(0), stream); }
};

}  // namespace

Value* gelu(Tape& t, const std::string& name, Value* inp) {
  auto node = make_node<Gelu>(name, {inp}, {t.activation(name, inp->shape)});
  node->keep = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
