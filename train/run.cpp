// The loop around a Trainer, the same for every architecture.
#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <numeric>

#include "data/printable.h"
#include "engine/file.h"
#include "eval/answers.h"
#include "models/model.h"
#include "models/model_dir.h"
#include "models/registry.h"
#include "train/checkpoint.h"
#include "train/program.h"
#include "train/progress.h"
#include "train/run_curves.h"
#include "train/trainer.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int signal) {
  stop_requested = 1;
  std::signal(signal, SIG_DFL);  // a second one ends the program at once
}

std::string step_dir(const std::string& run_dir, int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "/step_%08lld", static_cast<long long>(step));
  return run_dir + name;
}

// Holds the run directory for this process; the system lets go of it when the process ends, however it ends.
class RunLock {
 public:
  explicit RunLock(const std::string& run_dir) : fd_(::open(run_dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    if (fd_.get() < 0) fail_io("open", run_dir, errno);
    if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0)
      fail(Exit::usage, run_dir, " is in use by another training process; wait for it or choose another --out");
  }

 private:
  Descriptor fd_;
};

// Nothing in a directory that somebody else filled is overwritten, and no run is continued by accident.
void check_run_dir(const TrainOptions& options) {
  if (options.out.empty()) fail(Exit::usage, "--out is needed: the directory for the run");
  std::error_code error;
  const bool used =
      fs::exists(options.out, error) && !(fs::is_directory(options.out, error) && fs::is_empty(options.out, error));
  if (options.resume && options.steps == 0) fail(Exit::usage, "--resume with --steps 0: there is nothing to continue");
  if (used && !options.resume)
    fail(Exit::usage, options.out,
         " exists and is not empty; choose another --out, or --resume to continue the run in it");
}

void make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail_io("create", path, error.value());
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

