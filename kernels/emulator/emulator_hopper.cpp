#include "kernels/emulator/emulator_hopper.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <utility>

#include "kernels/emulator/emulator_inside.h"

namespace crossply::emulator {

using namespace inside;

namespace {

constexpr int group_threads = 128, max_groups = 8;
constexpr uint8_t poison = 0xFF;
constexpr uint32_t row_bytes = 128;

// -----------------------------------------------------------------------------------------------------------------
// State of the present block.

struct Barrier {
  uint32_t count = 0, pending = 0;
  int64_t bytes = 0;  // expected, less those that have come
  int64_t phase = 0;  // how many are over
  int owner = 0;      // who made it, and behind which __syncthreads others may use it; -1: before the fence
  int64_t visible = -1;
  std::vector<int> waiting;
  struct Waits {
    int64_t count = 0;
    uint32_t first_parity = 0;
  };
  std::map<int, Waits> waits;  // of each thread
};

struct TensorCopy {
  std::vector<std::pair<uint32_t, const std::byte*>> rows;  // to which address, from where, or null for zeros: not yet
  Barrier* barrier;
  int64_t phase;
  uint64_t slowness;  // one in so many chances is taken
};

struct Named {
  int count = 0, arrived = 0;
  CallSite site{};
  std::vector<int> waiting;
};

// A product that was issued, and what it read. Registers are those of all lanes.
struct Issued {
  bool accumulate;
  std::array<std::array<uint32_t, 4>, group_threads> a_registers;
  std::array<const uint32_t*, group_threads> a_places;
  std::vector<std::pair<uint32_t, uint16_t>> read;  // address and value of every element
  std::vector<float> a, b;                          // (64, 16), (16, N)
  const float* sums;                                // the first lane's, by which the warpgroup knows them
};
// Sums that products add to, while any is under way.
struct Accumulator {
  int N = 0;
  std::array<float*, group_threads> d{};
  std::vector<float> value;  // (64, N)
  int in_flight = 0;
};
struct Warpgroup {
  int arrived = 0, registers = 0;
  const char* what = nullptr;
  CallSite site{};
  std::array<const void*, group_threads> operands;
  std::map<const float*, Accumulator> sums;
  std::deque<std::vector<Issued>> groups;  // the last one is open
};

struct Snapshot {
  const std::byte* data;
  std::vector<std::byte> bytes;
};

std::map<const void*, Barrier> barriers;
std::vector<TensorCopy> copies;
std::array<Named, 16> named;
std::array<Warpgroup, max_groups> warpgroups;
std::vector<std::vector<Snapshot>> fenced;   // of each thread, at its last fence
std::vector<uint16_t> stored_by, loaded_by;  // of each byte of the window: a thread + 1 that has not fenced since
std::vector<int> register_waits;             // threads
int free_registers = 0;

Warpgroup& own_group() {
  const int group = current / group_threads;
  if ((group + 1) * group_threads > threads) fail_kernel("a warpgroup of fewer than 128 threads");
  return warpgroups[static_cast<size_t>(group)];
}

std::byte* window() { return static_cast<std::byte*>(dynamic) - window_begin; }
void check_window(const char* what, uint32_t address, size_t bytes) {
  if (address < window_begin || address + bytes > window_begin + dynamic_bytes)
    fail_kernel(what, ": ", bytes, " bytes at address ", address, " of shared memory, which ends at ",
                window_begin + dynamic_bytes);
}

Barrier& barrier_at(const void* p, const char* what, const CallSite& site) {
  const auto found = barriers.find(p);
  if (found == barriers.end()) fail_kernel(what, " at ", where(site), ": the barrier was not initialized");
  Barrier& barrier = found->second;
  if (barrier.visible < 0 || (barrier.owner != current && barrier.visible >= block_barriers))
    fail_kernel(what, " at ", where(site), ": the barrier was initialized, but then there was no ",
                barrier.visible < 0 ? "fence" : "__syncthreads");
  return barrier;
}

void complete_if_done(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  ++barrier.phase;
  for (const int t : barrier.waiting) wake(t);
  barrier.waiting.clear();
}

// Meets the other 127 threads of the warpgroup. Calls combine(operands) when all are there.
template <class F>
void meet_warpgroup(const void* operand, const char* what, const CallSite& site, F&& combine) {
  Warpgroup& group = own_group();
  if (group.arrived > 0 && (group.what != what || group.site.line != site.line))
    fail_kernel(thread_name(current), " is in ", what, " at ", where(site), ", others of its warpgroup in ", group.what,
                " at ", where(group.site));
  group.what = what, group.site = site;
  const int first = current / group_threads * group_threads;
  group.operands[static_cast<size_t>(current - first)] = operand;
  if (++group.arrived < group_threads) return wait_for(what, site);
  group.arrived = 0;
  combine(group);
  for (int t = first; t < first + group_threads; ++t)
    if (t != current) wake(t);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// The block.

void inside::begin_asynchronous() {
  barriers.clear(), copies.clear(), register_waits.clear();
  named.fill({});
  const int each = 65536 / threads / 8 * 8;
  for (Warpgroup& group : warpgroups) group = {}, group.groups.resize(1), group.registers = std::min(each, 248);
  fenced.assign(static_cast<size_t>(threads), {});
  stored_by.clear(), loaded_by.clear();
  free_registers = 0;
}

bool inside::go_on(bool must) {
  if (copies.empty()) return false;
  const size_t n = lot(copies.size());
  TensorCopy& copy = copies[n];
  if (!must && lot(copy.slowness) > 0) return true;
  uint64_t left = 1 + lot(std::max<size_t>(copy.rows.size(), 1));
  for (; left > 0; --left) {
    const size_t i = lot(copy.rows.size());
    const auto [to, from] = copy.rows[i];
    // Pieces of 16 bytes, which is what the swizzle moves.
    for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
      std::byte* place = window() + swizzled(to + byte);
      if (from == nullptr) std::memset(place, 0, 16);
      else std::memcpy(place, from + byte, 16);
    }
    copy.rows[i] = copy.rows.back();
    copy.rows.pop_back();
    Barrier& barrier = *copy.barrier;
    if (barrier.phase != copy.phase)
      fail_kernel("bytes come after the phase of their barrier is over; it expected too few");
    barrier.bytes -= row_bytes;
    complete_if_done(barrier);
  }
  if (copy.rows.empty()) copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(n));
  return true;
}

std::string inside::asynchronous_state() {
  std::string state;
  for (const auto& [at, barrier] : barriers)
    state += str("; barrier at ", static_cast<const std::byte*>(at) - window(), ": phase ", barrier.phase, ", ",
                 barrier.pending, " of ", barrier.count, " arrivals and ", barrier.bytes, " bytes missing");
  for (size_t id = 0; id < named.size(); ++id)
    if (named[id].arrived > 0)
      state += str("; named barrier ", id, ": ", named[id].arrived, " of ", named[id].count, " threads");
  if (!register_waits.empty())
    state += str("; ", register_waits.size(), " threads wait for more registers, of which ", free_registers,
                 " a thread are free");
  return state;
}

void inside::end_asynchronous() {
  if (!copies.empty()) fail_kernel("ends while copies are under way");
  for (const auto& [at, barrier] : barriers)
    if (barrier.bytes != 0) fail_kernel("ends while a barrier expects ", barrier.bytes, " bytes");
  for (const Named& barrier : named)
    if (barrier.arrived > 0)
      fail_kernel("ends while ", barrier.arrived, " of ", barrier.count, " threads have come to the named barrier at ",
                  where(barrier.site));
  for (const Warpgroup& group : warpgroups)
    if (group.groups.size() > 1 || !group.groups.back().empty()) fail_kernel("ends while products are under way");
}

namespace {
bool use_hopper = false;
}
void set_hopper(bool use) { use_hopper = use; }
bool hopper() { return use_hopper; }

// -----------------------------------------------------------------------------------------------------------------
// Barriers.

uint32_t shared_address(const void* p) {
  const auto offset = static_cast<const std::byte*>(p) - static_cast<const std::byte*>(dynamic);
  if (offset < 0 || static_cast<size_t>(offset) >= dynamic_bytes)
    fail_kernel("an address of shared memory that is not in the launch's");
  return window_begin + static_cast<uint32_t>(offset);
}

void barrier_init(void* barrier, uint32_t count, const CallSite& site) {
  if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0 || count < 1 || count >= 1u << 20)
    fail_kernel("a barrier of ", count, " arrivals, or not aligned to 8 bytes, at ", where(site));
  Barrier fresh;
  fresh.count = fresh.pending = count, fresh.owner = current;
  barriers[barrier] = fresh;
}
void barrier_init_fence() {
  for (auto& [at, barrier] : barriers)
    if (barrier.owner == current && barrier.visible < 0) barrier.visible = block_barriers;
}
void barrier_arrive(void* at, const CallSite& site) {
  Barrier& barrier = barrier_at(at, "an arrival", site);
  if (barrier.pending == 0) fail_kernel("more arrivals than ", barrier.count, " in a phase, at ", where(site));
  --barrier.pending;
  complete_if_done(barrier);
}
void barrier_expect(void* at, uint32_t bytes, const CallSite& site) {
  Barrier& barrier = barrier_at(at, "an arrival", site);
  barrier.bytes += bytes;
  if (std::abs(barrier.bytes) >= 1 << 20) fail_kernel("a barrier expects ", barrier.bytes, " bytes at ", where(site));
  barrier_arrive(at, site);
}
void barrier_wait(void* at, uint32_t parity, const CallSite& site) {
  Barrier& barrier = barrier_at(at, "a wait", site);
  Barrier::Waits& waits = barrier.waits[current];
  if (waits.count++ == 0) waits.first_parity = parity;
  const int64_t done = waits.count - waits.first_parity;  // so many phases are to be over
  if (parity != ((waits.first_parity + static_cast<uint32_t>(waits.count - 1)) & 1))
    fail_kernel("a thread's wait number ", waits.count, " for a barrier has parity ", parity, " at ", where(site));
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(current);
    wait_for("a wait for a barrier", site);
  }
  if (barrier.phase != done)
    fail_kernel("a wait for ", done, " phases of a barrier ends when ", barrier.phase, " are over, at ", where(site));
}

