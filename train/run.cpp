// The loop around a Trainer, the same for every architecture.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "cli/format.h"
#include "cli/program.h"
#include "engine/file.h"
#include "engine/printable.h"
#include "eval/answers.h"
#include "kernels/devices.h"
#include "models/checkpoint.h"
#include "models/model.h"
#include "models/model_dir.h"
#include "models/registry.h"
#include "train/dump_tensors.h"
#include "train/initial.h"
#include "train/memory.h"
#include "train/metrics.h"
#include "train/progress.h"
#include "train/run_curves.h"
#include "train/run_dir.h"
#include "train/trainer.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int) { stop_requested = 1; }

// A second signal of a kind ends the program at once. What is ignored, as under nohup, stays ignored.
void catch_stop_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    struct sigaction action;
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;
    action.sa_handler = request_stop;
    action.sa_flags = SA_RESTART | SA_RESETHAND;
    ::sigaction(signal, &action, nullptr);
  }
}

std::string step_dir(const std::string& run_dir, int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "/step_%08lld", static_cast<long long>(step));
  return run_dir + name;
}

// A word as a shell takes it back.
std::string shell_word(const std::string& text) {
  const auto plain = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_./+,:@%-", c); };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

// --data without the directories of its files.
std::string short_name(const std::string& spec) {
  const std::string kind = spec.starts_with("text:") ? "text:" : "";
  return kind + fs::path(spec.substr(kind.size())).filename().string();
}

// The tokenizer belongs to the model.
void take_tokenizer(const TrainOptions& o, Dataset& dataset) {
  if (o.init.empty()) return;
  const Tokenizer& own = o.initial.tokenizer;
  require_same_tokenizer(own, "--init " + o.init, dataset.tokenizer, o.data.spec);
  if (own.is_none() && !dataset.tokenizer.is_none())
    std::fprintf(stderr, "note: --init %s has no tokenizer: it gets that of %s, %s\n", o.init.c_str(),
                 o.data.spec.c_str(), dataset.tokenizer.describe().c_str());
  if (dataset.tokenizer.is_none()) dataset.tokenizer = own;
}

// The same data may have moved since the run began.
Dataset open_named_data(const TrainOptions& o) {
  try {
    return open_dataset(o.data);
  } catch (const Error& error) {
    if (!o.resume || error.code != Exit::no_input) throw;
    fail(error.code, error.what(), "; if the data has moved, say with --data",
         o.data.val_spec.empty() ? "" : " and --val-data", " where it is now");
  }
}

// Fills in what only the data can say, and checks the model against it.
Dataset open_data(TrainOptions& o) {
  if (o.data.spec.empty()) fail(Exit::usage, "--data is needed: arith:3|4|5|6, prosqa, text:FILE, or a glob of shards");
  o.data.seed = o.seed;
  Dataset dataset = open_named_data(o);
  take_tokenizer(o, dataset);
  const int64_t data_vocab = dataset.train->vocab_size();
  if (o.config.vocab_size == 0) o.config.vocab_size = data_vocab;
  if (o.config.vocab_size < 1) fail(Exit::usage, "--vocab is needed: token shards do not say their vocabulary");
  if (o.config.vocab_size < data_vocab)
    fail(Exit::bad_data, o.data.spec, " has a vocabulary of ", data_vocab, ", the model's is ", o.config.vocab_size,
         "; give --vocab ", data_vocab);
  if (!o.dry_run && !o.dump_tape) {
    dataset.train->check_tokens(o.config.vocab_size);
    dataset.test->check_tokens(o.config.vocab_size);
  }
  o.data.seq_len = dataset.train->seq_len();
  o.config.max_position_embeddings = std::max(o.config.max_position_embeddings, o.data.seq_len);
  return dataset;
}

// A run's loop, with what it needs between steps.
class Run {
 public:
  Run(const TrainOptions& options, const RunDir& dir, const Dataset& dataset, Trainer& trainer,
      const std::string& label, int64_t runs_after)
      : o_(options),
        dir_(dir),
        data_(dataset),
        trainer_(trainer),
        progress_(label, options.steps, runs_after),
        metrics_(options.out + "/metrics.jsonl", trainer.steps_done()),
        eval_every_(options.eval_every > 0 ? options.eval_every : std::max<int64_t>(1, options.steps / 10)),
        save_every_(options.save_every > 0 ? options.save_every : std::max<int64_t>(1, options.steps / 10)) {
    for (const std::string& note : metrics_.notes()) progress_.say(note);
  }

  Exit loop() {
    while (trainer_.steps_done() < o_.steps) {
      step();
      const int64_t done = trainer_.steps_done();
      const bool stopping = stop_requested != 0 && done < o_.steps;
      if (stopping || done == o_.steps || done % save_every_ == 0) save();
      if (!stopping) continue;
      const std::string command = o_.program + " --resume --out " + shell_word(o_.out);
      progress_.say(str("stopped on request after step ", done, o_.program.empty() ? "" : "; to continue: " + command));
      return Exit::stopped;
    }
    return Exit::done;
  }

  const std::vector<json>& lines() const { return metrics_.lines(); }

 private:
  void step() {
    dir_.check_present();
    const double before = trainer_.seconds;
    const StepResult result = trainer_.step();
    const int64_t done = trainer_.steps_done();
    const double rate = tokens_per_second(trainer_.tokens_per_step(), trainer_.seconds - before);
    json line = {{"step", done},
                 {"tokens", done * trainer_.tokens_per_step()},
                 {"loss", result.loss},
                 {"lr", result.lr},
                 {"grad_norm", result.norm},
                 {"seconds", trainer_.seconds}};
    if (rate > 0) line["tokens_per_s"] = rate;
    progress_.step(done, result.loss, result.lr, result.norm, static_cast<double>(trainer_.tokens_per_step()),
                   trainer_.seconds - before);
    if (done % eval_every_ == 0 || done == o_.steps) evaluate(line);
    metrics_.write(line);
  }

  void evaluate(json& line) {
    line["test_loss"] = trainer_.evaluate(*data_.test, o_.eval_samples);
    const int64_t size = data_.test->size();
    std::string text = str("step ", trainer_.steps_done(), ": test loss ", format_number("%.4f", line["test_loss"]));
    if (o_.eval_samples < size)
      text += " (" + format_count(o_.eval_samples) + " of " + format_count(size) + " sequences)";
    if (data_.test->task() != nullptr && o_.answer_samples > 0) {
      const Answers answers = answer_task(trainer_.device(), trainer_.params(), trainer_.config(), *data_.test,
                                          o_.answer_samples, answer_rows(o_));
      line["answers_correct"] = answers.correct();
      line["steps_valid"] = answers.steps_valid();
      text += format_number(", answers %.1f%%", 100 * answers.correct()) +
              format_number(", all steps valid %.1f%%", 100 * answers.steps_valid());
      progress_.say(text);
      std::string prompt = data_.tokenizer.decode(answers.sample_prompt),
                  answer = data_.tokenizer.decode(answers.sample);
      if (prompt.size() > 60) prompt = "..." + prompt.substr(prompt.size() - 57);
      if (answer.size() > 120) answer = answer.substr(0, 117) + "...";
      text = printable("sample: " + prompt + " >> " + answer);
    }
    progress_.say(text);
  }

  void save() {
    const std::string dir = step_dir(o_.out, trainer_.steps_done());
    metrics_.sync();
    trainer_.save(dir, data_.tokenizer);
    dir_.check_present();
    remove_old_checkpoints(o_.out, o_.keep);
    const std::string title = o_.config.arch + " on " + short_name(o_.data.spec);
    write_run_picture(o_.out + "/curve.svg", title, curves_of(metrics_.lines()));
  }

  const TrainOptions& o_;
  const RunDir& dir_;
  const Dataset& data_;
  Trainer& trainer_;
  Progress progress_;
  Metrics metrics_;
  int64_t eval_every_, save_every_;
};

TrainResult summarise(const Trainer& trainer, const TrainOptions& o, const std::vector<json>& lines) {
  TrainResult result;
  result.run_dir = o.out;
  result.parameters = trainer.params().count();
  result.flops_per_token = 3 * trainer.model().forward_flops() / static_cast<double>(o.batch * o.data.seq_len);
  result.memory = trainer.memory();
  result.tokens_per_second = tokens_per_second(trainer.steps_done() * trainer.tokens_per_step(), trainer.seconds);
  result.curves = curves_of(lines);
  const auto last = [](const std::vector<double>& of, double none) { return of.empty() ? none : of.back(); };
  result.test_loss = last(result.curves.test_loss, NAN);  // where somebody removed the metrics of a run that is done
  result.answers = last(result.curves.answers, -1);
  result.steps_valid = last(result.curves.steps_valid, -1);
  result.train_loss = final_loss(result.curves);
  return result;
}

// Where most of the vocabulary is of no use; "" otherwise. That of --init is the model's own.
std::string vocabulary_note(const TrainOptions& o, const Dataset& dataset) {
  const int64_t used = dataset.train->vocab_size(), V = o.config.vocab_size;
  if (!o.init.empty() || used == 0 || V < 2 * used) return "";
  const int64_t saved = (V - used) * o.config.hidden_size * (o.config.tie_word_embeddings ? 1 : 2);
  return str("note: the data has ", format_count(used), " different tokens, the model ", format_count(V), ": --vocab ",
             used, " would save ", format_count(saved), " parameters");
}

// The lines of a dry run about its data; none where sizes alone were enough.
std::string data_lines(const TrainOptions& o, const Dataset& dataset) {
  if (dataset.train == nullptr) return "";
  std::string text = describe_data(o, dataset);
  for (size_t at = 0; (at = text.find("; ", at)) != std::string::npos; ++at) text.replace(at, 2, "\n  ");
  std::string note = vocabulary_note(o, dataset);
  if (const size_t at = note.find(": --vocab"); at != std::string::npos) note.replace(at, 2, "\n  ");
  return text + "\n" + (note.empty() ? "" : note + "\n");
}

void print_start(const TrainOptions& o, const Dataset& dataset, Trainer& trainer, const std::string& label) {
  auto say = [&](const std::string& line) {
    if (!line.empty()) std::printf("%s %s\n", label.c_str(), line.c_str());
  };
  const int64_t done = trainer.steps_done();
  if (done > 0)
    say(str("resumed after step ", done,
            done == o.steps ? ", the last one: the run is done; a larger --steps continues it" : ""));
  say(trainer.schedule_change());
  say(str(format_count(trainer.params().count()), " parameters, ", trainer.device().describe(), ", ",
          format_bytes(static_cast<double>(trainer.memory())), " for the model and its activations"));
  say(describe_data(o, dataset));
  const double chance = dataset.test->task() != nullptr && o.answer_samples > 0 ? chance_of(o.data.spec) : NAN;
  if (std::isfinite(chance)) say(format_number("answers: guessing gets %.1f%%", 100 * chance));
  if (done == 0) say(vocabulary_note(o, dataset));
}

// --dump-tensors: of the batch that the run would take next.
TrainResult write_tensors(const TrainOptions& o, const Source& train, Trainer& trainer) {
  std::vector<int32_t> tokens(static_cast<size_t>(o.batch * train.seq_len())), targets(tokens.size());
  Loader loader(train, o.batch, o.seed, true);
  loader.seek(trainer.steps_done() * o.batch * o.accumulate);
  loader.next(tokens.data(), targets.data());
  const std::string path = o.out + "/tensors.safetensors";
  const Batch batch{o.batch, train.seq_len(), storage_type(o), true, PlanMode::distinct};
  const Dumped dumped =
      dump_tensors(o.dump_tensors, path, trainer.params(), o.config, batch, tokens.data(), targets.data());
  std::printf("wrote %zu tensors of step %lld's %s batch to %s; its loss is %.9g\n", dumped.tensors,
              static_cast<long long>(trainer.steps_done() + 1), o.accumulate > 1 ? "first" : "whole", path.c_str(),
              dumped.loss);
  return {};
}

// --steps 0: the initialised model itself, as a plain model directory.
TrainResult write_initialised(const TrainOptions& o, const Dataset& dataset) {
  Trainer trainer(o, *dataset.train);
  CheckpointWriter writer;
  writer.begin(o.out);
  write_model(writer, o, trainer.params(), dataset.tokenizer);
  writer.commit();
  std::printf("wrote an initialised %s with %s parameters to %s\n", o.config.arch.c_str(),
              format_count(trainer.params().count()).c_str(), o.out.c_str());
  return summarise(trainer, o, {});
}

}  // namespace

