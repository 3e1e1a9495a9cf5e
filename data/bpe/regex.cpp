#include "data/bpe/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "data/bpe/pattern.h"
#include "engine/check.h"
#include "engine/io/printable.h"

namespace crossply {

struct Regex::Code {
  Code(pcre2_code* compiled, bool just_in_time) : code(compiled), jit(just_in_time) {}
  ~Code() { pcre2_code_free(code); }
  pcre2_code* code;
  bool jit;
};

namespace {

constexpr uint32_t first_class = 0x80;  // those below are ASCII itself
// Characters: from here on a text is searched in stretches, between which a stop request counts.
constexpr size_t long_text = 1 << 14;
std::atomic<bool (*)()> search_stop = nullptr;

// How many places are tried at once: an expression may look at all of the rest from each of them.
size_t stretch_of(size_t rest) { return std::clamp<size_t>((size_t{1} << 28) / (rest + 1), 16, 4096); }

std::string message_of(int error) {
  unsigned char text[256] = "";
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

// What a thread needs to match: making it is dearer than most matches.
struct Workspace {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(64 << 10, 256 << 20, nullptr);  // a long text repeats a group often
  Workspace() {
    if (data == nullptr || context == nullptr) throw std::bad_alloc();
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
    pcre2_set_heap_limit(context, 1 << 20);  // in KiB; only without the just-in-time compiler
  }
  ~Workspace() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

// The class of each character, and the bytes of each set.
struct Classes {
  std::vector<uint8_t> of;
  std::vector<std::string> sets;  // as what stands between brackets
};

void add_byte(std::string& set, uint32_t byte) {
  char text[8];
  std::snprintf(text, sizeof text, "\\x%02x", byte);
  set += text;
}

// Characters beyond ASCII that are in the same sets have the same class.
Classes classes_of(const std::vector<Ranges>& sets, const std::string& where) {
  Classes classes{std::vector<uint8_t>(last_character + 1), std::vector<std::string>(sets.size())};
  std::vector<uint32_t> cuts = {first_class, last_character + 1};
  for (const Ranges& set : sets)
    for (const auto [first, last] : set) cuts.push_back(first), cuts.push_back(last + 1);
  for (uint32_t c = 0; c < first_class; ++c) cuts.push_back(c);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::map<std::vector<bool>, uint32_t> numbers;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    std::vector<bool> in(sets.size());
    for (size_t s = 0; s < sets.size(); ++s) in[s] = contains(sets[s], cuts[i]);
    uint32_t number = cuts[i];
    bool is_new = true;
    if (number >= first_class) {
      const auto [place, added] = numbers.emplace(in, first_class + static_cast<uint32_t>(numbers.size()));
      number = place->second, is_new = added;
    }
    if (number > 0xFF) fail(Exit::bad_data, where, ": a regular expression with more than 128 classes of characters");
    for (size_t s = 0; is_new && s < sets.size(); ++s)
      if (in[s]) add_byte(classes.sets[s], number);
    std::memset(classes.of.data() + cuts[i], static_cast<int>(number), cuts[i + 1] - cuts[i]);
  }
  return classes;
}

std::string in_bytes(const Pattern& pattern, const std::vector<std::string>& sets) {
  std::string text;
  for (const auto& [operators, set] : pattern.parts) {
    text += operators;
    if (set < 0) continue;
    const std::string& bytes = sets[static_cast<size_t>(set)];
    text += bytes.empty() ? "(?!)" : bytes.size() == 4 ? bytes : "[" + bytes + "]";
  }
  return text;
}

}  // namespace

Regex::Regex(const std::string& pattern, const std::string& where) {
  const Pattern read = read_pattern(pattern, where);
  Classes classes = classes_of(read.sets, where);
  const std::string bytes = in_bytes(read, classes.sets);
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(bytes.data()), bytes.size(),
                                   PCRE2_NEVER_UTF | PCRE2_USE_OFFSET_LIMIT, &error, &at, nullptr);
  if (code == nullptr)
    fail(Exit::bad_data, where, ": the regular expression \"", excerpt(pattern), "\": ", message_of(error));
  // Where there is no just-in-time compiler, it is interpreted, slower.
  const bool jit = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD) == 0;
  code_ = std::make_shared<const Code>(code, jit);
  class_of_ = std::move(classes.of);
  uint32_t matches_empty = 1;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  goes_forward_ = !read.looks_behind && matches_empty == 0;
}

void Regex::classify(std::string_view text, std::string& classes) const {
  classes.resize(text.size());
  char* out = classes.data();
  const char* in = text.data();
  const char* const end = in + text.size();
  while (in < end) {
    const auto first = static_cast<uint8_t>(*in);
    if (first < 0x80) {
      *out++ = *in++;
      continue;
    }
    const auto bits = [&](int i) { return static_cast<uint32_t>(in[i]) & 0x3F; };
    uint32_t code;
    if (first < 0xE0) code = (first & 0x1Fu) << 6 | bits(1), in += 2;
    else if (first < 0xF0) code = (first & 0x0Fu) << 12 | bits(1) << 6 | bits(2), in += 3;
    else code = (first & 0x07u) << 18 | bits(1) << 12 | bits(2) << 6 | bits(3), in += 4;
    *out++ = static_cast<char>(class_of_[code]);
  }
  classes.resize(static_cast<size_t>(out - classes.data()));
}

int Regex::search(std::string_view classes, size_t at, size_t last, uint32_t options, size_t* span) const {
  thread_local const Workspace workspace;
  // Enough for any sensible expression, and an end to one that tries all ways to split a text.
  pcre2_set_match_limit(workspace.context,
                        static_cast<uint32_t>(1'000'000 + 16 * std::min<size_t>(classes.size(), 1 << 27)));
  pcre2_set_offset_limit(workspace.context, last);
  const auto subject = reinterpret_cast<PCRE2_SPTR>(classes.data());
  int count = PCRE2_ERROR_JIT_STACKLIMIT;
  if (code_->jit)
    count = pcre2_jit_match(code_->code, subject, classes.size(), at, options, workspace.data, workspace.context);
  if (count == PCRE2_ERROR_JIT_STACKLIMIT)
    count = pcre2_match(code_->code, subject, classes.size(), at, options | PCRE2_NO_JIT, workspace.data,
                        workspace.context);
  std::copy_n(pcre2_get_ovector_pointer(workspace.data), 2, span);
  return count;
}

Regex::Match Regex::find(std::string_view classes, size_t at, bool more) const {
  const bool is_long = classes.size() >= long_text;
  for (;;) {
    if (const auto requested = search_stop.load(std::memory_order_relaxed); is_long && requested && requested())
      fail(Exit::stopped, "stopped while the tokenizer's regular expression searched a text of ", classes.size(),
           " characters");
    const size_t rest = classes.size() - at, stretch = is_long ? stretch_of(rest) : rest;
    size_t span[2];
    const int count = search(classes, at, at + std::min(rest, stretch), more ? PCRE2_PARTIAL_HARD : 0, span);
    if (count >= 0) return {span[0], span[1]};
    if (count != PCRE2_ERROR_NOMATCH && count != PCRE2_ERROR_PARTIAL)
      fail(Exit::bad_data, "a text that the tokenizer's regular expression cannot split: ", message_of(count));
    if (count == PCRE2_ERROR_PARTIAL || stretch >= rest) return {};
    at += stretch + 1;
  }
}

void set_search_stop(bool (*requested)()) { search_stop = requested; }

}  // namespace crossply
