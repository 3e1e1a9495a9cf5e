// evaluate: loss and perplexity of a model on data, and the accuracy where the data is a task.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "eval/answers.h"
#include "eval/loaded_model.h"
#include "models/json_file.h"
#include "train/program.h"
#include "train/progress.h"
#include "train/replicas.h"

using namespace crossply;

namespace {

struct Options {
  std::string model, split = "test", device = "cpu";
  DataOptions data;
  std::optional<uint64_t> seed;
  int64_t batch = 16, samples = 0, answers = 1000;
};

// What the flags leave open is as in the run that trained the model, so that the test set is the one it did not see.
DataOptions complete(const Options& o, const std::string& dir) {
  DataOptions data = o.data;
  data.seed = o.seed.value_or(42);
  std::error_code ignored;
  const std::string path = dir + "/train_state.json";
  if (!std::filesystem::exists(path, ignored)) return data;
  const nlohmann::json state = read_json(path), run = state.value("trajectory", nlohmann::json());
  if (!run.is_object()) fail(Exit::bad_data, path, ": \"trajectory\" is no object");
  std::string spec;
  read(run, "data", spec, path);
  if (spec != data.spec) return data;
  auto count = [&](const char* key, auto& into) {
    int64_t number = static_cast<int64_t>(into);
    read(run, key, number, path);
    if (number < 0) fail(Exit::bad_data, path, ": \"", key, "\" is ", number, "; it must not be negative");
    into = static_cast<std::decay_t<decltype(into)>>(number);
  };
  if (!o.seed) count("seed", data.seed);
  if (data.seq_len == 0) count("seq", data.seq_len);
  if (data.train_samples == 0) count("train_samples", data.train_samples);
  if (data.test_samples == 0) count("test_samples", data.test_samples);
  if (data.val_spec.empty()) read(run, "val_data", data.val_spec, path);
  return data;
}

Exit run(const Options& o) {
  LoadedModel model(o.model, o.device, false);
  const Dataset dataset = open_dataset(complete(o, model.dir));
  const Source& source = o.split == "train" ? *dataset.train : *dataset.test;
  source.check_tokens(model.config.vocab_size);
  check_batch(o.batch, 1, source.seq_len());

  Replicas replicas(*model.device, model.params, model.config,
                    Batch{o.batch, source.seq_len(), model.params.dtype(), /*training=*/false});
  const Replicas::Mean mean = replicas.mean_loss(source, o.samples > 0 ? o.samples : source.size());
  if (!std::isfinite(mean.loss)) fail(Exit::not_finite, "the loss is ", mean.loss);
  std::printf("sequences %s\nscored tokens %s\nloss %.9g\nperplexity %.9g\n", format_count(mean.sequences).c_str(),
              format_count(mean.scored).c_str(), mean.loss, std::exp(mean.loss));
  if (source.task() != nullptr && o.answers > 0) {
    const Answers answers = answer_task(*model.device, model.params, model.config, source, o.answers, 64);
    std::printf("prompts %s\nanswers correct %.2f%%\nall steps valid %.2f%%\n", format_count(answers.asked).c_str(),
                100 * answers.correct(), 100 * answers.steps_valid());
    if (answers.hard > 0)
      std::printf("answers correct where counting mentions fails %.2f%% (of %s)\n",
                  100.0 * static_cast<double>(answers.hard_right) / static_cast<double>(answers.hard),
                  format_count(answers.hard).c_str());
  }
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
    add_choice(app, "--split", o.split, {"test", "train"}, "test or train");
    add_integer(app, "--seq", o.data.seq_len, 0, most_size, "tokens per sequence (0: the data's own)");
    add_text(app, "--val-data", o.data.val_spec, "GLOB", "validation shards, which are then the test set");
    add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(),
                "of generated data (default: that of the training run)");
    add_integer(app, "--train-samples", o.data.train_samples, 0, most_count,
                "size of the training set (0: as in the training run)");
    add_integer(app, "--test-samples", o.data.test_samples, 0, most_count,
                "size of the test set (0: as in the training run)");
    add_integer(app, "--batch", o.batch, 1, most_size, "sequences at a time");
    add_integer(app, "--samples", o.samples, 0, most_count, "sequences for the loss (0: all)");
    add_integer(app, "--answers", o.answers, 0, most_count, "prompts of a task to answer");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
