// One training run: a model, its optimizer, its data and its run directory. run_training() is the loop around it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/loader.h"
#include "eval/batch_model.h"
#include "kernels/optim/optimizer.h"
#include "models/checkpoint.h"
#include "train/options.h"
#include "train/run_curves.h"

namespace crossply {

struct StepResult {
  double loss, norm, lr;
  int64_t scored;  // tokens the loss is the mean of
};

class Trainer {
 public:
  // The options are complete. checkpoint: a directory that save() wrote, from which the run continues bit for bit; ""
  // for a new run. Other flags than the checkpoint's are Exit::usage by name, other data is Exit::bad_data.
  Trainer(const TrainOptions& options, const Source& train, const std::string& checkpoint = "");

  // One optimizer step. Throws Exit::not_finite before the update when the loss or the gradient is not finite.
  StepResult step();
  // Mean loss over the first `samples` test sequences; Exit::not_finite if it is not finite.
  double evaluate(const Source& test, int64_t samples);

  // A complete model directory, with what continuing needs.
  void save(const std::string& dir, const Tokenizer& tokenizer);

  int64_t steps_done() const { return optimizer_.step; }
  int64_t tokens_per_step() const { return options_.batch * options_.accumulate * T_; }
  ParameterTable& params() { return params_; }
  const ParameterTable& params() const { return params_; }
  Device& device() { return *device_; }
  const BatchModel& model() const { return model_; }
  const Config& config() const { return options_.config; }
  size_t memory() const;  // bytes of all arenas
  // What the steps so far spent their time on, as a table; empty without --profile.
  std::string profile() const;
  // What more --steps than the continued checkpoint's do to the rates, as a line; empty where they are as they were.
  std::string schedule_change() const;
  double seconds = 0;  // spent in step() over the whole run, resumed parts included

 private:
  void restore(const std::string& checkpoint);
  // Runs a part of a step outside the tape; takes its time, and the bytes it moves, for the profile.
  template <class F>
  void phase(const char* name, double bytes, F&& body);

  TrainOptions options_;
  std::unique_ptr<Device> device_;
  ParameterTable params_;
  BatchModel model_;
  int64_t T_;
  Optimizer optimizer_;
  Loader loader_;
  Schedule schedule_;
  bool has_checkpoint_ = false;            // that this run wrote or continues
  int64_t steps_before_ = 0;               // --steps of the checkpoint that this continues
  std::string data_, digest_;              // tell whether a resumed run has the same data
  std::vector<int32_t> tokens_, targets_;  // all micro-steps of one step
  std::vector<OpCost> phases_;             // of a step, outside the tape; for the profile
  int64_t profiled_ = 0;                   // steps
};

struct TrainResult {
  Exit code = Exit::done;
  int64_t parameters = 0;
  double flops_per_token = 0;  // forward and backward
  double tokens_per_second = 0;
  size_t memory = 0;
  double planned_memory = 0;  // of the whole run, as a dry run says; set by plan_training
  double train_loss = 0;      // mean over the last fiftieth of the steps
  double test_loss = 0;
  double answers = -1, steps_valid = -1;  // -1: the data is no task
  std::string run_dir;
  RunCurves curves;
};

// Trains by the options and keeps the run directory: metrics.jsonl, curve.svg, flags.json, checkpoints. Prints progress
// under `label`; its time left counts runs_after more runs like this one. Returns Exit::stopped after SIGINT, SIGTERM,
// SIGHUP or SIGUSR1, with a checkpoint saved.
TrainResult run_training(TrainOptions options, const std::string& label, int64_t runs_after = 0);

// What run_training does first: adds the preset's options for the architecture and what only the data can say, and
// refuses what does not fit. A dry run whose sizes are known needs no data.
Dataset complete_options(TrainOptions& options);
// "data: 1,003,776 training tokens in 3,921 sequences of 256; 40 steps x 32 sequences = 0.3 epochs; test set 436
// sequences"
std::string describe_data(const TrainOptions& options, const Dataset& data);

// main of a single-file trainer.
int train_main(int argc, char** argv, const std::string& arch);

// config.json, model.safetensors and the tokenizer into a directory that is being written, and what --init's directory
// had beside them.
void write_model(const CheckpointWriter& writer, const TrainOptions& options, const ParameterTable& params,
                 const Tokenizer& tokenizer);

// What a training run of these complete options would be: parameters, FLOPs, memory. Both allocate nothing.
TrainResult plan_training(const TrainOptions& options);
// data: its lines, "" where it is not open.
void print_plan(const TrainOptions& options, const std::string& data);

}  // namespace crossply
