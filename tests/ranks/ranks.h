// Runs the ranks of a job as processes of this test.
#pragma once

#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "engine/platform.h"
#include "ranks/comm.h"

namespace crossply::test {

// Of doctest, in this process (tests/ranks/test_comm_nccl.cpp counts them).
inline int failed_checks = 0;

// What became of each rank: nothing if body returned, what it threw, how many checks failed, or "signal 9". None
// outlives the call, nor a minute.
inline std::vector<std::string> run_ranks(int size, const std::function<void(const World&)>& body) {
  struct Rank {
    pid_t process;
    int said;
  };
  std::fflush(nullptr);
  std::vector<Rank> ranks;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2];
    CHECK_THAT(pipe(ends) == 0, "no pipe");
    const pid_t process = fork();
    CHECK_THAT(process >= 0, "no process");
    if (process > 0) {
      close(ends[1]);
      ranks.push_back({process, ends[0]});
      continue;
    }
    die_with_parent();
    for (const int signal : {SIGSEGV, SIGABRT}) std::signal(signal, SIG_DFL);  // without the test runner's report
    alarm(60);
    omp_set_num_threads(1);  // the threads of a team that the parent has are not here
    std::string said;
    failed_checks = 0;
    try {
      body({rank, size, rank, size});
    } catch (const std::exception& error) {
      said = *error.what() != '\0' ? error.what() : "an error without words";
    }
    if (said.empty() && failed_checks > 0) said = std::to_string(failed_checks) + " checks failed, see above";
    std::cout.flush();
    std::fflush(nullptr);
    if (write(ends[1], said.data(), said.size()) < 0) _exit(2);
    _exit(0);
  }
  std::vector<std::string> became;
  for (const Rank& rank : ranks) {
    std::string said(4096, '\0');
    const ssize_t n = read(rank.said, said.data(), said.size());
    said.resize(n > 0 ? static_cast<size_t>(n) : 0);
    close(rank.said);
    int status = 0;
    waitpid(rank.process, &status, 0);
    became.push_back(WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : said);
  }
  return became;
}

}  // namespace crossply::test
