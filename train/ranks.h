// How a training program becomes one rank of a job (ranks/job.h).
#pragma once

#include "data/source.h"
#include "train/options.h"

namespace crossply {

// What the launcher says this process is: options.job is then a rank that is still by itself. Of several it takes its
// share of the CPUs, and, but for rank 0, standard output goes nowhere unless --log-ranks. Throws Exit::usage for
// micro-steps that the ranks cannot share, and where this was built without what moves their tensors.
void become_rank(TrainOptions& options);
// Meets the others; options.job has them from now on. Call it with the run directory held. One rank: does nothing.
void join_ranks(TrainOptions& options);
// Throws Exit::bad_data at all ranks if what they read is not the same, by its Source::digest.
void compare_data(const TrainOptions& options, const std::string& digest);
// "2 ranks, MPI (Open MPI 4.1.4), 4 of 8 micro-steps each; sum tree: the bits of one rank": for the log.
std::string describe_ranks(const TrainOptions& options);
// The end of a rank of several by an error: tells the others, prints it, and ends the process.
[[noreturn]] void end_rank(const TrainOptions& options, const Error& error);

}  // namespace crossply
