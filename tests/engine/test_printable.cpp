// Text from outside: on a terminal, in a command to paste, in a spreadsheet, in a figure.
#include "engine/io/json.h"
#include "engine/io/printable.h"

#include <array>
#include <cstdio>

#include "cli/svg.h"
#include "engine/io/control_characters.h"
#include "engine/io/shell.h"
#include "eval/inside/analysis.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

std::string utf8_of(uint32_t code) {
  std::string text = json_text(nlohmann::json(std::string()));
  char escaped[16];
  std::snprintf(escaped, sizeof escaped, "\"\\u%04x\"", code);
  return known_json(escaped).get<std::string>();
}

// Every control character of ASCII but line break and tab, those of C1, and what reorders text.
std::vector<uint32_t> controls() {
  std::vector<uint32_t> codes = {0x7F, 0x061C, 0x200E, 0x200F, 0x2028, 0x2029};
  for (uint32_t code = 1; code < 0x20; ++code)
    if (code != '\n' && code != '\t') codes.push_back(code);
  for (uint32_t code = 0x80; code < 0xA0; ++code) codes.push_back(code);
  for (uint32_t code = 0x202A; code <= 0x202E; ++code) codes.push_back(code);
  for (uint32_t code = 0x2066; code <= 0x2069; ++code) codes.push_back(code);
  return codes;
}

// The word as a shell reads it back.
std::string read_by_shell(const std::string& word) {
  const TempDir scratch;
  write_text(scratch.file("script"), "printf '%s' " + word);
  FILE* shell = ::popen(("bash " + scratch.file("script")).c_str(), "r");
  REQUIRE(shell != nullptr);
  std::string out;
  std::array<char, 4096> buffer;
  for (size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), shell)) > 0;) out.append(buffer.data(), n);
  CHECK(::pclose(shell) == 0);
  return out;
}

}  // namespace

TEST_CASE("printable: no control character reaches a terminal, a figure or a command") {
  for (const uint32_t code : controls()) {
    const std::string raw = utf8_of(code), text = "a" + raw + "b";
    CAPTURE(code);
    CHECK(!has(printable(text), raw));
    CHECK(!has(excerpt(text), raw));
    CHECK(!has(svg::escaped(text), raw));
    CHECK(!has(shell_word(text), raw));
    CHECK(read_by_shell(shell_word(text)) == text);
    const std::string json = json_text(nlohmann::json({{"text", text}})), shown = printable_json(json);
    CHECK(!has(shown, raw));
    CHECK(known_json(shown) == known_json(json));
  }
  CHECK(printable("\u202Egpj.exe") == "\\xe2\\x80\\xaegpj.exe");
  CHECK(svg::escaped("\u202E\u009B") == "\uFFFD\uFFFD");
  const std::string shown =
      "\u00E9 \u20AC \U0001F600 \u05D0\u200D \uFEFF";  // letters, a joiner, a mark that shows nothing
  CHECK(printable(shown) == shown);
  CHECK(svg::escaped(shown) == shown);
  CHECK(printable_json("{\"a\": \"" + shown + "\"}\n") == "{\"a\": \"" + shown + "\"}\n");
}

TEST_CASE("printable: a shell reads every word back") {
  CHECK(shell_word("runs/lime_2-a.b") == "runs/lime_2-a.b");
  CHECK(shell_word("a b") == "'a b'");
  CHECK(shell_word("") == "''");
  CHECK(shell_word("a\x1b[1m\n") == "$'a\\033[1m\\012'");
  for (const std::string text : {"it's", "$(touch x)", "`x`", "\"a\"", "a\\b", "*", "~", "a;b", "#", "!x", "a\nb\t'\\",
                                 "\xff'\\\x80 7", "-1", "=x", "\u202E$HOME'\\"})
    CHECK_MESSAGE(read_by_shell(shell_word(text)) == text, shell_word(text));
}

TEST_CASE("printable: a command names a program as this one was called") {
  CHECK(shell_command("build/compare") == "build/compare");
  CHECK(shell_command("build/compare", "generate") == "build/generate");
  CHECK(shell_command("compare", "generate") == "generate");
  CHECK(shell_command("a b/compare", "generate") == "'a b/generate'");
  CHECK(shell_command("crossply compare") == "crossply compare");
  CHECK(shell_command("a b/crossply compare", "generate") == "'a b/crossply' generate");
}

TEST_CASE("printable: a spreadsheet takes no name for a formula, and keeps numbers") {
  for (const std::string text : {"=1+1", "+1+1", "-2+3", "@SUM(1)", "\tx", "-", "=", "\uFF1D1"})
    CHECK_MESSAGE(csv_field(text) == "'" + text, text);
  CHECK(csv_field("\rx") == "\"'\rx\"");
  CHECK(csv_field("=HYPERLINK(\"http://a\",1)") == "\"'=HYPERLINK(\"\"http://a\"\",1)\"");
  for (const std::string text : {"-1.5", "-2e-3", "lime", "runs/a=b", "1+1", ""})
    CHECK_MESSAGE(csv_field(text) == text, text);
}
