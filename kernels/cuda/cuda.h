// The GPU as the rest of the program sees it: memory, copies, and waiting. One GPU a process, one stream on which
// everything happens in order, and beside it one on which a library moves memory between GPUs. In a build without CUDA
// all of this is the emulator's (kernels/emulator/emulator.h).
//
// All of these throw Error with Exit::device, and what the driver says, if a call fails, or one before it has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/device.h"

namespace crossply {

// "NVIDIA H200, 139.8 GiB, compute capability 9.0". Throws Exit::device, with what to do, if there is no usable GPU.
std::string describe_gpu();

// 90 for 9.0; in the emulator 90 or 80, as emulator::set_hopper says. Throws Exit::device where there is no GPU.
CUDA_TWIN int compute_capability();

// Takes the GPU of this process before anything else asks for one: the only one that is visible, else the one of this
// number among the processes of the machine. Throws Exit::usage if there are fewer.
CUDA_TWIN void select_gpu(int local_rank);
CUDA_TWIN std::string gpu_bus_id();  // "0000:1B:00.0": of the GPU in its machine

// The GPU as a device (kernels/cuda/device.cpp). Throws what describe_gpu throws.
CUDA_TWIN std::unique_ptr<Device> make_cuda_device();

// Null if there is not enough; releasing null does nothing. Not zeroed.
void* allocate_device_memory(size_t bytes);
void release_device_memory(void* data);
CUDA_TWIN Device::Memory device_memory();  // of the whole GPU, now
CUDA_TWIN size_t max_device_memory();      // the most that was allocated at one time, or since this:
// Releases the kernels' scratch memory, of which they then take anew what they need, and counts from here.
CUDA_TWIN void restart_memory_count();

// The host memory may be reused, or read, when these return.
void copy_to_device(void* device, const void* host, size_t bytes);
void copy_from_device(void* host, const void* device, size_t bytes);

// The same in two halves, one at a time: the second waits for the copy and what came before it, not for what came
// after.
CUDA_TWIN void begin_copy_from_device(const void* device, size_t bytes);
CUDA_TWIN void end_copy_from_device(void* host);

// From one place in device memory to another, in order with the kernels.
CUDA_TWIN void copy_on_device(void* to, const void* from, size_t bytes);
void fill_device_memory(void* device, uint8_t byte, size_t bytes);
void synchronize_device();
// How often the host has waited until everything was done; on a GPU without the second halves of copies.
CUDA_TWIN int64_t device_waits();

// Work on the stream between the two is not done but recorded, and done by every launch of the graph, with the pointers
// and numbers that it was recorded with. Nothing in between may allocate, or wait for the device. abandon_capture,
// after an error, forgets the recording. A graph frees itself.
//
// CUDA may refuse to begin, to end or to make a graph of a recording; the device is as before, and the work was not
// done. Then this says why, in CUDA's words; else it is "". They throw Exit::device after an error that stays.
struct Captured {
  std::shared_ptr<void> graph;  // null where it was refused
  std::string refusal;
};
std::string begin_capture();
Captured end_capture();
void abandon_capture();
void launch_graph(const std::shared_ptr<void>& graph);

// The transfer stream: memory that a library moves while the stream above computes. What comes onto it after
// start_transfers begins after all that the other stream has been given by then; what comes onto the other stream after
// wait_for_transfers begins after the transfers that the ticket counts. All of it may be recorded; then a ticket is
// waited for within its recording, and all transfers of a recording before its end.
void* transfer_stream();  // a cudaStream_t
void start_transfers();
int64_t mark_transfers();              // a ticket: of all transfers so far
CUDA_TWIN int64_t transfers_so_far();  // grows with each transfer outside a recording
void wait_for_transfers(int64_t ticket);
void synchronize_transfers();  // the host waits for all of them

// Slots of scratch memory: from 0 on they are any kernel's; these are of kernels that call others.
constexpr int cross_entropy_slot = 6, matmul_slot = 7;
// How often the kernels' scratch memory has moved: a graph from before that would write into memory that is gone.
int64_t scratch_moves();

}  // namespace crossply
