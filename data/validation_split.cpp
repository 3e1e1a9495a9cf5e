#include "data/validation_split.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "cli/stop.h"

namespace crossply {
namespace {

constexpr double max_miss = 0.2;    // of the share; beyond it files are cut
constexpr double near_end = 0.1;    // of all tokens for validation: how far off a document's end may lie
constexpr int bucket_bits = 16;     // of a hash
constexpr int64_t piece = 1 << 20;  // tokens, or words of the table

// The next tokens or words; throws Exit::stopped after a signal.
std::vector<int32_t> read_piece(const ShardWriter& from, int64_t at, int64_t count) {
  if (stop_requested())
    fail(Exit::stopped, "stopped while choosing the tokens for validation; the same command goes on");
  return from.read(at, std::min(count, from.tokens() - at));
}

template <class F>
void for_each_entry(const ShardWriter& table, F&& work) {
  for (int64_t at = 0; at < table.tokens();) {
    const std::vector<int32_t> words = read_piece(table, at, piece / entry_words * entry_words);
    for (size_t i = 0; i + entry_words <= words.size(); i += entry_words) {
      const auto word = [&](size_t j) { return static_cast<uint32_t>(words[i + j]); };
      work(DocumentEntry{uint64_t{word(1)} << 32 | word(0), word(2), word(3), word(4)});
    }
    at += std::ssize(words);
  }
}

// Reads tokens in order.
struct Copier {
  const ShardWriter& from;
  int64_t at = 0;
  std::vector<int32_t> read = {};
  std::ptrdiff_t used = 0;

  void copy(int64_t count, ShardWriter& to) {
    while (count > 0) {
      if (used == std::ssize(read)) {
        CHECK_THAT(at < from.tokens(), "the documents have more than these ", at, " tokens");
        read = read_piece(from, at, piece);
        at += std::ssize(read);
        used = 0;
      }
      const auto n = std::min<int64_t>(count, std::ssize(read) - used);
      to.append({read.begin() + used, read.begin() + used + n});
      used += n, count -= n;
    }
  }
};

}  // namespace

std::vector<int32_t> words_of(const DocumentEntry& entry) {
  const auto word = [](auto value) { return static_cast<int32_t>(static_cast<uint32_t>(value)); };
  return {word(entry.hash), word(entry.hash >> 32), word(entry.tokens), word(entry.bytes), word(entry.file)};
}

ValidationSplit::ValidationSplit(const ShardWriter& table, int64_t files, double share) {
  int64_t all = 0;
  for_each_entry(table, [&](const DocumentEntry& d) { all += d.tokens; });
  const double wanted = share * static_cast<double>(all);
  if (std::llround(wanted) == 0) return;
  const auto drawn = static_cast<double>(draw(table, wanted));
  drawn_ = drawn / static_cast<double>(all);
  if (std::abs(drawn - wanted) > max_miss * wanted) cut(table, files, share, wanted);
}

// Of hashes in order: first whole buckets of them, then, in the one in which the share is reached, each hash. The
// document that crosses it is taken where that comes nearer.
int64_t ValidationSplit::draw(const ShardWriter& table, double wanted) {
  constexpr int shift = 63 - bucket_bits;
  std::vector<int64_t> buckets(1 << bucket_bits);
  for_each_entry(table, [&](const DocumentEntry& d) { buckets[d.hash >> shift] += d.tokens; });
  int64_t before = 0;
  uint64_t bucket = 0;
  while (bucket + 1 < buckets.size() && static_cast<double>(before + buckets[bucket]) <= wanted)
    before += buckets[bucket++];
  std::map<uint64_t, int64_t> tokens;
  for_each_entry(table, [&](const DocumentEntry& d) {
    if (d.hash >> shift == bucket) tokens[d.hash] += d.tokens;
  });
  limit_ = bucket << shift;
  for (const auto& [hash, count] : tokens) {
    const double missing = wanted - static_cast<double>(before);
    if (static_cast<double>(count) - missing > missing) break;
    before += count;
    limit_ = hash + 1;
  }
  return before;
}

void ValidationSplit::cut(const ShardWriter& table, int64_t files, double share, double wanted) {
  std::vector<int64_t> sizes(static_cast<size_t>(files));
  for_each_entry(table, [&](const DocumentEntry& d) { sizes.at(static_cast<size_t>(d.file)) += d.tokens; });
  ends_ = sizes;
  int64_t file = -1, before = 0, taken = 0;  // tokens of the files up to this one; of them, for validation
  int64_t ideal = 0, nearest = 0, place = 0;
  const auto close = [&] {
    if (file < 0) return;
    int64_t& end = ends_[static_cast<size_t>(file)];
    const bool is_near = static_cast<double>(std::abs(nearest - ideal)) <= near_end * wanted;
    taken += end;
    end = is_near ? nearest : ideal;
    taken -= end;
  };
  for_each_entry(table, [&](const DocumentEntry& d) {
    if (d.file != file) {
      close();
      file = d.file, place = nearest = 0;
      const int64_t size = sizes[static_cast<size_t>(file)];
      before += size;
      const int64_t missing = std::llround(share * static_cast<double>(before)) - taken;
      ideal = size - std::clamp<int64_t>(missing, 0, size);
    }
    place += d.tokens;
    if (std::abs(place - ideal) < std::abs(nearest - ideal)) nearest = place;
  });
  close();
}

int64_t ValidationSplit::train_tokens(const DocumentEntry& document, int64_t place) const {
  if (by_document()) return document.hash < limit_ ? 0 : document.tokens;
  return std::clamp<int64_t>(ends_[static_cast<size_t>(document.file)] - place, 0, document.tokens);
}

void split_tokens(const ShardWriter& tokens, const ShardWriter& table, const ValidationSplit& split, SplitPart& train,
                  SplitPart& validation) {
  Copier copier{tokens};
  int64_t file = -1, place = 0;
  for_each_entry(table, [&](const DocumentEntry& d) {
    if (d.file != file) file = d.file, place = 0;
    const int64_t first = split.train_tokens(d, place);
    copier.copy(first, *train.writer);
    copier.copy(d.tokens - first, *validation.writer);
    SplitPart& part = first > 0 ? train : validation;
    ++part.documents, part.bytes += d.bytes;
    place += d.tokens;
  });
  train.writer->flush();
  validation.writer->flush();
}

}  // namespace crossply
