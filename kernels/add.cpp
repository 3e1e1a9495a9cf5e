#include "kernels/add.h"

#include <algorithm>

#include "kernels/cpu.h"
#include "kernels/vec.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

template <class S>
void add_forward_cpu(S* out, const S* a, const S* b, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
    for_vectors(begin, end, [=](int64_t i, auto part) {
      Vec16 x, y;
      load(x, a + i, part);
      load(y, b + i, part);
      store(out + i, x + y, part);
    });
  });
}

template <class S>
void accumulate_cpu(S* dinp, const S* dout, int64_t n, bool acc) {
  if (acc) return add_forward_cpu(dinp, dinp, dout, n);
  parallel_for(n, grain, [=](int64_t begin, int64_t end) { std::copy(dout + begin, dout + end, dinp + begin); });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void add_forward(const Tensor& out, const Tensor& a, const Tensor& b, Stream stream) {
  const int64_t n = out.numel();
  CHECK_THAT(a.numel() == n && b.numel() == n, "add_forward: out ", out.str(), " a ", a.str(), " b ", b.str());
  if (stream.backend == Backend::cuda) return add_forward_cuda(out, a, b);
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using S = decltype(storage);
      add_forward_cpu(out.as<S>(), a.as<S>(), b.as<S>(), n);
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    add_forward_ref(out.as<T>(), a.as<T>(), b.as<T>(), n);
  });
}

void accumulate(const Tensor& dinp, const Tensor& dout, bool acc, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_THAT(dout.numel() == n, "accumulate: dinp ", dinp.str(), " dout ", dout.str());
  if (stream.backend == Backend::cuda) return accumulate_cuda(dinp, dout, acc);
  if (stream.backend == Backend::cpu)
    return with_storage(dinp.dtype, [&](auto storage) {
      using S = decltype(storage);
      accumulate_cpu(dinp.as<S>(), dout.as<S>(), n, acc);
    });
  with_real(dinp.dtype, [&](auto real) {
    using T = decltype(real);
    accumulate_ref(dinp.as<T>(), dout.as<T>(), n, acc);
  });
}

}  // namespace crossply
