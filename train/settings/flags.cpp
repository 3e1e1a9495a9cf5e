#include "train/settings/options.h"

#include <cstring>

#include "cli/flags.h"
#include "cli/format.h"
#include "cli/needs.h"
#include "engine/numbers.h"
#include "kernels/devices.h"
#include "models/registry.h"
#include "train/settings/gpus.h"
#include "train/settings/idle_flags.h"

namespace crossply {

TrainOptions::TrainOptions() {
  config.hidden_size = 128;
  config.intermediate_size = 384;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 4;
  config.tie_word_embeddings = true;
}

namespace {

// The group of --help that flags are added to while it lives.
struct Group {
  Group(CLI::App& program, const char* name) : app(program) { set_group(app, name); }
  ~Group() { set_group(app, "Options"); }
  CLI::App& app;
};

std::string list_of_presets() {
  std::string list;
  for (const Preset& preset : presets()) {
    std::string name = preset.name;
    name.resize(std::max<size_t>(22, name.size() + 2), ' ');
    list += (list.empty() ? "" : "\n") + name + wrap(preset.about, 56, 22);
  }
  return list;
}

void add_data_flags(CLI::App& app, TrainOptions& o) {
  const Group group(app, "Data");
  add_text(app, "--preset", o.preset, "NAME", "a paper's setting (--list-presets); other flags change it");
  add_listing(app, "--list-presets", list_of_presets, "Print the presets and exit");
  const auto set_data = [&o](const std::string& spec) {
    o.data.spec = spec;
    // It has its own validation shards; those of the run that is resumed may be gone. --val-data is read after it.
    if (parse_data_spec(spec).kind == DataSpec::Kind::directory) o.data.val_spec.clear();
  };
  add_parsed(app, "--data", set_data, "SOURCE", data_specs).default_str(o.data.spec);
  add_text(
      app, "--tokenizer", o.data.tokenizer, "FILE",
      "tokenizer.json, or a directory that has one, for text: (default: that of the model it starts from, or bytes)");
  add_text(app, "--val-data", o.data.val_spec, "GLOB",
           "validation shards (default: those of a directory that prepare wrote, otherwise the end of --data)");
  add_integer(app, "--train-samples", o.data.train_samples, 0, max_count,
              "size of a generated training set (0: the task's own)");
  add_integer(app, "--test-samples", o.data.test_samples, 0, max_count,
              "size of a generated test set (0: the task's own)");
  add_integer(app, "--seq", o.data.seq_len, 0, max_size,
              "T, tokens per sequence (0: a task's longest; of files without this flag, by their size)");
  add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(), "of initialisation, data and its order");
}

void add_size_flags(CLI::App& app, TrainOptions& o) {
  Config& c = o.config;
  const Group group(app, "Model");
  add_text(
      app, "--init", o.init, "DIR",
      "start from this model: weights, sizes and tokenizer, which also encodes prosqa and arith; --layers takes its "
      "first blocks");
  add_integer(app, "--vocab", c.vocab_size, 0, max_size, "V, vocabulary size (0: the data's)");
  add_integer(app, "--width", c.hidden_size, 1, max_size, "C, model width");
  add_integer(app, "--layers", c.num_hidden_layers, 1, 4096, "L, number of blocks");
  add_integer(app, "--heads", c.num_attention_heads, 1, max_size, "H, query heads");
  add_integer(app, "--kv-heads", c.num_key_value_heads, 0, max_size, "K, key/value heads (0: H)");
  add_integer(app, "--head-width", c.head_dim, 0, max_size, "D, head width (0: C / H)");
  add_integer(app, "--ffn", c.intermediate_size, c.gpt2() ? 0 : 1, max_size,
              c.gpt2() ? "F, feed-forward width (0: 4 C)" : "F, feed-forward width");
  if (!c.gpt2()) add_number(app, "--rope-theta", c.rope_theta, 0, max_number, "base of the rotary frequencies");
  add_number(app, "--norm-eps", c.norm_eps, 0, max_number, "epsilon of the norms");
  add_truth(app, "--tie", c.tie_word_embeddings, "head and embedding share one matrix");
  add_truth(app, "--qk-norm", c.qk_norm, "RMSNorm on queries and keys");
  using Words = std::vector<std::string>;
  add_choice(app, "--backbone", c.backbone, c.arch == "gpt2" ? Words{"gpt2"} : Words{"llama", "gpt2"},
             "the block: llama or gpt2");
  if (!c.gpt2()) return;
  add_integer(app, "--positions", c.max_position_embeddings, 0, max_size, "P, learned positions (0: T)");
  add_truth(app, "--bias", c.bias, "biases in norms and products");
  add_choice(app, "--activation", c.activation_function, {"gelu_new", "gelu"}, "gelu_new (by tanh) or gelu (exact)");
  add_truth(app, "--scale-attn-by-layer", c.scale_attn_by_inverse_layer_idx,
            "divide the attention logits of layer i (from 0) by i + 1, too");
}

void add_teacher_flags(CLI::App& app, TrainOptions& o) {
  const Group group(app, "Distillation");
  add_text(app, "--teacher", o.teacher, "DIR",
           "learn also from the logits of this model, of any sizes and architecture but the same vocabulary; "
           "with --resume, where it is now");
  for (const Flag flag :
       {add_number(app, "--kd-alpha", o.kd.alpha, 0, 1, "A: the loss is A CE + (1 - A) TAU^2 KL(teacher || student)"),
        add_number(app, "--kd-tau", o.kd.tau, min_tau, max_tau, "TAU, temperature of both in the KL divergence"),
        add_choice(app, "--kd-reduction", o.kd_reduction, reductions,
                   "of the KL divergence: mean over tokens, or over tokens and vocabulary")})
    needs(app, flag, {{"--teacher"}});
}

void add_optimiser_flags(CLI::App& app, TrainOptions& o) {
  const Group group(app, "Optimiser");
  add_integer(
      app, "--steps", o.steps, 0, max_count,
      "optimizer steps; 0 writes an initialised model directory\nOn files the default depends on their size; so do "
      "those of --lr and --warmup.");
  add_integer(app, "--batch", o.batch, 1, max_size, "sequences per micro-step");
  add_integer(app, "--accumulate", o.accumulate, 1, max_size, "micro-steps per optimizer step");
  add_number(app, "--lr", o.lr, 0, max_number, "base learning rate");
  add_number(app, "--router-lr", o.router_lr, 0, max_number,
             "of routers, depth scores and whatever else learns faster than --lr; some connections have nothing such, "
             "attnres and mhc among them (0: mostly ten times --lr)");
  add_choice(app, "--schedule", o.schedule, schedules,
             "cosine, cosine_to_floor, cosine_from_zero, linear or constant (train/settings/schedule.h)");
  add_integer(app, "--warmup", o.warmup, 0, max_count, "warm-up steps");
  needs(app, add_number(app, "--lr-floor", o.lr_floor, 0, 1, "smallest multiple of --lr after the warm-up"),
        {{"--schedule", {"!constant"}}});
  add_number(app, "--weight-decay", o.adamw.weight_decay, 0, max_number, "decoupled weight decay");
  needs(app,
        add_switch(app, "--decay-all", o.decay_all,
                   "decay norms, embeddings, routers and scalars, too, as SATFormer's code does"),
        {{"--weight-decay"}});
  add_number(app, "--beta1", o.adamw.beta1, 0, max_beta, "AdamW's first decay");
  add_number(app, "--beta2", o.adamw.beta2, 0, max_beta, "AdamW's second decay");
  add_number(app, "--clip", o.adamw.clip, 0, max_number, "largest global gradient norm (0: no clipping)");
}

void add_output_flags(CLI::App& app, TrainOptions& o) {
  const Group group(app, "Output");
  add_text(app, "--out", o.out, "DIR", "run directory: metrics.jsonl, curve.svg, checkpoints");
  add_switch(app, "--resume", o.resume, "continue the run in --out, bit for bit; needs no other flags");
  add_integer(app, "--eval-every", o.eval_every, 0, max_count, "steps between evaluations (0: a tenth of the run)");
  const auto set_samples = [&o](const std::string& text) {
    o.eval_samples = read_integer("--eval-samples", text, 0, max_count);
    if (o.eval_rule == "spread_then_all") o.eval_rule = "spread";
  };
  add_parsed(app, "--eval-samples", set_samples, "INT",
             "test sequences for the loss, evenly spread (0: all). Without this flag the "
             "last evaluation is over all")
      .default_str(std::to_string(o.eval_samples));
  needs(app,
        add_integer(app, "--answer-samples", o.answer_samples, 0, max_count,
                    "test prompts to answer by generation (0: none)"),
        {{"--data", {"arith:*", "prosqa*"}}});
  add_integer(app, "--save-every", o.save_every, 0, max_count, "steps between checkpoints (0: a tenth of the run)");
  add_integer(app, "--keep", o.keep, 1, max_size, "checkpoints to keep");
  add_switch(app, "--tensorboard", o.tensorboard, "also write the metrics as event files, to tensorboard/ in --out");
  add_switch(app, "--csv", o.csv, "also write them as metrics.csv");
  const Flag plan = add_switch(app, "--dry-run", o.dry_run, "print memory, FLOPs and parameters, and stop");
  needs(app, add_switch(app, "--time", o.time, "also run three steps, and say how long the run takes"),
        {{"--dry-run"}});
  const Flag tape =
      add_switch(app, "--dump-tape", o.dump_tape, "print the step, forward and backward, as a table, and stop")
          .excludes(plan);
  const Flag tensors = add_texts(app, "--dump-tensors", o.dump_tensors, "NAME...",
                                 "write these values and gradients (d:NAME; * for any letters) of the next batch to "
                                 "--out DIR/tensors.safetensors, and stop")
                           .excludes(plan)
                           .excludes(tape);
  add_switch(app, "--profile", o.profile, "end with time, FLOPs and bytes by op, and the peak of memory")
      .excludes(tape)
      .excludes(tensors);
}

void add_machine_flags(CLI::App& app, TrainOptions& o) {
  const Group group(app, "Machine");
  add_text(app, "--device", o.device, "NAME", "cpu or cuda");
  add_choice(app, "--dtype", o.dtype, dtypes,
             "of activations and products: fp32, or bf16 (with fp32 master weights, moments, gradients)");
  add_choice(
      app, "--matmul", o.matmul, matmuls,
      "products of --dtype fp32: fp32, or bf16x3 (split in three on bf16 matrix units of a CPU); of linear layers "
      "with --dtype bf16: fp8, on a GPU that has it");
  needs(app,
        add_switch(app, "--other-gpu", o.other_gpu,
                   "resume also where the GPU, its driver or cuBLAS is another than the checkpoint's; last digits "
                   "then differ"),
        {{"--resume"}});
  add_plan_flag(app, o.plan);
}

void add_ranks_flags(CLI::App& app, TrainOptions& o) {
  const Group group(app, "Several processes");
  add_choice(app, "--sum", o.sum, sums,
             "of gradients over micro-steps and ranks: running, tree (the same bits for any number of ranks; copies of "
             "the gradients) or library (by MPI or NCCL)");
  add_number(app, "--peer-timeout", o.peer_timeout, 1, max_number, "seconds of silence after which a rank is lost");
  add_integer(app, "--check-replicas", o.check_replicas, 0, max_count,
              "steps between comparisons of the ranks' weights (0: never)");
  add_switch(app, "--log-ranks", o.log_ranks, "also print what other ranks than the first say");
}

void add_world_flags(CLI::App& app, PlannedWorld& world) {
  const Group group(app, "Planning");
  needs(app,
        add_integer(app, "--world", world.ranks, 1, 1 << 16,
                    "plan a job of so many ranks (memory, bytes sent, time) and start none: mpirun, torchrun or srun "
                    "does that"),
        {{"--dry-run"}, {"--dump-tape"}});
  for (const Flag flag :
       {add_integer(app, "--node-gpus", world.node_gpus, 1, 1 << 10, "ranks of a node, a GPU each"),
        add_choice(app, "--gpu", world.gpu, gpu_names(),
                   "its peak, memory and links: h100, h200, a100 or b200 (none: h100)"),
        add_number(app, "--nvlink", world.nvlink, 0, 1e6, "GB/s that a GPU sends inside its node (0: the --gpu's)"),
        add_number(
            app, "--net", world.net, 0, 1e6,
            "GB/s that a rank sends to other nodes; of CPUs to other ranks (0: that of the --gpu's usual network "
            "card)"),
        add_number(
            app, "--rank-rate", world.rate, 0, 1e12,
            "tokens/s of one rank alone, measured: in its status line, with these sizes and as many threads as a "
            "rank will have (0: assumed from the --gpu's peak)")})
    needs(app, flag, {{"--world"}});
}

}  // namespace

