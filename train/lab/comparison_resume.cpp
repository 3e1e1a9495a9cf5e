// A comparison goes on: what results.json and records say of its runs, whatever is in them.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/bounds.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/leftovers.h"
#include "engine/io/printable.h"
#include "models/disk/config_json.h"
#include "train/lab/comparison.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The inverse, of what may be anything: for a run whose metrics.jsonl somebody removed.
void take_evaluations(RunCurves& curves, const json& saved) {
  const std::pair<const char*, std::vector<double>*> lists[] = {{"step", &curves.test_step},
                                                                {"test_loss", &curves.test_loss},
                                                                {"answer_step", &curves.answer_step},
                                                                {"answers", &curves.answers},
                                                                {"steps_valid", &curves.steps_valid}};
  for (const auto& [key, list] : lists) {
    if (!saved.is_object() || !saved.contains(key) || !saved[key].is_array()) return;
    if (!std::all_of(saved[key].begin(), saved[key].end(), [](const json& value) { return holds<double>(value); }))
      return;
  }
  if (saved["step"].size() != saved["test_loss"].size() || saved["answer_step"].size() != saved["answers"].size() ||
      saved["answers"].size() != saved["steps_valid"].size())
    return;
  for (const auto& [key, list] : lists) saved[key].get_to(*list);
  const json hard = saved.value("hard_answers", json());  // null where the task has none
  if (!hard.is_array() || hard.size() != curves.answers.size()) return;
  for (const json& share : hard) curves.hard_answers.push_back(share.is_number() ? share.get<double>() : NAN);
}

// Calls read(). If it finds that results.json is damaged, the message also says what to do.
template <class F>
auto with_advice(const std::string& path, F&& read) {
  try {
    return read();
  } catch (const Error& error) {
    if (error.code != Exit::bad_data || !std::string(error.what()).starts_with(path)) throw;
    fail(error.code, error.what(), "; restore results.json from a copy, or start a new comparison with another --out");
  }
}

// Throws Exit::bad_data unless the name is that of an architecture, as --arch takes it.
void check_name(const std::string& name, const std::string& path) {
  try {
    parse_arch(name);
  } catch (const Error& error) {
    fail(Exit::bad_data, path, ": the name of a run is wrong: ", error.what());
  }
}

// results.json in the directory of a comparison: an object with two arrays of runs. Each run has a name, those in
// "runs" that of an architecture and flags. Null if there is none. Throws Exit::bad_data for other values.
json read_results(const std::string& path) {
  if (!path_exists(path)) return {};
  json all = read_json(path);
  if (!all.contains("runs") || !all["runs"].is_array() || all["runs"].empty())
    fail(Exit::bad_data, path, ": \"runs\" is missing");
  if (!all.contains("others")) all["others"] = json::array();
  if (!all["others"].is_array()) fail(Exit::bad_data, path, ": \"others\" is not a list");
  for (const char* list : {"runs", "others"})
    for (const json& run : all[list])
      if (!run.is_object() || !run.contains("name") || !run["name"].is_string())
        fail(Exit::bad_data, path, ": a run has no \"name\"");
  for (const json& run : all["runs"]) {
    check_name(run["name"], path);
    if (!run.contains("flags") || !run["flags"].is_object())
      fail(Exit::bad_data, path, ": the run ", run["name"].get<std::string>(), " has no \"flags\"");
  }
  return all;
}

// Of a run that has ended. Throws Exit::bad_data for what is none, or of other data.
json read_record(const Comparison& comparison, const std::string& path) {
  json record = read_json(path);
  const auto text = [&](const char* key) { return text_at(record, key); };
  if (text("format") != "crossply run" || !record.contains("flags") || !record["flags"].is_object() ||
      text("directory") + ".json" != fs::path(path).filename())
    fail(Exit::bad_data, path, ": this is no record of a run; remove it, and the run is trained again");
  check_name(text("name"), path);
  if (const std::string now = comparison.data_digest; !now.empty() && text("data_digest") != now)
    fail(Exit::bad_data, path, ": this run was trained on other data than ", comparison.data,
         "; put that back, or start anew with another --out");
  return record;
}

std::vector<json> read_records(const Comparison& comparison, const std::string& directory) {
  std::vector<json> records;
  for (const std::string& path : record_paths(directory)) records.push_back(read_record(comparison, path));
  return records;
}

