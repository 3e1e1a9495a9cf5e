// In a packed program, before anything else of it runs: what the rest is compiled for, the CPU must have. Compiled for
// any x86-64, and without any library's code, which could be the copy that all of the program then uses.
#include <unistd.h>

namespace {

[[gnu::constructor(101)]] void check_cpu() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return;
  constexpr char text[] = "error: this package needs a CPU with AVX2, FMA and BMI2; build crossply on this machine\n";
  const auto written = write(STDERR_FILENO, text, sizeof text - 1);
  _exit(written < 0 ? 74 : 71);
}

}  // namespace
