// The instructions that sm_90 has beside those of sm_80, as kernels/cuda/hopper.cuh calls them: barriers in memory,
// copies that end there, products of a warpgroup, registers that move between warpgroups.
//
// Copies and products run beside the threads. A copy arrives in pieces, in any order among all that are under way, when
// lots say so; what it writes to is NaN meanwhile. A product reads its operands when it is issued and is done when it
// is waited for; its sums are marked NaNs meanwhile, and what it has read must still be the same when it is done. So a
// wait that is missing, too early or for the wrong phase shows in the results, or throws Error (Exit::internal) as what
// hangs or is undefined does.
//
// Not seen: whether the layouts below are the hardware's, the order of additions within a product, bank conflicts,
// speed.
#pragma once

#include <vector>

#include "kernels/emulator/emulator.h"

namespace crossply::emulator {

// Whether kernels for sm_90 are to be used; at first they are not, because they take the emulator longer.
void set_hopper(bool use);
bool hopper();

// An address in the block's window of shared memory, the first kilobyte of which the hardware keeps.
constexpr uint32_t window_begin = 1024;
uint32_t shared_address(const void* p);  // of dynamic memory, else it throws

// Where the byte at this address is, in rows of 128 bytes: what is copied by boxes and what products read.
constexpr uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

// mbarrier, 8 bytes of shared memory each. A thread's waits for a barrier are for its phases one after the other,
// either from the first on (parity 0, 1, 0 ...), or from one before that, which is over at the start (1, 0, 1 ...).
void barrier_init(void* barrier, uint32_t count, const CallSite& site);
void barrier_init_fence();
void barrier_arrive(void* barrier, const CallSite& site);
void barrier_expect(void* barrier, uint32_t bytes, const CallSite& site);  // and arrive
void barrier_wait(void* barrier, uint32_t parity, const CallSite& site);

// What a box is cut from: dims[0] elements of bf16 in a row, then whatever, with the strides (bytes) of dims 1 to 4.
struct TensorMap {
  const void* base;
  uint64_t dims[5], strides[4];
  uint32_t box[5];
};
// The box from coordinate c on to rows of 128 bytes; what is outside of the dims becomes 0.
void copy_box(void* to, const TensorMap& map, void* barrier, const int (&c)[5], const CallSite& site);

// Ordinary accesses to shared memory that copies and products touch, too, and the fence between the two kinds.
void will_store_shared(const void* p, size_t bytes);
void will_load_shared(const void* p, size_t bytes);
void proxy_fence();

void named_barrier(int id, int count, bool wait, const CallSite& site);
void set_registers(int count, bool more, const CallSite& site);

// d (64, N) = or += a (64, 16) b (16, N). a: four registers of each lane, or null and a descriptor.
struct WarpgroupProduct {
  int N;
  float* d;           // N / 2
  const uint32_t* a;  // 4
  uint64_t of_a, of_b;
  bool b_transposed, accumulate;
};
struct Registers {
  const void* data;
  size_t bytes;
};
void warpgroup_fence(std::vector<Registers> of_products);
void warpgroup_multiply(const WarpgroupProduct& product, const CallSite& site);
void warpgroup_commit(const CallSite& site);
void warpgroup_wait(int groups_left, const CallSite& site);

}  // namespace crossply::emulator
