// Reads a Bpe from tokenizer.json: what is in the file is computed, refused by name, or contradicts itself.
#include <algorithm>
#include <atomic>
#include <unordered_set>

#include "data/bpe/bpe.h"
#include "data/bpe/character_set.h"
#include "data/bpe/tokenizer_json.h"
#include "engine/check.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

using nlohmann::json;

constexpr int64_t max_ids = 1 << 22;
constexpr size_t max_growth = 256;  // of a text, by all normalizers

// Of a token in the names of its bytes; false where one of them names none.
bool bytes_of(const std::string& token, std::string& bytes) {
  static const std::unordered_map<std::string, char> byte_of = [] {
    std::unordered_map<std::string, char> map;
    const std::vector<std::string> names = byte_names();
    for (size_t b = 0; b < names.size(); ++b) map[names[b]] = static_cast<char>(b);
    return map;
  }();
  bytes.clear();
  for (size_t at = 0; at < token.size();) {
    const size_t length = std::max<size_t>(1, first_character(std::string_view(token).substr(at)).length);
    const auto found = byte_of.find(token.substr(at, length));
    if (found == byte_of.end()) return false;
    bytes += found->second;
    at += length;
  }
  return true;
}

std::string foreign_model(const json& model) {
  if (const std::string type = model_type_of(model); type != "BPE") return "the model is " + excerpt(type);
  if (const json& dropout = part_of(model, "dropout"); !dropout.is_null() && dropout != 0)
    return "the model has dropout";
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!is_empty(part_of(model, key))) return std::string("the model has ") + key;
  for (const char* key : {"fuse_unk", "byte_fallback", "ignore_merges"})
    if (const json& value = part_of(model, key); !value.is_null() && !value.is_boolean())
      return std::string("the model's ") + key + " is not true or false";
  return unknown_key(model, "the model",
                     {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                      "byte_fallback", "ignore_merges", "vocab", "merges"});
}

// How many times as long as a text of a byte or more a step makes it, at most.
size_t growth_of(const json& step) {
  if (type_of(step) == "NFC") return 3;
  if (type_of(step) == "Prepend") return 1 + step["prepend"].get_ref<const std::string&>().size();
  const size_t from = step["pattern"]["String"].get_ref<const std::string&>().size();
  return std::max<size_t>(1, (step["content"].get_ref<const std::string&>().size() + from - 1) / from);
}

std::string foreign_normalizer(const json& normalizer) {
  size_t growth = 1;
  for (const json& step : steps_of(normalizer, "normalizers")) {
    const std::string type = type_of(step), name = "the normalizer " + excerpt(type);
    const char* text = type == "Prepend" ? "prepend" : type == "Replace" ? "content" : nullptr;
    const bool is_nfc = type == "NFC" && step.size() == 1;
    if (!is_nfc && (text == nullptr || !part_of(step, text).is_string())) return name;
    if (type == "Replace") {
      const json& pattern = part_of(step, "pattern");
      if (!part_of(pattern, "String").is_string() || pattern.size() != 1 || pattern["String"] == "")
        return name + " of anything but a text";
    }
    if (auto key = unknown_key(step, name, {"type", "prepend", "pattern", "content"}); !key.empty()) return key;
    growth *= growth_of(step);
    if (growth > max_growth) return "a normalizer that may make a text " + std::to_string(growth) + " times as long";
  }
  return "";
}

// Decoders of a vocabulary of characters: marks become spaces, bytes bytes, and the first space goes.
std::string foreign_decoder(const json& decoder, bool byte_level) {
  for (const json& step : steps_of(decoder, "decoders")) {
    const std::string type = type_of(step), name = "the decoder " + excerpt(type);
    if (type == "ByteLevel" && byte_level) continue;
    if (byte_level) return name;
    if (type == "ByteFallback" || type == "Fuse") continue;
    if (type == "Replace" && part_of(part_of(step, "pattern"), "String").is_string() && part_of(step, "content") == " ")
      continue;
    if (type == "Metaspace" && part_of(step, "replacement").is_string() && !prepend_scheme_of(step).empty()) continue;
    if (type == "Strip" && part_of(step, "content") == " " && part_of(step, "start") == 1 && part_of(step, "stop") == 0)
      continue;
    return name;
  }
  return "";
}

std::string foreign_post_processor(const json& processor) {
  for (const json& step : steps_of(processor, "processors")) {
    const std::string type = type_of(step);
    const bool known =
        type == "ByteLevel" || type == "TemplateProcessing" || type == "BertProcessing" || type == "RobertaProcessing";
    if (!known) return "the post-processor " + excerpt(type);
  }
  return "";
}

}  // namespace

