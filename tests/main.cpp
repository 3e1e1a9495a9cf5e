#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <programs_inside.h>

#include <cstdio>
#include <cstring>

#include "cli/spin.h"
#include "tests/listener.h"

namespace {

// A filter that matches no case is a mistake, and must not look like success.
bool nothing_ran = false;

struct NothingRan : crossply::test::Listener {
  explicit NothingRan(const doctest::ContextOptions&) {}
  void test_run_end(const doctest::TestRunStats& run) override { nothing_ran = run.numTestCasesPassingFilters == 0; }
};
REGISTER_LISTENER("nothing_ran", 1, NothingRan);

}  // namespace

int main(int argc, char** argv) {
  crossply::bound_spinning(argv);
  // A program with what only the tests have, the emulator or another MPI: tests run train_lime --help.
  if (argc > 2 && std::strcmp(argv[1], "run") == 0) return programs_inside().at(argv[2])(argc - 2, argv + 2);
  const int result = doctest::Context(argc, argv).run();
  if (nothing_ran) std::fprintf(stderr, "no test case matches these filters\n");
  return nothing_ran ? 1 : result;
}