void named_barrier(int id, int count, bool wait, const CallSite& site) {
  if (id < 1 || id > 15 || count < 32 || count % 32 != 0)
    fail_kernel("named barrier ", id, " of ", count, " threads at ", where(site));
  Named& barrier = named[static_cast<size_t>(id)];
  if (barrier.arrived > 0 && barrier.count != count)
    fail_kernel("named barrier ", id, " is of ", barrier.count, " threads, and of ", count, " at ", where(site));
  barrier.count = count, barrier.site = site;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    for (const int t : barrier.waiting) wake(t);
    barrier.waiting.clear();
  } else if (wait) {
    barrier.waiting.push_back(current);
    wait_for("a named barrier", site);
  }
}

void set_registers(int count, bool more, const CallSite& site) {
  if (count < 24 || count > 256 || count % 8 != 0) fail_kernel(count, " registers at ", where(site));
  const auto group = static_cast<size_t>(current / group_threads);
  meet_warpgroup(nullptr, "set_registers", site, [&](Warpgroup& own) {
    if (more ? count < own.registers : count > own.registers)
      fail_kernel(own.registers, " registers become ", more ? "more: " : "fewer: ", count, " at ", where(site));
    if (!more) free_registers += own.registers - count, own.registers = count;
  });
  // Who gives wakes those who take; each of a warpgroup's threads looks for itself.
  for (const int thread : std::exchange(register_waits, {})) wake(thread);
  while (more && warpgroups[group].registers < count) {
    const int missing = count - warpgroups[group].registers;
    if (free_registers >= missing) {
      free_registers -= missing, warpgroups[group].registers = count;
      break;
    }
    register_waits.push_back(current);
    wait_for("more registers", site);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Ordinary accesses beside those of copies and products.

namespace {
std::vector<uint16_t>& marks(std::vector<uint16_t>& of) {
  if (of.empty()) of.assign(dynamic_bytes, 0);
  return of;
}
void mark(std::vector<uint16_t>& of, const void* p, size_t bytes) {
  const uint32_t address = shared_address(p);
  check_window("an access", address, bytes);
  std::fill_n(marks(of).begin() + address - window_begin, bytes, static_cast<uint16_t>(current + 1));
}
void check_fenced(const std::vector<uint16_t>& of, const char* what, uint32_t address, size_t bytes) {
  if (of.empty()) return;
  for (size_t i = 0; i < bytes; ++i)
    if (const uint16_t by = of[address - window_begin + i]; by != 0)
      fail_kernel(what, " at address ", address, " of shared memory, by ", thread_name(by - 1),
                  ", without a fence.proxy.async behind it");
}
}  // namespace

void will_store_shared(const void* p, size_t bytes) { mark(stored_by, p, bytes); }
void will_load_shared(const void* p, size_t bytes) { mark(loaded_by, p, bytes); }
void proxy_fence() {
  for (auto* of : {&stored_by, &loaded_by})
    std::replace(of->begin(), of->end(), static_cast<uint16_t>(current + 1), uint16_t{0});
}

// -----------------------------------------------------------------------------------------------------------------
// Copies.

void copy_box(void* to, const TensorMap& map, void* barrier, const int (&c)[5], const CallSite& site) {
  const uint32_t address = shared_address(to);
  if (address % 1024 != 0) fail_kernel("a box goes to address ", address, ", no multiple of 1024, at ", where(site));
  Barrier& signalled = barrier_at(barrier, "a copy", site);
  TensorCopy copy{{}, &signalled, signalled.phase, uint64_t{1} << lot(16)};
  uint32_t row = address;
  const auto inside = [&](int d, int64_t at) { return at >= 0 && at < static_cast<int64_t>(map.dims[d]); };
  for (uint32_t i4 = 0; i4 < map.box[4]; ++i4)
    for (uint32_t i3 = 0; i3 < map.box[3]; ++i3)
      for (uint32_t i2 = 0; i2 < map.box[2]; ++i2)
        for (uint32_t i1 = 0; i1 < map.box[1]; ++i1, row += row_bytes) {
          const int64_t at[5] = {c[0], int64_t{c[1]} + i1, int64_t{c[2]} + i2, int64_t{c[3]} + i3, int64_t{c[4]} + i4};
          const auto* from = static_cast<const std::byte*>(map.base) + 2 * at[0];
          bool there = true;
          for (int d = 1; d < 5; ++d) {
            there = there && inside(d, at[d]);
            from += at[d] * static_cast<int64_t>(map.strides[d - 1]);
          }
          if (there && !in_device_memory(from, row_bytes))
            fail_kernel("a box reads beyond an allocation, at ", where(site));
          copy.rows.emplace_back(row, there ? from : nullptr);
        }
  const size_t bytes = copy.rows.size() * row_bytes;
  check_window("a copy", address, bytes);
  check_fenced(stored_by, "a copy goes over what was stored", address, bytes);
  check_fenced(loaded_by, "a copy goes over what was loaded", address, bytes);
  std::memset(window() + address, poison, bytes);
  copies.push_back(std::move(copy));
}

// -----------------------------------------------------------------------------------------------------------------
// Products.

namespace {

float marked() { return std::bit_cast<float>(0x7FC0DEAD); }
bool is_marked(float x) { return std::bit_cast<uint32_t>(x) == 0x7FC0DEAD; }
float of_bf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// Row and column of register i of a lane.
int row_of(int lane, int i) { return lane / 32 * 16 + lane % 32 / 4 + i % 4 / 2 * 8; }
int column_of(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

// Element (x, k) of an operand, x < `width`, k < 16, that a descriptor points to.
struct Operand {
  uint32_t start, leading, stride;
  bool transposed;

  Operand(uint64_t descriptor, bool transposed_, int width, const char* name)
      : start(static_cast<uint32_t>(descriptor & 0x3FFF) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3FFF) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4),
        transposed(transposed_) {
    if (descriptor >> 62 != 1) fail_kernel(name, ": not in rows of 128 bytes, the only ones that are emulated");
    if ((descriptor >> 49 & 7) != 0) fail_kernel(name, ": a base offset, though patterns begin at multiples of 1024");
    if ((start & 0x380) != 0) fail_kernel(name, " begins at address ", start, ", in the middle of 8 rows");
    if (stride == 0) fail_kernel(name, ": the stride is 0");
    if (transposed && width > 64 && leading == 0) fail_kernel(name, ": the leading offset is 0");
  }
  uint32_t address(int x, int k) const {
    const auto at = static_cast<uint32_t>(x), deep = static_cast<uint32_t>(k);
    const uint32_t linear = transposed
                                ? start + at / 64 * leading + 2 * (at % 64) + deep / 8 * stride + deep % 8 * row_bytes
                                : start + at / 8 * stride + at % 8 * row_bytes + 2 * deep;
    return swizzled(linear);
  }
};

uint16_t element_at(uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, window() + address, sizeof bits);
  return bits;
}

// (16, width), and what was read where.
std::vector<float> read_operand(Issued& to, uint64_t descriptor, bool transposed, int width, const char* name) {
  const Operand operand(descriptor, transposed, width, name);
  std::vector<float> values(static_cast<size_t>(16 * width));
  for (int k = 0; k < 16; ++k)
    for (int x = 0; x < width; ++x) {
      const uint32_t address = operand.address(x, k);
      check_window(name, address, 2);
      check_fenced(stored_by, "a product reads what was stored", address, 2);
      const uint16_t bits = element_at(address);
      to.read.emplace_back(address, bits);
      values[static_cast<size_t>(k * width + x)] = of_bf16(bits);
    }
  return values;
}

// Whether registers are as they were at the thread's last fence.
bool as_fenced(int thread, const void* data, size_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  for (const Snapshot& s : fenced[static_cast<size_t>(thread)])
    if (first >= s.data && first + bytes <= s.data + s.bytes.size())
      return std::memcmp(first, s.bytes.data() + (first - s.data), bytes) == 0;
  return false;
}

// Sums become in flight, if they are not, with marks in their registers.
void take_sums(Warpgroup& group, const WarpgroupProduct* const (&all)[group_threads], int first) {
  const int N = all[0]->N;
  const auto [at, fresh] = group.sums.try_emplace(all[0]->d);
  Accumulator& sums = at->second;
  ++sums.in_flight;
  if (!fresh) {
    if (sums.N != N) fail_kernel("a product of another shape adds to sums that are in flight");
    return;
  }
  sums.N = N;
  sums.value.resize(static_cast<size_t>(64 * N));
  for (int lane = 0; lane < group_threads; ++lane) {
    float* d = sums.d[static_cast<size_t>(lane)] = all[lane]->d;
    if (!as_fenced(first + lane, d, static_cast<size_t>(N / 2) * sizeof(float)))
      fail_kernel("the sums of a product were touched behind the last wgmma_fence, or it does not name them");
    for (int i = 0; i < N / 2; ++i) {
      sums.value[static_cast<size_t>(row_of(lane, i) * N + column_of(lane, i))] = d[i];
      d[i] = marked();
    }
  }
}

void take_a_registers(Issued& to, const WarpgroupProduct* const (&all)[group_threads], int first) {
  to.a.resize(64 * 16);
  for (int lane = 0; lane < group_threads; ++lane) {
    const uint32_t* a = all[lane]->a;
    if (!as_fenced(first + lane, a, 16))
      fail_kernel("the registers of a product were touched behind the last wgmma_fence, or it does not name them");
    to.a_places[static_cast<size_t>(lane)] = a;
    std::copy_n(a, 4, to.a_registers[static_cast<size_t>(lane)].begin());
    for (int r = 0; r < 4; ++r)
      for (int i = 0; i < 2; ++i) {
        const int row = lane / 32 * 16 + lane % 32 / 4 + r % 2 * 8, column = lane % 4 * 2 + r / 2 * 8 + i;
        to.a[static_cast<size_t>(row * 16 + column)] = of_bf16(a[r] >> 16 * i & 0xFFFF);
      }
  }
}

// What a product has read is as it was, and nobody has touched its sums; then these are added to.
void finish(Warpgroup& group, const Issued& done) {
  Accumulator& sums = group.sums.at(done.sums);
  for (int lane = 0; lane < group_threads; ++lane) {
    const float* d = sums.d[static_cast<size_t>(lane)];
    if (!std::all_of(d, d + sums.N / 2, is_marked)) fail_kernel("sums were touched while a product was under way");
    const uint32_t* a = done.a_places[static_cast<size_t>(lane)];
    if (a != nullptr && !std::equal(a, a + 4, done.a_registers[static_cast<size_t>(lane)].begin()))
      fail_kernel("registers were touched while a product that reads them was under way");
  }
  for (const auto& [address, bits] : done.read)
    if (element_at(address) != bits)
      fail_kernel("shared memory at address ", address, " was written while a product that reads it was under way");
  const int N = sums.N;
  for (int m = 0; m < 64; ++m)
    for (int n = 0; n < N; ++n) {
      float& sum = sums.value[static_cast<size_t>(m * N + n)];
      if (!done.accumulate) sum = 0;
      for (int k = 0; k < 16; ++k)
        sum = std::fma(done.a[static_cast<size_t>(m * 16 + k)], done.b[static_cast<size_t>(k * N + n)], sum);
    }
  --sums.in_flight;
}

// Sums that nothing adds to any more are back in their registers.
void give_back(Warpgroup& group) {
  for (auto at = group.sums.begin(); at != group.sums.end();) {
    const Accumulator& sums = at->second;
    if (sums.in_flight > 0) {
      ++at;
      continue;
    }
    for (int lane = 0; lane < group_threads; ++lane)
      for (int i = 0; i < sums.N / 2; ++i)
        sums.d[static_cast<size_t>(lane)][i] =
            sums.value[static_cast<size_t>(row_of(lane, i) * sums.N + column_of(lane, i))];
    at = group.sums.erase(at);
  }
}

}  // namespace

void warpgroup_fence(std::vector<Registers> of_products) {
  auto& own = fenced[static_cast<size_t>(current)];
  own.clear();
  for (const Registers& r : of_products) {
    const auto* data = static_cast<const std::byte*>(r.data);
    own.push_back({data, {data, data + r.bytes}});
  }
}

void warpgroup_multiply(const WarpgroupProduct& product, const CallSite& site) {
  meet_warpgroup(&product, "wgmma", site, [&](Warpgroup& group) {
    const WarpgroupProduct* all[group_threads];
    for (int lane = 0; lane < group_threads; ++lane)
      all[lane] = static_cast<const WarpgroupProduct*>(group.operands[static_cast<size_t>(lane)]);
    const WarpgroupProduct& p = *all[0];
    for (const WarpgroupProduct* other : all)
      if (other->N != p.N || other->of_a != p.of_a || other->of_b != p.of_b || other->accumulate != p.accumulate)
        fail_kernel("threads of a warpgroup have different descriptors or flags for a product at ", where(site));
    const int first = current / group_threads * group_threads;
    Issued issued{p.accumulate, {}, {}, {}, {}, {}, p.d};
    take_sums(group, all, first);
    if (p.a != nullptr) {
      take_a_registers(issued, all, first);
    } else {
      const std::vector<float> columns = read_operand(issued, p.of_a, false, 64, "the first factor");
      issued.a.resize(columns.size());
      for (size_t k = 0; k < 16; ++k)
        for (size_t m = 0; m < 64; ++m) issued.a[m * 16 + k] = columns[k * 64 + m];
    }
    issued.b = read_operand(issued, p.of_b, p.b_transposed, p.N, "the second factor");
    group.groups.back().push_back(std::move(issued));
  });
}

void warpgroup_commit(const CallSite& site) {
  meet_warpgroup(nullptr, "wgmma_commit", site, [](Warpgroup& group) { group.groups.emplace_back(); });
}

void warpgroup_wait(int groups_left, const CallSite& site) {
  meet_warpgroup(nullptr, "wgmma_wait", site, [&](Warpgroup& group) {
    if (!group.groups.back().empty()) fail_kernel("wgmma_wait before the products are committed, at ", where(site));
    for (; static_cast<int>(group.groups.size()) - 1 > groups_left; group.groups.pop_front())
      for (const Issued& done : group.groups.front()) finish(group, done);
    give_back(group);
  });
}

}  // namespace crossply::emulator
