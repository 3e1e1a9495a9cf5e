// bench neighbours: what is left of a training run's speed while other programs are on the cores.
//
// Each model trains in a process of its own. In each round every setting gets its turn, the one without neighbours
// first; a neighbour is an endless loop. Linux shares the cores first between sessions (terminals), then by nice within
// one, hence the row of a neighbour with nice 15 and a session of its own. Of one core: the same model, kept to half of
// the cores, alone.
#include <omp.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <sstream>

#include "cli/format.h"
#include "dev/bench.h"
#include "eval/statistics.h"

namespace crossply {
namespace {

struct Setting {
  std::string name;
  int64_t loops;
  int nice;
  bool own_session, half_of_cores;
};

std::vector<Setting> settings(int64_t cores) {
  return {{"alone", 0, 0, false, false},
          {"one busy loop", 1, 0, false, false},
          {str(cores, " busy loops"), cores, 0, false, false},
          {str(cores, " busy loops, nice 15"), cores, 15, false, false},
          {str(cores, " busy loops, nice 15, other session"), cores, 15, true, false},
#ifdef __linux__
          {"alone, half of the cores", 0, 0, false, true}
#endif
  };
}

// Endless loops that end with this object, or with this program. They are one group of processes, and of one session.
class BusyLoops {
 public:
  explicit BusyLoops(const Setting& s) {
    if (s.loops == 0) return;
    const pid_t parent = getpid();
    leader_ = fork();
    if (leader_ < 0) fail(Exit::io, "cannot start a busy neighbour; are there too many processes?");
    if (leader_ == 0) spin(s, parent);
    while (getpgid(leader_) != leader_) sched_yield();  // until there is such a group to end
  }
  ~BusyLoops() {
    if (leader_ > 0) kill(-leader_, SIGKILL), waitpid(leader_, nullptr, 0);
  }
  BusyLoops(const BusyLoops&) = delete;

 private:
  // In the process of the first loop, which starts the others.
  [[noreturn]] static void spin(const Setting& s, pid_t parent) {
    if (s.own_session) setsid();
    else setpgid(0, 0);
    if (setpriority(PRIO_PROCESS, 0, s.nice) != 0) _exit(1);
    const pid_t leader = getpid();
    for (int64_t i = 1; i < s.loops; ++i)
      if (fork() == 0) break;
    for (uint64_t turns = 0;; ++turns)
      if (turns % 4096 == 0 && getppid() != (getpid() == leader ? parent : leader)) _exit(0);
  }

  pid_t leader_ = 0;
};

// Programs started while it lives may run on the first half of the cores; only Linux can say so.
class HalfOfCores {
#ifdef __linux__
 public:
  HalfOfCores() {
    sched_getaffinity(0, sizeof all_, &all_);
    cpu_set_t half;
    CPU_ZERO(&half);
    for (int cpu = 0, left = std::max(1, CPU_COUNT(&all_) / 2); cpu < CPU_SETSIZE && left > 0; ++cpu)
      if (CPU_ISSET(cpu, &all_)) CPU_SET(cpu, &half), --left;
    sched_setaffinity(0, sizeof half, &half);
  }
  ~HalfOfCores() { sched_setaffinity(0, sizeof all_, &all_); }
  HalfOfCores(const HalfOfCores&) = delete;

 private:
  cpu_set_t all_;
#endif
};

std::unique_ptr<Process> start(const std::vector<std::string>& command, const std::string& what) {
  auto process = std::make_unique<Process>(command, std::vector<std::string>{});
  if (process->answer() != "ready") fail(Exit::device, what, ": the training process ended; see its message above");
  return process;
}

// Tokens/s over so many steps.
double rate(Process& process, const ModelSize& size, int64_t steps) {
  process.ask(std::to_string(steps));
  std::istringstream answer(process.answer().value_or(""));
  double seconds = 0;
  if (!(answer >> seconds)) fail(Exit::device, "the training process ended; see its message above");
  return static_cast<double>(steps * size.batch * size.seq) / seconds;
}

void bench_model(GrowingTable& table, const NamedSize& model, const std::string& dtype, const BenchFlags& f) {
  const std::string what = str("(", model.name, ") ", dtype);
  std::vector<std::string> command = {f.program, "serve", "--dtype", dtype};
  for (const std::string& word : arguments(model.size)) command.push_back(word);
  const auto process = start(command, what);
  const auto half = [&] {
    [[maybe_unused]] const HalfOfCores fewer;
    return start(command, what);
  }();
  // Steps of about a second and a half: many turns of the scheduler, whose slices are milliseconds.
  rate(*process, model.size, 1);
  const double tokens = static_cast<double>(model.size.batch * model.size.seq);
  const auto steps = std::max<int64_t>(2, std::lrint(1.5 * rate(*process, model.size, 2) / tokens));
  rate(*half, model.size, 1);
  const std::vector<Setting> all = settings(omp_get_num_procs());
  std::vector<std::vector<double>> rates(all.size()), of_alone(all.size());
  for (int64_t round = 0; round < f.rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      const BusyLoops neighbours(all[i]);
      rates[i].push_back(rate(all[i].half_of_cores ? *half : *process, model.size, steps));
      of_alone[i].push_back(rates[i].back() / rates[0].back());
    }
  }
  for (size_t i = 0; i < all.size(); ++i)
    table.add({what + ", " + all[i].name, format_count(std::lrint(median(rates[i]))),
               format_number("%.2f", median(of_alone[i])),
               format_number("%.2f", quantile(of_alone[i], 0)) + format_number("-%.2f", quantile(of_alone[i], 1))});
}

}  // namespace

void bench_neighbours(const BenchFlags& f) {
  print_text("\ntraining beside busy neighbours, ", omp_get_num_procs(), " cores; medians of ", f.rounds,
             " rounds, and the range of the shares\n");
  GrowingTable table("neighbours", {"training, beside", "tokens/s", "of alone", "range"}, 46, 8);
  for (const NamedSize& model : named_sizes(f.models))
    for (const char* dtype : {"fp32", "bf16"}) bench_model(table, model, dtype, f);
}

}  // namespace crossply
