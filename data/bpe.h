// Byte-level byte-pair encoding, as GPT-2 and Llama 3 have it, from Hugging Face's tokenizer.json. The text is cut at
// its added tokens; what is between them into pieces by regular expressions; of each piece's bytes the pair of
// neighbours whose merge stands first in the list is merged, again and again.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/regex.h"

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
  // Throws Exit::bad_data where `text` is no UTF-8, with the place.
  std::vector<int32_t> encode(std::string_view text) const;
  // The bytes of a token; "" for an id that no token has.
  const std::string& text_of(int32_t id) const { return texts_[static_cast<size_t>(id)]; }
  // Of a token as the file writes it; -1 where there is none.
  int32_t id_of(const std::string& token) const;

 private:
  struct Added {
    std::string text;
    int32_t id;
  };
  void read_vocab(const nlohmann::json& vocab, const std::string& path);
  void read_merges(const nlohmann::json& merges, const std::string& path);
  void encode_piece(std::string_view piece, std::vector<int32_t>& ids) const;
  void encode_plain(std::string_view text, std::vector<int32_t>& ids) const;

  std::unordered_map<std::string, int32_t> ids_;  // by the file's writing
  std::vector<std::string> texts_;                // by id, as bytes
  std::vector<int32_t> bytes_;                    // (256) the id of each byte
  struct Merge {
    int32_t rank, id;
  };
  std::unordered_map<uint64_t, Merge> merges_;  // by both ids, left first
  std::vector<Regex> splits_;                   // one after the other
  std::vector<Added> added_;
  bool ignore_merges_ = false;
};

}  // namespace crossply
