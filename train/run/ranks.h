// How a training program becomes one rank of a job (ranks/process_group.h).
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "data/source.h"
#include "kernels/devices.h"
#include "ranks/process_group.h"
#include "train/settings/train_plan.h"

namespace crossply {

inline bool on_gpus(const Settings& settings) { return backend_of(settings.device) == Backend::cuda; }
// Throws Exit::usage, with what is possible, where so many ranks cannot share the micro-steps of a step.
void check_ranks(const Settings& settings, int64_t ranks);
// What the launcher says this process is: job is then a rank that is still by itself. Of several it takes its share of
// the CPUs, and, but for rank 0, standard output goes nowhere unless --log-ranks. Throws Exit::usage for micro-steps
// that the ranks cannot share, and where this was built without what moves their tensors; job is that rank by then.
void become_rank(const Settings& settings, std::shared_ptr<ProcessGroup>& group);
// Meets the others, who are in job from now on. Call it with the run directory held. One rank: does nothing.
void join_ranks(const TrainPlan& plan, std::shared_ptr<ProcessGroup>& group);
// "2 ranks, Open MPI 4.1.4, 4 of 8 micro-steps each, --sum tree: the bits of one rank with --sum tree": for the log.
std::string describe_ranks(const TrainPlan& plan, const ProcessGroup& group);
// The end of a rank of several by what was thrown: tells the others, prints it, and ends the process. remedy: as that
// of error_of().
[[noreturn]] void end_rank(const Settings& settings, ProcessGroup& group, const std::exception& failure,
                           const std::string& remedy);

}  // namespace crossply
