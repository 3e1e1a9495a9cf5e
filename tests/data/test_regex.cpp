#include "data/bpe/regex.h"

#include "data/bpe/character_set.h"
#include "tests/support/check.h"
#include "tests/support/data_check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Strings = std::vector<std::string>;

// The matches in a text, none of which is empty.
Strings matches(const std::string& pattern, const std::string& text) {
  const Regex regex(pattern, "P");
  std::string classes;
  regex.classify(text, classes);
  std::vector<size_t> begins;  // of the characters
  for (size_t i = 0; i < text.size(); ++i)
    if ((text[i] & 0xC0) != 0x80) begins.push_back(i);
  begins.push_back(text.size());
  REQUIRE(classes.size() + 1 == begins.size());
  Strings found;
  for (size_t at = 0;;) {
    const Regex::Match match = regex.find(classes, at);
    if (match.begin == std::string_view::npos) return found;
    REQUIRE(match.begin < match.end);
    found.push_back(text.substr(begins[match.begin], begins[match.end] - begins[match.begin]));
    at = match.end;
  }
}

}  // namespace

TEST_CASE("regex: classes of characters are those of Unicode 16") {
  CHECK(matches("\\p{L}+", "ab1\u00e9\u4e2d\U000105C0 \u0301") == Strings{"ab", "\u00e9\u4e2d\U000105C0"});
  CHECK(matches("\\p{N}", "1\u0663\u00bd\u2167a\U00010D40") ==
        Strings{"1", "\u0663", "\u00bd", "\u2167", "\U00010D40"});
  CHECK(matches("\\p{Lu}\\p{M}", "A\u0301a\u0301") == Strings{"A\u0301"});
  CHECK(matches("\\P{L}|\\p{^L}", "a1") == Strings{"1"});
  CHECK(matches("[^\\s\\p{L}\\p{N}]+", "a!?\u2028\u20ac\U0001F600b") == Strings{"!?", "\u20ac\U0001F600"});
  // White_Space: with U+0085, without U+180E and U+200B.
  CHECK(matches("\\s", "\u0085\u180e\u200b\u00a0\u3000\u2029").size() == 4);
  CHECK(matches("\\S", "\u0085\u180e\u200b\u00a0\u3000\u2029").size() == 2);
  CHECK(matches("\\d\\h", "1a2g\u0663F") == Strings{"1a", "\u0663F"});
  CHECK(matches("\\w", "_\u00b2\u200d") == Strings{"_", "\u00b2"});
  CHECK(matches("[\\w]", "_\u00b2\u200d") == Strings{"_"});
  CHECK(matches(".", "a\n\r\u2028").size() == 3);
  size_t letters = 0;
  for (const auto [first, last] : characters_of("L")) letters += last - first + 1;
  CHECK(letters == 141028);
  CHECK((characters_of("Xx").empty() && characters_of("Cs").size() == 1));
}

TEST_CASE("regex: Oniguruma's syntax") {
  CHECK(matches("a{,2}b", "aaabb") == Strings{"aab", "b"});
  CHECK(matches("a{1,2}+", "aaaaa") == Strings{"aaaaa"});  // repeats
  CHECK(matches("(?:ab){1,2}+b", "ababb") == Strings{"ababb"});
  CHECK(matches("a++a|b?+b|b", "aaab") == Strings{"b"});  // possessive
  CHECK(matches("a+?|a{2,3}?", "aa") == Strings{"a", "a"});
  CHECK(matches("a{|{,}|a}", "a{,}a}") == Strings{"a{", "a}"});
  CHECK(matches("a$", "a\nba") == Strings{"a", "a"});
  CHECK(matches("\\s+$", "a  \n  b  \n") == Strings{"  ", "  \n"});
  CHECK(matches("a\\z", "a\na") == Strings{"a"});
  CHECK(matches("[a[bc]-]+", "ab-cd") == Strings{"ab-c"});
  CHECK(matches("[^a\\]\\n]", "a]\nx") == Strings{"x"});
  CHECK(matches("[[:punct:][:digit:]]+", "a!1$b") == Strings{"!1$"});
  CHECK(matches("\\x41\\x{e9}\\u4e2d\\/\\ \\t", "A\u00e9\u4e2d/ \t").size() == 1);
  CHECK(matches("(?<=a)b|(?<!a)c|(?>d|de)e(?=f)", "ab ac c def").size() == 3);
  CHECK(matches("(a(b))c", "abc") == Strings{"abc"});
  CHECK(matches("[^\\s\\S]|a", "ba") == Strings{"a"});
  CHECK(matches("\u4e00|[\u3041-\u309f]+", "\u4e00\u3042\u3044x") == Strings{"\u4e00", "\u3042\u3044"});
}

