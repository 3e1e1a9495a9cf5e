// What a trainer writes into a checkpoint, and how it continues from one.
#include <algorithm>

#include "cli/format.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "models/disk/config_json.h"
#include "models/disk/model_dir.h"
#include "train/step/moments.h"
#include "train/step/saved_model.h"
#include "train/step/trainer.h"

namespace crossply {

using nlohmann::json;

namespace {

// A count, or a time, in train_state.json.
template <class T>
T state_number(const json& state, const char* key, const std::string& path) {
  const json number = state.value(key, json());
  if (!holds<T>(number, 0))
    fail(Exit::bad_data, path, ": \"", key, "\" is ", json_text(number), ", not a ",
         std::is_integral_v<T> ? "count" : "time");
  return number.get<T>();
}

// One half of a checkpoint's Arithmetic.
std::map<std::string, std::string> texts(const json& record, const char* key, const std::string& path) {
  const json part = record.is_object() ? record.value(key, json()) : json();
  if (!part.is_object() || !std::all_of(part.begin(), part.end(), [](const json& text) { return text.is_string(); }))
    fail(Exit::bad_data, path, ": \"", key, "\" of \"device\" must be an object of texts; ",
         "resume from another checkpoint");
  return part.get<std::map<std::string, std::string>>();
}

// "cuBLASLt was 130002, is 130100"; "" for the same versions.
std::string differences(std::map<std::string, std::string> was, std::map<std::string, std::string> is) {
  std::string list;
  for (const auto& [of, version] : is) was.insert({of, "unknown"});
  for (const auto& [of, version] : was)
    if (const std::string now = is.contains(of) ? is[of] : "unknown"; version != now)
      list += str(list.empty() ? "" : "; ", of, " was ", version, ", is ", now);
  return printable(list);
}

// The device goes on with what a checkpoint's train_state.json says of it. Returns what differs: where it says nothing,
// being of a CPU, or older, all that this device knows of itself.
std::string adopt_arithmetic(Device& device, const json& state, bool other_gpu, const std::string& path) {
  std::map<std::string, std::string> versions, choices;
  if (state.contains("device"))
    versions = texts(state["device"], "versions", path), choices = texts(state["device"], "choices", path);
  const std::string different = differences(versions, device.arithmetic().versions);
  if (different.empty()) device.adopt(choices, path);
  else if (!other_gpu)
    fail(Exit::device, "--resume: ", path, " is not of this machine: ", different, ". Last digits would differ; ",
         "resume it where it ran, or add --other-gpu to go on without equal bits");
  return different;
}

}  // namespace

void Trainer::save(const std::string& dir, const Tokenizer& tokenizer, const std::function<void()>& may_publish) {
  ProcessGroup& group = *group_;
  gather_values();
  CheckpointWriter writer;
  if (group.world.leads()) writer.begin(dir);
  const std::string building = group.share(group.world.leads() ? writer.building() : "");
  if (!group.world.leads()) writer.join(dir, building);
  std::vector<std::string> written = write_model(writer, plan_, group.world, params_, tokenizer);
  written.push_back(save_moments(writer, params_, buckets_, optimizer_));
  if (group.world.leads()) {
    json state = {{"step", optimizer_.step},
                  {"position", loader_.position()},
                  {"seconds", seconds},
                  {"scored_tokens", scored_tokens < 0 ? json() : json(scored_tokens)},
                  {"trajectory", trajectory(plan_)},
                  {"world_size", group.world.size}};
    inputs_.save(state);
    for (const auto& attachment : attachments_) attachment->save(state);
    if (const Arithmetic a = device_->arithmetic(); !a.versions.empty())
      state["device"] = {{"versions", a.versions}, {"choices", a.choices}};
    write_file_atomically(writer.path("train_state.json"), json_text(state, 2) + "\n");
  }
  const std::vector<std::string> records = group.collect(group.world.leads() ? "" : writer.record(written));
  if (group.world.leads()) writer.commit({records.begin() + 1, records.end()}, may_publish);
  group.barrier("checkpoint");
  has_checkpoint_ = true;
}

void Trainer::restore(const std::string& dir) {
  refuse_other_config(load_config(dir + "/config.json"), plan_.config, dir + "/config.json");
  const std::string path = dir + "/train_state.json";
  const json state = read_json(path), trajectory = state.value("trajectory", json());
  refuse_other_settings(trajectory, plan_, dir, inputs_.moved(state));
  inputs_.refuse_others(state, plan_, dir);
  const auto step = state_number<int64_t>(state, "step", path),
             position = state_number<int64_t>(state, "position", path);
  const int64_t samples = sequences_per_step();
  if (step > plan_.steps || position % samples != 0 || position / samples != step)
    fail(Exit::bad_data, path, ": \"step\" ", step, " and \"position\" ", position, " do not go together, at ", samples,
         " samples a step and ", plan_.steps, " steps");
  seconds = state_number<double>(state, "seconds", path);
  const bool counted = state.contains("scored_tokens") && !state["scored_tokens"].is_null();
  scored_tokens = counted ? state_number<int64_t>(state, "scored_tokens", path) : -1;
  before_.ranks = state.contains("world_size") ? state_number<int64_t>(state, "world_size", path) : 1;
  before_.device = adopt_arithmetic(*device_, state, plan_.other_gpu, path);
  load_weights(dir, plan_.config, params_);
  optimizer_.take_masters();
  refresh_bf16_copy(params_);
  load_moments(dir, params_, buckets_, optimizer_);
  optimizer_.step = step;
  for (const auto& attachment : attachments_) attachment->restore(state, path);
  loader_.seek(position);
  has_checkpoint_ = true;
  before_.steps = trajectory["steps"].get<int64_t>();
}

std::vector<std::string> Trainer::changes() const {
  std::vector<std::string> lines;
  if (before_.steps > 0 && before_.steps != plan_.steps) {
    Schedule shorter = schedule_;
    shorter.total = before_.steps;
    const int64_t stable = before_.steps - schedule_.cooldown;  // of the run as it was planned
    const double lr = plan_.lr * schedule_.at(steps_done()), old = plan_.lr * shorter.at(steps_done());
    lines.push_back(str("--steps grows from ", before_.steps, " to ", plan_.steps, ": from here on the ",
                        plan_.schedule, " schedule is that of ", plan_.steps, " steps; the next rate is ",
                        format_number("%.3g", lr),
                        lr == old ? ", as before" : format_number(", it would have been %.3g", old)));
    if (has_cooldown(plan_.schedule) && steps_done() > stable)
      lines.push_back(str("warning: the rate rises again out of a cool-down; a branch of this run after step ", stable,
                          " has none (--branch ", shell_word(plan_.out), " --from-step ", stable, " --out NEW)"));
  }
  if (!before_.device.empty()) lines.push_back("--other-gpu: " + before_.device + "; last digits differ from here on");
  const int64_t ranks = group_->world.size;
  if (before_.ranks > 0 && before_.ranks != ranks)
    lines.push_back(str("resumed by ", ranks, ranks == 1 ? " rank" : " ranks", ", saved by ", before_.ranks,
                        ": the steps stay what they are",
                        plan_.sum == "tree" ? "" : ", but for last digits (--sum " + plan_.sum + ")"));
  return lines;
}

}  // namespace crossply
