// What sm_90 has beside the instructions of kernels/cuda/mma.cuh: products of a warpgroup (four warps) that read shared
// memory themselves, copies of boxes that end at barriers in memory, and registers that move between warpgroups. For
// code compiled for sm_90a; under the emulator kernels/emulator/emulator_hopper.h stands for all of it.
//
// Tiles are panels: R rows of 64 bf16, 128 bytes each, R a multiple of 8, beginning at a multiple of 1024 bytes, with
// the 16-byte chunks of every row permuted as the hardware does, chunk c of row r at c ^ r % 8. A row of D > 64 columns
// continues in the next panel, 128 R bytes further on. That is what copy_box writes and what the descriptors below say.
//
// Products are asynchronous. In this order: fence(all sums and registers they will use), multiply ..., commit(), then
// wait<n>(the same), until which nobody may look at the sums, or change what the products read.
//
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/cuda/hopper.h"
#include "kernels/cuda/mma.cuh"

#if CROSSPLY_CUDA
#include <cuda.h>
#else
#include "kernels/emulator/emulator_hopper.h"
#endif

// The same as CALL_SITE where there is no other parameter.
#if CROSSPLY_CUDA
#define CALL_SITE_ALONE
#else
#define CALL_SITE_ALONE emulator::CallSite site = emulator::CallSite::here()
#endif

// 1 where the instructions exist. Elsewhere kernels that need them are empty, and not launched.
#if !CROSSPLY_CUDA || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CROSSPLY_HOPPER 1
#else
#define CROSSPLY_HOPPER 0
#endif

namespace crossply {

constexpr int warpgroup_size = 128;

#if CROSSPLY_CUDA
using TensorMap = CUtensorMap;
#else
using emulator::TensorMap;
#endif

// Rows of 128 bytes in device memory, for copy_box: (batches, heads, D / 64 panels, rows, 64), with the strides between
// rows, heads and batches in elements; a box is R rows of all panels of one head. Rows from `rows` on are zeros to it.
// Throws Exit::internal if the driver, or the emulator, does not take it: addresses and strides are multiples of 16
// bytes, D of 64, R at most 256.
struct RowsOfHeads {
  const bf16* data;
  int64_t D, rows, heads, batches, row_stride, head_stride, batch_stride;
};
TensorMap tensor_map(const RowsOfHeads& of, int box_rows);

using Barrier = uint64_t;  // in shared memory

#if CROSSPLY_HOPPER

// The launch's shared memory, at a multiple of 1024 bytes of the window in which products and copies see it.
__device__ __forceinline__ bf16* panel_memory() {
#if CROSSPLY_CUDA
  extern __shared__ __align__(1024) unsigned char panels[];
  // Before version 13.1 nvcc forgets this alignment if the kernel also has a __shared__ variable. Copies would then
  // land at wrong addresses, so the kernel stops. Without the assembly nvcc assumes the alignment and drops the test.
  uint32_t address;
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(shared_address(panels)));
  if (address % 1024 != 0) __trap();
  return reinterpret_cast<bf16*>(panels);
#else
  return static_cast<bf16*>(emulator::dynamic_shared());
#endif
}
#if !CROSSPLY_CUDA
using emulator::shared_address;
#endif

// -----------------------------------------------------------------------------------------------------------------
// Barriers. A phase is over when `count` threads have arrived and the bytes have come that were expected in it; wait
// returns when the phase of this parity is over: 0 the first, 1 the one before it, then in turn.

__device__ __forceinline__ void barrier_init(Barrier* barrier, uint32_t count CALL_SITE) {
#if CROSSPLY_CUDA
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
#else
  emulator::barrier_init(barrier, count, site);
#endif
}
// By who has made barriers, before the __syncthreads behind which others use them.
__device__ __forceinline__ void barrier_init_fence() {
#if CROSSPLY_CUDA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  emulator::barrier_init_fence();
#endif
}
__device__ __forceinline__ void barrier_arrive(Barrier* barrier CALL_SITE) {
#if CROSSPLY_CUDA
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#else
  emulator::barrier_arrive(barrier, site);
#endif
}
// Arrives, and expects so many more bytes of copies.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, uint32_t bytes CALL_SITE) {
#if CROSSPLY_CUDA
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#else
  emulator::barrier_expect(barrier, bytes, site);
#endif
}
__device__ __forceinline__ void barrier_wait(Barrier* barrier, uint32_t parity CALL_SITE) {
#if CROSSPLY_CUDA
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (done == 0);
#else
  emulator::barrier_wait(barrier, parity, site);
#endif
}

