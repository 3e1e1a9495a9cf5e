// What a user says of a training run: by flags, by a preset, or long ago, in the flags.json of a run that goes on. It
// is read once, and constant from then on. What the data, --init and --teacher add to it is in the plan
// (train_plan.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "data/source.h"
#include "engine/tensor.h"
#include "kernels/block/distill.h"
#include "kernels/optim/optimizer.h"
#include "models/config.h"
#include "train/settings/schedule.h"
#include "train/settings/transfer.h"

namespace CLI {
class App;
}

namespace crossply {

struct ShortHelp;  // cli/flags.h

// --world: a job of several ranks, planned and not run (train/run/plan.h). Rates of 0: what a GPU is assumed to have.
struct PlannedWorld {
  int64_t ranks = 0;  // 0: none is planned
  int64_t node_gpus = 8;
  std::string gpu;             // "": h100
  double nvlink = 0, net = 0;  // GB/s that a rank sends, inside its node and to other nodes
  double rate = 0;             // tokens/s that one rank alone attains
  bool operator==(const PlannedWorld&) const = default;
};

// The settings that resolve() chooses from the size of the data and the model: of a new run on files without --preset
// and --init, each one whose flag is not given.
struct LeftOpen {
  bool seq = false, steps = false, lr = false, warmup = false;
};

// Each member with a flag is explained in flag_table.cpp.
struct Settings {
  Settings();  // a small model, for `train_llama --data text:FILE --out DIR`
  std::string preset;
  Config config;
  DataOptions data;
  std::string out, init, teacher;
  Distillation kd;  // its per_element is what the next says
  std::string kd_reduction = "token";
  int64_t steps = 1000;
  int64_t batch = 16;      // sequences per micro-step
  int64_t accumulate = 1;  // micro-steps per optimizer step
  double lr = 1e-3;
  double router_lr = 0;  // of the parameters whose table row has a multiplier; 0: the multiplier times lr
  bool freeze_routers = false;
  double z_loss = 0;  // training adds this times the mean of lse^2 to the loss, lse = log sum exp of the logits
  std::string schedule = "cosine";
  int64_t warmup = 0;
  double lr_floor = 0;
  int64_t cooldown = 0;             // last steps, in which the rate falls; 0: resolve() chooses
  std::string optimizer = "adamw";  // one of optimizers
  AdamwOptions adamw;
  MuonOptions muon;  // its lr of 0 is resolve()'s to choose; normalize_rows is what `optimizer` says
  std::string decay_schedule = "constant";
  TransferOptions transfer;
  bool decay_all = false;  // also what the parameter table exempts
  uint64_t seed = 42;
  std::string device = "cpu", dtype = "fp32", matmul = "fp32";
  std::string plan = "reuse";
  std::string sum = "running";  // train/step/reduction.h
  double peer_timeout = 30;
  int64_t check_replicas = 1000;
  bool log_ranks = false;
  int64_t eval_every = 0;                     // 0: a tenth of the run
  int64_t eval_samples = 512;                 // for the loss; 0: all
  std::string eval_rule = "spread_then_all";  // which sequences these are: sequences_tested()
  int64_t answer_samples = 256;               // for a task's accuracy
  int64_t save_every = 0;                     // 0: a tenth of the run
  int64_t keep = 2;
  std::string save_at;  // "1e6,2e6": tokens after which a checkpoint is kept for good
  struct {
    std::string run;   // a run directory whose stable phase this run goes on from; "": none
    int64_t step = 0;  // after which step; 0: open_inputs() chooses
  } branch;
  bool tensorboard = false, csv = false;
  PlannedWorld world;
  bool resume = false, other_gpu = false, dry_run = false, time = false, dump_tape = false, profile = false;
  std::vector<std::string> dump_tensors;

  std::set<std::string> given;  // the flags of this call's command line, with their dashes
  LeftOpen open;

  // The calling program sets these; they have no flag.
  std::string program;                  // argv[0], for the command that continues the run; "": a run inside of compare
  std::vector<std::string> command;     // the user's command, if this process is not it; for environment.jsonl
  std::string label;                    // in front of the lines that the run prints
  int64_t runs_after = 0;               // how many like this one follow, for the time left
  std::string data_digest;              // the run's files must have it; "": any
  bool init_moved = false;              // --init lies in a directory that was renamed with this run in it
  int64_t bucket_bytes = 0;             // of gradients that are exchanged at once; 0: enough
  int64_t shard_bytes = 5'000'000'000;  // of weights in a file, where several ranks write; tests have smaller ones

