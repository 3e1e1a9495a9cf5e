// What the CUDA kernels share: launching, 16-byte accesses, reductions. Compiled by nvcc for a GPU, or as C++ for the
// emulator (kernels/emulator/emulator.h); the kernels see no difference.
//
// Kernels take 64-bit sizes. Sums are in float, in an order that the shapes alone decide.
//
// Not yet run on hardware: only in the emulator.
#pragma once

#if CROSSPLY_CUDA
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#else
#include "kernels/emulator/emulator.h"
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "engine/check.h"
#include "engine/dtype.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/cuda/cuda.h"

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
int64_t max_shared_bytes();
// Lets the kernel be launched with so many bytes of dynamic shared memory. The limit never falls, because a recorded
// graph may launch the kernel with more than its last call had.
void raise_shared_limit(const void* kernel, size_t bytes);

// Device memory for a kernel's own use. It grows to the largest request, so only the first step of a run allocates. The
// pointer is valid until the next request for the same slot. Throws Exit::device if there is not enough memory.
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
  raise_shared_limit(reinterpret_cast<const void*>(kernel), l.shared_bytes);
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
  [[maybe_unused]] const auto check = [&](const auto& arg) {
    if constexpr (std::is_pointer_v<std::remove_cvref_t<decltype(arg)>>) emulator::check_device_memory(l.name, arg);
  };
  (check(args), ...);
  const auto* id = reinterpret_cast<const void*>(kernel);
  raise_shared_limit(id, l.shared_bytes);
  emulator::enqueue([=] { emulator::run(l.name, id, l.grid, l.block, l.shared_bytes, [&] { kernel(args...); }); });
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
__device__ inline float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ inline void from_float(float& to, float x) { to = x; }
__device__ inline void from_float(bf16& to, float x) {
#if CROSSPLY_CUDA
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  to = x;
#endif
}

// The emulator's CPU would not mind.
template <class Access>
__device__ __forceinline__ void check_alignment([[maybe_unused]] const void* p) {
#if !CROSSPLY_CUDA
  CHECK_THAT(reinterpret_cast<uintptr_t>(p) % alignof(Access) == 0, "an access of ", sizeof(Access), " bytes at ", p);
#endif
}

// Numbers as they lie in memory: on their way, or kept for later, they take half the registers of floats.
template <int width, class S>
struct alignas(access_bytes<width, S>) Packed {
  static constexpr bool pairs = sizeof(S) == 2 && width > 1;  // of bf16, the first one in the lower half
  std::conditional_t<pairs, uint32_t, S> x[pairs ? width / 2 : width];
};
template <int width, class S>
__device__ __forceinline__ Packed<width, S> load_packed(const S* p) {
#if CROSSPLY_CUDA
  return *reinterpret_cast<const Packed<width, S>*>(p);
#else
  check_alignment<Packed<width, S>>(p);
  Packed<width, S> raw;
  std::memcpy(&raw, p, sizeof raw);
  return raw;
#endif
}
template <int width, class S>
__device__ __forceinline__ Floats<width> floats(const Packed<width, S>& raw) {
  Floats<width> x;
#pragma unroll
  for (int i = 0; i < width; ++i) {
    if constexpr (!Packed<width, S>::pairs) x[i] = to_float(raw.x[i]);
    else x[i] = __uint_as_float(i % 2 == 0 ? raw.x[i / 2] << 16 : raw.x[i / 2] & 0xFFFF0000);
  }
  return x;
}
template <int width, class S>
__device__ __forceinline__ Floats<width> load(const S* p) {
  return floats(load_packed<width>(p));
}
// From p + at, or zeros if not there: p may then be anything. Ask for all that is needed and then compute: an `if`
// around a load and its use lets no later load begin before that use.
template <int width, class S>
__device__ __forceinline__ Packed<width, S> load_packed_if(bool there, const S* p, int64_t at) {
  Packed<width, S> raw = {};
  if (there) raw = load_packed<width>(p + at);
  return raw;
}
template <int width, class S>
__device__ __forceinline__ Floats<width> load_if(bool there, const S* p, int64_t at) {
  return floats(load_packed_if<width>(there, p, at));
}

// Two floats rounded to bf16, the first one in the lower half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if CROSSPLY_CUDA
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return bf16::rounded(low) | static_cast<uint32_t>(bf16::rounded(high)) << 16;
#endif
}

// What a pointer points into. The compiler finds out for what it writes itself, but the stores below are by hand.
enum class Space { global, shared, any };

