// Compiled for any x86-64, and without any library's code: the linker could use this copy for the whole program.
#include "engine/cpu_check.h"

#include <unistd.h>

namespace crossply {

#if defined(__x86_64__) && defined(__linux__)
namespace {

void require(bool present, const char* name, unsigned length) {
  if (present) return;
  constexpr char before[] = "error: this program is compiled for a CPU with ";
  constexpr char after[] =
      ", which this CPU lacks; build crossply on this machine, or anywhere with "
      "make CMAKE_FLAGS=-DCROSSPLY_NATIVE=OFF\n";
  const bool written = write(STDERR_FILENO, before, sizeof before - 1) > 0 && write(STDERR_FILENO, name, length) > 0 &&
                       write(STDERR_FILENO, after, sizeof after - 1) > 0;
  _exit(written ? 71 : 74);
}

}  // namespace

#define REQUIRE(macro, name) require(!*needed++ || __builtin_cpu_supports(name), name, sizeof name - 1);

void check_cpu() {
  __builtin_cpu_init();
  const bool* needed = built_for;
  CROSSPLY_INSTRUCTION_SETS(REQUIRE)
}
#else
void check_cpu() {}
#endif

}  // namespace crossply
