// A GPU on the CPU, for tests and for reading: CUDA kernels compiled as C++, a fiber for every CUDA thread.
//
// A fiber runs until it must wait for others: at __syncthreads, or where the lanes of a warp exchange values. Who runs
// next is drawn by lot, and shared memory is filled with NaN before each block, so that a missing barrier or a missing
// write shows in the results. Device memory ends at a page that nobody may touch. What no fiber can show: races within
// one stretch of code between two waits, limits of registers, and speed.
//
// Arithmetic is IEEE's only where a GPU's is. Functions that CUDA computes approximately are off by up to the largest
// error that its programming guide or the PTX manual names, in units of the last place of the rounded result: expf 2,
// tanhf 2, rsqrtf 2, __fdividef 2, ex2.approx.ftz 2, logf 1. How much is drawn from the bits of the argument and a
// seed: the same argument has the same error everywhere. What is exact there is exact here: expf(0) is 1, infinities,
// NaN; __fdividef by more than 2^126 is 0. Division and sqrtf round correctly. Tensor cores sum as those of sm_80, the
// coarsest of those that we run on: eight exact products and the sum so far are cut off (not rounded) one bit below
// the last place of the largest of them, added, and cut off to a float (Fasi, Higham, Mikaitis and Pranesh, Numerical
// behavior of NVIDIA tensor cores, 2021; later generations keep more bits, or sum sixteen at once).
//
// This header stands in for the CUDA headers; kernels/cuda/cuda.cuh includes one or the other. A launch throws Error
// (Exit::internal) where a GPU would hang or give undefined results: a barrier that some threads never reach or reach
// at another place, an exchange with a lane that does not take part, too many threads or too much shared memory.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "engine/check.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct uint3 {
  uint32_t x, y, z;
};
struct dim3 {
  uint32_t x, y, z;
  constexpr dim3(uint32_t x_ = 1, uint32_t y_ = 1, uint32_t z_ = 1) : x(x_), y(y_), z(z_) {}
};

// One block runs at a time, so these are its own.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace crossply::emulator {

// Where in a kernel a thread waits.
struct CallSite {
  const char* file;
  int line;
  static CallSite here(const char* in = __builtin_FILE(), int at = __builtin_LINE()) { return {in, at}; }
};

// Runs body once for every thread of every block. name: of the kernel, for errors. More than 48 KiB of shared memory
// must have been allowed to the kernel: that limit is what was set last, as on a GPU.
void set_shared_limit(const void* kernel, size_t bytes);
void run(const char* name, const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
         const std::function<void()>& body);

// Does this with device memory open: everybody else who touches that is killed.
void touch(const std::function<void()>& work);

// Two queues, as two streams of a GPU (kernels/emulator/emulator_lanes.cpp). Work of the compute lane is done when it
// is asked for. A transfer waits in its queue, of which as much is done when another comes as the policy says: nothing
// (lazy), all (eager), or a number drawn by lot; and what the compute lane or the host waits for is done then. So a
// missing wait shows in the results. The ranks of a job need one policy and seed, or they may wait for each other.
// CROSSPLY_TRANSFERS: lazy (the default), eager, or the seed of the lots.
enum class Transfers { lazy, eager, by_lot };
void set_transfers(Transfers policy, uint64_t seed = 0);

// Does this now, or adds it to what is captured.
void enqueue(std::function<void()> work);
int64_t works_done();  // on the compute lane
// begin is done when it is asked for, run later, each with device memory open. Throws Exit::internal unless the lane
// waits for all that the compute lane did before.
void enqueue_transfer(std::function<void()> begin, std::function<void()> run);
void fork_transfers();
int64_t transfers_asked();  // and not recorded
int64_t mark_transfers();
void join_transfers(int64_t ticket);  // of the same recording, or of none
void finish_transfers();              // for the host

struct Work {
  enum Kind { compute, transfer, fork, join } kind;
  std::function<void()> run, begin;  // begin: of a transfer
  int64_t ticket = 0;                // of a join: transfers of the recording
};
using Works = std::vector<Work>;
void begin_capture();
std::shared_ptr<Works>
end_capture();  // throws Exit::internal if the compute lane does not wait for all transfers in it
void abandon_capture();
bool captures();
// From now on every recording is refused, at its begin or at its end, as CUDA may do.
enum class Refused { nothing, begin, end };
void refuse_captures(Refused at);
bool refuses_capture(Refused at);
void launch(const Works& works);
// Throws Exit::device if this points into the host's memory; null does not. Asked of a kernel's pointers, not of those
// in structs.
void check_device_memory(const char* name, const void* data);

// The lots of the launches that follow, and the errors of functions.
void seed(uint64_t value);
void seed_errors(uint64_t value);

// Memory full of NaN, aligned to 256 bytes, or to 16 where the size is no multiple of 256, with a page behind it that
// nobody may touch. Null if there is not enough.
void* allocate(size_t bytes);
void release(void* data);

void synchronize_block(const CallSite& site);

// Waits for the lanes of `mask`, each of which brings an operand; the last to come calls combine(operands, mask), with
// null for lanes outside of the mask.
using Combine = void (*)(void* const* operands, uint32_t mask);
void synchronize_warp(uint32_t mask, void* operand, Combine combine, const char* what, const CallSite& site);

