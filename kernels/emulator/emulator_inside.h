// What the emulator's files share: its threads, which are fibers, and what goes on beside them on sm_90
// (kernels/emulator/emulator_hopper.cpp).
#pragma once

#include <string>

#include "kernels/emulator/emulator.h"

namespace crossply::emulator::inside {

extern int current, threads;  // which thread of the block runs, of how many
extern const char* kernel_name;
extern int64_t block_barriers;  // how many __syncthreads of this block all its threads have passed

// The launch's shared memory.
extern void* dynamic;
extern size_t dynamic_bytes;

uint64_t lot(uint64_t below);
std::string thread_name(int thread);
std::string where(const CallSite& site);
template <class... Args>
[[noreturn]] void fail_kernel(const Args&... args) {
  fail(Exit::internal, "emulated kernel ", kernel_name, ": ", args...);
}

// Returns when somebody has made this thread runnable again.
void wait_for(const char* what, const CallSite& site);
void wake(int thread);
// Whether these bytes lie in one allocation of device memory.
bool in_device_memory(const void* data, size_t bytes);

// Asynchronous copies and products of a block. go_on: something of what is under way may happen now, and must if all
// threads wait; false if nothing is under way. The end of a block throws where something was left undone.
void begin_asynchronous();
bool go_on(bool must);
void end_asynchronous();
std::string asynchronous_state();  // for the report of a deadlock

}  // namespace crossply::emulator::inside
