#include "kernels/block/gelu.h"

#include "engine/node.h"
#include "kernels/block/fused.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;

// z = |x|, at most 12, or 9.9 by tanh, where Phi(-z) is 2e-33 or 1e-37: farther out come denormal numbers, which are
// slow. area = Phi(-z), moment = z phi(z). NaN stays NaN.
struct Tail {
  Vec16 z, area, moment;
};
template <GeluKind kind>
inline void tail_of(Tail& tail, const Vec16& x) {
  const Vec16 most = Vec16{} + (kind == GeluKind::erf ? 12.f : 9.9f);
  Vec16 z = x;
  put_where_less(z, x, Vec16{}, -x);
  put_where_less(z, most, z, most);
  if constexpr (kind == GeluKind::erf) {
    const Vec16 t = 1.f / (1.f + 0.34f * z);
    Vec16 q, bell = -0.5f * z * z;
    tail_polynomial<Vec16>(q, t - 0.5f);
    exp_in_place(bell);
    tail = {z, bell * t * q, z * bell * 0.398942280f};
  } else {
    Vec16 e, slope;
    tanh_parts<Vec16>(e, slope, z);
    exp_in_place(e);
    const Vec16 r = 1.f / (1.f + e), area = e * r;
    tail = {z, area, z * slope * area * r};
  }
}

template <GeluKind kind, class S>
void gelu_forward_cpu(S* out, const S* inp, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x;
    Tail tail;
    load(x, inp + i, part);
    tail_of<kind>(tail, x);
    put_where_less(x, x, Vec16{}, Vec16{});
    store(out + i, x - tail.z * tail.area, part);
  });
}

template <GeluKind kind, bool accumulate, class S>
void gelu_backward_cpu(S* dinp, const S* dout, const S* inp, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x, dy;
    Tail tail;
    load(x, inp + i, part);
    load(dy, dout + i, part);
    tail_of<kind>(tail, x);
    const Vec16 below = tail.area - tail.moment;  // at -z; at z it is 1 minus that
    Vec16 slope = 1.f - below;
    put_where_less(slope, x, Vec16{}, below);
    store_or_accumulate<accumulate>(dinp + i, dy * slope, part);
  });
}

template <class F>
void with_kind(GeluKind kind, F&& body) {
  if (kind == GeluKind::erf) body(std::integral_constant<GeluKind, GeluKind::erf>{});
  else body(std::integral_constant<GeluKind, GeluKind::tanh>{});
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void gelu_forward(const Tensor& out, const Tensor& inp, GeluKind kind, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(inp.numel() == n, out, inp);
  dispatch(
      stream, out.dtype, [&] { gelu_forward_cuda(out, inp, kind); },
      [&]<class S>(S) { with_kind(kind, [&](auto k) { gelu_forward_cpu<k>(out.as<S>(), inp.as<S>(), n); }); },
      [&]<class T>(T) { gelu_forward_ref(out.as<T>(), inp.as<T>(), n, kind); });
}

void gelu_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, GeluKind kind, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_SHAPES(dout.numel() == n && inp.numel() == n, dinp, dout, inp);
  dispatch(
      stream, dinp.dtype, [&] { gelu_backward_cuda(dinp, dout, inp, kind); },
      [&]<class S>(S) {
        with_flag(dinp.accumulate, [&](auto accumulate) {
          with_kind(kind,
                    [&](auto k) { gelu_backward_cpu<k, accumulate>(dinp.as<S>(), dout.as<S>(), inp.as<S>(), n); });
        });
      },
      [&]<class T>(T) { gelu_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), n, kind, dinp.accumulate); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {

void Gelu::forward(const Step&, Stream stream) { gelu_forward(output(), input(0), kind, stream); }
void Gelu::backward(const Step&, Stream stream) { gelu_backward(gradient(0), doutput(), input(0), kind, stream); }

Value* gelu(Tape& t, const std::string& name, Value* inp, GeluKind kind) {
  auto node = make_node<Gelu>(name, {inp}, {t.activation(name, inp->shape)});
  node->kind = kind;
  node->backward_reads = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
