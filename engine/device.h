// Device: the machine a model runs on, as little of it as the engine needs. Adding one adds a file with a class like
// this.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// What a device keeps of work that it did before.
struct Recording {
  int runs = 0;
  int64_t scratch = 0;  // scratch_moves() of kernels/cuda/cuda.h
  std::shared_ptr<void> graph;
  bool transfers = false;  // ranks move memory in this work
  bool refused = false;    // the device cannot record this work: each time it is launched kernel by kernel
};

// What decides the last digits of a device's numbers beside a run's settings.
struct Arithmetic {
  std::map<std::string, std::string> versions;  // of the device, its driver and libraries, by what they are of
  std::map<std::string, std::string> choices;   // of algorithms, by what they are for, where they were made by timing
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string describe() const = 0;
  virtual Stream stream() const = 0;
  // The memory of a GPU. A CPU reports 0, because it shares its memory with everything else.
  struct Memory {
    size_t bytes = 0, free = 0;
  };
  virtual Memory memory() const { return {}; }
  virtual void* allocate(size_t bytes) = 0;  // aligned to place_unit; null when there is not enough memory
  virtual void release(void* data) = 0;
  virtual void copy_in(void* device, const void* host, size_t bytes) = 0;
  virtual void copy_out(void* host, const void* device, size_t bytes) = 0;
  virtual void fill(void* device, uint8_t byte, size_t bytes) = 0;
  // copy_out in two halves, one at a time: begin_read reads what is there when all that came before is done, end_read
  // waits for that, and not for what came after.
  virtual void begin_read(const void* device, size_t bytes) {
    read_.resize(bytes);
    copy_out(read_.data(), device, bytes);
  }
  virtual void end_read(void* host) { std::memcpy(host, read_.data(), read_.size()); }
  // Does work, which must launch the same kernels with the same arguments each time, with nothing in between that waits
  // for the device. A GPU records it when it comes for the second time, and from then on replays the recording.
  virtual void replay(Recording&, const std::function<void()>& work) { work(); }
  virtual void wait() {}                                // until everything is done
  virtual Arithmetic arithmetic() const { return {}; }  // so far
  // Computes with these choices, of a device with the same versions, from now on. Throws Exit::bad_data, with `where`,
  // for what no device has written.
  virtual void adopt(const std::map<std::string, std::string>& /*choices*/, const std::string& /*where*/) {}

 private:
  std::vector<std::byte> read_;
};

// One contiguous, named block of device memory: parameters, gradients, moments, activations.
class Arena {
 public:
  Arena() = default;
  // Zero-filled. Throws Exit::device, with the size, when there is not enough memory.
  Arena(Device& device, std::string name, size_t bytes);
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  Device* device_ = nullptr;
  std::string name_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// "12.3 MiB": for reports.
std::string format_bytes(double bytes);

}  // namespace crossply