void write_model(const CheckpointWriter& writer, const TrainOptions& o, const ParameterTable& params,
                 const Tokenizer& tokenizer) {
  save_config(writer.path("config.json"), o.config);
  save_tensors(writer.path("model.safetensors"), params, {{"", params.values()}});
  tokenizer.save(fs::path(writer.path("config.json")).parent_path());
  for (const auto& [name, contents] : o.initial.files) write_file_atomically(writer.path(name), contents);
}

Dataset complete_options(TrainOptions& o) {
  if (o.init.empty()) apply_preset_to_architecture(o);
  const bool plan_only = o.dry_run || o.dump_tape, sizes_known = o.config.vocab_size > 0 && o.data.seq_len > 0;
  Dataset dataset;
  if (!(plan_only && sizes_known && o.data.spec.empty())) dataset = open_data(o);
  o.config.check(Exit::usage, "flags");
  check_together(o);
  return dataset;
}

std::string describe_data(const TrainOptions& o, const Dataset& data) {
  const int64_t size = data.train->size(), T = data.train->seq_len(), each = o.batch * o.accumulate;
  const double epochs = static_cast<double>(o.steps) * static_cast<double>(each) / static_cast<double>(size);
  return str("data: ", format_count(size * T), " training tokens in ", format_count(size), " sequences of ",
             format_count(T), "; ", format_count(o.steps), " steps x ", format_count(each), " sequences = ",
             epochs < 100 ? format_number(epochs < 0.1 ? "%.2g" : "%.1f", epochs) : format_count(std::llround(epochs)),
             " epochs; test set ", format_count(data.test->size()), " sequences");
}

