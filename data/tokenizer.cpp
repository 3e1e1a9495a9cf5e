#include "data/tokenizer.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>

#include "data/bpe/bpe.h"
#include "data/bpe/tokenizer_json.h"
#include "engine/check.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"

namespace crossply {
namespace {

// Ordered: a reader of tokenizer.json sees the words by id.
using Json = nlohmann::ordered_json;

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

template <class F>
void for_each_word(std::string_view text, F&& body) {
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    for (end = begin; end < text.size() && !is_space(text[end]);) ++end;
    if (end > begin) body(text.substr(begin, end - begin));
  }
}

int32_t parse_id(std::string_view word, const std::string& why) {
  const auto id = parse_all<int32_t>(word);
  if (!id || *id < 0)
    fail(Exit::usage, "\"", excerpt(word), "\" is not a token id: ", why, " the text is whitespace-separated integers");
  return *id;
}

Json vocab_json(const std::vector<std::string>& words) {
  Json vocab = Json::object();
  auto& pairs = vocab.get_ref<Json::object_t&>();  // a vector: looking for each word in it would be quadratic
  for (size_t id = 0; id < words.size(); ++id)
    static_cast<std::vector<Json::object_t::value_type>&>(pairs).emplace_back(words[id], id);
  return vocab;
}

Json tokenizer_json(const Json& pre_tokenizer, const Json& decoder, const Json& model) {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", Json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", pre_tokenizer},
          {"post_processor", nullptr},
          {"decoder", decoder},
          {"model", model}};
}

Json words_json(const std::vector<std::string>& words) {
  // The format demands a token for unknown words. It is not in the vocabulary, so an unknown word is an error there.
  return tokenizer_json({{"type", "WhitespaceSplit"}}, nullptr,
                        {{"type", "WordLevel"}, {"vocab", vocab_json(words)}, {"unk_token", "<unk>"}});
}

Json bytes_json() {
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  Json model = {{"type", "BPE"}};
  for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
    model[key] = nullptr;
  model["fuse_unk"] = false;
  model["vocab"] = vocab_json(byte_names());
  model["merges"] = Json::array();
  return tokenizer_json(byte_level, byte_level, model);
}

using nlohmann::json;  // for reading: finds a key in logarithmic time

// The words of a vocabulary by id; the ids must be 0, 1, ..., n-1.
std::vector<std::string> words_of(const json& vocab, const std::string& path) {
  std::vector<std::string> words(vocab.size());
  for (const auto& [word, id] : vocab.items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= words.size())
      fail(Exit::bad_data, path, ": the id of \"", excerpt(word), "\" is ", excerpt(json_text(id)),
           ", expected an integer below ", words.size());
    std::string& place = words[id.get<size_t>()];
    if (!place.empty())
      fail(Exit::bad_data, path, ": \"", excerpt(word), "\" and \"", excerpt(place), "\" have the same id");
    if (word.empty() || std::any_of(word.begin(), word.end(), is_space))
      fail(Exit::bad_data, path, ": the word \"", excerpt(word), "\" is empty or holds whitespace");
    place = word;
  }
  return words;
}

// What of a tokenizer.json with a list of words is not computed here; "" where all of it is.
std::string foreign_words(const json& object) {
  if (const std::string split = type_of(part_of(object, "pre_tokenizer")); split != "WhitespaceSplit")
    return "the model is WordLevel, the pre-tokenizer " + excerpt(split);
  for (const char* key : {"added_tokens", "normalizer", "post_processor"})
    if (!is_empty(part_of(object, key))) return std::string("it has ") + key;
  return "";
}

// Whether it is what bytes() saves: the 256 bytes in order, and nothing else.
bool is_plain_bytes(const json& object) {
  for (const char* key : {"added_tokens", "normalizer", "post_processor"})
    if (!is_empty(part_of(object, key))) return false;
  static const std::vector<std::string> names = byte_names();
  const json& vocab = object["model"]["vocab"];
  bool same = is_empty(part_of(object["model"], "merges")) &&
              type_of(part_of(object, "pre_tokenizer")) == "ByteLevel" && vocab.is_object() &&
              vocab.size() == names.size();
  for (size_t id = 0; same && id < names.size(); ++id) same = vocab.value(names[id], json()) == id;
  return same;
}