ShortHelp training_help(const std::string& program) {
  return {{"--data", "--out"},
          {"--preset", "--init", "--steps", "--batch", "--seq", "--lr", "--layers", "--width", "--resume", "--dry-run"},
          {program + " --data text:my.txt --out runs/mine",
           program + " --resume --out runs/mine --steps 20000    # continue, and longer"}};
}

void add_train_flags(CLI::App& app, TrainOptions& o) {
  add_data_flags(app, o);
  add_size_flags(app, o);
  add_teacher_flags(app, o);
  add_optimiser_flags(app, o);
  add_output_flags(app, o);
  add_machine_flags(app, o);
  add_ranks_flags(app, o);
  add_world_flags(app, o.world);
}

// What --help shows in the place of an option's value.
static std::string type_of(const Option& option) {
  if (!option.choices.empty()) return "NAME";
  if (parse_truth(option.default_value)) return "BOOL";
  if (parse_integer(option.default_value)) return "INT";
  return parse_number(option.default_value) ? "FLOAT" : "LIST";
}

void add_architecture_flags(CLI::App& app, TrainOptions& o) {
  Config& c = o.config;
  const Architecture& architecture = find_architecture(c.arch);
  for (const Option& option : architecture.options) {
    std::string name = option.key;
    if (has_flag_named(app, "--" + name)) name = architecture.name + "-" + name;  // sla's heads are not H
    auto set = [&c, option](const std::string& text) { c.options[option.key] = text; };
    std::string help = option.help;
    for (const OptionNeed& need : option.needs) {  // check_options() asks for it, when presets and files are read
      const std::string values = wanted_values(need);
      help += str(" (", need.only_for, need.only_for.empty() ? "" : " ", "needs ", flag_of(need.key),
                  values.empty() ? "" : " ", values, ")");
    }
    if (!option.instead_of.empty())
      needs(app, flag_named(app, option.instead_of), {{flag_of(name), {option.default_value}}});
    add_parsed(app, flag_of(name), set, type_of(option), help)
        .default_str(option.default_value)
        .group(architecture.name);
  }
}

