#include "train/ranks.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/flags.h"
#include "engine/file.h"
#include "engine/printable.h"
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

}  // namespace

void check_ranks(const TrainOptions& o, int64_t ranks) {
  const int64_t V = o.accumulate, sequences = o.batch * V;
  if (V % ranks == 0) return;
  int64_t fewer = std::min(ranks, V), more = ranks;
  while (V % fewer != 0) --fewer;
  while (more < V && V % more != 0) ++more;
  std::string ways = str(fewer, more < V ? str(" or ", more) : "", fewer == 1 && more >= V ? " rank" : " ranks");
  if (sequences % ranks == 0) {
    const int64_t batch = std::gcd(o.batch, sequences / ranks);
    ways += str("; with --batch ", batch, " --accumulate ", sequences / batch, " (the same step) ", ranks, " ranks");
  }
  if (ranks > sequences) ways += str("; with --batch 1 --accumulate ", sequences, " up to ", sequences, " ranks");
  const int64_t below = V / ranks * ranks;
  ways += str("; --accumulate ", below > 0 ? str(below, " or ") : "", below + ranks, " (another step)");
  fail(Exit::usage, ranks, " ranks cannot share the ", V, V == 1 ? " micro-step" : " micro-steps",
       " of a step (--accumulate) evenly", ranks > sequences ? str("; it has only ", sequences, " sequences") : "",
       ". Possible are ", ways);
}

void become_rank(TrainOptions& o) {
  const Place place = place_from_environment();
  if (place.alone()) return;
  o.job = one_rank_job(place);
  if (!place.leads() && !o.log_ranks) silence_standard_output();
  if (!place.leads()) o.label += str(" rank ", place.rank);
  check_ranks(o, place.size);
  const std::string advice = take_cpu_share(place);
  if (!advice.empty()) std::printf("%s %s\n", o.label.c_str(), advice.c_str());
  if (on_gpus(o)) return choose_gpu(place.local_rank);
  auto mpi = make_mpi_comm(place);
  if (mpi == nullptr)
    fail(Exit::usage, "the launcher started ", place.size, " processes, but this program was built with ",
         built_comms(), ": for several on CPUs install MPI (make setup) and build again, or start one");
  o.job->set_comm(std::move(mpi));
}

void join_ranks(TrainOptions& o) {
  const Place place = o.job->place;
  if (!o.job->apart) return;
  JoinOptions join;
  join.run_dir = o.out;
  join.peer_timeout = o.peer_timeout;
  join.same["commit of the build"] = commit();
  const nlohmann::json settings = all_settings(o);
  for (const auto& [key, value] : settings.items()) join.same[key] = value.dump();
  // Of the GPUs, too: what rank 0 chooses for its products must hold for all.
  for (const auto& [of, version] : make_device(o.device)->arithmetic().versions) join.same[of] = version;
  std::unique_ptr<Comm> comm = o.job->take_comm();
  std::shared_ptr<Job> job = join_job(place, join, comm.get());
  o.job = job;
  if (on_gpus(o)) {
    refuse_shared_gpu(*job, gpu_in_the_world());
    comm = make_nccl_comm(place, job->share(place.leads() ? new_nccl_id() : ""));
    if (comm == nullptr)
      fail(Exit::usage, "the launcher started ", place.size, " processes, but this program was built with ",
           built_comms(), ": for several GPUs build it with NCCL, or start one");
  }
  job->set_comm(std::move(comm));
}

void refuse_shared_gpu(Job& job, const std::string& gpu) {
  std::map<std::string, size_t> first;
  std::string shared;
  const std::vector<std::string> gpus = job.collect(gpu);
  for (size_t rank = gpus.size(); rank-- > 0;) {
    const auto [other, fresh] = first.try_emplace(gpus[rank], rank);
    if (!fresh) shared = str("ranks ", rank, " and ", other->second, " have the same GPU, ", gpus[rank]);
    other->second = rank;
  }
  const char* allowed = std::getenv("CROSSPLY_SHARE_GPU");
  shared = job.share(allowed == nullptr || *allowed == '\0' ? shared : "");
  if (!shared.empty()) fail(Exit::usage, shared, ": start one process a GPU, or look at CUDA_VISIBLE_DEVICES");
}

void compare_data(const TrainOptions& o, const Source& train) {
  Job& job = *o.job;
  if (job.place.alone()) return;
  const std::vector<std::string> digests = job.collect(str(std::hex, train.digest()));
  std::string others;
  for (size_t rank = 1; rank < digests.size(); ++rank)
    if (digests[rank] != digests[0]) others += str(others.empty() ? "" : ", ", rank);
  others = job.share(others);
  if (!others.empty())
    fail(Exit::bad_data, "what ranks ", others, " read as ", o.data.spec,
         " has other contents than rank 0's: all ranks need the same files");
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
  if (isatty(STDOUT_FILENO) == 1) std::printf("\r\033[K");  // over an unfinished status line
  std::fflush(stdout);
  // All ranks find a loss that is not finite, and before they meet wrong flags.
  const bool found_by_all = error.code == Exit::not_finite || (o.job->apart && error.code == Exit::usage);
  if (place.leads() || o.log_ranks || !found_by_all)
    std::fprintf(stderr, "error: %s%s\n", who.c_str(), printable(error.what()).c_str());
  else ::sleep(1);  // a launcher ends all ranks when the first one fails: rank 0 must have said why
  std::fflush(stderr);
  ::_exit(static_cast<int>(error.code));  // at once: MPI, NCCL and CUDA may wait for ranks that are gone
}

}  // namespace crossply