TrainResult run_training(TrainOptions o, const std::string& label, int64_t runs_after) {
  const bool plan_only = o.dry_run || o.dump_tape;
  if (!plan_only) check_run_dir(o);
  const bool started = o.resume && !read_run_settings(o.out).is_null();
  if (!o.init.empty()) take_initial(o, started);
  const Dataset dataset = complete_options(o);
  if (plan_only) {
    print_plan(o, data_lines(o, dataset));
    return {};
  }
  if (o.steps == 0) return write_initialised(o, dataset);
  make_device(o.device);  // refuses one that is not there before the run directory exists
  catch_stop_signals();   // before there is anything to leave behind
  const RunDir run_dir(o.out);
  check_run_dir(o);  // again, now that nobody else changes it
  remove_leftovers_of(o.out);
  remove_leftovers_in(o.out);
  Trainer trainer(o, *dataset.train, find_checkpoint(o, label));
  if (!o.dump_tensors.empty()) return write_tensors(o, *dataset.train, trainer);
  write_file_atomically(o.out + "/flags.json", all_settings(o).dump(2) + "\n");
  print_start(o, dataset, trainer, label);
  Run run(o, run_dir, dataset, trainer, label, runs_after);
  const Exit code = run.loop();
  std::printf("%s", trainer.profile().c_str());
  if (o.profile) std::printf("peak of resident memory: %s\n", format_bytes(peak_memory()).c_str());
  TrainResult result = summarise(trainer, o, run.lines());
  result.code = code;
  return result;
}

int train_main(int argc, char** argv, const std::string& arch) {
  CLI::App app("Trains " + arch + ": " + find_architecture(arch).meaning + ".", "train_" + arch);
  TrainOptions options;
  auto flags = [&] {
    options.config.arch = arch;
    // A run that is resumed has its flags; those given beside --resume come on top.
    auto is_resume = [](const char* word) { return std::strcmp(word, "--resume") == 0; };
    if (std::any_of(argv, argv + argc, is_resume)) take_run_settings(find_flag(argc, argv, "--out"), options);
    const std::string preset = find_flag(argc, argv, "--preset");
    if (!preset.empty() && preset != options.preset) apply_preset(preset, options);
    add_train_flags(app, options);
    add_architecture_flags(app, options);
  };
  return run_program(app, argc, argv, flags, [&] {
    options.program = argv[0];
    options.given_sizes = given_flags(app, "Model");
    options.given_options = given_flags(app, arch);
    if (const std::string warning = warmup_warning(options); !warning.empty()) std::printf("%s\n", warning.c_str());
    return run_training(options, arch).code;
  });
}

}  // namespace crossply