OpenChoices open_choices(const CLI::App& app, const TrainOptions& o, bool known) {
  if (known || !o.preset.empty() || !o.init.empty() || !parse_data_spec(o.data.spec).files()) return {};
  const auto open = [&](const char* flag) { return !is_given(app, flag); };
  return {open("--seq"), open("--steps"), open("--lr"), open("--warmup")};
}

std::vector<std::string> given_flags(const CLI::App& app, const std::string& group) {
  std::vector<std::string> given;
  for (const std::string& name : flags_in_group(app, group))
    if (is_given(app, name) && name != "--init") given.push_back(name);
  return given;
}

int64_t sequences_tested(const TrainOptions& o, int64_t size, bool last) {
  const bool all = o.eval_samples == 0 || (last && o.eval_rule == "spread_then_all");
  return all ? size : std::min(o.eval_samples, size);
}

Dtype storage_type(const TrainOptions& o) { return o.dtype == "bf16" ? Dtype::bf16 : Dtype::f32; }

// What says something of a job that is planned.
static void check_world(const TrainOptions& o) {
  const PlannedWorld &world = o.world, none;
  const bool of_gpus = !world.gpu.empty() || world.nvlink > 0 || world.node_gpus != none.node_gpus;
  if (of_gpus && backend_of(o.device) != Backend::cuda)
    fail(Exit::usage, "--gpu, --nvlink and --node-gpus are for --device cuda; of CPUs --net says what a rank sends");
}

