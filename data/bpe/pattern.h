// The regular expressions of a tokenizer.json are Oniguruma's, in its Ruby syntax. They are read here, and what differs
// from PCRE2's is said in PCRE2's words: \h is a hexadecimal digit, `{1,3}+` repeats, `$` ends every line, \s is
// Unicode's White_Space. What is not understood is refused by name, never passed on.
#pragma once

#include <string>
#include <vector>

#include "data/bpe/character_set.h"

namespace crossply {

// A regular expression whose characters are sets: text, then one of `set`, then text, ...
struct Pattern {
  struct Part {
    std::string text;  // operators only, the same in both languages
    int set = -1;      // stands after `text`; -1: nothing does
  };
  std::vector<Part> parts;
  std::vector<Ranges> sets;
  bool looks_behind = false;  // does a match depend on what stands before it?
};

// Throws Exit::bad_data with `where` and the reason.
Pattern read_pattern(const std::string& source, const std::string& where);

}  // namespace crossply
