// A model in training: parameters, optimizer, and its position in the data. One step is next_batch, forward_backward,
// update, take_loss_and_norm; the loop around it stands in every trainer (train/train_lime.cpp).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/loader.h"
#include "kernels/optim/optimizer.h"
#include "train/step/attachment.h"
#include "train/step/declare.h"
#include "train/step/inputs_digest.h"
#include "train/step/muon_routes.h"
#include "train/step/reduction.h"
#include "train/step/step_profile.h"
#include "train/step/step_sums.h"

namespace crossply {

struct StepResult {
  double loss, norm, lr;
  double seconds;  // from the batch to the loss; on a GPU what the update takes then counts to what comes after
  int64_t scored;  // tokens the loss is the mean of
  double ce;       // the cross entropy in it; without a teacher and an exit gate that is all of it
  double z_loss;   // --z-loss times the mean square of log sum exp, which the loss has not in it
};

class Trainer {
 public:
  // checkpoint: a directory that save() wrote, from which the run continues bit for bit; "" for a new run. Other flags
  // than the checkpoint's are Exit::usage by name, other data is Exit::bad_data.
  Trainer(const TrainPlan& plan, const Source& train, const std::string& checkpoint = "",
          std::shared_ptr<ProcessGroup> group = one_rank_group());

  // Tokens and targets (B, T) of every micro-step of this rank.
  void next_batch();
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<int32_t>& targets() const { return targets_; }
  // Forward and backward of every micro-step: losses and gradients add up, also those of other ranks, while the
  // backward goes on.
  void forward_backward();
  // The optimizer's update, clipped by the norm, at the schedule's learning rate; nothing where loss or norm is not
  // finite, which the device finds out by itself. The weights of other ranks come from them.
  void update();
  // The mean loss and the gradients' norm: all that the host waits for, and not for the update. Throws
  // Exit::not_finite where one of them is not finite: at all ranks.
  void take_loss_and_norm();
  // The four in one.
  StepResult step();
  StepResult last{};  // of the last step
  StepStats stats{};  // of the last step: what all ranks said

  // Mean loss over the first `samples` sequences of `test`. Throws Exit::not_finite if it is not finite.
  double evaluate(const Source& test, int64_t samples);

  // The f32 values of all parameters, until the next step: for what reads Parameter::value of a job of several ranks.
  void gather_values() { reduction_->gather_values(optimizer_); }
  // A complete model directory, with what continuing needs, written by all ranks. Before it gets its name rank 0 calls
  // may_publish, which may throw.
  void save(
      const std::string& dir, const Tokenizer& tokenizer, const std::function<void()>& may_publish = [] {});

  int64_t steps_done() const { return optimizer_.step; }
  int64_t tokens_per_step() const { return sequences_per_step() * T_; }  // of all ranks
  // Forward and backward.
  double flops_per_token() const { return model_.training_flops() / static_cast<double>(plan_.batch * T_); }
  ParameterTable& params() { return params_; }
  const ParameterTable& params() const { return params_; }
  Device& device() { return *device_; }
  const Device& device() const { return *device_; }
  const BatchModel& model() const { return model_; }
  ProcessGroup& group() const { return *group_; }
  const Config& config() const { return plan_.config; }
  Teacher* teacher() const { return teacher_.get(); }  // null: none
  size_t memory() const;                               // bytes of all arenas that grow with the model or the batch
  // What the steps so far spent their time on, as a table; empty without --profile.
  std::string profile() const { return profile_.table(); }
  // What differs from the run that the checkpoint is of, a line each: learning rates that more --steps change, another
  // machine with --other-gpu, another number of ranks.
  std::vector<std::string> changes() const;
  double epochs() const { return loader_.epochs(); }  // of the training set, so far
  // Tokens so far that a loss is of, over the whole run; -1: the checkpoint of an older version does not say.
  int64_t scored_tokens = 0;
  double seconds = 0;  // spent in steps over the whole run, resumed parts included
  double waited = 0;   // of the last step's, for other ranks; between CPUs

 private:
  using Clock = std::chrono::steady_clock;
  void restore(const std::string& checkpoint);
  // Runs a batch before the first step: first scales of eight bits, then the device's choice of kernels, which all
  // ranks share. fresh: the run does not continue a checkpoint.
  void warm_up(bool fresh);
  int64_t sequences_per_step() const { return plan_.batch * plan_.accumulate; }  // of all ranks
  int64_t micro_steps() const { return plan_.accumulate / group_->world.size; }  // of this rank
  // Tokens of the step / scored tokens: the micro-steps leave means over all tokens, wanted are means over the scored.
  double scale() const;
  double seconds_of_step() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double seconds_waited() const { return group_->comm().seconds_waited() - waited_before_; }
  // The two recorded parts of a step after the micro-steps: the clip factor, from the sums of all ranks;
  void compute_clip_factor();
  // the update of this rank's slices, and the gather of all weights.
  void apply_update();
  [[noreturn]] void fail_not_finite(const std::string& tensor);

  const TrainPlan plan_;
  const std::shared_ptr<ProcessGroup> group_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Teacher> teacher_;
  ParameterTable params_;
  Buckets buckets_;
  BatchModel model_;
  int64_t T_;
  Optimizer optimizer_;
  MuonRoutes muon_routes_;
  std::unique_ptr<Reduction> reduction_;
  StepSums sums_;
  StepProfile profile_;
  std::vector<std::unique_ptr<Attachment>> attachments_;
  Recording clip_recording_, update_recording_;
  Loader loader_;
  const Step micro_step_;  // the first one, the same in every step, so that a device may record it: of all tokens' mean
  Schedule schedule_;
  InputsDigest inputs_;
  struct {
    int64_t steps = 0, ranks = 0;          // 0: there was none
    std::string device;                    // how this machine differs
  } before_;                               // of the checkpoint that this run continues
  bool has_checkpoint_ = false;            // that this run wrote or continues
  std::vector<int32_t> tokens_, targets_;  // this rank's micro-steps of one step
  Clock::time_point start_;                // of the step
  double busy_ = 0;  // seconds of the last step until its gradients were there, without waiting for other ranks
  double waited_before_ = 0;  // for other ranks until this step
  bool spoil_ = false;        // this step's loss, for a test
};

}  // namespace crossply
