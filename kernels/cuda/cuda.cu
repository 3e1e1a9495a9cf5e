// Not yet run on hardware: only in the emulator.
#include "kernels/cuda/cuda.cuh"

#include <array>
#include <cstring>
#include <exception>
#include <map>
#include <utility>
#include <vector>

#if !CROSSPLY_CUDA
#include <unistd.h>

#include "kernels/emulator/emulator_hopper.h"
#endif

namespace crossply {
namespace {

__global__ void add_rows_kernel(float* to, const float* from, int64_t rows, int64_t C) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x;
  const float sum = sum_of_rows(from, rows, C, c);
  if (threadIdx.y == 0 && c < C) to[c] += sum;
}

std::map<void*, size_t> allocations;
size_t allocated = 0, max_allocated = 0;
void count_allocation(void* data, size_t bytes) {
  allocations[data] = bytes;
  allocated += bytes;
  max_allocated = std::max(max_allocated, allocated);
}
void count_release(void* data) {
  allocated -= allocations.at(data);
  allocations.erase(data);
}

struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
};
std::array<Scratch, std::tuple_size_v<ScratchBytes>> scratch_slots;
int64_t moves = 0, waits = 0;

}  // namespace

void* scratch_bytes(size_t bytes, int slot) {
  Scratch& s = scratch_slots.at(static_cast<size_t>(slot));
  if (s.bytes < bytes) {
    release_device_memory(s.data);
    s = {};
    s.data = allocate_device_memory(bytes);
    if (s.data == nullptr) fail(Exit::device, "not enough device memory for ", bytes, " bytes of scratch");
    s.bytes = bytes;
    ++moves;
  }
  return s.data;
}
int64_t scratch_moves() { return moves; }
size_t max_device_memory() { return max_allocated; }
void restart_memory_count() {
  for (Scratch& s : scratch_slots) release_device_memory(std::exchange(s, {}).data);
  ++moves;
  max_allocated = allocated;
}
int64_t device_waits() { return waits; }

void raise_shared_limit(const void* kernel, size_t bytes) {
  static std::map<const void*, size_t> limits;
  size_t& limit = limits[kernel];
  if (bytes <= limit) return;
#if CROSSPLY_CUDA  // up to 48 KiB need no asking, but what the kernel has of its own counts as well
  CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
#else
  emulator::set_shared_limit(kernel, bytes);
#endif
  limit = bytes;
}

#if CROSSPLY_CUDA

void check_cuda(cudaError_t error, const char* what, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call would report it again
  fail(Exit::device, file, ":", line, ": ", what, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
}

cudaStream_t cuda_stream() {
  static const cudaStream_t stream = [] {
    cudaStream_t made;
    CHECK_CUDA(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  return stream;
}

namespace {
// Its kernels come before others, so that their few blocks do not wait for a product's many.
cudaStream_t transfers() {
  static const cudaStream_t stream = [] {
    int least = 0, most = 0;
    CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&least, &most));
    cudaStream_t made;
    CHECK_CUDA(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, most));
    return made;
  }();
  return stream;
}

int64_t tickets = 0;  // so far
// The event of a ticket. There are some only: one that is taken again stands for later transfers, too.
cudaEvent_t event_of(int64_t ticket) {
  static cudaEvent_t events[256] = {};
  cudaEvent_t& event = events[ticket % 256];
  if (event == nullptr) CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}
}  // namespace

void* transfer_stream() { return transfers(); }
void start_transfers() {
  static const cudaEvent_t computed = [] {
    cudaEvent_t made;
    CHECK_CUDA(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
    return made;
  }();
  CHECK_CUDA(cudaEventRecord(computed, cuda_stream()));
  CHECK_CUDA(cudaStreamWaitEvent(transfers(), computed, 0));
}
int64_t mark_transfers() {
  CHECK_CUDA(cudaEventRecord(event_of(++tickets), transfers()));
  return tickets;
}
int64_t transfers_so_far() { return tickets; }
void wait_for_transfers(int64_t ticket) { CHECK_CUDA(cudaStreamWaitEvent(cuda_stream(), event_of(ticket), 0)); }
void synchronize_transfers() { CHECK_CUDA(cudaStreamSynchronize(transfers())); }

void select_gpu(int local_rank) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count <= 1) return;  // of none, describe_gpu speaks
  if (local_rank >= count)
    fail(Exit::usage, "this is process ", local_rank, " of this machine, counted from 0, but only ", count,
         " GPUs are visible; start one process a GPU, or look at CUDA_VISIBLE_DEVICES");
  CHECK_CUDA(cudaSetDevice(local_rank));
}
std::string gpu_bus_id() {
  int device = 0;
  char id[32] = "";
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetPCIBusId(id, sizeof id, device));
  return id;
}