Exit exit_code_of(const json& run, const std::string& path) {
  const json code = run.value("exit_code", json());
  for (const Exit known : {Exit::done, Exit::usage, Exit::bad_data, Exit::no_input, Exit::internal, Exit::device,
                           Exit::io, Exit::stopped, Exit::not_finite})
    if (code == static_cast<int>(known)) return known;
  fail(Exit::bad_data, path, ": \"exit_code\" cannot be ", json_text(code));
}

// Whether a saved run is this one.
bool is_same(const json& saved, const ComparedRun& run) {
  if (saved["name"] != run.choice.text || !saved.contains("flags")) return false;
  const json& flags = saved["flags"];
  const std::string& optimizer = run.plan.optimizer;
  return flags.is_object() && flags.value("lr", json()) == json(run.plan.lr) &&
         flags.value("seed", json()) == json(run.plan.seed) && flags.value("optimizer", json("adamw")) == optimizer &&
         (!has_muon(optimizer) || flags.value("muon_lr", json()) == json(run.plan.muon.lr));
}

// A name and nothing more: what is read here is written to.
std::string directory_of(const json& saved, const ComparedRun& run, const std::string& path) {
  const json directory = saved.value("directory", json(run.choice.file_name()));
  const std::string name = directory.is_string() ? directory.get<std::string>() : "";
  if (name.empty() || name.starts_with(".") || name.find('/') != std::string::npos)
    fail(Exit::bad_data, path, ": \"directory\" cannot be ", json_text(directory));
  return name;
}

void refuse_other_run(const json& saved, const ComparedRun& run, const std::string& where, const std::string& path,
                      const std::set<std::string>& moved = {}) {
  const json flags = saved.value("flags", json());
  refuse_other_settings(flags, run.plan, where, moved);
  refuse_other_config(parse_config(flags.value("config", json()), path + ": config"), run.plan.config, where);
}

// Test losses of runs that stand beside each other are of the same sequences.
void refuse_other_tests(const json& flags, const ComparedRun& run, const std::string& where) {
  if (const json was = flags.value("eval_rule", json("first")); was != json(run.plan.eval_rule))
    fail(Exit::usage, "--resume: the run in ", where, " is done and was tested by the rule ", json_text(was),
         ", the others would be by \"", run.plan.eval_rule, "\"; start a new comparison with another --out");
  for (const auto& [key, now] :
       {std::pair{"eval_samples", run.plan.eval_samples}, std::pair{"answer_samples", run.plan.answer_samples}})
    if (const json was = flags.value(key, json(now)); was != json(now))
      fail(Exit::usage, "--resume: the run in ", where, " is done and was tested with ",
           std::string(key) == "eval_samples" ? "--eval-samples " : "--answer-samples ", json_text(was),
           ", the flags say ", now, "; resume with ", json_text(was), ", so that the others can be compared with it");
}

void refuse_other_data(const Comparison& comparison, const json& old) {
  const std::string now = comparison.data_digest;
  if (const json was = old.value("data_digest", json()); !now.empty() && was.is_string() && was != json(now))
    fail(Exit::bad_data, "--resume: ", comparison.data, " is not the data that the comparison in ", comparison.out,
         " was begun on; its size or contents changed. Put it back, or start anew with another --out");
}

// The runs of one architecture: none in common means that a flag was mistyped, or is another experiment's.
void refuse_other_experiment(const Comparison& comparison, const json& old, const std::string& path) {
  for (const json& saved : old["runs"]) {
    const ComparedRun* of_this_name = nullptr;
    bool common = false;
    for (const ComparedRun& run : comparison.runs) {
      if (saved["name"] != run.choice.text || !run.rated) continue;
      if (of_this_name == nullptr) of_this_name = &run;
      common |= std::any_of(old["runs"].begin(), old["runs"].end(), [&](const json& one) { return is_same(one, run); });
    }
    if (of_this_name != nullptr && !common)
      refuse_other_run(saved, *of_this_name, comparison.out + "/" + directory_of(saved, *of_this_name, path), path);
  }
}

