#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <programs_inside.h>

#include <cstdio>
#include <cstring>

#include "cli/spin.h"

namespace {

// A filter that matches no case is a mistake, and must not look like success.
bool nothing_ran = false;

struct NothingRan : doctest::IReporter {
  explicit NothingRan(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& run) override { nothing_ran = run.numTestCasesPassingFilters == 0; }
  void test_case_start(const doctest::TestCaseData&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
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
