// Runs a kernel where a backend wants its tensors: the CPU's where they are, the GPU's in device memory.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/cuda/cuda.h"
#include "tests/support/tier.h"
#if !CROSSPLY_CUDA
#include "kernels/emulator/emulator_hopper.h"
#endif

namespace crossply::test {

// Whether this machine has it: what was built with CUDA may have no GPU, and says so once.
inline bool available(Backend backend) {
  if (backend != Backend::cuda) return true;
  static const bool there = [] {
    try {
      describe_gpu();
      return true;
    } catch (const Error& error) {
      std::fprintf(stderr, "Tests of the GPU are skipped: %s\n", error.what());
      return false;
    }
  }();
  return there;
}

// What is tested against the reference.
inline std::vector<Backend> fast_backends() {
  if (!available(Backend::cuda)) return {Backend::cpu};
  return {Backend::cpu, Backend::cuda};
}
inline std::vector<Backend> all_backends() {
  auto all = fast_backends();
  all.push_back(Backend::reference);
  return all;
}

// Those that store in T.
template <class T>
std::vector<Backend> backends_of() {
  return std::is_same_v<T, bf16> ? fast_backends() : all_backends();
}

// The CUDA kernels of a family: the fast ones, or the plain ones of its X_plain.cu, where it has these.
enum class Kernels { fast, plain };
inline std::vector<Kernels> kernels_of(Backend backend) {
  if (backend == Backend::cuda) return {Kernels::fast, Kernels::plain};
  return {Kernels::fast};
}
// Whether a call with this stream goes to the plain kernels. The reference that they are compared with does not.
constexpr bool is_plain(Kernels kernels, Stream stream) {
  return kernels == Kernels::plain && stream.backend == Backend::cuda;
}

#if CROSSPLY_CUDA
constexpr bool emulated = false;
#else
constexpr bool emulated = true;  // and so much slower
#endif
// Where only few and small sizes can be had.
constexpr bool is_slow(Backend backend) { return emulated && backend == Backend::cuda; }
constexpr const char* gpu = emulated ? "emulator" : "cuda";
// Whether whole models and runs are tested on the GPU: in the emulator they are of the second tier, for the first tests
// every kernel alone.
inline bool has_whole_models() { return available(Backend::cuda) && (!emulated || everything()); }
inline std::vector<std::string> fast_devices() {
  if (!has_whole_models()) return {"cpu"};
  return {"cpu", gpu};
}

// The sizes that a backend is tested with: small ones have to do in the emulator, a GPU gets both lists.
template <class Size>
std::vector<Size> sizes_of(Backend backend, const std::vector<Size>& of_cpu, const std::vector<Size>& of_gpu) {
  std::vector<Size> sizes = backend == Backend::cuda ? of_gpu : of_cpu;
  if (backend == Backend::cuda && !emulated) sizes.insert(sizes.end(), of_cpu.begin(), of_cpu.end());
  return sizes;
}

// CAPTURE of several variables, which may be backends: CAPTURES(backend, rows, add).
template <class... Values>
std::string listed(const Values&... values) {
  std::ostringstream list;
  const auto append = [&](const auto& value) {
    if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(value)>>) list << static_cast<int>(value) << ' ';
    else list << value << ' ';
  };
  (append(values), ...);
  return list.str();
}
#define CAPTURES(...) INFO(#__VA_ARGS__ " := " << ::crossply::test::listed(__VA_ARGS__))

// How many bytes beside an array in device memory are watched. None where somebody watches better, whom memory that is
// larger than the array would blind: the emulator, and compute-sanitizer, for which CROSSPLY_TEST_ZONE is "0".
inline size_t zone_beside() {
  const char* zone = std::getenv("CROSSPLY_TEST_ZONE");
  return emulated || (zone != nullptr && zone == std::string("0")) ? 0 : 16384;
}

// Device memory between two zones of NaN that must stay. A GPU stops nobody who writes beyond an array.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes, size_t zone = zone_beside())
      : bytes_(bytes), zone_(zone), memory_(static_cast<std::byte*>(allocate_device_memory(bytes + 2 * zone))) {
    REQUIRE_MESSAGE(memory_ != nullptr, "no device memory for " << bytes << " bytes");
    if (zone == 0) return;
    fill_device_memory(memory_, 0xFF, zone);
    fill_device_memory(memory_ + zone + bytes, 0xFF, zone);
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : bytes_(other.bytes_), zone_(other.zone_), memory_(std::exchange(other.memory_, nullptr)) {}
  ~DeviceMemory() { release_device_memory(memory_); }
  void* data() const { return memory_ + zone_; }
  // Whether both zones are as they were.
  bool kept_inside() const {
    if (zone_ == 0) return true;
    std::vector<std::byte> zones(2 * zone_);
    copy_from_device(zones.data(), memory_, zone_);
    copy_from_device(zones.data() + zone_, memory_ + zone_ + bytes_, zone_);
    return std::all_of(zones.begin(), zones.end(), [](std::byte b) { return b == std::byte{0xFF}; });
  }

 private:
  size_t bytes_, zone_;
  std::byte* memory_;
};

// A copy of host's elements in device memory.
template <class T>
struct OnDevice {
  DeviceMemory memory;
  T* data;
  size_t count;
  explicit OnDevice(const std::vector<T>& host)
      : memory(host.size() * sizeof(T)), data(static_cast<T*>(memory.data())), count(host.size()) {
    copy_to_device(data, host.data(), count * sizeof(T));
  }
  OnDevice(const OnDevice&) = delete;
  std::vector<T> host() const {
    std::vector<T> copy(count);
    copy_from_device(copy.data(), data, count * sizeof(T));
    CHECK(memory.kept_inside());
    return copy;
  }
};

#if !CROSSPLY_CUDA
// While it lives the emulator refuses to record.
struct RefusedCaptures {
  explicit RefusedCaptures(emulator::Refused at) { emulator::refuse_captures(at); }
  ~RefusedCaptures() { emulator::refuse_captures(emulator::Refused::nothing); }
};
#endif

// While it lives the emulator has the instructions of sm_90; a GPU has them or not.
struct WithHopper {
#if !CROSSPLY_CUDA
  WithHopper() { emulator::set_hopper(true); }
  ~WithHopper() { emulator::set_hopper(false); }
#else
  WithHopper() {}
#endif
};

// Calls body(tensors) with these tensors, or with copies of them in device memory, beside each of which nothing may be
// written, nor read behind it; then copies all of them back. Tensors with the same data remain one, those without stay
// so.
template <class F>
void run_on(Stream stream, const std::vector<Tensor>& tensors, F&& body) {
  if (stream.backend != Backend::cuda) return body(tensors);
  std::map<void*, DeviceMemory> copies;
  std::vector<Tensor> there = tensors;
  for (Tensor& t : there) {
    if (t.data == nullptr) continue;
    const auto [copy, fresh] = copies.try_emplace(t.data, t.bytes());
    if (fresh) copy_to_device(copy->second.data(), t.data, t.bytes());
    t.data = copy->second.data();
  }
  body(there);
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].data != nullptr) copy_from_device(tensors[i].data, there[i].data, tensors[i].bytes());
  for (const auto& [host, copy] : copies) CHECK_MESSAGE(copy.kept_inside(), "written beside an array");
}
// The same with the backend's stream: body(tensors, stream).
template <class F>
void run_on(Backend backend, const std::vector<Tensor>& tensors, F&& body) {
  const Stream stream{backend};
  run_on(stream, tensors, [&](const std::vector<Tensor>& there) { body(there, stream); });
}

}  // namespace crossply::test
