// The tests of the kernels without a GPU and without its emulator, which takes an emulated CPU too long: main, and the
// functions of kernels/cuda that these tests call, as on a machine that has no GPU.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "engine/check.h"
#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/cuda.h"
#include "kernels/emulator/emulator_hopper.h"

namespace crossply {

namespace {
[[noreturn]] void no_gpu() { fail(Exit::device, "there is no GPU, and no emulator of one"); }
}  // namespace

std::string describe_gpu() { no_gpu(); }
void* allocate_device_memory(size_t) { no_gpu(); }
void release_device_memory(void*) {}
void copy_to_device(void*, const void*, size_t) { no_gpu(); }
void copy_from_device(void*, const void*, size_t) { no_gpu(); }
void fill_device_memory(void*, uint8_t, size_t) { no_gpu(); }
std::map<std::string, std::string> choices_as_text() { no_gpu(); }
void forget_choices() { no_gpu(); }
namespace emulator {
void set_hopper(bool) { no_gpu(); }
}  // namespace emulator

}  // namespace crossply