// A list of numbers of results.json; where it has none, that of its runs' flags, each once.
template <class T>
std::vector<T> list_of(const json& all, const char* key, const char* flag, double most, const std::string& path) {
  const bool listed = all.contains(key);
  if (listed && (!all[key].is_array() || all[key].empty())) fail(Exit::bad_data, path, ": \"", key, "\" is no list");
  std::vector<T> out;
  for (const json& item : listed ? all[key] : all["runs"]) {
    const json value = listed ? item : item["flags"].value(flag, json());
    if (!holds<T>(value, 0, most)) fail(Exit::bad_data, path, ": \"", flag, "\" cannot be ", json_text(value));
    if (std::find(out.begin(), out.end(), value.get<T>()) == out.end()) out.push_back(value.get<T>());
  }
  return out;
}

// What a record has beside that, where the files of its run are gone.
void take_what_files_had(ComparedRun& run, const json& saved) {
  take_evaluations(run.result.curves, saved.value("evaluations", json()));
  const json seconds = saved.value("training_seconds", json()), environment = saved.value("environment", json());
  if (seconds.is_number()) run.result.curves.seconds = {seconds.get<double>()};
  if (environment.is_object()) run.environment = json_text(environment);
  run.first_losses = recorded_losses(saved);
}

}  // namespace

void take_up(ComparedRun& run, const json& saved, const std::string& out, const std::string& path) {
  const auto number = [&](const char* key, double otherwise) {
    const auto found = saved.find(key);
    return found != saved.end() && found->is_number() ? found->get<double>() : otherwise;
  };
  for (const RunState state : {RunState::done, RunState::stopped, RunState::failed})
    if (saved.value("state", json()) == name_of(state)) run.state = state;
  if (run.state == RunState::waiting || run.state == RunState::running) return;
  TrainResult& r = run.result;
  r.code = exit_code_of(saved, path);
  r.tokens_per_second = number("tokens_per_second", 0);
  r.scored_tokens = static_cast<int64_t>(number("scored_tokens", -1)), r.epochs = number("epochs", NAN);
  r.peak = number("peak_flops_per_second", 0);
  if (const json memory = saved.value("memory_bytes", json()); memory.is_number_unsigned()) r.memory = memory;
  r.train_loss = number("train_loss", NAN);
  r.test_loss = number("test_loss", NAN);
  r.answers = number("answers", -1);
  r.steps_valid = number("steps_valid", -1);
  r.curves = read_curves(out + "/" + run_directory(run) + "/metrics.jsonl");
  if (r.curves.step.empty()) take_what_files_had(run, saved);
  run.side_by_side = static_cast<int64_t>(std::clamp(number("runs_side_by_side", 1), 1.0, 1e6));
  if (saved.contains("error") && saved["error"].is_string()) run.error = saved["error"];
  if (saved.contains("pairs") && saved["pairs"].is_object()) run.pairs = json_text(saved["pairs"]);
  if (is_done(run) && number("steps_done", 0) < static_cast<double>(run.plan.steps)) run.state = RunState::stopped;
}

