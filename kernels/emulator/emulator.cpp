#ifdef __APPLE__  // its header of contexts wants to be asked for, and warns that it is old
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
#endif
#include "kernels/emulator/emulator.h"

#include "kernels/emulator/emulator_inside.h"

#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CROSSPLY_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CROSSPLY_ASAN 1
#endif
#endif
#ifdef CROSSPLY_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
constexpr size_t stack_bytes = 512 * 1024;  // its frames are larger
#else
constexpr size_t stack_bytes = 64 * 1024;
#endif

namespace crossply::emulator {

using namespace inside;

namespace {

constexpr int max_threads = 1024, warp_lanes = 32;
constexpr size_t max_shared = 227 * 1024;  // of one block on sm_90 and sm_100
constexpr size_t shared_unasked = 48 * 1024;
constexpr uint8_t poison = 0xFF;  // of which floats, bf16 and doubles are NaN

struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes;
};

// Where a stack was left. <ucontext.h> would do everywhere, but asks the system for the signal mask at every switch,
// which takes 40 times as long as the switch.
#ifdef __x86_64__
using Context = void*;  // its stack pointer, below the registers that a function must keep
extern "C" void switch_stack(Context* from, Context to) asm("crossply_switch_stack");
asm(R"(
.text
.p2align 4
crossply_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void switch_context(Context& from, const Context& to) { switch_stack(&from, to); }
void start_context(Context& context, std::byte* stack, size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) / 16 * 16;
  auto* words = reinterpret_cast<void**>(top) - 2;  // as after a call, the stack is 8 bytes off a multiple of 16
  *words = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--words = nullptr;
  context = words;
}
#else
using Context = ucontext_t;
void switch_context(Context& from, const Context& to) { swapcontext(&from, &to); }
void start_context(Context& context, std::byte* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

struct Fiber {
  Context context{};
  std::unique_ptr<std::byte[]> stack{new std::byte[stack_bytes]};
  uint3 index{};
  bool ended = false;
  const char* waits = nullptr;  // for what; null: runs, or may run
  CallSite site;
  std::deque<std::vector<AsyncCopy>> copies;  // committed groups, and the open one
};

// Lanes of a warp that wait for each other.
struct Meeting {
  uint32_t mask, arrived;
  const char* what;
  CallSite site;
  void* operands[warp_lanes];
};

struct ThreadBlock {
  std::vector<int> runnable;
  int alive = 0, at_barrier = 0;
  std::vector<Meeting> meetings[max_threads / warp_lanes];  // of each warp
  std::exception_ptr error;
};

std::mutex one_work;
std::vector<std::unique_ptr<Fiber>> fibers;
std::map<const void*, std::pair<void*, size_t>> statics;  // of the present block
Context scheduler{};
const std::function<void()>* kernel_body = nullptr;
ThreadBlock now;
std::map<const void*, size_t> shared_limits;  // of kernels
uint64_t lots = 1;

}  // namespace

namespace inside {

int current = 0, threads = 0;
const char* kernel_name = "";
int64_t block_barriers = 0;
void* dynamic = nullptr;
size_t dynamic_bytes = 0;

uint64_t lot(uint64_t below) {
  lots ^= lots >> 12, lots ^= lots << 25, lots ^= lots >> 27;
  return (lots * 0x2545F4914F6CDD1Dull >> 33) % below;
}

std::string where(const CallSite& site) { return str(site.file, ":", site.line); }
std::string thread_name(int t) {
  const uint3 i = fibers[static_cast<size_t>(t)]->index;
  return str("thread (", i.x, ", ", i.y, ", ", i.z, ") of block (", blockIdx.x, ", ", blockIdx.y, ", ", blockIdx.z,
             ")");
}

}  // namespace inside

namespace {

// -----------------------------------------------------------------------------------------------------------------
// Fibers. AddressSanitizer must be told of every change of stacks.

#ifdef CROSSPLY_ASAN
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif

void switch_to_scheduler(Fiber& from, [[maybe_unused]] bool for_good) {
#ifdef CROSSPLY_ASAN
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, scheduler_stack, scheduler_stack_bytes);
#endif
  switch_context(from.context, scheduler);
#ifdef CROSSPLY_ASAN
  __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

void switch_to(Fiber& fiber) {
#ifdef CROSSPLY_ASAN
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), stack_bytes);
#endif
  switch_context(scheduler, fiber.context);
#ifdef CROSSPLY_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void fiber_main() {
#ifdef CROSSPLY_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  Fiber& self = *fibers[static_cast<size_t>(current)];
  try {
    (*kernel_body)();
  } catch (...) {
    now.error = std::current_exception();
  }
  self.ended = true;
  --now.alive;
  switch_to_scheduler(self, true);
}

}  // namespace

