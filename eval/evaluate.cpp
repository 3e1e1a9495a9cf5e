// evaluate: loss and perplexity of a model on data, and the accuracy where the data is a task. A file is scored from
// end to end in windows of the model's training length, every token but the first once, the last window overlapping the
// one before it; where the model was trained on the file, its test part is. A note says where training data is scored.
// --estimate: beside it, what so many random batches say, as papers report it, and how far such numbers are apart.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include "cli/format.h"
#include "cli/program.h"
#include "engine/printable.h"
#include "engine/rng.h"
#include "eval/answers.h"
#include "eval/batch_model.h"
#include "eval/loaded_model.h"
#include "models/json_file.h"

using namespace crossply;

namespace {

struct Options {
  std::string model, split, device = "cpu";
  DataOptions data;
  std::optional<uint64_t> seed;
  int64_t batch = 0, samples = 0, answers = 1000, estimate = 0, estimates = 10;
};

constexpr int64_t usual_seq = 2048;     // at most, of a model that does not say what it was trained on
constexpr int64_t estimate_batch = 12;  // the Inheritune paper's

struct Choice {
  DataOptions data, run;   // run: of the run that trained the model; all empty without one
  std::string split;       // test, train or all
  bool files = false;      // not generated
  bool own = false;        // is it the data of the run?
  bool own_parts = false;  // is it also cut into the same training and test set?
  bool guessed_T = false;  // nothing says how long a sequence should be

