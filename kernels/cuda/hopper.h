// Whether the kernels for sm_90 (kernels/cuda/hopper.cuh) can be used.
#pragma once

namespace crossply {

// This GPU has these instructions and this build was made for them (90a); in the emulator where emulator::set_hopper
// says so. Not with CROSSPLY_NO_HOPPER=1 in the environment: attention then uses the kernels for sm_80. Throws
// Exit::device where there is no GPU.
bool has_hopper();

}  // namespace crossply
