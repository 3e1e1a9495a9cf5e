#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <programs_inside.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "cli/spin.h"
#include "tests/support/listener.h"

namespace {

// A filter that matches no case is a mistake, and must not look like success.
bool nothing_ran = false;

struct NothingRan : crossply::test::Listener {
  explicit NothingRan(const doctest::ContextOptions&) {}
  void test_run_end(const doctest::TestRunStats& run) override { nothing_ran = run.numTestCasesPassingFilters == 0; }
};
REGISTER_LISTENER("nothing_ran", 1, NothingRan);

// The first case that failed.
std::string failed_case, failed_file;

struct Failed : crossply::test::Listener {
  const doctest::TestCaseData* running = nullptr;
  explicit Failed(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& started) override { running = &started; }
  void test_case_end(const doctest::CurrentTestCaseStats& ended) override {
    if (ended.failure_flags == 0 || !failed_case.empty()) return;
    failed_case = running->m_name, failed_file = running->m_file.c_str();
    std::replace(failed_case.begin(), failed_case.end(), ',', '?');  // commas separate filters, ? is any character
    failed_file = failed_file.substr(failed_file.rfind('/') + 1);
  }
};
REGISTER_LISTENER("failed", 1, Failed);

}  // namespace

int main(int argc, char** argv) {
  crossply::bound_spinning(argv);
  // A program with what only the tests have, the emulator or another MPI: tests run train_lime --help.
  if (argc > 2 && std::strcmp(argv[1], "run") == 0) return programs_inside().at(argv[2])(argc - 2, argv + 2);
  const int result = doctest::Context(argc, argv).run();
  if (!failed_case.empty())
    std::fprintf(stderr, "alone: %s --source-file='*/%s' --test-case=\"%s\"\n", argv[0], failed_file.c_str(),
                 failed_case.c_str());
  if (nothing_ran) std::fprintf(stderr, "no test case matches these filters\n");
  return nothing_ran ? 1 : result;
}
