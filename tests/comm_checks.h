// What a Comm promises, by whatever it moves memory. For every rank of a job at once, each in its own process; a breach
// throws Error, because a doctest assertion counts in its own process only.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/device.h"
#include "ranks/comm.h"

namespace crossply::test {

// FloatsThere in a device's memory.
class FloatsThere {
 public:
  FloatsThere(Device& device, const std::vector<float>& values)
      : device_(device), count_(values.size()), data_(device.allocate(bytes())) {
    CHECK_THAT(data_ != nullptr, "no memory for ", count_, " floats");
    set(values);
  }
  FloatsThere(const FloatsThere&) = delete;
  ~FloatsThere() { device_.release(data_); }
  void set(const std::vector<float>& values) { device_.copy_in(data_, values.data(), bytes()); }
  std::vector<float> get() const {
    std::vector<float> values(count_);
    device_.copy_out(values.data(), data_, bytes());
    return values;
  }
  float* data() const { return static_cast<float*>(data_); }
  Tensor tensor() const { return view(data(), {static_cast<int64_t>(count_)}); }
  Tensor as_bf16() const { return {data_, Dtype::bf16, {static_cast<int64_t>(count_) * 2}}; }

 private:
  size_t bytes() const { return count_ * sizeof(float); }
  Device& device_;
  size_t count_;
  void* data_;
};

// Element i of what rank `from` has for rank `to`: whole numbers, whose sums are exact.
inline float element(int from, int to, int64_t i) {
  return static_cast<float>(100000 * (from + 1) + 10000 * (to + 1) + i % 9973);
}
// `ranks` slices of n; slice r is f(r, i).
template <class F>
std::vector<float> slices(const Place& place, int64_t n, F&& f) {
  std::vector<float> all;
  for (int r = 0; r < place.size; ++r)
    for (int64_t i = 0; i < n; ++i) all.push_back(f(r, i));
  return all;
}

inline void check_equal(const Place& place, const std::string& what, const std::vector<float>& got,
                        const std::vector<float>& want) {
  for (size_t i = 0; i < want.size(); ++i)
    CHECK_THAT(got[i] == want[i], what, " at rank ", place.rank, ", element ", i, ": got ", got[i], ", want ", want[i]);
}

// The own slice of `to` stays, `from` does too.
inline void check_exchange(Comm& comm, const Place& place, Device& device, int64_t n, bool as_bf16) {
  const auto sent = slices(place, n, [&](int r, int64_t i) { return element(place.rank, r, i); });
  const FloatsThere from(device, sent), to(device, std::vector<float>(sent.size(), -1));
  if (as_bf16) comm.exchange(from.as_bf16(), to.as_bf16());
  else comm.exchange(from.tensor(), to.tensor());
  comm.wait(comm.mark());
  check_equal(place, str("exchange of slices of ", n), to.get(),
              slices(place, n, [&](int r, int64_t i) { return r == place.rank ? -1 : element(r, place.rank, i); }));
  check_equal(place, "what was sent", from.get(), sent);
}

inline void check_gather(Comm& comm, const Place& place, Device& device, int64_t n) {
  const auto want = slices(place, n, [](int r, int64_t i) { return element(r, 0, i); });
  const FloatsThere whole(device,
                          slices(place, n, [&](int r, int64_t i) { return r == place.rank ? element(r, 0, i) : -1; }));
  comm.gather(whole.tensor());
  comm.wait(comm.mark());
  check_equal(place, str("gather of slices of ", n), whole.get(), want);
}

inline void check_broadcast(Comm& comm, const Place& place, Device& device, int64_t n, int root) {
  std::vector<float> mine;
  for (int64_t i = 0; i < n; ++i) mine.push_back(element(place.rank, root, i));
  const FloatsThere whole(device, mine);
  comm.broadcast(whole.tensor(), root);
  comm.wait(comm.mark());
  for (int64_t i = 0; i < n; ++i) mine[static_cast<size_t>(i)] = element(root, root, i);
  check_equal(place, str("broadcast of ", n, " from rank ", root), whole.get(), mine);
}

inline void check_reduce_scatter(Comm& comm, const Place& place, Device& device, int64_t n) {
  const FloatsThere whole(device, slices(place, n, [&](int r, int64_t i) { return element(place.rank, r, i); }));
  comm.reduce_scatter(whole.tensor());
  comm.wait(comm.mark());
  std::vector<float> own, sum(static_cast<size_t>(n));
  for (int r = 0; r < place.size; ++r)
    for (int64_t i = 0; i < n; ++i) sum[static_cast<size_t>(i)] += element(r, place.rank, i);
  const std::vector<float> all = whole.get();
  own.assign(all.begin() + place.rank * n, all.begin() + (place.rank + 1) * n);
  check_equal(place, str("sum of slices of ", n), own, sum);
}

// A ticket stands for all transfers before it, and they happen in order, without a wait in between.
inline void check_order(Comm& comm, const Place& place, Device& device) {
  const int64_t n = 64;
  const int last = place.size - 1;
  const auto filled = [&](float with) { return slices(place, n, [=](int, int64_t) { return with; }); };
  const FloatsThere a(device, filled(static_cast<float>(place.rank))),
      b(device, filled(10 + static_cast<float>(place.rank)));
  comm.gather(a.tensor());
  comm.broadcast(a.tensor(), last);
  comm.exchange(a.tensor(), b.tensor());
  comm.gather(b.tensor());
  comm.wait(comm.mark());
  const auto ranks = slices(place, n, [](int r, int64_t) { return static_cast<float>(r); });
  check_equal(place, "gathered, then broadcast", a.get(), ranks);
  // The own slice of b, which no exchange touches, is what everybody gathers.
  check_equal(place, "exchanged, then gathered", b.get(),
              slices(place, n, [](int r, int64_t) { return 10 + static_cast<float>(r); }));
}

inline void check_comm(Comm& comm, const Place& place, Device& device) {
  CHECK_THAT(!comm.describe().empty(), "it does not say what it is");
  for (const int64_t n : {64, 64 * 37, 64 * 1001}) {
    check_exchange(comm, place, device, n, false);
    check_exchange(comm, place, device, n, true);
    check_gather(comm, place, device, n);
    check_reduce_scatter(comm, place, device, n);
  }
  for (int root = 0; root < place.size; ++root)
    for (const int64_t n : {1, 7, 70001}) check_broadcast(comm, place, device, n, root);
  check_order(comm, place, device);
  comm.wait(comm.mark());  // of nothing new
}

}  // namespace crossply::test
