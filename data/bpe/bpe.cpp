#include "data/bpe/bpe.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "data/bpe/nfc.h"
#include "engine/at_once.h"
#include "engine/check.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

constexpr size_t long_text = 1 << 19;  // bytes: above it a text is worth several threads

// The ids of short pieces that a thread met last: most of a text is a few thousand of them.
class Cache {
 public:
  struct Slot {
    uint8_t length = 0, count = 0;
    char piece[22] = {};
    int32_t ids[6] = {};
  };
  static constexpr size_t longest = sizeof Slot::piece, max_ids = sizeof Slot::ids / sizeof(int32_t);

  // The slot of a piece, whether it has it or not; the piece as the slot would hold it is in `key`.
  Slot& slot_of(std::string_view piece, uint64_t serial, Slot& key) {
    if (serial != serial_) slots_.assign(size_t{1} << bits, Slot()), serial_ = serial;
    key.length = static_cast<uint8_t>(piece.size());
    std::memcpy(key.piece, piece.data(), piece.size());
    uint64_t words[3];
    std::memcpy(words, &key, sizeof words);
    uint64_t hash = words[0] * 0x9E3779B97F4A7C15u;
    hash = ((hash ^ hash >> 32) + words[1]) * 0xC2B2AE3D27D4EB4Fu;
    hash = ((hash ^ hash >> 32) + words[2]) * 0x165667B19E3779F9u;
    return slots_[hash >> (64 - bits)];
  }
  static bool same(const Slot& slot, const Slot& key) {
    return slot.length == key.length && std::memcmp(slot.piece, key.piece, longest) == 0;
  }

 private:
  static constexpr int bits = 15;
  std::vector<Slot> slots_;
  uint64_t serial_ = 0;
};

}  // namespace

