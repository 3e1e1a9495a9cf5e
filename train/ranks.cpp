#include "train/ranks.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/flags.h"
#include "engine/file.h"
#include "engine/printable.h"
#include "kernels/cuda/cuda.h"
#include "kernels/devices.h"
#include "ranks/launch.h"

namespace crossply {
namespace {

bool on_gpus(const TrainOptions& o) { return backend_of(o.device) == Backend::cuda; }

void silence_standard_output() {
  const Descriptor null(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  std::fflush(stdout);
  if (null.get() >= 0) ::dup2(null.get(), STDOUT_FILENO);
}

// The largest number of ranks up to `most` that can share the micro-steps.
int64_t nearest_size(int64_t micro_steps, int64_t most) {
  while (micro_steps % most != 0) --most;
  return most;
}

void check_micro_steps(int64_t V, int64_t W) {
  if (V % W == 0) return;
  const int64_t fewer = V / W * W, more = (V / W + 1) * W;
  fail(Exit::usage, W, " ranks cannot share the ", V,
       " micro-steps of a step (--accumulate) equally: give --accumulate ", fewer > 0 ? str(fewer, " or ") : "", more,
       " (and --batch, for as many sequences a step), or start ", nearest_size(V, std::min(V, W)), " ranks");
}

}  // namespace

void become_rank(TrainOptions& o) {
  const Place place = place_from_environment();
  const std::string advice = take_cpu_share(place);
  if (!advice.empty() && place.leads()) std::printf("%s %s\n", o.label.c_str(), advice.c_str());
  if (place.alone()) return;
  o.job = one_rank_job(place);
  if (!place.leads() && !o.log_ranks) silence_standard_output();
  if (!place.leads()) o.label += str(" rank ", place.rank);
  check_micro_steps(o.accumulate, place.size);
  if (on_gpus(o)) {
    if (select_gpu != nullptr) select_gpu(place.local_rank);
    return;
  }
  auto mpi = make_mpi_comm(place);
  if (mpi == nullptr)
    fail(Exit::usage, "the launcher started ", place.size, " processes, but this program was built with ",
         built_comms(), ": for several on CPUs install MPI (make setup) and build again, or start one");
  o.job->set_comm(std::move(mpi));
}

void join_ranks(TrainOptions& o) {
  const Place place = o.job->place;
  if (place.alone()) return;
  JoinOptions join;
  join.run_dir = o.out;
  join.peer_timeout = o.peer_timeout;
  join.same["commit of the build"] = commit();
  const nlohmann::json settings = all_settings(o);
  for (const auto& [key, value] : settings.items()) join.same[key] = value.dump();
  std::unique_ptr<Comm> comm = o.job->take_comm();
  std::shared_ptr<Job> job = join_job(place, join, comm.get());
  o.job = job;
  if (on_gpus(o)) {
    comm = make_nccl_comm(place, job->share(place.leads() ? new_nccl_id() : ""));
    if (comm == nullptr)
      fail(Exit::usage, "the launcher started ", place.size, " processes, but this program was built with ",
           built_comms(), ": for several GPUs build it with NCCL, or start one");
  }
  job->set_comm(std::move(comm));
}

void compare_data(const TrainOptions& o, const std::string& digest) {
  Job& job = *o.job;
  if (job.place.alone()) return;
  const std::vector<std::string> digests = job.collect(digest);
  std::string others;
  for (size_t rank = 1; rank < digests.size(); ++rank)
    if (digests[rank] != digests[0]) others += str(others.empty() ? "" : ", ", rank);
  others = job.share(others);
  if (others.empty()) return;
  const std::string why = str("what ", others.find(',') == others.npos ? "rank " : "ranks ", others, " read as ",
                              o.data.spec, " has other contents than rank 0's: all ranks need the same files");
  if (!job.place.leads()) throw SharedError(Exit::bad_data, why);
  throw Error(Exit::bad_data, why);
}

std::string describe_ranks(const TrainOptions& o) {
  const int64_t W = o.job->place.size, V = o.accumulate, A = V / W;
  if (W == 1 && (V == 1 || o.sum == "running")) return "";
  std::string text = W == 1 ? str("1 rank, ", V, " micro-steps")
                            : str(W, " ranks, ", o.job->comm().describe(), ", ", A, " of ", V, " micro-steps each");
  text += "; --sum " + o.sum;
  const bool free_of_ranks = (o.sum == "tree" && (A & (A - 1)) == 0) || (o.sum == "running" && A == 1);
  if (o.sum == "library") text += ": bits may change from run to run";
  else if (free_of_ranks) text += ": the bits of one rank with --sum tree";
  else text += ": other last digits than with another number of ranks";
  return text;
}

void end_rank(const TrainOptions& o, const Error& error) {
  const Place place = o.job->place;
  o.job->farewell(error.code, error.what());
  const std::string who = place.leads() ? "" : str("rank ", place.rank, ": ");
  std::fflush(stdout);
  // All ranks find a loss that is not finite.
  const bool shared = error.code == Exit::not_finite || dynamic_cast<const SharedError*>(&error) != nullptr;
  if (place.leads() || o.log_ranks || !shared)
    std::fprintf(stderr, "error: %s%s\n", who.c_str(), printable(error.what()).c_str());
  std::fflush(stderr);
  ::_exit(static_cast<int>(error.code));  // at once: MPI, NCCL and CUDA may wait for ranks that are gone
}

}  // namespace crossply