int64_t max_shared_bytes() {
  static const int bytes = [] {
    int device = 0, most = 0;
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return most;
  }();
  return bytes;
}

int compute_capability() {
  static const int there = [] {
    int device, major, minor;
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CHECK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    return 10 * major + minor;
  }();
  return there;
}

std::string describe_gpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0)
    fail(Exit::device, "no usable GPU: ", cudaGetErrorString(error), "; see nvidia-smi, or use --device cpu");
  int device = 0;
  cudaDeviceProp gpu;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaGetDeviceProperties(&gpu, device));
  return str(gpu.name, ", ", static_cast<double>(gpu.totalGlobalMem >> 20) / 1024, " GiB, compute capability ",
             gpu.major, ".", gpu.minor);
}

void* allocate_device_memory(size_t bytes) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, std::max<size_t>(bytes, 1));
  if (error == cudaErrorMemoryAllocation) return cudaGetLastError(), nullptr;
  CHECK_CUDA(error);
  count_allocation(data, bytes);
  return data;
}
// cudaFree waits for the whole GPU: after an error perhaps for a rank that is gone, and the others would not be told.
void release_device_memory(void* data) {
  if (data == nullptr) return;
  if (std::uncaught_exceptions() > 0 && tickets > 0)  // recordings have their transfers on the other stream
    for (const cudaStream_t stream : {transfers(), cuda_stream()})
      if (cudaStreamQuery(stream) == cudaErrorNotReady) return;
  if (cudaFree(data) != cudaSuccess) cudaGetLastError();  // an earlier call's error, which is on its way already
  count_release(data);
}
Device::Memory device_memory() {
  Device::Memory memory;
  CHECK_CUDA(cudaMemGetInfo(&memory.free, &memory.bytes));
  return memory;
}

// Through pinned memory, which the GPU reads by itself: the host waits only for the fourth copy before.
void copy_to_device(void* device, const void* host, size_t bytes) {
  struct Pinned {
    void* data = nullptr;
    cudaEvent_t read;  // by the GPU
  };
  static Pinned buffers[4];  // fewer, and a step's tokens would wait for the update before them, with eight bits
  static size_t next = 0;
  constexpr size_t most = size_t{4} << 20;
  for (size_t done = 0; done < bytes; done += most) {
    Pinned& buffer = buffers[next++ % 4];
    const size_t count = std::min(most, bytes - done);
    if (buffer.data == nullptr) {
      CHECK_CUDA(cudaEventCreateWithFlags(&buffer.read, cudaEventDisableTiming));
      CHECK_CUDA(cudaMallocHost(&buffer.data, most));
    }
    CHECK_CUDA(cudaEventSynchronize(buffer.read));
    std::memcpy(buffer.data, static_cast<const std::byte*>(host) + done, count);
    CHECK_CUDA(cudaMemcpyAsync(static_cast<std::byte*>(device) + done, buffer.data, count, cudaMemcpyHostToDevice,
                               cuda_stream()));
    CHECK_CUDA(cudaEventRecord(buffer.read, cuda_stream()));
  }
}
void copy_from_device(void* host, const void* device, size_t bytes) {
  CHECK_CUDA(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda_stream()));
  synchronize_device();
}
namespace {
struct Reading {
  void* pinned = nullptr;
  size_t room = 0, bytes = 0;
  cudaEvent_t done = nullptr;
} reading;
}  // namespace
void begin_copy_from_device(const void* device, size_t bytes) {
  if (reading.done == nullptr) CHECK_CUDA(cudaEventCreateWithFlags(&reading.done, cudaEventDisableTiming));
  if (reading.room < bytes) {
    if (reading.pinned != nullptr) CHECK_CUDA(cudaFreeHost(std::exchange(reading.pinned, nullptr)));
    CHECK_CUDA(cudaMallocHost(&reading.pinned, bytes));
    reading.room = bytes;
  }
  reading.bytes = bytes;
  CHECK_CUDA(cudaMemcpyAsync(reading.pinned, device, bytes, cudaMemcpyDeviceToHost, cuda_stream()));
  CHECK_CUDA(cudaEventRecord(reading.done, cuda_stream()));
}
void end_copy_from_device(void* host) {
  CHECK_CUDA(cudaEventSynchronize(reading.done));
  std::memcpy(host, reading.pinned, reading.bytes);
}
void copy_on_device(void* to, const void* from, size_t bytes) {
  CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_stream()));
}
void fill_device_memory(void* device, uint8_t byte, size_t bytes) {
  CHECK_CUDA(cudaMemsetAsync(device, byte, bytes, cuda_stream()));
}
void synchronize_device() {
  ++waits;
  CHECK_CUDA(cudaStreamSynchronize(cuda_stream()));
}

