#include "engine/device.h"

#include <cstdio>
#include <utility>

#include "engine/out_of_memory.h"

namespace crossply {

Arena::Arena(Device& device, std::string name, size_t bytes)
    : device_(&device), name_(std::move(name)), data_(device.allocate(bytes)), bytes_(bytes) {
  const auto words = [](size_t count) { return format_bytes(static_cast<double>(count)); };
  const auto of_gpu = [&](const Device::Memory& memory) {
    return memory.bytes == 0 ? "" : str("; the GPU has ", words(memory.bytes), ", of them free ", words(memory.free));
  };
  if (data_ == nullptr)
    throw OutOfMemory(Exit::device,
                      str("not enough memory", device.stream().backend == Backend::cuda ? " on the GPU" : "", " for ",
                          name_, ": ", words(bytes), of_gpu(device.memory())));
  device.fill(data_, 0, bytes);
}

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
