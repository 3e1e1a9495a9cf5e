// Runs a kernel where a backend wants its tensors: the CPU's where they are, the GPU's in device memory.
#pragma once

#include <doctest/doctest.h>

#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/check.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/cuda/cuda.h"

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

#if CROSSPLY_CUDA
constexpr bool emulated = false;
#else
constexpr bool emulated = true;  // and so much slower
#endif
constexpr const char* gpu = emulated ? "emulator" : "cuda";
inline std::vector<std::string> fast_devices() {
  if (!available(Backend::cuda)) return {"cpu"};
  return {"cpu", gpu};
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

// A copy of host's elements in device memory.
template <class T>
struct OnDevice {
  T* data;
  size_t count;
  explicit OnDevice(const std::vector<T>& host)
      : data(static_cast<T*>(allocate_device_memory(host.size() * sizeof(T)))), count(host.size()) {
    copy_to_device(data, host.data(), count * sizeof(T));
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() { release_device_memory(data); }
  std::vector<T> host() const {
    std::vector<T> copy(count);
    copy_from_device(copy.data(), data, count * sizeof(T));
    return copy;
  }
};

// Calls body(tensors) with these tensors, or with copies of them in device memory, each of which ends where
// reading on is an error; then copies all of them back. Tensors with the same data remain one, those without stay so.
template <class F>
void run_on(Stream stream, const std::vector<Tensor>& tensors, F&& body) {
  if (stream.backend != Backend::cuda) return body(tensors);
  std::map<void*, void*> copies;
  std::vector<Tensor> there = tensors;
  for (Tensor& t : there) {
    if (t.data == nullptr) continue;
    void*& copy = copies[t.data];
    if (copy == nullptr) {
      copy = allocate_device_memory(t.bytes());
      copy_to_device(copy, t.data, t.bytes());
    }
    t.data = copy;
  }
  body(there);
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].data != nullptr) copy_from_device(tensors[i].data, there[i].data, tensors[i].bytes());
  for (const auto& [host, copy] : copies) release_device_memory(copy);
}
// The same with the backend's stream: body(tensors, stream).
template <class F>
void run_on(Backend backend, const std::vector<Tensor>& tensors, F&& body) {
  const Stream stream{backend};
  run_on(stream, tensors, [&](const std::vector<Tensor>& there) { body(there, stream); });
}

}  // namespace crossply::test
