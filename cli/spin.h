// How long OpenMP's threads wait for each other awake.
#pragma once

#include <unistd.h>

#include <cstdlib>

namespace crossply {

// Between two parallel parts a thread spins in case the next one follows at once, and only then sleeps. By default
// libgomp's spin for milliseconds, LLVM's for 200: with another program on the cores, that is time taken from the very
// thread they wait for. So a bound is set here, unless the user set one. The runtimes read it before main(), hence
// the program starts itself once more. Call it first in main(), with main's arguments; returns if there is nothing to
// do or if that fails, which costs speed only. `bench neighbours` measures it.
inline void bound_spinning(char** argv) {
#ifdef __linux__
#ifdef __clang__
  const char *name = "KMP_BLOCKTIME", *bound = "0";  // milliseconds
#else
  const char *name = "GOMP_SPINCOUNT", *bound = "1000";  // tens of microseconds: as long as waking a thread takes
#endif
  if (getenv(name) != nullptr || getenv("OMP_WAIT_POLICY") != nullptr) return;
  if (setenv(name, bound, 1) == 0) execv("/proc/self/exe", argv);
#else
  static_cast<void>(argv);
#endif
}

}  // namespace crossply
