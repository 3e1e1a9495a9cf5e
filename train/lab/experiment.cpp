// What compare and each table of a sweep are told, by the same flags, and the comparison that this makes.
#include "train/lab/experiment.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "cli/needs.h"
#include "cli/program.h"
#include "engine/io/file.h"
#include "engine/split.h"
#include "kernels/devices.h"
#include "models/disk/config_json.h"
#include "models/registry.h"
#include "ranks/launch.h"
#include "train/run/inputs.h"
#include "train/settings/idle_flags.h"

namespace crossply {
namespace {

// Those that a comparison refuses, and plan_comparison() says why.
constexpr const char* flags_of_trainers[] = {"--init",         "--teacher",   "--kd-alpha",       "--kd-tau",
                                             "--kd-reduction", "--dump-tape", "--dump-tensors",   "--world",
                                             "--gpu",          "--node-gpus", "--nvlink",         "--net",
                                             "--rank-rate",    "--branch",    "--freeze-routers", "--from-step"};

void refuse_flags_of_trainers(const Settings& settings) {
  if (!settings.init.empty()) fail(Exit::usage, "a comparison trains from scratch; --init is for the trainers");
  if (!settings.teacher.empty())
    fail(Exit::usage, "a comparison trains without a teacher; --teacher is for the trainers");
  if (settings.dump_tape || !settings.dump_tensors.empty())
    fail(Exit::usage, "a comparison shows no single step; --dump-tape and --dump-tensors are for the trainers");
  if (settings.world.ranks > 0) fail(Exit::usage, "a comparison plans jobs of one rank; --world is for the trainers");
  if (settings.freeze_routers)
    fail(Exit::usage, "--freeze-routers is for the trainers; here it is --arch llama,lime,lime@frozen");
  if (!settings.branch.run.empty()) fail(Exit::usage, "a comparison trains from scratch; --branch is for the trainers");
  if (settings.out.empty() && !settings.dry_run) fail(Exit::usage, "--out is needed: the directory for the runs");
  if (settings.steps == 0) fail(Exit::usage, "--steps 0: there is nothing to compare");
}

// The plan with another optimizer, whose matrices have their usual rate.
TrainPlan with_optimizer(TrainPlan plan, const std::string& optimizer) {
  plan.optimizer = optimizer;
  choose_muon(plan);
  return plan;
}

// Of Muon's matrices, at each of these --lr; each once.
std::vector<double> usual_muon_rates(TrainPlan plan, const std::vector<double>& rates) {
  std::vector<double> usual;
  for (const double lr : rates) {
    plan.lr = lr, plan.muon.lr = 0;
    const double rate = with_optimizer(plan, "muon").muon.lr;
    if (std::find(usual.begin(), usual.end(), rate) == usual.end()) usual.push_back(rate);
  }
  return usual;
}

// What is left open, and what does not fit: which rates are tried, and which seed tries them.
void complete(Experiment& experiment, const TrainPlan& plan) {
  if (experiment.optimizers.empty()) experiment.optimizers = {plan.optimizer};
  if (experiment.seeds.empty()) experiment.seeds = {plan.seed};
  if (experiment.rates.empty()) experiment.rates = {plan.lr};
  const bool muon = std::ranges::any_of(experiment.optimizers, has_muon);
  if (!muon && !experiment.muon_rates.empty())
    fail(Exit::usage, "--muon-lr has no effect without --optimizer muon|normuon");
  if (std::ranges::all_of(experiment.optimizers, has_muon) && experiment.rates.size() > 1)
    fail(Exit::usage,
         "several --lr are for AdamW to choose among: add adamw to --optimizer, or give one --lr and "
         "several --muon-lr");
  if (muon && experiment.muon_rates.empty()) experiment.muon_rates = usual_muon_rates(plan, experiment.rates);
  const bool several = experiment.rates.size() > 1 || experiment.muon_rates.size() > 1,
             every_rate = experiment.rules.every_rate, choice = several && !every_rate;
  if (every_rate && !several) fail(Exit::usage, "--every-rate has no effect with one learning rate");
  if (every_rate && experiment.choosing_seed)
    fail(Exit::usage, "--resume: this comparison was begun to choose a learning rate; for every rate start a new one ",
         "with another --out");
  if (choice && experiment.begun && !experiment.choosing_seed)
    fail(Exit::usage, "--resume: this comparison was begun with one learning rate, and tested on all of the test set; ",
         "for several rates start a new one with another --out");
  if (choice && !experiment.begun) experiment.choosing_seed = usual_choosing_seed;
  for (const auto* seeds : {&experiment.seeds, &experiment.rules.backbone_seeds})
    if (std::find(seeds->begin(), seeds->end(), experiment.choosing_seed) != seeds->end())
      fail(Exit::usage, "seed ", *experiment.choosing_seed,
           " chooses among the learning rates and is not reported; give others with --seeds");
}

// The plan of another architecture at the same settings.
TrainPlan plan_of(const ArchChoice& choice, TrainPlan plan) {
  // A GPT-2 among LLaMAs learns as many positions as it is given.
  if (choice.arch == "gpt2" && !plan.config.gpt2()) plan.config.max_position_embeddings = plan.data.seq_len;
  choice.apply(plan.config);
  plan.freeze_routers = choice.frozen;
  const std::string preset = plan.preset.empty() ? "" : ", " + described_preset(plan.preset, plan.config);
  add_preset_options(plan.preset, plan.config);
  plan.config.check(Exit::usage, "--arch " + choice.text + preset);
  check_transfer(plan.config, plan.transfer);
  check_together(plan);
  if (!plan.resume) refuse_idle_options(choice, plan.config);
  if (choice.frozen) refuse_idle_freeze(plan, "--arch " + choice.text + ": " + choice.leader);
  std::fputs(note_idle_options(plan.config, "--arch " + choice.text).c_str(), stderr);
  return plan;
}

// The items of a list, each once.
template <class T, class Read>
std::vector<T> read_list(const std::string& flag, const std::string& text, Read&& read) {
  std::vector<T> values;
  for (const std::string& item : split_commas(text)) {
    const T value = read(item);
    if (std::find(values.begin(), values.end(), value) != values.end()) refuse_value(flag, "names " + item + " twice");
    values.push_back(value);
  }
  return values;
}

void add_seeds_flag(CLI::App& app, const char* flag, std::vector<uint64_t>& seeds, const std::string& help) {
  const auto set = [flag, &seeds](const std::string& text) {
    seeds = read_list<uint64_t>(flag, text, [&](const std::string& item) {
      return static_cast<uint64_t>(read_integer(flag, item, 0, std::numeric_limits<int64_t>::max()));
    });
  };
  add_parsed(app, flag, set, "LIST", help);
}

// In the place of the trainers' flags, which take one value.
void add_optimizer_flag(CLI::App& app, Experiment& o) {
  const auto set_optimizers = [&o](const std::string& text) {
    o.optimizers = read_list<std::string>("--optimizer", text, [](const std::string& item) {
      if (std::find(optimizers.begin(), optimizers.end(), item) == optimizers.end())
        refuse_value("--optimizer", "cannot be '" + excerpt(item) + "'; give of " + join_commas(optimizers));
      return item;
    });
    o.settings.optimizer = "adamw";
    for (const std::string& name : o.optimizers)
      if (has_muon(name)) o.settings.optimizer = name;  // for what only Muon has, or cannot do
  };
  remove_flag(app, "--optimizer");
  add_parsed(app, "--optimizer", set_optimizers, "NAME,...",
             "adamw, muon, normuon, or several between commas\nmuon and normuon are for hidden weight matrices: all "
             "other parameters are AdamW's then")
      .default_str(join_commas(o.optimizers.empty() ? std::vector{o.settings.optimizer} : o.optimizers))
      .group("Optimiser");
}

// The same.
void add_rate_flags(CLI::App& app, Experiment& o) {
  const auto setter = [](const char* flag, std::vector<double>& rates) {
    return [flag, &rates](const std::string& text) {
      rates = read_list<double>(flag, text,
                                [&](const std::string& item) { return read_number(flag, item, 0, max_number); });
    };
  };
  for (const char* flag : {"--lr", "--muon-lr"}) remove_flag(app, flag);
  add_parsed(
      app, "--lr", setter("--lr", o.rates), "FLOAT,...",
      "base learning rate, or several between commas\nSeed 0 is trained at all of them, and tested on the first "
      "half of the test set. A parabola through the best and the rates beside it chooses the rate of --seeds, "
      "which are tested on the second half. While the best is at an edge, a rate beyond it is tried, three at most")
      .default_str(format_number("%g", o.settings.lr))
      .group("Optimiser");
  needs(app,
        add_parsed(
            app, "--muon-lr", setter("--muon-lr", o.muon_rates), "FLOAT,...",
            "Muon's base learning rate, or several between commas: seed 0 tries them at the middle --lr, then at the "
            "best half that --lr and twice (default: of each --lr, with --muon-scale rms five times that, with "
            "original 0.03)")
            .group("Optimiser"),
        {{"--optimizer", {"muon", "normuon"}}});
}

}  // namespace

Comparison plan_comparison(Experiment& experiment, const std::function<std::string(const TrainPlan& plan)>& claim) {
  refuse_flags_of_trainers(experiment.settings);
  Settings settings = experiment.settings;
  if (!experiment.rates.empty()) settings.lr = experiment.rates[0];
  if (!experiment.muon_rates.empty()) settings.muon.lr = experiment.muon_rates[0];
  if (!experiment.seeds.empty()) settings.seed = experiment.seeds[0];
  const std::vector<ArchChoice> choices = parse_arch_list(experiment.archs, settings.config.backbone);
  settings.config.arch = settings.config.backbone;
  auto [plan, data] = open_inputs(settings);
  complete(experiment, plan);
  if (const std::string& pairs = experiment.rules.pairs; !pairs.empty() && !path_exists(pairs))
    fail(Exit::no_input, "--pairs ", pairs, ": there is no such file or directory");
  experiment.notes = {plan.chosen, epochs_warning(plan, data), warmup_warning(plan)};
  Comparison comparison{plan.data.spec, plan.dry_run ? plan.out : claim(plan), {}};
  comparison.rates = experiment.rates, comparison.muon_rates = experiment.muon_rates;
  comparison.choosing_seed = experiment.choosing_seed;
  comparison.rules = experiment.rules, comparison.weight_decay = plan.adamw.weight_decay;
  if (data.test != nullptr) comparison.test_size = data.test->size();
  if (!plan.dry_run) comparison.data_digest = plan.data_digest = digest_of_files(plan, data);
  comparison.data_note = validation_note(data);
  std::vector<TrainPlan> plans;
  std::map<nlohmann::json, std::string> models;
  for (const ArchChoice& choice : choices) {
    const TrainPlan of_choice = plan_of(choice, plan);
    if (choice.leader.empty())
      if (const auto [same, is_new] = models.emplace(to_json(of_choice.config), choice.text); !is_new)
        experiment.notes.push_back(str("note: ", same->second, " and ", choice.text, " are the same model"));
    for (const std::string& optimizer : experiment.optimizers) {
      plans.push_back(with_optimizer(of_choice, optimizer));
      add_arm(comparison, {choice, plans.back(), plan_training(plans.back())}, experiment.seeds);
    }
  }
  name_directories(comparison);
  if (experiment.settings.given.contains("--router-lr")) refuse_idle_router_lr(plans, "these architectures");
  return comparison;
}

void check_device(const Comparison& comparison) {
  const TrainPlan& first = comparison.runs[0].plan;
  const auto device = make_device(first.device, first.matmul);  // refuses one that is not there
  for (const Arm& arm : arms_of(comparison)) refuse_too_large(comparison.runs[arm.seeds[0]].plan, *device);
}

void add_experiment_flags(CLI::App& app, Experiment& o) {
  add_text(app, "--arch", o.archs, "LIST",
           "the first is the baseline; " + arch_list_help() +
               "\nBehind any of them @frozen makes a control: the same, with routers that do not learn, at the same "
               "rates; and @again the same from other seeds");
  add_seeds_flag(app, "--seeds", o.seeds,
                 "several seeds between commas: 1,2,3 (default: --seed)\nThe table then has means and standard "
                 "deviations, and says which differences from the baseline are significant (5 % for all together)");
  add_seeds_flag(app, "--backbone-seeds", o.rules.backbone_seeds,
                 "the baseline's, where it has others; with eight or more it has a deviation of its own");
  add_switch(app, "--more-seeds", o.rules.more_seeds,
             "three more seeds for the three best, and for those whose spread is unlike the others'");
  add_text(app, "--pairs", o.rules.pairs, "DIR",
           "after each reported run also its accuracy on minimal pairs: .jsonl files like BLiMP's");
  add_integer(app, "--jobs", o.jobs, 0, 4096,
              "runs side by side, each with its share of the threads; results are the same (0: several where there are "
              "several seeds or rates, on a CPU, and a step of the first run, which is timed, is too small for all "
              "threads)");
  add_train_flags(app, o.settings);
  flag_named(app, "--seeds").excludes(flag_named(app, "--seed"));
  add_optimizer_flag(app, o);
  add_rate_flags(app, o);
  add_switch(app, "--every-rate", o.rules.every_rate,
             "train all --seeds at each learning rate, and choose none: a row of the table is one rate, tested on the "
             "whole test set")
      .group("Optimiser");
  flag_named(app, "--every-rate").excludes(flag_named(app, "--more-seeds"));
  add_switch(app, "--hold-decay", o.rules.hold_decay,
             "weight decay times rate stays what it is at the middle --lr, of Muon the middle --muon-lr")
      .group("Optimiser");
  for (const char* refused : flags_of_trainers) flag_named(app, refused).group(hidden_group);
  for (const GeneralOption& option : general_options()) flag_named(app, flag_of(option.key)).group(hidden_group);
  for (const char* refused : flags_of_ranks) flag_named(app, refused).group(hidden_group);
}

void complete_experiment(CLI::App& app, Experiment& o, bool decided) {
  complete_flags(app, o.settings, decided);
  for (const char* refused : flags_of_ranks)
    if (o.settings.given.contains(refused))
      fail(Exit::usage, refused, " is for the trainers; a comparison trains in one process");
  for (const GeneralOption& option : general_options())
    if (o.settings.given.contains(flag_of(option.key)))
      fail(Exit::usage, flag_of(option.key),
           " is for the trainers; a comparison takes it by architecture, as in --arch llama,llama:", option.key,
           "=VALUE");
  std::fputs(notes_on_train_flags(app, o.settings.config).c_str(), stderr);
  if (o.settings.given.contains("--seed")) o.seeds = {o.settings.seed};
}

}  // namespace crossply
