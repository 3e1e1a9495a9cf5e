// evaluate: loss and perplexity of a model on data, and the accuracy where the data is a task. A file is scored from
// end to end in windows of the model's training length, every token but the first once, the last window overlapping the
// one before it; where the model was trained on the file, its test part is. A note says where training data is scored.
// --estimate: beside it, what so many random batches say, as papers report it, and how far such numbers are apart.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <optional>

#include "cli/format.h"
#include "cli/needs.h"
#include "cli/program.h"
#include "data/document_marks.h"
#include "engine/rng.h"
#include "eval/answers.h"
#include "eval/data_choice.h"
#include "eval/loaded_model.h"
#include "eval/mean_loss.h"
#include "eval/statistics.h"
#include "models/batch/batch_model.h"

using namespace crossply;

namespace {

struct Options {
  std::string model, split, device = "cpu";
  DataOptions data;
  std::optional<uint64_t> seed;
  int64_t batch = 0, samples = 0, answers = 1000, estimate = 0, estimates = 10;
};

constexpr int64_t estimate_batch = 12;  // the Inheritune paper's

// "the first 600 of 9,800", where it is not all of them.
std::string first_of(int64_t count, int64_t all) {
  return count == all ? "" : ": the first " + format_count(count) + " of " + format_count(all);
}

void print_loss(const Source& source, const MeanLoss& mean, const ModelData& data, int64_t longest) {
  const DataChoice& choice = data.choice;
  const bool complete = mean.sequences == source.size() && choice.data.test_samples == 0;
  std::printf("%s\n", describe_split(choice, complete).c_str());
  std::printf("sequences %s of %s tokens%s", format_count(mean.sequences).c_str(),
              format_count(source.seq_len()).c_str(), first_of(mean.sequences, source.size()).c_str());
  if (choice.guessed_seq_len && source.seq_len() == max_guessed_seq_len && longest > max_guessed_seq_len)
    std::printf("; the model takes up to %s (--seq)", format_count(longest).c_str());
  if (source.file_tokens() > 0)
    std::printf("\nscored %s of %s tokens\n", format_count(mean.scored).c_str(),
                format_count(source.file_tokens()).c_str());
  else std::printf("\nscored tokens %s\n", format_count(mean.scored).c_str());
  std::printf("loss %.6f\nperplexity %.6g\n", mean.loss, std::exp(mean.loss));
  if (!data.tokenizer.is_bytes() && !data.tokenizer.is_bpe()) return;
  const int64_t bytes = scored_bytes(source, mean.sequences, data.tokenizer);
  const double bits = mean.loss / std::numbers::ln2 * static_cast<double>(mean.scored) / static_cast<double>(bytes);
  if (bytes > 0) std::printf("bits per byte %.4f\n", bits);
}

void print_answers(LoadedModel& model, const Source& source, int64_t count) {
  const Answers answers = answer_task(*model.device, model.params, model.config, source, count, 64, *one_rank_group());
  std::printf("prompts %s%s\nanswers correct %.2f%%\nall steps valid %.2f%%\n", format_count(answers.asked).c_str(),
              first_of(answers.asked, source.size()).c_str(), 100 * answers.correct(), 100 * answers.steps_valid());
  if (answers.hard > 0)
    std::printf("answers correct where counting mentions fails %.2f%% (of %s)\n", 100 * answers.hard_correct(),
                format_count(answers.hard).c_str());
}

MeanLoss finite_mean(BatchModel& batches, const Source& source, int64_t samples) {
  const MeanLoss mean = mean_loss(batches, source, samples, *one_rank_group());
  if (!std::isfinite(mean.loss)) fail(Exit::not_finite, "the loss is ", mean.loss);
  return mean;
}

// The mean loss of o.estimate batches of random windows, o.estimates (10) times, each with a seed of its own.
void print_estimates(const Options& o, BatchModel& batches, int64_t B, const Source& source, uint64_t seed) {
  const int64_t count = o.estimates;
  std::vector<double> means;
  for (int64_t r = 0; r < count; ++r) {
    const uint64_t own = random_bits(seed, stream_of("estimate"), static_cast<uint64_t>(r));
    means.push_back(finite_mean(batches, RandomSamples(source, o.estimate * B, own), 0).loss);
  }
  const Spread spread = spread_of(means);
  std::printf("estimate of %s batches of %s: mean %.4f, standard deviation %.4f of %s such\n",
              format_count(o.estimate).c_str(), format_count(B).c_str(), spread.mean, spread.sd,
              format_count(count).c_str());
}

Exit run(const Options& o) {
  LoadedModel model(o.model, o.device, false);
  const ModelData data = open_data(o.data, o.split, o.seed, model, o.model);
  const Source& source = data.source();
  const int64_t samples = o.samples > 0 ? o.samples : source.size(), T = source.seq_len();
  const int64_t enough = std::max<int64_t>(1, std::min<int64_t>(16, 16384 / T));  // long sequences fill the cores alone
  const int64_t usual = o.estimate > 0 ? estimate_batch : std::min(enough, std::min(samples, source.size()));
  const int64_t asked = o.batch > 0 ? o.batch : usual;
  check_batch(asked, 1, T);
  const int64_t batch = std::min(asked, std::min(samples, source.size()));  // no row stays empty
  BatchModel batches(
      *model.device, model.params, model.config,
      Batch{.B = batch, .T = T, .dtype = model.params.dtype(), .training = false, .documents = data.dataset.documents});
  const MeanLoss mean = finite_mean(batches, source, samples);
  print_loss(source, mean, data, model.config.max_position_embeddings);
  if (const DocumentMark& mark = data.dataset.documents; mark.any())
    std::printf("%s\n", attention_within(mark).c_str());
  if (o.estimate > 0) print_estimates(o, batches, asked, source, data.choice.data.seed);
  if (source.task() != nullptr && o.answers > 0) print_answers(model, source, o.answers);
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app("Loss and perplexity of a model on data; for a task, also how many prompts it answers correctly.",
                  "evaluate");
  Options o;
  auto flags = [&] {
    add_text(app, "--model", o.model, "DIR", "model or run directory").required();
    add_text(app, "--data", o.data.spec, "SOURCE", data_specs).required();
    add_text(app, "--tokenizer", o.data.tokenizer, "FILE", "tokenizer.json for a model that has none");
    add_choice(app, "--split", o.split, {"all", "test", "train"},
               "all of a file, its test or its train part (default: all; test where the model was trained on it)");
    add_integer(app, "--seq", o.data.seq_len, 0, max_size,
                "tokens per sequence (0: as the model was trained; of a file, where that is not known, the longest "
                "that the model takes, but at most 2048)");
    o.data.documents.clear();  // as the model was trained
    add_choice(app, "--documents", o.data.documents, document_marks,
               "tokens attend within documents, which begin after or before --eot (default: as trained)");
    needs(app, add_integer(app, "--eot", o.data.eot, -1, max_size, "token between documents (-1: the tokenizer's)"),
          {{"--documents", {"auto", "after", "before"}}});
    add_text(app, "--val-data", o.data.val_spec, "GLOB",
             "validation shards, which are then the test set (default: those of the training run)");
    const Need task{"--data", {"arith:*", "prosqa*"}};
    needs(app,
          add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(),
                      "of generated data and of --estimate (default: that of the training run)"),
          {task, {"--estimate"}});
    needs(app,
          add_integer(app, "--train-samples", o.data.train_samples, 0, max_count,
                      "size of the training set (0: as in the training run)"),
          {task, {"--split", {"train"}}});
    add_integer(app, "--test-samples", o.data.test_samples, 0, max_count,
                "size of the test set (0: as in the training run)");
    add_integer(app, "--batch", o.batch, 0, max_size,
                "sequences at a time (0: 16, or fewer long ones; with --estimate 12)");
    add_integer(app, "--samples", o.samples, 0, max_count, "score the first so many sequences (0: all)");
    add_integer(app, "--estimate", o.estimate, 0, max_size,
                "also the mean loss of so many random batches, from anywhere in the data (0: none)");
    needs(app, add_integer(app, "--estimates", o.estimates, 2, max_size, "such means, for their spread"),
          {{"--estimate"}});
    needs(app, add_integer(app, "--answers", o.answers, 0, max_count, "answer the first so many prompts of a task"),
          {task});
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
