// Unicode's normalization form C, as the `tokenizers` package has it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace crossply {

// Of a text in UTF-8, which must be valid.
std::string nfc(std::string_view text);

// Of each character that has one: its code, twice the length plus whether it is composed again, the decomposition.
std::span<const uint32_t> canonical_decompositions();
// Pairs of a character and its combining class, where that is not 0.
std::span<const uint32_t> combining_classes();

}  // namespace crossply
