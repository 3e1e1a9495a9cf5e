// What a program says where memory is not enough: only flags that it has.
#include <CLI/CLI.hpp>
#include <new>
#include <system_error>

#include "cli/program.h"
#include "engine/out_of_memory.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("out of memory: the advice names flags that the program has, and no others") {
  const auto remedy = [](const std::vector<std::string>& flags, const std::string& hidden = "") {
    CLI::App app;
    std::string text;
    for (const std::string& flag : flags) app.add_option(flag, text);
    if (!hidden.empty()) app.add_option(hidden, text)->group(hidden_group);
    return memory_remedy(app);
  };
  CHECK(remedy({"--batch", "--accumulate", "--seq", "--width"}) ==
        "use a smaller --batch with --accumulate, a shorter --seq, or a smaller model");
  CHECK(remedy({"--model", "--batch", "--seq"}) == "use a smaller --batch, --seq or model");
  CHECK(remedy({"--model", "--batch-tokens"}) == "use a smaller --batch-tokens or model");
  CHECK(remedy({"--model", "--length"}) == "use a smaller --length or model");
  CHECK(remedy({"--model"}, "--batch") == "use a smaller model");
  CHECK(remedy({"--tokenizer"}) == "end other programs, or use a machine with more memory");
}

TEST_CASE("out of memory: the remedy follows what was not there, and an error of another kind has none") {
  const Error allocation = error_of(std::bad_alloc(), "do this"),
              arena = error_of(OutOfMemory(Exit::device, "no"), "do"), other = error_of(Error(Exit::io, "disk"), "do"),
              thread =
                  error_of(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)), "x");
  CHECK((allocation.code == Exit::device && std::string(allocation.what()) == "out of memory; do this"));
  CHECK((arena.code == Exit::device && std::string(arena.what()) == "no; do"));
  CHECK((other.code == Exit::io && std::string(other.what()) == "disk"));
  CHECK((thread.code == Exit::device && has(thread.what(), "cannot start another thread")));
}
