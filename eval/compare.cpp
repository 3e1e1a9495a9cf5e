// compare: trains several architectures on the same batches from the same seed, and ends with one table and one
// picture.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "train/arch_list.h"
#include "train/curve.h"
#include "train/program.h"
#include "train/progress.h"
#include "train/trainer.h"

using namespace crossply;

namespace {

namespace fs = std::filesystem;

struct Row {
  ArchChoice choice;
  TrainOptions options;  // complete
  TrainResult result;
};

// A row of the table; "-" where the run, or the yardstick that it is compared with, has no numbers.
std::vector<std::string> cells(const Row& row, const TrainResult& yardstick, bool task) {
  const TrainResult& r = row.result;
  const bool done = r.code == Exit::done, comparable = done && yardstick.code == Exit::done;
  auto known = [](bool is_known, const std::string& text) { return is_known ? text : "-"; };
  std::vector<std::string> out = {
      row.choice.text,
      format_count(r.parameters),
      format_number("%.4g", r.flops_per_token),
      known(done, format_count(static_cast<int64_t>(r.tokens_per_second))),
      known(comparable, format_number("%.2fx", yardstick.tokens_per_second / r.tokens_per_second)),
      format_number("%.2fx", static_cast<double>(r.memory) / static_cast<double>(yardstick.memory)),
      known(done, format_number("%.4f", r.train_loss)),
      known(done, format_number("%.4f", r.test_loss))};
  if (!task) return out;
  out.push_back(known(done, format_number("%.1f%%", 100 * r.answers)));
  out.push_back(known(done, format_number("%.1f%%", 100 * r.steps_valid)));
  return out;
}

void print_results(const std::vector<Row>& rows) {
  const bool task = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.result.answers >= 0; });
  std::vector<std::vector<std::string>> table = {
      {"architecture", "parameters", "FLOP/token", "tokens/s", "rel. time", "memory", "train loss", "test loss"}};
  if (task) table[0].insert(table[0].end(), {"answers", "steps valid"});
  for (const Row& row : rows) table.push_back(cells(row, rows[0].result, task));
  std::printf("\n%s", format_table(table).c_str());
  std::printf(
      "rel. time and memory: against %s, which ran at another time; `make bench-architectures` measures in turn.\n"
      "FLOP/token: forward and backward. train loss: mean of the last fiftieth of the steps.\n",
      rows[0].choice.text.c_str());
  if (task) std::printf("answers: final answer correct; steps valid: every generated step is correct, too.\n");
}

// --dry-run: what the table can say without training.
void print_plans(const std::vector<Row>& rows) {
  std::vector<std::vector<std::string>> table = {{"architecture", "parameters", "FLOP/token", "memory"}};
  for (const Row& row : rows) {
    const TrainResult plan = plan_training(row.options);
    table.push_back({row.choice.text, format_count(plan.parameters), format_number("%.4g", plan.flops_per_token),
                     format_bytes(plan.planned_memory)});
  }
  std::printf("%sFLOP/token: forward and backward. memory: of the whole run, about.\n",
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
std::vector<Row> prepare(const Options& o) {
  if (!o.train.init.empty()) fail(Exit::usage, "compare trains from scratch; --init is for the trainers");
  if (o.train.dump_tape) fail(Exit::usage, "compare prints no tapes; --dump-tape is for the trainers");
  if (o.train.out.empty() && !o.train.dry_run) fail(Exit::usage, "--out is needed: the directory for the runs");
  if (o.train.steps == 0) fail(Exit::usage, "--steps 0: there is nothing to compare");
  const std::vector<ArchChoice> choices = parse_arch_list(o.archs);
  TrainOptions plain = o.train;
  plain.config.arch = "llama";
  complete_options(plain);
  std::vector<Row> rows;
  for (const ArchChoice& choice : choices) {
    Row row{choice, plain, {}};
    row.options.config.arch = choice.arch;
    row.options.config.options = choice.options;
    apply_preset_to_architecture(row.options);
    row.options.config.check(Exit::usage, "--arch " + choice.text);
    rows.push_back(row);
  }
  return rows;
}

// A loss that is not finite ends this run, not the comparison.
TrainResult train(const TrainOptions& options, const std::string& label, int64_t runs_after) {
  try {
    return run_training(options, label, runs_after);
  } catch (const Error& error) {
    if (error.code != Exit::not_finite) throw;
    Progress(label, options.steps).say(str("stopped: ", error.what()));
  }
  TrainResult result = plan_training(options);
  result.code = Exit::not_finite;
  return result;
}

void draw(const std::string& picture, const std::string& data, const std::vector<Row>& rows) {
  std::vector<Curve> curves;
  for (const Row& row : rows) curves.push_back({row.choice.text, row.result.curve_step, row.result.curve_loss});
  write_curve_svg(picture, "training loss on " + data, "step", "loss", curves);
  std::printf("\npicture: %s\nmodels:  ", picture.c_str());
  for (const Row& row : rows) std::printf(" %s", row.result.run_dir.c_str());
  const char* prompt = data.starts_with("arith:") ? "\"( 3 + 4 ) * 2 - 5 / 6 =\"" : "...";
  std::printf("\nnext:    build/generate --model %s --prompt %s\n", rows.back().result.run_dir.c_str(), prompt);
}

Exit run(const Options& o) {
  std::vector<Row> rows = prepare(o);
  if (o.train.dry_run) {
    print_plans(rows);
    return Exit::done;
  }
  const std::string out = o.train.resume ? o.train.out : fresh_dir(o.train.out);
  if (out != o.train.out)
    std::printf("%s holds an earlier comparison; this one is in %s\n", o.train.out.c_str(), out.c_str());
  size_t width = 0;
  for (const Row& row : rows) width = std::max(width, row.choice.text.size());
  const std::string all = "/" + std::to_string(rows.size()) + " ";
  std::string failed;
  int64_t runs = 0;
  for (Row& row : rows) {
    const std::string& name = row.choice.text;
    row.options.out = out + "/" + row.choice.file_name();
    const std::string label = std::to_string(++runs) + all + name + std::string(width - name.size(), ' ');
    row.result = train(row.options, label, static_cast<int64_t>(rows.size()) - runs);
    if (row.result.code == Exit::not_finite) failed += " " + name;
    if (row.result.code != Exit::stopped) continue;
    std::printf("to continue this comparison: the same command with --resume --out %s\n", out.c_str());
    return Exit::stopped;
  }
  print_results(rows);
  std::erase_if(rows, [](const Row& row) { return row.result.code != Exit::done; });
  if (!rows.empty()) draw(out + "/compare.svg", o.train.data.spec, rows);
  if (!failed.empty()) fail(Exit::not_finite, "the loss did not stay finite:", failed, "; the reason stands above");
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains several architectures on the same batches from the same seed; ends with a table and a picture.",
               "compare");
  Options o;
  auto flags = [&] {
    const std::string preset = find_preset_flag(argc, argv);
    apply_preset(preset.empty() ? "arith-quick" : preset, o.train);
    add_text(app, "--arch", o.archs, "LIST", "the first is the yardstick; " + arch_list_help());
    add_train_flags(app, o.train);
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
