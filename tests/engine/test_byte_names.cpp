// File names that are no UTF-8, in JSON and back.
#include "engine/io/byte_names.h"

#include <filesystem>

#include "engine/io/json.h"
#include "tests/support/check.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("byte names: UTF-8 stays, and every text comes back") {
  for (const char* plain : {"", "runs/a b", "donn\xc3\xa9s", "\\xe9", "\xf0\x9f\x98\x80"})
    CHECK(name_as_utf8(plain) == plain);
  std::string bytes;
  for (int byte = 1; byte < 256; ++byte) bytes += static_cast<char>(byte);
  const std::string stands_for_a_byte = name_as_utf8("\xe9");
  for (const std::string& text : {bytes, std::string("donn\xe9s/\xc3"), std::string("\xed\xa0\x80"),
                                  std::string("\xc0\xaf"), stands_for_a_byte, "x" + stands_for_a_byte + "\xff"}) {
    const std::string utf8 = name_as_utf8(text);
    CHECK_NOTHROW(json_text(nlohmann::json(utf8)));
    CHECK(name_from_utf8(utf8) == text);
  }
}

TEST_CASE("byte names: a run on data with such a name goes on by itself, and is evaluated on it") {
  const TempDir scratch;
  const std::string dir = scratch.file(
                        "donn\xe9"
                        "es"),
                    run = scratch.file("run");
  std::filesystem::create_directory(dir);
  std::string text;
  for (int i = 0; i < 200; ++i) text += str("line ", i * 7919, "\n");
  write_text(dir + "/text", text);
  check_outcome(train(scratch, {"--data", "text:" + dir + "/text", "--seq", "16", "--width", "8", "--ffn", "8",
                                "--layers", "1", "--heads", "1", "--batch", "2", "--steps", "2", "--out", run}),
                Exit::done, "step 2");
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "4"}), Exit::done, "resumed after step 2");
  check_outcome(run_program_inside(scratch, {"evaluate", "--model", run, "--data", "text:" + dir + "/text"}),
                Exit::done, "split test");
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "5", "--lr", "0.5"}), Exit::usage, "--lr");
}