#if CROSSPLY_CUDA
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// By hand: where a store's values come from a loop, the compiler takes it apart into one for each of them.
template <Space>
__device__ __forceinline__ void store_words(void* p, const uint32_t (&w)[1]) {
  *static_cast<uint32_t*>(p) = w[0];
}
template <Space space>
__device__ __forceinline__ void store_words(void* p, const uint32_t (&w)[2]) {
  if constexpr (space == Space::global)
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(w[0]), "r"(w[1])
                 : "memory");
  else if constexpr (space == Space::shared)
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared_address(p)), "r"(w[0]), "r"(w[1]) : "memory");
  else asm volatile("st.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}
template <Space space>
__device__ __forceinline__ void store_words(void* p, const uint32_t (&w)[4]) {
  if constexpr (space == Space::global)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
  else if constexpr (space == Space::shared)
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                 "r"(w[3])
                 : "memory");
  else
    asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
template <int width, Space space = Space::global, class S>
__device__ __forceinline__ void store(S* p, const Floats<width>& x) {
  if constexpr (width == 1) {
    from_float(*p, x[0]);
  } else {
    constexpr int words = access_bytes<width, S> / 4, each = access_bytes<width, S> / sizeof(S);
#pragma unroll
    for (int first = 0; first < width; first += each) {
      uint32_t w[words];
#pragma unroll
      for (int i = 0; i < words; ++i) {
        if constexpr (sizeof(S) == 2) w[i] = pack(x[first + 2 * i], x[first + 2 * i + 1]);
        else w[i] = __float_as_uint(x[first + i]);
      }
      store_words<space>(p + first, w);
    }
  }
}
#else
template <int width, Space space = Space::global, class S>
void store(S* p, const Floats<width>& x) {
  struct alignas(access_bytes<width, S>) Raw {
    S s[width];
  } raw;
  check_alignment<Raw>(p);
  if (space != Space::any) emulator::check_space(p, space == Space::shared);
  for (int i = 0; i < width; ++i) from_float(raw.s[i], x[i]);
  *reinterpret_cast<Raw*>(p) = raw;
}
#endif

inline bool is_aligned16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
inline bool is_aligned16(const Tensor& tensor) { return is_aligned16(tensor.data); }
// Whether all of these are at multiples of 16 bytes: tensors, or pointers to their data.
template <class List = std::initializer_list<const void*>>
bool aligned16(const List& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return is_aligned16(tensor); });
}

// Calls body(width), a constant: the widest access that C columns of all the tensors allow.
template <class S, class List = std::initializer_list<const void*>, class F>
void with_width(int64_t C, const List& tensors, F&& body) {
  if (C % widest<S> == 0 && aligned16(tensors)) body(std::integral_constant<int, widest<S>>{});
  else body(std::integral_constant<int, 1>{});
}

// Calls body(S{}, width) with constants: the type S in which tensors of this dtype are stored, and with_width's width.
template <class List = std::initializer_list<const void*>, class F>
void with_access(Dtype dtype, int64_t C, const List& tensors, F&& body) {
  with_storage(dtype,
               [&]<class S>(S storage) { with_width<S>(C, tensors, [&](auto width) { body(storage, width); }); });
}

// Pointers to tensors, for a kernel to take by value: they lie in constant memory.
constexpr size_t max_inputs = 256;
template <class T>
struct Pointers {
  T* x[max_inputs];
  int count = 0;
};
inline void check_inputs(const char* name, size_t count) {
  CHECK_THAT(count <= max_inputs, name, ": ", count, " inputs are too many for a GPU");
}
template <class T, class List>
Pointers<T> pointers_to(const char* name, const List& tensors) {
  check_inputs(name, tensors.size());
  Pointers<T> table;
  for (const Tensor& tensor : tensors) table.x[table.count++] = tensor.as<std::remove_const_t<T>>();
  return table;
}

// -----------------------------------------------------------------------------------------------------------------
// Sums and maxima over groups of `lanes` lanes, a power of two, which take a row each where rows are short, or over a
// warp. Every lane gets the result.

