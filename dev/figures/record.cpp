#include "dev/figures/record.h"

#include <algorithm>
#include <cmath>

#include "data/source.h"
#include "engine/json.h"
#include "models/json_file.h"

namespace crossply {
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

double needed_number(const json& object, const char* key, const std::string& path) {
  const json& value = need(object, key, path);
  if (!holds<double>(value, 0, 1e18)) fail(Exit::bad_data, path, ": \"", key, "\" cannot be ", value.dump());
  return value;
}

std::vector<double> numbers(const json& object, const char* key) {
  std::vector<double> out;
  for (const json& value : object.value(key, json::array()))
    out.push_back(value.is_number() ? value.get<double>() : NAN);
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
  if (const json& error = need(run, "error", path); error != "") line["error"] = error;
  return line;
}

RecordedRun run_of(const json& line, const std::string& path) {
  RecordedRun run;
  const json &name = need(line, "name", path), &seed = need(line, "seed", path);
  if (!holds<std::string>(name) || !holds<uint64_t>(seed))
    fail(Exit::bad_data, path, ": a run's name or seed cannot be ", name.dump(), ", ", seed.dump());
  run.name = name, run.seed = seed;
  run.done = need(line, "state", path) == "done";
  run.lr = needed_number(line, "lr", path);
  run.test_loss = number(line, "test_loss"), run.answers = number(line, "answers");
  run.steps_valid = number(line, "steps_valid");
  run.parameters = needed_number(line, "parameters", path);
  run.flops_per_token = needed_number(line, "flops_per_token", path);
  run.memory = number(line, "memory_bytes"), run.seconds = number(line, "training_seconds");
  if (number(line, "runs_side_by_side") == 1) run.tokens_per_second = number(line, "tokens_per_second");
  run.tokens =
      static_cast<int64_t>(needed_number(line, "tokens_per_step", path) * needed_number(line, "steps_done", path));
  const json& tests = need(line, "evaluations", path);
  run.step = numbers(tests, "step"), run.loss = numbers(tests, "test_loss");
  run.answer_step = numbers(tests, "answer_step"), run.share = numbers(tests, "answers");
  run.valid = numbers(tests, "steps_valid");
  return run;
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
  std::string out = "{\"format\": \"crossply record\",\n\"data_digest\": " + need(results, "data_digest", path).dump() +
                    ",\n\"flags\": " + common_of(flags).dump() + ",\n\"environments\": " + json(environments).dump() +
                    ",\n\"runs\": [\n";
  for (size_t i = 0; i < lines.size(); ++i) out += lines[i].dump() + (i + 1 < lines.size() ? ",\n" : "\n");
  return out + "]}\n";
}

Record read_record(const std::string& path) {
  const json all = read_json(path);
  if (all.value("format", json()) != "crossply record") fail(Exit::bad_data, path, ": is no record that figures wrote");
  Record record;
  const size_t slash = path.rfind('/');
  record.name = path.substr(slash == std::string::npos ? 0 : slash + 1);
  record.name = record.name.substr(0, record.name.rfind(".json"));
  record.flags = need(all, "flags", path);
  for (const json& line : need(all, "runs", path)) record.runs.push_back(run_of(line, path));
  return record;
}

std::vector<RecordedArm> Record::arms() const {
  std::vector<RecordedArm> arms;
  std::map<std::string, std::map<double, RecordedRun>> sweeps;  // of the first seed, by rate
  uint64_t first = UINT64_MAX;
  for (const RecordedRun& run : runs) first = std::min(first, run.seed);
  for (const RecordedRun& run : runs)
    if (run.done && run.seed == first) sweeps[run.name][run.lr] = run;
  for (const RecordedRun& run : runs) {
    const auto& sweep = sweeps[run.name];
    if (sweep.empty()) continue;
    const auto best = std::min_element(sweep.begin(), sweep.end(), [](const auto& a, const auto& b) {
      return a.second.test_loss < b.second.test_loss;
    });
    auto arm = std::find_if(arms.begin(), arms.end(), [&](const RecordedArm& a) { return a.name == run.name; });
    const bool edge = sweep.size() > 1 && (best == sweep.begin() || best == std::prev(sweep.end()));
    if (arm == arms.end()) arm = arms.insert(arm, {run.name, best->first, edge, {}});
    if (run.done && run.lr == arm->lr) arm->runs[run.seed] = run;
  }
  return arms;
}

RecordedArm Record::arm(const std::string& wanted) const {
  for (const RecordedArm& arm : arms())
    if (arm.name == wanted) return arm;
  fail(Exit::bad_data, name, ": has no run of ", wanted, " that is done");
}

std::vector<double> values_of(const RecordedArm& arm, RunMeasure measure) {
  std::vector<double> values;
  for (const auto& [seed, run] : arm.runs)
    if (const double value = measure(run); std::isfinite(value)) values.push_back(value);
  return values;
}

std::vector<double> differences_of(const RecordedArm& arm, const RecordedArm& yardstick, RunMeasure measure) {
  std::vector<double> values;
  for (const auto& [seed, run] : arm.runs) {
    const auto other = yardstick.runs.find(seed);
    if (other == yardstick.runs.end()) continue;
    if (const double value = measure(run) - measure(other->second); std::isfinite(value)) values.push_back(value);
  }
  return values;
}

}  // namespace crossply
