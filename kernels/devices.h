// The devices by name.
#pragma once

#include <memory>
#include <string>

#include "engine/device.h"

namespace crossply {

// name: "cpu"; "cuda"; "reference" (the plain loops that define every op: slow, and exact in double); "emulator" (the
// CUDA kernels, thread by thread on the CPU, in builds without CUDA). matmul: "fp32" or "bf16x3" (engine/stream.h), or
// "fp8", of which this only asks whether a GPU has it (a tape does it: Tape::use_eight_bits). Throws Exit::device for a
// device that this build or machine does not have.
std::unique_ptr<Device> make_device(const std::string& name, const std::string& matmul = "fp32");
Backend backend_of(const std::string& device);  // without making it

// From now on device "cuda" is the GPU of the local rank: the only one that is visible, or the one of that number.
void choose_gpu(int local_rank);
// The identity of the chosen GPU among those of all machines.
std::string gpu_in_the_world();

}  // namespace crossply