// Number 1 to 15, for `count` threads that wait or only arrive, a multiple of 32.
__device__ __forceinline__ void named_barrier_wait(int id, int count CALL_SITE) {
#if CROSSPLY_CUDA
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
#else
  emulator::named_barrier(id, count, true, site);
#endif
}
__device__ __forceinline__ void named_barrier_arrive(int id, int count CALL_SITE) {
#if CROSSPLY_CUDA
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
#else
  emulator::named_barrier(id, count, false, site);
#endif
}

// Gives each thread of this warpgroup `count` registers, a multiple of 8 in 24..256. The total of all may not grow.
template <int count>
__device__ __forceinline__ void give_registers(CALL_SITE_ALONE) {
#if CROSSPLY_CUDA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
#else
  emulator::set_registers(count, false, site);
#endif
}
template <int count>
__device__ __forceinline__ void take_registers(CALL_SITE_ALONE) {
#if CROSSPLY_CUDA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
#else
  emulator::set_registers(count, true, site);
#endif
}

// -----------------------------------------------------------------------------------------------------------------
// Copies, by one thread. The barrier's phase expects their bytes: of boxes all, also those outside of the tensor.

// The R rows from `row` on of all panels of a head, zeros where there are none. map: a __grid_constant__ parameter.
__device__ __forceinline__ void copy_box(bf16* to, const TensorMap& map, Barrier* barrier, int row, int head,
                                         int batch CALL_SITE) {
#if CROSSPLY_CUDA
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(shared_address(to)),
      "l"(&map), "r"(0), "r"(row), "r"(0), "r"(head), "r"(batch), "r"(shared_address(barrier))
      : "memory");
#else
  emulator::copy_box(to, map, barrier, {0, row, 0, head, batch}, site);
#endif
}

// Ordinary accesses to shared memory that copies and products also touch: by these, and then, before others may go on
// to those, a proxy_fence by the same thread.
template <class T>
__device__ __forceinline__ void store_shared(T* to, const T& x) {
#if !CROSSPLY_CUDA
  emulator::will_store_shared(to, sizeof(T));
#endif
  *to = x;
}
template <class T>
__device__ __forceinline__ T load_shared(const T* from) {
#if !CROSSPLY_CUDA
  emulator::will_load_shared(from, sizeof(T));
#endif
  return *from;
}
__device__ __forceinline__ void proxy_fence() {
#if CROSSPLY_CUDA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  emulator::proxy_fence();
#endif
}

// -----------------------------------------------------------------------------------------------------------------
// Products. A thread holds of sums (64, N), with w its warp in the warpgroup, g = lane / 4 and t = lane % 4,
//   d[4 j + i]   row 16 w + g + 8 (i / 2), column 8 j + 2 t + i % 2
// and of a first factor (64, 16) in registers what mma_m16n8k16 (mma.cuh) has of rows 16 w ..: so d's numbers 8 k ..
// 8 k + 7, rounded in pairs, are the registers of columns 16 k .. 16 k + 15.

template <int N>
using GroupSums = Array<float, N / 2>;

// Descriptors of panels (R, D) at an address of shared memory. The rows of an operand are m or n, 16 columns are k. It
// begins at `row` (a multiple of 8) and `column` (of 16). The constants are added last, to the lower word, which they
// cannot leave: so a tile's descriptors take the compiler an addition each.
__device__ __forceinline__ uint64_t descriptor(uint32_t panels, uint32_t bytes, uint32_t leading) {
  const uint32_t first = (panels & 0x3FFFF) >> 4 | leading << 16;
  return (first + bytes / 16) | uint64_t{1024 >> 4 | 1 << 30} << 32;
}
template <int R>
__device__ __forceinline__ uint64_t descriptor_of_rows(uint32_t panels, int row, int column) {
  return descriptor(panels, 128 * R * (column / 64) + 128 * row + 2 * (column % 64), 1);
}
// Second factors whose rows are k, 16 of them from `row` on (a multiple of 16), and columns n, from `column` (of 64)
// on: transposed.
template <int R>
__device__ __forceinline__ uint64_t descriptor_of_columns(uint32_t panels, int row, int column) {
  return descriptor(panels, 128 * R * (column / 64) + 128 * row, 128 * R >> 4);
}

#if CROSSPLY_CUDA
// A barrier for the compiler: it moves no access to these registers across what comes next.
template <int64_t n>
__device__ __forceinline__ void hold(Array<float, n>& d) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int64_t n>
__device__ __forceinline__ void hold(Array<Pairs, n>& a) {
#pragma unroll
  for (int i = 0; i < n; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(a[i][r])::"memory");
}
#endif

