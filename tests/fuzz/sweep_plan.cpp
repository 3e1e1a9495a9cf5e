// Any text as the plan of a sweep.
#include "train/lab/sweep_plan.h"

#include <set>

#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  accept_or_refuse([&] {
    std::set<std::string> names;
    const SweepPlan plan = parse_sweep_plan(std::string(text_of(data, size)), "plan");
    require(!plan.tables.empty(), "no table");
    for (const PlannedTable& table : plan.tables) {
      const bool safe = !table.name.empty() && table.name.find('/') == std::string::npos && table.name[0] != '.';
      require(safe && names.insert(table.name).second, "not a name for a directory");
      for (const std::string& flag : table.flags) require(flag.find('\n') == std::string::npos, "a flag of two lines");
    }
  });
  return 0;
}
