#include "data/bpe/nfc.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "data/bpe/character_set.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

using Codes = std::vector<uint32_t>;

// Syllables of Korean are their letters by a formula: 19 leading ones, 21 vowels, 27 trailing ones or none.
constexpr uint32_t syllables = 0xAC00, leads = 0x1100, vowels = 0x1161, tails = 0x11A7;
constexpr uint32_t lead_count = 19, vowel_count = 21, tail_count = 28;
constexpr uint32_t syllable_count = lead_count * vowel_count * tail_count;

struct Tables {
  std::unordered_map<uint32_t, std::span<const uint32_t>> decomposed;
  std::unordered_map<uint64_t, uint32_t> composed;  // by both parts
  std::unordered_map<uint32_t, uint32_t> classes;
  std::vector<bool> inert = std::vector<bool>(last_character + 1, true);  // never changed, nor what stands before it

  Tables();
  static uint64_t pair(uint32_t first, uint32_t second) { return static_cast<uint64_t>(first) << 32 | second; }
  uint32_t class_of(uint32_t code) const {
    const auto found = classes.find(code);
    return found == classes.end() ? 0 : found->second;
  }
  void decompose(uint32_t code, Codes& out) const;
  uint32_t compose(uint32_t first, uint32_t second) const;
  void compose(Codes& codes) const;
};

Tables::Tables() {
  const std::span<const uint32_t> marks = combining_classes();
  uint32_t code = 0;
  for (size_t i = 0; i < marks.size(); i += 3) {
    code += marks[i];
    for (const uint32_t end = code + marks[i + 1]; code < end; ++code)
      classes[code] = marks[i + 2], inert[code] = false;
  }
  code = 0;
  const std::span<const uint32_t> all = canonical_decompositions();
  std::vector<std::pair<uint32_t, std::span<const uint32_t>>> composing;
  for (size_t i = 0; i < all.size(); i += 2 + all[i + 1] / 2) {
    const std::span<const uint32_t> parts = all.subspan(i + 2, all[i + 1] / 2);
    code += all[i];
    decomposed[code] = parts;
    if (all[i + 1] % 2 == 1) composing.push_back({code, parts});
    else inert[code] = false;
  }
  // The shorter ones first: all of a longer one's parts but the last are composed by them.
  std::stable_sort(composing.begin(), composing.end(),
                   [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  for (const auto& [whole, parts] : composing) {
    Codes first(parts.begin(), parts.end() - 1);
    compose(first);
    composed[pair(first[0], parts.back())] = whole;
    inert[parts.back()] = false;
  }
  for (uint32_t v = 0; v < vowel_count; ++v) inert[vowels + v] = false;
  for (uint32_t t = 1; t < tail_count; ++t) inert[tails + t] = false;
}

void Tables::decompose(uint32_t code, Codes& out) const {
  if (code >= syllables && code < syllables + syllable_count) {
    const uint32_t index = code - syllables, tail = index % tail_count;
    out.insert(out.end(), {leads + index / tail_count / vowel_count, vowels + index / tail_count % vowel_count});
    if (tail > 0) out.push_back(tails + tail);
    return;
  }
  const auto found = decomposed.find(code);
  if (found == decomposed.end()) out.push_back(code);
  else out.insert(out.end(), found->second.begin(), found->second.end());
}

// One character for two; 0 where there is none.
uint32_t Tables::compose(uint32_t first, uint32_t second) const {
  if (first >= leads && first < leads + lead_count && second >= vowels && second < vowels + vowel_count)
    return syllables + ((first - leads) * vowel_count + (second - vowels)) * tail_count;
  if (first >= syllables && first < syllables + syllable_count && (first - syllables) % tail_count == 0 &&
      second > tails && second < tails + tail_count)
    return first + (second - tails);
  const auto found = composed.find(pair(first, second));
  return found == composed.end() ? 0 : found->second;
}

// In canonical order; each character with the last one of class 0 before it, unless one between has its class or more.
void Tables::compose(Codes& codes) const {
  size_t kept = 0, starter = codes.size();
  uint32_t last_class = 0;
  for (const uint32_t code : codes) {
    const uint32_t its_class = class_of(code);
    const bool adjacent = starter + 1 == kept;
    if (starter < kept && (adjacent || (last_class < its_class && last_class != 0))) {
      if (const uint32_t both = compose(codes[starter], code); both != 0) {
        codes[starter] = both;
        continue;
      }
    }
    if (its_class == 0) starter = kept;
    last_class = its_class;
    codes[kept++] = code;
  }
  codes.resize(kept);
}

}  // namespace

// A character that is not inert changes nothing before the inert one that precedes it, nor behind the next but itself.
std::string nfc(std::string_view text) {
  static const Tables tables;
  std::string out;
  Codes codes;
  size_t before = 0, at = 0;  // where the last inert character begins
  while (at < text.size()) {
    Character c = first_character(text.substr(at));
    if (tables.inert[c.code]) {
      out.append(text, before, at - before);
      before = at, at += c.length;
      continue;
    }
    codes.clear();
    if (before < at) tables.decompose(first_character(text.substr(before)).code, codes);
    for (; at < text.size() && !tables.inert[(c = first_character(text.substr(at))).code]; at += c.length)
      tables.decompose(c.code, codes);
    for (auto first = codes.begin(); first != codes.end(); ++first) {
      auto last = first;
      while (last != codes.end() && tables.class_of(*last) != 0) ++last;
      std::stable_sort(first, last, [&](uint32_t a, uint32_t b) { return tables.class_of(a) < tables.class_of(b); });
      if (last == codes.end()) break;
      first = last;
    }
    tables.compose(codes);
    for (const uint32_t code : codes) append_utf8(out, code);
    before = at;
  }
  return out.append(text, before, at - before);
}

}  // namespace crossply
