// Faults for tests of many ranks. CROSSPLY_FAULT=RANK:STEP:WHAT lets one rank fail at the start of one step:
//   kill     SIGKILL             stop     SIGSTOP              hang    it does nothing any more
//   nan      a loss of NaN       exit=N   an error of code N   slow=S  S seconds more in this and every later step
#pragma once

#include <cstdint>

#include "ranks/comm.h"

namespace crossply {

// Called at the start of each step. Whether this step's loss must become NaN. Throws Exit::usage for another text.
[[nodiscard]] bool inject_fault(const World& world, int64_t step);

}  // namespace crossply
