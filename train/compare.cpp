// compare: trains several architectures on the same batches from the same seed, and ends with one table and one
// picture. Without --data and --preset it is the demonstration, arith-quick.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cli/format.h"
#include "cli/program.h"
#include "engine/file.h"
#include "engine/printable.h"
#include "kernels/devices.h"
#include "ranks/launch.h"
#include "train/arch_list.h"
#include "train/comparison.h"
#include "train/run.h"

using namespace crossply;

namespace {

namespace fs = std::filesystem;

// --dry-run: what the table can say without training.
void print_plans(const Comparison& comparison) {
  std::vector<std::vector<std::string>> table = {{"architecture", "parameters", "FLOP/token", "memory"}};
  for (const ComparedRun& run : comparison.runs)
    table.push_back({run.choice.text, format_count(run.result.parameters),
                     format_number("%.4g", run.result.flops_per_token), format_bytes(run.result.planned_memory)});
  std::printf("%sFLOP/token: forward and backward. memory: of the whole run, about.\n", format_table(table).c_str());
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
  if (!o.train.teacher.empty()) fail(Exit::usage, "compare trains without a teacher; --teacher is for the trainers");
  if (o.train.dump_tape || !o.train.dump_tensors.empty())
    fail(Exit::usage, "compare shows no single step; --dump-tape and --dump-tensors are for the trainers");
  if (o.train.world.ranks > 0) fail(Exit::usage, "compare plans jobs of one rank; --world is for the trainers");
  if (o.train.out.empty() && !o.train.dry_run) fail(Exit::usage, "--out is needed: the directory for the runs");
  if (o.train.steps == 0) fail(Exit::usage, "--steps 0: there is nothing to compare");
  const std::vector<ArchChoice> choices = parse_arch_list(o.archs, o.train.config.backbone);
  TrainOptions plain = o.train;
  plain.config.arch = plain.config.backbone;
  const Dataset data = open_inputs(plain);
  // A GPT-2 among LLaMAs learns as many as it is given.
  const int64_t positions = plain.config.gpt2() ? plain.config.max_position_embeddings : plain.data.seq_len;
  const bool fresh = !o.train.resume && !o.train.dry_run;
  Comparison comparison{plain.data.spec, fresh ? fresh_dir(o.train.out) : o.train.out, {}};
  if (data.test != nullptr) comparison.test_size = data.test->size();
  for (const ArchChoice& choice : choices) {
    ComparedRun run{choice, plain, {}};
    run.options.config.arch = choice.arch;
    run.options.config.options = choice.options;
    if (choice.arch == "gpt2") run.options.config.max_position_embeddings = positions;
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
  run.result.tokens_per_second = 0;
  Progress(label, run.options.steps).say("failed: " + message);
}

// A run that fails ends itself, not the comparison; but flags that are wrong for one are wrong for all.
void train_or_record(ComparedRun& run, const std::string& label, int64_t runs_after) {
  run.error.clear();
  TrainOptions options = run.options;
  options.label = label;
  options.runs_after = runs_after;
  try {
    run.result = train_run(std::move(options));
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
  const std::string all = "/" + std::to_string(comparison.runs.size()) + " ";
  size_t started = 0;
  for (ComparedRun& run : comparison.runs) {
    const std::string& name = run.choice.text;
    const std::string label = std::to_string(++started) + all + name + std::string(width - name.size(), ' ');
    train_or_record(run, label, unfinished_runs(comparison, started));
    write_results(comparison);
    if (run.state == RunState::stopped) return;
  }
}

// What to look at and what to do next.
void print_next(const Comparison& comparison) {
  const std::string out = printable(comparison.out);
  std::printf("\nresults:  %s/results.md, results.json\npicture:  %s/compare.svg\n", out.c_str(), out.c_str());
  std::string last;
  for (const ComparedRun& run : comparison.runs)
    if (run.state == RunState::done) last = run.result.run_dir;
  const char* prompt = comparison.data.starts_with("arith:") ? "\"( 3 + 4 ) * 2 - 5 / 6 =\"" : "...";
  if (!last.empty()) std::printf("next:     build/generate --model %s --prompt %s\n", printable(last).c_str(), prompt);
}

// The exit code is that of the first run that failed.
Exit conclude(const Comparison& comparison) {
  std::string failed;
  Exit code = Exit::done;
  for (const ComparedRun& run : comparison.runs) {
    if (run.state == RunState::stopped) {
      std::printf("\nto continue this comparison: build/compare --resume --out %s\n",
                  printable(comparison.out).c_str());
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
  const auto device = make_device(o.train.device);  // refuses one that is not there
  for (const ComparedRun& run : comparison.runs) refuse_too_large(run.options, *device);  // not when their turns come
  if (o.train.resume) take_up(comparison);
  if (comparison.out != o.train.out)
    std::printf("%s holds an earlier comparison; this one is in %s\n", printable(o.train.out).c_str(),
                printable(comparison.out).c_str());
  for (const std::string& warning : {warmup_warning(o.train), parameter_warning(comparison)})
    if (!warning.empty()) std::printf("%s\n", warning.c_str());
  std::error_code error;
  std::filesystem::create_directories(comparison.out, error);
  if (error) fail_io("create", comparison.out, error.value());
  // Before the first run ends: a kill then leaves what --resume needs.
  write_file_atomically(comparison.out + "/results.json", results_json(comparison));
  train_all(comparison);
  std::printf("\n%s", results_table(comparison).c_str());
  print_next(comparison);
  return conclude(comparison);
}

// A comparison that is resumed has its flags. Otherwise, with --data, the sizes and steps that the trainers have, too;
// without, the demonstration. The flags that are given come on top.
void set_defaults(int argc, char** argv, Options& o) {
  const std::string out = find_flag(argc, argv, "--out"), given = find_flag(argc, argv, "--preset");
  const bool resume = has_flag(argc, argv, "--resume") && !out.empty();
  const bool found = resume && take_comparison_settings(out, o.archs, o.train);
  if (!found && find_flag(argc, argv, "--backbone") == "gpt2") use_gpt2(o.train.config);
  const bool demonstration = !found && given.empty() && find_flag(argc, argv, "--data").empty();
  if (demonstration && resume && !path_exists(out))
    fail(Exit::usage, "--resume: there is no comparison in ", out, " yet; to start one, give its flags");
  const std::string preset = demonstration ? "arith-quick" : given;
  if (!preset.empty() && preset != o.train.preset) apply_preset(preset, o.train);
}
}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Trains several architectures on the same batches from the same seed; ends with a table and a picture.\n"
      "Without --data and --preset: --preset arith-quick.",
      "compare");
  Options o;
  auto flags = [&] {
    set_defaults(argc, argv, o);
    add_text(app, "--arch", o.archs, "LIST", "the first is the yardstick; " + arch_list_help());
    add_train_flags(app, o.train);
    for (const char* refused :
         {"--init", "--teacher", "--kd-alpha", "--kd-tau", "--kd-reduction", "--dump-tape", "--dump-tensors", "--world",
          "--node-gpus", "--gpu", "--nvlink", "--net", "--rank-rate"})
      app.get_option(refused)->group(hidden_group);  // prepare() says why
    app.get_option("--steps")->description("optimizer steps of each run");
    app.get_option("--out")->description("directory of the comparison: results.md, compare.svg, a directory per run");
    app.get_option("--resume")->description("continue the comparison in --out; needs no other flags");
  };
  return run_program(app, argc, argv, flags, [&] {
    check_teacher_flags(app, o.train);
    if (!place_from_environment().alone())
      fail(Exit::usage, "compare trains in one process; start it without mpirun, torchrun or srun");
    return run(o);
  });
}
