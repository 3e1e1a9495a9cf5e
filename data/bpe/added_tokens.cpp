#include "data/bpe/added_tokens.h"

#include <algorithm>

#include "data/bpe/character_set.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

bool is_word(uint32_t c) { return contains(word_characters(), c) || c == 0x200C || c == 0x200D; }

// The character that ends before `end`, which is not 0.
Character last_character_of(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (text[begin] & 0xC0) == 0x80) --begin;
  return first_character(text.substr(begin, end - begin));
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) { return a.text < b.text; });
  for (uint32_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    auto& [first, last] = by_byte_[static_cast<uint8_t>(token.text[0])];
    if (first == last) first = i;
    last = i + 1;
    longest_ = std::max(longest_, token.text.size());
    plain_ = plain_ && !token.single_word && !token.lstrip && !token.rstrip;
  }
}

// The leftmost token at or after `at`, and of those that begin there the longest.
AddedTokens::Found AddedTokens::find(std::string_view text, size_t at) const {
  for (; at < text.size(); ++at) {
    auto [first, last] = by_byte_[static_cast<uint8_t>(text[at])];
    const AddedToken* longest = nullptr;
    for (size_t length = 1; first < last;) {  // first .. last - 1 agree with the text in their first `length` bytes
      if (tokens_[first].text.size() == length) {
        longest = &tokens_[first];
        if (++first == last) break;
      }
      if (at + length >= text.size()) break;
      const char next = text[at + length];
      const auto below = [&](const AddedToken& token, char c) {
        return static_cast<uint8_t>(token.text[length]) < static_cast<uint8_t>(c);
      };
      const auto above = [&](char c, const AddedToken& token) {
        return static_cast<uint8_t>(c) < static_cast<uint8_t>(token.text[length]);
      };
      const auto begin = tokens_.begin() + first, end = tokens_.begin() + last;
      first = static_cast<uint32_t>(std::lower_bound(begin, end, next, below) - tokens_.begin());
      last = static_cast<uint32_t>(std::upper_bound(begin, end, next, above) - tokens_.begin());
      ++length;
    }
    if (longest != nullptr) return {longest, at};
  }
  return {nullptr, 0};
}

// Takes in what stands around a token and belongs to it, if that is not `done`; false where the token does not count.
bool AddedTokens::stretch(const AddedToken& token, std::string_view text, size_t done, size_t& from, size_t& to) {
  if (token.single_word) {
    if (from > 0 && is_word(last_character_of(text, from).code)) return false;
    if (to < text.size() && is_word(first_character(text.substr(to)).code)) return false;
  }
  if (token.lstrip) from = std::max(from, done);  // an earlier token took this space
  while (token.lstrip && from > done) {
    const Character c = last_character_of(text, from);
    if (!contains(white_space(), c.code)) break;
    from -= c.length;
  }
  while (token.rstrip && to < text.size()) {
    const Character c = first_character(text.substr(to));
    if (!contains(white_space(), c.code)) break;
    to += c.length;
  }
  return true;
}

}  // namespace crossply
