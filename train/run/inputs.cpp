#include "train/run/inputs.h"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "data/carried_settings.h"
#include "engine/io/printable.h"
#include "models/disk/checkpoint.h"
#include "models/disk/model_dir.h"
#include "models/model.h"
#include "models/registry.h"
#include "train/settings/idle_flags.h"
#include "train/settings/text_defaults.h"

namespace crossply {
namespace {

InitialModel read_initial(const std::string& dir) {
  return {load_model_config(dir), Tokenizer::load(dir), read_carried_files(dir)};
}

// The same architecture: the note says what is taken of it.
void note_start(const TrainOptions& o) {
  const int64_t taken = o.config.num_hidden_layers, all = o.initial.config.num_hidden_layers;
  const std::string part = taken < all ? str(", the first ", taken, " of its ", all, " blocks") : "";
  std::fprintf(stderr, "note: starting from the weights of %s, a %s%s\n", printable(o.init).c_str(),
               o.config.arch.c_str(), part.c_str());
}

// What --init's model becomes: its own architecture, or from a plain LLaMA or GPT-2 one that can start as it.
void choose_architecture(TrainOptions& o, const Config& asked) {
  Config& c = o.config;
  const std::string from = c.arch;
  if (from == asked.arch) {
    if (!o.given_options.empty())
      fail(Exit::usage, "--init takes the options from its config.json; leave out ", o.given_options.front());
    note_start(o);
    return;
  }
  const auto plain = [](const std::string& arch) { return arch == "llama" || arch == "gpt2"; };
  if (!plain(from) || plain(asked.arch))
    fail(Exit::usage, "--init ", o.init, " holds ", with_article(from), ", not ", with_article(asked.arch),
         plain(from) ? "; their blocks differ" : "; only a llama or a gpt2 can become another architecture");
  c.arch = asked.arch;
  c.options = asked.options;
  c.check(Exit::usage, "flags");
  ParameterTable params;
  declare_model(params, c);
  const std::string remark = find_architecture(c.arch).make(c)->start_as_plain(params, c);
  std::fprintf(stderr, "note: %s starts as the %s of %s%s%s\n", c.arch.c_str(), from.c_str(), printable(o.init).c_str(),
               remark.empty() ? "" : ": ", remark.c_str());
}

// Reads the model directory --init, and decides what the run's configuration is.
void take_initial(TrainOptions& o) {
  const bool started = o.resume && !read_run_settings(o.out).is_null();
  const std::string newest = started ? newest_valid_checkpoint(o.out) : "";
  if (!newest.empty()) {
    o.initial = read_initial(newest);
    return;
  }
  o.initial = read_initial(ModelDir(o.init).path());
  if (started) return;
  const Config asked = o.config;
  o.config = o.initial.config;
  std::vector<std::string> sizes = o.given_sizes;
  if (asked.backbone == o.config.backbone) std::erase(sizes, "--backbone");  // presets of the backbone need it
  const bool fewer = sizes == std::vector<std::string>{"--layers"};
  if (!sizes.empty() && !fewer)
    fail(Exit::usage, "--init takes the sizes from its config.json; leave out ", sizes[sizes[0] == "--layers" ? 1 : 0]);
  if (fewer && (asked.num_hidden_layers < 1 || asked.num_hidden_layers > o.config.num_hidden_layers))
    fail(Exit::usage, "--layers ", asked.num_hidden_layers, ": --init ", o.init, " has ", o.config.num_hidden_layers,
         " blocks, of which the first so many can be taken");
  if (fewer) o.config.num_hidden_layers = asked.num_hidden_layers;
  choose_architecture(o, asked);
}

// The tokenizer belongs to the model.
void take_tokenizer(const TrainOptions& o, Dataset& dataset) {
  if (o.init.empty()) return;
  const Tokenizer& own = o.initial.tokenizer;
  require_same_tokenizer(own, "--init " + o.init, dataset.tokenizer, o.data.spec);
  if (own.is_none() && !dataset.tokenizer.is_none())
    std::fprintf(stderr, "note: --init %s has no tokenizer: it gets that of %s, %s\n", printable(o.init).c_str(),
                 printable(o.data.spec).c_str(), printable(dataset.tokenizer.describe()).c_str());
  if (dataset.tokenizer.is_none()) dataset.tokenizer = own;
}

// What other programs look for in config.json; a text without a token of its own to begin with begins after the last.
void take_token_ids(const Dataset& dataset, Config& config) {
  const Tokenizer& tokenizer = dataset.tokenizer;
  if (const Task* task = dataset.test->task(); task != nullptr && tokenizer.is_bytes())
    config.token_ids.emplace("eos_token_id", std::to_string(task->eos()));  // a byte; without a task none ends a text
  if (!tokenizer.is_bpe() || tokenizer.eos() < 0) return;
  const int32_t eos = tokenizer.eos(), bos = tokenizer.prefix().empty() ? eos : tokenizer.prefix()[0];
  config.token_ids.emplace("eos_token_id", std::to_string(eos));
  config.token_ids.emplace("bos_token_id", std::to_string(bos));
}

// The same data may have moved since the run began.
Dataset open_named_data(TrainOptions& o) {
  try {
    expand_directories(o.data);
    return open_dataset(o.data);
  } catch (const Error& error) {
    if (!o.resume || error.code != Exit::no_input) throw;
    fail(error.code, error.what(), "; if the data has moved, say with --data",
         o.data.val_spec.empty() ? "" : ", --val-data", o.data.tokenizer.empty() ? "" : ", --tokenizer",
         " where it is now");
  }
}

// T where no flag says it, of files: by their size; of a GPT-2 that is trained on, at most as many as it has positions.
void choose_seq(TrainOptions& o) {
  if (o.data.seq_len > 0 || !parse_data_spec(o.data.spec).files()) return;
  if (o.open.seq) o.data.seq_len = usual_seq_of(tokens_about(o.data));
  const int64_t positions = o.config.max_position_embeddings, usual = 256;
  if (!o.init.empty() && o.config.gpt2() && positions > 0 && positions < usual) o.data.seq_len = positions;
}

// Fills in what only the data can say, and checks the model against it.
Dataset open_data(TrainOptions& o) {
  if (o.data.spec.empty()) fail(Exit::usage, "--data is needed: ", data_specs);
  o.data.seed = o.seed;
  o.data.of_model = o.initial.tokenizer;
  choose_seq(o);
  Dataset dataset = open_named_data(o);
  take_tokenizer(o, dataset);
  take_token_ids(dataset, o.config);
  const int64_t data_vocab = dataset.train->vocab_size();
  if (o.config.vocab_size == 0) o.config.vocab_size = data_vocab;
  if (o.config.vocab_size < 1) fail(Exit::usage, "--vocab is needed: token shards do not say their vocabulary");
  if (o.config.vocab_size < data_vocab)
    fail(Exit::bad_data, o.data.spec, " has a vocabulary of ", data_vocab, ", the model's is ", o.config.vocab_size,
         o.init.empty() ? str("; give --vocab ", data_vocab) : " (" + o.init + ")");
  if (!o.plans_only() && o.steps > 0 && o.dump_tensors.empty()) {  // the others read a batch, or nothing
    dataset.train->check_tokens(o.config.vocab_size);
    dataset.test->check_tokens(o.config.vocab_size);
  }
  o.data.seq_len = dataset.train->seq_len();
  return dataset;
}

// The data's ids must be the teacher's. One without a tokenizer does not say; but a vocabulary larger than that of the
// data's tokenizer is another one's.
void require_same_ids(const TrainOptions& o, const Tokenizer& own, const Dataset& dataset) {
  require_same_tokenizer(own, "--teacher " + o.teacher, dataset.tokenizer, o.data.spec);
  if (!own.is_none() || dataset.tokenizer.is_none() || dataset.train == nullptr) return;
  const int64_t theirs = o.teacher_config.vocab_size, here = dataset.train->vocab_size();
  if (theirs > here)
    fail(Exit::usage, "--teacher ", o.teacher, " has no tokenizer and a vocabulary of ", theirs, ", ", o.data.spec,
         " is encoded as ", dataset.tokenizer.describe(), ": its ids would mean other tokens. Give token shards made ",
         "with the teacher's tokenizer (*.bin), or put its tokenizer.json into ", o.teacher);
  std::fprintf(stderr, "note: --teacher %s has no tokenizer: the ids of %s are taken as its own\n",
               printable(o.teacher).c_str(), printable(o.data.spec).c_str());
}

// Reads the configuration of --teacher, and checks that its logits are for the same tokens as the model's, of which
// `dataset` has the tokenizer.
void take_teacher(TrainOptions& o, const Dataset& dataset) {
  if (o.teacher.empty()) return;
  if (o.resume && !path_exists(o.teacher))
    fail(Exit::no_input, "--teacher ", o.teacher,
         ": no such directory; if it has moved, say with --teacher where it is now");
  const ModelDir dir(o.teacher);
  o.teacher_config = load_model_config(dir.path());
  const Config& c = o.teacher_config;
  require_same_ids(o, Tokenizer::load(dir.path()), dataset);
  if (c.vocab_size != o.config.vocab_size)
    fail(Exit::usage, "--teacher ", o.teacher, " has a vocabulary of ", c.vocab_size, ", the model's is ",
         o.config.vocab_size, "; a teacher needs the same one",
         o.init.empty() && c.vocab_size > o.config.vocab_size ? str(": give --vocab ", c.vocab_size) : "");
  if (c.gpt2() && c.max_position_embeddings < o.data.seq_len)
    fail(Exit::usage, "sequences of ", o.data.seq_len, " tokens: --teacher ", o.teacher, " has ",
         c.max_position_embeddings, " positions; give a smaller --seq");
}

// A LLaMA without a window takes sequences of any length; a GPT-2 has learned so many positions.
void choose_positions(TrainOptions& o) {
  if (const int64_t window = o.config.sliding_window; window > 0 && window < o.data.seq_len)
    fail(Exit::usage, "sequences of ", o.data.seq_len, " tokens: the model attends within a window of ", window,
         ", which is not computed here; give a smaller --seq");
  int64_t& positions = o.config.max_position_embeddings;
  if (!o.config.gpt2() || positions == 0) positions = std::max(positions, o.data.seq_len);
  const bool task = parse_data_spec(o.data.spec).kind == DataSpec::Kind::generated;
  if (positions < o.data.seq_len)
    fail(Exit::usage, "sequences of ", o.data.seq_len, " tokens: the model has ", positions,
         " positions; give a smaller --seq", task ? " if the samples of " + o.data.spec + " fit into it" : "",
         o.init.empty() ? ", or more --positions"
         : task         ? ", or start from a model with more positions"
                        : "");
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

Dataset open_inputs(TrainOptions& o) {
  if (o.init.empty()) apply_preset_to_architecture(o);
  else take_initial(o);
  const bool sizes_known = o.config.vocab_size > 0 && o.data.seq_len > 0;
  Dataset dataset;
  if (!(o.plans_only() && sizes_known && o.data.spec.empty())) dataset = open_data(o);
  choose_positions(o);
  o.config.check(Exit::usage, "flags");
  check_options(o);
  if (dataset.train != nullptr) choose_text_defaults(o, *dataset.train);
  take_teacher(o, dataset);
  check_together(o);
  return dataset;
}

std::string digest_of_files(const TrainOptions& o, const Dataset& data) {
  if (parse_data_spec(o.data.spec).path.empty()) return "";
  if (parse_data_spec(o.data.spec).kind == DataSpec::Kind::generated) return str(std::hex, data.test->digest());
  const std::string train = str(std::hex, data.train->digest());
  return o.data.val_spec.empty() ? train : train + str("-", std::hex, data.test->digest());
}

static double epochs_of(const TrainOptions& o, const Dataset& data) {
  return static_cast<double>(o.steps) * static_cast<double>(o.batch * o.accumulate) /
         static_cast<double>(data.train->size());
}

std::string epochs_warning(const TrainOptions& o, const Dataset& data) {
  if (data.train == nullptr || !parse_data_spec(o.data.spec).files() || epochs_of(o, data) <= 4) return "";
  return str("warning: ", format_number("%.1f", epochs_of(o, data)), " epochs: beyond four a model gains little from ",
             "the same text, and may learn it by heart; fewer --steps, or more data");
}

std::string describe_data(const TrainOptions& o, const Dataset& data) {
  const int64_t size = data.train->size(), T = data.train->seq_len(), each = o.batch * o.accumulate;
  const double epochs = epochs_of(o, data);
  return str("data: ", format_count(size * T), " training tokens in ", format_count(size), " sequences of ",
             format_count(T), "; ", format_count(o.steps), " steps x ", format_count(each), " sequences = ",
             epochs < 100 ? format_number(epochs < 0.1 ? "%.2g" : "%.1f", epochs) : format_count(std::llround(epochs)),
             " epochs; test set ", format_count(data.test->size()), " sequences");
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

std::string vocabulary_note(const TrainOptions& o, const Dataset& dataset) {
  const int64_t used = dataset.train->vocab_size(), V = o.config.vocab_size;
  if (!o.init.empty() || used == 0 || V < 2 * used) return "";
  const int64_t saved = (V - used) * o.config.hidden_size * (o.config.tie_word_embeddings ? 1 : 2);
  return str("note: the data has ", format_count(used), " different tokens, the model ", format_count(V), ": --vocab ",
             used, " would save ", format_count(saved), " parameters");
}

}  // namespace crossply