namespace {

std::vector<std::string> optimizers_in(const json& list, const std::string& path) {
  const bool known = list.is_array() && !list.empty() && std::all_of(list.begin(), list.end(), [](const json& name) {
                       return std::find(optimizers.begin(), optimizers.end(), name) != optimizers.end();
                     });
  if (!known) fail(Exit::bad_data, path, ": \"optimizers\" cannot be ", json_text(list));
  return list;
}

void take_rules(const json& old, const std::string& path, Experiment& experiment) {
  Rules& rules = experiment.rules = {};
  if (old.value("backbone_seeds", json::array()) != json::array())
    rules.backbone_seeds = list_of<uint64_t>(old, "backbone_seeds", "backbone_seeds", max_number, path);
  const auto truth = [&](const char* key) {
    const json value = old.value(key, json(false));
    if (!value.is_boolean()) fail(Exit::bad_data, path, ": \"", key, "\" cannot be ", json_text(value));
    return value.get<bool>();
  };
  rules.hold_decay = truth("hold_decay"), rules.more_seeds = truth("more_seeds");
  rules.every_rate = truth("every_rate");
  const json pairs = old.value("pairs", json("")), decay = old.value("weight_decay", json());
  if (!pairs.is_string()) fail(Exit::bad_data, path, ": \"pairs\" cannot be ", json_text(pairs));
  rules.pairs = pairs;
  if (rules.hold_decay && !holds<double>(decay, 0, max_number))
    fail(Exit::bad_data, path, ": \"weight_decay\" cannot be ", json_text(decay));
  if (rules.hold_decay) experiment.settings.adamw.weight_decay = decay;
}

void take_experiment(const json& old, const std::string& path, Experiment& experiment) {
  std::vector<std::string> names;
  experiment.archs.clear();
  for (const json& run : old["runs"]) {
    const std::string name = run["name"];
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    names.push_back(name);
    experiment.archs += (experiment.archs.empty() ? "" : ",") + name;
  }
  // A GPT-2 among LLaMAs does not have all their sizes, and a run of AdamW not all settings of Muon's.
  const auto says = [](const json& run) {
    const json config = run["flags"].value("config", json());
    return (config.is_object() && config.contains("hidden_size") ? 2 : 0) + run["flags"].contains("muon_lr");
  };
  const json& runs = old["runs"];
  const auto most =
      std::max_element(runs.begin(), runs.end(), [&](const json& a, const json& b) { return says(a) < says(b); });
  Settings& settings = experiment.settings;
  take_settings((*most)["flags"], path + ": flags", settings);
  settings.config.arch = "llama";  // what the first one has of its own is in its name
  settings.config.options.clear();
  for (Config usual; const GeneralOption& option : general_options())
    std::visit([&]<class T>(T* member) { *member = *std::get<T*>(option.member(usual)); },
               option.member(settings.config));
  settings.data.test_part = "all", settings.freeze_routers = false;  // what each run has is decided anew
  experiment.rates = list_of<double>(old, "rates", "lr", max_number, path);
  experiment.muon_rates.clear();
  if (has_muon(settings.optimizer) && old.value("muon_rates", json()) != json::array())
    experiment.muon_rates = list_of<double>(old, "muon_rates", "muon_lr", max_number, path);
  experiment.seeds = list_of<uint64_t>(old, "seeds", "seed", max_number, path);
  experiment.choosing_seed.reset();
  if (const json seed = old.value("choosing_seed", json()); !seed.is_null()) {
    if (!holds<uint64_t>(seed)) fail(Exit::bad_data, path, ": \"choosing_seed\" cannot be ", json_text(seed));
    experiment.choosing_seed = seed.get<uint64_t>();
  } else if (experiment.rates.size() > 1 && old.value("every_rate", json()) != true) {
    fail(Exit::bad_data, path,
         ": \"choosing_seed\" is null, as in programs in which the first seed chose among rates; ",
         "its runs cannot go on by today's rules");
  }
  take_rules(old, path, experiment);
  experiment.optimizers = {settings.optimizer};
  if (old.contains("optimizers")) experiment.optimizers = optimizers_in(old["optimizers"], path);
}

void take_run(ComparedRun& run, const json& saved, const std::string& out, const std::string& path) {
  run.directory = directory_of(saved, run, path);
  run.plan.out = out + "/" + run.directory;
  const json digest = saved.value("data_digest", json());  // of a record alone, where read_records() has compared it
  const bool recorded = digest.is_string();
  refuse_other_run(saved, run, run.plan.out, path, recorded && digest != "" ? data_settings : std::set<std::string>());
  take_up(run, saved, out, path);
  run.result.run_dir = run.plan.out;
  // What somebody removed is trained again, but for what a record has.
  if (is_done(run) && !recorded && !path_exists(run.plan.out)) run.state = RunState::waiting;
  if (is_done(run)) refuse_other_tests(saved["flags"], run, run.plan.out);
}

// A rate that was found is tried already, and counts beside those that are asked for now, where it is on an axis of its
// arm.
bool add_found_rate(Comparison& comparison, const json& saved) {
  const json flags = saved.value("flags", json());
  if (saved.value("found", json()) != true || !flags.is_object() || !comparison.choosing_seed ||
      flags.value("seed", json()) != *comparison.choosing_seed)
    return false;
  for (const Arm& arm : arms_of(comparison)) {
    const bool muon = has_muon(arm.optimizer);
    const json lr = flags.value("lr", json()), muon_lr = flags.value("muon_lr", json(0));
    if (arm.axes.empty() || saved["name"] != arm.arch || flags.value("optimizer", json("adamw")) != arm.optimizer ||
        !holds<double>(lr, 0, max_number) || !holds<double>(muon_lr, 0, max_number))
      continue;
    const TrainPlan& first = comparison.runs[arm.sweep[0]].plan;
    const bool on_axis = !muon || lr == json(first.lr) || muon_lr == json(arm.axes[0].choice.best);
    if (!on_axis) return false;
    add_try(comparison, arm, lr.get<double>(), muon_lr.get<double>());
    name_directories(comparison);
    return true;
  }
  return false;
}

// What a run may be taken up from, of the records and of results.json; the former first.
std::vector<json> saved_runs(const std::vector<json>& records, const json& old) {
  std::vector<json> all = records;
  std::set<json> recorded;
  for (const json& record : records) recorded.insert(record["directory"]);
  for (const char* list : {"runs", "others"})
    for (const json& saved : old.is_null() ? json::array() : old[list])
      if (saved.value("state", json()) != name_of(RunState::waiting) &&
          !recorded.contains(saved.value("directory", json())))
        all.push_back(saved);
  return all;
}

// Of a directory without results.json: anything but runs, and records, is somebody else's.
void refuse_other_files(const Comparison& comparison) {
  const std::string& out = comparison.out;
  const bool has_run = std::any_of(comparison.runs.begin(), comparison.runs.end(),
                                   [&](const ComparedRun& run) { return path_exists(out + "/" + run_directory(run)); });
  std::error_code ignored;
  const fs::directory_iterator files(out, ignored);
  const bool has_files =
      std::any_of(begin(files), end(files), [](const auto& file) { return file.path().filename() != "records"; });
  if (!has_run && has_files)
    fail(Exit::usage, "--resume: ", out, " holds files, but no comparison; choose another --out");
}

void take_results(Comparison& comparison, const json& old, const std::string& path) {
  if (old.is_null()) {
    refuse_other_files(comparison);
  } else {
    refuse_other_experiment(comparison, old, path);
    refuse_other_data(comparison, old);
  }
  for (const json& saved : saved_runs(read_records(comparison, comparison.out + "/records"), old))
    comparison.others.push_back(json_text(saved));
  extend(comparison);  // takes them up, and what they say is needed
}

}  // namespace

