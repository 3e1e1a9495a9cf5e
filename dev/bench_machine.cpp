// What this machine can do at most.
#include <omp.h>

#include <cstdio>
#include <cstring>

#include "cli/format.h"
#include "dev/bench.h"
#include "kernels/cpu/amx.h"
#include "kernels/cpu/cpu.h"

namespace crossply {
namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif
using Vector = float __attribute__((vector_size(lanes * sizeof(float))));  // a register, or sums would go to memory

// Ten chains hide the latency of each.
float multiply_add(int64_t rounds) {
  const Vector b = Vector{} + 0.999f, c = Vector{} + 0.001f;
  // Ten different starts: the compiler merges equal chains into one.
  Vector a0 = b, a1 = b * 2, a2 = b * 3, a3 = b * 4, a4 = b * 5, a5 = b * 6, a6 = b * 7, a7 = b * 8, a8 = b * 9,
         a9 = b * 10;
  for (int64_t i = 0; i < rounds; ++i) {
    a0 = a0 * b + c, a1 = a1 * b + c, a2 = a2 * b + c, a3 = a3 * b + c, a4 = a4 * b + c;
    a5 = a5 * b + c, a6 = a6 * b + c, a7 = a7 * b + c, a8 = a8 * b + c, a9 = a9 * b + c;
  }
  const Vector sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9;
  float total = 0;
  for (int i = 0; i < lanes; ++i) total += sum[i];
  return total;
}

#if CROSSPLY_MATRIX_UNITS
// Four products of tiles that do not wait for each other.
MATRIX_TARGET float multiply_tiles(int64_t rounds) {
  alignas(64) float out[16 * 16];
  begin_tiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, out, 64);
  end_tiles();
  return out[0] + 1;
}
#endif

// FLOP/s of `rounds` rounds of work on every thread. The sum keeps the work from being removed.
template <class F>
double rate_of_all(double flops_per_round, int64_t rounds, F&& work) {
  double checksum = 0;
  const double start = now();
#pragma omp parallel reduction(+ : checksum)
  checksum += static_cast<double>(work(rounds));
  const double seconds = now() - start;
  if (checksum == 0) std::printf("impossible\n");
  return flops_per_round * static_cast<double>(rounds) * omp_get_max_threads() / seconds;
}

// All threads copy their part of bytes/2 bytes, `times` times.
void copy(char* to, const char* from, size_t bytes, int64_t times) {
  parallel_for(static_cast<int64_t>(bytes / 2), 0, [=](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < times; ++i) {
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
      asm volatile("" ::: "memory");  // each copy is wanted
    }
  });
}

double copy_seconds(size_t bytes, int64_t times) {
  const std::vector<char> from(bytes / 2, 1);
  std::vector<char> to(bytes / 2, 2);
  return seconds_per_call(0.02, [&] { copy(to.data(), from.data(), bytes, times); }) / static_cast<double>(times);
}

}  // namespace

double multiply_add_peak() {
  return rate_of_all(2.0 * lanes * 10, 20'000'000, [](int64_t rounds) { return multiply_add(rounds); });
}

double matrix_unit_peak() {
#if CROSSPLY_MATRIX_UNITS
  if (matrix_unit() == MatrixUnit::amx)
    return rate_of_all(4 * 2.0 * 16 * 16 * 32, 1'000'000, [](int64_t rounds) { return multiply_tiles(rounds); });
#endif
  return 0;
}

double copy_seconds(size_t bytes) { return copy_seconds(bytes, 1); }

void print_machine() {
  const size_t near = static_cast<size_t>(omp_get_max_threads()) << 19, far = size_t{512} << 20;
  std::vector<double> vectors, tiles, in_cache, in_memory;
  for (int round = 0; round < 5; ++round) {
    vectors.push_back(multiply_add_peak());
    tiles.push_back(matrix_unit_peak());
    in_cache.push_back(static_cast<double>(near) / copy_seconds(near, 64));
    in_memory.push_back(static_cast<double>(far) / copy_seconds(far, 1));
  }
  auto giga = [](const std::vector<double>& values) { return format_number("%.0f", 1e-9 * median(values)); };
  std::vector<std::vector<std::string>> table = {
      {"fp32 multiply-adds in registers", giga(vectors), "GFLOP/s"},
      {"bf16 matrix units", median(tiles) > 0 ? giga(tiles) : "none", median(tiles) > 0 ? "GFLOP/s" : ""},
      {"copy of 256 KiB per thread, in cache", giga(in_cache), "GB/s"},
      {"copy of 256 MiB", giga(in_memory), "GB/s"}};
  std::printf("%d threads; medians of 5 rounds; a copy's bytes are those read and written\n%s", omp_get_max_threads(),
              format_table(table).c_str());
}

}  // namespace crossply
