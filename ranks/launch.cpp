#include "ranks/launch.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <tuple>
#ifdef __linux__
#include <sched.h>
#endif

#include "engine/launchers.h"
#include "engine/threads.h"

namespace crossply {

namespace {

std::optional<int> whole_number(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

// Slurm's list of tasks on each node, "4(x2),3": what it says of one node.
std::optional<int> of_node(const std::string& list, int node) {
  std::istringstream in(list);
  for (std::string entry; std::getline(in, entry, ',');) {
    const size_t times = entry.find("(x");
    const bool repeated = times != std::string::npos && entry.back() == ')';
    const std::optional<int> count =
        repeated ? whole_number(entry.substr(times + 2, entry.size() - times - 3)) : std::optional<int>(1);
    if (!count) return std::nullopt;
    if (node < *count) return whole_number(entry.substr(0, times));
    node -= *count;
  }
  return std::nullopt;
}

std::optional<int> value_of(const char* variable) {
  const std::string text = std::getenv(variable);
  if (std::string(variable) != "SLURM_STEP_TASKS_PER_NODE") return whole_number(text);
  const char* node = std::getenv("SLURM_NODEID");
  return of_node(text, whole_number(node == nullptr ? "" : node).value_or(0));
}

World world_from(const Launcher& launcher) {
  std::string said;
  for (const char* variable : launcher.variables()) said += str(" ", variable, "=", std::getenv(variable));
  const auto rank = value_of(launcher.rank), size = value_of(launcher.size);
  const auto local_rank = value_of(launcher.local_rank), local_size = value_of(launcher.local_size);
  const bool sound = rank && size && local_rank && local_size && *rank < *size && *local_rank < *local_size &&
                     *local_size <= *size && *local_rank <= *rank;
  if (!sound)
    fail(Exit::usage, "the variables of ", launcher.name, " do not describe one of several processes:", said,
         "; unset them, or start all processes by one launcher");
  return {*rank, *size, *local_rank, *local_size};
}

#ifdef __linux__
// The CPUs that a process may run on; those of one core, and of one package, stand together.
std::vector<int> cpus_of(pid_t process) {
  cpu_set_t set;
  if (sched_getaffinity(process, sizeof set, &set) != 0) return {};
  std::vector<std::tuple<int, int, int>> places;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &set)) continue;
    int package = 0, core = cpu;
    const std::string topology = str("/sys/devices/system/cpu/cpu", cpu, "/topology/");
    std::ifstream(topology + "physical_package_id") >> package;
    std::ifstream(topology + "core_id") >> core;
    places.emplace_back(package, core, cpu);
  }
  std::sort(places.begin(), places.end());
  std::vector<int> cpus;
  for (const auto& place : places) cpus.push_back(std::get<2>(place));
  return cpus;
}

// The next process above this one that is not itself part of a rank, as a shell script around the program is.
pid_t launcher_process() {
  const auto is_part_of_a_rank = [](pid_t process) {
    std::ostringstream text;
    text << '\0' << std::ifstream(str("/proc/", process, "/environ")).rdbuf();
    for (const Launcher& launcher : launchers)
      if (text.str().find('\0' + std::string(launcher.rank) + "=") != std::string::npos) return true;
    return false;
  };
  pid_t process = getppid();
  while (process > 1 && is_part_of_a_rank(process)) {
    std::ifstream status(str("/proc/", process, "/stat"));
    std::string text;
    std::getline(status, text, '\0');
    // "12 (name of the program) S 11 ...": its parent is the second word after the name.
    std::istringstream rest(text.substr(std::min(text.size(), text.rfind(')') + 1)));
    std::string state;
    if (!(rest >> state >> process)) return 0;
  }
  return process;
}
#endif

}  // namespace

World world_from_environment() {
  std::string partial;
  for (const Launcher& launcher : launchers) {
    std::string there, missing;
    for (const char* variable : launcher.variables())
      (std::getenv(variable) == nullptr ? missing : there) += str(" ", variable);
    if (missing.empty()) return world_from(launcher);
    // A script of sbatch has some of srun's variables without being one of its tasks.
    const bool in_script = launcher.name == std::string("srun") && std::getenv(launcher.size) == nullptr;
    if (there.empty() || in_script) continue;
    partial += str(partial.empty() ? "" : "; ", launcher.name, " sets", there, ", but not", missing);
  }
  if (!partial.empty())
    fail(Exit::usage, "which of several processes is this? ", partial, ": set all of them, or unset those");
  return {};
}

CpuShare cpu_share(const World& world, const std::vector<int>& mine, int launcher, int asked) {
  const int count = static_cast<int>(mine.size()), all = std::max(count, launcher);
  const int fair = std::max(1, all / world.local_size);
  CpuShare share;
  if (count < (asked > 0 ? std::min(asked, fair) : fair)) {
    const std::string others = world.alone() ? "" : str(", with ", world.local_size, " processes on this machine");
    share.advice = str("the launcher lets this process run on ", count, " of ", all, " CPUs", others,
                       ": give mpirun --bind-to none, or --map-by slot:PE=", fair);
    return share;
  }
  if (asked > fair && !world.alone())
    share.advice = str("OMP_NUM_THREADS=", asked, ", but each of ", world.local_size, " processes has ", fair, " of ",
                       all, " CPUs: they slow each other down; unset it");
  if (asked > 0 || static_cast<int64_t>(count) * world.local_size <= all) return share;
  share.threads = std::min(count, fair);
  if (count < all || count < world.local_size) return share;
  const auto part = [&](int64_t rank) { return mine.begin() + rank * count / world.local_size; };
  share.cpus.assign(part(world.local_rank), part(world.local_rank + 1));
  share.threads = static_cast<int>(share.cpus.size());
  return share;
}

std::string take_cpu_share(const World& world) {
  const char* text = std::getenv("OMP_NUM_THREADS");
  const int asked = text == nullptr ? 0 : omp_get_max_threads();
#ifdef __linux__
  const std::vector<int> mine = cpus_of(0);
  const bool launched = std::any_of(std::begin(launchers), std::end(launchers),
                                    [](const Launcher& launcher) { return std::getenv(launcher.rank) != nullptr; });
  if (world.alone() && !launched) return "";
  if (mine.empty()) return choose_thread_count(world.local_size);
  const CpuShare share = cpu_share(world, mine, static_cast<int>(cpus_of(launcher_process()).size()), asked);
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : share.cpus) CPU_SET(cpu, &set);
  // Threads that OpenMP makes later inherit it. Where it fails, the system places them.
  if (!share.cpus.empty()) sched_setaffinity(0, sizeof set, &set);
#else
  std::vector<int> mine(omp_get_num_procs());
  const CpuShare share = cpu_share(world, mine, static_cast<int>(mine.size()), asked);
#endif
  if (share.threads > 0) omp_set_num_threads(share.threads);
  const std::string note = choose_thread_count(world.local_size);
  return share.advice.empty() ? note : share.advice;
}

}  // namespace crossply
