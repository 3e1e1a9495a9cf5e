// A run's settings as JSON, in the flags' own words: what flags.json holds, what a checkpoint keeps of it, and back.
#include <filesystem>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "models/disk/checkpoint.h"
#include "models/disk/config_json.h"
#include "train/settings/idle_flags.h"
#include "train/settings/options.h"
#include "train/settings/setting_io.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Calls visit for what a resumed run must keep: with the flag, underscores for its dashes; the variable; and what the
// flag refuses beside the usual, as the smallest and largest number or as the words that it takes.
template <class Options, class Visit>
void each_kept(Options& o, Visit&& visit) {
  visit("data", o.data.spec);
  visit("val_data", o.data.val_spec);
  visit("tokenizer", o.data.tokenizer);
  visit("train_samples", o.data.train_samples);
  visit("test_samples", o.data.test_samples);
  visit("seq", o.data.seq_len);
  visit("init", o.init);
  visit("teacher", o.teacher);
  if (!o.teacher.empty()) {
    visit("kd_alpha", o.kd.alpha, 0, 1);
    visit("kd_tau", o.kd.tau, min_tau, max_tau);
    visit("kd_reduction", o.kd_reduction, reductions);
  }
  visit("steps", o.steps, 1);
  visit("batch", o.batch, 1);
  visit("accumulate", o.accumulate, 1);
  visit("lr", o.lr);
  visit("router_lr", o.router_lr);
  visit("schedule", o.schedule, schedules);
  visit("warmup", o.warmup);
  visit("lr_floor", o.lr_floor, 0, 1);
  visit("weight_decay", o.adamw.weight_decay);
  visit("decay_all", o.decay_all);
  visit("beta1", o.adamw.beta1, 0, max_beta);
  visit("beta2", o.adamw.beta2, 0, max_beta);
  visit("clip", o.adamw.clip);
  visit("seed", o.seed);
  visit("device", o.device);
  visit("dtype", o.dtype, dtypes);
  visit("matmul", o.matmul, matmuls);
  visit("sum", o.sum, sums);
}

// The same for what a resumed run may change, because it does not touch the numbers.
template <class Options, class Visit>
void each_free(Options& o, Visit&& visit) {
  visit("preset", o.preset);
  visit("plan", o.plan);
  visit("eval_every", o.eval_every);
  visit("eval_samples", o.eval_samples);
  visit("eval_rule", o.eval_rule, eval_rules);
  visit("answer_samples", o.answer_samples);
  visit("save_every", o.save_every);
  visit("keep", o.keep, 1);
  visit("tensorboard", o.tensorboard);
  visit("csv", o.csv);
}

// A setting as this program has it, from any directory; older runs have paths as they were typed, and another name.
json renewed(const std::string& key, const json& value) {
  if (!value.is_string()) return value;
  if (key == "schedule" && value == "cosine1") return "cosine_to_floor";
  const std::string name = name_from_utf8(value);
  if (key == "init" || key == "teacher" || key == "tokenizer") return name_as_utf8(absolute_path(name));
  return key == "data" || key == "val_data" ? json(name_as_utf8(absolute_data(name))) : value;
}

// For a message.
std::string shown(const json& value) {
  return value.is_string() ? "\"" + name_from_utf8(value) + "\"" : json_text(value);
}

}  // namespace

std::string absolute_path(const std::string& path) {
  std::error_code error;
  const fs::path full = fs::absolute(path, error);
  return path.empty() || error ? path : full.string();
}

std::string absolute_data(const std::string& spec) {
  const DataSpec parts = parse_data_spec(spec);
  if (parts.path.empty()) return spec;
  const std::string full = absolute_path(parts.path), before = full.substr(0, full.size() - parts.path.size());
  // A directory whose own name reads as a pattern would change what the glob finds.
  const auto is_pattern = [](const std::string& text) { return text.find_first_of("*?[\\") != text.npos; };
  if (is_pattern(parts.path) && is_pattern(before)) return spec;
  // A dot is left out; what two of them leave may be a link.
  return parts.prefix + (full.find("/../") == full.npos ? fs::path(full).lexically_normal().string() : full);
}

json trajectory(const TrainOptions& o) {
  json settings;
  each_kept(o, PutSetting{settings});
  for (const char* key : {"data", "val_data", "tokenizer", "init", "teacher"})
    settings[key] = renewed(key, settings[key]);
  return settings;
}

json all_settings(const TrainOptions& o) {
  json settings = trajectory(o);
  each_free(o, PutSetting{settings});
  settings["config"] = to_json(o.config);
  return settings;
}

json read_run_settings(const std::string& run_dir) {
  const std::string path = run_dir + "/flags.json";
  return !run_dir.empty() && path_exists(path) ? read_json(path) : json();
}

void take_settings(const json& settings, const std::string& path, TrainOptions& o) {
  if (!settings.is_object() || !settings.contains("config")) fail(Exit::bad_data, path, ": \"config\" is missing");
  json now = settings;
  for (const auto& [key, value] : now.items()) value = renewed(key, value);
  if (!now.contains("eval_rule")) now["eval_rule"] = "first";  // older runs had no other
  each_kept(o, TakeSetting{now, path});
  each_free(o, TakeSetting{now, path});
  o.config = parse_config(settings["config"], path + ": config");
}

bool take_run_settings(const std::string& run_dir, TrainOptions& o) {
  const json settings = read_run_settings(run_dir);
  if (settings.is_null()) return false;
  const std::string arch = o.config.arch;
  take_settings(settings, run_dir + "/flags.json", o);
  if (o.config.arch != arch)
    fail(Exit::usage, "--resume: the run in ", run_dir, " is of train_", o.config.arch, ", not of train_", arch);
  return true;
}

void refuse_other_settings(const json& saved, const TrainOptions& now, const std::string& where,
                           const std::set<std::string>& moved) {
  if (!saved.is_object()) fail(Exit::bad_data, where, ": the flags of the run are missing");
  const json current = trajectory(now);
  for (const auto& [key, value] : current.items()) {
    // older runs had no choice of these
    const json before = key == "matmul"                          ? json("fp32")
                        : key == "sum"                           ? json("running")
                        : key == "teacher" || key == "tokenizer" ? json("")
                                                                 : json();
    const json was = renewed(key, saved.value(key, before));
    const bool files = data_settings.contains(key);
    if (was == value || moved.contains(key) || (key == "init" && now.init_moved)) continue;
    if (key == "steps" && was.is_number_unsigned() && was < value) continue;
    fail(Exit::usage, "--resume: the run in ", where, " has ", flag_of(key), " ", shown(was), ", the flags say ",
         shown(value),
         key == "steps"                                 ? "; it can only grow"
         : files                                        ? "; only other files with the same contents can take its place"
         : key == "teacher" && was != "" && value != "" ? "; only a directory with the same weights can take its place"
                                                        : "; resume with the flags it was started with");
  }
}

void refuse_other_config(const Config& saved, const Config& now, const std::string& where) {
  const json was = to_json(saved).flatten(), is = to_json(now).flatten();
  if (was == is) return;
  std::string differences;
  for (const auto& [key, value] : is.items()) {
    const json old = was.value(key, json());
    if (old != value) differences += str(" ", key.substr(1), " is ", json_text(old), ", not ", json_text(value), ";");
  }
  fail(Exit::usage, "--resume: ", where, " is of another model than the flags describe:", differences,
       " resume with the flags it was started with");
}

}  // namespace crossply
