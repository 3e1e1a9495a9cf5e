// A model in training: parameters, optimizer, and its place in the data. One step is next_batch, forward_backward,
// update, take_loss_and_norm; the loop around it stands in every trainer (train/train_lime.cpp).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/loader.h"
#include "kernels/optim/gradient_norm.h"
#include "kernels/optim/optimizer.h"
#include "models/batch/batch_model.h"
#include "models/disk/checkpoint.h"
#include "models/disk/model_dir.h"
#include "train/settings/options.h"
#include "train/step/delayed_scales.h"
#include "train/step/exchange.h"

namespace crossply {

struct StepResult {
  double loss, norm, lr;
  double seconds;  // from the batch to the loss; on a GPU what the update takes then counts to what comes after
  int64_t scored;  // tokens the loss is the mean of
  double ce;       // the cross entropy in it; of a model without a teacher that is all of it
};

class Trainer {
 public:
  // The options are complete. checkpoint: a directory that save() wrote, from which the run continues bit for bit; ""
  // for a new run. Other flags than the checkpoint's are Exit::usage by name, other data is Exit::bad_data.
  Trainer(const TrainOptions& options, const Source& train, const std::string& checkpoint = "");

  // Tokens and targets (B, T) of every micro-step of this rank.
  void next_batch();
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<int32_t>& targets() const { return targets_; }
  // Replays the tape for every micro-step: losses and gradients add up, also those of other ranks, while the backward
  // goes on.
  void forward_backward();
  // AdamW, clipped by the norm, at the schedule's rate; nothing where loss or norm is not finite, which the device
  // finds out by itself. The weights of other ranks come from them.
  void update();
  // The mean loss and the gradients' norm: all that the host waits for, and not for the update. Throws
  // Exit::not_finite where one of them is not finite: at all ranks.
  void take_loss_and_norm();
  // The four in one.
  StepResult step();
  StepResult last{};  // of the last step
  Tally tally{};      // of the last step: what all ranks said

  // Mean loss over the first `samples` test sequences; Exit::not_finite if it is not finite.
  double evaluate(const Source& test, int64_t samples);

  // The f32 values of all parameters, until the next step: for what reads Parameter::value of a job of several ranks.
  void gather_values() { exchange_.gather_values(optimizer_); }
  // A complete model directory, with what continuing needs, written by all ranks. Before it gets its name rank 0 calls
  // may_publish, which may throw.
  void save(
      const std::string& dir, const Tokenizer& tokenizer, const std::function<void()>& may_publish = [] {});

  int64_t steps_done() const { return optimizer_.step; }
  int64_t tokens_per_step() const { return options_.batch * options_.accumulate * T_; }  // of all ranks
  // Forward and backward.
  double flops_per_token() const { return model_.training_flops() / static_cast<double>(options_.batch * T_); }
  ParameterTable& params() { return params_; }
  const ParameterTable& params() const { return params_; }
  Device& device() { return *device_; }
  const Device& device() const { return *device_; }
  const BatchModel& model() const { return model_; }
  const Config& config() const { return options_.config; }
  Teacher* teacher() const { return teacher_.get(); }  // null: none
  size_t memory() const;                               // bytes of all arenas that grow with the model or the batch
  // What the steps so far spent their time on, as a table; empty without --profile.
  std::string profile() const;
  // What more --steps than the continued checkpoint's do to the rates, as a line; empty where they are as they were.
  std::string schedule_change() const;
  // With --other-gpu, how the machine differs from the continued checkpoint's, as a line; empty where it does not.
  const std::string& device_change() const { return device_change_; }
  // Of a continued checkpoint that another number of ranks saved, a line; else empty.
  std::string ranks_change() const;
  double seconds = 0;  // spent in steps over the whole run, resumed parts included
  double waited = 0;   // of the last step's, for other ranks; between CPUs