void use_gpt2(Config& c) {
  c.backbone = "gpt2";
  c.norm_eps = 1e-5;
  c.intermediate_size = c.max_position_embeddings = 0;  // 4 C, T
}

void check_together(const TrainOptions& o) {
  const bool gpu = backend_of(o.device) == Backend::cuda;
  if (o.matmul == "fp8" && (!gpu || o.dtype != "bf16"))
    fail(Exit::usage, "--matmul fp8 is for --device cuda --dtype bf16");
  if (o.matmul == "bf16x3" && o.dtype == "bf16")
    fail(Exit::usage, "--matmul bf16x3 is for --dtype fp32; --dtype bf16 multiplies in bf16 anyway");
  if (o.matmul == "bf16x3" && gpu) fail(Exit::usage, "--matmul bf16x3 is for --device cpu");
  if (o.dtype == "bf16" && o.device == "reference")
    fail(Exit::usage, "--device reference has no bf16; it is for exact numbers");
  if (o.lr == 0 && o.router_lr > 0)
    fail(Exit::usage, "--router-lr ", o.router_lr, " with --lr 0: nothing else would learn");
  for (const Preset& preset : presets())
    if (preset.name == o.preset && preset.of_students && o.teacher.empty())
      fail(Exit::usage, "--preset ", o.preset, " is for a model that learns from another one; give --teacher DIR");
  if (const auto decay = o.config.options.find("decay"); o.decay_all && decay != o.config.options.end())
    if (decay->second == "routers")
      fail(Exit::usage, "--decay-all decays everything, --decay routers the routers alone; leave one of them out");
  check_batch(o.batch, o.accumulate, o.data.seq_len);
  check_world(o);
  if (o.matmul == "fp8" && o.world.gpu == "a100") fail(Exit::usage, "--matmul fp8: --gpu a100 has none");
}

std::string warmup_warning(const TrainOptions& o) {
  if (o.warmup == 0 || o.steps == 0 || o.warmup < o.steps) return "";
  return str("warning: --warmup ", o.warmup, " of --steps ", o.steps, ": the learning rate only rises; a smaller ",
             "--warmup lets it reach --lr ", o.lr);
}

bool has_flag(int argc, char** argv, const std::string& flag) { return std::count(argv, argv + argc, flag) > 0; }

std::string find_flag(int argc, char** argv, const std::string& flag) {
  std::string value;
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == flag && i + 1 < argc) value = argv[i + 1];
    if (std::strncmp(argv[i], (flag + "=").c_str(), flag.size() + 1) == 0) value = argv[i] + flag.size() + 1;
  }
  return value;
}

}  // namespace crossply