// Fills in what only the data can say, and checks the model against it.
Dataset open_data(TrainOptions& o) {
  if (o.data.spec.empty()) fail(Exit::usage, "--data is needed: arith:3|4|5|6, prosqa, text:FILE, or a glob of shards");
  o.data.seed = o.seed;
  Dataset dataset = open_dataset(o.data);
  take_tokenizer(o, dataset);
  const int64_t data_vocab = dataset.train->vocab_size();
  if (o.config.vocab_size == 0) o.config.vocab_size = data_vocab;
  if (o.config.vocab_size < 1) fail(Exit::usage, "--vocab is needed: token shards do not say their vocabulary");
  if (o.config.vocab_size > 0 && o.config.vocab_size < data_vocab)
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
  Run(const TrainOptions& options, const Dataset& dataset, Trainer& trainer, const std::string& label)
      : o_(options),
        data_(dataset),
        trainer_(trainer),
        progress_(label, options.steps),
        metrics_(options.out + "/metrics.jsonl", trainer.steps_done()),
        eval_every_(options.eval_every > 0 ? options.eval_every : std::max<int64_t>(1, options.steps / 10)),
        save_every_(options.save_every > 0 ? options.save_every : std::max<int64_t>(1, options.steps / 10)) {}

  Exit loop() {
    while (trainer_.steps_done() < o_.steps) {
      step();
      const int64_t done = trainer_.steps_done();
      const bool stopping = stop_requested != 0 && done < o_.steps;
      if (stopping || done == o_.steps || done % save_every_ == 0) save();
      if (!stopping) continue;
      progress_.say(str("stopped on request after step ", done, "; continue with the same command and --resume (in ",
                        o_.out, ")"));
      return Exit::stopped;
    }
    return Exit::done;
  }

  const std::vector<json>& lines() const { return metrics_.lines(); }
 private:
  void step() {
    const double before = trainer_.seconds;
    const StepResult result = trainer_.step();
    const int64_t done = trainer_.steps_done();
    const double rate = static_cast<double>(trainer_.tokens_per_step()) / (trainer_.seconds - before);
    json line = {{"step", done},          {"tokens", done * trainer_.tokens_per_step()}, {"loss", result.loss},
                 {"lr", result.lr},       {"grad_norm", result.norm},                    {"seconds", trainer_.seconds},
                 {"tokens_per_s", rate}};
    progress_.step(done, result.loss, result.lr, result.norm, rate);
    if (done % eval_every_ == 0 || done == o_.steps) evaluate(line);
    metrics_.write(line);
  }

  void evaluate(json& line) {
    line["test_loss"] = trainer_.evaluate(*data_.test, o_.eval_samples);
    std::string text = str("test loss ", line["test_loss"].get<double>());
    if (data_.test->task() != nullptr && o_.answer_samples > 0) {
      const Answers answers = answer_task(trainer_.device(), trainer_.params(), trainer_.config(), *data_.test,
                                          o_.answer_samples, /*rows=*/std::max<int64_t>(o_.batch, 16));
      line["answers_correct"] = answers.correct();
      line["steps_valid"] = answers.steps_valid();
      text += str(", answers ", 100 * answers.correct(), "%, all steps valid ", 100 * answers.steps_valid(), "%");
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
    trainer_.save(dir, data_.tokenizer);
    remove_old_checkpoints(o_.out, static_cast<int>(o_.keep));
    write_run_picture(o_.out + "/curve.svg", o_.config.arch + " on " + o_.data.spec, curves_of(metrics_.lines()));
  }

  const TrainOptions& o_;
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
  result.flops_per_token = 3 * trainer.replicas().forward_flops() / static_cast<double>(o.batch * o.data.seq_len);
  result.memory = trainer.memory();
  if (trainer.seconds > 0)
    result.tokens_per_second = static_cast<double>(trainer.steps_done() * trainer.tokens_per_step()) / trainer.seconds;
  result.curves = curves_of(lines);
  const auto last = [](const std::vector<double>& of, double none) { return of.empty() ? none : of.back(); };
  result.test_loss = last(result.curves.test_loss, 0);
  result.answers = last(result.curves.answers, -1);
  result.steps_valid = last(result.curves.steps_valid, -1);
  const auto end = result.curves.loss.end();
  const auto count = static_cast<std::ptrdiff_t>((lines.size() + 49) / 50);
  if (count > 0) result.train_loss = std::accumulate(end - count, end, 0.0) / static_cast<double>(count);
  return result;
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

// The files of a model directory that are not ours to understand: they belong to the model wherever it goes.
std::map<std::string, std::string> read_carried_files(const std::string& dir) {
  std::map<std::string, std::string> files;
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
        "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"}) {
    const std::string path = dir + "/" + name;
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    const InputFile file(path);
    std::string& contents = files[name];
    contents.resize(file.size());
    file.read(0, contents.data(), contents.size());
  }
  return files;
}

// What --init's model becomes: its own architecture, or from a plain LLaMA one that can start as it.
void choose_architecture(TrainOptions& o, const Config& asked) {
  Config& c = o.config;
  const std::string from = c.arch;
  if (from == asked.arch) {
    if (!o.given_options.empty())
      fail(Exit::usage, "--init takes the options from its config.json; leave out ", o.given_options.front());
    return;
  }
  if (from != "llama")
    fail(Exit::usage, "--init ", o.init, " holds a ", from, ", not a ", asked.arch,
         "; only a llama can become another architecture");
  c.arch = asked.arch;
  c.options = asked.options;
  c.check(Exit::usage, "flags");
  ParameterTable params;
  declare_model(params, c);
  const std::string remark = find_architecture(c.arch).make(c)->start_as_llama(params, c);
  std::fprintf(stderr, "note: %s starts as the llama of %s%s%s\n", c.arch.c_str(), o.init.c_str(),
               remark.empty() ? "" : ": ", remark.c_str());
}

