// Which streams get escape codes.
#include "cli/standard_streams.h"

#include <fcntl.h>
#include <stdlib.h>

#include <optional>

#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// The environment's TERM for as long as it lives; nullptr: none.
class Term {
 public:
  explicit Term(const char* value) {
    if (const char* before = ::getenv("TERM"); before != nullptr) before_ = before;
    value != nullptr ? ::setenv("TERM", value, 1) : ::unsetenv("TERM");
  }
  ~Term() { before_ ? ::setenv("TERM", before_->c_str(), 1) : ::unsetenv("TERM"); }

 private:
  std::optional<std::string> before_;
};

}  // namespace

TEST_CASE("standard streams: escape codes are for terminals that know them") {
  const int controller = ::posix_openpt(O_RDWR | O_NOCTTY);
  REQUIRE(controller >= 0);
  REQUIRE((::grantpt(controller) == 0 && ::unlockpt(controller) == 0));
  const int terminal = ::open(::ptsname(controller), O_RDWR | O_NOCTTY);
  REQUIRE(terminal >= 0);
  const TempDir scratch;
  const int file = ::open(scratch.file("plain").c_str(), O_CREAT | O_RDWR, 0600);
  for (const char* known : {"xterm", "linux", "screen-256color"}) {
    const Term term(known);
    CHECK(takes_escape_codes(terminal));
    CHECK(!takes_escape_codes(file));
  }
  for (const char* none : {"dumb", "", static_cast<const char*>(nullptr)}) {
    const Term term(none);
    CHECK(!takes_escape_codes(terminal));
  }
  ::close(file), ::close(terminal), ::close(controller);
}