inline int lanes_of_row(int64_t width) {
  int lanes = 1;
  while (lanes < width && lanes < warp_size) lanes *= 2;
  return lanes;
}
// The number of threads that have columns to do, `width` each, in whole warps; at most `most`.
inline uint32_t threads_of_row(int64_t C, int width, uint32_t most) {
  return std::min(blocks_of(C, width * warp_size) * warp_size, most);
}
// The row of a thread of a block of `threads`. Grids are small enough for 32 bits, in which a division takes a few
// instructions, in 64 about a hundred.
template <int threads>
__device__ __forceinline__ int64_t row_of_lanes(int lanes) {
  const auto by = static_cast<uint32_t>(lanes);
  return static_cast<int64_t>(blockIdx.x) * (threads / by) + threadIdx.x / by;
}
template <class T>
__device__ __forceinline__ T group_sum(T x, int lanes) {
  for (int by = lanes / 2; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}
__device__ __forceinline__ float larger_or_nan(float a, float b) { return b > a || b != b ? b : a; }
__device__ __forceinline__ float group_max(float x, int lanes) {
  for (int by = lanes / 2; by > 0; by /= 2) x = larger_or_nan(x, __shfl_xor_sync(~0u, x, by));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) { return group_sum(x, warp_size); }
__device__ __forceinline__ float warp_max(float x) { return group_max(x, warp_size); }

// The sum over a block of so many warps, in order, for its first thread. The whole block calls this, once in a kernel.
template <int warps, class T>
__device__ __forceinline__ T block_sum(T x) {
  SHARED(sums, Array<T, warps>);
  x = group_sum(x, warp_size);
  if (threadIdx.x % warp_size == 0) sums[threadIdx.x / warp_size] = x;
  __syncthreads();
  for (int warp = 1; warp < warps && threadIdx.x == 0; ++warp) x += sums[warp];
  return x;
}

// -----------------------------------------------------------------------------------------------------------------
// Elementwise kernels. A thread takes `width` neighbours of n; their last parameter is n.

constexpr int elementwise_threads = 256;

template <int width>
__device__ __forceinline__ int64_t first_of_thread() {
  return (static_cast<int64_t>(blockIdx.x) * elementwise_threads + threadIdx.x) * width;
}

template <class... P, class... A>
void launch_elementwise(const char* name, int64_t n, int width, void (*kernel)(P...), const A&... args) {
  if (n == 0) return;
  launch({name, blocks_of(n, elementwise_threads * width), elementwise_threads}, kernel, args..., n);
}

// p[i] = x[i], or p[i] += x[i] if accumulate: how a gradient is written.
template <int width, Space space = Space::global, class S>
__device__ __forceinline__ void store_or_accumulate(S* p, Floats<width> x, bool accumulate) {
  if (accumulate) {
    const Floats<width> before = load<width>(p);
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] += before[i];
  }
  store<width, space>(p, x);
}

// s = 1 / (1 + exp(-x)) and 1 - s: both keep their digits, and nothing overflows.
struct Logistic {
  float s, rest;
};
__device__ __forceinline__ Logistic logistic(float x) {
  const float e = expf(-fabsf(x)), r = __fdividef(1.f, 1.f + e);
  return x < 0 ? Logistic{e * r, r} : Logistic{r, e * r};
}

// -----------------------------------------------------------------------------------------------------------------
// Many sums at once: the sum of v[i] over the warp's lanes goes to the lanes i, i + n, ...; n is a power of two. Each
// step halves the values that a lane still holds: n - 1 exchanges for n = 32, not 5 n. blockDim.x is a multiple of 32.
// v is used up.
template <int n, int left = n>
__device__ __forceinline__ float warp_sums(float* v) {
  static_assert(n <= warp_size && (n & (n - 1)) == 0);
  if constexpr (left > 1) {
    constexpr int half = left / 2;
    const bool upper = (threadIdx.x & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float low = v[i], high = v[i + half];  // named, or the choice would be of addresses
      v[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, half);
    }
    return warp_sums<n, half>(v);
  } else {
#pragma unroll
    for (int lanes = n; lanes < warp_size; lanes *= 2) v[0] += __shfl_xor_sync(~0u, v[0], lanes);
    return v[0];
  }
}

// to[i] = the sum of v[i] over the warp's lanes, for any n. Wait (__syncwarp) before reading it.
template <int n>
__device__ __forceinline__ void store_warp_sums(float* to, const float* v) {
  constexpr int part = n > 16 ? 32 : n > 8 ? 16 : n > 4 ? 8 : n > 2 ? 4 : n;
  float x[part];
#pragma unroll
  for (int i = 0; i < part; ++i) x[i] = i < n ? v[i] : 0.f;
  const float sum = warp_sums<part>(x);
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  if (lane < part && lane < n) to[lane] = sum;
  if constexpr (n > part) store_warp_sums<n - part>(to + part, v + part);
}

// -----------------------------------------------------------------------------------------------------------------
// Sums over rows. A block of dim3(warp_size, groups_of_rows) has a thread for each of 32 columns and one of as many
// interleaved groups of rows.

constexpr int groups_of_rows = 8;

// The sum over the groups, for the threads of the first one. The whole block calls this, once in a kernel.
__device__ __forceinline__ float sum_of_groups(float x) {
  SHARED(sums, Array<Array<float, warp_size>, groups_of_rows>);
  sums[threadIdx.y][threadIdx.x] = x;
  __syncthreads();
  if (threadIdx.y == 0)
    for (int group = 1; group < groups_of_rows; ++group) x += sums[group][threadIdx.x];
  return x;
}
// The same of sum_r from[r, c], for from (rows, C); c may be beyond.
__device__ __forceinline__ float sum_of_rows(const float* from, int64_t rows, int64_t C, int64_t c) {
  float sum = 0;
  if (c < C)
    for (int64_t r = threadIdx.y; r < rows; r += groups_of_rows) sum += from[r * C + c];
  return sum_of_groups(sum);
}

}  // namespace crossply
