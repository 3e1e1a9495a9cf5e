// Tokenizer: text <-> token ids, in one of five kinds.
//
//   none     no vocabulary is known: the text is whitespace-separated integers
//   words    words separated by whitespace; the id of a word is its place in the list
//   bytes    256 tokens, id = byte value
//   bpe      byte-level byte-pair encoding (data/bpe/bpe.h)
//   foreign  the directory has a tokenizer that is not computed here: integers, as with none
//
// All but none and foreign are saved as Hugging Face's tokenizer.json, so a model directory knows its vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace crossply {

class Bpe;

class Tokenizer {
 public:
  Tokenizer() = default;  // none
  // Words are distinct, not empty and without whitespace.
  static Tokenizer words(std::vector<std::string> list);
  static Tokenizer bytes();

  // 0 where no vocabulary is known.
  int64_t vocab_size() const;
  bool is_none() const { return kind_ == Kind::none; }
  bool is_bytes() const { return kind_ == Kind::bytes; }
  bool is_bpe() const { return kind_ == Kind::bpe; }
  bool is_foreign() const { return kind_ == Kind::foreign; }
  // Does it know what its ids stand for?
  bool knows_texts() const { return !is_none() && !is_foreign(); }
  // 64 bits of all that decides what the ids mean; 0 where that is not known.
  uint64_t fingerprint() const;
  // Do both know what their ids mean, and the same?
  bool operator==(const Tokenizer& other) const;
  // What it is, for a message: "2 words (yes no ...)". It ends with the fingerprint's first digits where
  // it would be the same for two that differ.
  std::string describe() const;
  // Throws Exit::usage for words and integers that are none, bad_data where bpe's text is no UTF-8.
  std::vector<int32_t> encode(std::string_view text) const;
  // For a text in pieces, of a bpe valid UTF-8: adds the ids of as much of it as what follows cannot change, and
  // returns the bytes of that. 0: more of it is needed, or the whole, for encode().
  size_t encode_begin(std::string_view text, std::vector<int32_t>& ids) const;
  // What a prompt begins with: the beginning-of-text token, where the file says that texts have one.
  const std::vector<int32_t>& prefix() const { return prefix_; }
  // Words and integers are joined by single spaces. An id that stands for nothing, such as one beyond the vocabulary
  // that a model with a larger one may write, has no text, as in Hugging Face.
  // whole: the ids are a whole text, not what follows another one. Of a bpe that puts a space before each text it goes.
  std::string decode(const std::vector<int32_t>& ids, bool whole = false) const;
  // What a table or a figure calls an id: its text, or "<id>" where it has none.
  std::string name_of(int32_t id) const;
  // What stands between two tokens of a text: a space, or nothing between bytes.
  const char* separator() const { return kind_ == Kind::bytes || kind_ == Kind::bpe ? "" : " "; }
  // The token that ends a text: the word <eos>, or of a bpe, the end-of-text token; -1 where there is none.
  int32_t eos() const { return eos_; }
  // Is it no text of its own: the token that ends a text, or one that the file calls special?
  bool is_special(int32_t id) const;
  // Of a bpe: the same, but the texts of special tokens are text like any other. Others have no such texts.
  Tokenizer with_special_text() const;

  // DIR/tokenizer.json. Saving `none` or `foreign` writes nothing; loading where there is no tokenizer gives `none`. A
  // file that is no tokenizer, or a list of words with a hole, is Exit::bad_data. The truncation and padding of
  // somebody's last call, which transformers leaves in the file, count for nothing, with a note; they are not saved.
  void save(const std::string& dir) const;
  static Tokenizer load(const std::string& dir);
  // For --tokenizer: a tokenizer.json, or a directory that has one. Missing is Exit::no_input; what is asked for in it
  // and not computed here is Exit::bad_data, by name.
  static Tokenizer read(const std::string& path);

 private:
  enum class Kind { none, words, bytes, bpe, foreign };
  static Tokenizer parse(const std::string& path);
  static Tokenizer foreign(const std::string& what);
  Kind kind_ = Kind::none;
  std::vector<std::string> words_;
  std::unordered_map<std::string, int32_t> ids_;
  std::string what_;  // foreign: what it is
  std::shared_ptr<const Bpe> bpe_;
  std::string file_;  // bpe: the tokenizer.json as it was read
  std::vector<int32_t> prefix_;
  int32_t eos_ = -1;  // words, bpe
};

// The ids of a model mean what its tokenizer says. Exit::usage, with both described, where the data was encoded by
// another one. `name` and `spec`: the model and the data, as the user wrote them.
void require_same_tokenizer(const Tokenizer& model, const std::string& name, const Tokenizer& data,
                            const std::string& spec);

}  // namespace crossply
