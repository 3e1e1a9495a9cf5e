#include "data/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "engine/check.h"
#include "engine/printable.h"

namespace crossply {

struct Regex::Code {
  explicit Code(pcre2_code* compiled) : code(compiled) {}
  ~Code() { pcre2_code_free(code); }
  pcre2_code* code;
};

namespace {

std::string message_of(int error) {
  unsigned char text[256] = "";
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

// One for each thread: making one is dearer than most matches.
pcre2_match_data* match_data() {
  struct Free {
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  };
  thread_local const std::unique_ptr<pcre2_match_data, Free> data(pcre2_match_data_create(1, nullptr));
  if (data == nullptr) throw std::bad_alloc();
  return data.get();
}

}  // namespace

Regex::Regex(const std::string& pattern, const std::string& where) {
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr);
  if (code == nullptr)
    fail(Exit::bad_data, where, ": the regular expression \"", excerpt(pattern), "\" is wrong at its byte ", at, ": ",
         message_of(error));
  code_ = std::make_shared<const Code>(code);
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where there is no just-in-time compiler: slower
}

Regex::Match Regex::find(std::string_view text, size_t at) const {
  pcre2_match_data* data = match_data();
  const int count = pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                PCRE2_NO_UTF_CHECK, data, nullptr);
  if (count == PCRE2_ERROR_NOMATCH) return {};
  if (count < 0)
    fail(Exit::bad_data, "a text that the tokenizer's regular expression cannot split: ", message_of(count));
  const PCRE2_SIZE* span = pcre2_get_ovector_pointer(data);
  return {span[0], span[1]};
}

}  // namespace crossply