// What ends a text: by the file's post-processor, by the tokenizer_config.json beside it, or by the names that people
// use.
int32_t end_of_text(const Bpe& bpe, const std::string& path) {
  if (bpe.suffix().size() == 1) return bpe.suffix()[0];
  const std::string config = (std::filesystem::path(path).parent_path() / "tokenizer_config.json").string();
  if (path_exists(config)) {
    const json object = try_parse_json(read_file(config, 64 << 20));  // another program's: it need not be as we like it
    const json& token = part_of(object, "eos_token");
    const json& text = token.is_object() ? part_of(token, "content") : token;
    if (const int32_t id = text.is_string() ? bpe.id_of(text) : -1; id >= 0) return id;
  }
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>",
                           "<\xEF\xBD\x9C"
                           "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",
                           "</s>", "<eos>"})
    if (const int32_t id = bpe.id_of(name); id >= 0) return id;
  return -1;
}

void note_call_state(const std::string& path, const std::string& state) {
  static std::set<std::string> said;  // a program may read a file more than once
  if (said.insert(path).second)
    std::fprintf(stderr, "note: %s: ignored, since it is the state of somebody's last call: %s\n",
                 printable(path).c_str(), state.c_str());
}

// Of a fingerprint: they tell two tokenizers apart that are alike in all else that a message says.
std::string first_digits(uint64_t fingerprint) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(fingerprint));
  return std::string(digits, 8);
}

}  // namespace

Tokenizer Tokenizer::words(std::vector<std::string> list) {
  Tokenizer t;
  t.kind_ = Kind::words;
  for (const std::string& word : list) {
    CHECK_THAT(!word.empty() && std::none_of(word.begin(), word.end(), is_space), "\"", word, "\" is not one word");
    const bool is_new = t.ids_.emplace(word, static_cast<int32_t>(t.ids_.size())).second;
    CHECK_THAT(is_new, "the word \"", word, "\" is there twice");
  }
  if (const auto found = t.ids_.find("<eos>"); found != t.ids_.end()) t.eos_ = found->second;
  t.words_ = std::move(list);
  return t;
}

Tokenizer Tokenizer::bytes() {
  Tokenizer t;
  t.kind_ = Kind::bytes;
  return t;
}

Tokenizer Tokenizer::foreign(const std::string& what) {
  Tokenizer t;
  t.kind_ = Kind::foreign;
  t.what_ = what;
  return t;
}

bool Tokenizer::operator==(const Tokenizer& other) const {
  return kind_ == other.kind_ && (kind_ == Kind::words || kind_ == Kind::bytes || kind_ == Kind::bpe) &&
         words_ == other.words_ && (kind_ != Kind::bpe || fingerprint() == other.fingerprint());
}

std::string Tokenizer::describe() const {
  if (kind_ == Kind::none) return "no tokenizer";
  if (kind_ == Kind::bytes) return "bytes";
  if (kind_ == Kind::foreign) return "a tokenizer that is not computed here (" + what_ + ")";
  if (kind_ == Kind::bpe)
    return str("byte-pair encoding with ", bpe_->vocab_size(), " tokens (", first_digits(fingerprint()), ")");
  std::string text = str(words_.size(), " words (");
  for (size_t i = 0; i < words_.size() && i < 6; ++i) text += excerpt(words_[i]) + " ";
  return text + (words_.size() <= 6 ? "...)" : "..., " + first_digits(fingerprint()) + ")");
}

int64_t Tokenizer::vocab_size() const {
  if (kind_ == Kind::bytes) return 256;
  return kind_ == Kind::bpe ? bpe_->vocab_size() : static_cast<int64_t>(words_.size());
}

uint64_t Tokenizer::fingerprint() const {
  if (kind_ == Kind::bpe) return bpe_->fingerprint();
  if (kind_ == Kind::none || kind_ == Kind::foreign) return 0;
  const json object = known_json(json_text(kind_ == Kind::words ? words_json(words_) : bytes_json()));
  json deciding;
  for (const char* key : {"added_tokens", "normalizer", "pre_tokenizer", "model"}) deciding[key] = object[key];
  return fingerprint_of(json_text(deciding));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  if (kind_ == Kind::bpe) return bpe_->encode(text);
  if (kind_ == Kind::bytes) return encode_begin(text, ids), ids;
  for_each_word(text, [&](std::string_view word) {
    if (kind_ == Kind::none) return ids.push_back(parse_id(word, "without a tokenizer.json"));
    if (kind_ == Kind::foreign) return ids.push_back(parse_id(word, "with " + describe()));
    const auto found = ids_.find(std::string(word));
    if (found == ids_.end())
      fail(Exit::usage, "\"", excerpt(word), "\" is not among the ", words_.size(), " words of the vocabulary");
    ids.push_back(found->second);
  });
  return ids;
}

