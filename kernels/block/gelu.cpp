#include "kernels/block/gelu.h"

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;

// area = Phi(-z) and bell = exp(-z^2 / 2) for z in [0, 12]: the tail itself, because 1 - Phi(z) has no digits left.
//
// Phi(-z) exp(z^2 / 2) = t q(t - 1/2), t = 1 / (1 + 0.34 z): q is the minimax polynomial of degree 8, good to 2.3e-8 of
// the value. With exp's error and the roundings, of which that of z^2 / 2 grows: 6e-8 (8 + z^2 / 2) of it.
inline void normal_tail(Vec16& area, Vec16& bell, const Vec16& z) {
  const Vec16 t = 1.f / (1.f + 0.34f * z), u = t - 0.5f;
  Vec16 q = u * -2.66262207e-2f + 3.53720052e-2f;
  q = q * u + 3.23217943e-2f;
  q = q * u - 6.77487525e-2f;
  q = q * u - 6.74762785e-2f;
  q = q * u + 1.07994571e-1f;
  q = q * u + 2.97943905e-1f;
  q = q * u + 3.41064884e-1f;
  q = q * u + 2.47139325e-1f;
  bell = -0.5f * z * z;
  exp_in_place(bell);
  area = bell * t * q;
}

// |x|, at most 12, where Phi(-z) is 2e-33: farther out come denormal numbers, which are slow. NaN stays NaN.
inline void clamp_magnitude(Vec16& z, const Vec16& x) {
  const Vec16 most = Vec16{} + 12.f;
  z = x < 0.f ? -x : x;
  z = z > most ? most : z;
}

template <class S>
void gelu_forward_cpu(S* out, const S* inp, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
    for_vectors(begin, end, [=](int64_t i, auto part) {
      Vec16 x, z, area, bell;
      load(x, inp + i, part);
      clamp_magnitude(z, x);
      normal_tail(area, bell, z);
      const Vec16 ramp = x < 0.f ? Vec16{} : x;
      store(out + i, ramp - z * area, part);
    });
  });
}

template <class S, bool acc>
void gelu_backward_cpu(S* dinp, const S* dout, const S* inp, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
    for_vectors(begin, end, [=](int64_t i, auto part) {
      Vec16 x, z, dy, area, bell, before;
      load(x, inp + i, part);
      load(dy, dout + i, part);
      clamp_magnitude(z, x);
      normal_tail(area, bell, z);
      const Vec16 slope = area - z * bell * 0.398942280f;  // at -z; at z it is 1 minus that
      Vec16 d = dy * (x < 0.f ? slope : 1.f - slope);
      if (acc) load(before, dinp + i, part), d += before;
      store(dinp + i, d, part);
    });
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void gelu_forward(const Tensor& out, const Tensor& inp, Stream stream) {
  const int64_t n = out.numel();
  CHECK_THAT(inp.numel() == n, "gelu_forward: out ", out.str(), " inp ", inp.str());
  if (stream.backend == Backend::cuda) return gelu_forward_cuda(out, inp);
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using S = decltype(storage);
      gelu_forward_cpu(out.as<S>(), inp.as<S>(), n);
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    gelu_forward_ref(out.as<T>(), inp.as<T>(), n);
  });
}

void gelu_backward(const Tensor& dinp, const Tensor& dout, const Tensor& inp, bool acc, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_THAT(dout.numel() == n && inp.numel() == n, "gelu_backward: dinp ", dinp.str(), " dout ", dout.str(), " inp ",
             inp.str());
  if (stream.backend == Backend::cuda) return gelu_backward_cuda(dinp, dout, inp, acc);
  if (stream.backend == Backend::cpu)
    return with_storage(dinp.dtype, [&](auto storage) {
      using S = decltype(storage);
      auto backward = acc ? gelu_backward_cpu<S, true> : gelu_backward_cpu<S, false>;
      backward(dinp.as<S>(), dout.as<S>(), inp.as<S>(), n);
    });
  with_real(dinp.dtype, [&](auto real) {
    using T = decltype(real);
    gelu_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), n, acc);
  });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Gelu : Node {
  const char* op() const override { return "gelu"; }
  void forward(const Step&, Stream stream) override { gelu_forward(output(), input(0), stream); }
  void backward(const Step&, Stream stream) override { gelu_backward(dinput(0), doutput(), input(0), acc[0], stream); }
};

}  // namespace

Value* gelu(Tape& t, const std::string& name, Value* inp) {
  auto node = make_node<Gelu>(name, {inp}, {t.activation(name, inp->shape)});
  node->keep = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
