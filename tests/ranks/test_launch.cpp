// Who am I, and which CPUs are mine.
#include <doctest/doctest.h>
#include <omp.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <cstdlib>
#include <map>
#include <optional>

#include "ranks/launch.h"

using namespace crossply;

namespace {

// The environment has these variables of launchers and of OpenMP, and no others; afterwards it is as before.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& variables) {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
          "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
          "MPI_LOCALNRANKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
          "SLURM_NODEID", "SLURM_NTASKS", "OMP_NUM_THREADS"}) {
      const char* value = std::getenv(name);
      before_[name] = value == nullptr ? std::nullopt : std::optional<std::string>(value);
      ::unsetenv(name);
    }
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const auto& [name, value] : before_)
      if (value) ::setenv(name.c_str(), value->c_str(), 1);
      else ::unsetenv(name.c_str());
  }

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

using Variables = std::map<std::string, std::string>;

void check_place(const Variables& variables, const World& want) {
  const Environment environment(variables);
  const World got = world_from_environment();
  CHECK(got.rank == want.rank);
  CHECK(got.size == want.size);
  CHECK(got.local_rank == want.local_rank);
  CHECK(got.local_size == want.local_size);
}

// Exit::usage that names what is wrong.
void check_refused(const Variables& variables, const std::string& words) {
  const Environment environment(variables);
  try {
    world_from_environment();
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code == Exit::usage);
    CAPTURE(error.what());
    CHECK(std::string(error.what()).find(words) != std::string::npos);
  }
}

const Variables torchrun = {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}};
const Variables open_mpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
const Variables mpich = {{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}};
const Variables srun = {{"SLURM_PROCID", "9"},  {"SLURM_STEP_NUM_TASKS", "11"},
                        {"SLURM_LOCALID", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"},
                        {"SLURM_NODEID", "2"},  {"SLURM_NTASKS", "11"}};

Variables with(Variables variables, const Variables& more, const std::string& without = "") {
  for (const auto& [name, value] : more) variables[name] = value;
  variables.erase(without);
  return variables;
}

std::vector<int> first_cpus(int count) {
  std::vector<int> cpus(count);
  for (int i = 0; i < count; ++i) cpus[i] = i;
  return cpus;
}

}  // namespace

TEST_CASE("each launcher's variables say which rank this is") {
  check_place({}, {0, 1, 0, 1});
  check_place(torchrun, {5, 8, 1, 4});
  check_place(open_mpi, {1, 2, 0, 1});
  check_place(mpich, {2, 3, 2, 3});
  check_place(srun, {9, 11, 1, 3});
  check_place(with(srun, {{"SLURM_NODEID", "1"}}), {9, 11, 1, 4});
}

TEST_CASE("the first complete set of variables counts") {
  check_place(with(open_mpi, torchrun), {5, 8, 1, 4});
  check_place(with(srun, open_mpi), {1, 2, 0, 1});
  check_place(with(open_mpi, torchrun, "LOCAL_RANK"), {1, 2, 0, 1});
  // Slurm with its own PMI has two of MPICH's four.
  check_place(with(srun, {{"PMI_RANK", "9"}, {"PMI_SIZE", "11"}}), {9, 11, 1, 3});
  // A program of an sbatch script that srun has not started.
  check_place(with(srun, {}, "SLURM_STEP_NUM_TASKS"), {0, 1, 0, 1});
}

TEST_CASE("variables that are incomplete or make no sense are refused by name") {
  check_refused(with(torchrun, {}, "LOCAL_RANK"), "torchrun sets RANK WORLD_SIZE LOCAL_WORLD_SIZE, but not LOCAL_RANK");
  check_refused({{"PMI_RANK", "0"}}, "MPICH sets PMI_RANK, but not PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS");
  check_refused(with(srun, {}, "SLURM_LOCALID"), "but not SLURM_LOCALID");
  for (const char* value : {"", "-1", "8", "x", "1x", " 1", "99999999999999999999"})
    check_refused(with(torchrun, {{"RANK", value}}), std::string("RANK=") + value + " WORLD_SIZE=8");
  check_refused(with(torchrun, {{"WORLD_SIZE", "0"}}), "WORLD_SIZE=0");
  check_refused(with(torchrun, {{"LOCAL_RANK", "4"}}), "LOCAL_RANK=4 LOCAL_WORLD_SIZE=4");
  check_refused(with(torchrun, {{"LOCAL_WORLD_SIZE", "9"}}), "LOCAL_WORLD_SIZE=9");
  check_refused(with(torchrun, {{"RANK", "0"}}), "RANK=0 WORLD_SIZE=8 LOCAL_RANK=1");
  for (const char* value : {"", "4", "4(x2)", "4(x2", "4(y2),3", "(x3)", ",,", "4(x99999999999),3", "0(x3)"})
    check_refused(with(srun, {{"SLURM_STEP_TASKS_PER_NODE", value}}), "SLURM_STEP_TASKS_PER_NODE=");
}

