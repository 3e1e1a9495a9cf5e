// evaluate: loss and perplexity of a model on data, and the accuracy where the data is a task. A file is scored from
// end to end in windows of the model's training length, every token but the first once; where the model was trained on
// the file, its test part is.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include "eval/answers.h"
#include "eval/loaded_model.h"
#include "models/json_file.h"
#include "train/options.h"
#include "train/program.h"
#include "train/progress.h"
#include "train/replicas.h"

using namespace crossply;

namespace {

struct Options {
  std::string model, split, device = "cpu";
  DataOptions data;
  std::optional<uint64_t> seed;
  int64_t batch = 0, samples = 0, answers = 1000;
};

struct Choice {
  DataOptions data;
  std::string split;  // test, train or all
  bool trained_on;    // is it the data of the run that trained the model?
};

// The data of the run that trained the model; all empty and zero without one.
DataOptions read_run(const std::string& dir) {
  const std::string path = dir + "/train_state.json";
  DataOptions run;
  if (!path_exists(path)) return run;
  const nlohmann::json state = read_json(path), flags = state.value("trajectory", nlohmann::json::object());
  if (!flags.is_object()) fail(Exit::bad_data, path, ": \"trajectory\" is no object");
  read(flags, "data", run.spec, path);
  read(flags, "val_data", run.val_spec, path);
  auto count = [&](const char* key, auto& into) {
    int64_t number = static_cast<int64_t>(into);
    read(flags, key, number, path);
    if (number < 0) fail(Exit::bad_data, path, ": \"", key, "\" is ", number, "; it must not be negative");
    into = static_cast<std::decay_t<decltype(into)>>(number);
  };
  count("seed", run.seed);
  count("seq", run.seq_len);
  count("train_samples", run.train_samples);
  count("test_samples", run.test_samples);
  return run;
}

bool same_data(const std::string& a, const std::string& b) {
  std::error_code ignored;
  return absolute_data(a) == absolute_data(b) ||
         (a.starts_with("text:") && b.starts_with("text:") &&
          std::filesystem::equivalent(a.substr(5), b.substr(5), ignored));
}

// What the flags leave open is as in the run that trained the model, so that the test set is the one it did not see.
// Files that this run did not train on are scored from end to end.
Choice complete(const Options& o, const LoadedModel& model) {
  Choice choice{o.data, o.split, false};
  DataOptions& data = choice.data;
  const bool files = data.spec.starts_with("text:") || data.spec.ends_with(".bin");
  const DataOptions run = read_run(model.dir);
  const bool same = choice.trained_on = same_data(run.spec, data.spec);
  data.seed = o.seed.value_or(same ? run.seed : 42);
  if (same && data.train_samples == 0) data.train_samples = run.train_samples;
  if (same && data.test_samples == 0) data.test_samples = run.test_samples;
  if (same && data.val_spec.empty()) data.val_spec = run.val_spec;
  if (data.seq_len == 0 && (same || files)) data.seq_len = run.seq_len;
  if (data.seq_len == 0 && files) data.seq_len = model.config.max_position_embeddings;
  if (choice.split.empty()) choice.split = same || !files || !data.val_spec.empty() ? "test" : "all";
  if (choice.split == "all" && !files) fail(Exit::usage, "--split all is for files; ", data.spec, " is generated");
  data.whole = choice.split == "all";
  return choice;
}

void print_loss(const Source& source, const Replicas::Mean& mean, bool bytes, const Choice& choice) {
  std::string meaning = "every token but a file's first, once; a file's last sequence overlaps the one before it";
  if (choice.split != "all") {
    meaning = choice.trained_on ? "of the data that the model was trained on, " : "";
    meaning += choice.split == "test" ? "the part kept from training" : "the part for training";
  }
  std::printf("split %s: %s\nsequences %s of %lld tokens\n", choice.split.c_str(), meaning.c_str(),
              format_count(mean.sequences).c_str(), static_cast<long long>(source.seq_len()));
  if (source.file_tokens() > 0)
    std::printf("scored %s of %s tokens\n", format_count(mean.scored).c_str(),
                format_count(source.file_tokens()).c_str());
  else std::printf("scored tokens %s\n", format_count(mean.scored).c_str());
  std::printf("loss %.6f\nperplexity %.6g\n", mean.loss, std::exp(mean.loss));
  if (bytes) std::printf("bits per byte %.4f\n", mean.loss / std::numbers::ln2);
}

void print_answers(LoadedModel& model, const Source& source, int64_t count) {
  const Answers answers = answer_task(*model.device, model.params, model.config, source, count, 64);
  std::printf("prompts %s\nanswers correct %.2f%%\nall steps valid %.2f%%\n", format_count(answers.asked).c_str(),
              100 * answers.correct(), 100 * answers.steps_valid());
  if (answers.hard > 0)
    std::printf("answers correct where counting mentions fails %.2f%% (of %s)\n",
                100.0 * static_cast<double>(answers.hard_right) / static_cast<double>(answers.hard),
                format_count(answers.hard).c_str());
}

Exit run(const Options& o) {
  LoadedModel model(o.model, o.device, false);
  const Choice choice = complete(o, model);
  const Dataset dataset = open_dataset(choice.data);
  const Tokenizer tokenizer = Tokenizer::load(model.dir);
  require_same_tokenizer(tokenizer, o.model, dataset.tokenizer, choice.data.spec);
  if (tokenizer.is_none() && !dataset.tokenizer.is_none())
    std::fprintf(stderr, "note: %s has no tokenizer: the ids of %s are taken as its own\n", o.model.c_str(),
                 choice.data.spec.c_str());
  const Source& source = choice.split == "train" ? *dataset.train : *dataset.test;
  source.check_tokens(model.config.vocab_size);

  const int64_t samples = o.samples > 0 ? o.samples : source.size(), T = source.seq_len();
  const int64_t enough = std::max<int64_t>(1, std::min<int64_t>(16, 16384 / T));  // long sequences fill the cores alone
  const int64_t batch = o.batch > 0 ? o.batch : std::min(enough, std::min(samples, source.size()));
  check_batch(batch, 1, T);
  Replicas replicas(*model.device, model.params, model.config,
                    Batch{batch, T, model.params.dtype(), /*training=*/false});
  const Replicas::Mean mean = replicas.mean_loss(source, samples);
  if (!std::isfinite(mean.loss)) fail(Exit::not_finite, "the loss is ", mean.loss);
  print_loss(source, mean, tokenizer.is_bytes() || dataset.tokenizer.is_bytes(), choice);
  if (source.task() != nullptr && o.answers > 0) print_answers(model, source, o.answers);
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Loss and perplexity of a model on data; for a task, also how many prompts it answers correctly.",
               "evaluate");
  Options o;
  auto flags = [&] {
    add_text(app, "--model", o.model, "DIR", "model or run directory")->required();
    add_text(app, "--data", o.data.spec, "SOURCE", "arith:3|4|5|6, prosqa, text:FILE, or a glob of token shards")
        ->required();
    add_choice(app, "--split", o.split, {"all", "test", "train"},
               "all of a file, its test or its train part (default: all; test where the model was trained on it)");
    add_integer(app, "--seq", o.data.seq_len, 0, most_size, "tokens per sequence (0: as the model was trained)");
    add_text(app, "--val-data", o.data.val_spec, "GLOB", "validation shards, which are then the test set");
    add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(),
                "of generated data (default: that of the training run)");
    add_integer(app, "--train-samples", o.data.train_samples, 0, most_count,
                "size of the training set (0: as in the training run)");
    add_integer(app, "--test-samples", o.data.test_samples, 0, most_count,
                "size of the test set (0: as in the training run)");
    add_integer(app, "--batch", o.batch, 0, most_size, "sequences at a time (0: 16, or fewer long ones)");
    add_integer(app, "--samples", o.samples, 0, most_count, "sequences for the loss (0: all)");
    add_integer(app, "--answers", o.answers, 0, most_count, "prompts of a task to answer");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
