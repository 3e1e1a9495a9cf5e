// What the CUDA kernels share: launching, 16-byte accesses, reductions. Compiled by nvcc for a GPU, or as C++ for the
// emulator (kernels/emulator.h); the kernels see no difference.
//
// Kernels take 64-bit sizes. Sums are in float, in an order that the shapes alone decide.
#pragma once

#if CROSSPLY_CUDA
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#else
#include "kernels/emulator.h"
#endif

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "engine/check.h"
#include "engine/dtype.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/cuda.h"

// A variable of the block: SHARED(sums, Array<float, 32>);
#if CROSSPLY_CUDA
#define SHARED(name, ...) __shared__ __VA_ARGS__ name
#else
#define SHARED(name, ...)           \
  static const char name##_key = 0; \
  __VA_ARGS__& name = *static_cast<__VA_ARGS__*>(::crossply::emulator::static_shared(&name##_key, sizeof(__VA_ARGS__)))
#endif

namespace crossply {

constexpr int warp_size = 32;

template <class T, int64_t n>
struct alignas(sizeof(T) * n >= 16 ? 16 : alignof(T)) Array {
  T x[n];
  __device__ T& operator[](int64_t i) { return x[i]; }
  __device__ const T& operator[](int64_t i) const { return x[i]; }
};

// -----------------------------------------------------------------------------------------------------------------
// Launching.

struct Launch {
  const char* name;  // of the kernel, for errors
  dim3 grid, block;
  size_t shared_bytes = 0;
};

// How many blocks of `size` cover n.
inline uint32_t blocks_of(int64_t n, int64_t size) { return static_cast<uint32_t>((n + size - 1) / size); }

// What a block may have on this GPU.
size_t most_shared_bytes();

// Device memory for a kernel's own use. It grows to the largest request, so only the first step of a run allocates. The
// pointer is valid until the next request for the same slot. Throws Exit::device if there is not enough memory.
// Slots from 0 on are any kernel's; these are of kernels that call others.
constexpr int cross_entropy_slot = 6, matmul_slot = 7, scratch_slot_count = 8;
void* scratch_bytes(size_t bytes, int slot);
template <class T>
T* scratch(int64_t count, int slot = 0) {
  return static_cast<T*>(scratch_bytes(static_cast<size_t>(count) * sizeof(T), slot));
}

// to[c] += sum_r from[r, c], for from (rows, C), in an order that only rows decides.
void add_rows(float* to, const float* from, int64_t rows, int64_t C);

#if CROSSPLY_CUDA

cudaStream_t cuda_stream();  // the one on which everything runs

// Throws Exit::device with what the driver says, where that is about this launch.
void check_cuda(cudaError_t error, const char* what, const char* file, int line);
#define CHECK_CUDA(call) ::crossply::check_cuda((call), #call, __FILE__, __LINE__)

template <class... P>
void launch(const Launch& l, void (*kernel)(P...), std::type_identity_t<P>... args) {
  constexpr size_t without_asking = 48 * 1024;
  if (l.shared_bytes > without_asking)
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(l.shared_bytes)));
  kernel<<<l.grid, l.block, l.shared_bytes, cuda_stream()>>>(args...);
  check_cuda(cudaGetLastError(), l.name, __FILE__, __LINE__);
}
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_memory[];
  return reinterpret_cast<T*>(dynamic_memory);
}

#else

template <class... P>
void launch(const Launch& l, void (*kernel)(P...), std::type_identity_t<P>... args) {
  emulator::enqueue([=] {
    emulator::run(l.name, l.grid, l.block, l.shared_bytes, [&] { kernel(args...); });
  });
}
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulator::dynamic_shared());
}

#endif

// -----------------------------------------------------------------------------------------------------------------
// `width` elements of float or bf16 in memory as floats: one access of up to 16 bytes, or several of 16. p is a
// multiple of the access's size.

template <class S>
constexpr int widest = 16 / static_cast<int>(sizeof(S));
template <int width, class S>
constexpr size_t access_bytes = width * sizeof(S) < 16 ? width * sizeof(S) : 16;

template <int width>
using Floats = Array<float, width>;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) {
#if CROSSPLY_CUDA
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
#else
  return x;
#endif
}
__device__ inline void from_float(float& to, float x) { to = x; }
__device__ inline void from_float(bf16& to, float x) {
#if CROSSPLY_CUDA
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  to = x;
#endif
}

template <int width, class S>
__device__ __forceinline__ Floats<width> load(const S* p) {
  struct alignas(access_bytes<width, S>) Raw { S s[width]; };
  const Raw raw = *reinterpret_cast<const Raw*>(p);
  Floats<width> x;
#pragma unroll
  for (int i = 0; i < width; ++i) x[i] = to_float(raw.s[i]);
  return x;
}
template <int width, class S>
__device__ __forceinline__ void store(S* p, const Floats<width>& x) {
  struct alignas(access_bytes<width, S>) Raw { S s[width]; } raw;
#pragma unroll
  for (int i = 0; i < width; ++i) from_float(raw.s[i], x[i]);
  *reinterpret_cast<Raw*>(p) = raw;
}

// Calls body(width), a constant: the widest access that C columns of all the tensors allow.
template <class S, class F>
void with_width(int64_t C, std::initializer_list<const void*> tensors, F&& body) {
  bool whole = C % widest<S> == 0;
  for (const void* data : tensors) whole &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
  if (whole) body(std::integral_constant<int, widest<S>>{});
  else body(std::integral_constant<int, 1>{});
}

// -----------------------------------------------------------------------------------------------------------------
// Sums. Every lane gets the result.

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) {
    const float other = __shfl_xor_sync(~0u, x, lanes);
    x = other > x || other != other ? other : x;  // a NaN stays
  }
  return x;
}

}  // namespace crossply
