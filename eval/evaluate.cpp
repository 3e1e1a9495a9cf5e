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
  const nlohmann::json state = read_json(path), run = state.value("trajectory", nlohmann::json::object());
  if (run.value("data", "") != data.spec) return data;
  if (!o.seed) data.seed = run.value("seed", data.seed);
  if (data.seq_len == 0) data.seq_len = run.value("seq", data.seq_len);
  if (data.train_samples == 0) data.train_samples = run.value("train_samples", data.train_samples);
  if (data.test_samples == 0) data.test_samples = run.value("test_samples", data.test_samples);
  if (data.val_spec.empty()) data.val_spec = run.value("val_data", data.val_spec);
  return data;
}

Exit run(const Options& o) {
  LoadedModel model(o.model, o.device, false);
  const Dataset dataset = open_dataset(complete(o, model.dir));
  const Source& source = o.split == "train" ? *dataset.train : *dataset.test;
  source.check_tokens(model.config.vocab_size);

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
    app.add_option("--model", o.model, "model or run directory")->required();
    app.add_option("--data", o.data.spec, "arith:3|4|5|6, prosqa, text:FILE, or a glob of token shards")->required();
    app.add_option("--split", o.split, "test or train")->check(CLI::IsMember({"test", "train"}))->capture_default_str();
    app.add_option("--seq", o.data.seq_len, "tokens per sequence (0: the data's own)")->check(integer_from(0));
    app.add_option("--val-data", o.data.val_spec, "glob of validation shards, which are then the test set");
    app.add_option("--seed", o.seed, "of generated data (default: that of the training run)")->check(integer_from(0));
    app.add_option("--train-samples", o.data.train_samples, "size of the training set (0: as in the training run)");
    app.add_option("--test-samples", o.data.test_samples, "size of the test set (0: as in the training run)");
    app.add_option("--batch", o.batch, "sequences at a time")->check(integer_from(1))->capture_default_str();
    app.add_option("--samples", o.samples, "sequences for the loss (0: all)")->check(integer_from(0));
    app.add_option("--answers", o.answers, "prompts of a task to answer")
        ->check(integer_from(0))
        ->capture_default_str();
    app.add_option("--device", o.device, "where to run")->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
