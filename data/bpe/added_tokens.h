// The added tokens of a tokenizer.json: they are found in the text before anything else is done with it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace crossply {

struct AddedToken {
  std::string text;
  int32_t id = 0;
  bool single_word = false, lstrip = false, rstrip = false, special = false;
};

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);
  const std::vector<AddedToken>& tokens() const { return tokens_; }  // sorted by text
  // Bytes of the longest.
  size_t longest() const { return longest_; }
  // Does each take its own text, wherever that stands, and nothing around it?
  bool are_plain() const { return plain_; }

  // Calls plain(begin, end) and token(id) for the parts of a text, in order: of those that begin first, the longest
  // token counts.
  template <class Plain, class Token>
  void split(std::string_view text, Plain&& plain, Token&& token) const {
    size_t done = 0;
    for (size_t at = 0;;) {
      const auto [found, begin] = find(text, at);
      if (found == nullptr) break;
      at = begin + found->text.size();
      size_t from = begin, to = at;
      if (!stretch(*found, text, done, from, to) || from >= to) continue;
      if (done < from) plain(done, from);
      token(found->id);
      done = to;
    }
    if (done < text.size()) plain(done, text.size());
  }

 private:
  struct Found {
    const AddedToken* token;
    size_t begin;
  };
  Found find(std::string_view text, size_t at) const;
  static bool stretch(const AddedToken& token, std::string_view text, size_t done, size_t& from, size_t& to);

  std::vector<AddedToken> tokens_;
  std::array<std::pair<uint32_t, uint32_t>, 256> by_byte_{};  // the tokens that begin with a byte
  size_t longest_ = 0;
  bool plain_ = true;
};

}  // namespace crossply
