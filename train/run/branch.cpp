#include "train/run/branch.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "models/disk/checkpoint.h"
#include "train/run/metrics.h"
#include "train/run/run_dir.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// What a branch may have of its own, of the settings that decide about numbers.
constexpr const char* of_schedule[] = {"steps", "schedule", "cooldown", "lr_floor"};

// The last step after which the rate has not begun to fall.
int64_t stable_end(const Settings& settings) {
  return settings.steps - (has_cooldown(settings.schedule) ? settings.cooldown : 0);
}

Settings settings_of(const std::string& run) {
  Settings settings;
  take_settings(read_run_settings(run), run + "/flags.json", settings);
  return settings;
}

void check_schedules(const Settings& settings, const Settings& theirs) {
  const std::string& run = settings.branch.run;
  if (!has_stable_phase(theirs.schedule))
    fail(Exit::usage, "--branch ", run, ": with --schedule ", theirs.schedule, " its rate has fallen since the first ",
         "step; start from its weights with --init");
  if (!has_stable_phase(settings.schedule))
    fail(Exit::usage, "--branch goes on with --schedule constant, wsd_linear or wsd_sqrt, not with ",
         settings.schedule);
  if (settings.decay_schedule != "constant")
    fail(Exit::usage, "--branch: with --decay-schedule ", settings.decay_schedule,
         " the decay of the steps so far would have been another one with these --steps");
}

// Where a run was resumed with more steps, its flags do not say which rates it had.
void check_rates(const Settings& settings, int64_t step) {
  const std::string path = settings.branch.run + "/metrics.jsonl";
  if (!path_exists(path)) return;
  each_line(path, [&](const std::string& text, bool) {
    const json line = parse_line(text);
    if (!line.is_object() || !holds<int64_t>(line.value("step", json()), 0) ||
        !holds<double>(line.value("lr", json()), 0))
      return;  // Metrics says what is wrong with it
    const auto k = line["step"].get<int64_t>();
    const auto rate = line["lr"].get<double>();
    if (k > settings.warmup && k <= step && std::abs(rate - settings.lr) > 1e-12 * settings.lr)
      fail(Exit::usage, "--branch ", settings.branch.run, ": its step ", k, " had the rate ", rate, ", not --lr ",
           settings.lr, "; branch from a step before it (--from-step)");
  });
}

}  // namespace

void take_branch_settings(const std::string& run, Settings& settings) {
  if (run.empty()) return;
  if (!take_run_settings("--branch", run, settings)) fail(Exit::no_input, "--branch ", run, ": there is no run in it");
  settings.branch = {};   // where it is a branch itself
  settings.cooldown = 0;  // follows from --steps again
}

int64_t branch_step(const Settings& settings) {
  const std::string& run = settings.branch.run;
  const Settings theirs = settings_of(run);
  check_schedules(settings, theirs);
  std::set<std::string> other(data_settings);
  other.insert({"teacher", "init"});
  other.insert(std::begin(of_schedule), std::end(of_schedule));
  refuse_other_settings(trajectory(theirs), settings, run + "/flags.json", other);
  refuse_other_config(theirs.config, settings.config, run + "/flags.json", "--branch");

  const std::vector<int64_t> saved = checkpoint_steps(run);
  const int64_t asked = settings.branch.step, mine = stable_end(settings), end = std::min(mine, stable_end(theirs));
  if (asked > mine)
    fail(Exit::usage, "--from-step ", asked, ": with --steps ", settings.steps, " and --cooldown ", settings.cooldown,
         " the rate falls after step ", mine, "; branch from there or before");
  if (asked > end)
    fail(Exit::usage, "--from-step ", asked, ": the rate of ", run, " falls after step ", end,
         "; branch from there or before");
  for (const int64_t step : saved) {
    if (asked > 0 ? step != asked : step > end) continue;
    if (asked == 0 && !is_valid_checkpoint(step_dir(run, step), nullptr)) continue;
    check_rates(settings, step);
    return step;
  }
  fail(Exit::no_input, "--branch ", run, ": it has no checkpoint ",
       asked > 0 ? str("of step ", asked) : str("up to step ", end, ", where a rate begins to fall"),
       "; it has those of step ", list_of(saved), " (--save-at keeps more)");
}

std::string make_branch(const Settings& settings) {
  const ModelDir from(step_dir(settings.branch.run, settings.branch.step));  // checked, and held
  write_run_settings(settings);
  std::error_code error;
  const auto copy = [&](const std::string& file, const std::string& to) {
    fs::copy_file(file, to, fs::copy_options::overwrite_existing, error);
    if (error) fail_io("copy " + file + " to", to, error.value());
  };
  const std::string metrics = settings.branch.run + "/metrics.jsonl";
  if (path_exists(metrics)) copy(metrics, settings.out + "/metrics.jsonl");  // Metrics leaves out the later steps

  const std::string to = step_dir(settings.out, settings.branch.step), state_name = "train_state.json";
  CheckpointWriter writer;
  writer.begin(to);
  for (const auto& entry : fs::directory_iterator(from.path())) {
    const std::string name = entry.path().filename().string();
    if (name != "manifest.json" && name != state_name) copy(entry.path().string(), writer.path(name));
  }
  json state = read_json(from.path() + "/" + state_name);
  const json own = trajectory(settings);
  for (const char* key : of_schedule) {
    state["trajectory"].erase(key);
    if (own.contains(key)) state["trajectory"][key] = own[key];
  }
  write_file_atomically(writer.path(state_name), json_text(state, 2) + "\n");
  writer.commit();
  return to;
}

}  // namespace crossply