// Before wgmma_fence, of sums that the products behind it set: so no register keeps what they were.
template <int64_t n>
__device__ __forceinline__ void forget(Array<float, n>& d) {
#pragma unroll
  for (int i = 0; i < n; ++i)
#if CROSSPLY_CUDA
    asm volatile("" : "=f"(d[i]));
#else
    d[i] = NAN;
#endif
}

// Before products that use these sums and registers, all of them, after they were touched.
template <class... Used>
__device__ __forceinline__ void wgmma_fence(Used&... used) {
#if CROSSPLY_CUDA
  (hold(used), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  emulator::warpgroup_fence({{&used, sizeof(used)}...});
#endif
}
__device__ __forceinline__ void wgmma_commit(CALL_SITE_ALONE) {
#if CROSSPLY_CUDA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  emulator::warpgroup_commit(site);
#endif
}
// Until at most the youngest `groups` groups are under way; used: what those that are done used.
template <int groups, class... Used>
__device__ __forceinline__ void wgmma_wait([[maybe_unused]] Used&... used) {
#if CROSSPLY_CUDA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
  (hold(used), ...);
#else
  emulator::warpgroup_wait(groups, {"wgmma_wait", groups});
#endif
}

#if CROSSPLY_CUDA
// The registers of sums, in instructions and as their operands.
#define SUMS_4 "%0, %1, %2, %3"
#define OPERANDS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define SUMS_32                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OPERANDS_32                                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define SUMS_64                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
  "%59, %60, %61, %62, %63"
#define OPERANDS_64                                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MULTIPLY_SHARED_8                                                                                 \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" SUMS_4 \
  "}, %4, %5, p, 1, 1, %7, %8;\n}"
#define MULTIPLY_REGISTERS_8                                                                              \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" SUMS_4 \
  "}, {%4, %5, %6, %7}, %8, p, 1, 1, %10;\n}"
#define MULTIPLY_SHARED_64                                                                                   \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SUMS_32 \
  "}, %32, %33, p, 1, 1, %35, %36;\n}"
#define MULTIPLY_REGISTERS_64                                                                                \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SUMS_32 \
  "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
#define MULTIPLY_SHARED_128                                                                                   \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_64 \
  "}, %64, %65, p, 1, 1, %67, %68;\n}"
#define MULTIPLY_REGISTERS_128                                                                                \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_64 \
  "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
#endif

// d (64, N) += a (64, 16) b (16, N), or = if not accumulate, which saves clearing d. Factors in shared memory by
// descriptors of columns (transposed) or of rows; or a first factor in registers.
template <int N, bool b_transposed = false>
__device__ __forceinline__ void wgmma(Array<float, N / 2>& d, uint64_t a, uint64_t b, bool accumulate CALL_SITE) {
  static_assert(N == 8 || N == 64 || N == 128);
#if CROSSPLY_CUDA
  constexpr int t = b_transposed;
  if constexpr (N == 8)
    asm volatile(MULTIPLY_SHARED_8:OPERANDS_4 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(0), "n"(t));
  if constexpr (N == 64)
    asm volatile(MULTIPLY_SHARED_64:OPERANDS_32 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(0), "n"(t));
  if constexpr (N == 128)
    asm volatile(MULTIPLY_SHARED_128:OPERANDS_64 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(0), "n"(t));
#else
  emulator::warpgroup_multiply({N, d.x, nullptr, a, b, b_transposed, accumulate}, site);
#endif
}
template <int N, bool b_transposed = false>
__device__ __forceinline__ void wgmma(Array<float, N / 2>& d, const Pairs& a, uint64_t b, bool accumulate CALL_SITE) {
  static_assert(N == 8 || N == 64 || N == 128);
#if CROSSPLY_CUDA
  constexpr int t = b_transposed;
  if constexpr (N == 8)
    asm volatile(MULTIPLY_REGISTERS_8:OPERANDS_4
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(t));
  if constexpr (N == 64)
    asm volatile(MULTIPLY_REGISTERS_64:OPERANDS_32
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(t));
  if constexpr (N == 128)
    asm volatile(MULTIPLY_REGISTERS_128:OPERANDS_64
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(t));
#else
  emulator::warpgroup_multiply({N, d.x, a.x, 0, b, b_transposed, accumulate}, site);
#endif
}

#endif  // CROSSPLY_HOPPER

}  // namespace crossply
