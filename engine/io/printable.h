// Text from outside, made safe for a terminal and for a message: a word of a tokenizer may hold escape codes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace crossply {

// The character that a text, which is not empty, begins with. Its length in bytes is 0 where that is no UTF-8.
struct Character {
  size_t length = 0;
  uint32_t code = 0;
};
Character first_character(std::string_view text);
// The byte where a text stops being UTF-8; its size if it is.
size_t valid_utf8(std::string_view text);

class Printable {
 public:
  // The text with every control character but line break and tab, and every byte that is not UTF-8, as \xNN. An
  // incomplete character at the end waits for the next call: a model of bytes writes it in pieces.
  std::string add(std::string_view text);
  // What still waits.
  std::string finish();

 private:
  std::string waiting_;
};

// The whole of a text like that.
std::string printable(std::string_view text);

// The beginning of a text, in one line: for what a message quotes of a file, which may be as long as it likes.
std::string excerpt(std::string_view text);

}  // namespace crossply
