// Sets of characters: what a class of a regular expression is.
#pragma once

#include <string>
#include <string_view>

#include "data/bpe/unicode.h"

namespace crossply {

// Ranges in any order, which may overlap, put in order.
Ranges in_order(Ranges ranges);
Ranges both_of(Ranges a, const Ranges& b);
Ranges all_but(const Ranges& ranges);
bool contains(const Ranges& ranges, uint32_t character);

// Unicode's White_Space.
const Ranges& white_space();
// Letters, marks, decimal digits, letter numbers, connecting punctuation, and the circled letters.
const Ranges& word_characters();

void append_utf8(std::string& text, uint32_t character);

}  // namespace crossply