void inside::wait_for(const char* what, const CallSite& site) {
  Fiber& self = *fibers[static_cast<size_t>(current)];
  self.waits = what, self.site = site;
  switch_to_scheduler(self, false);
}
void inside::wake(int t) {
  fibers[static_cast<size_t>(t)]->waits = nullptr;
  now.runnable.push_back(t);
}

namespace {

void start_fibers(dim3 block) {
  while (fibers.size() < static_cast<size_t>(threads)) fibers.push_back(std::make_unique<Fiber>());
  now.runnable.clear(), now.alive = threads, now.at_barrier = 0, now.error = nullptr;
  for (auto& meetings : now.meetings) meetings.clear();
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *fibers[static_cast<size_t>(t)];
    const auto n = static_cast<uint32_t>(t);
    fiber.index = {n % block.x, n / block.x % block.y, n / block.x / block.y};
    fiber.ended = false;
    fiber.waits = nullptr;
    fiber.copies.assign(1, {});
#ifdef CROSSPLY_ASAN
    __asan_unpoison_memory_region(fiber.stack.get(), stack_bytes);  // of frames that were left for good
#endif
    start_context(fiber.context, fiber.stack.get(), stack_bytes, fiber_main);
    now.runnable.push_back(t);
  }
}

[[noreturn]] void report_deadlock() {
  std::string waiting;
  int ended = 0, said = 0;
  for (int t = 0; t < threads; ++t) {
    const Fiber& fiber = *fibers[static_cast<size_t>(t)];
    ended += fiber.ended;
    if (!fiber.ended && said++ < 3)
      waiting += str("; ", thread_name(t), " waits in ", fiber.waits, " at ", where(fiber.site));
  }
  fail_kernel("threads wait for others that will not come: ", ended, " of ", threads, " have ended", waiting,
              asynchronous_state());
}

