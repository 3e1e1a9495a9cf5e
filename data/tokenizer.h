// Tokenizer: text <-> token ids, in one of three kinds.
//
//   none    no vocabulary is known: the text is whitespace-separated integers
//   words   words separated by whitespace; the id of a word is its place in the list
//   bytes   256 tokens, id = byte value
//
// words and bytes are saved as Hugging Face's tokenizer.json, so a model directory knows its vocabulary.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace crossply {

class Tokenizer {
 public:
  Tokenizer() = default;  // none
  // Words are distinct, not empty and without whitespace.
  static Tokenizer words(std::vector<std::string> list);
  static Tokenizer bytes();

  // 0 where no vocabulary is known.
  int64_t vocab_size() const;
  std::vector<int32_t> encode(std::string_view text) const;
  // Words and integers are joined by single spaces. An id beyond the vocabulary, which a model with a larger one may
  // write, becomes "<id>".
  std::string decode(const std::vector<int32_t>& ids) const;
  // What stands between two tokens of a text: a space, or nothing between bytes.
  const char* separator() const { return kind_ == Kind::bytes ? "" : " "; }
  // The id of the word <eos>; -1 where there is none.
  int32_t eos() const;

  // DIR/tokenizer.json. Saving `none` writes nothing; loading where there is no such file gives `none`.
  void save(const std::string& dir) const;
  static Tokenizer load(const std::string& dir);

 private:
  enum class Kind { none, words, bytes };
  Kind kind_ = Kind::none;
  std::vector<std::string> words_;
  std::unordered_map<std::string, int32_t> ids_;
};

}  // namespace crossply