// The launch's shared memory, and a block's own variable of some bytes: one for every `key`.
void* dynamic_shared();
void* static_shared(const void* key, size_t bytes);
// Throws unless this points into shared memory, or into device memory: what a store says of its address.
void check_space(const void* p, bool shared);

// Copies that are under way until they are waited for; the target is NaN meanwhile. src null: zeros.
void copy_async(void* to, const void* from, size_t bytes);
void commit_copies();
void wait_copies(int groups_left);

[[noreturn]] void fail_lane(const char* what, int lane, int from, const CallSite& site);

template <class T>
struct Exchanged {
  T value, result;
  int from;
};
// Every lane's result is the value of lane `from`.
template <class T>
T exchange(uint32_t mask, T value, int from, const char* what, const CallSite& site) {
  Exchanged<T> mine{value, value, from};
  const auto combine = [](void* const* operands, uint32_t present) {
    for (int lane = 0; lane < 32; ++lane) {
      if (!(present >> lane & 1)) continue;
      auto& to = *static_cast<Exchanged<T>*>(operands[lane]);
      to.result = present >> to.from & 1 ? static_cast<Exchanged<T>*>(operands[to.from])->value : T{};
    }
  };
  if (!(mask >> from & 1)) fail_lane(what, static_cast<int>(threadIdx.x % 32), from, site);
  synchronize_warp(mask, &mine, combine, what, site);
  return mine.result;
}

inline int lane() {
  return static_cast<int>((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}

}  // namespace crossply::emulator

inline void __syncthreads(crossply::emulator::CallSite site = crossply::emulator::CallSite::here()) {
  crossply::emulator::synchronize_block(site);
}
inline void __syncwarp(uint32_t mask = ~0u, crossply::emulator::CallSite site = crossply::emulator::CallSite::here()) {
  crossply::emulator::synchronize_warp(mask, nullptr, nullptr, "__syncwarp", site);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes,
                  crossply::emulator::CallSite site = crossply::emulator::CallSite::here()) {
  return crossply::emulator::exchange(mask, value, crossply::emulator::lane() ^ lanes, "__shfl_xor_sync", site);
}
template <class T>
T __shfl_sync(uint32_t mask, T value, int from,
              crossply::emulator::CallSite site = crossply::emulator::CallSite::here()) {
  return crossply::emulator::exchange(mask, value, from & 31, "__shfl_sync", site);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int by,
                 crossply::emulator::CallSite site = crossply::emulator::CallSite::here()) {
  const int lane = crossply::emulator::lane();
  return crossply::emulator::exchange(mask, value, lane < by ? lane : lane - by, "__shfl_up_sync", site);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, int by,
                   crossply::emulator::CallSite site = crossply::emulator::CallSite::here()) {
  const int lane = crossply::emulator::lane();
  return crossply::emulator::exchange(mask, value, lane + by > 31 ? lane : lane + by, "__shfl_down_sync", site);
}

// Between two waits a fiber is alone.
inline uint32_t atomicMax(uint32_t* p, uint32_t x) {
  const uint32_t before = *p;
  *p = before > x ? before : x;
  return before;
}

inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }

namespace crossply::emulator {

// d += a b as tensor cores do: see above.
void multiply_tiles(float (&d)[16][8], const float (&a)[16][16], const float (&b)[16][8]);

// exact, rounded to float and moved by up to `most` units of the last place, but neither to 0 nor to infinity.
// arguments: the bits of what it is a function of.
float inexact(double exact, uint64_t arguments, int most);
inline float inexact(double exact, float x, int most) {
  return inexact(exact, uint64_t{std::bit_cast<uint32_t>(x)}, most);
}
// ex2.approx.ftz.f32: what is below the normal numbers, argument or result, is 0.
inline float exp2_approximately(float x) {
  const double y = std::exp2(static_cast<double>(x));
  return std::abs(x) < 0x1p-126f ? 1.f : y < 0x1p-126 ? 0.f : inexact(y, x, 2);
}

}  // namespace crossply::emulator

// Kernels lie in this namespace, so their calls find these before the C library's.
namespace crossply {

inline float expf(float x) { return x == 0 ? 1.f : emulator::inexact(std::exp(static_cast<double>(x)), x, 2); }
inline float logf(float x) { return emulator::inexact(std::log(static_cast<double>(x)), x, 1); }
inline float log2f(float x) { return emulator::inexact(std::log2(static_cast<double>(x)), x, 1); }
inline float rsqrtf(float x) { return emulator::inexact(1 / std::sqrt(static_cast<double>(x)), x, 2); }
inline float tanhf(float x) {
  if (std::isinf(x)) return std::copysign(1.f, x);
  const float y = emulator::inexact(std::tanh(static_cast<double>(x)), x, 2);
  return y > 1 ? 1.f : y < -1 ? -1.f : y;
}
inline float __fdividef(float x, float y) {
  const float size = std::abs(y);
  if (size > 0x1p126f && std::isfinite(y)) return std::isinf(x) ? NAN : 0 * x;
  const uint64_t both = uint64_t{std::bit_cast<uint32_t>(x)} << 32 | std::bit_cast<uint32_t>(y);
  return emulator::inexact(static_cast<double>(x) / static_cast<double>(y), both, 2);
}

}  // namespace crossply
