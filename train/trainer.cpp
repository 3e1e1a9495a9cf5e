#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "engine/rng.h"
#include "eval/loss.h"
#include "models/json_file.h"
#include "models/model_dir.h"
#include "train/checkpoint.h"

namespace crossply {
namespace {

using nlohmann::json;

// The parameter table with the run's own rates.
void declare(ParameterTable& params, const TrainOptions& options) {
  declare_model(params, options.config);
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
  if (options.init.empty() || resumed) params.initialise(options.seed);
  else load_weights(resolve_model_dir(options.init), options.config, params);
  return params;
}

// Bytes of all arenas: activations; values, gradients, two moments.
size_t memory_of(const Tape& tape, const ParameterTable& params) {
  return tape.arena_bytes() + 4 * static_cast<size_t>(params.flat_size()) * size_of(Dtype::f32);
}

// Tells whether it is the same data: its size and the contents of some samples.
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

}  // namespace

Trainer::Trainer(const TrainOptions& options, const Source& train, const std::string& checkpoint)
    : options_(options),
      device_(make_device(options.device)),
      tape_(Dtype::f32),
      T_(train.seq_len()),
      optimizer_(prepare(params_, options, *device_, !checkpoint.empty()), options.adamw),
      loader_(train, options.batch, options.seed, true),
      schedule_{schedule_kind(options.schedule), options.warmup, std::max<int64_t>(options.steps, 1), options.lr_floor},
      data_(fingerprint(train)) {
  graph_ = record_model(tape_, params_, options_.config, options_.batch, T_);
  tape_.differentiate();
  tape_.plan(plan_mode(options_.plan));
  tape_.allocate(*device_);
  tokens_.resize(static_cast<size_t>(tokens_per_step()));
  targets_.resize(tokens_.size());
  if (!checkpoint.empty()) restore(checkpoint);
}

size_t Trainer::memory() const { return memory_of(tape_, params_); }

StepResult Trainer::step() {
  const auto start = std::chrono::steady_clock::now();
  const int64_t micro = options_.batch * T_, position = loader_.position();
  for (int64_t a = 0; a < options_.accumulate; ++a) loader_.next(&tokens_[a * micro], &targets_[a * micro]);
  const int64_t scored = std::count_if(targets_.begin(), targets_.end(), [](int32_t target) { return target >= 0; });
  const Step replay{true, scored > 0 ? 1 / static_cast<double>(scored) : 0, 0};
  params_.zero_gradients();
  double sum = 0;
  for (int64_t a = 0; a < options_.accumulate; ++a) {
    load_batch(*device_, graph_, &tokens_[a * micro], &targets_[a * micro]);
    tape_.forward(replay);
    sum += sum_losses(*device_, graph_);
    tape_.backward(replay);
  }
  const double loss = sum * replay.grad_scale, norm = optimizer_.gradient_norm();
  if (!std::isfinite(loss) || !std::isfinite(norm))
    fail(Exit::not_finite, "step ", steps_done() + 1, ": loss ", loss, ", gradient norm ", norm,
         ", at positions ", position, " to ", loader_.position() - 1, " of the stream of training samples. ",
         "No update was made; the last checkpoint is untouched. Try a lower --lr, a longer --warmup or --clip");
  const double lr = options_.lr * schedule_.at(steps_done());
  optimizer_.update(lr, norm);
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {loss, norm, lr, scored};
}

double Trainer::evaluate(const Source& test, int64_t samples) {
  const double loss = mean_loss(*device_, tape_, graph_, test, samples).loss;
  if (!std::isfinite(loss))
    fail(Exit::not_finite, "the test loss after step ", steps_done(), " is ", loss,
         ". The last checkpoint is from before that. Try a lower --lr, a longer --warmup or --clip");
  return loss;
}

void Trainer::save(const std::string& dir, const Tokenizer& tokenizer) const {
  CheckpointWriter writer;
  writer.begin(dir);
  write_model(writer, options_, params_, tokenizer);
  save_tensors(writer.path("optimizer.safetensors"), params_, {{"m.", optimizer_.m()}, {"v.", optimizer_.v()}});
  const json state = {{"step", optimizer_.step},
                      {"position", loader_.position()},
                      {"seconds", seconds},
                      {"data", data_},
                      {"trajectory", trajectory(options_)}};
  write_file_atomically(writer.path("train_state.json"), state.dump(2) + "\n");
  writer.commit();
}

void Trainer::restore(const std::string& dir) {
  if (to_json(load_config(dir + "/config.json")) != to_json(options_.config))
    fail(Exit::usage, dir,
         "/config.json is of another model than the flags describe; resume with the flags it was started with");
  const std::string path = dir + "/train_state.json";
  const json state = read_json(path);
  for (const char* key : {"step", "position"})
    if (!state.contains(key) || !state[key].is_number_integer())
      fail(Exit::bad_data, path, ": \"", key, "\" is missing");
  const json saved = state.value("trajectory", json::object()), now = trajectory(options_);
  for (const auto& [key, value] : now.items())
    if (!saved.contains(key) || saved[key] != value)
      fail(Exit::usage, "--resume: the run in ", dir, " has ", key, " ", saved.value(key, json()).dump(),
           ", the flags say ", value.dump(), "; resume with the flags it was started with");
  if (state.value("data", json()) != data_)
    fail(Exit::bad_data, "--resume: ", options_.data.spec, " is not the data that the run in ", dir,
         " was trained on; its size or contents changed");
  load_weights(dir, options_.config, params_);
  load_tensors(dir + "/optimizer.safetensors", params_, {{"m.", optimizer_.m()}, {"v.", optimizer_.v()}});
  optimizer_.step = state["step"].get<int64_t>();
  loader_.seek(state["position"].get<int64_t>());
  if (state.contains("seconds") && state["seconds"].is_number()) seconds = state["seconds"].get<double>();
}

namespace {

// A model recorded for training, without memory.
struct Plan {
  explicit Plan(const TrainOptions& options) : tape(Dtype::f32) {
    declare(params, options);
    record_model(tape, params, options.config, options.batch, options.data.seq_len);
    tape.differentiate();
    tape.plan(plan_mode(options.plan));
    forward_flops_per_token = tape.forward_flops() / static_cast<double>(options.batch * options.data.seq_len);
  }
  ParameterTable params;
  Tape tape;
  double forward_flops_per_token;
};

}  // namespace

TrainResult plan_training(const TrainOptions& options) {
  const Plan plan(options);
  TrainResult result;
  result.parameters = plan.params.count();
  result.flops_per_token = 3 * plan.forward_flops_per_token;
  result.memory = memory_of(plan.tape, plan.params);
  return result;
}

void print_plan(const TrainOptions& options) {
  const Plan plan(options);
  if (options.dump_tape) {
    std::printf("%s", plan.tape.dump().c_str());
    return;
  }
  const double flat = 4.0 * static_cast<double>(plan.params.flat_size());
  std::printf("%s", plan.params.report().c_str());
  std::printf("parameters: %lld\n", static_cast<long long>(plan.params.count()));
  std::printf(
      "training FLOPs per token: %.6g (forward %.6g; 2 per multiply-add of products, causal attention and mixtures)\n",
      3 * plan.forward_flops_per_token, plan.forward_flops_per_token);
  std::printf("memory: parameters %s, gradients %s, moments %s\n", format_bytes(flat).c_str(),
              format_bytes(flat).c_str(), format_bytes(2 * flat).c_str());
  std::printf("%s", plan.tape.memory_report().c_str());
}

}  // namespace crossply