std::vector<std::string> byte_names() {
  std::vector<std::string> names;
  uint32_t next = 256;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    append_utf8(names.emplace_back(), prints ? b : next++);
  }
  return names;
}

std::string Bpe::foreign_part(const json& object) {
  const json& model = part_of(object, "model");
  const json& pre_tokenizer = part_of(object, "pre_tokenizer");
  if (std::string part = foreign_model(model); !part.empty()) return part;
  if (std::string part = Splitter::foreign_part(pre_tokenizer); !part.empty()) return part;
  const bool byte_level = Splitter::is_byte_level(pre_tokenizer);
  if (!byte_level && part_of(model, "byte_fallback") != true)
    return "a BPE vocabulary of neither bytes (ByteLevel) nor characters with byte_fallback";
  if (byte_level && part_of(model, "byte_fallback") == true) return "byte_fallback below ByteLevel";
  const json& normalizer = part_of(object, "normalizer");
  if (std::string part = foreign_normalizer(normalizer); !part.empty()) return part;
  // What begins a text is then asked of the text before it was normalized.
  for (const json& step : steps_of(pre_tokenizer, "pretokenizers"))
    if (type_of(step) == "Metaspace" && prepend_scheme_of(step) == "first" &&
        !steps_of(normalizer, "normalizers").empty())
      return "the pre-tokenizer Metaspace with prepend_scheme first, after a normalizer";
  if (std::string part = foreign_decoder(part_of(object, "decoder"), byte_level); !part.empty()) return part;
  if (std::string part = foreign_post_processor(part_of(object, "post_processor")); !part.empty()) return part;
  for (const char* key : {"truncation", "padding"})
    if (const json& state = part_of(object, key); !state.is_null() && !state.is_object())
      return std::string("it has a ") + key + " that is no object";
  if (const json& version = part_of(object, "version"); !version.is_null() && version != "1.0")
    return "it has the version " + excerpt(json_text(version));
  return unknown_key(object, "it",
                     {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                      "post_processor", "decoder", "model"});
}

Bpe::Bpe(const json& object, const std::string& path) {
  static std::atomic<uint64_t> serial = 0;
  serial_ = ++serial;
  const json& model = part_of(object, "model");
  const json& pre_tokenizer = part_of(object, "pre_tokenizer");
  byte_level_ = Splitter::is_byte_level(pre_tokenizer);
  ignore_merges_ = part_of(model, "ignore_merges") == true;
  read_normalizer(part_of(object, "normalizer"));
  read_vocab(part_of(model, "vocab"), path);
  read_byte_tokens(path);
  read_merges(part_of(model, "merges"), path);
  read_added(part_of(object, "added_tokens"), path);
  read_post_processor(part_of(object, "post_processor"), path);
  splitter_ = Splitter(pre_tokenizer, path);
  if (!byte_level_) read_decoder(part_of(object, "decoder"), part_of(object, "added_tokens"));
  special_ids_.resize(texts_.size());
  for (const AddedTokens* some : {&added_, &normalized_added_})
    for (const AddedToken& token : some->tokens())
      if (token.special) special_ids_[static_cast<size_t>(token.id)] = true;
  fingerprint_ = fingerprint_of(normal_form());
}

// All that decides the ids of a text, in an order that is not the file's.
std::string Bpe::normal_form() const {
  std::string form;
  const auto add = [&](const std::string& text) { form += std::to_string(text.size()) + " " + text + "\n"; };
  const auto add_ids = [&](const char* name, const std::vector<int32_t>& ids) {
    form += name;
    for (const int32_t id : ids) form += " " + std::to_string(id);
    form += "\n";
  };
  std::vector<std::pair<int32_t, std::string>> tokens;
  for (const auto& [text, id] : ids_) tokens.push_back({id, text});
  std::sort(tokens.begin(), tokens.end());
  for (const auto& [id, text] : tokens) form += std::to_string(id) + " ", add(text);
  add_ids("bpe", {byte_level_, ignore_merges_});
  for (const auto& [left, right] : merges_.in_order()) add_ids("merge", {left, right});
  for (const auto& [kind, from, to] : normalizations_)
    add_ids("normalize", {static_cast<int>(kind)}), add(from), add(to);
  for (const AddedTokens* some : {&added_, &normalized_added_}) {
    add_ids("added", {});
    for (const AddedToken& token : some->tokens())
      add_ids("token", {token.id, token.single_word, token.lstrip, token.rstrip, token.special}), add(token.text);
  }
  add(splitter_.normal_form());
  add_ids("prefix", prefix_);
  add_ids("suffix", suffix_);
  return form;
}

