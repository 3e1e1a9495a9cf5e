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

// Phi(x) of the approximation: 1 / (1 + exp(-2 u)), whose exponent is kept where exp has a float.
inline void tanh_phi(Vec16& phi, const Vec16& x) {
  Vec16 e = x * (x * x * -0.0713548163f - 1.59576912f);
  const Vec16 most = Vec16{} + 80.f;
  e = e > most ? most : e;
  exp_in_place(e);
  phi = 1.f / (1.f + e);
}

template <class S>
void tanh_forward_cpu(S* out, const S* inp, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x, phi;
    load(x, inp + i, part);
    tanh_phi(phi, x);
    store(out + i, x * phi, part);
  });
}

template <bool add, class S>
void tanh_backward_cpu(S* dinp, const S* dout, const S* inp, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x, dy, phi;
    load(x, inp + i, part);
    load(dy, dout + i, part);
    tanh_phi(phi, x);
    const Vec16 du = x * x * 0.214064449f + 1.59576912f;  // twice u's slope
    store_or_add<add>(dinp + i, dy * (phi + x * phi * (1.f - phi) * du), part);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void gelu_forward(const Tensor& out, const Tensor& inp, GeluKind kind, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(inp.numel() == n, out, inp);
  dispatch(
      stream, out.dtype, [&] { gelu_forward_cuda(out, inp, kind); },
      [&]<class S>(S) {
        if (kind == GeluKind::erf) gelu_forward_cpu(out.as<S>(), inp.as<S>(), n);
        else tanh_forward_cpu(out.as<S>(), inp.as<S>(), n);
      },
      [&]<class T>(T) { gelu_forward_ref(out.as<T>(), inp.as<T>(), n, kind); });
}

void gelu_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, GeluKind kind, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_SHAPES(dout.numel() == n && inp.numel() == n, dinp, dout, inp);
  dispatch(
      stream, dinp.dtype, [&] { gelu_backward_cuda(dinp, dout, inp, kind); },
      [&]<class S>(S) {
        with_flag(dinp.add, [&](auto add) {
          if (kind == GeluKind::erf) gelu_backward_cpu<add>(dinp.as<S>(), dout.as<S>(), inp.as<S>(), n);
          else tanh_backward_cpu<add>(dinp.as<S>(), dout.as<S>(), inp.as<S>(), n);
        });
      },
      [&]<class T>(T) { gelu_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), n, kind, dinp.add); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Gelu : Node {
  GeluKind kind = GeluKind::erf;
  const char* op() const override { return "gelu"; }
  void forward(const Step&, Stream stream) override { gelu_forward(output(), input(0), kind, stream); }
  void backward(const Step&, Stream stream) override { gelu_backward(gradient(0), doutput(), input(0), kind, stream); }
};

}  // namespace

Value* gelu(Tape& t, const std::string& name, Value* inp, GeluKind kind) {
  auto node = make_node<Gelu>(name, {inp}, {t.activation(name, inp->shape)});
  node->kind = kind;
  node->keep = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
