// A job whose ranks are threads of the test: for what must be the same whoever does it.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ranks/process_group.h"

namespace crossply::test {

// What the threads share. Every call is one meeting of all; between CPUs only.
class Threads {
 public:
  explicit Threads(int size) : size_(size), barrier_(size), pointers_(static_cast<size_t>(size)) {}

  // Calls body with everybody's pointers, by rank, while nobody goes on. Throws Exit::peer_lost where one has left.
  template <class F>
  void meet(int rank, const void* mine, F&& body) {
    pointers_[static_cast<size_t>(rank)] = mine;
    barrier_.arrive_and_wait();
    if (left_) fail(Exit::peer_lost, "a rank has left, and rank ", rank, " met nobody");
    body(pointers_);
    barrier_.arrive_and_wait();
  }
  int size() const { return size_; }
  // A rank that ends early, with an error: the others must not wait for it.
  void leave() {
    left_ = true;
    barrier_.arrive_and_drop();
  }

 private:
  int size_;
  std::barrier<> barrier_;
  std::atomic<bool> left_ = false;
  std::vector<const void*> pointers_;
};

class ThreadComm : public Comm {
 public:
  ThreadComm(Threads& threads, int rank) : threads_(threads), rank_(rank) {}
  std::string describe() const override { return "threads"; }
  void exchange(const Tensor& from, const Tensor& to) override {
    const size_t slice = slice_of(from);
    CHECK_THAT(from.bytes() == to.bytes(), from.str(), " to ", to.str());
    threads_.meet(rank_, from.data, [&](const auto& all) {
      for (int r = 0; r < threads_.size(); ++r)
        if (r != rank_) std::memcpy(at(to, slice, r), at(all, r, slice, rank_), slice);
    });
  }
  void gather(const Tensor& whole) override {
    const size_t slice = slice_of(whole);
    threads_.meet(rank_, whole.data, [&](const auto& all) {
      for (int r = 0; r < threads_.size(); ++r)
        if (r != rank_) std::memcpy(at(whole, slice, r), at(all, r, slice, r), slice);
    });
  }
  void broadcast(const Tensor& whole, int root) override {
    threads_.meet(rank_, whole.data, [&](const auto& all) {
      if (rank_ != root) std::memcpy(whole.data, all[static_cast<size_t>(root)], whole.bytes());
    });
  }
  void route(const std::vector<Piece>& sends, const std::vector<Piece>& receives) override {
    for (const Piece& piece : sends) routed += piece.part.bytes();
    threads_.meet(rank_, &sends, [&](const auto& all) {
      std::vector<size_t> next(all.size());  // of each rank's sends
      for (const auto& [from, part] : receives) {
        const auto& theirs = *static_cast<const std::vector<Piece>*>(all[static_cast<size_t>(from)]);
        size_t& i = next[static_cast<size_t>(from)];
        while (i < theirs.size() && theirs[i].rank != rank_) ++i;
        CHECK_THAT(i < theirs.size() && theirs[i].part.bytes() == part.bytes(), part.str(), " from rank ", from);
        std::memcpy(part.data, theirs[i++].part.data, part.bytes());
      }
    });
  }
  // From the last rank to the first: another order than ours.
  void reduce_scatter(const Tensor& whole) override {
    const auto n = static_cast<size_t>(whole.numel() / threads_.size());
    std::vector<float> sum(n, 0.f);
    threads_.meet(rank_, whole.data, [&](const auto& all) {
      for (size_t r = all.size(); r-- > 0;)
        for (size_t i = 0; i < n; ++i) sum[i] += static_cast<const float*>(all[r])[static_cast<size_t>(rank_) * n + i];
    });
    std::copy(sum.begin(), sum.end(), whole.as<float>() + static_cast<size_t>(rank_) * n);
  }
  Ticket mark() override { return 0; }
  void wait(Ticket) override {}
  size_t routed = 0;  // bytes that this rank has sent by route()

 private:
  size_t slice_of(const Tensor& whole) const {
    CHECK_THAT(whole.numel() % threads_.size() == 0, whole.str(), " in ", threads_.size(), " slices");
    return whole.bytes() / static_cast<size_t>(threads_.size());
  }
  static std::byte* at(const Tensor& whole, size_t slice, int r) {
    return static_cast<std::byte*>(whole.data) + slice * static_cast<size_t>(r);
  }
  static const std::byte* at(const std::vector<const void*>& all, int from, size_t slice, int r) {
    return static_cast<const std::byte*>(all[static_cast<size_t>(from)]) + slice * static_cast<size_t>(r);
  }
  Threads& threads_;
  int rank_;
};

class ThreadGroup : public ProcessGroup {
 public:
  ThreadGroup(Threads& threads, int rank)
      : ProcessGroup(World{rank, threads.size(), rank, threads.size()}), threads_(threads) {
    set_comm(std::make_unique<ThreadComm>(threads, rank));
  }
  void start_stats(const RankStats& mine) override { mine_ = mine; }
  StepStats finish_stats() override {
    StepStats all_stats;
    threads_.meet(world.rank, &mine_, [&](const auto& all) {
      std::vector<double> busy;
      for (const void* one : all) {
        const RankStats& stats = *static_cast<const RankStats*>(one);
        CHECK_THAT(stats.step == mine_.step && stats.position == mine_.position && stats.transfers == mine_.transfers,
                   "the ranks are not at the same place");
        all_stats.scored += stats.scored;
        all_stats.stop |= stats.stop;
        busy.push_back(stats.busy_seconds);
      }
      std::sort(busy.begin(), busy.end());
      all_stats.min_busy = busy.front(), all_stats.max_busy = busy.back();
      all_stats.median_busy = busy[(busy.size() - 1) / 2];
    });
    return all_stats;
  }
  void barrier(const char*) override {
    threads_.meet(world.rank, nullptr, [](const auto&) {});
  }
  std::string share(const std::string& text) override {
    std::string first;
    threads_.meet(world.rank, &text, [&](const auto& all) { first = *static_cast<const std::string*>(all[0]); });
    return first;
  }
  std::vector<std::string> collect(const std::string& text) override {
    std::vector<std::string> texts;
    threads_.meet(world.rank, &text, [&](const auto& all) {
      for (const void* one : all) texts.push_back(*static_cast<const std::string*>(one));
    });
    return world.leads() ? texts : std::vector<std::string>();
  }
  void enter(Stage, int64_t) override {}
  void finish() override {}
  void abort(Exit, const std::string&) override {}

 private:
  Threads& threads_;
  RankStats mine_;
};

// Runs body(job) on every rank of a job of this size, each on one thread. Rethrows what the first of them threw, if not
// only that it missed another.
inline void on_ranks(int size, const std::function<void(const std::shared_ptr<ProcessGroup>&)>& body) {
  if (size == 1) return body(one_rank_group());
  Threads shared(size);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size)), missed(errors.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      omp_set_num_threads(1);
      try {
        body(std::make_shared<ThreadGroup>(shared, rank));
      } catch (const Error& error) {
        (error.code == Exit::peer_lost ? missed : errors)[static_cast<size_t>(rank)] = std::current_exception();
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
      shared.leave();
    });
  for (std::thread& thread : threads) thread.join();
  errors.insert(errors.end(), missed.begin(), missed.end());
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace crossply::test