 private:
  using Clock = std::chrono::steady_clock;
  void restore(const std::string& checkpoint);
  double scale() const;  // of the sums that the replays leave: from the mean over all tokens to that over the scored
  double flat_bytes() const { return static_cast<double>(params_.gradients().bytes()); }
  int64_t micro_steps() const { return options_.accumulate / options_.job->place.size; }  // of this rank
  // A rank's sums of a step: the losses of its micro-steps, lane by lane, each with a teacher followed by the cross
  // entropies; then the squares of its own slices, leaf by leaf.
  int64_t sums_of_run() const { return (teacher_ != nullptr ? 2 : 1) * model_.layout().lanes; }
  int64_t losses_size() const { return micro_steps() * sums_of_run(); }
  int64_t sums_size() const { return losses_size() + leaves_of(buckets_.own_size()); }
  Tensor all_sums() const;
  Tensor own_sums(const Range& range) const;
  // Where in the sums of all ranks the squares and the losses are, each in one order whoever they came from. ce: of the
  // cross entropies with a teacher.
  std::vector<int32_t> order_of_squares() const;
  std::vector<int32_t> order_of_losses(bool ce) const;
  Arena on_device(const std::vector<int32_t>& order) const;
  // What a device records of a step after the micro-steps. From all sums and largest numbers the verdict, and the
  // factor of the update:
  void decide();
  // The update, and its weights to all ranks.
  void change_weights();
  Tensor verdict(const Range& range) const { return part_of({verdict_.data(), Dtype::f64, Shape{verdicts}}, range); }
  [[noreturn]] void fail_not_finite(const std::string& overflown);
  std::string first_spoilt();  // ": rank 1's micro-step 2", where a loss is not finite and there are several ranks
  void measure_scales();
  void set_scales();
  // The largest numbers since the last time, of all ranks, behind the verdict.
  void gather_amaxes();
  Tensor all_amaxes() const;  // without data but for products of eight bits
  // On GPUs the algorithms that rank 0 chooses by timing are everybody's.
  void share_choices();
  // Throws Exit::internal, at all ranks, where their weights are not the same.
  void check_replicas();
  // Runs a part of a step outside the tape; takes its time, and the bytes it moves, for the profile.
  template <class F>
  void phase(const char* name, double bytes, F&& body);

  TrainOptions options_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Teacher> teacher_;
  ParameterTable params_;
  Buckets buckets_;
  BatchModel model_;
  int64_t T_;
  Optimizer optimizer_;
  Exchange exchange_;
  Arena sums_;                            // f64, of every rank
  static constexpr int64_t verdicts = 3;  // sums of squares, losses, cross entropies
  Arena squares_, losses_, ces_;          // i32, in which order sums are added: of squares, losses, cross entropies
  DelayedScales scales_;                  // of products of eight bits; else empty
  Arena verdict_;                         // f64; behind it the largest numbers, f32, of every rank
  std::vector<std::byte> host_verdict_;
  Recording deciding_, changing_;
  Loader loader_;
  const Step replay_;  // the same in every step, so that a device may record it: of the mean over all tokens
  Schedule schedule_;
  bool has_checkpoint_ = false;            // that this run wrote or continues
  int64_t steps_before_ = 0;               // --steps of the checkpoint that this continues
  int64_t ranks_before_ = 0;               // that saved it; 0: there is none
  std::string device_change_;              // what device_change() says
  std::string data_, digest_;              // tell whether a resumed run has the same data
  std::string teacher_digest_;             // and the same teacher; "" without one
  std::vector<int32_t> tokens_, targets_;  // this rank's micro-steps of one step
  Clock::time_point start_;                // of the step
  double busy_ = 0;  // seconds of the last step until its gradients were there, without waiting for other ranks
  double waited_before_ = 0;    // for other ranks until this step
  bool spoil_ = false;          // this step's loss, for a test
  std::vector<OpCost> phases_;  // of a step, outside the tape; for the profile
  int64_t profiled_ = 0;        // steps
};

// The parameter table with the run's own rates, without memory.
void declare(ParameterTable& params, const TrainOptions& options);
// The teacher's table, without memory; null for none.
std::unique_ptr<Teacher> declare_teacher(const TrainOptions& options);
// The same with its weights, on the run's device.
std::unique_ptr<Teacher> load_teacher(const TrainOptions& options, Device& device);
// Tells whether two tables of the same rows hold the same numbers: of the values, and of their narrow copies where the
// table has these.
std::string digest_of(const ParameterTable& params);
// Of --teacher's weights, as a checkpoint records it.
std::string digest_of_teacher(const TrainOptions& options);
// A micro-step's batch.
Batch batch_of(const TrainOptions& options, int64_t T, Teacher* teacher = nullptr);
// config.json, the weights and the tokenizer into a directory that is being written, and what --init's directory had
// beside them; called by all ranks. Returns the names of the files with weights that this one wrote.
std::vector<std::string> write_model(const CheckpointWriter& writer, const TrainOptions& options,
                                     const ParameterTable& params, const Tokenizer& tokenizer);

}  // namespace crossply
