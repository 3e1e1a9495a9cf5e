#include "eval/data_choice.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/standard_streams.h"
#include "data/document_marks.h"
#include "engine/io/byte_names.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

// The data of the run that trained the model; all empty and zero without one.
DataOptions read_run(const std::string& dir) {
  const std::string path = dir + "/train_state.json";
  DataOptions run;
  if (!path_exists(path)) return run;
  const nlohmann::json state = read_json(path), flags = state.value("trajectory", nlohmann::json::object());
  if (!flags.is_object()) fail(Exit::bad_data, path, ": \"trajectory\" is no object");
  read(flags, "data", run.spec, path);
  read(flags, "val_data", run.val_spec, path);
  run.spec = name_from_utf8(run.spec), run.val_spec = name_from_utf8(run.val_spec);
  auto count = [&](const char* key, auto& into) {
    int64_t number = static_cast<int64_t>(into);
    read(flags, key, number, path);
    if (number < 0) fail(Exit::bad_data, path, ": \"", key, "\" is ", number, "; it must not be negative");
    into = static_cast<std::decay_t<decltype(into)>>(number);
  };
  if (!mark_shuffle_alone(flags)) read(flags, "documents", run.documents, path);
  if (std::find(document_marks.begin(), document_marks.end(), run.documents) == document_marks.end())
    fail(Exit::bad_data, path, ": \"documents\" cannot be \"", excerpt(run.documents), "\"");
  read(flags, "eot", run.eot, path);
  read(flags, "test_part", run.test_part, path);
  if (std::find(test_parts.begin(), test_parts.end(), run.test_part) == test_parts.end())
    fail(Exit::bad_data, path, ": \"test_part\" cannot be \"", excerpt(run.test_part), "\"");
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
  if (a == b || parse_data_spec(a).kind != parse_data_spec(b).kind) return a == b;
  const std::vector<std::string> of_a = files_of(a), of_b = files_of(b);
  return !of_a.empty() && std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(), same_file);
}

// What of the data is scored. complete: is it all of its split?
std::string describe(const DataChoice& choice, bool complete) {
  const DataOptions &data = choice.data, &run = choice.run;
  const bool test = choice.split == "test";
  if (!choice.files && !choice.own)
    return run.spec.empty() ? "generated" : "generated; the model was trained on " + run.spec;
  if (choice.split == "all" && !complete) return "";
  if (choice.split == "all")  // files of text follow each other, files of shards do not
    return parse_data_spec(data.spec).kind == DataSpec::Kind::text ? "every token but the first, once"
                                                                   : "every token but a file's first, once";
  const std::string half = data.test_part == "all"          ? ""
                           : data.test_part == "first_half" ? ", first half"
                                                            : ", second half";
  if (test && !data.val_spec.empty())
    return (choice.own && same_data(data.val_spec, run.val_spec) ? "the run's validation data" : "as validation data") +
           half;
  if (!choice.own) return test ? "what training on it would leave out" : "what training on it would use";
  if (!choice.own_parts) return choice.files ? str("cut for --seq ", data.seq_len) : "generated";
  return test ? "kept from training" + half : "what the model was trained on";
}

// What the flags leave open is as in the run that trained the model, so that the test set is the one it did not see.
// Files that this run did not train on are scored from end to end.
DataChoice choose_data(const DataOptions& asked, const std::string& split, const std::optional<uint64_t>& seed,
                       const LoadedModel& model, const Tokenizer& tokenizer) {
  DataChoice choice{asked, read_run(model.dir), split};
  DataOptions& data = choice.data;
  const DataOptions& run = choice.run;
  expand_directories(data);
  const bool files = choice.files = parse_data_spec(data.spec).files();
  const bool own = choice.own = same_data(run.spec, data.spec);
  if (choice.split.empty()) choice.split = own || !files || !data.val_spec.empty() ? "test" : "all";
  if (choice.split == "all" && !files) fail(Exit::usage, "--split all is for files; ", data.spec, " is generated");
  data.whole = choice.split == "all";
  data.seed = seed.value_or(own ? run.seed : 42);
  if (own && data.train_samples == 0) data.train_samples = run.train_samples;
  if (own && data.test_samples == 0 && !data.whole) data.test_samples = run.test_samples;
  if (own && data.val_spec.empty()) data.val_spec = run.val_spec;
  if (own) data.test_part = run.test_part;
  if (data.documents.empty()) data.documents = files ? run.documents : "none";  // so the model has learned to attend
  if (data.documents != "none" && data.eot < 0) data.eot = run.eot >= 0 ? run.eot : tokenizer.eos();
  if (data.seq_len == 0 && (own || files)) data.seq_len = run.seq_len;
  choice.guessed_seq_len = data.seq_len == 0 && files;
  if (choice.guessed_seq_len) data.seq_len = std::min(model.config.max_position_embeddings, max_guessed_seq_len);
  choice.own_parts = own && (files ? !data.val_spec.empty() || data.seq_len == run.seq_len
                                   : data.seed == run.seed && data.train_samples == run.train_samples);
  return choice;
}

