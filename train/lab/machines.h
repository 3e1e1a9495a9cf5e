// Cells of one sweep that were trained on several kinds of CPU, or by several commits of this program: whether their
// losses may stand in one table. Two are compared by the training losses of the first 20 steps of a run of the
// backbone, which have to agree to rounding, and by the test losses of the seeds that both have, whose means must not
// be told apart (Welch's test, at 5 % for all tests of a call together). Where CPU and commit are the same, nothing is
// tested.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "train/lab/sweep_tables.h"

namespace crossply {

// Adds the records of other sweeps of the same plan to the tables, which are of the first one. Returns a line for each
// comparison. Throws Exit::usage where it fails, where nothing can be compared, or for another plan; Exit::bad_data for
// other data.
std::string merge_sweeps(std::vector<SweepTable>& tables, const std::string& first,
                         const std::vector<std::string>& others);

// Before a sweep goes on beside cells of another CPU or commit: trains the first steps of one run of the backbone of
// each again, and compares their losses. There are no seeds to compare. Returns a line for each. Throws Exit::usage
// where they do not agree to rounding.
std::vector<std::string> check_origins(const SweepTable& table);

// How many cells each CPU and commit has trained.
std::map<std::string, int64_t> origins_of(const std::vector<SweepTable>& tables);

// The plan of a sweep, which `sweep run` keeps in its directory.
inline std::string plan_in(const std::string& out) { return out + "/sweep.plan"; }

}  // namespace crossply
