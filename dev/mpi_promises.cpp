// What ranks/comm_mpi.cpp expects of an MPI, tried on the one at hand, and how fast it is here:
//   cmake --build build --target mpi_promises && mpirun -n 2 --bind-to none build/mpi_promises
//   ... build/mpi_promises comm      the same through Comm
// With another MPI: in a build of its own, by -DMPI_CXX_COMPILER=mpicxx.mpich and that one's mpirun.
#include <mpi.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "ranks/launch.h"

using namespace crossply;

namespace {

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Cost {
  double wall, cpu;  // CPU seconds of all threads
};
Cost cost_of(const std::function<void()>& work) {
  const double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
  work();
  return {seconds(CLOCK_MONOTONIC) - wall, seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu};
}

void poll(MPI_Request request) {
  for (int done = 0; done == 0;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Median, least and most wall time of 9 times, after one for the connections; and the bandwidth of the median.
void report(int rank, const char* what, double bytes, const std::function<void()>& before,
            const std::function<void()>& work) {
  std::vector<double> wall;
  double cpu = 0;
  for (int i = 0; i < 10; ++i) {
    before();
    const Cost cost = cost_of(work);
    if (i > 0) wall.push_back(cost.wall), cpu += cost.cpu / 9;
  }
  std::sort(wall.begin(), wall.end());
  if (rank == 0)
    std::printf("%-44s %6.1f ms (%.1f to %.1f), %5.2f GB/s each way, %6.1f ms of CPU\n", what, wall[4] * 1e3,
                wall[0] * 1e3, wall[8] * 1e3, bytes / wall[4] * 1e-9, cpu * 1e3);
}

constexpr int slice = 16 << 20;  // elements: 64 MiB

void try_mpi(const World& world) {
  int level = 0, main_thread = 0, rank = 0, size = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
  MPI_Is_thread_main(&main_thread);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank == 0)
    std::printf(
        "%s: in a thread of its own it grants level %d of %d, takes it for the main thread: %s, %d of %d ranks\n",
        mpi_library().c_str(), level, MPI_THREAD_FUNNELED, main_thread ? "yes" : "no", size, world.size);
  const auto together = [] { MPI_Barrier(MPI_COMM_WORLD); };
  const int other = rank ^ 1;
  if (size == 2) {
    for (const bool polling : {false, true}) {
      char byte = 0;
      const Cost cost = cost_of([&] {
        if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
        MPI_Request request;
        if (rank == 1) MPI_Send(&byte, 1, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
        else if (!polling) MPI_Recv(&byte, 1, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else MPI_Irecv(&byte, 1, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &request), poll(request);
      });
      if (rank == 0)
        std::printf("waiting %.2f s, %s: %.2f s of CPU\n", cost.wall, polling ? "asking and sleeping" : "inside MPI",
                    cost.cpu);
    }
    std::vector<float> from(slice, 1), to(slice), whole(2 * slice, 1);
    const double bytes = 4.0 * slice;
    report(rank, "64 MiB each way, MPI_Sendrecv", bytes, together, [&] {
      MPI_Sendrecv(from.data(), 4 * slice, MPI_BYTE, other, 0, to.data(), 4 * slice, MPI_BYTE, other, 0, MPI_COMM_WORLD,
                   MPI_STATUS_IGNORE);
    });
    report(rank, "64 MiB each way, asking and sleeping", bytes, together, [&] {
      MPI_Request receive, send;
      MPI_Irecv(to.data(), 4 * slice, MPI_BYTE, other, 0, MPI_COMM_WORLD, &receive);
      MPI_Isend(from.data(), 4 * slice, MPI_BYTE, other, 0, MPI_COMM_WORLD, &send);
      poll(receive), poll(send);
    });
    report(rank, "its sum of 128 MiB, inside MPI", bytes, together,
           [&] { MPI_Reduce_scatter_block(MPI_IN_PLACE, whole.data(), slice, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    report(rank, "its sum of 128 MiB, asking and sleeping", bytes, together, [&] {
      MPI_Request request;
      MPI_Ireduce_scatter_block(MPI_IN_PLACE, whole.data(), slice, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
      poll(request);
    });
  }
  if (rank == 0)
    std::printf("a count of 3 * 2^30 is %d to MPI: a call moves 1 GiB at most\n", static_cast<int>(3u << 30));
  MPI_Finalize();
}

void try_comm(const World& world) {
  const auto comm = make_mpi_comm(world);
  std::vector<float> from(slice * world.size, 1), to(from);
  std::vector<float> few(world.size);
  const int64_t n = static_cast<int64_t>(from.size());
  const auto finish = [&] { comm->wait(comm->mark()); };
  const auto together = [&] { comm->gather(view(few.data(), Shape{world.size})), finish(); };
  const double bytes = 4.0 * slice * (world.size - 1);
  together();
  const Cost cost = cost_of([&] {
    if (world.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
    together();
  });
  if (world.rank == 0) std::printf("waiting %.2f s in Comm: %.2f s of CPU\n", cost.wall, cost.cpu);
  report(world.rank, "exchange, slices of 64 MiB", bytes, together,
         [&] { comm->exchange(view(from.data(), Shape{n}), view(to.data(), Shape{n})), finish(); });
  report(world.rank, "gather, slices of 64 MiB", bytes, together,
         [&] { comm->gather(view(to.data(), Shape{n})), finish(); });
  report(world.rank, "reduce_scatter, slices of 64 MiB", bytes, together,
         [&] { comm->reduce_scatter(view(to.data(), Shape{n})), finish(); });
  report(world.rank, "exchange, slices of 64 KiB", bytes / 1024, together,
         [&] { comm->exchange(view(from.data(), Shape{n / 1024}), view(to.data(), Shape{n / 1024})), finish(); });
  report(world.rank, "gather of a float each", 4.0 * (world.size - 1), together, together);
}

}  // namespace

int main(int argc, char** argv) try {
  const World world = world_from_environment();
  if (argc > 1 && std::strcmp(argv[1], "comm") == 0) try_comm(world);
  else std::thread(try_mpi, world).join();
} catch (const Error& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return static_cast<int>(error.code);
}
