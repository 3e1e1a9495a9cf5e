#include "train/lab/sweep_tables.h"

#include <sys/file.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/program.h"
#include "data/source.h"
#include "engine/io/file.h"
#include "engine/io/json_file.h"
#include "train/lab/experiment.h"

namespace crossply {
namespace {

using nlohmann::json;

// What a table cannot say.
constexpr const char* flags_of_sweep[] = {"--out",  "--resume", "--dry-run", "--time",
                                          "--jobs", "--seed",   "--profile", "--every-rate"};

Experiment read_table(const PlannedTable& planned) {
  Experiment experiment;
  Settings& settings = experiment.settings;
  for (const std::string& flag : planned.flags)
    if (std::ranges::find(flags_of_sweep, flag) != std::end(flags_of_sweep))
      fail(Exit::usage, planned.where, ": ", flag.substr(2), " is not for a plan");
  if (planned.flag("--data").empty()) fail(Exit::usage, planned.where, ": the table has no data");
  if (planned.flag("--backbone") == "gpt2") use_gpt2(settings.config);
  const std::string preset = planned.flag("--preset");
  if (!preset.empty()) apply_preset(preset, settings);
  CommandLine app("", "sweep");
  parse_words(
      app, [&] { add_experiment_flags(app, experiment); }, planned.flags, planned.where);
  complete_experiment(app, experiment, !preset.empty());
  return experiment;
}

// A record of this data, of the table itself if it has one, else of another table of the sweep; null: there is none.
json record_of(const std::string& sweep, const std::string& out, const std::string& data) {
  namespace fs = std::filesystem;
  std::vector<std::string> tables = {out};
  std::error_code error;
  for (fs::directory_iterator it(sweep, error), end; !error && it != end; it.increment(error))
    tables.push_back(it->path().string());
  for (const std::string& table : tables) {
    const std::vector<std::string> records = record_paths(table + "/records");
    if (records.empty()) continue;
    const json record = read_json(records[0]), flags = record.value("flags", json());  // a table has one text
    if (flags.is_object() && flags.value("data", json()) == json(short_name(data))) return record;
  }
  return {};
}

// As plan_comparison() does, but for what the data would say of itself, which a record of it knows.
Comparison plan_without_data(Experiment experiment, const json& record) {
  Settings& settings = experiment.settings;
  Settings recorded;
  take_settings(record["flags"], settings.out + ": the flags of a record", recorded);
  settings.config.vocab_size = recorded.config.vocab_size, settings.config.token_ids = recorded.config.token_ids;
  const LeftOpen open = std::exchange(settings.open, {});
  if (open.seq) settings.data.seq_len = recorded.data.seq_len;
  if (open.steps) settings.steps = recorded.steps;
  if (open.lr) settings.lr = recorded.lr;
  if (open.warmup) settings.warmup = recorded.warmup;
  const std::string data = std::exchange(settings.data.spec, "");
  settings.data.val_spec.clear(), settings.data.tokenizer.clear();
  settings.dry_run = true;
  experiment.rules.pairs.clear();
  Comparison comparison = plan_comparison(experiment, {});
  comparison.data = data;
  if (const json digest = record.value("data_digest", json()); digest.is_string()) comparison.data_digest = digest;
  return comparison;
}

Comparison plan_table(Experiment& experiment, const SweepCall& call) {
  const Experiment given = experiment;
  try {
    return plan_comparison(experiment, [&](const TrainPlan&) { return given.settings.out; });
  } catch (const Error& error) {
    const bool gone = call.report && error.code == Exit::no_input;
    const json record = gone ? record_of(call.out, given.settings.out, given.settings.data.spec) : json();
    if (record.is_null()) throw;
    return plan_without_data(given, record);
  }
}

// All of a sweep's runs go on where they are.
void let_resume(Comparison& comparison) {
  for (ComparedRun& run : comparison.runs) run.plan.resume = true;
}

// The finished cells of another place, unless they are of other data. Returns what a user should know.
std::string take_stored(Comparison& comparison, const std::string& records, const PlannedTable& planned) {
  if (!path_exists(records)) fail(Exit::no_input, "--records: there is no ", records);
  const std::string directory = records_in(records, planned);
  if (!path_exists(directory))
    return str("there is no ", directory, "; so the first architecture is trained here, too");
  try {
    take_records(comparison, directory);
  } catch (const Error& error) {
    if (error.code != Exit::bad_data) throw;
    return str(error.what(), "; so the first architecture is trained here, too");
  }
  return "";
}

}  // namespace

static SweepTable open_this(const PlannedTable& planned, const SweepCall& call) {
  Experiment experiment = read_table(planned);
  const std::string out = call.out + "/" + planned.name;
  experiment.settings.out = out;
  std::set<std::string> only;
  for (const ArchChoice& choice : call.arch.empty() ? std::vector<ArchChoice>() : parse_arch_list(call.arch)) {
    only.insert(choice.text);
    const std::vector<ArchChoice> planned_archs = parse_arch_list(experiment.archs);
    const bool known = std::ranges::any_of(planned_archs, [&](const auto& one) { return one.text == choice.text; });
    if (!known && planned.of.empty()) experiment.archs += "," + choice.text;
  }
  SweepTable table{planned, plan_table(experiment, call)};
  Comparison& comparison = table.comparison;
  comparison.part = call.part, comparison.only = only;
  if (!call.dry) comparison.claims = std::make_shared<Claims>(call.out + "/claims/" + planned.name);
  let_resume(comparison);
  if (path_exists(out)) take_up(comparison);
  table.notes = experiment.notes;
  table.notes.insert(table.notes.end(), {parameter_warning(comparison), comparison.data_note});
  if (!call.records.empty()) table.notes.push_back(take_stored(comparison, call.records, planned));
  extend(comparison);
  return table;
}

SweepTable open_table(const PlannedTable& planned, const SweepCall& call) {
  try {
    return open_this(planned, call);
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.starts_with(planned.where)) throw;
    fail(error.code, planned.where, ": ", planned.name, ": ", text);
  }
}

std::string records_in(const std::string& sweep, const PlannedTable& planned) {
  const std::string directory = sweep + "/" + planned.name;
  return path_exists(directory + "/records") ? directory + "/records" : directory;
}

Descriptor hold_table(const std::string& out, const PlannedTable& planned) {
  const std::string path = out + "/" + planned.name;
  make_directories(path);
  Descriptor lock;
  if (!lock_directory(path, LOCK_SH, &lock))
    fail(Exit::usage, path, " is in use by a comparison; wait for it or choose another --out");
  return lock;
}

std::vector<Budget> budgets_of(const std::vector<SweepTable>& tables, const SweepTable& table,
                               const std::string& optimizer) {
  std::vector<Budget> out;
  for (const SweepTable& one : tables) {
    if (&one != &table && one.planned.of != table.planned.name) continue;
    const std::vector<Arm> arms = arms_of(one.comparison);
    const auto first = std::ranges::find(arms, optimizer, &Arm::optimizer);
    if (first == arms.end()) continue;
    if (const ArmLosses losses = losses_of(one.comparison, *first); !losses.diverged())
      out.push_back({one.planned.budget, losses.losses()});
  }
  std::ranges::sort(out, {}, &Budget::times);
  return out;
}

}  // namespace crossply
