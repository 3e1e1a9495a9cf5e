// compare: trains several architectures on the same batches, from one seed or several, with one optimizer or several,
// at one learning rate or at the best of several; ends with one table and one picture. Without --data and --preset it
// is the demonstration, arith-quick.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>

#include "cli/format.h"
#include "cli/needs.h"
#include "cli/program.h"
#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "engine/split.h"
#include "kernels/devices.h"
#include "models/registry.h"
#include "ranks/launch.h"
#include "train/lab/comparison.h"
#include "train/lab/comparison_dir.h"
#include "train/lab/side_by_side.h"
#include "train/run/progress.h"
#include "train/run/run.h"
#include "train/settings/idle_flags.h"

using namespace crossply;

namespace {

namespace fs = std::filesystem;

// Without rates beyond an edge that are not known yet.
size_t runs_planned(const Arm& arm) {
  std::set<size_t> all(arm.sweep.begin(), arm.sweep.end());
  all.insert(arm.seeds.begin(), arm.seeds.end());
  return all.size();
}

// --dry-run --time: of all runs, one after the other.
void print_time(const Comparison& comparison) {
  double seconds = 0;
  for (const Arm& arm : arms_of(comparison)) {
    const auto [plan, data] = open_inputs(comparison.runs[arm.seeds[0]].plan);
    seconds += seconds_of_run(plan, data) * static_cast<double>(runs_planned(arm));
  }
  print_seconds(seconds, "a run", " of all runs, by three of each architecture; evaluations");
}

// "78 runs: 2 architectures x 3 optimizers; each 5 learning rates with seed 0, then 8 seeds at the best of them".
std::string describe_runs(const Comparison& comparison, const std::vector<Arm>& arms) {
  size_t runs = 0, fewest = SIZE_MAX, most = 1;
  for (const Arm& arm : arms) {
    const size_t rates = std::max<size_t>(1, arm.sweep.size());
    runs += runs_planned(arm), fewest = std::min(fewest, rates), most = std::max(most, rates);
  }
  const size_t optimizers = optimizers_of(comparison).size(), seeds = seeds_of(comparison).size();
  const size_t archs = arms.size() / optimizers;
  std::string line =
      str(runs, runs == 1 ? " run: " : " runs: ", archs, archs == 1 ? " architecture" : " architectures");
  if (optimizers > 1) line += str(" x ", optimizers, " optimizers");
  if (most > 1) {
    const uint64_t first = comparison.choosing_seed.value_or(comparison.runs[0].plan.seed);
    const size_t more = comparison.choosing_seed ? seeds : seeds - 1;
    line += str("; each ", fewest < most ? str(fewest, " to ") : "", most, " learning rates with seed ", first);
    if (more > 0)
      line += str(", then ", more, comparison.choosing_seed ? "" : " more", more > 1 ? " seeds" : " seed",
                  " at the best of them");
  } else if (seeds > 1) {
    line += str(" x ", seeds, " seeds");
  }
  return line;
}

// --dry-run: what the table can say without training.
void print_plans(const Comparison& comparison, int64_t jobs) {
  std::vector<std::vector<std::string>> table = {{"architecture", "parameters", "FLOP/token", "memory"}};
  double flops = 0, memory = 0;
  const std::vector<Arm> arms = arms_of(comparison);
  for (const Arm& arm : arms) {
    const ComparedRun& run = comparison.runs[arm.seeds[0]];
    const TrainPlan& plan = run.plan;
    table.push_back({arm.name, format_count(run.result.accounting.parameters),
                     format_number("%.4g", run.result.accounting.flops_per_token),
                     format_bytes(run.result.planned_memory)});
    flops += run.result.accounting.flops_per_token * static_cast<double>(plan.tokens_per_step() * plan.steps) *
             static_cast<double>(runs_planned(arm));
    memory = std::max(memory, run.result.planned_memory);
  }
  std::printf("%sFLOP/token: forward and backward. memory: of a whole run, about.\n", format_table(table).c_str());
  std::string line =
      describe_runs(comparison, arms) + str("; ", format_number("%.3g", flops), " FLOPs of training in all");
  if (comparison.choosing_seed) line += "; up to three more rates of each where the best is at an edge";
  if (comparison.runs[0].plan.resume) line += str("; ", runs_unfinished(comparison), " of the runs are left to do");
  std::printf("%s\n", wrap(line, 80, 0).c_str());
  if (comparison.runs[0].plan.time) print_time(comparison);
  if (jobs > 1)
    std::printf("memory of %lld runs at a time: at most about %s\n", static_cast<long long>(jobs),
                format_bytes(static_cast<double>(jobs) * memory).c_str());
}

void refuse_flags_of_trainers(const Settings& settings) {
  if (!settings.init.empty()) fail(Exit::usage, "compare trains from scratch; --init is for the trainers");
  if (!settings.teacher.empty()) fail(Exit::usage, "compare trains without a teacher; --teacher is for the trainers");
  if (settings.dump_tape || !settings.dump_tensors.empty())
    fail(Exit::usage, "compare shows no single step; --dump-tape and --dump-tensors are for the trainers");
  if (settings.world.ranks > 0) fail(Exit::usage, "compare plans jobs of one rank; --world is for the trainers");
  if (!settings.branch.run.empty()) fail(Exit::usage, "compare trains from scratch; --branch is for the trainers");
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
  if (!experiment.begun && (experiment.rates.size() > 1 || experiment.muon_rates.size() > 1))
    experiment.choosing_seed = usual_choosing_seed;
  if (std::find(experiment.seeds.begin(), experiment.seeds.end(), experiment.choosing_seed) != experiment.seeds.end())
    fail(Exit::usage, "seed ", *experiment.choosing_seed,
         " chooses among the learning rates and is not reported; give others with --seeds");
}

// The runs of one architecture with one optimizer.
void add_arm(Comparison& comparison, const ComparedRun& like, const std::vector<uint64_t>& seeds) {
  for (const double rate : rates_asked(comparison, like.plan.optimizer)) add_rate(comparison, like, rate, seeds);
}

// The plan of another architecture at the same settings.
TrainPlan plan_of(const ArchChoice& choice, TrainPlan plan) {
  // A GPT-2 among LLaMAs learns as many positions as it is given.
  if (choice.arch == "gpt2" && !plan.config.gpt2()) plan.config.max_position_embeddings = plan.data.seq_len;
  choice.apply(plan.config);
  add_preset_options(plan.preset, plan.config);
  plan.config.check(Exit::usage, "--arch " + choice.text);
  if (!plan.resume) refuse_idle_options(choice, plan.config);
  std::fputs(note_idle_options(plan.config, "--arch " + choice.text).c_str(), stderr);
  return plan;
}

// The runs in the order of --arch. Claims the directory before it looks into it. Refuses here what would only fail
// after hours of training.
Comparison prepare(Experiment& experiment, ComparisonDir& dir) {
  refuse_flags_of_trainers(experiment.settings);
  Settings settings = experiment.settings;
  if (!experiment.rates.empty()) settings.lr = experiment.rates[0];
  if (!experiment.muon_rates.empty()) settings.muon.lr = experiment.muon_rates[0];
  if (!experiment.seeds.empty()) settings.seed = experiment.seeds[0];
  const std::vector<ArchChoice> choices = parse_arch_list(experiment.archs, settings.config.backbone);
  settings.config.arch = settings.config.backbone;
  auto [plan, data] = open_inputs(settings);
  complete(experiment, plan);
  experiment.notes = {plan.chosen, epochs_warning(plan, data), warmup_warning(plan)};
  if (!plan.dry_run && !dir.is_held())
    dir = plan.resume ? ComparisonDir::claim(plan.out) : ComparisonDir::claim_fresh(plan.out);
  Comparison comparison{plan.data.spec, plan.dry_run ? plan.out : dir.path(), {}};
  comparison.rates = experiment.rates, comparison.muon_rates = experiment.muon_rates;
  comparison.choosing_seed = experiment.choosing_seed;
  if (data.test != nullptr) comparison.test_size = data.test->size();
  if (!plan.dry_run) comparison.data_digest = plan.data_digest = digest_of_files(plan, data);
  comparison.data_note = validation_note(data);
  std::vector<TrainPlan> plans;
  for (const ArchChoice& choice : choices) {
    const TrainPlan of_choice = plan_of(choice, plan);
    for (const std::string& optimizer : experiment.optimizers) {
      plans.push_back(with_optimizer(of_choice, optimizer));
      add_arm(comparison, {choice, plans.back(), plan_training(plans.back())}, experiment.seeds);
    }
  }
  name_directories(comparison);
  if (experiment.settings.given.contains("--router-lr")) refuse_idle_router_lr(plans, "these architectures");
  return comparison;
}

// What to look at and what to do next.
void print_next(const Comparison& comparison, const std::string& program) {
  const std::string out = printable(comparison.out);
  std::printf("\nresults:  %s/results.md, results.json\nfigure:   %s/compare.svg\n", out.c_str(), out.c_str());
  std::string best;
  double least = INFINITY;
  const std::vector<Arm> arms = arms_of(comparison);
  for (const Arm& arm : arms) {
    const ComparedRun& run = comparison.runs[arm.seeds.front()];  // at its best rate
    if (is_done(run) && run.result.test_loss < least && path_exists(run.result.run_dir))
      least = run.result.test_loss, best = run.result.run_dir;
  }
  const bool text = parse_data_spec(comparison.data).kind == DataSpec::Kind::text;
  if (!best.empty()) std::printf("next:     %s\n", generate_command(program, best, comparison.data, text).c_str());
  if (arms.front().seeds.size() == 1)
    std::printf("seeds:    one; another may order close architectures otherwise (--seeds 1,2,3)\n");
}

// The exit code is that of the first architecture that failed. unwritten: the error of the last attempt to write a file
// of the comparison; "" if all are written.
Exit conclude(const Comparison& comparison, const std::string& program, const std::string& unwritten) {
  const bool stopped = std::any_of(comparison.runs.begin(), comparison.runs.end(),
                                   [](const ComparedRun& run) { return run.tried && run.state == RunState::stopped; });
  if (stopped || next_run(comparison)) {
    std::printf("\nto continue this comparison: %s --resume --out %s\n", shell_command(program).c_str(),
                shell_word(comparison.out).c_str());
    return Exit::stopped;
  }
  std::string failed;
  const std::vector<const ComparedRun*> failures = failures_of(comparison);
  for (const ComparedRun* run : failures) failed += (failed.empty() ? " " : ", ") + arm_name(comparison, *run);
  const bool passing = std::any_of(failures.begin(), failures.end(), [](const auto* run) { return !diverged(*run); });
  if (!failures.empty())
    fail(failures[0]->result.code, "failed:", failed, "; the reason stands above",
         passing ? "; --resume tries again what has not diverged" : "");
  if (!unwritten.empty())
    fail(Exit::io, unwritten, "; the runs are done and kept: mend that, then --resume --out ",
         shell_word(comparison.out), " writes the results again");
  for (const ComparedRun& run : comparison.runs)
    if (is_done(run) && run.result.code == Exit::io)
      fail(Exit::io, run_name(comparison, run), ": its figure could not be written; the reason stands above: mend ",
           "that, then --resume --out ", shell_word(comparison.out), " draws it");
  return Exit::done;
}

// The figures of runs that were done before, where they lack one.
void draw_missing_figures(Comparison& comparison) {
  for (ComparedRun& run : comparison.runs) {
    if (!is_done(run)) continue;
    const std::string error = draw_missing_figure(run.plan);
    run.result.code = error.empty() ? Exit::done : Exit::io;
    if (!error.empty()) print_line("note: " + error, false);
  }
}

// Returns the first error; "" if all is written.
std::string write_all(const Comparison& comparison) {
  const std::string of_records = write_records(comparison), of_results = write_results(comparison);
  return of_records.empty() ? of_results : of_records;
}

// Returns the error of the last attempt to write the results. A figure that cannot be written does not end the runs.
std::string train_all(Comparison& comparison, int64_t asked) {
  const Jobs jobs = choose_jobs(comparison, asked);
  if (!jobs.reason.empty()) std::printf("%s\n", jobs.reason.c_str());
  std::string told;
  const auto after_each = [&] {
    extend(comparison);
    const std::string error = write_all(comparison);
    if (!error.empty() && error != told) print_line("note: " + error + "; the runs go on", false);
    told = error;
  };
  if (jobs.count > 1) train_side_by_side(comparison, jobs.count, after_each);
  else train_one_by_one(comparison, after_each);
  return write_all(comparison);  // also if no run was left to do: --arch may show others now
}

Exit run(Experiment& o, ComparisonDir& dir) {
  Comparison comparison = prepare(o, dir);
  for (const std::string& note : o.notes)
    if (!note.empty()) std::printf("%s\n", note.c_str());
  if (o.settings.dry_run) {
    if (o.settings.resume && !comparison.out.empty()) take_up(comparison);
    print_plans(comparison, o.jobs);
    return Exit::done;
  }
  const auto device = make_device(o.settings.device, o.settings.matmul);  // refuses one that is not there
  for (const Arm& arm : arms_of(comparison))                              // not when their turns come
    refuse_too_large(comparison.runs[arm.seeds[0]].plan, *device);
  if (o.settings.resume) take_up(comparison);
  if (comparison.out != o.settings.out)
    std::printf("%s holds another comparison; this one is in %s\n", printable(o.settings.out).c_str(),
                printable(comparison.out).c_str());
  for (const std::string& warning : {parameter_warning(comparison), comparison.data_note})
    if (!warning.empty()) std::printf("%s\n", printable(warning).c_str());
  // Before the first run ends: a kill then leaves what --resume needs.
  write_file_atomically(comparison.out + "/results.json", results_json(comparison));
  draw_missing_figures(comparison);
  const std::string unwritten = train_all(comparison, o.jobs);
  if (const std::string verdicts = results_verdicts(comparison); !verdicts.empty())
    std::printf("\n%s", printable(verdicts).c_str());
  print_next(comparison, o.program);
  std::printf("\n%s", printable(results_table(comparison)).c_str());
  return conclude(comparison, o.program, unwritten);
}

// A comparison that is resumed has its flags. Otherwise, with --data, the sizes and steps that the trainers have, too;
// without, the demonstration. The flags that are given come on top. Returns whether more than these decides.
bool set_defaults(int argc, char** argv, Experiment& o, ComparisonDir& dir) {
  const std::string out = find_flag(argc, argv, "--out"), given = find_flag(argc, argv, "--preset");
  const bool resume = has_flag(argc, argv, "--resume") && !out.empty();
  // Claimed before its results.json is read: another comparison may be writing it.
  if (resume && path_exists(out) && !has_flag(argc, argv, "--dry-run")) dir = ComparisonDir::claim(out);
  const bool found = resume && take_comparison_settings(out, o);
  if (!found && find_flag(argc, argv, "--backbone") == "gpt2") use_gpt2(o.settings.config);
  const bool demonstration = !found && given.empty() && find_flag(argc, argv, "--data").empty();
  if (demonstration && resume && !path_exists(out))
    fail(Exit::usage, "--resume: there is no comparison in ", out, " yet; to start one, give its flags");
  const std::string preset = demonstration ? "arith-quick" : given;
  if (preset.empty() || preset == o.settings.preset) return found || !preset.empty();
  apply_preset(preset, o.settings);
  o.rates.clear();
  return true;
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

// What the defaults in brackets are of, and what they are with --data.
std::string about_defaults() {
  const Settings plain;
  const Config& c = plain.config;
  return str("Without --data and --preset it trains the demonstration, --preset arith-quick, and [ ] are its values. ",
             "With --data the values are those of the trainers: --width ", c.hidden_size, " --layers ",
             c.num_hidden_layers, " --heads ", c.num_attention_heads, " --ffn ", c.intermediate_size, " --batch ",
             plain.batch, ". On files the size of data and model chooses --seq, --steps, --lr and --warmup.");
}

void add_seeds_flag(CLI::App& app, Experiment& o) {
  const auto set_seeds = [&](const std::string& text) {
    o.seeds = read_list<uint64_t>("--seeds", text, [](const std::string& item) {
      return static_cast<uint64_t>(read_integer("--seeds", item, 0, std::numeric_limits<int64_t>::max()));
    });
  };
  add_parsed(
      app, "--seeds", set_seeds, "LIST",
      "several seeds between commas: 1,2,3 (default: --seed)\nThe table then has means and standard deviations, and "
      "says which differences from the yardstick are larger than the spread of seeds");
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
             "adamw, muon, normuon, or several between commas\nmuon and normuon are for matrices between widths: all "
             "other parameters are AdamW's then, at the --lr that is best for AdamW alone, if that is compared, too")
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
  add_parsed(app, "--lr", setter("--lr", o.rates), "FLOAT,...",
             "base learning rate, or several between commas\nSeed 0 is trained at all of them, and tested on the first "
             "half of the test set; --seeds are trained at the best one, and tested on the second half. While the best "
             "is at an edge, a rate beyond it is tried, three at most")
      .default_str(format_number("%g", o.settings.lr))
      .group("Optimiser");
  needs(app,
        add_parsed(app, "--muon-lr", setter("--muon-lr", o.muon_rates), "FLOAT,...",
                   "Muon's base learning rate, or several between commas (default: of each --lr, with --muon-scale rms "
                   "five times that, with original 0.03)")
            .group("Optimiser"),
        {{"--optimizer", {"muon", "normuon"}}});
}

void add_experiment_flags(CLI::App& app, Experiment& o) {
  add_text(app, "--arch", o.archs, "LIST", "the first is the yardstick; " + arch_list_help());
  add_seeds_flag(app, o);
  add_integer(app, "--jobs", o.jobs, 0, 4096,
              "runs side by side, each with its share of the threads; results are the same (0: several where there are "
              "several seeds or rates, on a CPU, and a step of the first run, which is timed, is too small for all "
              "threads)");
  add_train_flags(app, o.settings);
  flag_named(app, "--seeds").excludes(flag_named(app, "--seed"));
  add_optimizer_flag(app, o);
  add_rate_flags(app, o);
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app(
      "Trains several architectures on the same batches, from the same seeds; ends with a table and a figure.\n" +
          about_defaults(),
      "compare");
  Experiment o;
  o.program = argv[0];
  ComparisonDir dir;
  bool found = false;   // a comparison, or a preset
  std::string request;  // of the comparison whose child this process is
  auto flags = [&] {
    found = set_defaults(argc, argv, o, dir);
    add_text(app, "--one-run", request, "JSON", "for compare itself").group(hidden_group);
    add_experiment_flags(app, o);
    for (const char* refused :
         {"--init", "--teacher", "--kd-alpha", "--kd-tau", "--kd-reduction", "--dump-tape", "--dump-tensors", "--world",
          "--node-gpus", "--gpu", "--nvlink", "--net", "--rank-rate", "--branch", "--from-step"})
      flag_named(app, refused).group(hidden_group);  // prepare() says why
    for (const GeneralOption& option : general_options()) flag_named(app, flag_of(option.key)).group(hidden_group);
    for (const char* refused : flags_of_ranks) flag_named(app, refused).group(hidden_group);
    set_short_help(app, {{"--out"},
                         {"--arch", "--data", "--preset", "--seeds", "--lr", "--steps", "--batch", "--seq", "--resume",
                          "--dry-run"},
                         {"compare --out runs/compare    # the demonstration",
                          "compare --arch llama,lime --seeds 1,2,3 --data text:my.txt --out runs/mine"}});
    flag_named(app, "--steps").description("optimizer steps of each run");
    flag_named(app, "--out").description("directory of the comparison: results.md, compare.svg, a directory per run");
    flag_named(app, "--resume")
        .description(
            "continue the comparison in --out; needs no other flags. Lists may name more, which are added, or fewer, "
            "which "
            "alone are shown then");
  };
  return run_program(app, argc, argv, flags, [&] {
    if (!request.empty()) return train_for_parent(request);
    complete_flags(app, o.settings, found);
    for (const char* refused : flags_of_ranks)
      if (o.settings.given.contains(refused))
        fail(Exit::usage, refused, " is for the trainers; compare trains in one process");
    for (const GeneralOption& option : general_options())
      if (o.settings.given.contains(flag_of(option.key)))
        fail(Exit::usage, flag_of(option.key),
             " is for the trainers; compare takes it by architecture, as in --arch "
             "llama,llama:loop=anchor");
    std::fputs(notes_on_train_flags(app, o.settings.config).c_str(), stderr);
    if (o.settings.given.contains("--seed")) o.seeds = {o.settings.seed};
    if (!world_from_environment().alone())
      fail(Exit::usage, "compare trains in one process; start it without mpirun, torchrun or srun");
    return run(o, dir);
  });
}
