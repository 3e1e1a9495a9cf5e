// The stand-in for NCCL (tests/standin/nccl.h) notices what it says it does, and Comm tells it.
#if !CROSSPLY_CUDA

#include "tests/standin/nccl.h"

#include "tests/ranks/nccl_ranks.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;
using emulator::Transfers;

namespace {

void check_says(const std::string& said, const std::string& words) {
  CHECK_MESSAGE(said.find(words) != std::string::npos, "'" << said << "' does not say '" << words << "'");
}
// Both of two ranks end with these words, or the second with others.
void check_both_say(const std::function<void(Rank&)>& body, const std::string& words, const std::string& second = "") {
  const auto became = with_ranks(2, body);
  check_says(became[0], words);
  check_says(became[1], second.empty() ? words : second);
}

// A communicator without Comm around it.
ncclComm_t raw_communicator(const World& world, const std::string& id) {
  ncclUniqueId unique;
  std::memcpy(unique.internal, id.data(), sizeof unique.internal);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t comm = nullptr;
  CHECK_THAT(ncclCommInitRankConfig(&comm, world.size, unique, world.rank, &config) == ncclSuccess,
             ncclGetLastError(nullptr));
  return comm;
}
// Two ranks that each have one, and eight floats.
std::vector<std::string> with_raw(const std::function<void(ncclComm_t, float*, const World&)>& body) {
  const std::string id = new_nccl_id();
  return run_ranks(2, [&](const World& world) {
    const auto device = make_device("emulator");
    Flat data(*device, 8);
    body(raw_communicator(world, id), data.tensor.as<float>(), world);
  });
}
void check_refused(ncclComm_t comm, ncclResult_t result, const char* words) {
  CHECK_THAT(result != ncclSuccess, "not refused: ", words);
  CHECK_THAT(std::string(ncclGetLastError(comm)).find(words) != std::string::npos, ncclGetLastError(comm), " is not ",
             words);
}
ncclResult_t gather(ncclComm_t comm, float* data, int rank) {
  return ncclAllGather(data + 4 * rank, data, 16, ncclInt8, comm, transfer_stream());
}

}  // namespace

TEST_CASE("stand-in: ranks that call differently are told both sides") {
  const auto gather_of = [](size_t of_0, size_t of_1) {
    return [=](Rank& rank) {
      const auto x = rank.floats(rank.world.rank == 0 ? of_0 : of_1);
      rank.comm->gather(x->tensor);
      rank.comm->wait(rank.comm->mark());
    };
  };
  check_both_say(gather_of(128, 64),
                 "transfer 0: rank 0 has AllGather of 256 x type 0 with root 0, rank 1 has AllGather of 128",
                 "transfer 0: rank 1 has AllGather of 128 x type 0 with root 0, rank 0 has AllGather of 256");
  check_both_say(
      [](Rank& rank) {
        const auto x = rank.floats(128), y = rank.floats(128);
        rank.comm->exchange(x->tensor, y->tensor);
        if (rank.world.rank == 0) rank.comm->gather(x->tensor);
        rank.comm->broadcast(y->tensor, 0);
        if (rank.world.rank == 1) rank.comm->gather(x->tensor);
        rank.comm->wait(rank.comm->mark());
      },
      "transfer 1: rank 0 has AllGather", "transfer 1: rank 1 has Broadcast");
  check_both_say(
      [](Rank& rank) {
        const auto x = rank.floats(4);
        rank.comm->broadcast(x->tensor, rank.world.rank);
        rank.comm->wait(rank.comm->mark());
      },
      "with root 0, rank 1 has Broadcast of 16 x type 0 with root 1", "with root 1, rank 0 has Broadcast of 16");
  check_both_say(
      [](Rank& rank) {
        const auto x = rank.floats(rank.world.rank == 0 ? 128 : 64), y = rank.floats(128);
        rank.comm->exchange(x->tensor, Tensor{y->tensor.data, Dtype::f32, x->tensor.shape});
        rank.comm->wait(rank.comm->mark());
      },
      "rank 0 has a send of 256 bytes, rank 1 has a receive of 128", "rank 1 has a send of 128 bytes, rank 0");
  // One makes a transfer more; the other has ended.
  check_both_say(
      [](Rank& rank) {
        const auto x = rank.floats(128);
        for (int i = 0; i <= rank.world.rank; ++i) rank.comm->gather(x->tensor);
        rank.comm->wait(rank.comm->mark());
      },
      "", "rank 0 is gone, at transfer 1 of rank 1, AllGather");
}

