// Parts of one sweep that were trained on several machines, or by several commits of this program: whether their losses
// may stand in one table.
#pragma once

#include <string>
#include <vector>

#include "train/lab/sweep_tables.h"

namespace crossply {

// Adds the records of other sweeps of the same plan to the tables, which are of the first one. Returns a line for each
// that says how far its backbone's losses are from the first one's: of 20 steps of the same run, which have to agree to
// rounding, and of the reported seeds that both have, whose means must not be told apart (Welch's test, 5 % for all of
// them together). Throws Exit::usage where these do not hold, where nothing can be compared, or for another plan;
// Exit::bad_data for other data.
std::string merge_sweeps(std::vector<SweepTable>& tables, const std::string& first,
                         const std::vector<std::string>& others);

// The plan of a sweep, which `sweep run` keeps in its directory.
inline std::string plan_in(const std::string& out) { return out + "/sweep.plan"; }

}  // namespace crossply
