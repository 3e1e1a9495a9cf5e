#include "dev/figures/record.h"

#include <algorithm>
#include <cmath>

#include "data/source.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "train/settings/settings.h"

namespace crossply::figures {
namespace {

using nlohmann::json;

// Flags that name files, of which a record has the last parts only.
constexpr const char* paths[] = {"data", "val_data", "tokenizer", "init", "teacher"};

const json& need(const json& object, const char* key, const std::string& path) {
  const auto found = object.find(key);
  if (found == object.end()) fail(Exit::bad_data, path, ": \"", key, "\" is missing");
  return *found;
}

double number(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<double>() : NAN;
}

double needed_number(const json& object, const char* key, const std::string& path, double most = 1e18) {
  const json& value = need(object, key, path);
  if (!holds<double>(value, 0, most)) fail(Exit::bad_data, path, ": \"", key, "\" cannot be ", json_text(value));
  return value;
}

std::vector<double> numbers(const json& object, const char* key) {
  std::vector<double> out;
  if (!object.is_object() || !object.contains(key)) return out;
  for (const json& value : object[key]) out.push_back(value.is_number() ? value.get<double>() : NAN);
  return out;
}

json without_paths(json flags) {
  for (const char* key : paths)
    if (flags.contains(key) && flags[key].is_string()) flags[key] = short_name(flags[key].get<std::string>());
  return flags;
}

// What every run's flags have in common, the config's own keys included.
json common_of(const std::vector<json>& all) {
  json common = all.at(0);
  for (const json& flags : all)
    for (auto it = common.begin(); it != common.end();) {
      if (it->is_object() && flags.contains(it.key()) && flags[it.key()].is_object())
        *it = common_of({*it, flags[it.key()]});
      const bool same = flags.contains(it.key()) && (flags[it.key()] == *it || it->is_object());
      it = same ? std::next(it) : common.erase(it);
    }
  return common;
}

// A run without what the record says once for all.
json line_of(const json& run, size_t environment, const std::string& path) {
  json line = {{"environment", environment}};
  for (const char* key : {"name", "options", "lr", "seed", "state", "steps_done", "parameters", "flops_per_token",
                          "memory_bytes", "tokens_per_second", "tokens_per_step", "training_seconds",
                          "runs_side_by_side", "train_loss", "test_loss", "answers", "steps_valid", "evaluations"})
    line[key] = need(run, key, path);
  for (const char* key : {"optimizer", "muon_lr"})
    if (run.contains(key) && !run[key].is_null() && run[key] != "adamw") line[key] = run[key];
  if (const json& error = need(run, "error", path); error != "") line["error"] = error;
  return line;
}

// As many numbers of each, and all steps finite, or Exit::bad_data.
void take_curve(const json& tests, const char* x, const char* y, std::vector<double>& xs, std::vector<double>& ys,
                const std::string& path) {
  xs = numbers(tests, x), ys = numbers(tests, y);
  const bool finite = std::all_of(xs.begin(), xs.end(), [](double step) { return std::isfinite(step) && step > 0; });
  if (xs.size() != ys.size() || !finite) fail(Exit::bad_data, path, ": \"", x, "\" and \"", y, "\" do not fit");
}

RecordedRun run_of(const json& line, const std::string& path) {
  RecordedRun run;
  const json &name = need(line, "name", path), &seed = need(line, "seed", path), &state = need(line, "state", path);
  if (!holds<std::string>(name) || !holds<uint64_t>(seed) || !holds<std::string>(state))
    fail(Exit::bad_data, path, ": a run's name, seed or state cannot be ", json_text(name), ", ", json_text(seed), ", ",
         json_text(state));
  run.name = name, run.seed = seed, run.state = state;
  run.lr = needed_number(line, "lr", path), run.muon_lr = number(line, "muon_lr");
  run.optimizer = line.value("optimizer", "adamw");
  run.test_loss = number(line, "test_loss"), run.answers = number(line, "answers");
  run.parameters = needed_number(line, "parameters", path);
  run.flops_per_token = needed_number(line, "flops_per_token", path);
  run.memory = number(line, "memory_bytes"), run.seconds = number(line, "training_seconds");
  if (number(line, "runs_side_by_side") == 1) run.tokens_per_second = number(line, "tokens_per_second");
  run.tokens = static_cast<int64_t>(needed_number(line, "tokens_per_step", path, 1e9) *
                                    needed_number(line, "steps_done", path, 1e9));
  const json& tests = need(line, "evaluations", path);
  take_curve(tests, "step", "test_loss", run.step, run.loss, path);
  take_curve(tests, "answer_step", "answers", run.answer_step, run.share, path);
  if (const std::vector<double> hard = numbers(tests, "hard_answers"); !hard.empty()) run.hard_answers = hard.back();
  return run;
}

// What runs must share to be compared: the data and the flags that touch the numbers, sizes among them.
std::string setting_of(const json& record, const std::string& path) {
  const json& flags = need(record, "flags", path);
  json setting = {{"data_digest", need(record, "data_digest", path)}};
  for (const char* key : {"data", "steps", "batch", "accumulate", "seq", "eval_samples", "answer_samples", "schedule",
                          "warmup", "weight_decay", "beta1", "beta2", "clip", "dtype", "train_samples"})
    if (flags.contains(key)) setting[key] = flags[key];
  const json config = flags.is_object() ? flags.value("config", json()) : json();
  for (const char* key : {"hidden_size", "n_embd", "num_hidden_layers", "n_layer", "intermediate_size", "vocab_size"})
    if (config.is_object() && config.contains(key)) setting[key] = config[key];
  return json_text(setting);
}

// The runs that are done of an architecture with an optimizer, at its rate, but for those that chose that.
RecordedArm arm_of(const json& listed, const std::vector<RecordedRun>& runs, const json& choosing,
                   const std::string& path) {
  const json &name = need(listed, "name", path), &lr = need(listed, "lr", path);
  if (!holds<std::string>(name)) fail(Exit::bad_data, path, ": an architecture's name cannot be ", json_text(name));
  RecordedArm arm{name, lr.is_number() ? lr.get<double>() : NAN, listed.value("lr_at_edge", json()) == true};
  arm.muon_lr = number(listed, "muon_lr");
  for (const json& one : listed.value("rates", json::array()))
    arm.tried.push_back({number(one, std::isfinite(arm.muon_lr) ? "muon_lr" : "lr"), number(one, "test_loss")});
  const std::string arch = listed.value("arch", arm.name), optimizer = listed.value("optimizer", "adamw");
  for (const RecordedRun& run : runs) {
    const bool same_muon = run.muon_lr == arm.muon_lr || !has_muon(optimizer);
    if (run.name != arch || run.optimizer != optimizer || run.lr != arm.lr || !same_muon || json(run.seed) == choosing)
      continue;
    if (run.state == "done") arm.runs[run.seed] = run;
    if (run.state == "failed") arm.lost.push_back(run.seed);
  }
  return arm;
}

}  // namespace

std::string make_record(const std::string& directory) {
  const std::string path = directory + "/results.json";
  const json results = read_json(path);
  std::vector<json> lines, flags, environments;
  for (const json& run : need(results, "runs", path)) {
    if (need(run, "state", path) == "not started") continue;
    flags.push_back(without_paths(need(run, "flags", path)));
    const json& environment = need(run, "environment", path);
    auto known = std::find(environments.begin(), environments.end(), environment);
    if (known == environments.end()) known = environments.insert(known, environment);
    lines.push_back(line_of(run, static_cast<size_t>(known - environments.begin()), path));
  }
  if (lines.empty()) fail(Exit::bad_data, path, ": no run of this comparison has begun");
  const json choosing = results.value("choosing_seed", json());
  json arms = json::array();  // at the rates that compare chose
  for (const json& arm : need(results, "architectures", path)) {
    json listed;
    for (const char* key : {"name", "lr", "lr_at_edge"}) listed[key] = need(arm, key, path);
    for (const char* key : {"arch", "optimizer", "muon_lr"})
      if (arm.contains(key) && arm[key] != arm["name"] && arm[key] != "adamw") listed[key] = arm[key];
    if (const json rates = arm.value("rates", json()); rates.is_array() && rates.size() > 1) listed["rates"] = rates;
    arms.push_back(listed);
  }
  std::string out =
      "{\"format\": \"crossply record\",\n\"data_digest\": " + json_text(need(results, "data_digest", path)) +
      (choosing.is_null() ? "" : ",\n\"choosing_seed\": " + json_text(choosing)) +
      ",\n\"flags\": " + json_text(common_of(flags)) + ",\n\"environments\": " + json_text(json(environments)) +
      ",\n\"architectures\": " + json_text(arms) + ",\n\"runs\": [\n";
  for (size_t i = 0; i < lines.size(); ++i) out += json_text(lines[i]) + (i + 1 < lines.size() ? ",\n" : "\n");
  return out + "]}\n";
}

Record read_record(const std::string& path) {
  const json all = read_json(path);
  if (all.value("format", json()) != "crossply record") fail(Exit::bad_data, path, ": is no record that figures wrote");
  Record record{path, {}, {}};
  for (const json& line : need(all, "runs", path)) record.runs.push_back(run_of(line, path));
  const std::string setting = setting_of(all, path);
  for (const json& listed : need(all, "architectures", path)) {
    RecordedArm arm = arm_of(listed, record.runs, all.value("choosing_seed", json()), path);
    arm.setting = setting;
    if (!arm.runs.empty()) record.arms.push_back(arm);
  }
  return record;
}

const RecordedArm& Record::arm(const std::string& name) const {
  for (const RecordedArm& arm : arms)
    if (arm.name == name) return arm;
  fail(Exit::bad_data, path, ": has no run of ", name, " that is done");
}

ArmLosses losses_of(const RecordedArm& arm) {
  ArmLosses losses{arm.name, {}};
  for (const auto& [seed, run] : arm.runs) losses.seeds.push_back({seed, run.test_loss});
  for (const uint64_t seed : arm.lost) losses.seeds.push_back({seed, NAN});
  return losses;
}

std::vector<double> values_of(const RecordedArm& arm, RunMeasure measure) {
  std::vector<double> values;
  for (const auto& [seed, run] : arm.runs)
    if (const double value = measure(run); std::isfinite(value)) values.push_back(value);
  return values;
}

std::vector<double> differences_of(const RecordedArm& arm, const RecordedArm& baseline, RunMeasure measure) {
  std::vector<double> values;
  for (const auto& [seed, run] : arm.runs) {
    const auto other = baseline.runs.find(seed);
    if (other == baseline.runs.end()) continue;
    if (const double value = measure(run) - measure(other->second); std::isfinite(value)) values.push_back(value);
  }
  return values;
}

}  // namespace crossply::figures
