// bench: the machine's fp32 multiply-add peak, then the matrix products as fractions of it, measured in turns so that a
// clock that drifts hits both alike.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "kernels/matmul.h"

using namespace crossply;

namespace {

using Vector = float __attribute__((vector_size(64)));

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// GFLOP/s of independent multiply-adds in registers, all threads. Ten chains hide the latency of each.
double measure_peak() {
  constexpr int64_t rounds = 40'000'000;  // about as long as a measurement of a product
  double checksum = 0;
  const double start = now();
#pragma omp parallel reduction(+ : checksum)
  {
    const Vector b = Vector{} + 0.999f, c = Vector{} + 0.001f;
    // Ten different starts: the compiler merges equal chains into one.
    Vector a0 = b, a1 = b * 2, a2 = b * 3, a3 = b * 4, a4 = b * 5, a5 = b * 6, a6 = b * 7, a7 = b * 8, a8 = b * 9, a9 = b * 10;
    for (int64_t i = 0; i < rounds; ++i) {
      a0 = a0 * b + c, a1 = a1 * b + c, a2 = a2 * b + c, a3 = a3 * b + c, a4 = a4 * b + c;
      a5 = a5 * b + c, a6 = a6 * b + c, a7 = a7 * b + c, a8 = a8 * b + c, a9 = a9 * b + c;
    }
    const Vector sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9;
    for (int i = 0; i < 16; ++i) checksum += static_cast<double>(sum[i]);
  }
  const double seconds = now() - start;
  if (checksum == 0) std::printf("impossible\n");  // keeps the loop from being removed
  return 2.0 * 16 * 10 * static_cast<double>(rounds) * omp_get_max_threads() / seconds * 1e-9;
}

// GFLOP/s of calling body, repeated for at least 50 ms.
template <class F>
double measure(double flops, F&& body) {
  const double start = now();
  int64_t calls = 0;
  for (; now() - start < 0.05; ++calls) body();
  return flops * static_cast<double>(calls) / (now() - start) * 1e-9;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Size {
  int64_t rows, in, out;
};

void bench_matmul(const Size& s) {
  const std::vector<float> x(static_cast<size_t>(s.rows * s.in), 0.5f), w(static_cast<size_t>(s.out * s.in), 0.25f);
  std::vector<float> y(static_cast<size_t>(s.rows * s.out)), dx(x.size()), dw(w.size());
  const Tensor inp = view(x.data(), {s.rows, s.in}), weight = view(w.data(), {s.out, s.in});
  const Tensor out = view(y.data(), {s.rows, s.out}), dinp = view(dx.data(), inp.shape), dweight = view(dw.data(), weight.shape);
  const double flops = 2.0 * static_cast<double>(s.rows) * static_cast<double>(s.in) * static_cast<double>(s.out);
  std::vector<double> peak, rate[3], fraction[3];
  for (int round = 0; round < 7; ++round) {
    peak.push_back(measure_peak());
    rate[0].push_back(measure(flops, [&] { matmul_forward({out}, inp, {weight}, Stream{}); }));
    rate[1].push_back(measure(flops, [&] { matmul_backward_input(dinp, {out}, {weight}, false, Stream{}); }));
    rate[2].push_back(measure(flops, [&] { matmul_backward_weight(dweight, out, inp, Stream{}); }));
    for (int form = 0; form < 3; ++form) fraction[form].push_back(rate[form].back() / peak.back());
  }
  std::printf("%6lld %6lld %6lld %8.0f", static_cast<long long>(s.rows), static_cast<long long>(s.in),
              static_cast<long long>(s.out), median(peak));
  for (int form = 0; form < 3; ++form) std::printf("  %6.0f (%2.0f%%)", median(rate[form]), 100 * median(fraction[form]));
  std::printf("\n");
}

}  // namespace

int main() {
  std::printf("fp32, %d threads; GFLOP/s, medians of 7 rounds, and the fraction of the round's multiply-add peak\n", omp_get_max_threads());
  std::printf("  rows     in    out     peak      forward        dinput       dweight\n");
  for (const Size& size : std::vector<Size>{{2048, 768, 768}, {2048, 768, 2048}, {2048, 2048, 768}, {2048, 768, 3072},
                                            {2048, 3072, 768}, {2048, 192, 192}, {4096, 32, 32}, {4096, 32, 128},
                                            {4096, 128, 32}})
    bench_matmul(size);
}
