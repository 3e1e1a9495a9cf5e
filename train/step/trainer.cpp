#include "train/step/trainer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/stop.h"
#include "engine/io/json.h"
#include "eval/mean_loss.h"
#include "kernels/devices.h"
#include "models/disk/model_dir.h"
#include "ranks/agree.h"
#include "train/step/eight_bits.h"
#include "train/step/fault.h"
#include "train/step/replica_check.h"

namespace crossply {
namespace {

// The parameters without their memory, in buckets.
Buckets declare_and_divide(ParameterTable& params, const TrainPlan& plan, const World& world) {
  declare(params, plan);
  return divide(params, plan, world);
}

// The parameters with their memory and first values: done before the optimizer sees them. A checkpoint's values come
// later, with its moments.
ParameterTable& prepare(ParameterTable& params, const TrainPlan& plan, Device& device, const World& world,
                        bool resumed) {
  const bool in_bf16 = storage_type(plan) == Dtype::bf16;
  params.allocate(device, Dtype::f32, true, in_bf16 && !world.alone());
  if (in_bf16) params.allocate_bf16_copy();
  params.initialise(plan.seed);
  if (!plan.init.empty() && !resumed)
    load_initial_weights(ModelDir(plan.init).path(), *plan.initial_config, plan.config, params);
  refresh_bf16_copy(params);
  return params;
}

constexpr const char* remedy = ". Try a lower --lr, a longer --warmup or --clip";

}  // namespace

Trainer::Trainer(const TrainPlan& plan, const Source& train, const std::string& checkpoint,
                 std::shared_ptr<ProcessGroup> group)
    : plan_(plan),
      group_(std::move(group)),
      device_(make_device(plan.device, plan.matmul)),
      teacher_(load_teacher(plan, *device_)),
      buckets_(declare_and_divide(params_, plan, group_->world)),
      model_(*device_, prepare(params_, plan, *device_, group_->world, !checkpoint.empty()), plan.config,
             batch_of(plan, train.seq_len(), teacher_.get())),
      T_(train.seq_len()),
      optimizer_(params_, buckets_, plan.adamw, plan.muon),
      muon_routes_(params_, buckets_, group_->comm(), optimizer_),
      reduction_(make_reduction(*group_, params_, buckets_, model_, plan.sum, micro_steps())),
      sums_(params_, buckets_, model_, *group_, micro_steps(), model_.has_second(),
            std::ssize(model_.tape().quantized())),
      profile_(plan.profile, *device_, model_),
      loader_(train, plan.batch, plan.seed, true),
      micro_step_{true, 1 / static_cast<double>(tokens_per_step()), 0, true},
      schedule_(plan.rates()),
      inputs_(digest_inputs(plan, train, teacher_.get(), *group_, !checkpoint.empty())),
      tokens_(static_cast<size_t>(plan.batch * micro_steps() * T_)),
      targets_(tokens_.size()) {
  if (!model_.tape().quantized().empty()) attachments_.push_back(std::make_unique<EightBits>(*device_, model_, sums_));
  if (!group_->world.alone() && plan.check_replicas > 0)
    attachments_.push_back(std::make_unique<ReplicaCheck>(*group_, params_, plan.check_replicas));
  if (!checkpoint.empty()) restore(checkpoint);
  warm_up(checkpoint.empty());
}

void Trainer::warm_up(bool fresh) {
  const auto run = [this](const Step& step) {
    model_.run(tokens_.data(), targets_.data(), step);
    model_.take_losses();
  };
  Step first = micro_step_;
  first.new_weights = true;
  if (fresh) {
    const int64_t position = loader_.position();
    for (const auto& attachment : attachments_) {
      loader_.next(tokens_.data(), targets_.data());
      loader_.seek(position);
      attachment->before_run(first, run);
    }
  }
  if (!fresh && before_.device.empty()) return;  // the choices are the checkpoint's
  for (const auto& attachment : attachments_) attachment->before_step();
  std::fill(targets_.begin(), targets_.end(), 0);
  share_choices(*group_, *device_, [&] {  // nobody reads the results
    run(first), run(Step{});
    optimizer_.muon().try_products();
  });
}

void Trainer::next_batch() {
  start_ = Clock::now();
  ProcessGroup& group = *group_;
  group.enter(Stage::step, steps_done() + 1);
  spoil_ = inject_fault(group.world, steps_done() + 1);
  waited_before_ = group.comm().seconds_waited();
  const int64_t micro = plan_.batch * T_, own = plan_.batch * micro_steps(), position = loader_.position();
  loader_.seek(position + own * group.world.rank);
  for (int64_t m = 0; m < micro_steps(); ++m) loader_.next(&tokens_[m * micro], &targets_[m * micro]);
  loader_.seek(position + own * group.world.size);
  const int64_t scored = std::count_if(targets_.begin(), targets_.end(), [](int32_t target) { return target >= 0; });
  const int64_t transfers = reduction_->transfers() + steps_done() * muon_routes_.transfers();
  group.start_stats({steps_done(), position, transfers, scored, stop_requested(), busy_});
}

void Trainer::forward_backward() {
  const int64_t micro = plan_.batch * T_;
  sums_.clear();
  for (const auto& attachment : attachments_) attachment->before_step();
  for (int64_t m = 0; m < micro_steps(); ++m) {
    if (m > 0) group_->enter(Stage::step, steps_done() + 1);  // a long step, but not a rank that hangs
    Step step = reduction_->micro_step(micro_step_, m);
    step.new_weights = m == 0;
    model_.run(&tokens_[m * micro], &targets_[m * micro], step, sums_.losses(m));
    reduction_->after_micro_step(m);
  }
  reduction_->finish();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  if (spoil_) device_->copy_in(sums_.losses(0).data, &nan, sizeof nan);
}

void Trainer::compute_clip_factor() {
  const auto bytes = static_cast<double>(params_.gradients().bytes()) / buckets_.size();
  profile_.phase("gradient norm", bytes, [&] { sums_.add_squares(); });
  for (const auto& attachment : attachments_) attachment->after_backward();
  sums_.compute_clip_factor(optimizer_, plan_.adamw.clip);
}

void Trainer::apply_update() {
  const auto flat = static_cast<double>(params_.gradients().bytes());
  profile_.phase(plan_.optimizer.c_str(), (7 * flat + static_cast<double>(params_.bf16_copy_bytes())) / buckets_.size(),
                 [&] { muon_routes_.update(); });
  reduction_->gather_weights();
}

void Trainer::update() {
  busy_ = seconds_of_step() - seconds_waited();
  stats = group_->finish_stats();
  last.scored = stats.scored;
  const double rate = schedule_.at(steps_done());
  last.lr = plan_.lr * rate;
  optimizer_.begin_step({last.lr, plan_.muon.lr * rate, decay_at(plan_.decay_schedule, steps_done(), schedule_.total)},
                        scale());
  profile_.replay(clip_recording_, [&] { compute_clip_factor(); });
  sums_.begin_read();  // between the two: the host waits for the first only
  profile_.replay(update_recording_, [&] { apply_update(); });
}

void Trainer::take_loss_and_norm() {
  const StepSums::Totals totals = sums_.end_read();  // here alone does a step wait for the device
  Comm& comm = group_->comm();
  comm.wait(comm.mark());  // to be told of an error in a recorded transfer
  last.norm = scale() * std::sqrt(totals.squares);
  last.loss = scale() * micro_step_.grad_scale * totals.loss;
  const double second = scale() * micro_step_.grad_scale * totals.second;
  last.ce = model_.has_ce() ? second : last.loss;
  last.z_loss = plan_.z_loss > 0 ? plan_.z_loss * second : 0;
  std::string tensor;
  for (const auto& attachment : attachments_) tensor += attachment->after_read();
  if (!std::isfinite(last.loss + second + last.norm) || !tensor.empty()) fail_not_finite(tensor);
  profile_.add_waiting(waited = seconds_waited());
  for (const auto& attachment : attachments_) attachment->after_step(steps_done());
  profile_.end_step();
  if (scored_tokens >= 0) scored_tokens += last.scored;
  last.seconds = seconds_of_step();
  seconds += last.seconds;
}

void Trainer::fail_not_finite(const std::string& tensor) {
  const int64_t step = optimizer_.step--, position = loader_.position();  // that step has changed nothing
  fail(Exit::not_finite, "step ", step, ": loss ", last.loss, ", gradient norm ", last.norm, ", at positions ",
       position - sequences_per_step(), " to ", position - 1, " of the stream of training samples",
       sums_.first_not_finite(), tensor.empty() ? "" : "; " + tensor + " has numbers that are not finite",
       ". No update was made", has_checkpoint_ ? "; the last checkpoint is untouched" : "; there is no checkpoint yet",
       remedy);
}

StepResult Trainer::step() {
  next_batch();
  forward_backward();
  update();
  take_loss_and_norm();
  return last;
}

double Trainer::evaluate(const Source& test, int64_t samples) {
  const double loss = mean_loss(model_, test, samples, *group_).loss;
  if (!std::isfinite(loss))
    fail(Exit::not_finite, "the test loss after step ", steps_done(), " is ", loss,
         has_checkpoint_ ? ". The last checkpoint is from before that" : ". There is no checkpoint yet", remedy);
  return loss;
}

double Trainer::scale() const {
  return last.scored > 0 ? static_cast<double>(tokens_per_step()) / static_cast<double>(last.scored) : 0;
}

size_t Trainer::memory() const {
  return params_.values().bytes() + params_.gradients().bytes() + params_.bf16_copy_bytes() + optimizer_.bytes() +
         reduction_->bytes() + model_.bytes() + sums_.bytes_of_values() + memory_of(teacher_.get());
}

}  // namespace crossply
