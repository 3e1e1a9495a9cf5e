// The optimizer's moments in a checkpoint, of which every rank has its own slices (engine/buckets.h).
//
// One rank writes optimizer.safetensors with m.NAME and v.NAME for every row of the table; Muon's matrices have no
// v.NAME, and NorMuon's have one of a number for each of their rows. Of W ranks, rank r = 0, 1,
// ... writes optimizer-0000r-of-0000W.safetensors with 1-D tensors m.NAME[BEGIN:END] and v.NAME[BEGIN:END], elements of
// the row in its order, and v.NAME[0:ROWS] of NorMuon's matrices that it owns. Rank 0 writes optimizer.index.json,
// which says where they are:
//   {"parameters": {NAME: [[FILE, BEGIN, END], ...], ...}, "row_moments": {NAME: [[FILE, 0, ROWS]], ...}}
// Nothing tells how the slices were cut, so any number of ranks reads what any other wrote.
#pragma once

#include <string>

#include "engine/buckets.h"
#include "kernels/optim/optimizer.h"
#include "models/disk/checkpoint.h"

namespace crossply {

// Writes this rank's. Returns the name of its file.
std::string save_moments(const CheckpointWriter& writer, const ParameterTable& params, const Buckets& buckets,
                         const Optimizer& optimizer);

// Reads this rank's, and nothing else than these. Throws Exit::bad_data where the files do not hold every element of
// every row once, with the tensor, the range and the file.
void load_moments(const std::string& dir, const ParameterTable& params, const Buckets& buckets, Optimizer& optimizer);

}  // namespace crossply
