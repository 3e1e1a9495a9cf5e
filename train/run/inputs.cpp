#include "train/run/inputs.h"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "cli/format.h"
#include "data/carried_settings.h"
#include "data/document_marks.h"
#include "engine/io/printable.h"
#include "models/disk/checkpoint.h"
#include "models/disk/model_dir.h"
#include "train/run/branch.h"

namespace crossply {
namespace {

InitialModel read_model(const std::string& dir, bool goes_on) {
  return {load_model_config(dir), Tokenizer::load(dir), read_carried_files(dir), goes_on};
}

// What --init names. A run that was started has its configuration in flags.json and the rest in its newest checkpoint,
// so that the directory is no longer needed.
InitialModel read_initial(const Settings& settings) {
  const std::string run = continued_run(settings), newest = run.empty() ? "" : newest_valid_checkpoint(run);
  return read_model(newest.empty() ? ModelDir(settings.init).path() : newest, !run.empty());
}

// The tokenizer belongs to the model.
void take_tokenizer(const Settings& settings, const Tokenizer& own, Dataset& data) {
  require_same_tokenizer(own, "--init " + settings.init, data.tokenizer, settings.data.spec);
  if (own.is_none() && !data.tokenizer.is_none())
    std::fprintf(stderr, "note: --init %s has no tokenizer: it gets that of %s, %s\n", printable(settings.init).c_str(),
                 printable(settings.data.spec).c_str(), printable(data.tokenizer.describe()).c_str());
  if (data.tokenizer.is_none()) data.tokenizer = own;
}

// What other programs look for in config.json; a text without a token of its own to begin with begins after the last.
std::map<std::string, std::string> token_ids_of(const Dataset& data) {
  const Tokenizer& tokenizer = data.tokenizer;
  if (const Task* task = data.test->task(); task != nullptr && tokenizer.is_bytes())
    return {{"eos_token_id", std::to_string(task->eos())}};  // a byte; without a task none ends a text
  if (!tokenizer.is_bpe() || tokenizer.eos() < 0) return {};
  const int32_t eos = tokenizer.eos(), bos = tokenizer.prefix().empty() ? eos : tokenizer.prefix()[0];
  return {{"eos_token_id", std::to_string(eos)}, {"bos_token_id", std::to_string(bos)}};
}

// The same data may have moved since the run began.
Dataset open_data(const Settings& settings, const Config& model, const InitialModel* initial, DataFacts& facts) {
  if (settings.data.spec.empty()) fail(Exit::usage, "--data is needed: ", data_specs);
  DataOptions& options = facts.opened = settings.data;
  options.seed = settings.seed;
  if (initial != nullptr) options.of_model = initial->tokenizer;
  options.seq_len = resolve_seq_len(settings, model, options.of_model);
  try {
    expand_directories(options);
    Dataset data = open_dataset(options);
    if (initial != nullptr) take_tokenizer(settings, initial->tokenizer, data);
    facts.vocab = data.train->vocab_size(), facts.seq_len = data.train->seq_len(), facts.sequences = data.train->size();
    facts.token_ids = token_ids_of(data), facts.documents = data.documents;
    return data;
  } catch (const Error& error) {
    if (!settings.resume || error.code != Exit::no_input) throw;
    fail(error.code, error.what(), "; if the data has moved, say with --data",
         options.val_spec.empty() ? "" : ", --val-data", options.tokenizer.empty() ? "" : ", --tokenizer",
         " where it is now");
  }
}

// The data's ids must be the teacher's. One without a tokenizer does not say; but a vocabulary larger than that of the
// data's tokenizer is another one's.
void require_same_ids(const Settings& settings, const Tokenizer& own, int64_t vocab, const Dataset& data) {
  require_same_tokenizer(own, "--teacher " + settings.teacher, data.tokenizer, settings.data.spec);
  if (!own.is_none() || data.tokenizer.is_none() || data.train == nullptr) return;
  if (vocab > data.train->vocab_size())
    fail(Exit::usage, "--teacher ", settings.teacher, " has no tokenizer and a vocabulary of ", vocab, ", ",
         settings.data.spec, " is encoded as ", data.tokenizer.describe(),
         ": its ids would mean other tokens. Give token shards made ",
         "with the teacher's tokenizer (*.bin), or put its tokenizer.json into ", settings.teacher);
  std::fprintf(stderr, "note: --teacher %s has no tokenizer: the ids of %s are taken as its own\n",
               printable(settings.teacher).c_str(), printable(settings.data.spec).c_str());
}

// The configuration of --teacher, whose logits must be for the tokens of the data.
Config read_teacher(const Settings& settings, const Dataset& data) {
  if (settings.resume && !path_exists(settings.teacher))
    fail(Exit::no_input, "--teacher ", settings.teacher,
         ": no such directory; if it has moved, say with --teacher where it is now");
  const ModelDir dir(settings.teacher);
  const Config config = load_model_config(dir.path());
  require_same_ids(settings, Tokenizer::load(dir.path()), config.vocab_size, data);
  return config;
}

}  // namespace

std::map<std::string, std::string> read_carried_files(const std::string& dir) {
  constexpr uint64_t max_bytes = uint64_t{1} << 30;
  std::map<std::string, std::string> files;
  for (const char* name :
       {"tokenizer.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"}) {
    const std::string path = dir + "/" + name;
    if (path_exists(path)) files[name] = read_file(path, max_bytes);
  }
  if (const auto tokenizer = files.find("tokenizer.json"); tokenizer != files.end())
    tokenizer->second = carried_tokenizer(tokenizer->second);
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
    const std::string path = dir + "/" + name;
    if (!path_exists(path)) continue;
    if (const std::string text = carried_settings(read_file(path, max_bytes), path); !text.empty()) files[name] = text;
  }
  return files;
}

