// The emulator's transfer lane beside its compute lane: what a missing wait shows, and what a recording of both may
// hold.
#if !CROSSPLY_CUDA

#include <cmath>

#include "kernels/cuda/cuda.h"
#include "kernels/emulator/emulator.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// With lazy transfers before and after; none is left over.
struct Lanes {
  explicit Lanes(emulator::Transfers policy, uint64_t seed = 0) { emulator::set_transfers(policy, seed); }
  ~Lanes() {
    if (emulator::captures()) abandon_capture();
    synchronize_transfers();
    emulator::set_transfers(emulator::Transfers::lazy);
  }
};

// to[0] = from[0] on the transfer lane; NaN until it is done.
void transfer(float* to, const float* from) {
  start_transfers();
  emulator::enqueue_transfer([=] { *to = NAN; }, [=] { *to = *from; });
}
void put(float* to, float value) {
  emulator::enqueue([=] { *to = value; });
}
float value_of(const OnDevice<float>& x) { return x.host()[0]; }

// What a transfer brings of a 1, before anybody waited for it: 1, or NaN if it is not done. overwrite: of a 1 that was
// made a 2 before anybody waited for it: 1, or 2 if that was too early.
float brought(bool overwrite) {
  const OnDevice<float> from(std::vector<float>{1}), to(std::vector<float>{0});
  transfer(to.data, from.data);
  if (overwrite) put(from.data, 2);
  const float early = value_of(to);
  wait_for_transfers(mark_transfers());
  return overwrite ? value_of(to) : early;
}

}  // namespace

TEST_CASE("emulator lanes: a transfer that nobody waits for is not done, or done, or by lot") {
  {
    const Lanes lazy(emulator::Transfers::lazy);
    CHECK(std::isnan(brought(false)));
    CHECK(brought(true) == 2);
  }
  {
    const Lanes eager(emulator::Transfers::eager);
    CHECK(brought(false) == 1);
    CHECK(brought(true) == 1);
  }
  int done = 0, not_done = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Lanes by_lot(emulator::Transfers::by_lot, seed);
    const float first = brought(false);
    (std::isnan(first) ? not_done : done) += 1;
    const Lanes again(emulator::Transfers::by_lot, seed);
    CHECK(std::isnan(brought(false)) == std::isnan(first));
  }
  CHECK(done >= 3);
  CHECK(not_done >= 3);
}

TEST_CASE("emulator lanes: a ticket stands for the transfers before it, and for no later ones") {
  const Lanes lazy(emulator::Transfers::lazy);
  const OnDevice<float> a(std::vector<float>{1}), b(std::vector<float>{0}), c(std::vector<float>{0});
  transfer(b.data, a.data);
  const int64_t first = mark_transfers();
  transfer(c.data, b.data);
  wait_for_transfers(first);
  CHECK(value_of(b) == 1);
  CHECK(std::isnan(value_of(c)));
  wait_for_transfers(first);
  CHECK(std::isnan(value_of(c)));
  synchronize_transfers();
  CHECK(value_of(c) == 1);
}

TEST_CASE("emulator lanes: a transfer must wait for what was computed") {
  const Lanes lazy(emulator::Transfers::lazy);
  const OnDevice<float> x(std::vector<float>{1});
  start_transfers();
  put(x.data, 2);
  CHECK_THROWS_WITH_AS(emulator::enqueue_transfer([] {}, [] {}), doctest::Contains("start_transfers is missing"),
                       Error);
}

TEST_CASE("emulator lanes: a recording of both does each time what was recorded") {
  for (const auto policy : {emulator::Transfers::lazy, emulator::Transfers::eager, emulator::Transfers::by_lot}) {
    const Lanes lanes(policy, 3);
    const OnDevice<float> x(std::vector<float>{1}), y(std::vector<float>{0});
    begin_capture();
    emulator::enqueue([=, to = x.data] { *to *= 2; });
    transfer(y.data, x.data);
    wait_for_transfers(mark_transfers());
    emulator::enqueue([=, to = x.data, from = y.data] { *to += *from; });
    const auto graph = end_capture().graph;
    CHECK(value_of(x) == 1);
    const OnDevice<float> z(std::vector<float>{0});
    for (const float want : {4.f, 16.f, 64.f}) {
      transfer(z.data, x.data);  // one that is under way when the graph begins
      wait_for_transfers(mark_transfers() - 1);
      launch_graph(graph);
      CHECK(value_of(x) == want);
    }
  }
}

TEST_CASE("emulator lanes: work whose recording is refused is done as it comes, unless it has transfers") {
  const auto device = make_cuda_device();
  for (const emulator::Refused at : {emulator::Refused::begin, emulator::Refused::end}) {
    CAPTURE(static_cast<int>(at));
    const Lanes lanes(emulator::Transfers::lazy);
    const OnDevice<float> x(std::vector<float>{1}), y(std::vector<float>{1});
    Recording recorded, refused, of_ranks;
    const auto doubles = [to = x.data] { emulator::enqueue([to] { *to *= 2; }); };
    const auto moves = [&, to = y.data, from = x.data] {
      transfer(to, from);
      wait_for_transfers(mark_transfers());
    };
    for (int i = 0; i < 3; ++i) device->replay(recorded, doubles);
    CHECK(value_of(x) == 8);
    device->replay(of_ranks, moves);
    CHECK(value_of(y) == 8);

    {
      const RefusedCaptures from_now_on(at);
      for (const float want : {16.f, 32.f, 64.f}) {
        device->replay(refused, doubles);
        CHECK(value_of(x) == want);
      }
      device->replay(recorded, doubles);  // what was recorded before stays
      CHECK(value_of(x) == 128);
      CHECK_THROWS_WITH_AS(device->replay(of_ranks, moves), doctest::Contains("the emulator refuses to"), Error);
      CHECK(!emulator::captures());
    }
    CHECK((recorded.graph != nullptr && refused.graph == nullptr));
    device->replay(refused, doubles);  // and is not tried again
    CHECK(refused.graph == nullptr);
    CHECK(value_of(x) == 256);
  }
}

TEST_CASE("emulator lanes: what a recording may not hold") {
  const Lanes lazy(emulator::Transfers::lazy);
  const OnDevice<float> x(std::vector<float>{1}), y(std::vector<float>{0});
  const auto refused = [&](const char* words, auto&& body) {
    CAPTURE(words);
    begin_capture();
    CHECK_THROWS_WITH_AS(body(), doctest::Contains(words), Error);
    abandon_capture();
  };
  const int64_t before = mark_transfers();
  refused("transfers that the compute lane does not wait for", [&] {
    transfer(y.data, x.data);
    end_capture();
  });
  refused("1 transfers that the compute lane does not wait for", [&] {
    transfer(y.data, x.data);
    wait_for_transfers(mark_transfers());
    transfer(y.data, x.data);
    end_capture();
  });
  refused("a transfer before start_transfers", [&] { emulator::enqueue_transfer([] {}, [] {}); });
  refused("a ticket of recording 0", [&] { wait_for_transfers(before); });
  refused("a recording waits for transfers", [&] { synchronize_transfers(); });
  refused("a recording allocates", [&] { allocate_device_memory(16); });
  refused("a recording waits for the device", [&] { synchronize_device(); });

  begin_capture();
  transfer(y.data, x.data);
  const int64_t inside = mark_transfers();
  wait_for_transfers(inside);
  end_capture();
  CHECK_THROWS_WITH_AS(wait_for_transfers(inside), doctest::Contains("is waited for in recording 0"), Error);
}

#endif