int32_t Bpe::id_of(const std::string& token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

bool Bpe::is_special(int32_t id) const { return id >= 0 && id < vocab_size() && special_ids_[static_cast<size_t>(id)]; }

Bpe Bpe::with_special_text(int32_t end_of_text) const {
  Bpe copy = *this;
  for (AddedTokens* some : {&copy.added_, &copy.normalized_added_}) {
    std::vector<AddedToken> tokens = some->tokens();
    std::erase_if(tokens, [&](const AddedToken& token) { return token.special || token.id == end_of_text; });
    *some = AddedTokens(std::move(tokens));
  }
  return copy;
}

void Bpe::merge_piece(std::string_view piece, std::vector<int32_t>& ids) const {
  if (ignore_merges_)
    if (const auto found = whole_.find(piece); found != whole_.end()) return ids.push_back(found->second);
  thread_local std::vector<int32_t> symbols;
  symbols.clear();
  for (size_t at = 0; at < piece.size();) {
    const size_t length = byte_level_ ? 1 : first_character(piece.substr(at)).length;
    const auto found = byte_level_ ? characters_.end() : characters_.find(first_character(piece.substr(at)).code);
    if (found != characters_.end()) symbols.push_back(found->second);
    else
      for (size_t i = at; i < at + length; ++i) symbols.push_back(bytes_[static_cast<uint8_t>(piece[i])]);
    at += length;
  }
  merges_.apply(symbols);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
  if (symbols.capacity() > long_text) std::vector<int32_t>().swap(symbols);
}

void Bpe::encode_piece(std::string_view piece, std::vector<int32_t>& ids) const {
  if (piece.size() > Cache::longest) return merge_piece(piece, ids);
  thread_local Cache cache;
  Cache::Slot key;
  Cache::Slot& slot = cache.slot_of(piece, serial_, key);
  if (!Cache::same(slot, key)) {
    const size_t before = ids.size();
    merge_piece(piece, ids);
    const size_t count = ids.size() - before;
    if (count > Cache::max_ids) return;
    key.count = static_cast<uint8_t>(count);
    std::copy(ids.end() - static_cast<std::ptrdiff_t>(count), ids.end(), key.ids);
    slot = key;
    return;
  }
  ids.insert(ids.end(), slot.ids, slot.ids + slot.count);
}

// A part of a text that one thread scans from a guessed place on. The pieces of a text follow from the place where a
// match ends, whatever stood before; so from the first such place on that the scan of the text before reaches as well,
// they are the right ones.
struct Bpe::Chunk {
  struct Mark {
    size_t character, ids;  // a place where a match ends, and the ids by then
  };
  static constexpr size_t max_marks = 4096;

  Chunk(const Bpe& bpe, const Regex& regex, std::string_view whole, std::string_view classes, size_t character,
        size_t byte)
      : owner(&bpe), text(whole), scan(regex, whole, classes, character, byte), done(byte) {}

  // To the end of the next match; false if there is none: then, unless there is more, the rest is a piece.
  bool advance(bool first, bool more, std::vector<int32_t>& out) {
    const auto piece = [&](size_t begin, size_t end) {
      owner->splitter_.split_rest(text.substr(begin, end - begin), first && begin == 0,
                                  [&](std::string_view part) { owner->encode_piece(part, out); });
    };
    finished = !scan.next(more);
    if (finished && more) return false;
    piece(done, finished ? text.size() : scan.begin_byte);
    if (!finished) piece(scan.begin_byte, scan.end_byte);
    done = finished ? text.size() : scan.end_byte;
    return !finished;
  }
  void run(size_t end_character, bool first, bool more) {
    while (scan.end_character < end_character && advance(first, more, ids))
      if (marks.size() < max_marks && !scan.is_empty()) marks.push_back({scan.end_character, ids.size()});
  }
  const Mark* mark_at(size_t character) const {
    const auto found = std::lower_bound(marks.begin(), marks.end(), character,
                                        [](const Mark& mark, size_t value) { return mark.character < value; });
    return found != marks.end() && found->character == character ? &*found : nullptr;
  }

  const Bpe* owner;
  std::string_view text;
  MatchScan scan;
  size_t done;  // bytes
  bool finished = false;
  std::vector<int32_t> ids;
  std::vector<Mark> marks;
};

// Of plain text, where the splitter's first step can be scanned. Returns the bytes that are done: all but if `more`.
size_t Bpe::encode_scanned(std::string_view text, bool first, bool more, int chunks, std::vector<int32_t>& ids) const {
  const Regex& regex = *splitter_.scanned();
  const auto n = static_cast<size_t>(chunks);
  std::vector<size_t> bytes(n + 1), characters(n + 1);
  std::vector<std::string> parts(n);
  for (size_t k = 0; k <= n; ++k) {
    bytes[k] = k == n ? text.size() : text.size() / n * k;
    while (k > 0 && bytes[k] < text.size() && (text[bytes[k]] & 0xC0) == 0x80) ++bytes[k];
  }
  at_once(n, [&](size_t k) { regex.classify(text.substr(bytes[k], bytes[k + 1] - bytes[k]), parts[k]); });
  for (size_t k = 0; k < n; ++k) characters[k + 1] = characters[k] + parts[k].size();
  std::string classes = std::move(parts[0]);
  classes.reserve(characters[n]);
  for (size_t k = 1; k < n; ++k) classes += parts[k], std::string().swap(parts[k]);

  std::vector<Chunk> all;
  for (size_t k = 0; k < n; ++k) all.emplace_back(*this, regex, text, classes, characters[k], bytes[k]);
  at_once(n, [&](size_t k) { all[k].run(k + 1 < n ? characters[k + 1] : characters[n] + 1, first, more); });
  ids.insert(ids.end(), all[0].ids.begin(), all[0].ids.end());
  Chunk* current = &all[0];
  for (size_t k = 1; k < n && !current->finished;) {
    if (const Chunk::Mark* mark = all[k].mark_at(current->scan.end_character)) {
      ids.insert(ids.end(), all[k].ids.begin() + static_cast<std::ptrdiff_t>(mark->ids), all[k].ids.end());
      current = &all[k++];
    } else if (current->scan.end_character >= characters[k + 1]) {
      ++k;
    } else {
      current->advance(first, more, ids);
    }
  }
  while (!current->finished && current->advance(first, more, ids)) {
  }
  return current->done;
}

// Of plain text that is normalized and has no added token.
void Bpe::encode_split(std::string_view text, bool first, int chunks, std::vector<int32_t>& ids) const {
  if (chunks > 1 && splitter_.scanned() != nullptr) return void(encode_scanned(text, first, false, chunks, ids));
  splitter_.split(text, first, [&](std::string_view piece) { encode_piece(piece, ids); });
}

std::string Bpe::normalized(std::string_view text) const {
  std::string now(text);
  for (const auto& [kind, from, to] : normalizations_) {
    if (kind == Normalization::Kind::nfc) now = nfc(now);
    if (kind == Normalization::Kind::prepend && !now.empty()) now.insert(0, to);
    if (kind != Normalization::Kind::replace) continue;
    std::string next;
    size_t at = 0;
    for (size_t found; (found = now.find(from, at)) != std::string::npos; at = found + from.size())
      next.append(now, at, found - at), next += to;
    now = next.append(now, at);
  }
  return now;
}

// Between added tokens that are found before normalization.
void Bpe::encode_plain(std::string_view text, bool first, int chunks, std::vector<int32_t>& ids) const {
  const std::string copy = normalizations_.empty() ? "" : normalized(text);
  if (!normalizations_.empty()) text = copy;
  const auto plain = [&](size_t begin, size_t end) {
    encode_split(text.substr(begin, end - begin), first && begin == 0, chunks, ids);
  };
  normalized_added_.split(text, plain, [&](int32_t id) { ids.push_back(id); });
}

// The text's added tokens, and what is between them; with normalization only those that are found before it.
std::vector<Bpe::Part> Bpe::parts_of(std::string_view text) const {
  std::vector<Part> parts;
  const auto token = [&](int32_t id) { parts.push_back({0, 0, id}); };
  const auto plain = [&](size_t begin, size_t end) {
    if (!normalizations_.empty()) return parts.push_back({begin, end, -1});
    normalized_added_.split(
        text.substr(begin, end - begin),
        [&](size_t b, size_t e) {
          parts.push_back({begin + b, begin + e, -1});
        },
        token);
  };
  added_.split(text, plain, token);
  return parts;
}

std::vector<int32_t> Bpe::encode(std::string_view text) const {
  if (const size_t at = valid_utf8(text); at < text.size())
    fail(Exit::bad_data, "the text is not UTF-8: wrong at byte ", at, " of ", text.size());
  std::vector<int32_t> ids;
  if (text.size() < long_text || omp_in_parallel() || omp_get_max_threads() == 1) {
    added_.split(
        text, [&](size_t begin, size_t end) { encode_plain(text.substr(begin, end - begin), begin == 0, 1, ids); },
        [&](int32_t id) { ids.push_back(id); });
    return ids;
  }
  // Groups of short parts side by side; a long part by itself, with several threads.
  const std::vector<Part> parts = parts_of(text);
  const int chunks = 4 * omp_get_max_threads();
  const auto encode_part = [&](const Part& part, int threads, std::vector<int32_t>& out) {
    const std::string_view plain = text.substr(part.begin, part.end - part.begin);
    if (part.token >= 0) out.push_back(part.token);
    else if (!normalizations_.empty()) encode_plain(plain, part.begin == 0, threads, out);
    else encode_split(plain, part.begin == 0, threads, out);
  };
  std::vector<size_t> begins;
  size_t bytes = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t size = parts[i].end - parts[i].begin;
    if (i == 0 || bytes + size > long_text / 8) begins.push_back(i), bytes = 0;
    bytes += size;
  }
  begins.push_back(parts.size());
  std::vector<std::vector<int32_t>> out(begins.size());
  const auto is_long = [&](size_t g) { return parts[begins[g]].end - parts[begins[g]].begin >= long_text; };
  at_once(begins.size() - 1, [&](size_t g) {
    for (size_t i = begins[g]; i < begins[g + 1]; ++i)
      if (!is_long(g)) encode_part(parts[i], 1, out[g]);
  });
  for (size_t g = 0; g + 1 < begins.size(); ++g) {
    for (size_t i = begins[g]; is_long(g) && i < begins[g + 1]; ++i) encode_part(parts[i], chunks, out[g]);
    ids.insert(ids.end(), out[g].begin(), out[g].end());
    std::vector<int32_t>().swap(out[g]);
  }
  return ids;
}

