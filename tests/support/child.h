// What a test does in a process of its own: with other rights and limits, or until a signal ends it.
#pragma once

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>

#include "engine/check.h"

namespace crossply::test {

// The exit status of `action` run in a child process: what it returns, the code of an Error, 100 of anything else that
// it throws, which is printed; -1 where a signal ended it.
inline int in_child(const std::function<int()>& action) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    int status = 100;
    try {
      status = action();
    } catch (const Error& error) {
      status = static_cast<int>(error.code);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    } catch (...) {  // a REQUIRE that fails: not into the tests that follow
    }
    ::_exit(status);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace crossply::test
