#include "train/run/ranks.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>

#include "cli/program.h"
#include "cli/stop.h"
#include "cli/version.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "kernels/devices.h"
#include "kernels/optim/sum_slices.h"
#include "ranks/agree.h"
#include "ranks/launch.h"
#include "train/step/reduction.h"

namespace crossply {
namespace {

void silence_standard_output() {
  const Descriptor null(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  std::fflush(stdout);
  if (null.get() >= 0) ::dup2(null.get(), STDOUT_FILENO);
}

[[noreturn]] void refuse_build(const World& world) {
  fail(Exit::usage, "the launcher started ", world.size, " processes, but this program was built with ", built_comms(),
       ": for several on CPUs install MPI (make setup), for several on GPUs NCCL, and build again; or start one");
}

// Ends the process where MPI waits for ranks that do not come, which it does forever.
struct Deadline {
  Deadline() {
    std::signal(SIGALRM, [](int) {
      constexpr char text[] = "error: the other ranks did not come within 300 s; see what they print\n";
      if (::write(STDERR_FILENO, text, sizeof text - 1) < 0) ::_exit(static_cast<int>(Exit::device));
      ::_exit(static_cast<int>(Exit::device));
    });
    ::alarm(300);
  }
  ~Deadline() { ::alarm(0); }
};

}  // namespace

void check_ranks(const Settings& settings, int64_t ranks) {
  const int64_t V = settings.accumulate, sequences = settings.batch * V;
  if (ranks >= 1 << max_levels)
    fail(Exit::usage, ranks, " ranks are too many: at most ", (1 << max_levels) - 1, " add up their gradients");
  if (V % ranks == 0) return;
  int64_t fewer = std::min(ranks, V), more = ranks;
  while (V % fewer != 0) --fewer;
  while (more < V && V % more != 0) ++more;
  std::string ways = str(fewer, more < V ? str(" or ", more) : "", fewer == 1 && more >= V ? " rank" : " ranks");
  if (sequences % ranks == 0) {
    const int64_t batch = std::gcd(settings.batch, sequences / ranks);
    ways += str("; with --batch ", batch, " --accumulate ", sequences / batch, " (the same step) ", ranks, " ranks");
  }
  if (ranks > sequences) ways += str("; with --batch 1 --accumulate ", sequences, " up to ", sequences, " ranks");
  const int64_t below = V / ranks * ranks;
  ways += str("; --accumulate ", below > 0 ? str(below, " or ") : "", below + ranks, " (another step)");
  fail(Exit::usage, ranks, " ranks cannot share the ", V, V == 1 ? " micro-step" : " micro-steps",
       " of a step (--accumulate) evenly", ranks > sequences ? str("; it has only ", sequences, " sequences") : "",
       ". Possible are ", ways);
}

void become_rank(const Settings& settings, std::shared_ptr<ProcessGroup>& group) {
  const World world = world_from_environment();
  const std::string advice = take_cpu_share(world);
  if (!advice.empty() && world.leads()) std::printf("%s %s\n", settings.label.c_str(), advice.c_str());
  if (world.alone()) return;
  catch_stop_signals();  // a launcher may send them early
  group = one_rank_group(world);
  if (!world.leads() && !settings.log_ranks) silence_standard_output();
  if (!world.leads() && settings.accumulate % world.size != 0) throw SharedError(Exit::usage, "rank 0 says why");
  check_ranks(settings, world.size);
  if (on_gpus(settings)) return choose_gpu(world.local_rank);
  const Deadline deadline;
  auto mpi = make_mpi_comm(world);
  if (mpi == nullptr) refuse_build(world);
  group->set_comm(std::move(mpi));
}

void join_ranks(const TrainPlan& plan, std::shared_ptr<ProcessGroup>& group) {
  const World world = group->world;
  if (!group->joining) return;
  JoinOptions join;
  join.run_dir = plan.out;
  join.peer_timeout = plan.peer_timeout;
  join.same["commit of the build"] = commit();
  const nlohmann::json settings = settings_of_all_ranks(plan);  // items() of a temporary would outlive it
  for (const auto& [key, value] : settings.items()) join.same[key] = json_text(value);
  // Of the GPUs, too: what rank 0 chooses for its products must hold for all.
  for (const auto& [of, version] : make_device(plan.device)->arithmetic().versions) join.same[of] = version;
  std::unique_ptr<Comm> comm = group->take_comm();
  {
    const Deadline deadline;
    group = join_group(world, join, comm.get());
  }
  if (on_gpus(plan)) {
    refuse_shared_gpu(*group, gpu_in_the_world());
    comm = make_nccl_comm(world, group->share(world.leads() ? new_nccl_id() : ""));
    if (comm == nullptr) refuse_build(world);
  }
  group->set_comm(std::move(comm));
}

std::string describe_ranks(const TrainPlan& plan, const ProcessGroup& group) {
  const int64_t W = group.world.size, V = plan.accumulate, A = V / W;
  if (V == 1) return "";
  std::string text = str(V, " micro-steps");
  if (W > 1) text = str(W, " ranks, ", group.comm().describe(), ", ", A, " of ", V, " micro-steps each");
  text += ", --sum " + plan.sum;
  if (W == 1 && plan.sum == "tree") return text + ": the bits of more ranks, where each has a power of two";
  if (W == 1) return text + ": last digits as with no other number of ranks";
  if (plan.sum == "library") return text + ": last digits may change from run to run";
  return text + (has_bits_of_one_rank(plan.sum, A) ? ": the bits of one rank with --sum tree"
                                                   : ": last digits as with no other number of ranks");
}

void end_rank(const Settings& settings, ProcessGroup& group, const std::exception& failure, const std::string& remedy) {
  const Error error = error_of(failure, remedy);
  const World world = group.world;
  group.abort(error.code, error.what());
  const std::string who = world.leads() ? "" : str("rank ", world.rank, ": ");
  std::fflush(stdout);
  // All ranks find a loss that is not finite.
  const bool shared = error.code == Exit::not_finite || dynamic_cast<const SharedError*>(&failure) != nullptr;
  if (world.leads() || settings.log_ranks || !shared)
    std::fprintf(stderr, "error: %s%s\n", who.c_str(), printable(error.what()).c_str());
  else ::sleep(1);  // a launcher ends all ranks when the first one fails: rank 0 must have said why
  std::fflush(stderr);
  ::_exit(static_cast<int>(error.code));  // at once: MPI, NCCL and CUDA may wait for ranks that are gone
}

}  // namespace crossply
