// Regular expressions of Unicode text, as tokenizers have them, by PCRE2.
//
// Each character of a text stands for the sets of the expression that it is in, and nothing else of it matters. So a
// text is first written with one byte for each character: ASCII as itself, any other as the number of those sets. Of
// such bytes PCRE2 needs no Unicode: matching is fast, and the same with whatever version of Unicode it was built.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace crossply {

// What a search in a long text asks again and again; where it says true, the search ends with Exit::stopped.
void set_search_stop(bool (*requested)());

// Safe to use from several threads at once.
class Regex {
 public:
  // Throws Exit::bad_data with the reason and `where` for a pattern that is none, or that is not understood here.
  Regex() = default;  // matches nothing
  Regex(const std::string& pattern, const std::string& where);

  // A text in UTF-8, which must be valid, with one byte for each character.
  void classify(std::string_view text, std::string& classes) const;
  // The first match at or after `at`, as [begin, end) of the characters; begin = npos: there is none. more: `classes`
  // is the begin of a longer text; a match that could be another with the rest of it is none. A text that takes too
  // many steps is Exit::bad_data; a stop request while it is searched is Exit::stopped.
  struct Match {
    size_t begin = std::string_view::npos, end = 0;
  };
  Match find(std::string_view classes, size_t at, bool more = false) const;
  // Does a match depend on nothing that stands before it, and is none empty?
  bool goes_forward() const { return goes_forward_; }

 private:
  struct Code;
  // PCRE2's answer for a match that begins at `at` to `last`, and where it stands.
  int search(std::string_view classes, size_t at, size_t last, uint32_t options, size_t* span) const;
  std::shared_ptr<const Code> code_;
  std::vector<uint8_t> class_of_;  // by character
  bool goes_forward_ = false;
};

}  // namespace crossply