void Bpe::read_normalizer(const json& normalizer) {
  for (const json& step : steps_of(normalizer, "normalizers")) {
    using Kind = Normalization::Kind;
    if (type_of(step) == "NFC") normalizations_.push_back({Kind::nfc, "", ""});
    else if (type_of(step) == "Prepend") normalizations_.push_back({Kind::prepend, "", step["prepend"]});
    else normalizations_.push_back({Kind::replace, step["pattern"]["String"], step["content"]});
  }
}

void Bpe::read_vocab(const json& vocab, const std::string& path) {
  if (!vocab.is_object()) fail(Exit::bad_data, path, ": the vocab of the model is not an object");
  std::string bytes;
  for (const auto& [token, value] : vocab.items()) {
    if (!holds<int64_t>(value, 0, max_ids - 1))
      fail(Exit::bad_data, path, ": the id of \"", excerpt(token), "\" is ", excerpt(json_text(value)));
    if (token.empty()) fail(Exit::bad_data, path, ": the vocab has a token without text");
    const auto id = value.get<size_t>();
    if (id >= texts_.size()) texts_.resize(id + 1);
    if (!texts_[id].empty()) fail(Exit::bad_data, path, ": two tokens have the same id, ", id);
    const bool in_names = byte_level_ && bytes_of(token, bytes);
    texts_[id] = in_names ? bytes : token;  // what is not in names of bytes stands for itself
    ids_[token] = static_cast<int32_t>(id);
    if (ignore_merges_ && (in_names || !byte_level_)) whole_[texts_[id]] = static_cast<int32_t>(id);
  }
}

// The tokens of single bytes; without ByteLevel <0x00> to <0xFF>, and those of single characters.
void Bpe::read_byte_tokens(const std::string& path) {
  const std::vector<std::string> names = byte_names();
  for (size_t b = 0; b < 256; ++b) {
    constexpr const char* digits = "0123456789ABCDEF";
    const std::string name = byte_level_ ? names[b] : std::string("<0x") + digits[b / 16] + digits[b % 16] + ">";
    const auto found = ids_.find(name);
    if (found == ids_.end()) fail(Exit::bad_data, path, ": there is no token for the byte ", name);
    bytes_[b] = found->second;
  }
  if (byte_level_) return;
  for (const auto& [token, id] : ids_)
    if (const Character c = first_character(token); c.length == token.size()) characters_[c.code] = id;
}

void Bpe::read_merges(const json& merges, const std::string& path) {
  if (!merges.is_array()) fail(Exit::bad_data, path, ": the merges of the model are not a list");
  merges_.reserve(merges.size());
  int32_t rank = 0;
  for (const json& merge : merges) {
    std::string left, right;
    if (merge.is_string()) {
      const std::string& both = merge.get_ref<const std::string&>();
      if (both.starts_with("#version")) continue;  // the first line of a merges.txt
      const size_t space = both.find(' ');
      left = both.substr(0, space), right = space == std::string::npos ? "" : both.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0], right = merge[1];
    }
    const int32_t a = id_of(left), b = id_of(right), both = id_of(left + right);
    if (a < 0 || b < 0 || both < 0)
      fail(Exit::bad_data, path, ": merge ", rank, " is ", excerpt(json_text(merge)), ", which are no tokens");
    merges_.add(a, b, {rank++, both});
  }
}

