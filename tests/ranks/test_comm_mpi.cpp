// The Comm between CPUs. These cases are for several processes that tests/system/mpi.sh starts by mpirun; elsewhere
// they do nothing. MPI starts once in a process: the cases "mpi: ..." share a Comm, those "mpi alone: ..." need one
// each.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "kernels/devices.h"
#include "ranks/launch.h"
#include "tests/ranks/comm_checks.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Check = void (*)(Comm&, const World&, Device&);

bool several() {
  if (world_from_environment().size > 1) return true;
  MESSAGE("skipped: one process, not started by mpirun");
  return false;
}

void with_comm(Check check) {
  if (!several()) return;
  const World world = world_from_environment();
  CAPTURE(world.rank);
  static const std::unique_ptr<Comm> comm = make_mpi_comm(world);
  REQUIRE(comm != nullptr);
  check(*comm, world, *make_device("cpu"));
}

// In one call, so that the lines of several processes stay whole.
void told(const Error& error) { std::fprintf(stderr, "told: %s\n", error.what()); }

// In a directory of all ranks.
std::string shared_file(const std::string& name) {
  const char* directory = std::getenv("MPI_TEST_DIR");
  REQUIRE(directory != nullptr);
  return std::string(directory) + "/" + name;
}

void wait_for_file(const std::string& name) {
  for (int tries = 0; !std::filesystem::exists(shared_file(name)); ++tries) {
    REQUIRE(tries < 3000);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Some mpirun ends all ranks as soon as one is gone.
void leave_together(const World& world) {
  std::ofstream{shared_file(str("leaves_", world.rank))};
  for (int rank = 0; rank < world.size; ++rank) wait_for_file(str("leaves_", rank));
}

}  // namespace

TEST_CASE("mpi: exchange") { with_comm(check_exchange); }
TEST_CASE("mpi: gather") { with_comm(check_gather); }
TEST_CASE("mpi: route") { with_comm(check_route); }
TEST_CASE("mpi: broadcast") { with_comm(check_broadcast); }
TEST_CASE("mpi: reduce_scatter") { with_comm(check_reduce_scatter); }
TEST_CASE("mpi: many in flight, in order") { with_comm(check_many_in_flight); }

// The others begin when rank 0 has made its call, so it waits for them. On a busy machine rank 0 may come to wait()
// after all is done, hence the rounds: once in so many it comes before.
TEST_CASE("mpi: a call returns before the others make theirs") {
  with_comm([](Comm& comm, const World& world, Device& device) {
    const double waited_before = comm.seconds_waited();
    for (int round = 0; round < 20; ++round) {
      Flat whole(device, world.size);
      whole.set(slices(world, 1, [&](int r, int64_t i) { return r == world.rank ? sent(r, 0, i, round) : nothing; }));
      if (world.rank > 0) wait_for_file(str("asked_", round));
      if (world.rank > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      comm.gather(whole.tensor);
      const Comm::Ticket ticket = comm.mark();
      if (world.rank == 0) std::ofstream{shared_file(str("asked_", round))};
      comm.wait(ticket);
      check_values(whole.values(), slices(world, 1, [&](int r, int64_t i) { return sent(r, 0, i, round); }));
    }
    if (world.rank == 0) CHECK(comm.seconds_waited() > waited_before);
  });
}

TEST_CASE("mpi: what cannot be moved is refused") {
  with_comm([](Comm& comm, const World& world, Device& device) {
    Flat odd(device, 2 * world.size + 1);
    CHECK_THROWS_AS(comm.gather(odd.tensor), Error);
    CHECK_THROWS_AS(comm.broadcast(odd.tensor, world.size), Error);
    CHECK_THROWS_AS(comm.wait(comm.mark() + 1), Error);
    Tensor large = odd.tensor;
    large.shape = Shape{(int64_t{1} << 28) + world.size};
    CHECK_THROWS_AS(comm.broadcast(large, 0), Error);
    CHECK_THROWS_AS(make_mpi_comm(world), Error);
  });
}

// Rank 0 sends less than the others expect, and they send more than it does.
TEST_CASE("mpi alone: ranks that do not make the same calls") {
  if (!several()) return;
  const World world = world_from_environment();
  const auto device = make_device("cpu");
  const auto comm = make_mpi_comm(world);
  REQUIRE(comm != nullptr);
  Flat whole(*device, (world.rank == 0 ? 1000 : 1001) * world.size);
  comm->gather(whole.tensor);
  for (int time = 0; time < 2; ++time) {
    try {
      comm->wait(comm->mark());
      FAIL("no error");
    } catch (const Error& error) {
      CHECK(error.code == Exit::device);
      if (time == 0) told(error);
    }
  }
  CHECK_THROWS_AS(comm->gather(whole.tensor), Error);
  leave_together(world);
}

// Nobody answers; the error that ends the process is the one that it ends with.
TEST_CASE("mpi alone: an error while others are waited for") {
  if (!several()) return;
  const World world = world_from_environment();
  const auto device = make_device("cpu");
  Flat whole(*device, 1 << 20);
  try {
    const auto comm = make_mpi_comm(world);
    REQUIRE(comm != nullptr);
    if (world.rank == 0) comm->broadcast(whole.tensor, 1);
    fail(Exit::not_finite, "the loss is nan");
  } catch (const Error& error) {
    CHECK(error.code == Exit::not_finite);
    told(error);
  }
  leave_together(world);
}

TEST_CASE("what this was built with has a name and a number") {
  const std::string built = built_comms(), mpi = mpi_library();
  CHECK((built == "nothing") == (mpi.empty() && nccl_library().empty()));
  if (!mpi.empty()) CHECK(built.find("MPI (" + mpi + ")") == 0);
  if (!mpi.empty()) CHECK(mpi.find_last_of("0123456789") == mpi.size() - 1);
}

TEST_CASE("a missing module of MPI is named, with what to do") {
  if (mpi_library().empty()) return;
  ::setenv("CROSSPLY_MPI_MODULE", "nowhere/comm_mpi.so", 1);
  try {
    make_mpi_comm(World{});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code == Exit::device);
    CHECK(std::string(error.what()).find("cannot open nowhere/comm_mpi.so") == 0);
    CHECK(std::string(error.what()).find("it needs " + mpi_library() + ": install that") != std::string::npos);
  }
  ::unsetenv("CROSSPLY_MPI_MODULE");
}
