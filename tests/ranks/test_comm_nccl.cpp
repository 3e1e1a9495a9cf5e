// Comm by NCCL, as processes: see tests/ranks/nccl_ranks.h for where.
#include <chrono>
#include <thread>

#include "kernels/block/add.h"
#include "tests/ranks/nccl_ranks.h"
#include "tests/support/listener.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// When the emulator does transfers; a GPU does them when it likes.
struct Policy {
  const char* name;
  int number;
  uint64_t seed;
};
std::vector<Policy> policies() {
  if (!emulated) return {{"the GPU's", 0, 0}};
  return {{"lazy", 0, 0}, {"eager", 1, 0}, {"by lot", 2, 1}, {"by lot", 2, 2}};
}
void set_policy([[maybe_unused]] const Policy& policy) {
#if !CROSSPLY_CUDA
  emulator::set_transfers(static_cast<emulator::Transfers>(policy.number), policy.seed);
#endif
}

// A check that fails in a rank is an error of that rank.
struct CountFailures : Listener {
  explicit CountFailures(const doctest::ContextOptions&) {}
  void log_assert(const doctest::AssertData& assertion) override { failed_checks += assertion.m_failed; }
};
REGISTER_LISTENER("count_failures", 2, CountFailures);

}  // namespace

TEST_CASE("nccl: ranks move memory, whenever transfers are done") {
  for (const int size : numbers_of_ranks())
    for (const Policy& policy : policies()) {
      CAPTURES(size, policy.name, policy.seed);
      check_all_well(with_ranks(size, [&](Rank& rank) {
        set_policy(policy);
        CHECK_THAT(rank.comm->describe().rfind("NCCL 2.", 0) == 0, rank.comm->describe());
        check_exchange(*rank.comm, rank.world, *rank.device);
        check_gather(*rank.comm, rank.world, *rank.device);
        check_route(*rank.comm, rank.world, *rank.device);
        check_broadcast(*rank.comm, rank.world, *rank.device);
        check_reduce_scatter(*rank.comm, rank.world, *rank.device);
        check_many_in_flight(*rank.comm, rank.world, *rank.device);
      }));
    }
}

TEST_CASE("nccl: a check that fails in a rank is noticed") {
  if (!emulated) return;
  const auto became = run_ranks(1, [](const World&) {
    std::cout.setstate(std::ios::failbit);  // doctest's words
    CHECK(false);
  });
  CHECK(became[0] == "1 checks failed, see above");
}

TEST_CASE("nccl: no rank takes the id of another version") {
  if (!emulated) return;
  CHECK(nccl_library() == "NCCL 2.28.9");
  const std::string id = std::string(128, 'x') + "22808";
  const auto make = [&] { make_nccl_comm({1, 2, 1, 2}, id); };
  CHECK_THROWS_WITH_AS(make(), "rank 1 has NCCL 2.28.9, rank 0 has NCCL 2.28.8; install the same everywhere", Error);
}

namespace {

// As a training step does it: gradients from weights, in two buckets whose exchanges run beside what comes; sums of the
// own slices; a gather of the new weights. The result is the weights after four steps, which are equal at all ranks.
std::vector<float> trained(Rank& rank, bool recorded, bool forget_a_wait) {
  const int64_t n = 4096, all = n * rank.world.size;
  const Stream stream = rank.device->stream();
  const auto slice_of = [&](const Flat& of, int r) { return view(of.tensor.as<float>() + r * n, {n}); };
  struct Bucket {
    std::unique_ptr<Flat> weights, gradients, staging;
    Comm::Ticket ticket;
  };
  const auto own_part = rank.floats(static_cast<size_t>(all), 0.25f / static_cast<float>(1 + rank.world.rank));
  std::vector<Bucket> buckets;
  for (int b = 0; b < 2; ++b) {
    const auto count = static_cast<size_t>(all);
    buckets.push_back({rank.floats(count, 1), rank.floats(count), rank.floats(count), 0});
  }
  const auto step = [&] {
    for (Bucket& b : buckets) {
      add_forward(b.gradients->tensor, b.weights->tensor, own_part->tensor, stream);
      rank.comm->exchange(b.gradients->tensor, b.staging->tensor);
      b.ticket = rank.comm->mark();
    }
    for (Bucket& b : buckets) {
      if (!forget_a_wait || &b != &buckets[0]) rank.comm->wait(b.ticket);
      const Grad weights{slice_of(*b.weights, rank.world.rank), true};
      for (int r = 0; r < rank.world.size; ++r)
        accumulate(weights, slice_of(r == rank.world.rank ? *b.gradients : *b.staging, r), stream);
      rank.comm->gather(b.weights->tensor);
    }
    rank.comm->wait(rank.comm->mark());
  };
  Recording recording;
  for (int i = 0; i < 4; ++i) {
    if (recorded) rank.device->replay(recording, step);
    else step();
  }
  std::vector<float> result = buckets[0].weights->values(), second = buckets[1].weights->values();
  result.insert(result.end(), second.begin(), second.end());
  return result;
}

}  // namespace

TEST_CASE("nccl: a recorded step gives what the step gives, to all ranks") {
  for (const int size : numbers_of_ranks())
    for (const Policy& policy : policies()) {
      CAPTURES(size, policy.name, policy.seed);
      check_all_well(with_ranks(size, [&](Rank& rank) {
        set_policy(policy);
        const auto plain = trained(rank, false, false);
        CHECK_THAT(std::isfinite(plain[0]) && plain[0] > 10, plain[0]);
        CHECK_THAT(trained(rank, true, false) == plain, "recorded, another result");
        // The first rank's, of which every rank has its own already.
        Flat firsts(*rank.device, static_cast<int64_t>(plain.size()));
        firsts.set(plain);
        rank.comm->broadcast(firsts.tensor, 0);
        rank.comm->wait(rank.comm->mark());
        CHECK_THAT(firsts.values() == plain, "rank 0 has another result");
      }));
    }
}

TEST_CASE("nccl: a forgotten wait shows in the emulator, recorded or not") {
  if (!emulated) return;
  for (const bool recorded : {false, true}) {
    CAPTURE(recorded);
    check_all_well(with_ranks(2, [&](Rank& rank) {
      const auto wrong = trained(rank, recorded, true);
      CHECK_THAT(std::any_of(wrong.begin(), wrong.end(), [](float x) { return std::isnan(x); }), "no wait is needed");
    }));
  }
}

// What the watch thread of a job does, which must not hang itself.
TEST_CASE("nccl: a rank can leave while its GPU waits for another") {
  if (emulated) return;
  for (const int size : numbers_of_ranks()) {
    const auto begin = std::chrono::steady_clock::now();
    with_ranks(size, [&](Rank& rank) {
      const auto x = rank.floats(1 << 20);
      rank.comm->gather(x->tensor);
      rank.comm->wait(rank.comm->mark());
      rank.device->wait();
      if (rank.world.leads()) rank.comm->gather(x->tensor);
      std::this_thread::sleep_for(std::chrono::seconds(rank.world.leads() ? 1 : 3));
      _exit(0);
    });
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(30));
  }
}