bool take_others(Comparison& comparison) {
  const std::string path = comparison.out + "/results.json";
  bool any = false;
  for (size_t i = 0; i < comparison.others.size();) {
    const json saved = known_json(comparison.others[i]);
    const auto run = std::find_if(comparison.runs.begin(), comparison.runs.end(),
                                  [&](const ComparedRun& one) { return one.rated && is_same(saved, one); });
    if (run != comparison.runs.end()) {
      take_run(*run, saved, comparison.out, path);
      comparison.others.erase(comparison.others.begin() + static_cast<std::ptrdiff_t>(i));
    } else if (!add_found_rate(comparison, saved)) {  // where it does, the run is there the next time
      ++i;
      continue;
    }
    any = true;
  }
  return any;
}

bool take_new_records(Comparison& comparison) {
  bool any = false;
  for (const ComparedRun& run : comparison.runs) {
    const bool here = run.state == RunState::running && !run.elsewhere;
    if (!run.rated || here || !is_unfinished(run)) continue;
    const std::string path = record_path(comparison, run);
    if (!path_exists(path)) continue;
    const json record = read_record(comparison, path);
    if (record.value("state", json()) == name_of(RunState::done) &&
        record.value("steps_done", json(0)) < run.plan.steps)
      continue;  // of fewer steps: it goes on
    comparison.others.push_back(json_text(record)), any = true;
  }
  if (any) extend(comparison);
  return any;
}

void take_records(Comparison& comparison, const std::string& directory) {
  std::set<std::string> known;  // by directory
  for (const std::string& other : comparison.others) known.insert(text_at(known_json(other), "directory"));
  for (const json& record : read_records(comparison, directory)) {
    const bool done = std::ranges::any_of(comparison.runs, [&](const ComparedRun& run) {
      return run.rated && !is_unfinished(run) && is_same(record, run);
    });
    if (!done && !known.contains(text_at(record, "directory"))) comparison.others.push_back(json_text(record));
  }
  extend(comparison);
}

bool take_comparison_settings(const std::string& out, Experiment& experiment) {
  const std::string path = out + "/results.json";
  return with_advice(path, [&] {
    const json old = read_results(path);
    experiment.begun = !old.is_null();
    if (experiment.begun) take_experiment(old, path, experiment);
    return experiment.begun;
  });
}

void take_up(Comparison& comparison) {
  const std::string &out = comparison.out, path = out + "/results.json";
  for (const char* file : {"/compare.svg", "/compare-dark.svg", "/results.md", "/results.json"})
    remove_leftovers_of(out + file);
  with_advice(path, [&] { take_results(comparison, read_results(path), path); });
}

}  // namespace crossply