// The model of --init: sizes, tokenizer and its other files. A resumed run has them in its checkpoint.
void take_initial(TrainOptions& o, const std::string& checkpoint) {
  const Config asked = o.config;
  const bool fewer = o.given_sizes == std::vector<std::string>{"--layers"};
  if (!o.given_sizes.empty() && !fewer)
    fail(Exit::usage, "--init takes the sizes from its config.json; leave out ",
         o.given_sizes[o.given_sizes[0] == "--layers" ? 1 : 0]);
  const std::string dir = checkpoint.empty() ? resolve_model_dir(o.init) : checkpoint;
  o.initial = {load_config(dir + "/config.json"), Tokenizer::load(dir), read_carried_files(dir)};
  o.config = o.initial.config;
  if (checkpoint.empty()) {
    if (fewer && (asked.num_hidden_layers < 1 || asked.num_hidden_layers > o.config.num_hidden_layers))
      fail(Exit::usage, "--layers ", asked.num_hidden_layers, ": --init ", o.init, " has ", o.config.num_hidden_layers,
           " blocks, of which the first so many can be taken");
    if (fewer) o.config.num_hidden_layers = asked.num_hidden_layers;
    choose_architecture(o, asked);
    return;
  }
  if (o.config.arch != asked.arch)
    fail(Exit::usage, checkpoint, " holds a ", o.config.arch, ", not a ", asked.arch);
  if (fewer) o.config.num_hidden_layers = asked.num_hidden_layers;  // compared with the checkpoint's where it is read
  for (const auto& [key, value] : asked.options) o.config.options[key] = value;
}

// The checkpoint to continue from; "" to start at step 0.
std::string find_checkpoint(const TrainOptions& o, const std::string& label) {
  if (!o.resume) return "";
  std::vector<std::string> skipped;
  const std::string checkpoint = newest_valid_checkpoint(o.out, &skipped);
  for (const std::string& line : skipped) std::printf("%s %s\n", label.c_str(), line.c_str());
  if (checkpoint.empty() && !skipped.empty())
    fail(Exit::bad_data, "--resume: no checkpoint in ", o.out, " is valid; move it away to start again");
  set_aside_damaged_checkpoints(o.out);
  if (checkpoint.empty()) std::printf("%s no checkpoint in %s yet: starting at step 0\n", label.c_str(), o.out.c_str());
  return checkpoint;
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
  check_numbers(o);
  return dataset;
}

TrainResult run_training(TrainOptions o, const std::string& label) {
  const bool plan_only = o.dry_run || o.dump_tape;
  if (!plan_only) check_run_dir(o);
  if (!o.init.empty()) take_initial(o, o.resume ? newest_valid_checkpoint(o.out) : "");
  const Dataset dataset = complete_options(o);
  if (plan_only) {
    print_plan(o);
    return {};
  }
  if (o.steps == 0) return write_initialised(o, dataset);
  make_device(o.device);  // refuses one that is not there before the run directory exists
  make_directory(o.out);
  const RunLock lock(o.out);
  const std::string checkpoint = find_checkpoint(o, label);
  Trainer trainer(o, *dataset.train, checkpoint);
  if (!checkpoint.empty())
    std::printf("%s resumed after step %lld\n", label.c_str(), static_cast<long long>(trainer.steps_done()));
  write_file_atomically(o.out + "/flags.json", all_settings(o).dump(2) + "\n");
  std::printf("%s %s parameters, %s, %s of memory\n", label.c_str(), format_count(trainer.params().count()).c_str(),
              trainer.device().describe().c_str(), format_bytes(static_cast<double>(trainer.memory())).c_str());
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, request_stop);
  Run run(o, dataset, trainer, label);
  const Exit code = run.loop();
  std::printf("%s", trainer.profile().c_str());
  TrainResult result = summarise(trainer, o, run.lines());
  result.code = code;
  return result;
}

int train_main(int argc, char** argv, const std::string& arch) {
  CLI::App app("Trains " + arch + ": " + find_architecture(arch).meaning + ".", "train_" + arch);
  TrainOptions options;
  auto flags = [&] {
    const std::string preset = find_preset_flag(argc, argv);
    if (!preset.empty()) apply_preset(preset, options);
    options.config.arch = arch;
    add_train_flags(app, options);
    add_size_flags(app, options);
    add_architecture_flags(app, options);
  };
  return run_program(app, argc, argv, flags, [&] {
    options.given_sizes = given_flags(app, "Model");
    options.given_options = given_flags(app, arch);
    if (const std::string warning = warmup_warning(options); !warning.empty()) std::printf("%s\n", warning.c_str());
    return run_training(options, arch).code;
  });
}

}  // namespace crossply
