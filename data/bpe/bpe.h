// Byte-pair encoding from Hugging Face's tokenizer.json: byte-level, as GPT-2, GPT-4o, Llama 3, Qwen and DeepSeek have
// it, or of characters with a token for each byte of one that is missing, as Llama 2. The text is cut at its added
// tokens; what is between them into pieces (splitter.h); the symbols of each piece are merged (merges.h).
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/bpe/added_tokens.h"
#include "data/bpe/merges.h"
#include "data/bpe/splitter.h"

namespace crossply {

// GPT-2's name for every byte: itself where it prints, otherwise the next free character from 256 on.
std::vector<std::string> byte_names();

class Bpe {
 public:
  // What a tokenizer.json asks for that is not computed here, in words; "" if all of it is.
  static std::string foreign_part(const nlohmann::json& object);
  // Throws Exit::bad_data, with the path, where the file contradicts itself.
  Bpe(const nlohmann::json& object, const std::string& path);

  int64_t vocab_size() const { return static_cast<int64_t>(texts_.size()); }
  // A long text in parallel. Throws Exit::bad_data where `text` is no UTF-8, with the place.
  std::vector<int32_t> encode(std::string_view text) const;
  // Adds the ids of as much of a text's begin as what follows it cannot change, and returns the bytes of that: 0 where
  // more text is needed. `text` is valid UTF-8 that begins where the call before ended.
  size_t encode_begin(std::string_view text, std::vector<int32_t>& ids) const;
  // The bytes of a token; none of an id that the file leaves out.
  const std::string& text_of(int32_t id) const { return texts_[static_cast<size_t>(id)]; }
  // Of a token as the file writes it; -1 where there is none.
  int32_t id_of(const std::string& token) const;
  // Does encoding put a space before a text, which decoding takes away?
  bool begins_with_space() const { return begins_with_space_; }
  bool is_special(int32_t id) const;
  // The same tokenizer, for which the text of a special token, and of this one, is text like any other.
  Bpe with_special_text(int32_t end_of_text) const;
  // Of all that decides the ids of a text, however the file writes it.
  uint64_t fingerprint() const { return fingerprint_; }
  // What a text begins and ends with, by the file's post-processor.
  const std::vector<int32_t>& prefix() const { return prefix_; }
  const std::vector<int32_t>& suffix() const { return suffix_; }

 private:
  struct Part {  // of a text
    size_t begin, end;
    int32_t token;  // an added one; -1: plain text
  };
  struct Normalization {  // one step
    enum class Kind { nfc, prepend, replace } kind;
    std::string from, to;
  };
  struct StringHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  using IdByText = std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>>;

  void read_normalizer(const nlohmann::json& normalizer);
  void read_vocab(const nlohmann::json& vocab, const std::string& path);
  void read_byte_tokens(const std::string& path);
  void read_merges(const nlohmann::json& merges, const std::string& path);
  void read_added(const nlohmann::json& added, const std::string& path);
  void read_decoder(const nlohmann::json& decoder, const nlohmann::json& added);
  void read_post_processor(const nlohmann::json& processor, const std::string& path);

  std::string normal_form() const;

  std::string normalized(std::string_view text) const;
  std::vector<Part> parts_of(std::string_view text) const;
  void encode_plain(std::string_view text, bool first, int chunks, std::vector<int32_t>& ids) const;
  size_t encode_scanned(std::string_view text, bool first, bool more, int chunks, std::vector<int32_t>& ids) const;
  void encode_split(std::string_view text, bool first, int chunks, std::vector<int32_t>& ids) const;
  void encode_piece(std::string_view piece, std::vector<int32_t>& ids) const;
  void merge_piece(std::string_view piece, std::vector<int32_t>& ids) const;
  struct Chunk;

  IdByText ids_;                    // by the file's writing
  IdByText whole_;                  // ignore_merges: pieces that are tokens
  std::vector<std::string> texts_;  // by id, as bytes
  std::vector<bool> special_ids_;   // by id
  bool byte_level_ = true, ignore_merges_ = false, begins_with_space_ = false;
  std::array<int32_t, 256> bytes_{};                  // the id of each byte
  std::unordered_map<uint32_t, int32_t> characters_;  // not byte-level: the ids of those that are tokens
  Merges merges_;
  std::vector<Normalization> normalizations_;
  AddedTokens added_, normalized_added_;  // found before and after normalization
  Splitter splitter_;
  std::vector<int32_t> prefix_, suffix_;
  uint64_t fingerprint_ = 0;
  uint64_t serial_ = 0;  // of this vocabulary, for the caches of the threads
};

}  // namespace crossply