// Says so where the model may know from its training what is going to be scored.
void note_training_data(const DataChoice& choice) {
  const DataOptions& run = choice.run;
  if (!choice.files) {
    if (choice.own && !choice.own_parts)
      say_note("--seed or --train-samples differ from the run's: training and test data mix");
  } else if (choice.own && (choice.split == "train" || (choice.split == "test" && choice.data.val_spec.empty()))) {
    if (!choice.own_parts)
      say_note(str("the run cut its data for --seq ", run.seq_len, ": here, training and test data mix"));
  } else {
    const std::vector<std::string> scored = files_of(choice.scored()), trained = files_of(run.spec);
    const int64_t known = std::count_if(scored.begin(), scored.end(), [&](const std::string& a) {
      return std::any_of(trained.begin(), trained.end(), [&](const std::string& b) { return same_file(a, b); });
    });
    if (known > 0 && scored.size() == 1) say_note(scored[0] + " is among the files that the model was trained on");
    else if (known > 0)
      say_note(str(known, " of these ", scored.size(), " files are among those that the model was trained on"));
  }
}

}  // namespace

std::string describe_split(const DataChoice& choice, bool complete) {
  const std::vector<std::string> files = files_of(choice.scored());
  const std::string name = files.size() == 1 ? files[0] : choice.scored(), what = describe(choice, complete);
  return str("split ", choice.split, ": ", printable(name),
             files.size() > 1 ? str(" (", files.size(), " files)") : std::string(), what.empty() ? "" : ", ",
             printable(what));
}

int64_t scored_bytes(const Source& source, int64_t sequences, const Tokenizer& tokenizer) {
  std::vector<int64_t> bytes(static_cast<size_t>(tokenizer.vocab_size()));
  for (int32_t id = 0; id < std::ssize(bytes); ++id)
    bytes[static_cast<size_t>(id)] = std::ssize(tokenizer.decode({id}));
  if (tokenizer.eos() >= 0) bytes[static_cast<size_t>(tokenizer.eos())] = 0;
  if (source.task() != nullptr) bytes[static_cast<size_t>(source.task()->eos())] = 0;
  for (const int32_t id : tokenizer.prefix()) bytes[static_cast<size_t>(id)] = 0;
  std::vector<int32_t> tokens(static_cast<size_t>(source.seq_len())), targets(tokens.size());
  int64_t sum = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    source.read(i, tokens.data(), targets.data());
    for (const int32_t target : targets)
      if (target >= 0 && target < std::ssize(bytes)) sum += bytes[static_cast<size_t>(target)];
  }
  return sum;
}

ModelData open_data(const DataOptions& asked, const std::string& split, const std::optional<uint64_t>& seed,
                    const LoadedModel& model, const std::string& name) {
  const Tokenizer tokenizer = model_tokenizer(model, asked.tokenizer);
  ModelData data{choose_data(asked, split, seed, model, tokenizer), {}, tokenizer};
  DataChoice& choice = data.choice;
  choice.data.tokenizer.clear(), choice.data.of_model = tokenizer;
  data.dataset = open_dataset(choice.data);
  const Tokenizer& other = data.dataset.tokenizer;
  require_same_tokenizer(tokenizer, name, other, choice.data.spec);
  if (tokenizer.is_none() && !other.is_none())
    say_note(str(name, " has no tokenizer: the ids of ", choice.data.spec, " are taken as its own"));
  for (const auto& part : {&data.dataset.train, &data.dataset.test})
    if (part->get() == &data.source()) (*part)->check_when_read(model.config.vocab_size);
  if (tokenizer.is_none()) data.tokenizer = other;
  note_training_data(choice);
  return data;
}

}  // namespace crossply
