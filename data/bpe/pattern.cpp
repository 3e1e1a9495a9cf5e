#include "data/bpe/pattern.h"

#include <algorithm>
#include <optional>

#include "engine/check.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"

namespace crossply {
namespace {

bool is_digit(uint32_t c) { return c >= '0' && c <= '9'; }
bool is_letter(uint32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// An ASCII letter in both cases, with the two characters beyond ASCII that fold to one.
Ranges any_case(CharacterRange range) {
  Ranges all = {range};
  for (uint32_t c = range.first; c <= range.last; ++c) {
    if (!is_letter(c)) continue;
    all.push_back({c ^ 0x20, c ^ 0x20});
    if ((c | 0x20) == 's') all.push_back({0x17F, 0x17F});
    if ((c | 0x20) == 'k') all.push_back({0x212A, 0x212A});
  }
  return in_order(std::move(all));
}

class Reader {
 public:
  Reader(const std::string& source, const std::string& where) : source_(source), where_(where) {}
  Pattern read();

 private:
  struct Group {
    bool any_case;  // before it
    size_t begin;   // of its text: the part that it begins in
    bool quantifiable;
  };
  struct Counts {
    size_t least, length;
    std::string text;  // "{1,3}"
    bool exact;
  };
  [[noreturn]] void refuse(const std::string& what) const {
    fail(Exit::bad_data, where_, ": the regular expression \"", excerpt(source_), "\" is not understood at its byte ",
         at_, ": ", what);
  }
  bool done() const { return at_ >= source_.size(); }
  bool next_is(std::string_view text) const { return std::string_view(source_).substr(at_).starts_with(text); }
  bool take(std::string_view text) {
    if (!next_is(text)) return false;
    at_ += text.size();
    return true;
  }
  uint32_t character();
  uint32_t hexadecimal();
  std::optional<Ranges> class_escape(bool in_class);
  uint32_t character_escape();
  Ranges property(bool negated);
  Ranges posix();
  Ranges read_class(int depth);
  void class_item(Ranges& all, int depth);
  void literal(uint32_t c);
  void atom(Ranges set);
  void open_group();
  void close_group();
  void element();
  void quantifier();
  std::optional<Counts> counts();
  void add_text(const std::string& text) { pattern_.parts.push_back({text}); }

  const std::string& source_;
  const std::string& where_;
  size_t at_ = 0;
  Pattern pattern_;
  std::vector<Group> groups_;
  bool any_case_ = false;
  uint32_t letter_before_ = 0;  // of a literal in any case: with it, two letters may be one ligature
  size_t atom_ = 0;             // the part that the last element begins in
  bool quantifiable_ = false;
};

uint32_t Reader::character() {
  if (done()) refuse("it ends too early");
  const Character c = first_character(std::string_view(source_).substr(at_));
  if (c.length == 0) refuse("it is not UTF-8");
  at_ += c.length;
  return c.code;
}

// \xHH, \x{H...}, \uHHHH, after the letter.
uint32_t Reader::hexadecimal() {
  const bool is_x = source_[at_ - 1] == 'x';
  const bool braces = is_x && take("{");
  const size_t most = braces ? 8 : is_x ? 2 : 4;
  uint32_t code = 0;
  size_t digits = 0;
  for (; digits < most && !done() && std::isxdigit(static_cast<unsigned char>(source_[at_])); ++digits, ++at_) {
    const auto c = static_cast<uint32_t>(source_[at_]);
    code = code << 4 | (is_digit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  const bool whole = digits > 0 && (is_x || digits == 4) && (!braces || take("}"));
  if (!whole || code > last_character || (is_x && !braces && code >= 0x80)) refuse("no character has this number");
  return code;
}

// After "\p" or "\P": {Lu}, {^Lu}.
Ranges Reader::property(bool negated) {
  if (!take("{")) refuse("\\p without {}");
  if (take("^")) negated = !negated;
  const size_t end = source_.find('}', at_);
  if (end == std::string::npos) refuse("} is missing");
  const std::string name = source_.substr(at_, end - at_);
  Ranges set = name.empty() ? Ranges() : characters_of(name);
  if (set.empty()) refuse("the property " + excerpt(name));
  at_ = end + 1;
  return negated ? all_but(set) : set;
}

// What stands for many characters, after a backslash; none, and nothing read, if there is no such thing.
std::optional<Ranges> Reader::class_escape(bool in_class) {
  if (done()) refuse("it ends too early");
  const char kind = source_[at_];
  const char lower = static_cast<char>(kind | 0x20);
  if (std::string_view("sSdDwWhHpP").find(kind) == std::string_view::npos) return std::nullopt;
  ++at_;
  if (lower == 'p') return property(kind == 'P');
  Ranges set;
  if (lower == 's') set = white_space();
  if (lower == 'd') set = characters_of("Nd");
  if (lower == 'h') set = {{'0', '9'}, {'A', 'F'}, {'a', 'f'}};
  if (lower == 'w') set = word_characters();
  // Oniguruma's \w outside brackets, and only there, has these fractions and superscripts of Latin-1.
  if (lower == 'w' && !in_class) set = both_of(std::move(set), {{0xB2, 0xB3}, {0xB9, 0xB9}, {0xBC, 0xBE}});
  return kind == lower ? set : all_but(set);
}

// One character, after a backslash.
uint32_t Reader::character_escape() {
  const uint32_t c = character();
  constexpr std::string_view names = "nrtfaev0", values("\n\r\t\f\a\x1b\v\0", 8);
  if (c == '0' && !done() && is_digit(static_cast<unsigned char>(source_[at_]))) refuse("an octal number");
  if (c < 0x80)
    if (const size_t place = names.find(static_cast<char>(c)); place != std::string_view::npos)
      return static_cast<uint32_t>(values[place]);
  if (c == 'x' || c == 'u') return hexadecimal();
  if (is_letter(c) || is_digit(c) || c >= 0x80) refuse(str("a backslash before ", excerpt(source_.substr(at_ - 1, 1))));
  return c;
}

// After "[:".
Ranges Reader::posix() {
  const bool negated = take("^");
  Ranges set;
  if (take("space:]")) set = white_space();
  else if (take("digit:]")) set = characters_of("Nd");
  else if (take("punct:]")) set = both_of(characters_of("P"), characters_of("S"));
  else refuse("this class in brackets");
  return negated ? all_but(set) : set;
}

void Reader::class_item(Ranges& all, int depth) {
  if (next_is("&&")) refuse("an intersection of classes");
  if (take("[:")) {
    if (any_case_) refuse("this class without regard to case");
    all = both_of(std::move(all), posix());
    return;
  }
  if (take("[")) {
    all = both_of(std::move(all), read_class(depth + 1));
    return;
  }
  const size_t begin = at_;
  uint32_t first = 0;
  if (take("\\")) {
    if (const auto set = class_escape(true)) {
      const char kind = source_[begin + 1];
      if (any_case_ && kind != 's' && kind != 'd') refuse("this class without regard to case");
      if (next_is("-") && !next_is("-]")) refuse("a range that begins with a class");
      all = both_of(std::move(all), *set);
      return;
    }
    first = character_escape();
  } else {
    first = character();
  }
  uint32_t last = first;
  if (next_is("-") && !next_is("-]")) {
    ++at_;
    if (next_is("[") || next_is("&&")) refuse("a range that ends with a class");
    if (take("\\")) {
      if (class_escape(true)) refuse("a range that ends with a class");
      last = character_escape();
    } else {
      last = character();
    }
    if (last < first) refuse("a range that ends before it begins");
  }
  if (any_case_ && last >= 0x80) refuse("characters beyond ASCII without regard to case");
  all = both_of(std::move(all), any_case_ ? any_case({first, last}) : Ranges{{first, last}});
}

// After its bracket.
Ranges Reader::read_class(int depth) {
  if (depth > max_json_depth) refuse("classes in classes, too many");
  const bool negated = take("^");
  if (next_is("]")) refuse("a class that begins with ]");
  Ranges all;
  while (!take("]")) class_item(all, depth);
  return negated ? all_but(all) : all;
}

void Reader::atom(Ranges set) {
  atom_ = pattern_.parts.size();
  quantifiable_ = true;
  letter_before_ = 0;
  const auto same = std::find_if(pattern_.sets.begin(), pattern_.sets.end(), [&](const Ranges& other) {
    return std::equal(set.begin(), set.end(), other.begin(), other.end(),
                      [](CharacterRange a, CharacterRange b) { return a.first == b.first && a.last == b.last; });
  });
  pattern_.parts.push_back({"", static_cast<int>(same - pattern_.sets.begin())});
  if (same == pattern_.sets.end()) pattern_.sets.push_back(std::move(set));
}

void Reader::literal(uint32_t c) {
  if (!any_case_) return atom({{c, c}});
  if (c >= 0x80) refuse("characters beyond ASCII without regard to case");
  const uint32_t before = letter_before_, lower = is_letter(c) ? c | 0x20 : 0;
  const bool ligature = (before == 's' && (lower == 's' || lower == 't')) ||
                        (before == 'f' && (lower == 'f' || lower == 'i' || lower == 'l'));
  if (ligature) refuse("two letters without regard to case, which one character may stand for");
  atom(any_case({c, c}));
  letter_before_ = lower;
}

// After its parenthesis.
void Reader::open_group() {
  groups_.push_back({any_case_, pattern_.parts.size(), true});
  if (groups_.size() > 200) refuse("groups in groups, too many");
  if (!take("?")) return add_text("(?:");  // what it captures is not asked for
  if (take("i:")) any_case_ = true, add_text("(?:");
  else if (take("-i:")) any_case_ = false, add_text("(?:");
  else if (take(":")) add_text("(?:");
  else if (take(">")) add_text("(?>");
  else if (take("=")) groups_.back().quantifiable = false, add_text("(?=");
  else if (take("!")) groups_.back().quantifiable = false, add_text("(?!");
  else if (next_is("<=") || next_is("<!")) {
    groups_.back().quantifiable = false, pattern_.looks_behind = true;
    add_text(take("<=") ? "(?<=" : "(?<!");
    take("<!");
  } else {
    refuse("this kind of group");
  }
}

void Reader::close_group() {
  if (groups_.empty()) refuse("a parenthesis that was not opened");
  add_text(")");
  any_case_ = groups_.back().any_case;
  atom_ = groups_.back().begin;
  quantifiable_ = groups_.back().quantifiable;
  groups_.pop_back();
}

// {n}, {n,}, {,m}, {n,m}; none, and nothing read, where the brace stands for itself.
std::optional<Reader::Counts> Reader::counts() {
  const size_t end = source_.find('}', at_);
  if (end == std::string::npos) return std::nullopt;
  const std::string inside = source_.substr(at_ + 1, end - at_ - 1);
  const size_t comma = inside.find(',');
  const std::string least = inside.substr(0, comma),
                    most = comma == std::string::npos ? least : inside.substr(comma + 1);
  const auto is_number = [](const std::string& text) {
    return std::all_of(text.begin(), text.end(), [](unsigned char c) { return is_digit(c); });
  };
  if ((least.empty() && most.empty()) || !is_number(least) || !is_number(most)) return std::nullopt;
  const int32_t n = least.empty() ? 0 : parse_all<int32_t>(least).value_or(-1);
  const int32_t m = most.empty() ? n : parse_all<int32_t>(most).value_or(-1);
  if (n < 0 || m < n || m > 1000) refuse("a repetition that is too large, or whose ends are in the wrong order");
  at_ = end + 1;
  return Counts{static_cast<size_t>(n), inside.size(),
                "{" + std::to_string(n) + (comma == std::string::npos ? "" : "," + most) + "}",
                comma == std::string::npos};
}

void Reader::quantifier() {
  const auto repeat = [&](const std::string& text) {
    if (!quantifiable_) refuse("nothing that could be repeated");
    add_text(text);
  };
  if (next_is("{")) {
    const auto count = counts();
    if (!count) {
      ++at_;
      return literal('{');
    }
    repeat(count->text);
    if (count->exact && next_is("?")) refuse("{n}?");
    if (take("?")) add_text("?");
    else if (take("+")) {  // in Ruby's syntax not possessive: it repeats
      pattern_.parts.insert(pattern_.parts.begin() + static_cast<std::ptrdiff_t>(atom_), {"(?:"});
      add_text(")+");
    }
  } else {
    repeat(std::string(1, source_[at_++]));
    if (take("?")) add_text("?");
    else if (take("+")) add_text("+");
  }
  quantifiable_ = false;
  if (!done() && (source_[at_] == '*' || source_[at_] == '+' || source_[at_] == '?')) refuse("a repeated repetition");
}

void Reader::element() {
  if (std::string_view("?*+{").find(source_[at_]) != std::string_view::npos) return quantifier();
  if (take("\\")) {
    if (auto set = class_escape(false)) return atom(std::move(*set));
    if (take("z")) return quantifiable_ = false, add_text("\\z");
    return literal(character_escape());
  }
  if (take("[")) return atom(read_class(0));
  if (take("(")) {
    quantifiable_ = false;
    return open_group();
  }
  if (take(")")) return close_group();
  if (take("|")) {
    quantifiable_ = false, letter_before_ = 0;
    return add_text("|");
  }
  if (take(".")) return atom(all_but({{'\n', '\n'}}));
  if (take("$")) {  // the end of every line, and of the text
    quantifiable_ = false;
    add_text("(?=");
    pattern_.parts.back().set = static_cast<int>(pattern_.sets.size());
    pattern_.sets.push_back({{'\n', '\n'}});
    return add_text("|\\z)");
  }
  if (next_is("^")) refuse("the begin of a line");
  literal(character());
}

Pattern Reader::read() {
  if (source_.empty()) refuse("it is empty");
  any_case_ = take("(?i)");
  while (!done()) element();
  if (!groups_.empty()) refuse("a parenthesis that is not closed");
  return std::move(pattern_);
}

}  // namespace

Pattern read_pattern(const std::string& source, const std::string& where) { return Reader(source, where).read(); }

}  // namespace crossply