namespace {
// "" unless the call was refused. An error that stays is reported by every later call, too.
std::string refusal_of(cudaError_t error, const char* call, int line) {
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  const cudaError_t now = cudaStreamQuery(cuda_stream());
  if (now != cudaSuccess && now != cudaErrorNotReady) check_cuda(now, call, __FILE__, line);
  cudaGetLastError();
  return str(call, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
}
}  // namespace
std::string begin_capture() {
  return refusal_of(cudaStreamBeginCapture(cuda_stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture",
                    __LINE__);
}
Captured end_capture() {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  std::string refusal = refusal_of(cudaStreamEndCapture(cuda_stream(), &graph), "cudaStreamEndCapture", __LINE__);
  if (refusal.empty()) refusal = refusal_of(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate", __LINE__);
  if (graph != nullptr) CHECK_CUDA(cudaGraphDestroy(graph));
  if (!refusal.empty()) return {nullptr, refusal};
  return {{ready, [](void* old) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(old)); }}, ""};
}
void abandon_capture() {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(cuda_stream(), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
}
void launch_graph(const std::shared_ptr<void>& graph) {
  CHECK_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.get()), cuda_stream()));
}

#else

int64_t max_shared_bytes() { return 227 * 1024; }  // as sm_90 and sm_100
std::string describe_gpu() { return "emulator of a GPU"; }
int compute_capability() { return emulator::hopper() ? 90 : 80; }
void* allocate_device_memory(size_t bytes) {
  CHECK_THAT(!emulator::captures(), "a recording allocates memory");
  void* data = emulator::allocate(bytes);
  if (data != nullptr) count_allocation(data, bytes);
  return data;
}
void release_device_memory(void* data) {
  if (data == nullptr) return;
  CHECK_THAT(!emulator::captures(), "a recording releases memory");
  emulator::release(data);
  count_release(data);
}
Device::Memory device_memory() {
  constexpr size_t bytes = size_t{1} << 32;
  return {bytes, bytes - std::min(allocated, bytes)};
}
void copy_to_device(void* device, const void* host, size_t bytes) {
  CHECK_THAT(!emulator::captures(), "a recording copies from the host");
  emulator::enqueue([=] { std::memcpy(device, host, bytes); });
}
void copy_from_device(void* host, const void* device, size_t bytes) {
  synchronize_device();
  emulator::enqueue([=] { std::memcpy(host, device, bytes); });
}
namespace {
std::vector<std::byte> being_read;
int64_t read_after = 0;  // works of the device
}  // namespace
void begin_copy_from_device(const void* device, size_t bytes) {
  CHECK_THAT(!emulator::captures(), "a recording copies to the host");
  being_read.resize(bytes);
  emulator::enqueue([=] { std::memcpy(being_read.data(), device, bytes); });
  read_after = emulator::works_done();
}
void end_copy_from_device(void* host) {
  waits += emulator::works_done() == read_after;  // with nothing behind it, a wait for everything
  std::memcpy(host, being_read.data(), being_read.size());
}
void copy_on_device(void* to, const void* from, size_t bytes) {
  emulator::enqueue([=] { std::memcpy(to, from, bytes); });
}
void fill_device_memory(void* device, uint8_t byte, size_t bytes) {
  emulator::enqueue([=] { std::memset(device, byte, bytes); });
}
void synchronize_device() {
  CHECK_THAT(!emulator::captures(), "a recording waits for the device");
  ++waits;
}

std::string begin_capture() {
  if (emulator::refuses_capture(emulator::Refused::begin)) return "the emulator refuses to begin";
  emulator::begin_capture();
  return "";
}
Captured end_capture() {
  std::shared_ptr<void> graph = emulator::end_capture();
  if (emulator::refuses_capture(emulator::Refused::end)) return {nullptr, "the emulator refuses to end"};
  return {std::move(graph), ""};
}
void abandon_capture() { emulator::abandon_capture(); }
void launch_graph(const std::shared_ptr<void>& graph) { emulator::launch(*static_cast<emulator::Works*>(graph.get())); }

void* transfer_stream() {
  static char address = 0;
  return &address;
}
void start_transfers() { emulator::fork_transfers(); }
int64_t mark_transfers() { return emulator::mark_transfers(); }
int64_t transfers_so_far() { return emulator::transfers_asked(); }
void wait_for_transfers(int64_t ticket) { emulator::join_transfers(ticket); }
void synchronize_transfers() { emulator::finish_transfers(); }

void select_gpu(int) {}
std::string gpu_bus_id() { return str("emulator of process ", getpid()); }

#endif

void add_rows(float* to, const float* from, int64_t rows, int64_t C) {
  launch({"add_rows", blocks_of(C, warp_size), dim3(warp_size, groups_of_rows)}, add_rows_kernel, to, from, rows, C);
}

}  // namespace crossply
