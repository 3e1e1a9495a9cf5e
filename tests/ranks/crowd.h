// Ranks as forked processes: with a job of their own each, and an end that the test looks at.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "engine/platform.h"
#include "ranks/process_group.h"
#include "tests/support/temp_dir.h"

namespace crossply::test {

inline double seconds_since_boot() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Until it holds; false after so many seconds.
inline bool wait_until(const std::function<bool()>& holds, double seconds) {
  for (const double end = seconds_since_boot() + seconds; seconds_since_boot() < end;) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return holds();
}

class Crowd {
 public:
  // body's result, or the code of an Error that it throws, is the exit code.
  void start(int name, const std::function<int()>& body) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child > 0) {
      pids_[name] = child;
      return;
    }
    die_with_parent();
    ::alarm(60);
    const int err = ::open(error_file(name).c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    ::dup2(err, STDERR_FILENO);
    for (const char* variable : {"MASTER_ADDR", "MASTER_PORT", "CROSSPLY_FAULT"})
      if (!keep_environment) ::unsetenv(variable);
    int code = 0;
    try {
      code = body();
    } catch (const Error& error) {
      ::dprintf(STDERR_FILENO, "%s\n", error.what());
      code = static_cast<int>(error.code);
    }
    ::_exit(code);
  }
  // Its exit code, 256 + a signal that killed it, or -1 if it still runs after so many seconds.
  int code_of(int name, double seconds = 20) {
    if (codes_.contains(name)) return codes_[name];
    int status = 0;
    if (!wait_until([&] { return ::waitpid(pids_.at(name), &status, WNOHANG) == pids_.at(name); }, seconds)) return -1;
    return codes_[name] = WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
  }
  void check(int name, Exit code, const std::string& says = "", double seconds = 20) {
    const int got = code_of(name, seconds);
    INFO("rank ", name, " said: ", errors_of(name));
    CHECK(got == static_cast<int>(code));
    CHECK(has(errors_of(name), says));
  }
  // The ranks 0 to size - 1, but for one.
  void check_all(int size, Exit code, const std::string& says = "", int but = -1) {
    for (int rank = 0; rank < size; ++rank)
      if (rank != but) check(rank, code, says);
  }
  void signal(int name, int number) const { ::kill(pids_.at(name), number); }
  std::string errors_of(int name) const { return path_exists(error_file(name)) ? read_text(error_file(name)) : ""; }
  std::string dir() const { return scratch_.path.string(); }
  ~Crowd() {
    for (const auto& [name, pid] : pids_)
      if (!codes_.contains(name)) ::kill(pid, SIGKILL), ::waitpid(pid, nullptr, 0);
  }
  bool keep_environment = false;

 private:
  static bool path_exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }
  std::string error_file(int name) const { return scratch_.file("errors." + std::to_string(name)); }
  TempDir scratch_{memory_or_disk()};
  std::map<int, pid_t> pids_;
  std::map<int, int> codes_;
};

}  // namespace crossply::test
