#include "data/source.h"

#include <cmath>
#include <cstring>
#include <filesystem>

#include "data/arith.h"
#include "data/digest.h"
#include "data/document_marks.h"
#include "data/document_shuffle.h"
#include "data/encoded_task.h"
#include "data/foreign_format.h"
#include "data/paths.h"
#include "data/prosqa.h"
#include "data/shards.h"
#include "data/text.h"
#include "engine/rng.h"

namespace crossply {

uint64_t Source::digest() const {
  const size_t T = static_cast<size_t>(seq_len());
  std::vector<int32_t> sample(2 * T);
  Digest digest;
  for (int64_t i = 0; i < size(); ++i) {
    read(i, sample.data(), sample.data() + T);
    digest.add(sample.data(), sample.size() * sizeof sample[0]);
  }
  return digest.value();
}

void Source::read_piece(size_t piece, int64_t begin, int64_t count, int32_t*) const {
  CHECK_THAT(false, "tokens ", begin, " to ", begin + count, " of piece ", piece, " of a set that has none");
}

void RandomSamples::read(int64_t index, int32_t* tokens, int32_t* targets) const {
  CHECK_THAT(index >= 0 && index < count_, "sample ", index, " of ", count_);
  Random random(seed_, static_cast<uint64_t>(index));
  source_.read_at(random.below(offsets_), seq_len(), tokens, targets);
}

int64_t count_samples(const std::string& where, const char* split, int64_t asked, int64_t available) {
  if (asked > available)
    fail(Exit::usage, where, ": asked for ", asked, " ", split, " samples, but there are only ", available);
  return asked ? asked : available;
}

// In its own words, or in the tokens of a model that knows text.
static Dataset open_task(const DataOptions& options) {
  const bool encoded = options.of_model.is_bytes() || options.of_model.is_bpe();
  DataOptions in_words = options;
  if (encoded) in_words.seq_len = 0;
  const auto arith = parse_arith(options.spec);
  TaskSplits splits = arith ? open_arith(*arith, in_words) : open_prosqa(in_words, parse_data_spec(options.spec).path);
  if (encoded) return encode_task(std::move(splits), options);
  return {std::move(splits.train), std::move(splits.test), splits.words};
}

// What --shuffle documents makes of a training split, and --documents of both.
static Dataset mark_documents(Dataset data, const DataOptions& options) {
  const bool in_order = data.train == nullptr || options.shuffle == "windows", marks = options.documents != "none";
  if (in_order && !marks) return data;
  const std::string flag = in_order ? "--documents " + options.documents : "--shuffle documents";
  const Source& first = data.train != nullptr ? *data.train : *data.test;
  if (first.pieces().empty()) fail(Exit::usage, flag, " is for files, not for \"", options.spec, "\"");
  const int64_t eot = options.eot >= 0 ? options.eot : data.tokenizer.eos();
  if (eot < 0 || eot > INT32_MAX)
    fail(Exit::usage, flag, ": ", options.spec, " does not say which token ends a document; say it with --eot ID");
  if (marks) data.documents = {static_cast<int32_t>(eot), begin_with_eot(options.documents, first_token(first), eot)};
  if (!in_order)
    data.train = std::make_unique<DocumentShuffle>(std::move(data.train), options.documents, eot, options.seed);
  return data;
}

static Dataset open_splits(const DataOptions& options) {
  const std::string& spec = options.spec;
  if (options.seq_len < 0 || options.train_samples < 0 || options.test_samples < 0)
    fail(Exit::usage, "sequence length and numbers of samples must not be negative");
  constexpr int64_t longest = int64_t{1} << 30;  // of any model
  if (options.seq_len > longest)
    fail(Exit::usage, "a sequence length of ", options.seq_len, " is more than any model has, ", longest);
  const DataSpec::Kind kind = parse_data_spec(spec).kind;
  using enum DataSpec::Kind;
  if (!options.val_spec.empty() && kind != shards && kind != directory)
    fail(Exit::usage, "--val-data ", options.val_spec, " is for --data of token shards, not of \"", spec, "\"");
  if (!options.tokenizer.empty() && kind != text)
    fail(Exit::usage, "--tokenizer ", options.tokenizer, " is for text:, not for \"", spec, "\": ",
         kind == generated ? "it has its own words, or the tokens of the model that it is read for"
                           : "shards that prepare wrote know their tokenizer; others have none");
  if (kind == generated) return open_task(options);
  CHECK_THAT(options.seq_len > 0 || kind == unknown, "no sequence length for ", spec);
  if (kind == text) return open_text(spec.substr(5), options);
  std::error_code ignored;
  if (kind == unknown)
    if (const std::string format = foreign_format_of(spec); !format.empty()) fail(Exit::bad_data, spec, ": ", format);
  if (kind == unknown && std::filesystem::exists(spec, ignored))
    fail(Exit::usage, "unknown data \"", spec,
         "\": a file of that name is there, but it is no *.bin; for the text in it: --data text:", spec);
  if (kind == unknown)
    fail(Exit::usage, "unknown data \"", spec, "\": there is no file or directory of that name; expected ", data_specs);
  DataOptions expanded = options;
  expand_directories(expanded);
  return open_shards(expanded);
}

static Dataset take_test_part(Dataset data, const DataOptions& options) {
  if (options.test_part == "all" || options.whole) return data;
  if (data.test->size() < 2)
    fail(Exit::bad_data, options.spec, ": the test set has ", data.test->size(),
         " sequence, of which there is no half");
  data.test = std::make_unique<HalfOfSamples>(std::move(data.test), options.test_part == "first_half");
  return data;
}

Dataset open_dataset(const DataOptions& options) {
  return take_test_part(mark_documents(open_splits(options), options), options);
}

DataSpec parse_data_spec(const std::string& spec) {
  using enum DataSpec::Kind;
  if (spec == "prosqa" || parse_arith(spec)) return {generated, "", ""};
  if (spec.starts_with("prosqa:") && spec.ends_with(".json")) return {generated, "prosqa:", spec.substr(7)};
  for (const auto& [prefix, kind] : {std::pair("text:", text), {"uint16:", shards}, {"uint32:", shards}})
    if (spec.starts_with(prefix)) return {kind, prefix, spec.substr(std::strlen(prefix))};
  if (spec.ends_with(".bin")) return {shards, "", spec};
  std::error_code ignored;
  const bool is_there = std::filesystem::exists(spec, ignored);
  if (std::filesystem::is_directory(spec, ignored) || (!is_there && spec.find('/') != spec.npos))
    return {directory, "", spec};
  return {};
}

void expand_directories(DataOptions& options) {
  const auto expand = [](const std::string& dir, const char* name, bool needed) -> std::string {
    std::error_code ignored;
    if (!std::filesystem::is_directory(dir, ignored)) fail(Exit::no_input, dir, ": no such directory");
    std::string pattern;
    for (const char c : dir) pattern += std::string(std::strchr("*?[\\", c) != nullptr ? "\\" : "") + c;
    pattern += (dir.ends_with('/') ? "" : "/") + std::string(name);
    if (!match_paths(pattern, true).empty()) return pattern;
    if (!needed) return "";
    fail(Exit::no_input, dir, ": has no ", name, ": it is no directory that prepare wrote; for text in it: text:", dir);
  };
  const std::string spec = options.spec;
  const auto is_directory = [](const std::string& s) { return parse_data_spec(s).kind == DataSpec::Kind::directory; };
  if (is_directory(spec)) options.spec = expand(spec, "train_*.bin", true);
  if (is_directory(options.val_spec)) options.val_spec = expand(options.val_spec, "val_*.bin", true);
  else if (options.val_spec.empty() && is_directory(spec)) options.val_spec = expand(spec, "val_*.bin", false);
}

std::vector<std::string> data_files(const std::string& spec) {
  const DataSpec parts = parse_data_spec(spec);
  if (parts.kind == DataSpec::Kind::text) return text_files(parts.path);
  if (parts.kind == DataSpec::Kind::shards) return match_paths(parts.path);
  DataOptions directory;
  directory.spec = spec;
  if (parts.kind != DataSpec::Kind::directory) return {};
  expand_directories(directory);
  return match_paths(directory.spec);
}

std::string short_name(const std::string& spec) {
  const DataSpec parts = parse_data_spec(spec);
  if (parts.path.empty()) return spec;
  const std::filesystem::path path(parts.path);
  const bool prepared = path.filename() == "train_*.bin" && path.has_parent_path();
  return parts.prefix + (prepared ? path.parent_path() : path).filename().string();
}

double chance_of(const std::string& spec) {
  if (const auto arith = parse_arith(spec)) return arith_chance(*arith);
  return spec.starts_with("prosqa") ? 0.5 : NAN;
}

}  // namespace crossply
