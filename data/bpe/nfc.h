// Unicode's normalization form C, as the `tokenizers` package has it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace crossply {

// Of a text in UTF-8, which must be valid.
std::string nfc(std::string_view text);

// Of each character that has one, in order: how far its code is from the one before, twice the length plus whether it
// is composed again, the decomposition.
std::span<const uint32_t> canonical_decompositions();
// Runs of characters with one combining class, which is not 0: how many characters lie between it and the run before,
// its length, the class.
std::span<const uint32_t> combining_classes();

}  // namespace crossply
