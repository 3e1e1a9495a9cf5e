// What a run takes: what it will be, before any of it is allocated, and what it was.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "data/source.h"
#include "engine/device.h"
#include "train/run/accounting.h"
#include "train/run/run_curves.h"
#include "train/settings/train_plan.h"

namespace crossply {

struct TrainResult {
  Exit code = Exit::done;
  Accounting accounting;
  int64_t scored_tokens = -1;  // of the whole run, that a loss is of; -1: not known
  double epochs = NAN;         // of the training set, read so far
  double tokens_per_second = 0;
  double peak = 0;  // FLOP/s of all its devices by their data sheets; 0: not known
  size_t memory = 0;
  double planned_memory = 0;   // of the whole run, as a dry run says; set by plan_training
  double bytes_per_token = 0;  // of the tape, each tensor that an op names once; set by plan_training
  double train_loss = 0;       // mean over the last fiftieth of the steps
  double test_loss = 0;
  double answers = -1, steps_valid = -1;  // -1: the data is no task
  std::string run_dir;
  RunCurves curves;
};

// What a training run would be, for one of so many ranks: parameters, FLOPs, memory. On a CPU that is the peak of
// resident memory, to about a tenth, because the scratch of the kernels is estimated; on a GPU the GPU's, whether there
// is one or not, with an estimate of what CUDA takes for itself; without what the first step takes once to try out
// products that are added to what is there: a copy of the result.
TrainResult plan_training(const TrainPlan& plan, int ranks = 1);
// For a given --router-lr: throws Exit::usage where no router of these runs has a learning rate of its own. what:
// these runs, for the message.
void refuse_idle_router_lr(const std::vector<TrainPlan>& runs, const std::string& what);
// For --freeze-routers: throws Exit::usage where a run has nothing to freeze.
void refuse_idle_freeze(const TrainPlan& plan, const std::string& what);
// Throws Exit::device, with the sizes, where a GPU has less memory in all than the run takes without cuda_itself.
void refuse_too_large(const TrainPlan& plan, const Device& device, int ranks = 1);
// How long the steps of a run take, by three of them; NaN where it needs more memory than there is.
double seconds_of_run(const TrainPlan& plan, const Dataset& data);
// The same in a line: "time: 2:10 for the steps of all runs, ..; evaluations come on top". run: for NaN, what is too
// large.
void print_seconds(double seconds, const std::string& run, const std::string& which_steps);
// --dry-run: the same in words, by part. --dump-tape: the tape. data: none where the sizes alone were enough.
void print_plan(const TrainPlan& plan, const Dataset& data);

// The context, the kernels of this program and of cuBLASLt, and the recordings: never measured, so several hundred MiB.
constexpr double cuda_itself = 600 << 20;

double peak_memory();  // bytes that this process had resident at most

}  // namespace crossply
