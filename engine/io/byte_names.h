// File names, which may be any bytes, as UTF-8 that gives every byte back: JSON takes nothing else.
#pragma once

#include <string>

namespace crossply {

// UTF-8 stays as it is. A byte that is none becomes the character U+EF00 + byte, of Unicode's private use; so does each
// byte of such a character.
std::string name_as_utf8(const std::string& bytes);
// The bytes again.
std::string name_from_utf8(const std::string& text);

}  // namespace crossply
