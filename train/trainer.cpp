#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "eval/loss.h"
#include "models/model_dir.h"
#include "train/checkpoint.h"

namespace crossply {
namespace {

using nlohmann::json;

PlanMode plan_mode(const std::string& name) {
  if (name == "reuse") return PlanMode::reuse;
  return name == "distinct" ? PlanMode::distinct : PlanMode::poison;
}

// The parameters with their memory, initialised or loaded: done before the optimizer sees them.
ParameterTable& prepare(ParameterTable& params, const TrainOptions& options, Device& device) {
  declare_model(params, options.config);
  params.allocate(device, Dtype::f32, true);
  if (options.init.empty()) params.initialise(options.seed);
  else load_weights(resolve_model_dir(options.init), options.config, params);
  return params;
}

}  // namespace

Trainer::Trainer(const TrainOptions& options, const Source& train)
    : options_(options),
      device_(make_device(options.device)),
      tape_(Dtype::f32),
      T_(train.seq_len()),
      optimizer_(prepare(params_, options, *device_), options.adamw),
      loader_(train, options.batch, options.seed, true),
      schedule_{schedule_kind(options.schedule), options.warmup, std::max<int64_t>(options.steps, 1), options.lr_floor} {
  graph_ = record_model(tape_, params_, options_.config, options_.batch, T_);
  tape_.differentiate();
  tape_.plan(plan_mode(options_.plan));
  tape_.allocate(*device_);
  tokens_.resize(static_cast<size_t>(tokens_per_step()));
  targets_.resize(tokens_.size());
}

size_t Trainer::memory() const {
  return tape_.arena_bytes() + 4 * params_.values().bytes();  // activations; values, gradients, two moments
}

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
         " at training samples ", position, " to ", loader_.position() - 1,
         ". No update was made; the last checkpoint is untouched. Try a lower --lr, a longer --warmup or --clip");
  const double lr = options_.lr * schedule_.at(steps_done());
  optimizer_.update(lr, norm);
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {loss, norm, lr, scored};
}

double Trainer::evaluate(const Source& test, int64_t samples) {
  return mean_loss(*device_, tape_, graph_, test, samples).loss;
}

// -----------------------------------------------------------------------------------------------------------------
// Checkpoints

void Trainer::save(const std::string& dir, const Tokenizer& tokenizer) const {
  CheckpointWriter writer;
  writer.begin(dir);
  save_config(writer.path("config.json"), options_.config);
  save_tensors(writer.path("model.safetensors"), params_, params_.values());
  save_tensors(writer.path("first_moments.safetensors"), params_, optimizer_.m());
  save_tensors(writer.path("second_moments.safetensors"), params_, optimizer_.v());
  tokenizer.save(std::filesystem::path(writer.path("tokenizer.json")).parent_path());
  const json state = {{"step", optimizer_.step},
                      {"position", loader_.position()},
                      {"seconds", seconds},
                      {"trajectory", trajectory(options_)}};
  write_file_atomically(writer.path("train_state.json"), state.dump(2) + "\n");
  writer.commit();
}

bool Trainer::resume(const std::string& run_dir, std::vector<std::string>* notes) {
  const std::string dir = newest_valid_checkpoint(run_dir, notes);
  if (dir.empty()) return false;
  const Config saved = load_config(dir + "/config.json");
  if (to_json(saved) != to_json(options_.config))
    fail(Exit::usage, dir, "/config.json is of another model than the flags describe; resume with the flags it was started with");
  std::ifstream file(dir + "/train_state.json");
  const json state = json::parse(file, nullptr, false);
  if (!state.is_object() || !state.contains("trajectory"))
    fail(Exit::bad_data, dir, "/train_state.json: not a training state");
  const json now = trajectory(options_);
  for (const auto& [key, value] : state["trajectory"].items())
    if (!now.contains(key) || now[key] != value)
      fail(Exit::usage, "--resume: the run in ", run_dir, " has ", key, " ", value.dump(), ", the flags say ",
           now.value(key, json()).dump(), "; resume with the flags it was started with");
  load_weights(dir, options_.config, params_);
  load_tensors(dir + "/first_moments.safetensors", params_, optimizer_.m());
  load_tensors(dir + "/second_moments.safetensors", params_, optimizer_.v());
  optimizer_.step = state.at("step").get<int64_t>();
  loader_.seek(state.at("position").get<int64_t>());
  seconds = state.at("seconds").get<double>();
  return true;
}

std::string resolve_model_dir(const std::string& path) {
  namespace fs = std::filesystem;
  if (fs::exists(fs::path(path) / "config.json")) return path;
  if (!fs::is_directory(path)) fail(Exit::no_input, path, ": no such directory; expected a model or run directory");
  std::vector<std::string> notes;
  const std::string newest = newest_valid_checkpoint(path, &notes);
  if (!newest.empty()) return newest;
  std::string why;
  for (const std::string& note : notes) why += "; " + note;
  fail(Exit::no_input, path, ": neither config.json nor a valid checkpoint (step_*) in it", why);
}

void print_plan(const TrainOptions& options) {
  ParameterTable params;
  declare_model(params, options.config);
  Tape tape(Dtype::f32);
  const int64_t T = options.data.seq_len;
  record_model(tape, params, options.config, options.batch, T);
  tape.differentiate();
  tape.plan(plan_mode(options.plan));
  if (options.dump_tape) {
    std::printf("%s", tape.dump().c_str());
    return;
  }
  const double tokens = static_cast<double>(options.batch * T), flat = 4.0 * static_cast<double>(params.flat_size());
  std::printf("%s", params.report().c_str());
  std::printf("parameters: %lld\n", static_cast<long long>(params.count()));
  std::printf("training FLOPs per token: %.6g (forward %.6g; 2 per multiply-add of matrix products and causal attention)\n",
              3 * tape.forward_flops() / tokens, tape.forward_flops() / tokens);
  std::printf("memory: parameters %s, gradients %s, moments %s\n", format_bytes(flat).c_str(), format_bytes(flat).c_str(),
              format_bytes(2 * flat).c_str());
  std::printf("%s", tape.memory_report().c_str());
}

}  // namespace crossply