size_t Tokenizer::encode_begin(std::string_view text, std::vector<int32_t>& ids) const {
  if (kind_ == Kind::bpe) return bpe_->encode_begin(text, ids);
  if (kind_ != Kind::bytes) return 0;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return text.size();
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool whole) const {
  std::string text;
  for (int32_t id : ids) {
    const bool known = id >= 0 && id < vocab_size();
    const bool is_number = kind_ == Kind::none || kind_ == Kind::foreign;
    if (!known && !is_number) continue;
    if (!text.empty()) text += separator();
    if (is_number) text += std::to_string(id);
    else if (kind_ == Kind::bytes) text += static_cast<char>(id);
    else if (kind_ == Kind::bpe) text += bpe_->text_of(id);
    else text += words_[static_cast<size_t>(id)];
  }
  if (whole && kind_ == Kind::bpe && bpe_->begins_with_space() && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::string Tokenizer::name_of(int32_t id) const {
  const std::string text = decode({id});
  return text.empty() ? str("<", id, ">") : text;
}

Tokenizer Tokenizer::with_special_text() const {
  Tokenizer t = *this;
  if (kind_ == Kind::bpe) t.bpe_ = std::make_shared<const Bpe>(bpe_->with_special_text(eos_));
  return t;
}

bool Tokenizer::is_special(int32_t id) const { return id == eos() || (kind_ == Kind::bpe && bpe_->is_special(id)); }

void Tokenizer::save(const std::string& dir) const {
  if (kind_ == Kind::none || kind_ == Kind::foreign) return;
  const std::string text =
      kind_ == Kind::bpe ? file_ : json_text(kind_ == Kind::words ? words_json(words_) : bytes_json(), 2) + "\n";
  write_file_atomically(dir + "/tokenizer.json", text);
}

Tokenizer Tokenizer::parse(const std::string& path) {
  constexpr uint64_t most = 256 << 20;
  const std::string text = read_file(path, most);
  const json object = parse_json<json>(text, path);
  if (!object.is_object()) fail(Exit::bad_data, path, ": is not a JSON object");
  const json& model = part_of(object, "model");
  const std::string type = model_type_of(model);
  if (!model.is_object() || type == "without a type" || !model.contains("vocab"))
    fail(Exit::bad_data, path, ": is no tokenizer: a \"model\" with a type and a vocab is missing");
  const bool is_words = type == "WordLevel";
  if (!is_words && is_plain_bytes(object)) return bytes();
  const std::string part = is_words ? foreign_words(object) : Bpe::foreign_part(object);
  if (!part.empty()) return foreign(part);
  if (is_words && !model["vocab"].is_object()) fail(Exit::bad_data, path, ": the vocab of the model is not an object");
  if (is_words) return words(words_of(model["vocab"], path));
  Tokenizer t;
  t.kind_ = Kind::bpe;
  t.bpe_ = std::make_shared<const Bpe>(object, path);
  const std::string state = call_state_of(object);
  if (!state.empty()) note_call_state(path, state);
  t.file_ = state.empty() ? text : without_call_state(object);
  t.eos_ = end_of_text(*t.bpe_, path);
  t.prefix_ = t.bpe_->prefix();
  return t;
}

Tokenizer Tokenizer::load(const std::string& dir) {
  const std::string path = dir + "/tokenizer.json";
  if (path_exists(path)) return parse(path);
  for (const char* name : {"tokenizer.model", "vocab.json", "merges.txt"})
    if (path_exists(dir + "/" + name)) return foreign(name);
  return Tokenizer();
}

Tokenizer Tokenizer::read(const std::string& path) {
  std::error_code ignored;
  const bool is_directory = std::filesystem::is_directory(path, ignored);
  const std::string file = is_directory ? path + "/tokenizer.json" : path;
  Tokenizer tokenizer = parse(file);
  if (tokenizer.is_foreign()) fail(Exit::bad_data, file, ": ", tokenizer.what_, ", which is not computed here");
  return tokenizer;
}

void require_same_tokenizer(const Tokenizer& model, const std::string& name, const Tokenizer& data,
                            const std::string& spec) {
  if (model.is_none() || data.is_none() || model == data) return;
  if (model.is_foreign())
    fail(Exit::usage, name, " has ", model.describe(), ", ", spec, " is encoded as ", data.describe(),
         ": its ids would mean other tokens. Encode the data with the model's tokenizer into token shards, and give ",
         "those (*.bin)");
  fail(Exit::usage, name, " has the tokenizer ", model.describe(), ", ", spec, " has ", data.describe(),
       ": its ids would mean other tokens. Choose data of the model's tokenizer, or token shards made with it (*.bin)");
}

}  // namespace crossply
