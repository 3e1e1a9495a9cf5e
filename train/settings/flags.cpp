#include "train/settings/settings.h"

#include <cstring>

#include "cli/flags.h"
#include "cli/format.h"
#include "engine/io/json.h"
#include "engine/numbers.h"
#include "kernels/devices.h"
#include "models/combined.h"
#include "train/settings/flag_table.h"
#include "train/settings/idle_flags.h"

namespace crossply {

Settings::Settings() {
  config.hidden_size = 128;
  config.intermediate_size = 384;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 4;
  config.tie_word_embeddings = true;
}

namespace {

std::string list_of_presets() {
  std::string list;
  for (const Preset& preset : presets()) {
    std::string name = preset.name;
    name.resize(std::max<size_t>(22, name.size() + 2), ' ');
    list += (list.empty() ? "" : "\n") + name + wrap(preset.about, 56, 22);
  }
  return list;
}

// Adds a row's flag, whose default is what the settings hold now.
struct AddFlag {
  CLI::App& app;
  const std::string& arch;
  const FlagRow& row;

  template <class Integer>
  requires std::is_integral_v<Integer> Flag operator()(Integer* member) const {
    return add_integer(app, row.flag, *member, static_cast<int64_t>(row.takes.min),
                       row.takes.max < 0x1p63 ? static_cast<int64_t>(row.takes.max) : INT64_MAX, row.help);
  }
  Flag operator()(double* member) const {
    return add_number(app, row.flag, *member, row.takes.min, row.takes.max, row.help);
  }
  Flag operator()(bool* member) const {
    return row.takes.sets ? add_switch(app, row.flag, *member, row.help) : add_truth(app, row.flag, *member, row.help);
  }
  Flag operator()(std::string* member) const {
    if (row.takes.words.empty()) return add_text(app, row.flag, *member, row.takes.text, row.help);
    const bool gpt2 = arch == "gpt2" && row.flag == "--backbone";  // no other one
    return add_choice(app, row.flag, *member, gpt2 ? std::vector{arch} : row.takes.words, row.help);
  }
  Flag operator()(std::vector<std::string>* member) const {
    return add_texts(app, row.flag, *member, row.takes.text, row.help);
  }
};

}  // namespace

ShortHelp training_help(const std::string& program, std::vector<std::string> needed) {
  needed.insert(needed.end(), {"--data", "--out"});
  return {needed,
          {"--preset", "--init", "--steps", "--batch", "--seq", "--lr", "--layers", "--width", "--resume", "--dry-run"},
          {program + " --data text:my.txt --out runs/mine",
           program + " --resume --out runs/mine --steps 20000    # continue, and longer"}};
}

void add_train_flags(CLI::App& app, Settings& settings) {
  for (const FlagGroup& group : training_flags()) {
    set_group(app, group.name);
    for (const FlagRow& row : group.rows) {
      if (row.help.empty() || (!row.backbone.empty() && row.backbone != settings.config.backbone)) continue;
      const Flag flag = std::visit(AddFlag{app, settings.config.arch, row}, row.member(settings));
      if (!row.needs.empty()) needs(app, flag, row.needs);
      for (const std::string& other : row.excludes) flag.excludes(flag_named(app, other));
      if (row.flag == "--preset") add_listing(app, "--list-presets", list_of_presets, "Print the presets and exit");
    }
  }
  set_group(app, "Options");
}

// What --help shows in the place of an option's value.
static std::string type_of(const Option& option) {
  if (!option.choices.empty()) return "NAME";
  if (parse_truth(option.default_value)) return "BOOL";
  if (parse_integer(option.default_value)) return "INT";
  return parse_number(option.default_value) ? "FLOAT" : "LIST";
}

std::string trainer_of(const std::string& arch) {
  return is_combined(arch) ? "train_combined --arch " + arch : "train_" + arch;
}

// The part of a combination that has the option.
static std::string owner_of(const std::string& arch, const std::string& key) {
  for (const std::string& part : parts_of(arch))
    for (const Option& option : find_architecture(part).options)
      if (option_key(arch, part, option.key) == key) return part;
  return arch;
}

std::string option_flag(const std::string& arch, const std::string& key) {
  for (const FlagGroup& group : training_flags())
    for (const FlagRow& row : group.rows)
      if (row.key() == key) return flag_of(owner_of(arch, key) + "-" + key);  // sla's heads are not H
  return flag_of(key);
}

void add_architecture_flags(CLI::App& app, Settings& settings) {
  Config& c = settings.config;
  const Architecture& architecture = find_architecture(c.arch);
  for (const Option& option : architecture.options) {
    auto set = [&c, option](const std::string& text) { c.options[option.key] = text; };
    std::string help = option.help;
    for (const OptionNeed& need : option.needs) {  // check_options() asks for it, when presets and files are read
      const std::string values = wanted_values(need);
      help += str(" (", need.only_for, need.only_for.empty() ? "" : " ", "needs ", flag_of(need.key),
                  values.empty() ? "" : " ", values, ")");
    }
    const std::string flag = option_flag(c.arch, option.key);
    if (!option.instead_of.empty()) needs(app, flag_named(app, option.instead_of), {{flag, {option.default_value}}});
    add_parsed(app, flag, set, type_of(option), help)
        .default_str(option.default_value)
        .group(owner_of(c.arch, option.key));
  }
}

// "": there is no run, or none that says it.
static std::string arch_of_run(const std::string& dir) {
  const nlohmann::json run = read_run_settings(dir);
  if (!run.is_object()) return "";
  const nlohmann::json arch = run.value(nlohmann::json::json_pointer("/config/crossply/arch"), nlohmann::json());
  return arch.is_string() ? arch.get<std::string>() : "";
}

std::string chosen_combination(int argc, char** argv) {
  if (const std::string arch = find_flag(argc, argv, "--arch"); !arch.empty()) {
    find_architecture(arch);
    if (!is_combined(arch))
      fail(Exit::usage, "--arch ", arch, " is one connection alone; train it by ", trainer_of(arch));
    return arch;
  }
  const std::string preset_name = find_flag(argc, argv, "--preset");
  const Preset* preset = find_preset(preset_name);
  if (preset != nullptr && is_combined(preset->arch)) return preset->arch;
  if (preset != nullptr && !preset->arch.empty()) refuse_preset(*preset);
  for (const char* flag : {"--out", "--branch"})
    if (const std::string dir = find_flag(argc, argv, flag), arch = arch_of_run(dir); is_combined(arch)) return arch;
    else if (!arch.empty())
      fail(Exit::usage, flag, " ", dir, ": its run is of ", trainer_of(arch), ", not of train_combined");
  // Nothing is trained, or what is wrong is said where it is for all trainers.
  if (!preset_name.empty() && preset == nullptr) return "llama";
  for (const char* flag : {"--resume", "--branch", "--help", "-h", "--help-all", "--version", "--list-presets"})
    if (has_flag(argc, argv, flag)) return "llama";
  fail(Exit::usage, "--arch is needed: two connections or more, as in --arch mhc+lime");
}

void add_arch_flag(CLI::App& app) {
  set_group(app, "Architecture");
  add_parsed(
      app, "--arch", [](const std::string&) {}, "A+B",
      "connections between '+'; with it --help-all lists their options");
}

void complete_flags(const CLI::App& app, Settings& settings, bool decided) {
  settings.given = given_flags(app);
  const auto is_open = [&](const char* flag) { return !settings.given.contains(flag); };
  const DataSpec data = parse_data_spec(settings.data.spec);
  // A directory has its own validation shards; those of the run that is resumed may be gone.
  if (!is_open("--data") && is_open("--val-data") && data.kind == DataSpec::Kind::directory)
    settings.data.val_spec.clear();
  if (!is_open("--eval-samples") && settings.eval_rule == "spread_then_all") settings.eval_rule = "spread";
  const Preset* preset = find_preset(settings.preset);
  if (preset != nullptr && preset->arch.empty()) decided = true;  // not by a structure
  if (decided || !settings.init.empty() || !data.files()) return;
  settings.open = {is_open("--seq"), is_open("--steps"), is_open("--lr"), is_open("--warmup")};
}

int64_t sequences_tested(const Settings& settings, int64_t size, bool last) {
  const bool all = settings.eval_samples == 0 || (last && settings.eval_rule == "spread_then_all");
  return all ? size : std::min(settings.eval_samples, size);
}

Dtype storage_type(const Settings& settings) { return settings.dtype == "bf16" ? Dtype::bf16 : Dtype::f32; }

// What says something of a job that is planned.
static void check_world(const Settings& settings) {
  const PlannedWorld &world = settings.world, none;
  const bool of_gpus = !world.gpu.empty() || world.nvlink > 0 || world.node_gpus != none.node_gpus;
  if (of_gpus && backend_of(settings.device) != Backend::cuda)
    fail(Exit::usage, "--gpu, --nvlink and --node-gpus are for --device cuda; of CPUs --net says what a rank sends");
}

void use_gpt2(Config& c) {
  c.backbone = "gpt2";
  c.norm_eps = 1e-5;
  c.intermediate_size = c.max_position_embeddings = 0;  // 4 C, T
}

void check_together(const Settings& settings) {
  const bool gpu = backend_of(settings.device) == Backend::cuda;
  if (settings.matmul == "fp8" && (!gpu || settings.dtype != "bf16"))
    fail(Exit::usage, "--matmul fp8 is for --device cuda --dtype bf16");
  if (settings.matmul == "bf16x3" && settings.dtype == "bf16")
    fail(Exit::usage, "--matmul bf16x3 is for --dtype fp32; --dtype bf16 multiplies in bf16 anyway");
  if (settings.matmul == "bf16x3" && gpu) fail(Exit::usage, "--matmul bf16x3 is for --device cpu");
  if (settings.dtype == "bf16" && settings.device == "reference")
    fail(Exit::usage, "--device reference has no bf16; it is for exact numbers");
  if (settings.lr == 0 && settings.router_lr > 0)
    fail(Exit::usage, "--router-lr ", settings.router_lr, " with --lr 0: nothing else would learn");
  if (const Preset* preset = find_preset(settings.preset); preset != nullptr)
    if (preset->of_students && settings.teacher.empty())
      fail(Exit::usage, "--preset ", settings.preset,
           " is for a model that learns from another one; give --teacher DIR");
  if (settings.z_loss > 0 && !settings.teacher.empty())
    fail(Exit::usage, "--z-loss ", settings.z_loss,
         " with --teacher: distillation has no z-loss; leave one of them out");
  if (settings.z_loss > 0 && settings.config.loop.exit_gate)
    fail(Exit::usage, "--z-loss ", settings.z_loss,
         " with an exit gate: the losses of several exits have no z-loss; leave one of them out");
  for (const auto& [key, value] : settings.config.options)
    if (settings.decay_all && value == "routers")
      fail(Exit::usage, "--decay-all decays everything, --decay routers the routers alone; leave one of them out");
  check_batch(settings.batch, settings.accumulate, settings.data.seq_len);
  check_world(settings);
  if (settings.matmul == "fp8" && settings.world.gpu == "a100") fail(Exit::usage, "--matmul fp8: --gpu a100 has none");
}

std::string warmup_warning(const Settings& settings) {
  if (settings.warmup == 0 || settings.steps == 0 || settings.warmup < settings.steps) return "";
  return str("warning: --warmup ", settings.warmup, " of --steps ", settings.steps,
             ": the learning rate only rises; a smaller ", "--warmup lets it reach --lr ", settings.lr);
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
