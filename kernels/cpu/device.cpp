#include <omp.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/device.h"

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
  explicit CpuDevice(Backend backend, MatmulPrecision precision) : stream_{backend, precision} {}

  std::string describe() const override {
    if (stream_.backend == Backend::reference) return "reference (plain loops)";
    return str("cpu, ", omp_get_max_threads(), omp_get_max_threads() == 1 ? " thread" : " threads");
  }
  Stream stream() const override { return stream_; }

  void* allocate(size_t bytes) override { return allocate_pages(bytes); }
  void release(void* data) override { std::free(data); }
  void copy_in(void* device, const void* host, size_t bytes) override { std::memcpy(device, host, bytes); }
  void copy_out(void* host, const void* device, size_t bytes) override { std::memcpy(host, device, bytes); }
  void fill(void* device, uint8_t byte, size_t bytes) override { fill_memory(device, byte, bytes); }

 private:
  Stream stream_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(Backend backend, MatmulPrecision precision) {
  return std::make_unique<CpuDevice>(backend, precision);
}

}  // namespace crossply