TEST_CASE("ranks that may run everywhere divide the CPUs") {
  const std::vector<int> seven = {0, 4, 1, 5, 2, 6, 3};  // in the order of their cores
  std::vector<int> taken;
  for (int rank = 0; rank < 3; ++rank) {
    const CpuShare share = cpu_share({rank, 3, rank, 3}, seven, 7, 0);
    CHECK(share.threads == static_cast<int>(share.cpus.size()));
    CHECK(share.threads >= 2);
    CHECK(share.advice.empty());
    taken.insert(taken.end(), share.cpus.begin(), share.cpus.end());
  }
  CHECK(taken == seven);
  // The user's number of threads stays, on all CPUs.
  CHECK(cpu_share({1, 2, 1, 2}, seven, 7, 4).threads == 0);
  CHECK(cpu_share({1, 2, 1, 2}, seven, 7, 4).cpus.empty());
  // Which may be more than there are.
  CHECK(cpu_share({1, 2, 1, 2}, seven, 7, 3).advice.empty());
  CHECK(cpu_share({1, 2, 1, 2}, seven, 7, 4).advice.find("OMP_NUM_THREADS=4, but each of 2 processes has 3 of 7") == 0);
  CHECK(cpu_share({0, 1, 0, 1}, seven, 7, 8).advice.empty());
  // More ranks than CPUs.
  const CpuShare crowded = cpu_share({3, 4, 3, 4}, first_cpus(2), 2, 0);
  CHECK(crowded.threads == 1);
  CHECK(crowded.cpus.empty());
}

TEST_CASE("ranks that are bound to CPUs keep them") {
  CHECK(cpu_share({0, 2, 0, 2}, first_cpus(4), 8, 0).threads == 0);
  CHECK(cpu_share({0, 2, 0, 2}, first_cpus(4), 8, 0).cpus.empty());
  // To a socket with another rank: half of its CPUs each, wherever.
  CHECK(cpu_share({0, 4, 0, 4}, first_cpus(8), 16, 0).threads == 4);
  CHECK(cpu_share({0, 4, 0, 4}, first_cpus(8), 16, 0).cpus.empty());
}

TEST_CASE("a launcher that leaves most CPUs unused is noticed") {
  const std::string advice = cpu_share({0, 2, 0, 2}, first_cpus(1), 16, 0).advice;
  CHECK(advice.find("1 of 16 CPUs") != std::string::npos);
  CHECK(advice.find("--bind-to none") != std::string::npos);
  CHECK(advice.find("PE=8") != std::string::npos);
  CHECK(!cpu_share({0, 2, 0, 2}, first_cpus(1), 16, 4).advice.empty());
  CHECK(cpu_share({0, 2, 0, 2}, first_cpus(1), 16, 1).advice.empty());
  CHECK(cpu_share({0, 2, 0, 2}, first_cpus(1), 2, 0).advice.empty());
  CHECK(cpu_share({0, 1, 0, 1}, first_cpus(1), 2, 0).advice.find("run on 1 of 2 CPUs: give") != std::string::npos);
}

#ifdef __linux__
TEST_CASE("two ranks take different CPUs, and as many threads") {
  cpu_set_t before, taken[2];
  REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
  const int threads = omp_get_max_threads();
  const Environment nothing_asked({});
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(take_cpu_share({rank, 2, rank, 2}) == "");
    REQUIRE(sched_getaffinity(0, sizeof before, &taken[rank]) == 0);
    if (CPU_COUNT(&before) > 1) CHECK(omp_get_max_threads() == CPU_COUNT(&taken[rank]));
    else CHECK(omp_get_max_threads() == 1);
    REQUIRE(sched_setaffinity(0, sizeof before, &before) == 0);
    omp_set_num_threads(threads);
  }
  cpu_set_t both;
  CPU_AND(&both, &taken[0], &taken[1]);
  if (CPU_COUNT(&before) > 1) CHECK(CPU_COUNT(&both) == 0);
  CPU_OR(&both, &taken[0], &taken[1]);
  CHECK(CPU_EQUAL(&both, &before));
}
#endif
