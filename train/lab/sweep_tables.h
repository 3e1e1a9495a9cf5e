// The tables of a sweep's plan as comparisons, each in a directory of its own.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "train/lab/comparison.h"
#include "train/lab/comparison_dir.h"
#include "train/lab/equal_cost.h"
#include "train/lab/step_times.h"
#include "train/lab/sweep_plan.h"

namespace crossply {

struct SweepTable {
  PlannedTable planned;
  Comparison comparison;
  std::vector<std::string> notes = {};         // to be printed: what was chosen, and what is trained anew
  std::map<std::string, StepTime> times = {};  // of a step by arm; none: not measured
};

// What the command line says beside the plan.
struct SweepCall {
  std::string out;      // the directory of the sweep; a table's is in it
  std::string arch;     // architectures beside the plan's, which alone are trained; "": all of the plan's are
  std::string records;  // a finished sweep, or its records, a directory for each table; "": none
  MachinePart part = {};
  bool dry = false;     // nothing is written
  bool report = false;  // only what has ended counts: its records are enough, the data may be gone
};

// One table. Takes up what is done: in its directory, and in --records, where the data is the same. Throws, with the
// plan's line, Exit::usage for flags that are none of compare's, or not for a table, and Exit::no_input where the data
// is gone.
SweepTable open_table(const PlannedTable& planned, const SweepCall& call);
// Where a sweep has the records of a table: SWEEP/TABLE/records, or SWEEP/TABLE of a copy of records alone.
std::string records_in(const std::string& sweep, const PlannedTable& planned);
// The directory of a table, which `compare` cannot have while this is held.
Descriptor hold_table(const std::string& out, const PlannedTable& planned);

// The first architecture's losses by steps, ascending, of a table and its budgets, with one optimizer. A budget is left
// out if one of its seeds diverged.
std::vector<Budget> budgets_of(const std::vector<SweepTable>& tables, const SweepTable& table,
                               const std::string& optimizer);

}  // namespace crossply
