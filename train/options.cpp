#include "train/options.h"

#include <cmath>
#include <cstring>

#include "engine/json.h"
#include "models/registry.h"
#include "train/program.h"

namespace crossply {

TrainOptions::TrainOptions() {
  config.hidden_size = 128;
  config.intermediate_size = 384;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 4;
  config.tie_word_embeddings = true;
}

void add_train_flags(CLI::App& app, TrainOptions& o) {
  auto flag = [&](const char* name, auto& variable, const char* help) {
    return app.add_option(name, variable, help)->capture_default_str();
  };
  std::string names;
  for (const Preset& preset : presets()) names += "\n  " + preset.name + ": " + preset.about;
  flag("--preset", o.preset, "")->description("a paper's setting; other flags change it" + names);
  flag("--data", o.data.spec, "arith:3|4|5|6, prosqa, text:FILE, or a glob of token shards (*.bin)");
  flag("--val-data", o.data.val_spec, "glob of validation shards (default: the end of --data)");
  flag("--train-samples", o.data.train_samples, "size of a generated training set (0: the task's own)")
      ->check(integer_from(0));
  flag("--test-samples", o.data.test_samples, "size of a generated test set (0: the task's own)")
      ->check(integer_from(0));
  flag("--seq", o.data.seq_len, "tokens per sequence (0: the data's own)")->check(integer_from(0));
  flag("--out", o.out, "run directory: metrics.jsonl, curve.svg, checkpoints");
  flag("--init", o.init, "start from the weights of this model directory, which also gives the sizes");
  flag("--steps", o.steps, "optimizer steps; 0 writes an initialised model directory")->check(integer_from(0));
  flag("--batch", o.batch, "sequences per micro-step")->check(integer_from(1));
  flag("--accumulate", o.accumulate, "micro-steps per optimizer step")->check(integer_from(1));
  flag("--lr", o.lr, "base learning rate")->check(number_from(0));
  flag("--router-lr", o.router_lr, "of routers and depth scores (0: ten times --lr)")->check(number_from(0));
  flag("--schedule", o.schedule, "cosine, cosine1, linear or constant (engine/schedule.h)")
      ->check(CLI::IsMember({"cosine", "cosine1", "linear", "constant"}));
  flag("--warmup", o.warmup, "warm-up steps")->check(integer_from(0));
  flag("--lr-floor", o.lr_floor, "smallest multiple of --lr after the warm-up")->check(number_from(0, 1));
  flag("--weight-decay", o.adamw.weight_decay, "decoupled weight decay")->check(number_from(0));
  app.add_flag("--decay-all", o.decay_all,
               "decay norms, embeddings, routers and scalars, too, as SATFormer's code does");
  flag("--beta1", o.adamw.beta1, "AdamW's first decay")->check(number_from(0, 0.999999));
  flag("--beta2", o.adamw.beta2, "AdamW's second decay")->check(number_from(0, 0.999999));
  flag("--clip", o.adamw.clip, "largest global gradient norm (0: no clipping)")->check(number_from(0));
  flag("--seed", o.seed, "of initialisation, data and its order")->check(integer_from(0));
  flag("--device", o.device, "cpu, cuda, or reference (slow plain loops)");
  flag("--dtype", o.dtype, "of activations and products: fp32, or bf16 (with fp32 master weights, moments, gradients)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  flag("--matmul", o.matmul, "products of --dtype fp32: fp32, or bf16x3 (split in three on bf16 matrix units)")
      ->check(CLI::IsMember({"fp32", "bf16x3"}));
  flag("--plan", o.plan, "memory plan: reuse, distinct or poison (all give the same numbers)")
      ->check(CLI::IsMember({"reuse", "distinct", "poison"}));
  flag("--eval-every", o.eval_every, "steps between evaluations (0: a tenth of the run)")->check(integer_from(0));
  flag("--eval-samples", o.eval_samples, "test sequences for the loss")->check(integer_from(1));
  flag("--answer-samples", o.answer_samples, "test prompts to answer by generation (0: none)")
      ->check(integer_from(0));
  flag("--save-every", o.save_every, "steps between checkpoints (0: a tenth of the run)")->check(integer_from(0));
  flag("--keep", o.keep, "checkpoints to keep")->check(integer_from(1));
  app.add_flag("--dry-run", o.dry_run, "print parameters, FLOPs and the memory plan, and stop");
  app.add_flag("--dump-tape", o.dump_tape, "print the step as a table, and stop");
  app.add_flag("--profile", o.profile, "end with time, FLOPs and bytes by op");
  app.add_flag("--resume", o.resume, "continue --out from its newest valid checkpoint, bit for bit");
}

void add_size_flags(CLI::App& app, TrainOptions& o) {
  Config& c = o.config;
  auto flag = [&](const char* name, auto& variable, const char* help) {
    return app.add_option(name, variable, help)->capture_default_str()->group("Model");
  };
  flag("--vocab", c.vocab_size, "V, vocabulary size (0: the data's)");
  flag("--width", c.hidden_size, "C, model width");
  flag("--layers", c.num_hidden_layers, "L, number of blocks");
  flag("--heads", c.num_attention_heads, "H, query heads");
  flag("--kv-heads", c.num_key_value_heads, "K, key/value heads (0: H)");
  flag("--head-width", c.head_dim, "D, head width (0: C / H)");
  flag("--ffn", c.intermediate_size, "F, feed-forward width");
  flag("--rope-theta", c.rope_theta, "base of the rotary frequencies");
  flag("--norm-eps", c.rms_norm_eps, "epsilon of the norms");
  flag("--tie", c.tie_word_embeddings, "head and embedding share one matrix (true or false)");
  flag("--qk-norm", c.qk_norm, "RMSNorm on queries and keys (true or false)");
}

void add_architecture_flags(CLI::App& app, TrainOptions& o) {
  Config& c = o.config;
  const Architecture& architecture = find_architecture(c.arch);
  for (const Option& option : architecture.options) {
    std::string name = option.key;
    if (app.get_option_no_throw("--" + name) != nullptr)
      name = architecture.name + "-" + name;  // sla's heads are not H
    for (char& letter : name) letter = letter == '_' ? '-' : letter;
    auto set = [&c, option](const std::string& text) { c.options[option.key] = text; };
    app.add_option_function<std::string>("--" + name, set, option.help)
        ->default_str(option.default_value)
        ->group(architecture.name);
  }
}

std::vector<std::string> given_model_flags(const CLI::App& app) {
  std::vector<std::string> given;
  for (const CLI::Option* option : app.get_options())
    if (option->count() > 0 && option->get_group() != "Options") given.push_back(option->get_name());
  return given;
}

Dtype storage_type(const TrainOptions& o) { return o.dtype == "bf16" ? Dtype::bf16 : Dtype::f32; }

void check_numbers(const TrainOptions& o) {
  if (o.dtype == "bf16" && o.matmul != "fp32")
    fail(Exit::usage, "--matmul ", o.matmul, " is for --dtype fp32; --dtype bf16 multiplies in bf16 anyway");
  if (o.matmul != "fp32" && backend_of(o.device) == Backend::cuda)
    fail(Exit::usage, "--matmul ", o.matmul, " is for --device cpu");
  if (o.dtype == "bf16" && o.device == "reference")
    fail(Exit::usage, "--device reference has no bf16; it is for exact numbers");
  for (const double number :
       {o.lr, o.router_lr, o.lr_floor, o.adamw.weight_decay, o.adamw.beta1, o.adamw.beta2, o.adamw.clip})
    if (!std::isfinite(number)) fail(Exit::usage, "--lr, --weight-decay, --clip and the like must be finite numbers");
  if (o.lr == 0 && o.router_lr > 0)
    fail(Exit::usage, "--router-lr ", o.router_lr, " with --lr 0: nothing else would learn");
  constexpr double most = 1LL << 40;
  const double tokens =
      static_cast<double>(o.batch) * static_cast<double>(o.accumulate) * static_cast<double>(o.data.seq_len);
  if (tokens > most || static_cast<double>(o.steps) > most)
    fail(Exit::usage, "--batch ", o.batch, " x --accumulate ", o.accumulate, " x --seq ", o.data.seq_len,
         ", or --steps ", o.steps, ", is beyond anything a machine can do");
}

nlohmann::json all_settings(const TrainOptions& o) {
  nlohmann::json settings = trajectory(o);
  settings["preset"] = o.preset;
  settings["config"] = to_json(o.config);
  settings["plan"] = o.plan;
  settings["eval_every"] = o.eval_every;
  settings["eval_samples"] = o.eval_samples;
  settings["answer_samples"] = o.answer_samples;
  settings["save_every"] = o.save_every;
  settings["keep"] = o.keep;
  return settings;
}

nlohmann::json trajectory(const TrainOptions& o) {
  return {{"data", utf8_or_escaped(o.data.spec)},
          {"val_data", utf8_or_escaped(o.data.val_spec)},
          {"train_samples", o.data.train_samples},
          {"test_samples", o.data.test_samples},
          {"seq", o.data.seq_len},
          {"init", utf8_or_escaped(o.init)},
          {"steps", o.steps},
          {"batch", o.batch},
          {"accumulate", o.accumulate},
          {"lr", o.lr},
          {"router_lr", o.router_lr},
          {"schedule", o.schedule},
          {"warmup", o.warmup},
          {"lr_floor", o.lr_floor},
          {"weight_decay", o.adamw.weight_decay},
          {"decay_all", o.decay_all},
          {"beta1", o.adamw.beta1},
          {"beta2", o.adamw.beta2},
          {"clip", o.adamw.clip},
          {"seed", o.seed},
          {"device", o.device},
          {"dtype", o.dtype},
          {"matmul", o.matmul}};
}

void apply_preset(const std::string& name, TrainOptions& options) {
  std::string known;
  for (const Preset& preset : presets()) {
    known += " " + preset.name;
    if (preset.name != name) continue;
    preset.apply(options);
    options.preset = name;
    return;
  }
  fail(Exit::usage, "unknown preset '", name, "'; known:", known);
}

std::string find_preset_flag(int argc, char** argv) {
  std::string name;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--preset") == 0 && i + 1 < argc) name = argv[i + 1];
    if (std::strncmp(argv[i], "--preset=", 9) == 0) name = argv[i] + 9;
  }
  return name;
}

}  // namespace crossply
