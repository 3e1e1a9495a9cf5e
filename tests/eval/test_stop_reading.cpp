// A stop is heard while what is on the disk already is read and checked.
#include <csignal>

#include "cli/stop.h"
#include "data/document_feed.h"
#include "data/validation_split.h"
#include "tests/support/child.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// The exit code of what a process throws that was asked to stop; 0: nothing.
template <class F>
int code_after_stop(F&& read) {
  return in_child([&] {
    catch_stop_signals();
    ::raise(SIGTERM);
    read();
    return 0;
  });
}

}  // namespace

TEST_CASE("stop: a program whose files are complete exits at once, but not in the middle of writing them") {
  const auto code_of = [](auto&& act) { return in_child(act); };
  CHECK(code_of([] {
          exit_on_stop("stopped: here");
          ::raise(SIGTERM);
          return 1;
        }) == static_cast<int>(Exit::stopped));
  const TempDir dir;
  CHECK(code_of([&] {
          exit_on_stop("stopped: here");
          const HeldStop writing;
          ::raise(SIGTERM);
          write_text(dir.file("whole"), "whole");
          return 1;
        }) == static_cast<int>(Exit::stopped));
  CHECK(read_text(dir.file("whole")) == "whole");
}

TEST_CASE("stop: the digests of tokens and of a long file end early") {
  const TempDir dir;
  ShardWriter writer({dir.path, "train", ShardFormat::uint16, 1000}, 0);
  writer.append(std::vector<int32_t>(5000, 7));
  writer.flush();
  CHECK(code_after_stop([&] { writer.digest(5000); }) == static_cast<int>(Exit::stopped));
  write_text(dir.file("short"), "text");
  write_text(dir.file("long"), std::string(3 << 20, 'a'));
  CHECK(code_after_stop([&] { digest_of_file(dir.file("long")); }) == static_cast<int>(Exit::stopped));
  CHECK(code_after_stop([&] { digest_of_file(dir.file("short")); }) == 0);
}

TEST_CASE("stop: choosing the tokens for validation ends early") {
  const TempDir dir;
  ShardWriter table({dir.path, "documents", ShardFormat::uint32, entry_words}, 0);
  table.append(words_of({1, 10, 10, 0}));
  table.flush();
  CHECK(code_after_stop([&] { ValidationSplit(table, 1, 0.1); }) == static_cast<int>(Exit::stopped));
}
