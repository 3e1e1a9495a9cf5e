// A warp's matrix products on the tensor cores of sm_80 and later, and what feeds them: the instructions that C++ has
// no words for. Under the emulator plain loops over the operands of all lanes, which hold them as the PTX manual says.
//
// With g = lane / 4 and t = lane % 4, two bf16 in a register, the lower one first, a lane holds of a product of
//   a (16,16)  columns 2t and 2t+1 of rows g and g+8, then columns 2t+8 and 2t+9 of the same rows
//   b (16,8)   rows 2t and 2t+1 of column g, then rows 2t+8 and 2t+9
//   d (16,8)   columns 2t and 2t+1 of row g, then of row g+8, in f32
// So the sums of two adjacent products, rounded to bf16, are the a of another one.
//
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/cuda/cuda.cuh"

// Names the line of a call where the emulator wants to know which lanes wait at the same one.
#if CROSSPLY_CUDA
#define CALL_SITE
#else
#define CALL_SITE , emulator::CallSite site = emulator::CallSite::here()
#endif

namespace crossply {

using Pairs = Array<uint32_t, 4>;  // a lane's part of four matrices (8,8) of bf16: of an a, or of two b

#if !CROSSPLY_CUDA
namespace emulator {

inline float half_of(uint32_t pair, int i) { return std::bit_cast<float>(pair >> 16 * i << 16); }

struct MmaOperands {
  Floats<4>* d;
  Pairs a;
  uint32_t b[2];
};
inline void multiply(void* const* operands, uint32_t) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < warp_size; ++lane) {
    const auto& own = *static_cast<const MmaOperands*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][2 * t + r / 2 * 8 + i] = half_of(own.a[r], i);
      for (int r = 0; r < 2; ++r) b[2 * t + r * 8 + i][g] = half_of(own.b[r], i);
    }
  }
  float d[16][8];
  const auto each = [&](auto&& body) {
    for (int lane = 0; lane < warp_size; ++lane)
      for (int i = 0; i < 4; ++i)
        body((*static_cast<const MmaOperands*>(operands[lane])->d)[i], d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
  };
  each([](float& own, float& in_tile) { in_tile = own; });
  multiply_tiles(d, a, b);
  each([](float& own, float& in_tile) { own = in_tile; });
}

struct MatrixRow {
  const uint16_t* row;
  Pairs* to;
};
template <bool transposed>
void load_matrices(void* const* operands, uint32_t) {
  for (int lane = 0; lane < warp_size; ++lane)
    for (int m = 0; m < 4; ++m) {
      uint32_t halves[2];
      for (int i = 0; i < 2; ++i) {
        const int at = lane % 4 * 2 + i, row = transposed ? at : lane / 4, column = transposed ? lane / 4 : at;
        halves[i] = static_cast<const MatrixRow*>(operands[m * 8 + row])->row[column];
      }
      (*static_cast<const MatrixRow*>(operands[lane])->to)[m] = halves[0] | halves[1] << 16;
    }
}
template <bool transposed>
Pairs load_matrices(const bf16* row, const char* what, const CallSite& site) {
  CHECK_THAT(reinterpret_cast<uintptr_t>(row) % 16 == 0, what, ": a row that is not aligned to 16 bytes");
  Pairs to;
  MatrixRow own{reinterpret_cast<const uint16_t*>(row), &to};
  synchronize_warp(~0u, &own, load_matrices<transposed>, what, site);
  return to;
}

}  // namespace emulator
#endif

// d += a b. Sums in f32, cut off instead of rounded.
__device__ __forceinline__ void mma_m16n8k16(Floats<4>& d, const Pairs& a, uint32_t b0, uint32_t b1 CALL_SITE) {
#if CROSSPLY_CUDA
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  emulator::MmaOperands own{&d, a, {b0, b1}};
  emulator::synchronize_warp(~0u, &own, emulator::multiply, "mma_m16n8k16", site);
#endif
}

// Four matrices (8,8) from shared memory: lane i names row i % 8 of matrix i / 8 (16 bytes, aligned) and gets, of each
// matrix, columns 2t and 2t+1 of row g; transposed: rows 2t and 2t+1 of column g.
__device__ __forceinline__ Pairs ldmatrix(const bf16* row CALL_SITE) {
#if CROSSPLY_CUDA
  Pairs to;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
  return to;
#else
  return emulator::load_matrices<false>(row, "ldmatrix", site);
#endif
}
__device__ __forceinline__ Pairs ldmatrix_transposed(const bf16* row CALL_SITE) {
#if CROSSPLY_CUDA
  Pairs to;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
  return to;
#else
  return emulator::load_matrices<true>(row, "ldmatrix_transposed", site);
#endif
}

// Copies 4 or 16 bytes, aligned to as many, to shared memory, or zeros where not `there`; from is a valid address in
// either case. The copies are done when the thread has waited for their group, for others after a barrier behind that.
template <int bytes>
__device__ __forceinline__ void cp_async(void* to, const void* from, bool there) {
  static_assert(bytes == 4 || bytes == 16);
#if CROSSPLY_CUDA
  const int read = there ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(read)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(read)
                 : "memory");
#else
  CHECK_THAT(reinterpret_cast<uintptr_t>(to) % bytes == 0 && reinterpret_cast<uintptr_t>(from) % bytes == 0,
             "cp_async: an address that is not aligned to ", bytes, " bytes");
  emulator::copy_async(to, there ? from : nullptr, bytes);
#endif
}
// Ends a group of copies, be it empty.
__device__ __forceinline__ void cp_async_commit() {
#if CROSSPLY_CUDA
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulator::commit_copies();
#endif
}
// Until at most the youngest `groups` groups are under way.
template <int groups>
__device__ __forceinline__ void cp_async_wait() {
#if CROSSPLY_CUDA
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
#else
  emulator::wait_copies(groups);
#endif
}

// The two of a pair.
__device__ __forceinline__ float first_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// x, as if nobody knew its value: addresses made of it in a loop are made there, instead of being held in registers.
template <class T>
__device__ __forceinline__ T forgotten(T x) {
#if CROSSPLY_CUDA
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
  else asm volatile("" : "+r"(x));
#endif
  return x;
}

// 2^x to 2 ulps; results below the normal numbers are 0.
__device__ __forceinline__ float exp2_fast(float x) {
#if CROSSPLY_CUDA
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emulator::exp2_approximately(x);
#endif
}

}  // namespace crossply