TEST_CASE("stand-in: sends must have receives") {
  const auto became = with_raw([](ncclComm_t comm, float* data, const World& world) {
    start_transfers();
    ncclGroupStart();
    if (world.rank == 0) ncclSend(data, 16, ncclInt8, 1, comm, transfer_stream());
    else ncclSend(data, 8, ncclInt8, 0, comm, transfer_stream());
    ncclGroupEnd();
    wait_for_transfers(mark_transfers());
  });
  check_says(became[0], "rank 0 has a send of 16 bytes, rank 1 has a receive of 0");
  check_says(became[1], "rank 1 has a send of 8 bytes, rank 0 has a receive of 0");
  const auto cut_otherwise = with_raw([](ncclComm_t comm, float* data, const World& world) {
    start_transfers();
    ncclGroupStart();
    for (const int64_t bytes : {world.rank == 0 ? 4 : 12, world.rank == 0 ? 12 : 4})
      (world.rank == 0 ? ncclSend(data, bytes, ncclInt8, 1, comm, transfer_stream())
                       : ncclRecv(data, bytes, ncclInt8, 0, comm, transfer_stream()));
    ncclGroupEnd();
    wait_for_transfers(mark_transfers());
  });
  check_says(cut_otherwise[0], "rank 0 has 2 sends of 16 bytes, rank 1 has 2 receives of 16 bytes");
}

TEST_CASE("stand-in: memory that changes under a transfer is noticed") {
  const auto exchange = [](Rank& rank, bool of_from) {
    const auto from = rank.floats(128, 1), to = rank.floats(128, 2);
    rank.comm->exchange(from->tensor, to->tensor);
    (of_from ? from : to)->set(std::vector<float>(128, 3));
    rank.comm->wait(rank.comm->mark());
  };
  check_both_say([&](Rank& rank) { exchange(rank, true); },
                 "rank 0 wrote what goes to rank 1 before that was waited for",
                 "rank 1 wrote what goes to rank 0 before");
  check_both_say([&](Rank& rank) { exchange(rank, false); }, "rank 0 wrote where something comes from rank 1",
                 "rank 1 wrote where something comes from rank 0");
  check_both_say(
      [](Rank& rank) {
        const auto x = rank.floats(128, 1);
        rank.comm->reduce_scatter(x->tensor);
        x->set(std::vector<float>(128, 3));
        rank.comm->wait(rank.comm->mark());
      },
      "rank 0 wrote what is summed", "rank 1 wrote what is summed");
}

TEST_CASE("stand-in: what was not waited for is not there") {
  // Whether a result is there without a wait, by these lots.
  const auto is_there = [](Transfers policy, uint64_t seed) {
    const auto became = with_ranks(2, [&](Rank& rank) {
      emulator::set_transfers(policy, seed);
      const auto from = rank.floats(128, 1), to = rank.floats(128, 2), sums = rank.floats(128, 4);
      rank.comm->exchange(from->tensor, to->tensor);
      rank.comm->reduce_scatter(sums->tensor);
      const size_t other = rank.world.rank == 0 ? 64 : 0, own = 64 - other;
      const float got = to->values()[other], sum = sums->values()[own];
      rank.comm->wait(rank.comm->mark());
      CHECK_THAT(to->values()[other] == 1 && sums->values()[own] == 8, "wrong after the wait");
      CHECK_THAT(got == 1 || std::isnan(got), "it is ", got);
      CHECK_THAT(sum == 8 || std::isnan(sum), "it is ", sum);
      if (std::isnan(got)) fail(Exit::internal, "not there");
    });
    CHECK(became[0] == became[1]);
    CHECK((became[0].empty() || became[0] == "not there"));
    return became[0].empty();
  };
  CHECK_FALSE(is_there(Transfers::lazy, 0));
  CHECK(is_there(Transfers::eager, 0));
  int there = 0;
  for (uint64_t seed = 0; seed < 12; ++seed) there += is_there(Transfers::by_lot, seed);
  CHECK(there > 0);
  CHECK(there < 12);
}

TEST_CASE("stand-in: what may not be in a recording") {
  // What a rank says of this in a recording, after it ran plainly.
  const auto recorded = [](const std::function<void(Rank&, const Tensor&)>& body) {
    return [body](Rank& rank) {
      const auto x = rank.floats(128, 1);
      rank.comm->gather(x->tensor);
      rank.comm->wait(rank.comm->mark());
      begin_capture();
      try {
        body(rank, x->tensor);
        launch_graph(end_capture().graph);
      } catch (...) {
        abandon_capture();
        throw;
      }
    };
  };
  check_both_say(recorded([](Rank& rank, const Tensor& x) { rank.comm->gather(x); }),
                 "a recording ends with 1 transfers that the compute lane does not wait for");
  check_both_say(recorded([](Rank& rank, const Tensor& x) {
                   rank.comm->broadcast(x, 0);
                   rank.comm->wait(rank.comm->mark());
                 }),
                 "Broadcast of 512 x type 0 with root 0, recorded, which has never run plainly before");
  check_both_say(recorded([](Rank& rank, const Tensor&) { rank.floats(4); }), "a recording allocates memory");
  check_both_say(recorded([](Rank& rank, const Tensor&) { rank.device->wait(); }), "a recording waits for the device");
  // One records, the other does not.
  check_both_say(recorded([](Rank& rank, const Tensor& x) {
                   if (rank.world.rank == 1) launch_graph(end_capture().graph);
                   rank.comm->gather(x);
                   rank.comm->wait(rank.comm->mark());
                   if (rank.world.rank == 1) begin_capture();
                 }),
                 "rank 0 has AllGather of 256 x type 0 with root 0, recorded, rank 1 has AllGather",
                 "rank 0 has AllGather of 256 x type 0 with root 0, recorded");
}

