// Stream: where a kernel runs. The last argument of every kernel.
#pragma once

#include <array>
#include <cstddef>

namespace crossply {

enum class Backend {
  reference,  // the plain templated loops of each kernel's header, in f64 or f32: slow, and the meaning of every op
  cpu,        // vectorised and threaded, f32 or bf16
  cuda,       // the .cu files of kernels/, f32 or bf16, on the GPU, or in its emulator where the build has no CUDA
};

// How the CPU multiplies f32 matrices: as f32, or each split into two bf16 parts, in three products on the matrix
// units, which keeps about 16 of 24 bits. A CPU without such units multiplies in f32.
enum class MatmulPrecision { f32, bf16x3 };

// Marks what only GPU code, or its emulator, defines. A program without either is linked without it, and never gets a
// Stream that leads there: make_device (kernels/devices.h) refuses. Where a library holds them they are not weak, for
// a weak name fetches nothing from it.
#if CROSSPLY_CUDA || CROSSPLY_EMULATOR || !defined(__ELF__)
#define CUDA_TWIN
#else
#define CUDA_TWIN [[gnu::weak]]
#endif

// Bytes that kernels take on a GPU for their own use, by slot. A slot grows to the largest request of any kernel.
using ScratchBytes = std::array<size_t, 8>;

struct Stream {
  Backend backend = Backend::cpu;
  MatmulPrecision precision = MatmulPrecision::f32;
};

}  // namespace crossply