size_t Bpe::encode_begin(std::string_view text, std::vector<int32_t>& ids) const {
  const Regex* regex = splitter_.scanned();
  if (!normalizations_.empty() || !added_.are_plain() || !normalized_added_.are_plain() || regex == nullptr ||
      !regex->goes_forward() || splitter_.knows_begin())
    return 0;
  // An added token that begins before `limit` is wholly here, and one that it meets as well.
  const size_t unsure = 2 * std::max(added_.longest(), normalized_added_.longest());
  size_t limit = text.size() > unsure ? text.size() - unsure : 0;
  while (limit > 0 && limit < text.size() && (text[limit] & 0xC0) == 0x80) --limit;
  size_t done = 0;
  for (const Part& part : parts_of(text)) {
    if (done >= limit || (part.token < 0 && part.begin >= limit)) break;
    if (part.token >= 0) {
      ids.push_back(part.token);
      done += texts_[static_cast<size_t>(part.token)].size();
      continue;
    }
    const std::string_view plain = text.substr(part.begin, std::min(part.end, limit) - part.begin);
    const bool more = part.end > limit;
    const int chunks = plain.size() < long_text || omp_in_parallel() ? 1 : 4 * omp_get_max_threads();
    done = part.begin + encode_scanned(plain, false, more, chunks, ids);
    if (more) break;
  }
  return done;
}

}  // namespace crossply
