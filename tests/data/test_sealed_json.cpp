#include "data/sealed_json.h"

#include <nlohmann/json.hpp>

#include "engine/memory.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("sealed_json: what was sealed comes back, and nothing else") {
  const nlohmann::ordered_json object = {{"val", 0.01}, {"count", 3}, {"list", {1, "two", nullptr}}, {"big", ~0ull}};
  const std::string text = seal(object);
  CHECK(unseal(text, "here", "start anew") == object);
  CHECK(seal(unseal(text, "here", "")) == text);
  const auto refuses = [](const std::string& changed, const std::string& why) {
    check_fails(Exit::bad_data, {"here", why, "start anew"}, [&] { unseal(changed, "here", "start anew"); });
  };
  std::string other = text;
  other.replace(other.find("3"), 1, "4");
  refuses(other, "does not fit its checksum");
  refuses("{\"count\": 3}", "no checksum");
  refuses("{\"checksum\": 3}", "does not fit");
  for (const char* none : {"", "[]", "5", "{", "\xff"}) refuses(none, "no checksum");
}

TEST_CASE("memory: there is some, and not all that can be asked for") {
  CHECK((available_memory() > 0 && available_memory() < uint64_t{1} << 60));
  require_memory(1, "a byte takes", "");
  check_fails(Exit::device, {"out of memory", "all takes", "take less"},
              [] { require_memory(UINT64_MAX, "all takes", "take less"); });
}
