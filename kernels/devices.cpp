#include "kernels/devices.h"

#include <fstream>

#include "kernels/cpu/device.h"
#include "kernels/cuda/cuda.h"

namespace crossply {
namespace {

std::unique_ptr<Device> make_gpu(const std::string& name) {
#if CROSSPLY_CUDA
  if (name == "emulator") fail(Exit::device, "this build has CUDA, not its emulator; use --device cuda");
#else
  if (name == "cuda")
    fail(Exit::device, "this build has no CUDA; install the CUDA toolkit and build with make CUDA=1, or use ",
         "--device cpu");
#endif
  auto make = make_cuda_device;  // null where neither was linked; if const, a warning where one always is
  if (make == nullptr)
    fail(Exit::device, "only the tests have the emulator; for a program with it, build with make ",
         "CMAKE_FLAGS=-DCROSSPLY_EMULATOR=ON");
  return make();
}

void refuse_without_eight_bits() {
  auto capability = compute_capability;  // as in make_gpu
  if (const int has = capability(); has < 89)
    fail(Exit::device, "this GPU has no products of eight bits: its compute capability is ", has / 10, ".", has % 10,
         ", they come with 8.9 (Ada, Hopper and later); train without --matmul fp8");
}

}  // namespace

Backend backend_of(const std::string& device) {
  if (device == "cuda" || device == "emulator") return Backend::cuda;
  return device == "reference" ? Backend::reference : Backend::cpu;
}

std::unique_ptr<Device> make_device(const std::string& name, const std::string& matmul) {
  CHECK_THAT(matmul == "fp32" || matmul == "bf16x3" || matmul == "fp8", "unknown products '", matmul, "'");
  CHECK_THAT(matmul != "fp8" || backend_of(name) == Backend::cuda, "fp8 on ", name);
  const MatmulPrecision precision = matmul == "bf16x3" ? MatmulPrecision::bf16x3 : MatmulPrecision::f32;
  if (name == "cpu") return make_cpu_device(Backend::cpu, precision);
  if (name == "reference") return make_cpu_device(Backend::reference, MatmulPrecision::f32);
  if (name == "cuda" || name == "emulator") {
    auto gpu = make_gpu(name);
    if (name == "cuda" && matmul == "fp8") refuse_without_eight_bits();
    return gpu;
  }
  fail(Exit::usage, "unknown device '", name, "'; known: cpu, cuda, reference, emulator");
}

void choose_gpu(int local_rank) {
  auto select = select_gpu;  // as in make_gpu
  if (select != nullptr) select(local_rank);
}

std::string gpu_in_the_world() {
  std::string boot;  // of the machine, also for its containers
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  auto bus_id = gpu_bus_id;  // as in make_gpu
  return str(bus_id != nullptr ? bus_id() : "none", " of the machine with boot id ", boot);
}

}  // namespace crossply