  bool plans_only() const { return dry_run || dump_tape; }  // prints, allocates nothing
  // Takes optimizer steps: neither a plan, nor a dump, nor --steps 0.
  bool trains() const { return !plans_only() && dump_tensors.empty() && steps > 0; }
};

// What these flags take; --schedule: train/settings/schedule.h.
inline const std::vector<std::string> dtypes = {"fp32", "bf16"}, matmuls = {"fp32", "bf16x3", "fp8"};
// muon, normuon: of the matrices; all other rows are AdamW's (kernels/optim/muon.h).
inline const std::vector<std::string> optimizers = {"adamw", "muon", "normuon"};
inline bool has_muon(const std::string& optimizer) { return optimizer != "adamw"; }
inline const std::vector<std::string> reductions = {"token", "element"};
// --kd-tau: beyond, the KL divergence is lost in rounding, or TAU^2 KL beside the cross entropy.
constexpr double min_tau = 0.01, max_tau = 100;
inline const std::vector<std::string> sums = {"running", "tree", "library"};
// Which test sequences a loss is of. spread: --eval-samples of them, evenly spread over the test set. spread_then_all:
// the same, and all of them after the last step, unless the flag is given. first: the first so many of the test set,
// also after the last step; runs that were begun before this setting existed keep this rule.
inline const std::vector<std::string> eval_rules = {"spread_then_all", "spread", "first"};
// How many sequences of a test set of `size` an evaluation is over; last: it is that of the last step.
int64_t sequences_tested(const Settings& settings, int64_t size, bool last);
// What --dtype names.
Dtype storage_type(const Settings& settings);
// How many prompts an evaluation answers at a time, at most.
inline int64_t answer_rows(const Settings& settings) { return std::max<int64_t>(settings.batch, 16); }

// What --help of a trainer shows first. program: for the examples; needed: flags that only some trainers need.
ShortHelp training_help(const std::string& program, std::vector<std::string> needed = {});
// The defaults of the backbone gpt2, before its flags are added.
void use_gpt2(Config& config);
// Flags of the run and of the model's sizes (flag_table.h); of config.arch's connection, one per option. `settings`
// holds the defaults.
void add_train_flags(CLI::App& app, Settings& settings);
void add_architecture_flags(CLI::App& app, Settings& settings);
// The command that trains an architecture: "train_lime", "train_combined --arch mhc+lime".
std::string trainer_of(const std::string& arch);
// "--window", or "--sla-heads" where trainers have --heads.
std::string option_flag(const std::string& arch, const std::string& key);
// After parsing: which flags were given, and what that means for others. decided: a run or a preset has decided what is
// else left open.
void complete_flags(const CLI::App& app, Settings& settings, bool decided);

// A path, and the files of --data, as they are from any directory; what names no file stays.
std::string absolute_path(const std::string& path);
std::string absolute_data(const std::string& spec);
// The settings that a run must keep when it is resumed; its files by their absolute paths.
nlohmann::json trajectory(const Settings& settings);
// All settings, for the run directory's flags.json: enough to repeat the run, or to continue it.
nlohmann::json all_settings(const Settings& settings);
// flags.json of a run directory; null where there is none.
nlohmann::json read_run_settings(const std::string& run_dir);
// What this call alone has, but for defaults: for a process that does a part of its work (compare).
nlohmann::json call_settings(const Settings& settings);
// Both, but for what each rank of a job may have its own of.
nlohmann::json settings_of_all_ranks(const Settings& settings);
// The run directory that --resume or --branch continues; "" where there is no run yet. Its flags.json has decided what
// the command line does not say.
std::string continued_run(const Settings& settings);
// What all_settings wrote, into settings; path: where it stood, for errors. Throws Exit::bad_data for values that no
// flag could have.
void take_settings(const nlohmann::json& saved, const std::string& path, Settings& settings);
// What call_settings wrote.
void take_call_settings(const nlohmann::json& saved, const std::string& path, Settings& settings);
// take_settings of a run directory, whose config.arch settings must have; false where there is no run. flag: --resume
// or --branch, for errors.
bool take_run_settings(const char* flag, const std::string& run_dir, Settings& settings);
// Throw Exit::usage with the name of a setting that differs from what the run in `where` has; --steps may be larger.
// moved: settings whose files have other names now and hold the same.
void refuse_other_settings(const nlohmann::json& saved, const Settings& now, const std::string& where,
                           const std::set<std::string>& moved = {});
inline const std::set<std::string> data_settings = {"data", "val_data", "tokenizer"};
void refuse_other_config(const Config& saved, const Config& now, const std::string& where,
                         const char* flag = "--resume");
// Refuses invalid combinations of flags: throws Exit::usage.
void check_together(const Settings& settings);
// One line where the warm-up takes the whole run or more; "" otherwise.
std::string warmup_warning(const Settings& settings);

// The papers' settings by name; every architecture trains in them.
struct Preset {
  std::string name, about;
  void (*apply)(Settings&, const Preset&);
  int64_t C, F, L, H, K = 0;  // K = 0: as many key/value heads as query heads
  double lr = 0;              // where the paper has its own for each size
  int64_t steps = 0, warmup = 0;
  // What a paper sets for one architecture only: architecture, key, value.
  struct Own {
    std::string arch, key, value;
  };
  std::vector<Own> options = {};
  bool of_students = false;  // of --teacher
  std::string arch = "";     // of this architecture alone, whose structure it is: it sets no sizes
};
const std::vector<Preset>& presets();
const Preset* find_preset(const std::string& name);              // null: there is none
void apply_preset(const std::string& name, Settings& settings);  // throws Exit::usage for an unknown one
[[noreturn]] void refuse_preset(const Preset& preset);           // Exit::usage: it is of another architecture
// train_combined's --arch; where it is not given, that of --preset, or of the run that is continued. Throws Exit::usage
// where none of them is.
inline const std::string combined_program = "combined";
std::string chosen_combination(int argc, char** argv);
void add_arch_flag(CLI::App& app);
// Its values for config.arch's own options, or for those of the parts of a combination, where none are given.
void add_preset_options(const std::string& name, Config& config);
// For messages: "--preset 340m, which sets --rate 2", of the options that are not given otherwise.
std::string described_preset(const std::string& name, const Config& config);
// Whether argv has this flag; the value of the last such flag, "" for none. For flags that must be read before the
// others, because the others change what they set.
bool has_flag(int argc, char** argv, const std::string& flag);
std::string find_flag(int argc, char** argv, const std::string& flag);

}  // namespace crossply