void run_block(dim3 block) {
  for (auto& [key, memory] : statics) std::memset(memory.first, poison, memory.second);
  start_fibers(block);
  block_barriers = 0;
  begin_asynchronous();
  while (now.alive > 0) {
    while (go_on(now.runnable.empty()) && now.runnable.empty()) continue;
    if (now.runnable.empty()) report_deadlock();
    std::swap(now.runnable[lot(now.runnable.size())], now.runnable.back());
    current = now.runnable.back();
    now.runnable.pop_back();
    Fiber& fiber = *fibers[static_cast<size_t>(current)];
    threadIdx = fiber.index;
    switch_to(fiber);
    if (now.error) std::rethrow_exception(now.error);
  }
  end_asynchronous();
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Launches.

namespace {
struct Mapping {
  void* base;
  size_t usable, guard;  // bytes
  const void* end() const { return static_cast<std::byte*>(base) + usable; }
};
std::map<void*, Mapping> mappings;
const Mapping* last_stored = nullptr;  // into which: mostly the next one, too
int protection = PROT_NONE;            // of what is not guarded
std::mutex mappings_lock;              // for both

// Only while this lives may anybody touch device memory.
class Open {
 public:
  Open() : lock_(one_work) { protect(PROT_READ | PROT_WRITE); }
  ~Open() { protect(PROT_NONE); }

 private:
  static void protect(int how) {
    const std::lock_guard lock(mappings_lock);
    protection = how;
    for (const auto& [data, mapping] : mappings) mprotect(mapping.base, mapping.usable, how);
  }
  const std::lock_guard<std::mutex> lock_;
};
}  // namespace

void touch(const std::function<void()>& work) {
  const Open open;
  work();
}

namespace {
// The mapping that holds this, or null. To be called under the lock.
const Mapping* mapping_of(const void* data) {
  auto at = mappings.upper_bound(const_cast<void*>(data));
  return at != mappings.begin() && data < (--at)->second.end() ? &at->second : nullptr;
}
}  // namespace

void check_device_memory(const char* name, const void* data) {
  const std::lock_guard lock(mappings_lock);
  if (data != nullptr && mapping_of(data) == nullptr)
    fail(Exit::device, "emulator: ", name, " gets a pointer into the host's memory");
}

bool inside::in_device_memory(const void* data, size_t bytes) {
  const std::lock_guard lock(mappings_lock);
  const Mapping* mapping = mapping_of(data);
  return mapping != nullptr && static_cast<const std::byte*>(data) + bytes <= mapping->end();
}

void seed(uint64_t value) { lots = value * 0x9E3779B97F4A7C15ull | 1; }

void set_shared_limit(const void* kernel, size_t bytes) { shared_limits[kernel] = bytes; }

void run(const char* name, const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
         const std::function<void()>& body) {
  kernel_name = name;
  kernel_body = &body;
  threads = static_cast<int>(block.x * block.y * block.z);
  if (threads < 1 || threads > max_threads || block.z > 64)
    fail_kernel("a block of ", block.x, " x ", block.y, " x ", block.z, " threads; at most ", max_threads);
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7FFFFFFF || grid.y > 65535 || grid.z > 65535)
    fail_kernel("a grid of ", grid.x, " x ", grid.y, " x ", grid.z,
                " blocks; at least 1, at most 2^31-1 x 65535 x 65535");
  const size_t allowed = std::min(max_shared, std::max(shared_unasked, shared_limits[kernel]));
  if (shared_bytes > allowed) fail_kernel(shared_bytes, " bytes of shared memory; it may have ", allowed);
  gridDim = grid, blockDim = block;
  const std::unique_ptr<void, void (*)(void*)> memory(allocate(shared_bytes), release);
  dynamic = memory.get(), dynamic_bytes = shared_bytes;
  struct Clean {
    ~Clean() {
      for (auto& [key, memory] : statics) release(memory.first);
      statics.clear();
    }
  } const clean;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        std::memset(dynamic, poison, shared_bytes);
        run_block(block);
      }
}

// -----------------------------------------------------------------------------------------------------------------
// What kernels call.

void synchronize_block(const CallSite& site) {
  for (int t = 0; t < threads; ++t) {
    const Fiber& other = *fibers[static_cast<size_t>(t)];
    if (other.ended)
      fail_kernel(thread_name(t), " has ended, ", thread_name(current), " waits in __syncthreads at ", where(site));
    if (other.waits != nullptr && std::strcmp(other.waits, "__syncthreads") == 0 && other.site.line != site.line)
      fail_kernel(thread_name(t), " waits in __syncthreads at ", where(other.site), ", ", thread_name(current), " at ",
                  where(site));
  }
  if (++now.at_barrier < threads) return wait_for("__syncthreads", site);
  now.at_barrier = 0;
  ++block_barriers;
  for (int t = 0; t < threads; ++t)
    if (t != current) wake(t);
}

