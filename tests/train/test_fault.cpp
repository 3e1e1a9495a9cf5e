#include "train/step/fault.h"

#include "tests/ranks/crowd.h"

namespace crossply {
namespace {

using namespace test;

// What a rank does with this fault in three steps: the steps in which its loss must be NaN, as a number of base 2.
int nan_steps(const World& world) {
  int steps = 0;
  for (int64_t step = 0; step < 3; ++step) steps |= inject_fault(world, step) << step;
  return steps;
}

TEST_CASE("fault: the rank and the step that are named, and no other") {
  Crowd crowd;
  crowd.keep_environment = true;
  int name = 0;
  const auto code_of = [&](const char* fault, int rank) {
    ::setenv("CROSSPLY_FAULT", fault, 1);
    crowd.start(++name, [&] { return nan_steps({rank, 3, rank, 3}); });
    ::unsetenv("CROSSPLY_FAULT");
    return crowd.code_of(name);
  };
  CHECK(code_of("", 1) == 0);
  CHECK(code_of("1:2:kill", 0) == 0);
  CHECK(code_of("1:3:kill", 1) == 0);
  CHECK(code_of("1:2:kill", 1) == 256 + SIGKILL);
  CHECK(code_of("1:1:nan", 1) == 2);
  CHECK(code_of("1:2:exit=74", 1) == 74);
  CHECK(has(crowd.errors_of(name), "CROSSPLY_FAULT: 1:2:exit=74"));
  CHECK(code_of("0:0:slow=0.001", 0) == 0);
  for (const char* wrong : {"1", "1:2", "1:2:", "1:2:explode", "a:2:kill", "1::kill", "1:2:kill=3", "1:2:exit",
                            "1:2:exit=x", "1:2:slow=-1", ":", "=", "1=2:3:kill", "1:2:exit=300"}) {
    CAPTURE(wrong);
    CHECK(code_of(wrong, 1) == 64);
  }
}

TEST_CASE("fault: a rank that stops or hangs is there, and does nothing") {
  for (const char* fault : {"0:1:stop", "0:1:hang"}) {
    Crowd crowd;
    crowd.keep_environment = true;
    ::setenv("CROSSPLY_FAULT", fault, 1);
    crowd.start(0, [] { return nan_steps({0, 1, 0, 1}); });
    ::unsetenv("CROSSPLY_FAULT");
    CHECK(crowd.code_of(0, 0.1) == -1);
  }
}

}  // namespace
}  // namespace crossply