Inputs open_inputs(const Settings& settings) {
  std::optional<InitialModel> initial;
  if (!settings.init.empty()) initial = read_initial(settings);
  const InitialModel* const start = initial ? &*initial : nullptr;
  std::string notes;
  const Config model = resolve_model(settings, start, notes);
  std::fputs(std::exchange(notes, "").c_str(), stderr);
  Dataset data;
  DataFacts facts;
  // A plan of sizes that are known needs no data.
  if (!settings.plans_only() || model.vocab_size == 0 || settings.data.seq_len == 0 || !settings.data.spec.empty())
    data = open_data(settings, model, start, facts);
  std::optional<Config> teacher;
  if (!settings.teacher.empty()) teacher = read_teacher(settings, data);
  TrainPlan plan = resolve(settings, model, start, facts, teacher, notes);
  if (!plan.branch.run.empty() && !plan.resume) plan.branch.step = branch_step(plan);
  std::fputs(notes.c_str(), stderr);
  if (settings.trains())
    data.train->check_tokens(plan.config.vocab_size), data.test->check_tokens(plan.config.vocab_size);
  if (settings.trains() && !plan.resume && plan.documents.any()) check_documents(*data.train, plan.documents);
  return {std::move(plan), std::move(data)};
}

std::string digest_of_files(const TrainPlan& plan, const Dataset& data) {
  if (parse_data_spec(plan.data.spec).path.empty()) return "";
  if (parse_data_spec(plan.data.spec).kind == DataSpec::Kind::generated) return str(std::hex, data.test->digest());
  const std::string train = str(std::hex, data.train->digest());
  return plan.data.val_spec.empty() ? train : train + str("-", std::hex, data.test->digest());
}

static double epochs_of(const TrainPlan& plan, const Dataset& data) {
  return static_cast<double>(plan.steps) * static_cast<double>(plan.batch * plan.accumulate) /
         static_cast<double>(data.train->size());
}

std::string epochs_warning(const TrainPlan& plan, const Dataset& data) {
  if (data.train == nullptr || !parse_data_spec(plan.data.spec).files() || epochs_of(plan, data) <= 4) return "";
  return str("warning: ", format_number("%.1f", epochs_of(plan, data)),
             " epochs: beyond four a model gains little from ",
             "the same text, and may learn it by heart; fewer --steps, or more data");
}

std::string describe_data(const TrainPlan& plan, const Dataset& data) {
  const int64_t size = data.train->size(), T = data.train->seq_len(), each = plan.batch * plan.accumulate;
  const double epochs = epochs_of(plan, data);
  const int64_t documents = data.train->documents();
  const std::string shuffled =
      documents > 0 ? str("; each epoch ", format_count(documents), " documents in another order") : "";
  return str("data: ", format_count(size * T), " training tokens in ", format_count(size), " sequences of ",
             format_count(T), "; ", format_count(plan.steps), " steps x ", format_count(each), " sequences = ",
             epochs < 100 ? format_number(epochs < 0.1 ? "%.2g" : "%.1f", epochs) : format_count(std::llround(epochs)),
             " epochs", shuffled, plan.documents.any() ? "; " + attention_within(plan.documents) : "", "; test set ",
             format_count(data.test->size()), " sequences");
}

std::string validation_note(const Dataset& data) {
  if (data.test == nullptr) return "";
  const std::vector<std::string> files = data.test->files(), both = data.test->files_of_both();
  if (both.empty()) return "";
  const std::string name = printable(std::filesystem::path(both[0]).filename().string());
  const std::string which =
      files.size() == 1  ? "the validation file " + name + " is"
      : both.size() == 1 ? str("1 of the ", files.size(), " validation files, ", name, ", is")
                         : str(both.size(), " of the ", files.size(), " validation files, ", name, " first, are");
  return str("note: ", which, " among the training files: the test loss is of tokens that the model trains on");
}

std::string vocabulary_note(const TrainPlan& plan, const Dataset& dataset) {
  const int64_t used = dataset.train->vocab_size(), V = plan.config.vocab_size;
  if (!plan.init.empty() || used == 0 || V < 2 * used) return "";
  const int64_t saved = (V - used) * plan.config.hidden_size * (plan.config.tie_word_embeddings ? 1 : 2);
  return str("note: the data has ", format_count(used), " different tokens, the model ", format_count(V), ": --vocab ",
             used, " would save ", format_count(saved), " parameters");
}

}  // namespace crossply
