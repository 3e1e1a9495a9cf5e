// The status line, as a pure function of where a run stands and of the terminal's width.
#include "train/run/progress.h"

#include <cstdlib>

#include "tests/support/check.h"
#include "train/run/metrics.h"

using namespace crossply;

namespace {

Status status(const std::string& label, int64_t runs_after) {
  return {label, 5999, 6000, 10.3769, 1e-3, 12.345, 401234.5, 3725, runs_after};
}

}  // namespace

TEST_CASE("progress: a status line has everything where there is room, and never more than the width") {
  const Status s = status("2/13 lime     ", 11);
  CHECK(format_status(s, std::string::npos) ==
        "2/13 lime      step 5999/6000  loss 10.3769  lr 1.00e-03  norm 12.345  401,234 tok/s  1:02:05 left in all");
  for (size_t width = 0; width < 130; ++width) CHECK(format_status(s, width).size() <= width);
}

TEST_CASE("progress: a narrow status line leaves out what matters least") {
  const Status s = status("2/13 lime     ", 11);
  CHECK(format_status(s, 100) ==
        "2/13 lime step 5999/6000  loss 10.3769  lr 1.00e-03  norm 12.345  401,234 tok/s  1:02:05 left in all");
  CHECK(format_status(s, 90) ==
        "2/13 lime step 5999/6000  loss 10.3769  lr 1.00e-03  401,234 tok/s  1:02:05 left in all");
  CHECK(format_status(s, 79) == "2/13 lime step 5999/6000  loss 10.3769  401,234 tok/s  1:02:05 left in all");
  CHECK(format_status(s, 60) == "2/13 lime step 5999/6000  loss 10.3769  1:02:05 left in all");
  CHECK(format_status(s, 55) == "2/13 lime step 5999/6000  loss 10.3769  1:02:05 left");
  CHECK(format_status(s, 39) == "2/13 lime step 5999/6000  1:02:05 left");
  CHECK(format_status(s, 37) == "2/13 lime step 5999/6000");
  CHECK(format_status(s, 20) == "2/13  step 5999/6000");
  CHECK(format_status(s, 14) == "step 5999/6000");
  CHECK(format_status(s, 6) == "step 5");
}

TEST_CASE("progress: a command is apart from the text before it, and whole") {
  const std::string command = "build/train_lime --resume --out " + std::string(80, 'x');
  CHECK(format_line("stopped; to continue: ", false, command) == "stopped; to continue: " + command + "\n");
  CHECK(format_line("stopped; to continue: ", true, command) == "stopped; to continue:\n  " + command + "\n");
  CHECK(format_line("stopped", true, "") == "stopped\n");
}

TEST_CASE("progress: a run by itself names no other, and a rate that is unknown is no number") {
  Status s = status("lime", 0);
  CHECK(format_status(s, 79) == "lime step 5999/6000  loss 10.3769  lr 1.00e-03  401,234 tok/s  1:02:05 left");
  s.tokens_per_second = tokens_per_second(100, 0);
  CHECK(format_status(s, 90) == "lime step 5999/6000  loss 10.3769  lr 1.00e-03  norm 12.345  - tok/s  1:02:05 left");
}
