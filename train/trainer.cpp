#include "train/trainer.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "engine/rng.h"
#include "kernels/devices.h"
#include "kernels/optim/optimizer.h"
#include "models/checkpoint.h"
#include "models/json_file.h"
#include "models/model_dir.h"
#include "models/registry.h"
#include "train/memory.h"
#include "train/profile.h"

namespace crossply {
namespace {

using nlohmann::json;

// The parameter table with the run's own rates.
void declare(ParameterTable& params, const TrainOptions& options) {
  declare_model(params, options.config);
  const Config& c = options.config;
  if (!options.init.empty() && options.initial.config.arch != c.arch)
    find_architecture(c.arch).make(c)->start_as_llama(params, c);
  for (Parameter& row : params.rows()) {
    if (row.lr_mul != 1 && options.router_lr > 0) row.lr_mul = options.router_lr / options.lr;
    if (options.decay_all) row.wd_mul = 1;
  }
}

// The parameters with their memory and first values: done before the optimizer sees them. A checkpoint's values come
// later, with its moments.
ParameterTable& prepare(ParameterTable& params, const TrainOptions& options, Device& device, bool resumed) {
  declare(params, options);
  params.allocate(device, Dtype::f32, true);
  if (storage_type(options) == Dtype::bf16) params.allocate_narrow();
  params.initialise(options.seed);
  if (!options.init.empty() && !resumed)
    load_initial_weights(ModelDir(options.init).path(), options.initial.config, options.config, params);
  refresh_narrow(params);
  return params;
}

Batch batch_of(const TrainOptions& options, int64_t T) {
  return {options.batch, T, storage_type(options), true, plan_mode(options.plan)};
}

// Bytes of the parameters' arenas: values, gradients, two moments, and the copy that bf16 products read.
size_t parameter_bytes(const ParameterTable& params, const TrainOptions& options) {
  const size_t each = 4 * size_of(Dtype::f32) + (storage_type(options) == Dtype::bf16 ? size_of(Dtype::bf16) : 0);
  return static_cast<size_t>(params.flat_size()) * each;
}

// All that older checkpoints know of their data: its size and the contents of some samples.
std::string fingerprint(const Source& source) {
  const size_t T = static_cast<size_t>(source.seq_len());
  std::vector<int32_t> tokens(2 * T);
  uint64_t hash = static_cast<uint64_t>(source.size());
  for (int64_t i = 0; i < 16; ++i) {
    source.read(i * (source.size() - 1) / 15, tokens.data(), tokens.data() + T);
    for (const int32_t token : tokens) hash = mix_bits(hash * 31 + static_cast<uint32_t>(token));
  }
  return str(std::hex, hash);
}

// A count in train_state.json.
int64_t state_number(const json& state, const char* key, const std::string& path) {
  const json number = state.value(key, json());
  if (!number.is_number_unsigned() || number.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()})
    fail(Exit::bad_data, path, ": \"", key, "\" is ", number.dump(), ", not a count");
  return number.get<int64_t>();
}

}  // namespace

Trainer::Trainer(const TrainOptions& options, const Source& train, const std::string& checkpoint)
    : options_(options),
      device_(make_device(options.device, options.matmul)),
      model_(*device_, prepare(params_, options, *device_, !checkpoint.empty()), options.config,
             batch_of(options, train.seq_len())),
      T_(train.seq_len()),
      optimizer_(params_, options.adamw),
      loader_(train, options.batch, options.seed, true),
      schedule_{schedule_kind(options.schedule), options.warmup, std::max<int64_t>(options.steps, 1), options.lr_floor},
      data_(fingerprint(train)),
      digest_(str(std::hex, train.digest())) {
  tokens_.resize(static_cast<size_t>(tokens_per_step()));
  targets_.resize(tokens_.size());
  if (options_.profile) model_.start_profile();
  if (!checkpoint.empty()) restore(checkpoint);
}

size_t Trainer::memory() const { return parameter_bytes(params_, options_) + model_.bytes(); }

template <class F>
void Trainer::phase(const char* name, double bytes, F&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  if (!options_.profile) return;
  device_->wait();
  const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  auto known = std::find_if(phases_.begin(), phases_.end(), [&](const OpCost& cost) { return cost.op == name; });
  if (known == phases_.end()) known = phases_.insert(phases_.end(), OpCost{name});
  *known += OpCost{name, 1, taken, 0, bytes};
}

