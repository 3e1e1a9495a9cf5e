// compare: trains several architectures on the same batches, from one seed or several, with one optimizer or several,
// at one learning rate or at the best of several; ends with one table and one picture. Without --data and --preset it
// is the demonstration, arith-quick.
#include <algorithm>
#include <cstdio>
#include <set>

#include "cli/format.h"
#include "cli/program.h"
#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "ranks/launch.h"
#include "train/lab/comparison.h"
#include "train/lab/comparison_dir.h"
#include "train/lab/experiment.h"
#include "train/lab/side_by_side.h"
#include "train/run/progress.h"
#include "train/run/run.h"

using namespace crossply;

namespace {

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
    const size_t rates = std::max<size_t>(1, runs_planned(arm) - arm.seeds.size());
    runs += runs_planned(arm), fewest = std::min(fewest, rates), most = std::max(most, rates);
  }
  const size_t optimizers = optimizers_of(comparison).size(), seeds = seeds_of(comparison).size();
  std::set<std::string> names;
  for (const Arm& arm : arms) names.insert(arm.arch);
  const size_t archs = names.size();
  std::string line =
      str(runs, runs == 1 ? " run: " : " runs: ", archs, archs == 1 ? " architecture" : " architectures");
  if (optimizers > 1) line += str(" x ", optimizers, " optimizers");
  if (comparison.rules.every_rate) {
    line += str("; each at every learning rate, ", seeds, seeds > 1 ? " seeds" : " seed");
  } else if (most > 1) {
    line += str("; each ", fewest < most ? str(fewest, " to ") : "", most, " learning rates with seed ",
                *comparison.choosing_seed, ", then ", seeds, seeds > 1 ? " seeds" : " seed",
                " at the rate that this chooses");
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

Exit run(Experiment& o, ComparisonDir& dir) {
  Comparison comparison = plan_comparison(o, [&](const TrainPlan& plan) {
    if (!dir.is_held()) dir = plan.resume ? ComparisonDir::claim(plan.out) : ComparisonDir::claim_fresh(plan.out);
    return dir.path();
  });
  for (const std::string& note : o.notes)
    if (!note.empty()) std::printf("%s\n", note.c_str());
  if (o.settings.dry_run) {
    if (o.settings.resume && !comparison.out.empty()) take_up(comparison);
    print_plans(comparison, o.jobs);
    return Exit::done;
  }
  check_device(comparison);  // not when their turns come
  if (o.settings.resume) take_up(comparison);
  if (comparison.out != o.settings.out)
    std::printf("%s holds another comparison; this one is in %s\n", printable(o.settings.out).c_str(),
                printable(comparison.out).c_str());
  for (const std::string& warning : {parameter_warning(comparison), comparison.data_note})
    if (!warning.empty()) std::printf("%s\n", printable(warning).c_str());
  // Before the first run ends: a kill then leaves what --resume needs.
  write_file_atomically(comparison.out + "/results.json", results_json(comparison));
  draw_missing_figures(comparison);
  const Jobs jobs = choose_jobs(comparison, o.jobs);
  if (!jobs.reason.empty()) std::printf("%s\n", jobs.reason.c_str());
  const std::string unwritten = train_all(comparison, jobs.count);
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

// What the defaults in brackets are of, and what they are with --data.
std::string about_defaults() {
  const Settings plain;
  const Config& c = plain.config;
  return str("Without --data and --preset it trains the demonstration, --preset arith-quick, and [ ] are its values. ",
             "With --data the values are those of the trainers: --width ", c.hidden_size, " --layers ",
             c.num_hidden_layers, " --heads ", c.num_attention_heads, " --ffn ", c.intermediate_size, " --batch ",
             plain.batch, ". On files the size of data and model chooses --seq, --steps, --lr and --warmup.");
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
    complete_experiment(app, o, found);
    if (!world_from_environment().alone())
      fail(Exit::usage, "compare trains in one process; start it without mpirun, torchrun or srun");
    return run(o, dir);
  });
}