TEST_CASE("stand-in: misuse is refused") {
  check_all_well(with_raw([](ncclComm_t comm, float* data, const World& world) {
    float on_host[8] = {};
    check_refused(comm, gather(comm, on_host, world.rank), "a pointer into the host's memory");
    check_refused(comm, ncclBroadcast(data, data, 8, ncclInt8, 0, comm, nullptr), "not on the transfer stream");
    check_refused(comm, ncclBroadcast(data, data, 8, ncclInt8, 2, comm, transfer_stream()), "Broadcast from rank 2");
    check_refused(comm, ncclSend(data, 8, ncclInt8, 1 - world.rank, comm, transfer_stream()), "only in groups");
    start_transfers();
    ncclGroupStart();
    check_refused(comm, ncclSend(data, 8, ncclInt8, world.rank, comm, transfer_stream()), "sends to or receives from");
    check_refused(comm, gather(comm, data, world.rank), "only sends and receives in groups");
    CHECK_THAT(ncclGroupEnd() == ncclSuccess, "an empty group");
    synchronize_transfers();
    check_refused(nullptr, ncclGroupEnd(), "a group ends that has not begun");

    start_transfers();
    CHECK_THAT(gather(comm, data, world.rank) == ncclSuccess, ncclGetLastError(comm));
    check_refused(comm, ncclCommDestroy(comm), "1 transfers of a communicator are still to be done");
    synchronize_transfers();
    begin_capture();
    start_transfers();
    CHECK_THAT(gather(comm, data, world.rank) == ncclSuccess, ncclGetLastError(comm));
    check_refused(comm, ncclCommDestroy(comm), "in a recording");
    wait_for_transfers(mark_transfers());
    auto graph = end_capture().graph;
    check_refused(comm, ncclCommDestroy(comm), "recordings still hold transfers");
    graph = nullptr;
    CHECK_THAT(standin::living() == 1 && ncclCommDestroy(comm) == ncclSuccess, ncclGetLastError(comm));
    check_refused(comm, gather(comm, data, world.rank), "used after its end");
    check_refused(comm, ncclCommDestroy(comm), "used after its end");
    CHECK_THAT(standin::living() == 0, "it still lives");
  }));
  const auto became = with_raw([](ncclComm_t comm, float* data, const World& world) {
    if (world.rank == 0) {
      CHECK_THAT(ncclCommAbort(comm) == ncclSuccess, "");
      return check_refused(comm, gather(comm, data, world.rank), "used after its end");
    }
    start_transfers();
    gather(comm, data, world.rank);
    synchronize_transfers();
  });
  CHECK(became[0].empty());
  check_says(became[1], "rank 0 is gone");
}

TEST_CASE("stand-in: faults of a rank, and what the other sees") {
  const auto gathers = [](standin::Fault fault, double seconds = 0) {
    return with_ranks(2, [=](Rank& rank) {
      if (rank.world.rank == 1) standin::set_patience(0.3);
      if (rank.world.rank == 0) standin::inject(fault, 1, seconds);
      const auto x = rank.floats(128, 1);
      for (int i = 0; i < 3; ++i) {
        rank.comm->gather(x->tensor);
        rank.comm->wait(rank.comm->mark());
      }
      if (fault == standin::Fault::hang) return;
      rank.device->wait();
    });
  };
  check_all_well(gathers(standin::Fault::delay, 0.02));
  const auto died = gathers(standin::Fault::die);
  CHECK(died[0] == "signal 9");
  check_says(died[1], "rank 0 is gone, at transfer 1 of rank 1");
  const auto failed = gathers(standin::Fault::error);
  check_says(failed[0],
             "NCCL: a transfer: error of another rank, or of the network: stand-in for NCCL: an injected error");
  check_says(failed[1], "rank 0 is gone, at transfer 2");
  const auto late = gathers(standin::Fault::delay, 1);
  check_says(late[1], "rank 0 does not come to a transfer, at transfer 1");
}

#endif
