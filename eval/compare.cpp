// compare: trains several architectures on the same batches from the same seed, and ends with one table and one picture.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "models/registry.h"
#include "train/curve.h"
#include "train/program.h"
#include "train/progress.h"
#include "train/trainer.h"

using namespace crossply;

namespace {

namespace fs = std::filesystem;

struct Row {
  std::string arch;
  TrainResult result;
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    names.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

void print_table(const std::vector<Row>& rows) {
  const bool task = rows[0].result.answers >= 0;
  std::printf("\n%-14s %12s %10s %10s %9s %7s %10s %10s", "architecture", "parameters", "FLOP/token", "tokens/s", "rel. time",
              "memory", "train loss", "test loss");
  std::printf(task ? " %9s %11s\n" : "\n", "answers", "steps valid");
  for (const Row& row : rows) {
    const TrainResult& r = row.result;
    std::printf("%-14s %12s %10.4g %10s %8.2fx %6.2fx %10.4f %10.4f", row.arch.c_str(), format_count(r.parameters).c_str(),
                r.flops_per_token, format_count(static_cast<int64_t>(r.tokens_per_second)).c_str(),
                rows[0].result.tokens_per_second / r.tokens_per_second,
                static_cast<double>(r.memory) / static_cast<double>(rows[0].result.memory), r.train_loss, r.test_loss);
    if (task) std::printf(" %8.1f%% %10.1f%%", 100 * r.answers, 100 * r.steps_valid);
    std::printf("\n");
  }
  std::printf("rel. time and memory: against %s. FLOP/token: forward and backward.\n", rows[0].arch.c_str());
  if (task) std::printf("answers: final answer correct; steps valid: every generated step is correct, too.\n");
}

// The directory to write to: `out`, or with a number appended where that holds an earlier comparison.
std::string fresh_dir(const std::string& out) {
  std::error_code error;
  std::string dir = out;
  for (int i = 2; fs::exists(dir, error) && !(fs::is_directory(dir, error) && fs::is_empty(dir, error)); ++i)
    dir = out + "-" + std::to_string(i);
  return dir;
}

// Refuses what would only fail after hours of training.
std::vector<std::string> check(const std::string& archs, const TrainOptions& o) {
  if (o.out.empty()) fail(Exit::usage, "--out is needed: the directory for the runs");
  if (!o.init.empty()) fail(Exit::usage, "compare trains from scratch; --init is for the trainers");
  if (o.steps == 0) fail(Exit::usage, "--steps 0: there is nothing to compare");
  const std::vector<std::string> names = split(archs);
  for (const std::string& name : names) {
    find_architecture(name);
    if (std::count(names.begin(), names.end(), name) > 1) fail(Exit::usage, "--arch names ", name, " twice");
  }
  return names;
}

struct Options {
  std::string archs = "llama,lime";
  TrainOptions train;
};

Exit run(Options o) {
  const std::vector<std::string> names = check(o.archs, o.train);
  const std::string out = o.train.resume ? o.train.out : fresh_dir(o.train.out);
  if (out != o.train.out) std::printf("%s holds an earlier comparison; this one is in %s\n", o.train.out.c_str(), out.c_str());
  size_t width = 0;
  for (const std::string& name : names) width = std::max(width, name.size());
  std::vector<Row> rows;
  for (const std::string& name : names) {
    TrainOptions options = o.train;
    options.config.arch = name;
    options.out = out + "/" + name;
    rows.push_back({name, run_training(options, name + std::string(width - name.size(), ' '))});
    if (rows.back().result.code == Exit::done) continue;
    std::printf("to continue this comparison: the same command with --resume --out %s\n", out.c_str());
    return rows.back().result.code;
  }
  std::vector<Curve> curves;
  for (const Row& row : rows) curves.push_back({row.arch, row.result.curve_step, row.result.curve_loss});
  const std::string picture = out + "/compare.svg";
  write_curve_svg(picture, "training loss on " + o.train.data.spec, "step", "loss", curves);
  print_table(rows);
  std::printf("\npicture: %s\nmodels:  ", picture.c_str());
  for (const Row& row : rows) std::printf(" %s", row.result.run_dir.c_str());
  if (o.train.data.spec.starts_with("arith:"))
    std::printf("\nnext:    build/generate --model %s --prompt \"( 3 + 4 ) * 2 - 5 / 6 =\"\n", rows.back().result.run_dir.c_str());
  else
    std::printf("\nnext:    build/generate --model %s --prompt ...\n", rows.back().result.run_dir.c_str());
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains several architectures on the same batches from the same seed; ends with a table and a picture.", "compare");
  Options o;
  auto flags = [&] {
    const std::string preset = find_preset_flag(argc, argv);
    apply_preset(preset.empty() ? "arith-quick" : preset, o.train);
    app.add_option("--arch", o.archs, "architectures, separated by commas; the first is the yardstick")->capture_default_str();
    add_train_flags(app, o.train);
    add_size_flags(app, o.train);
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