TEST_CASE("regex: without regard to case, two characters beyond ASCII count as letters") {
  CHECK(matches("(?i:'s|'k|[a-f])", "'S '\u017f 'K '\u212a E") == Strings{"'S", "'\u017f", "'K", "'\u212a", "E"});
  CHECK(matches("(?i:a)a", "Aa AA") == Strings{"Aa"});
  CHECK(matches("(?i)a(?-i:a)|b", "Aa AA B") == Strings{"Aa", "B"});
  for (const char* ligature : {"(?i:ss)", "(?i:s(?:t))", "(?i)ff", "(?i)afl"})
    check_fails(Exit::bad_data, {"two letters"}, [&] { Regex(ligature, "P"); });
  check_fails(Exit::bad_data, {"beyond ASCII"}, [] { Regex("(?i:\u00e9)", "P"); });
}

TEST_CASE("regex: what is not understood is refused, with its place") {
  Strings bad =
      split_words(R"(( ) a) [a []a] *a a** a|* (?<n>a) (?P<n>a) (a)\1 \b ^a \Aa \R \X \K \p \p{ \p{} \p{Nope} \p{Letter}
         \x \xe9 \x{110000} \u12 \07 [b-a] [a-\d] [\d-z] [a&&b] [[:alpha:]] (?x)a (?m)a a(?i)b a{2}? a{2,1}
         a{9999} (?#a) (?=a)* \ [\ (?i:\p{L}[\p{L}]))");
  bad.insert(bad.end(), {"", "\xff"});
  for (const std::string& pattern : bad) {
    CAPTURE(pattern);
    check_fails(Exit::bad_data, {"P: the regular expression"}, [&] { Regex(pattern, "P"); });
  }
  std::string deep, classes;
  for (int i = 0; i < 100000; ++i) deep += '(', classes += '[';
  check_fails(Exit::bad_data, {"too many"}, [&] { Regex(deep, "P"); });
  check_fails(Exit::bad_data, {"too many"}, [&] { Regex(classes, "P"); });
}

TEST_CASE("regex: a long run is matched, a hostile expression ends") {
  CHECK(matches("\\s+(?!\\S)|\\s+", std::string(1 << 20, ' ') + "a").size() == 2);
  CHECK(matches("(?:\\p{N}{1,3})+", std::string(1 << 20, '7')).size() == 1);
  CHECK(matches("\\s*[\\r\\n]+|\\s+", std::string(1 << 20, ' ')).size() == 1);
  check_fails(Exit::bad_data, {"cannot split"}, [] { matches("(a+)+[bc]", std::string(5000, 'a')); });
  check_fails(Exit::bad_data, {"cannot split"}, [] { matches("(a|a)*[bc]", std::string(5000, 'a')); });
}

TEST_CASE("regex: a long text is searched in stretches, and has the same matches") {
  std::string text;
  Strings numbers, pairs;
  for (size_t gap = 1; gap < 30000; gap += 1 + gap / 3) {
    text += std::string(gap, 'x') + "12ab";
    numbers.push_back("12"), pairs.push_back("ab");
  }
  REQUIRE(text.size() > 100000);
  CHECK(matches("\\p{N}{1,3}", text) == numbers);
  CHECK(matches("a(?!x)b(?=x|\\z)", text) == pairs);
  CHECK(matches("y", text).empty());
  CHECK(matches("b\\z", text) == Strings{"b"});
}

TEST_CASE("regex: a stop request ends the search of a long text, even one that looks at all of the rest each time") {
  const std::string spaces = std::string(1 << 20, ' ') + "x";
  static int asked;
  asked = 0;
  set_search_stop([] { return ++asked > 20; });
  check_fails(Exit::stopped, {"1048577 characters"}, [&] { matches("\\s+$", spaces); });
  asked = 0;
  check_fails(Exit::stopped, {"1048577 characters"}, [&] { matches(" (?=[^y]*y| )", spaces); });
  CHECK(matches("a+", "aab") == Strings{"aa"});  // a short one is not worth it
  set_search_stop(nullptr);
}

TEST_CASE("regex: at the begin of a longer text only what is sure is a match") {
  const Regex regex("a+|b(?!c)|\\s+(?!\\S)", "P");
  std::string classes;
  const auto sure = [&](const std::string& text) {
    regex.classify(text, classes);
    return regex.find(classes, 0, true).begin == 0;
  };
  CHECK((!sure("aa") && sure("aab") && !sure("b") && sure("bb") && !sure("  ") && sure("  x")));
  CHECK((regex.goes_forward() && !Regex("(?<=a)b", "P").goes_forward() && !Regex("a*", "P").goes_forward()));
}
