// Regular expressions of Unicode text, by PCRE2.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace crossply {

// Safe to use from several threads at once.
class Regex {
 public:
  // Throws Exit::bad_data with the reason and `where` for a pattern that is none.
  Regex(const std::string& pattern, const std::string& where);
  // The first match at or after `at` of a text in UTF-8, as [begin, end); begin = npos: there is none. `text` must be
  // valid: it is not looked at again.
  struct Match {
    size_t begin = std::string_view::npos, end = 0;
  };
  Match find(std::string_view text, size_t at) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace crossply
