// Not yet run on hardware: only in the emulator.
#include <cstdio>

#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/cuda.h"

namespace crossply {
namespace {

class CudaDevice : public Device {
 public:
  CudaDevice() : description_(describe_gpu()) {}
  std::string describe() const override { return description_; }
  Stream stream() const override { return Stream{Backend::cuda}; }
  Memory memory() const override { return device_memory(); }

  void* allocate(size_t bytes) override { return allocate_device_memory(bytes); }
  void release(void* data) override { release_device_memory(data); }
  void copy_in(void* device, const void* host, size_t bytes) override { copy_to_device(device, host, bytes); }
  void copy_out(void* host, const void* device, size_t bytes) override { copy_from_device(host, device, bytes); }
  void fill(void* device, uint8_t byte, size_t bytes) override { fill_device_memory(device, byte, bytes); }
  void begin_read(const void* device, size_t bytes) override { begin_copy_from_device(device, bytes); }
  void end_read(void* host) override { end_copy_from_device(host); }
  void wait() override { synchronize_device(); }
  Arithmetic arithmetic() const override { return {gpu_versions(), choices_as_text()}; }
  void adopt(const std::map<std::string, std::string>& choices, const std::string& where) override {
    take_choices(choices, where);
  }

  // The first run is a plain one: it finds the kernels' scratch memory and the algorithms of the products.
  void replay(Recording& recording, const std::function<void()>& work) override {
    if (recording.runs++ == 0 || recording.scratch != scratch_moves()) {
      recording.graph = nullptr;
      const int64_t transfers = transfers_so_far();
      work();
      recording.scratch = scratch_moves();
      recording.transfers = transfers_so_far() != transfers;
      return;
    }
    if (recording.graph == nullptr && !recording.refused) {
      recording.graph = record(work, recording.transfers);
      recording.refused = recording.graph == nullptr;
    }
    if (recording.refused) work();
    else launch_graph(recording.graph);
  }

 private:
  // Null where CUDA refuses. That costs speed only, unless ranks wait for each other in this work: NCCL wants all of
  // them to record it, or none.
  std::shared_ptr<void> record(const std::function<void()>& work, bool transfers) {
    Captured captured{nullptr, begin_capture()};
    if (captured.refusal.empty()) {
      try {
        work();
      } catch (...) {
        abandon_capture();
        throw;
      }
      captured = end_capture();
    }
    if (captured.refusal.empty()) return captured.graph;
    if (transfers) fail(Exit::device, "ranks must record what they do together, but ", captured.refusal);
    if (!said_so_)
      std::fprintf(stderr, "note: a step may take longer, because CUDA does not record it: %s\n",
                   captured.refusal.c_str());
    said_so_ = true;
    return nullptr;
  }

  std::string description_;
  bool said_so_ = false;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device() { return std::make_unique<CudaDevice>(); }

}  // namespace crossply
