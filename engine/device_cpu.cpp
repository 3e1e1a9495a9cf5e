#include <omp.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "engine/device.h"
#include "kernels/cpu.h"

namespace crossply {
namespace {

// Of what is larger than the caches every thread fills its part, past the caches where the CPU can: writing through
// them would read the old contents first. Also the first touch of new memory, so it lies near the threads.
void fill_memory(void* data, uint8_t byte, size_t bytes) {
  constexpr size_t unit = 64, large = size_t{4} << 20;
  if (bytes < large || omp_in_parallel()) return static_cast<void>(std::memset(data, byte, bytes));
#pragma omp parallel
  {
    const size_t t = static_cast<size_t>(omp_get_thread_num()), threads = static_cast<size_t>(omp_get_num_threads());
    const size_t units = bytes / unit, begin = units * t / threads * unit;
    const size_t end = t + 1 == threads ? bytes : units * (t + 1) / threads * unit;
    std::byte* to = static_cast<std::byte*>(data);
#ifdef __SSE2__
    const __m128i value = _mm_set1_epi8(static_cast<char>(byte));
    size_t i = begin;
    for (; i + sizeof value <= end; i += sizeof value) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), value);
    std::memset(to + i, byte, end - i);
    _mm_sfence();
#else
    std::memset(to + begin, byte, end - begin);
#endif
  }
}

class CpuDevice : public Device {
 public:
  explicit CpuDevice(Backend backend, Products products) : stream_{backend, products} {}

  std::string describe() const override {
    if (stream_.backend == Backend::reference) return "reference (plain loops)";
    return str("cpu, ", omp_get_max_threads(), omp_get_max_threads() == 1 ? " thread" : " threads");
  }
  Stream stream() const override { return stream_; }

  void* allocate(size_t bytes, const std::string& name) override {
    void* data = allocate_pages(bytes);
    if (data == nullptr)
      fail(Exit::device, "not enough memory for ", name, ": ", format_bytes(static_cast<double>(bytes)),
           ". Use a smaller --batch with --accumulate, a shorter --seq, or a smaller model");
    fill_memory(data, 0, bytes);
    return data;
  }
  void release(void* data) override { std::free(data); }
  void copy_in(void* device, const void* host, size_t bytes) override { std::memcpy(device, host, bytes); }
  void copy_out(void* host, const void* device, size_t bytes) override { std::memcpy(host, device, bytes); }
  void fill(void* device, uint8_t byte, size_t bytes) override { fill_memory(device, byte, bytes); }

 private:
  Stream stream_;
};

}  // namespace

Backend backend_of(const std::string& device) {
  if (device == "cuda" || device == "emulator") return Backend::cuda;
  return device == "reference" ? Backend::reference : Backend::cpu;
}

std::unique_ptr<Device> make_device(const std::string& name, const std::string& matmul) {
  CHECK_THAT(matmul == "fp32" || matmul == "bf16x3", "unknown products '", matmul, "'");
  const Products products = matmul == "fp32" ? Products::f32 : Products::bf16x3;
  if (name == "cpu") return std::make_unique<CpuDevice>(Backend::cpu, products);
  if (name == "reference") return std::make_unique<CpuDevice>(Backend::reference, Products::f32);
  if (name == "cuda" || name == "emulator") return make_cuda_device(name);
  fail(Exit::usage, "unknown device '", name, "'; known: cpu, cuda, reference, emulator");
}

Arena::Arena(Device& device, std::string name, size_t bytes)
    : device_(&device), name_(std::move(name)), data_(device.allocate(bytes, name_)), bytes_(bytes) {}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(name_, other.name_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Arena::~Arena() {
  if (data_ != nullptr) device_->release(data_);
}

std::string format_bytes(double bytes) {
  const char* unit = "B";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (bytes < 1024) break;
    bytes /= 1024;
    unit = next;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit[0] == 'B' ? "%.0f %s" : "%.1f %s", bytes, unit);
  return text;
}

}  // namespace crossply