// A token that the vocab lacks gets the next id behind it: that is what the file must say.
void Bpe::read_added(const json& added, const std::string& path) {
  if (!added.is_null() && !added.is_array()) fail(Exit::bad_data, path, ": the added_tokens are not a list");
  std::vector<AddedToken> plain, normal;
  auto next = static_cast<int64_t>(ids_.size());
  std::unordered_set<std::string> seen, normal_texts;
  for (const json& token : added) {
    const json& content = part_of(token, "content");
    if (!content.is_string() || content == "") fail(Exit::bad_data, path, ": an added token has no text");
    AddedToken one{content.get<std::string>()};
    const std::string name = "the added token \"" + excerpt(one.text) + "\"";
    if (auto key =
            unknown_key(token, name, {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
        !key.empty())
      fail(Exit::bad_data, path, ": ", key, ", which is not computed here");
    const auto is_set = [&](const char* key, bool otherwise) {
      const json& value = part_of(token, key);
      if (!value.is_null() && !value.is_boolean())
        fail(Exit::bad_data, path, ": ", name, ": ", key, " is no truth value");
      return value.is_null() ? otherwise : value.get<bool>();
    };
    one.single_word = is_set("single_word", false);
    one.lstrip = is_set("lstrip", false), one.rstrip = is_set("rstrip", false);
    one.special = is_set("special", false);
    const bool normalized_first = is_set("normalized", !one.special);
    const int32_t known = id_of(one.text);
    const int64_t id = known >= 0 ? known : next++;
    if (part_of(token, "id") != id)
      fail(Exit::bad_data, path, ": ", name, " has the id ", excerpt(json_text(part_of(token, "id"))),
           ", but its place gives ", id);
    if (id >= max_ids || !seen.insert(one.text).second) fail(Exit::bad_data, path, ": ", name, " is there twice");
    if (static_cast<size_t>(id) >= texts_.size()) texts_.resize(static_cast<size_t>(id) + 1);
    if (known < 0 && !texts_[static_cast<size_t>(id)].empty())
      fail(Exit::bad_data, path, ": two tokens have the same id, ", id);
    one.id = static_cast<int32_t>(id);
    ids_[one.text] = one.id;
    texts_[static_cast<size_t>(id)] = one.text;
    if (normalized_first) one.text = normalized(one.text);
    if (one.text.empty()) fail(Exit::bad_data, path, ": ", name, " has no text when it is normalized");
    if (normalized_first && !normal_texts.insert(one.text).second)
      fail(Exit::bad_data, path, ": ", name,
           " is normalized to the same text as another one, which is not computed here");
    (normalized_first ? normal : plain).push_back(std::move(one));
  }
  added_ = AddedTokens(std::move(plain));
  normalized_added_ = AddedTokens(std::move(normal));
}

// What the tokens of a vocabulary of characters stand for: bytes, and spaces where the decoder puts them for marks.
void Bpe::read_decoder(const json& decoder, const json& added) {
  std::vector<bool> verbatim(texts_.size());
  for (const json& token : added) verbatim[token["id"].get<size_t>()] = true;
  bool byte_fallback = false;
  for (const json& step : steps_of(decoder, "decoders")) {
    byte_fallback = byte_fallback || type_of(step) == "ByteFallback";
    const bool is_metaspace = type_of(step) == "Metaspace";
    if (type_of(step) == "Strip" || (is_metaspace && prepend_scheme_of(step) != "never")) begins_with_space_ = true;
    if (!is_metaspace && type_of(step) != "Replace") continue;
    const std::string mark = is_metaspace ? step["replacement"] : step["pattern"]["String"];
    for (size_t id = 0; id < texts_.size() && !mark.empty(); ++id)
      for (size_t at = 0; !verbatim[id] && (at = texts_[id].find(mark, at)) != std::string::npos; ++at)
        texts_[id].replace(at, mark.size(), " ");
  }
  for (size_t b = 0; byte_fallback && b < bytes_.size(); ++b)
    texts_[static_cast<size_t>(bytes_[b])] = std::string(1, static_cast<char>(b));
}

// Where a template puts the text, between tokens that all texts begin and end with.
void Bpe::read_post_processor(const json& processor, const std::string& path) {
  const auto refuse = [&] { fail(Exit::bad_data, path, ": a post-processor that is not written as expected"); };
  const auto add = [&](std::vector<int32_t>& ids, const json& id) {
    if (!holds<int32_t>(id, 0) || id.get<size_t>() >= texts_.size()) refuse();
    ids.push_back(id.get<int32_t>());
  };
  for (const json& step : steps_of(processor, "processors")) {
    const std::string type = type_of(step);
    if (type == "ByteLevel") continue;
    if (type != "TemplateProcessing") {  // BERT's and RoBERTa's: [text, id]
      for (const char* key : {"cls", "sep"}) {
        const json& pair = part_of(step, key);
        if (!pair.is_array() || pair.size() != 2) refuse();
        add(key == std::string("cls") ? prefix_ : suffix_, pair[1]);
      }
      continue;
    }
    std::vector<int32_t>* side = &prefix_;
    if (!part_of(step, "single").is_array()) refuse();
    for (const json& item : step["single"]) {
      if (item.is_object() && item.contains("Sequence")) {
        side = &suffix_;
        continue;
      }
      const json& name = part_of(part_of(item, "SpecialToken"), "id");
      if (!name.is_string()) refuse();
      const json& ids = part_of(part_of(part_of(step, "special_tokens"), name.get<std::string>().c_str()), "ids");
      if (!ids.is_array()) refuse();
      for (const json& id : ids) add(*side, id);
    }
  }
}

}  // namespace crossply