std::string Trainer::profile() const {
  if (!options_.profile || profiled_ == 0) return "";
  // Lanes run side by side and each takes its own time.
  const int64_t workers = std::min<int64_t>(model_.layout().lanes, omp_get_max_threads());
  std::vector<OpCost> costs = model_.costs();
  for (OpCost cost : phases_) {
    cost.seconds *= static_cast<double>(workers);
    costs.push_back(cost);
  }
  return format_profile(std::move(costs), workers, profiled_);
}

StepResult Trainer::step() {
  const auto start = std::chrono::steady_clock::now();
  const int64_t micro = options_.batch * T_, position = loader_.position();
  for (int64_t a = 0; a < options_.accumulate; ++a) loader_.next(&tokens_[a * micro], &targets_[a * micro]);
  const int64_t scored = std::count_if(targets_.begin(), targets_.end(), [](int32_t target) { return target >= 0; });
  // The replays are the same in every step, so that a device may record them; how many tokens are scored comes after.
  const double all = static_cast<double>(tokens_per_step());
  const Step replay{true, 1 / all, 0};
  const double scale = scored > 0 ? all / static_cast<double>(scored) : 0;
  const double flat = static_cast<double>(params_.values().bytes());
  const double narrow = static_cast<double>(params_.narrow_bytes());
  phase("zero gradients", flat, [&] { params_.zero_gradients(); });
  for (int64_t a = 0; a < options_.accumulate; ++a) model_.run(&tokens_[a * micro], &targets_[a * micro], replay);
  double norm = 0;
  phase("gradient norm", flat, [&] { norm = scale * optimizer_.gradient_norm(); });  // the first to wait
  const double loss = scale * replay.grad_scale * model_.take_losses();
  if (!std::isfinite(loss) || !std::isfinite(norm))
    fail(Exit::not_finite, "step ", steps_done() + 1, ": loss ", loss, ", gradient norm ", norm, ", at positions ",
         position, " to ", loader_.position() - 1, " of the stream of training samples. ", "No update was made",
         has_checkpoint_ ? "; the last checkpoint is untouched" : "; there is no checkpoint yet",
         ". Try a lower --lr, a longer --warmup or --clip");
  const double lr = options_.lr * schedule_.at(steps_done());
  phase("adamw", 7 * flat + narrow, [&] { optimizer_.update(lr, norm, scale); });
  ++profiled_;
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {loss, norm, lr, scored};
}

double Trainer::evaluate(const Source& test, int64_t samples) {
  const double loss = model_.mean_loss(test, samples).loss;
  if (!std::isfinite(loss))
    fail(Exit::not_finite, "the test loss after step ", steps_done(), " is ", loss,
         has_checkpoint_ ? ". The last checkpoint is from before that" : ". There is no checkpoint yet",
         ". Try a lower --lr, a longer --warmup or --clip");
  return loss;
}

void Trainer::save(const std::string& dir, const Tokenizer& tokenizer) {
  CheckpointWriter writer;
  writer.begin(dir);
  write_model(writer, options_, params_, tokenizer);
  save_tensors(writer.path("optimizer.safetensors"), params_, {{"m.", optimizer_.m()}, {"v.", optimizer_.v()}});
  const json state = {{"step", optimizer_.step}, {"position", loader_.position()},
                      {"seconds", seconds},      {"data", data_},
                      {"data_digest", digest_},  {"trajectory", trajectory(options_)}};
  write_file_atomically(writer.path("train_state.json"), state.dump(2) + "\n");
  writer.commit();
  has_checkpoint_ = true;
}

