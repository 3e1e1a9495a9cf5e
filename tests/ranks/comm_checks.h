// What every Comm must do, for the tests of each: on the device that its tensors lie on. All ranks call the same.
#pragma once

#include <doctest/doctest.h>

#include <limits>
#include <vector>

#include "engine/device.h"
#include "ranks/comm.h"

namespace crossply::test {

// f32 values in a device's memory, all NaN at first.
class Flat {
 public:
  Flat(Device& device, int64_t n)
      : device_(device), arena_(device, "flat", n * sizeof(float)), n_(n), tensor(view(data(), Shape{n})) {
    set(std::vector<float>(n, std::numeric_limits<float>::quiet_NaN()));
  }
  void set(const std::vector<float>& values) { device_.copy_in(data(), values.data(), n_ * sizeof(float)); }
  std::vector<float> values() const {
    std::vector<float> copy(n_);
    device_.copy_out(copy.data(), data(), n_ * sizeof(float));
    return copy;
  }

 private:
  float* data() const { return reinterpret_cast<float*>(arena_.data()); }
  Device& device_;
  Arena arena_;
  int64_t n_;

 public:
  Tensor tensor;
};

// Element i of what rank `from` has for rank `to` in round `round`: exact in f32, and no two ranks' alike.
inline float sent(int from, int to, int64_t i, int round = 0) {
  return static_cast<float>(((round * 8 + from) * 8 + to) * 4096 + i % 4096);
}

// All slices: slice r holds value(r, i), or NaN where there is none to expect.
template <class F>
std::vector<float> slices(const World& world, int64_t slice, F&& value) {
  std::vector<float> all;
  for (int r = 0; r < world.size; ++r)
    for (int64_t i = 0; i < slice; ++i) all.push_back(value(r, i));
  return all;
}

// Equal, and where NaN is expected, NaN.
inline void check_values(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  size_t wrong = 0, first = 0;
  for (size_t i = got.size(); i-- > 0;)
    if (!(got[i] == want[i] || (got[i] != got[i] && want[i] != want[i]))) ++wrong, first = i;
  INFO("first at ", first, ": got ", got[first], ", want ", want[first]);
  CHECK(wrong == 0);
}

constexpr float nothing = std::numeric_limits<float>::quiet_NaN();
const int64_t slice_lengths[] = {1, 3, 64, 1000, 4097, 100003};

// The values are moved whatever their type: as f32, and as twice as many of bf16.
inline void check_exchange(Comm& comm, const World& world, Device& device) {
  for (const int64_t slice : slice_lengths)
    for (const Dtype type : {Dtype::f32, Dtype::bf16}) {
      CAPTURE(slice);
      const auto mine = slices(world, slice, [&](int r, int64_t i) { return sent(world.rank, r, i); });
      Flat from(device, slice * world.size), to(device, slice * world.size);
      from.set(mine);
      Tensor a = from.tensor, b = to.tensor;
      if (type == Dtype::bf16) a.shape = b.shape = Shape{2 * slice * world.size}, a.dtype = b.dtype = type;
      comm.exchange(a, b);
      comm.wait(comm.mark());
      check_values(to.values(), slices(world, slice, [&](int r, int64_t i) {
                     return r == world.rank ? nothing : sent(r, world.rank, i);
                   }));
      check_values(from.values(), mine);
    }
}

inline void check_gather(Comm& comm, const World& world, Device& device) {
  for (const int64_t slice : slice_lengths) {
    CAPTURE(slice);
    Flat whole(device, slice * world.size);
    whole.set(slices(world, slice, [&](int r, int64_t i) { return r == world.rank ? sent(r, 0, i) : nothing; }));
    comm.gather(whole.tensor);
    comm.wait(comm.mark());
    check_values(whole.values(), slices(world, slice, [](int r, int64_t i) { return sent(r, 0, i); }));
  }
}

// From rank a to rank b a * size + b pieces, of which the k-th has k + 1 elements; to those behind it first. In place:
// each rank's own part of `all` is full.
inline void check_route(Comm& comm, const World& world, Device& device) {
  constexpr int64_t room = 1024;  // of what one rank has for another
  const auto begin = [&](int from, int to) { return (from * world.size + to) * room; };
  const auto pieces = [&](Tensor all, int from, int to) {
    std::vector<Tensor> parts;
    for (int64_t k = 0, at = begin(from, to); k < from * world.size + to; at += ++k)
      parts.push_back({all.as<float>() + at, all.dtype, Shape{k + 1}});
    return parts;
  };
  Flat all(device, world.size * world.size * room);
  std::vector<float> full(static_cast<size_t>(all.tensor.numel()), nothing), want = full;
  std::vector<Piece> sends, receives;
  for (int other = 0; other < world.size; ++other) {
    if (other == world.rank) continue;
    for (const Tensor& part : pieces(all.tensor, world.rank, other)) {
      sends.push_back({other, part});
      const int64_t at = part.as<float>() - all.tensor.as<float>();
      for (int64_t i = at; i < at + part.numel(); ++i) full[i] = want[i] = sent(world.rank, other, i);
    }
    for (const Tensor& part : pieces(all.tensor, other, world.rank)) {
      receives.push_back({other, part});
      const int64_t at = part.as<float>() - all.tensor.as<float>();
      for (int64_t i = at; i < at + part.numel(); ++i) want[i] = sent(other, world.rank, i);
    }
  }
  all.set(full);
  comm.route(sends, receives);
  comm.wait(comm.mark());
  check_values(all.values(), want);
  comm.route({}, {});
  comm.wait(comm.mark());
}

inline void check_broadcast(Comm& comm, const World& world, Device& device) {
  for (const int64_t n : slice_lengths)
    for (int root = 0; root < world.size; ++root) {
      CAPTURE(n);
      Flat whole(device, n);
      std::vector<float> want;
      for (int64_t i = 0; i < n; ++i) want.push_back(sent(root, root, i));
      if (world.rank == root) whole.set(want);
      comm.broadcast(whole.tensor, root);
      comm.wait(comm.mark());
      check_values(whole.values(), want);
    }
}

// Of integers, whose sum is the same in any order.
inline void check_reduce_scatter(Comm& comm, const World& world, Device& device) {
  const auto part = [&](int rank, int r, int64_t i) { return static_cast<float>((rank + 1) * (i % 1009) + r); };
  for (const int64_t slice : slice_lengths) {
    CAPTURE(slice);
    Flat whole(device, slice * world.size);
    whole.set(slices(world, slice, [&](int r, int64_t i) { return part(world.rank, r, i); }));
    comm.reduce_scatter(whole.tensor);
    comm.wait(comm.mark());
    const auto got = whole.values();
    std::vector<float> want;
    for (int64_t i = 0; i < slice; ++i) {
      want.push_back(0);
      for (int rank = 0; rank < world.size; ++rank) want.back() += part(rank, world.rank, i);
    }
    check_values({got.begin() + world.rank * slice, got.begin() + (world.rank + 1) * slice}, want);
  }
}

// Many transfers asked for before the first is waited for. They run in order: each gather takes up what the broadcast
// before it has brought. Tickets are waited for in any order, and more than once.
inline void check_many_in_flight(Comm& comm, const World& world, Device& device) {
  const int rounds = 24;
  const Comm::Ticket before = comm.mark();
  std::vector<Flat> from, to, whole;
  std::vector<Comm::Ticket> tickets;
  for (int round = 0; round < rounds; ++round) {
    const int64_t slice = 1 + 977 * (round % 5);
    for (auto* list : {&from, &to, &whole}) list->emplace_back(device, slice * world.size);
    from.back().set(slices(world, slice, [&](int r, int64_t i) { return sent(world.rank, r, i, round); }));
    if (round % world.size == world.rank)
      whole.back().set(slices(world, slice, [&](int r, int64_t i) { return sent(0, r, i, round); }));
  }
  for (int round = 0; round < rounds; ++round) {
    comm.exchange(from[round].tensor, to[round].tensor);
    comm.broadcast(whole[round].tensor, round % world.size);
    comm.gather(whole[round].tensor);
    tickets.push_back(comm.mark());
  }
  comm.wait(before);
  for (const int step : {5, 1})
    for (int round = step - 1; round < rounds; round += step) {
      CAPTURE(round);
      const int64_t slice = 1 + 977 * (round % 5);
      comm.wait(tickets[round]);
      check_values(to[round].values(), slices(world, slice, [&](int r, int64_t i) {
                     return r == world.rank ? nothing : sent(r, world.rank, i, round);
                   }));
      check_values(whole[round].values(), slices(world, slice, [&](int r, int64_t i) { return sent(0, r, i, round); }));
    }
}

}  // namespace crossply::test
