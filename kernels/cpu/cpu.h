// What the fast CPU kernels share: splitting work over threads, a vectorisable exp, scratch memory.
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace crossply {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }
// The size of the fewest equal blocks, none above `limit`, that cover n; a multiple of `unit`, as is limit.
inline int64_t even_blocks(int64_t n, int64_t limit, int64_t unit) {
  return round_up(ceil_div(n, ceil_div(n, limit)), unit);
}

// One machine code for parallel_for's both ways in: inlined twice, the sums of the two could be ordered differently.
template <class F>
[[gnu::noinline]] void run_part(F& body, int64_t begin, int64_t end) {
  body(begin, end);
}

// Calls body(begin, end) once per thread with a contiguous part of [0, n). Below `grain` items it runs inline, because
// waking the threads would cost more than the work. The split depends only on n and the thread count. Inside another
// parallel region it runs inline too. body must not throw.
template <class F>
void parallel_for(int64_t n, int64_t grain, F&& body) {
  if (n <= grain || omp_get_max_threads() == 1 || omp_in_parallel()) {
    if (n > 0) run_part(body, 0, n);
    return;
  }
#pragma omp parallel
  {
    const int64_t t = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = n * t / threads, end = n * (t + 1) / threads;
    if (begin < end) run_part(body, begin, end);
  }
}

// Calls body(first row, rows) for one tile of about a thousand elements after the other. The tiles depend only on the
// shape. For rows that may be short: body runs its exponentials over the tile at once, because a loop's end is slow.
template <class F>
void for_row_tiles(int64_t rows, int64_t width, F&& body) {
  const int64_t tile = std::max<int64_t>(1, 1024 / width), tiles = ceil_div(rows, tile);
  parallel_for(tiles, 8192 / (tile * width), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * tile; n < std::min(rows, end * tile); n += tile) body(n, std::min(tile, rows - n));
  });
}

// exp(x) to about 1.5 ulp, without branches, so that a `#pragma omp simd` loop over it becomes vector code.
// NaN stays NaN; x is clamped to [-87.3, 88.7], so the result is never 0 and never infinite.
inline float exp_f32(float x) {
  const float clamped = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x;
  const float shifter = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
  const float biased = clamped * 1.44269504f + shifter;
  const float n = biased - shifter;
  const float r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  float p = 1.9875691e-4f;
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0000001e-1f;
  p = p * r * r + r + 1.f;
  // 2^n in two factors, because n reaches 128, whose power is not a float.
  const int32_t k = std::bit_cast<int32_t>(biased) - std::bit_cast<int32_t>(shifter);
  const int32_t half = k >> 1;
  return p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((k - half + 127) << 23);
}

// tanh to about 2 ulp, without branches. Near 0 a polynomial keeps the relative precision; NaN stays NaN.
inline float tanh_f32(float x) {
  const float u = x * x;
  float p = -6.09671416e-3f;
  p = p * u + 2.0997179e-2f;
  p = p * u - 5.38509096e-2f;
  p = p * u + 1.33327697e-1f;
  p = p * u - 3.33333289e-1f;
  const float near = x + x * u * p, far = 1.f - 2.f / (exp_f32(2.f * x) + 1.f);
  return u < 0.390625f ? near : far;
}

// Memory that is not touched yet, aligned to 256 bytes, and to huge pages where it fills them: each page costs a fault
// at its first touch and a place among the few whose address the processor remembers. Null if there is not enough; to
// be given to std::free.
inline void* allocate_pages(size_t bytes) {
  constexpr size_t huge_page = size_t{2} << 20;
  const size_t alignment = bytes >= huge_page ? huge_page : 256;
  const size_t rounded = std::max<size_t>(1, (bytes + alignment - 1) / alignment) * alignment;
  void* data = std::aligned_alloc(alignment, rounded);
#ifdef MADV_HUGEPAGE
  if (data != nullptr && alignment == huge_page) madvise(data, rounded, MADV_HUGEPAGE);
#endif
  return data;
}

// Scratch memory of one thread, aligned for vectors. It grows to the largest request, so only the first step of a run
// allocates. The pointer is valid until the same thread asks for the same slot again.
inline float* scratch_f32(size_t count, int slot = 0) {
  struct Block {
    float* data = nullptr;
    size_t count = 0;
    ~Block() { std::free(data); }
  };
  constexpr int slots = 9;
  static thread_local Block blocks[slots];
  Block& block = blocks[slot];
  if (block.count < count) {
    std::free(block.data);
    const size_t bytes = count * sizeof(float);
    block.data = static_cast<float*>(allocate_pages(bytes));
    if (block.data == nullptr) {  // no exception may leave a parallel region
      std::fprintf(stderr, "error: not enough memory for %zu bytes of scratch; use smaller batches or sequences\n",
                   bytes);
      std::_Exit(71);
    }
    block.count = count;
  }
  return block.data;
}

// A list of the thread's own for items of this type, emptied. It keeps its memory, as scratch_f32 does, and is valid
// until the same thread asks for a list of such items again.
template <class Item>
std::vector<Item>& empty_list() {
  static thread_local std::vector<Item> list;
  list.clear();
  return list;
}

}  // namespace crossply