void synchronize_warp(uint32_t mask, void* operand, Combine combine, const char* what, const CallSite& site) {
  const int first = current / warp_lanes * warp_lanes, lanes = std::min(warp_lanes, threads - first);
  const int own = current - first;
  if (!(mask >> own & 1)) fail_kernel(thread_name(current), " is not in its own mask in ", what, " at ", where(site));
  if (lanes < warp_lanes && mask >> lanes != 0)
    fail_kernel("the last warp has ", lanes, " lanes, the mask of ", what, " more, at ", where(site));
  auto& meetings = now.meetings[first / warp_lanes];
  auto meeting = std::find_if(meetings.begin(), meetings.end(), [=](const Meeting& m) { return m.mask == mask; });
  if (meeting == meetings.end()) meeting = meetings.insert(meetings.end(), Meeting{mask, 0, what, site, {}});
  if (meeting->site.line != site.line || std::strcmp(meeting->what, what) != 0)
    fail_kernel(thread_name(current), " waits in ", what, " at ", where(site), ", others of its mask in ",
                meeting->what, " at ", where(meeting->site));
  meeting->arrived |= 1u << own;
  meeting->operands[own] = operand;
  if (meeting->arrived != mask) return wait_for(what, site);
  if (combine != nullptr) combine(meeting->operands, mask);
  meetings.erase(meeting);
  for (int lane = 0; lane < lanes; ++lane)
    if (lane != own && (mask >> lane & 1)) wake(first + lane);
}

void fail_lane(const char* what, int lane, int from, const CallSite& site) {
  fail_kernel("lane ", lane, " reads lane ", from, ", which does not take part, in ", what, " at ", where(site));
}

void* dynamic_shared() { return dynamic; }

void* static_shared(const void* key, size_t bytes) {
  auto& [memory, size] = statics[key];
  if (memory == nullptr) {
    const size_t all = std::accumulate(statics.begin(), statics.end(), dynamic_bytes + bytes,
                                       [](size_t sum, const auto& entry) { return sum + entry.second.second; });
    if (all > max_shared) fail_kernel(all, " bytes of shared memory with the kernel's own; at most ", max_shared);
    memory = allocate(bytes), size = bytes;
    std::memset(memory, poison, bytes);
  }
  return memory;
}

void check_space(const void* p, bool shared) {
  const auto within = [p](const void* data, size_t bytes) {
    return data <= p && p < static_cast<const std::byte*>(data) + bytes;
  };
  const bool in_shared = within(dynamic, dynamic_bytes) || std::any_of(statics.begin(), statics.end(), [&](auto& s) {
                           return within(s.second.first, s.second.second);
                         });
  if (in_shared && !shared) fail_kernel("a store to device memory goes to shared memory");
  if (in_shared) return;
  if (shared) fail_kernel("a store to shared memory goes elsewhere");
  const std::lock_guard lock(mappings_lock);
  if (last_stored == nullptr || !within(last_stored->base, last_stored->usable)) last_stored = mapping_of(p);
  if (last_stored == nullptr) fail_kernel("a store to device memory goes elsewhere");
}

void copy_async(void* to, const void* from, size_t bytes) {
  std::memset(to, poison, bytes);
  fibers[static_cast<size_t>(current)]->copies.back().push_back({to, from, bytes});
}
void commit_copies() { fibers[static_cast<size_t>(current)]->copies.emplace_back(); }
void wait_copies(int groups_left) {
  auto& groups = fibers[static_cast<size_t>(current)]->copies;
  for (; static_cast<int>(groups.size()) - 1 > groups_left; groups.pop_front())
    for (const AsyncCopy& copy : groups.front()) {
      if (copy.from == nullptr) std::memset(copy.to, 0, copy.bytes);
      else std::memcpy(copy.to, copy.from, copy.bytes);
    }
}

// -----------------------------------------------------------------------------------------------------------------
// Memory.

void* allocate(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t used = (std::max<size_t>(bytes, 1) + 15) / 16 * 16, pages = (used + page - 1) / page * page;
  void* base = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  mprotect(static_cast<std::byte*>(base) + pages, page, PROT_NONE);
  void* data = static_cast<std::byte*>(base) + pages - used;
  std::memset(base, poison, pages);
  const std::lock_guard lock(mappings_lock);
  mprotect(base, pages, protection);
  mappings[data] = {base, pages, page};
  return data;
}

void release(void* data) {
  if (data == nullptr) return;
  const std::lock_guard lock(mappings_lock);
  const auto at = mappings.find(data);
  CHECK_THAT(at != mappings.end(), "emulator: memory that was not allocated, or is released twice");
  last_stored = nullptr;
  munmap(at->second.base, at->second.usable + at->second.guard);
  mappings.erase(at);
}

}  // namespace crossply::emulator