  const std::string& scored() const { return split == "test" && !data.val_spec.empty() ? data.val_spec : data.spec; }
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

// None where they cannot be found, too: opening the data says why.
std::vector<std::string> files_of(const std::string& spec) {
  try {
    return data_files(spec);
  } catch (const Error&) {
    return {};
  }
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  return std::filesystem::equivalent(a, b, ignored);
}

bool same_data(const std::string& a, const std::string& b) {
  if (a == b || a.starts_with("text:") != b.starts_with("text:")) return a == b;
  const std::vector<std::string> of_a = files_of(a), of_b = files_of(b);
  return !of_a.empty() && std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(), same_file);
}

// What the flags leave open is as in the run that trained the model, so that the test set is the one it did not see.
// Files that this run did not train on are scored from end to end.
Choice complete(const Options& o, const LoadedModel& model) {
  Choice choice{o.data, read_run(model.dir), o.split};
  DataOptions& data = choice.data;
  const DataOptions& run = choice.run;
  const bool files = choice.files = data.spec.starts_with("text:") || data.spec.ends_with(".bin");
  const bool own = choice.own = same_data(run.spec, data.spec);
  if (choice.split.empty()) choice.split = own || !files || !data.val_spec.empty() ? "test" : "all";
  if (choice.split == "all" && !files) fail(Exit::usage, "--split all is for files; ", data.spec, " is generated");
  data.whole = choice.split == "all";
  data.seed = o.seed.value_or(own ? run.seed : 42);
  if (own && data.train_samples == 0) data.train_samples = run.train_samples;
  if (own && data.test_samples == 0 && !data.whole) data.test_samples = run.test_samples;
  if (own && data.val_spec.empty()) data.val_spec = run.val_spec;
  if (data.seq_len == 0 && (own || files)) data.seq_len = run.seq_len;
  choice.guessed_T = data.seq_len == 0 && files;
  if (choice.guessed_T) data.seq_len = std::min(model.config.max_position_embeddings, usual_seq);
  choice.own_parts = own && (files ? !data.val_spec.empty() || data.seq_len == run.seq_len
                                   : data.seed == run.seed && data.train_samples == run.train_samples);
  return choice;
}

// Says so where the model may know from its training what is going to be scored.
void note_training_data(const Choice& choice) {
  const DataOptions& run = choice.run;
  if (!choice.files) {
    if (choice.own && !choice.own_parts)
      std::fprintf(stderr, "note: --seed or --train-samples differ from the run's: training and test data mix\n");
  } else if (choice.own && (choice.split == "train" || (choice.split == "test" && choice.data.val_spec.empty()))) {
    if (!choice.own_parts)
      std::fprintf(stderr, "note: the run cut its data for --seq %lld: here, training and test data mix\n",
                   static_cast<long long>(run.seq_len));
  } else {
    const std::vector<std::string> scored = files_of(choice.scored()), trained = files_of(run.spec);
    const int64_t known = std::count_if(scored.begin(), scored.end(), [&](const std::string& a) {
      return std::any_of(trained.begin(), trained.end(), [&](const std::string& b) { return same_file(a, b); });
    });
    if (known > 0 && scored.size() == 1)
      std::fprintf(stderr, "note: %s is among the files that the model was trained on\n", printable(scored[0]).c_str());
    else if (known > 0)
      std::fprintf(stderr, "note: %lld of these %zu files are among those that the model was trained on\n",
                   static_cast<long long>(known), scored.size());
  }
}

// What of the data is scored. complete: is it all of its split?
std::string describe(const Choice& choice, bool complete) {
  const DataOptions &data = choice.data, &run = choice.run;
  const bool test = choice.split == "test";
  if (!choice.files && !choice.own)
    return run.spec.empty() ? "generated" : "generated; the model was trained on " + run.spec;
  if (choice.split == "all") return complete ? "every token but a file's first, once" : "";
  if (test && !data.val_spec.empty())
    return choice.own && same_data(data.val_spec, run.val_spec) ? "the run's validation data" : "as validation data";
  if (!choice.own) return test ? "what training on it would leave out" : "what training on it would use";
  if (!choice.own_parts) return choice.files ? str("cut for --seq ", data.seq_len) : "generated";
  return test ? "kept from training" : "what the model was trained on";
}

// "the first 600 of 9,800", where it is not all of them.
std::string first_of(int64_t count, int64_t all) {
  return count == all ? "" : ": the first " + format_count(count) + " of " + format_count(all);
}

void print_split(const Choice& choice, bool complete) {
  const std::vector<std::string> files = files_of(choice.scored());
  const std::string name = files.size() == 1 ? files[0] : choice.scored(), what = describe(choice, complete);
  std::printf("split %s: %s", choice.split.c_str(), printable(name).c_str());
  if (files.size() > 1) std::printf(" (%zu files)", files.size());
  std::printf("%s%s\n", what.empty() ? "" : ", ", printable(what).c_str());
}

void print_loss(const Source& source, const BatchModel::Mean& mean, bool bytes, const Choice& choice, int64_t longest) {
  print_split(choice, mean.sequences == source.size() && choice.data.test_samples == 0);
  std::printf("sequences %s of %s tokens%s", format_count(mean.sequences).c_str(),
              format_count(source.seq_len()).c_str(), first_of(mean.sequences, source.size()).c_str());
  if (choice.guessed_T && source.seq_len() == usual_seq && longest > usual_seq)
    std::printf("; the model takes up to %s (--seq)", format_count(longest).c_str());
  if (source.file_tokens() > 0)
    std::printf("\nscored %s of %s tokens\n", format_count(mean.scored).c_str(),
                format_count(source.file_tokens()).c_str());
  else std::printf("\nscored tokens %s\n", format_count(mean.scored).c_str());
  std::printf("loss %.6f\nperplexity %.6g\n", mean.loss, std::exp(mean.loss));
  if (bytes) std::printf("bits per byte %.4f\n", mean.loss / std::numbers::ln2);
}

void print_answers(LoadedModel& model, const Source& source, int64_t count) {
  const Answers answers = answer_task(*model.device, model.params, model.config, source, count, 64, *one_rank_job());
  std::printf("prompts %s%s\nanswers correct %.2f%%\nall steps valid %.2f%%\n", format_count(answers.asked).c_str(),
              first_of(answers.asked, source.size()).c_str(), 100 * answers.correct(), 100 * answers.steps_valid());
  if (answers.hard > 0)
    std::printf("answers correct where counting mentions fails %.2f%% (of %s)\n",
                100.0 * static_cast<double>(answers.hard_right) / static_cast<double>(answers.hard),
                format_count(answers.hard).c_str());
}

BatchModel::Mean finite_mean(BatchModel& batches, const Source& source, int64_t samples) {
  const BatchModel::Mean mean = batches.mean_loss(source, samples, *one_rank_job());
  if (!std::isfinite(mean.loss)) fail(Exit::not_finite, "the loss is ", mean.loss);
  return mean;
}

// The mean loss of o.estimate batches of random windows, o.estimates times, each with a seed of its own.
void print_estimates(const Options& o, BatchModel& batches, int64_t B, const Source& source, uint64_t seed) {
  double sum = 0, squares = 0;
  std::vector<double> means;
  for (int64_t r = 0; r < o.estimates; ++r) {
    const uint64_t own = random_bits(seed, stream_of("estimate"), static_cast<uint64_t>(r));
    means.push_back(finite_mean(batches, RandomSamples(source, o.estimate * B, own), 0).loss);
    sum += means.back();
  }
  const double mean = sum / static_cast<double>(o.estimates);
  for (const double one : means) squares += (one - mean) * (one - mean);
  std::printf("estimate of %s batches of %s: mean %.4f, standard deviation %.4f over %s estimates\n",
              format_count(o.estimate).c_str(), format_count(B).c_str(), mean,
              std::sqrt(squares / static_cast<double>(o.estimates - 1)), format_count(o.estimates).c_str());
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
  note_training_data(choice);

  const int64_t samples = o.samples > 0 ? o.samples : source.size(), T = source.seq_len();
  const int64_t enough = std::max<int64_t>(1, std::min<int64_t>(16, 16384 / T));  // long sequences fill the cores alone
  const int64_t usual = o.estimate > 0 ? estimate_batch : std::min(enough, std::min(samples, source.size()));
  const int64_t batch = o.batch > 0 ? o.batch : usual;
  check_batch(batch, 1, T);
  BatchModel batches(*model.device, model.params, model.config,
                     Batch{batch, T, model.params.dtype(), /*training=*/false});
  const BatchModel::Mean mean = finite_mean(batches, source, samples);
  print_loss(source, mean, tokenizer.is_bytes() || dataset.tokenizer.is_bytes(), choice,
             model.config.max_position_embeddings);
  if (o.estimate > 0) print_estimates(o, batches, batch, source, choice.data.seed);
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
    add_integer(app, "--seq", o.data.seq_len, 0, most_size,
                "tokens per sequence (0: as the model was trained; of a file, where that is not known, the longest "
                "that the model takes, but at most 2048)");
    add_text(app, "--val-data", o.data.val_spec, "GLOB",
             "validation shards, which are then the test set (default: those of the training run)");
    add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(),
                "of generated data and of --estimate (default: that of the training run)");
    add_integer(app, "--train-samples", o.data.train_samples, 0, most_count,
                "size of the training set (0: as in the training run)");
    add_integer(app, "--test-samples", o.data.test_samples, 0, most_count,
                "size of the test set (0: as in the training run)");
    add_integer(app, "--batch", o.batch, 0, most_size,
                "sequences at a time (0: 16, or fewer long ones; with --estimate 12)");
    add_integer(app, "--samples", o.samples, 0, most_count, "score the first so many sequences (0: all)");
    add_integer(app, "--estimate", o.estimate, 0, most_size,
                "also the mean loss of so many random batches, from anywhere in the data (0: none)");
    add_integer(app, "--estimates", o.estimates, 2, most_size, "such means, for their spread");
    add_integer(app, "--answers", o.answers, 0, most_count, "answer the first so many prompts of a task");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
