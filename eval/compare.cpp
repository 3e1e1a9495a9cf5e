// compare: trains several architectures on the same batches from the same seed, and ends with one table and one
// picture. Without --data and --preset it is the demonstration, arith-quick.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "engine/file.h"
#include "eval/comparison.h"
#include "train/arch_list.h"
#include "train/program.h"
#include "train/progress.h"
#include "train/trainer.h"

using namespace crossply;

namespace {

namespace fs = std::filesystem;

// --dry-run: what the table can say without training.
void print_plans(const Comparison& comparison) {
  std::vector<std::vector<std::string>> table = {{"architecture", "parameters", "FLOP/token", "memory"}};
  for (const ComparedRun& run : comparison.runs)
    table.push_back({run.choice.text, format_count(run.result.parameters),
                     format_number("%.4g", run.result.flops_per_token),
                     format_bytes(static_cast<double>(run.result.memory))});
  std::printf("%sFLOP/token: forward and backward. memory: values, gradients, moments and activations.\n",
              format_table(table).c_str());
}

// The directory to write to: `out`, or with a number appended where that holds an earlier comparison.
std::string fresh_dir(const std::string& out) {
  std::error_code error;
  std::string dir = out;
  for (int i = 2; fs::exists(dir, error) && !(fs::is_directory(dir, error) && fs::is_empty(dir, error)); ++i)
    dir = out + "-" + std::to_string(i);
  return dir;
}

struct Options {
  std::string archs = "llama,lime";
  TrainOptions train;
};

// The runs in the order of --arch, complete. Refuses here what would only fail after hours of training.
Comparison prepare(const Options& o) {
  if (!o.train.init.empty()) fail(Exit::usage, "compare trains from scratch; --init is for the trainers");
  if (o.train.dump_tape) fail(Exit::usage, "compare prints no tapes; --dump-tape is for the trainers");
  if (o.train.out.empty() && !o.train.dry_run) fail(Exit::usage, "--out is needed: the directory for the runs");
  if (o.train.steps == 0) fail(Exit::usage, "--steps 0: there is nothing to compare");
  const std::vector<ArchChoice> choices = parse_arch_list(o.archs);
  TrainOptions plain = o.train;
  plain.config.arch = "llama";
  complete_options(plain);
  const bool fresh = !o.train.resume && !o.train.dry_run;
  Comparison comparison{plain.data.spec, fresh ? fresh_dir(o.train.out) : o.train.out, {}};
  for (const ArchChoice& choice : choices) {
    ComparedRun run{choice, plain, {}};
    run.options.config.arch = choice.arch;
    run.options.config.options = choice.options;
    run.options.out = comparison.out + "/" + choice.file_name();
    apply_preset_to_architecture(run.options);
    run.options.config.check(Exit::usage, "--arch " + choice.text);
    run.result = plan_training(run.options);
    run.result.run_dir = run.options.out;
    comparison.runs.push_back(run);
  }
  return comparison;
}

void record_failure(ComparedRun& run, Exit code, const std::string& message, const std::string& label) {
  run.state = RunState::failed;
  run.error = message;
  run.result.code = code;
  run.result.curves = read_curves(run.options.out + "/metrics.jsonl");
  Progress(label, run.options.steps).say("failed: " + message);
}

// A run that fails ends itself, not the comparison; but flags that are wrong for one are wrong for all.
void train(ComparedRun& run, const std::string& label) {
  run.error.clear();
  try {
    run.result = run_training(run.options, label);
    run.state = run.result.code == Exit::done ? RunState::done : RunState::stopped;
  } catch (const Error& error) {
    if (error.code == Exit::usage) throw;
    record_failure(run, error.code, error.what(), label);
  } catch (const std::bad_alloc&) {
    record_failure(run, Exit::device, "out of memory; use a smaller --batch, --seq or model", label);
  } catch (const std::exception& error) {
    record_failure(run, Exit::internal, error.what(), label);
  }
}

// Trains them one after the other; after each, the results so far are on the disk.
void train_all(Comparison& comparison) {
  size_t width = 0;
  for (const ComparedRun& run : comparison.runs) width = std::max(width, run.choice.text.size());
  for (ComparedRun& run : comparison.runs) {
    const std::string& name = run.choice.text;
    train(run, name + std::string(width - name.size(), ' '));
    write_results(comparison);
    if (run.state == RunState::stopped) return;
  }
}

// What to look at and what to do next.
void print_next(const Comparison& comparison) {
  std::printf("\nresults:  %s/results.md, results.json\npicture:  %s/compare.svg\n", comparison.out.c_str(),
              comparison.out.c_str());
  std::string last;
  for (const ComparedRun& run : comparison.runs)
    if (run.state == RunState::done) last = run.result.run_dir;
  const char* prompt = comparison.data.starts_with("arith:") ? "\"( 3 + 4 ) * 2 - 5 / 6 =\"" : "...";
  if (!last.empty()) std::printf("next:     build/generate --model %s --prompt %s\n", last.c_str(), prompt);
}

// The exit code is that of the first run that failed.
Exit conclude(const Comparison& comparison) {
  std::string failed;
  Exit code = Exit::done;
  for (const ComparedRun& run : comparison.runs) {
    if (run.state == RunState::stopped) {
      std::printf("\nto continue this comparison: the same command with --resume --out %s\n", comparison.out.c_str());
      return Exit::stopped;
    }
    if (run.state != RunState::failed) continue;
    if (failed.empty()) code = run.result.code;
    failed += " " + run.choice.text;
  }
  if (!failed.empty()) fail(code, "failed:", failed, "; the reason stands above");
  return Exit::done;
}

Exit run(const Options& o) {
  Comparison comparison = prepare(o);
  if (o.train.dry_run) {
    print_plans(comparison);
    return Exit::done;
  }
  make_device(o.train.device);  // refuses one that is not there
  if (o.train.resume) take_up(comparison);
  if (comparison.out != o.train.out)
    std::printf("%s holds an earlier comparison; this one is in %s\n", o.train.out.c_str(), comparison.out.c_str());
  for (const std::string& warning : {warmup_warning(o.train), parameter_warning(comparison)})
    if (!warning.empty()) std::printf("%s\n", warning.c_str());
  std::error_code error;
  std::filesystem::create_directories(comparison.out, error);
  if (error) fail_io("create", comparison.out, error.value());
  train_all(comparison);
  std::printf("\n%s", results_table(comparison).c_str());
  print_next(comparison);
  return conclude(comparison);
}

// Read before the other flags, because it changes their defaults.
bool gives_data(int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (std::strcmp(argv[i], "--data") == 0 || std::strncmp(argv[i], "--data=", 7) == 0) return true;
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains several architectures on the same batches from the same seed; ends with a table and a picture.\n"
               "Without --data and --preset: --preset arith-quick.",
               "compare");
  Options o;
  auto flags = [&] {
    // With --data, the sizes and steps that the trainers have, too; without, the demonstration.
    std::string preset = find_preset_flag(argc, argv);
    if (preset.empty() && !gives_data(argc, argv)) preset = "arith-quick";
    if (!preset.empty()) apply_preset(preset, o.train);
    app.add_option("--arch", o.archs, "the first is the yardstick; " + arch_list_help())->capture_default_str();
    add_train_flags(app, o.train);
    add_size_flags(app, o.train);
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
