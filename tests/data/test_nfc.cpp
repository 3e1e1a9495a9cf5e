#include "data/bpe/nfc.h"

#include <doctest/doctest.h>

using namespace crossply;

TEST_CASE("nfc: composes, in canonical order, what Unicode composes") {
  const std::pair<const char*, const char*> cases[] = {
      {"", ""},
      {"plain \u00e9 \u4e2d", "plain \u00e9 \u4e2d"},
      {"e\u0301", "\u00e9"},
      {"xe\u0301y", "x\u00e9y"},
      {"\u0301e", "\u0301e"},
      {"\u00e9\u0323", "\u1eb9\u0301"},    // what was composed already is taken apart
      {"q\u0307\u0323", "q\u0323\u0307"},  // only put in order
      {"a\u0323\u0302", "\u1ead"},         // in two steps
      {"a\u0302\u0323", "\u1ead"},
      {"a\u0301\u0301", "\u00e1\u0301"},
      {"\u212b \u2126", "\u00c5 \u03a9"},  // one for one
      {"\u0958", "\u0915\u093c"},          // never composed
      {"\u0344", "\u0308\u0301"},
      {"\u1112\u1161\u11ab", "\ud55c"},
      {"\u1112\u1161x\u11ab", "\ud558x\u11ab"},
      {"\ud558\u11ab", "\ud55c"},
      {"\uac01\u11ab", "\uac01\u11ab"},  // it has its trailing letter
      {"\U0002F800", "\u4e3d"},
      {"\U00011099\U000110BA", "\U0001109A"},
  };
  for (const auto& [text, want] : cases) CHECK(nfc(text) == want);
}
