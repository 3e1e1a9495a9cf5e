// What kernels for sm_90 take for granted of the hardware, each alone in a kernel of one block: for the first minutes
// on such a GPU, where `tests -tc="hopper*"` says which of it does not hold, and for the emulator's instructions.
#pragma once

#include <cstdint>

#include "engine/dtype.h"

namespace crossply::test {

// Pointers are to device memory. All throw Exit::internal where there are no such instructions; in the emulator also
// where a mistake is seen. seed: of the emulator's lots; on a GPU of the pauses that threads make.

// One warp hands the numbers 0 .. rounds - 1 to another through one slot and two barriers: to (rounds) has what came.
void hand_over(int* to, int rounds, uint64_t seed);

// Rows of x (batches, rows, row_stride), which has heads of D columns, as the box from `row` on lies in shared memory.
struct Boxed {
  static constexpr int rows = 21, D = 128, heads = 2, batches = 2, row_stride = heads * D + 8, box_rows = 16;
};
void take_box(bf16* to, const bf16* x, int row, int head, int batch);

// Element (row, column) of panels of R rows.
template <int R>
constexpr int64_t place_in_panels(int row, int column) {
  return R * 64 * (column / 64) + 64 * row + ((column % 64 / 8) ^ (row % 8)) * 8 + column % 8;
}

// d (64, N) += a b by one warpgroup; a (64, K) from panels or from registers, b (N, K) or, transposed, (K, N).
struct WgmmaShape {
  int N, K;
  bool in_registers, transposed;
};
enum class Broken { none, fence, early_look, proxy, step, touched };  // but for the first in the emulator only
void multiply(float* d, const bf16* a, const bf16* b, const WgmmaShape& factors, Broken broken, uint64_t seed);

// out (128, 64) = the sum over `tiles` tiles (64, 64) of q (128, 64) tile^T, as attention would: a producer that fills
// a ring of two stages, two warpgroups that take 64 rows of q each, in turns, and give the stages back.
enum class Mistake {  // but for the first in the emulator only
  none,
  no_wait_full,    // products do not wait for their tile
  released_early,  // a stage is given back before the products that read it are done
  parity,          // the producer waits for the wrong phase
  count,           // the stages' barriers count more arrivals than come
  few_bytes,       // the phase expects fewer bytes than come
  many_bytes,      // or more
  init_fence,      // barriers are not fenced
  turns,           // a warpgroup does not hand on its turn
  registers,       // warpgroups take more registers than there are
  no_release,      // stages are not given back
  more_arrivals,   // every lane gives back
  loaded,          // ordinary loads of a stage without a fence
};
void pipe(float* out, const bf16* q, const bf16* k, int tiles, Mistake mistake, uint64_t seed);

// How fast: the first `multiplying` of `groups` warpgroups make rounds * 16 products (64, 16) (16, N) of ones, on top
// of each other, and wait after every 16 (of more nvcc would make one after the other); every thread of the others
// makes rounds * 128 exponentials of 2, x <- 2^-x, in eight chains. out (groups * 128) gets the mean of a thread's
// sums, which are rounds * 256, or of its last x, which tend to 0.6411857; clocks (groups) what that took, 0 in the
// emulator.
struct Rate {
  int N;
  bool in_registers;  // the first factor
  int groups, multiplying;
};
void measure(float* out, int64_t* clocks, const Rate& rate, int rounds);

}  // namespace crossply::test