void Trainer::restore(const std::string& dir) {
  refuse_other_config(load_config(dir + "/config.json"), options_.config, dir + "/config.json");
  const std::string path = dir + "/train_state.json";
  const json state = read_json(path), trajectory = state.value("trajectory", json());
  const bool same_data = state.value("data", json()) == data_ && state.value("data_digest", json()) == digest_;
  refuse_other_settings(trajectory, options_, dir, same_data);
  if (state.value("data", json()) != data_ || state.value("data_digest", json(digest_)) != digest_)
    fail(Exit::bad_data, "--resume: ", options_.data.spec,
         options_.data.val_spec.empty() ? "" : " or " + options_.data.val_spec, " is not the data that the run in ",
         dir, " was trained on; its size or contents changed");
  const int64_t step = state_number(state, "step", path), position = state_number(state, "position", path);
  const int64_t samples = options_.batch * options_.accumulate;  // of a step
  if (step > options_.steps || position % samples != 0 || position / samples != step)
    fail(Exit::bad_data, path, ": \"step\" ", step, " and \"position\" ", position, " do not go together, at ", samples,
         " samples a step and ", options_.steps, " steps");
  if (!state.contains("seconds") || !state["seconds"].is_number() || state["seconds"] < 0)
    fail(Exit::bad_data, path, ": \"seconds\" is not a time");
  load_weights(dir, options_.config, params_);
  refresh_narrow(params_);
  load_tensors(dir + "/optimizer.safetensors", params_, {{"m.", optimizer_.m()}, {"v.", optimizer_.v()}});
  optimizer_.step = step;
  loader_.seek(position);
  has_checkpoint_ = true;
  seconds = state["seconds"].get<double>();
  steps_before_ = trajectory["steps"].get<int64_t>();
}

std::string Trainer::schedule_change() const {
  if (steps_before_ == 0 || steps_before_ == options_.steps) return "";
  Schedule before = schedule_;
  before.total = steps_before_;
  const double rate = options_.lr * schedule_.at(steps_done()), old = options_.lr * before.at(steps_done());
  return str("--steps grows from ", steps_before_, " to ", options_.steps, ": from here on the ", options_.schedule,
             " schedule is that of ", options_.steps, " steps; the next rate is ", format_number("%.3g", rate),
             rate == old ? ", as before" : format_number(", it would have been %.3g", old));
}

namespace {

// A model recorded for training, without memory.
struct Plan {
  explicit Plan(const TrainOptions& options) : tape(storage_type(options)) {
    declare(params, options);
    const Batch batch = batch_of(options, options.data.seq_len);
    layout = choose_layout(params, options.config, batch, backend_of(options.device));
    record_replay(tape, params, options.config, batch, layout);
    forward_flops_per_token = tape.forward_flops() / static_cast<double>(layout.sequences * batch.T);
    memory = parameter_bytes(params, options) + memory_of(layout, tape, params, true);
  }
  ParameterTable params;
  Tape tape;
  Layout layout{1, 1};
  double forward_flops_per_token;
  size_t memory;
};

}  // namespace

TrainResult plan_training(const TrainOptions& options) {
  Plan plan(options);
  TrainResult result;
  result.parameters = plan.params.count();
  result.flops_per_token = 3 * plan.forward_flops_per_token;
  result.memory = plan.memory;
  result.planned_memory = total(memory_parts(options, plan.params, plan.tape, plan.layout));
  return result;
}

void print_plan(const TrainOptions& options, const std::string& data) {
  Plan plan(options);
  if (options.dump_tape) {
    std::printf("%s", plan.tape.dump().c_str());
    return;
  }
  const std::vector<MemoryPart> parts = memory_parts(options, plan.params, plan.tape, plan.layout);
  std::printf("parameters: %s\n", format_count(plan.params.count()).c_str());
  std::printf("a step: B = %s sequences of T = %s tokens%s\n", format_count(options.batch).c_str(),
              format_count(options.data.seq_len).c_str(),
              options.accumulate > 1 ? str(", ", format_count(options.accumulate), " times").c_str() : "");
  if (data.empty()) std::printf("steps: %s\n", format_count(options.steps).c_str());
  else std::printf("%s", data.c_str());
  std::printf(
      "training FLOPs per token: %.4g (forward %.4g)\n"
      "  2 per multiply-add of products, causal attention and mixtures\n",
      3 * plan.forward_flops_per_token, plan.forward_flops_per_token);
  std::printf("memory: %s in all%s\n", format_bytes(total(parts)).c_str(),
              backend_of(options.device) == Backend::cuda ? ", without scratch" : "");
  for (const MemoryPart& part : parts)
    std::printf("  %-36s %12s\n", part.name.c_str(), format_bytes(part.bytes).c_str());
  if (plan.layout.lanes > 1)
    std::printf("%lld lanes, each with its gradients and the activations of\n  %lld of %lld sequences at a time:\n",
                static_cast<long long>(plan.layout.lanes), static_cast<long long>(plan.layout.sequences),
                static_cast<long long>(options.batch));
  std::printf("%s%s", plan.tape.memory_report().c_str(), plan.params.report().c_str());
}

}  // namespace crossply
