#include "data/bpe.h"

#include <algorithm>
#include <limits>

#include "engine/check.h"
#include "engine/json.h"
#include "engine/printable.h"

namespace crossply {
namespace {

using nlohmann::json;

// GPT-2's, which tokenizer.json's ByteLevel stands for.
const char* const gpt2_split = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::string utf8(int code_point) {  // below 0x800 is all that the byte table needs
  if (code_point < 0x80) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xC0 | (code_point >> 6)), static_cast<char>(0x80 | (code_point & 0x3F))};
}

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

std::string type_of(const json& object) {
  return object.is_object() && object.contains("type") && object["type"].is_string() ? object["type"].get<std::string>()
                                                                                     : "missing";
}

json part(const json& object, const char* key) { return object.value(key, json()); }

// The steps of a pre-tokenizer: itself, or those of a Sequence.
std::vector<json> steps_of(const json& pre_tokenizer) {
  if (type_of(pre_tokenizer) != "Sequence") return {pre_tokenizer};
  return part(pre_tokenizer, "pretokenizers").get<std::vector<json>>();
}

}  // namespace

std::vector<std::string> byte_names() {
  std::vector<std::string> names;
  int next = 256;
  for (int b = 0; b < 256; ++b) {
    const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    names.push_back(utf8(prints ? b : next++));
  }
  return names;
}

std::string Bpe::foreign_part(const json& object) {
  if (const std::string type = type_of(part(object, "model")); type != "BPE") return "the model is " + excerpt(type);
  const json pre_tokenizer = part(object, "pre_tokenizer");
  if (type_of(pre_tokenizer) == "Sequence" && !part(pre_tokenizer, "pretokenizers").is_array())
    return "a sequence without steps";
  bool byte_level = false;
  for (const json& step : steps_of(pre_tokenizer)) {
    const std::string type = type_of(step);
    if (type == "ByteLevel") byte_level = true;
    else if (type != "Split" || !part(part(step, "pattern"), "Regex").is_string())
      return "the pre-tokenizer " + excerpt(type);
  }
  if (!byte_level) return "a pre-tokenizer without ByteLevel";
  if (!part(object, "normalizer").is_null()) return "it has normalizer";
  return "";
}

Bpe::Bpe(const json& object, const std::string& path) {
  const json model = part(object, "model");
  read_vocab(part(model, "vocab"), path);
  const json added = part(object, "added_tokens");
  for (const json& token : added.is_array() ? added : json::array()) {
    const int32_t id = token.at("id").get<int32_t>();
    if (id < 0 || id > (1 << 24)) fail(Exit::bad_data, path, ": an added token has the id ", id);
    texts_.resize(std::max(texts_.size(), static_cast<size_t>(id) + 1));
    texts_[static_cast<size_t>(id)] = token.at("content").get<std::string>();
    ids_[texts_[static_cast<size_t>(id)]] = id;
    added_.push_back({texts_[static_cast<size_t>(id)], id});
  }
  read_merges(part(model, "merges"), path);
  ignore_merges_ = model.value("ignore_merges", false);
  for (const json& step : steps_of(part(object, "pre_tokenizer"))) {
    if (type_of(step) == "Split") splits_.emplace_back(step["pattern"]["Regex"].get<std::string>(), path);
    else if (step.value("use_regex", true)) splits_.emplace_back(gpt2_split, path);
  }
}

void Bpe::read_vocab(const json& vocab, const std::string& path) {
  if (!vocab.is_object()) fail(Exit::bad_data, path, ": the vocab of the model is not an object");
  texts_.resize(vocab.size());
  for (const auto& [token, value] : vocab.items()) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > (1 << 24))
      fail(Exit::bad_data, path, ": the id of \"", excerpt(token), "\" is ", excerpt(value.dump()));
    const auto id = value.get<size_t>();
    texts_.resize(std::max(texts_.size(), id + 1));
    if (!texts_[id].empty()) fail(Exit::bad_data, path, ": two tokens have the same id, ", id);
    if (!bytes_of(token, texts_[id]))
      fail(Exit::bad_data, path, ": the token \"", excerpt(token), "\" is not written in GPT-2's names of bytes");
    ids_[token] = static_cast<int32_t>(id);
  }
  for (const std::string& name : byte_names()) {
    if (!ids_.contains(name)) fail(Exit::bad_data, path, ": there is no token for the byte ", name);
    bytes_.push_back(ids_[name]);
  }
}

void Bpe::read_merges(const json& merges, const std::string& path) {
  if (!merges.is_array()) fail(Exit::bad_data, path, ": the merges of the model are not a list");
  int32_t rank = 0;
  for (const json& merge : merges) {
    std::string left, right;
    if (merge.is_string()) {
      const std::string& both = merge.get_ref<const std::string&>();
      const size_t space = both.find(' ');
      left = both.substr(0, space), right = space == std::string::npos ? "" : both.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0], right = merge[1];
    }
    if (!ids_.contains(left) || !ids_.contains(right) || !ids_.contains(left + right))
      fail(Exit::bad_data, path, ": merge ", rank, " is ", excerpt(merge.dump()), ", which are no tokens");
    merges_[static_cast<uint64_t>(ids_[left]) << 32 | static_cast<uint32_t>(ids_[right])] = {rank++,
                                                                                             ids_[left + right]};
  }
}

int32_t Bpe::id_of(const std::string& token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

void Bpe::encode_piece(std::string_view piece, std::vector<int32_t>& ids) const {
  std::vector<int32_t> symbols;
  for (const char c : piece) symbols.push_back(bytes_[static_cast<unsigned char>(c)]);
  for (;;) {
    Merge best{std::numeric_limits<int32_t>::max(), 0};
    size_t at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = merges_.find(static_cast<uint64_t>(symbols[i]) << 32 | static_cast<uint32_t>(symbols[i + 1]));
      if (found != merges_.end() && found->second.rank < best.rank) best = found->second, at = i;
    }
    if (best.rank == std::numeric_limits<int32_t>::max()) break;
    symbols[at] = best.id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

// Between added tokens.
void Bpe::encode_plain(std::string_view text, std::vector<int32_t>& ids) const {
  std::vector<std::string_view> pieces = {text};
  for (const Regex& split : splits_) {
    std::vector<std::string_view> finer;
    for (const std::string_view piece : pieces) {
      size_t at = 0;
      while (at < piece.size()) {
        const Regex::Match match = split.find(piece, at);
        if (match.begin == std::string_view::npos || match.end == match.begin) break;
        if (match.begin > at) finer.push_back(piece.substr(at, match.begin - at));
        finer.push_back(piece.substr(match.begin, match.end - match.begin));
        at = match.end;
      }
      if (at < piece.size()) finer.push_back(piece.substr(at));
    }
    pieces = std::move(finer);
  }
  for (const std::string_view piece : pieces) encode_piece(piece, ids);
}

std::vector<int32_t> Bpe::encode(std::string_view text) const {
  for (size_t at = 0; at < text.size();) {
    const size_t length = first_character(text.substr(at)).length;
    if (length == 0) fail(Exit::bad_data, "the text is not UTF-8: wrong at byte ", at, " of ", text.size());
    at += length;
  }
  std::vector<int32_t> ids;
  while (!text.empty()) {
    size_t first = text.size();
    const Added* next = nullptr;
    for (const Added& token : added_)
      if (const size_t at = text.find(token.text); at < first) first = at, next = &token;
    encode_plain(text.substr(0, first), ids);
    if (next == nullptr) break;
    ids.push_back(next->id);
    text.remove_prefix(first + next->text.size());
  }
  return ids;
}

}  // namespace crossply
