// Which tokens are for validation: whole documents by their hashes, or the end of each file; always the share that was
// asked for, each token on one side, in order.
#include <cmath>
#include <map>
#include <numeric>

#include "data/validation_split.h"
#include "engine/rng.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Token i of the corpus is i, so that a split shows where each token went.
struct Corpus {
  const TempDir dir{memory_or_disk()};
  ShardWriter tokens{{dir.path, "encoded", ShardFormat::uint32, 1'000'000}, 0};
  ShardWriter table{{dir.path, "documents", ShardFormat::uint32, entry_words * 1000}, 0};
  std::vector<DocumentEntry> documents;
  int64_t files = 0;

  void add(int64_t file, uint64_t hash, int64_t count) {
    documents.push_back({hash, count, 3 * count, file});
    std::vector<int32_t> ids(static_cast<size_t>(count));
    std::iota(ids.begin(), ids.end(), static_cast<int32_t>(tokens.tokens()));
    tokens.append(ids);
    table.append(words_of(documents.back()));
    files = file + 1;
  }
};

std::vector<int32_t> all_of(const SplitPart& part) {
  std::vector<int32_t> ids;
  while (std::ssize(ids) < part.tokens()) {
    const std::vector<int32_t> more = part.writer->read(std::ssize(ids), 1 << 20);
    ids.insert(ids.end(), more.begin(), more.end());
  }
  return ids;
}

struct Result {
  bool by_document;
  double drawn, share;
  std::vector<int32_t> train, validation;
};

Result split_of(Corpus& corpus, double share) {
  corpus.tokens.flush();
  corpus.table.flush();
  const ValidationSplit split(corpus.table, corpus.files, share);
  SplitPart train, validation;
  const auto writer = [&](const char* name) {
    return std::make_unique<ShardWriter>(ShardLayout{corpus.dir.path, name, ShardFormat::uint32, 100'000}, 0);
  };
  train.writer = writer("train");
  validation.writer = writer("val");
  split_tokens(corpus.tokens, corpus.table, split, train, validation);
  CHECK(train.documents + validation.documents == std::ssize(corpus.documents));
  CHECK(train.bytes + validation.bytes == 3 * corpus.tokens.tokens());
  const Result result{split.by_document(), split.drawn(),
                      static_cast<double>(validation.tokens()) / static_cast<double>(corpus.tokens.tokens()),
                      all_of(train), all_of(validation)};
  REQUIRE(std::is_sorted(result.train.begin(), result.train.end()));
  REQUIRE(std::is_sorted(result.validation.begin(), result.validation.end()));
  std::vector<int32_t> both(result.train.size() + result.validation.size());
  std::merge(result.train.begin(), result.train.end(), result.validation.begin(), result.validation.end(),
             both.begin());
  std::vector<int32_t> want(static_cast<size_t>(corpus.tokens.tokens()));
  std::iota(want.begin(), want.end(), 0);
  REQUIRE(both == want);
  return result;
}

// The tokens of each document that are for validation.
std::vector<int64_t> held_out(const Corpus& corpus, const Result& result) {
  std::vector<int64_t> counts;
  int64_t place = 0;
  for (const DocumentEntry& d : corpus.documents) {
    const auto at = [&](int64_t token) {
      return std::lower_bound(result.validation.begin(), result.validation.end(), token);
    };
    counts.push_back(at(place + d.tokens) - at(place));
    place += d.tokens;
  }
  return counts;
}

uint64_t hash_of(int64_t number) { return mix_bits(static_cast<uint64_t>(number) + 1) >> 1; }

}  // namespace

TEST_CASE("validation split: of many documents, whole ones are drawn until the share is reached") {
  Corpus corpus;
  for (int64_t i = 0; i < 220'000; ++i)  // more words in the table than are read at once; every document three times
    corpus.add(i % 1000 == 0 ? corpus.files : std::max<int64_t>(0, corpus.files - 1), hash_of(i / 3),
               1 + static_cast<int64_t>(hash_of(i / 3) % 13));
  for (const double share : {0.001, 0.1, 0.5}) {
    CAPTURE(share);
    const Result result = split_of(corpus, share);
    CHECK(result.by_document);
    CHECK(std::abs(result.share - share) < 0.02 * share);
    CHECK(result.drawn == result.share);
    std::map<uint64_t, bool> sides;
    const std::vector<int64_t> counts = held_out(corpus, result);
    int64_t cut = 0, parted = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      const DocumentEntry& d = corpus.documents[i];
      cut += counts[i] != 0 && counts[i] != d.tokens ? 1 : 0;
      parted += sides.emplace(d.hash, counts[i] > 0).first->second != (counts[i] > 0) ? 1 : 0;
    }
    CHECK(cut == 0);
    CHECK(parted == 0);
  }
}

TEST_CASE("validation split: the hash decides, not the place") {
  Corpus forward, backward;
  for (int64_t i = 0; i < 1000; ++i) forward.add(0, hash_of(i), 10 + i % 7);
  for (int64_t i = 1000; i-- > 0;) backward.add(0, hash_of(i), 10 + i % 7);
  std::vector<int64_t> a = held_out(forward, split_of(forward, 0.1)), b = held_out(backward, split_of(backward, 0.1));
  std::reverse(b.begin(), b.end());
  CHECK(a == b);
}

TEST_CASE("validation split: a document that crosses the share is taken where that comes nearer") {
  Corpus corpus;
  for (const int64_t count : {95, 30, 875}) corpus.add(0, static_cast<uint64_t>(std::ssize(corpus.documents)), count);
  CHECK(held_out(corpus, split_of(corpus, 0.1)) == std::vector<int64_t>{95, 0, 0});
  CHECK(held_out(corpus, split_of(corpus, 0.12)) == std::vector<int64_t>{95, 30, 0});
}

TEST_CASE("validation split: beside a large file the end of each is cut, and small documents stay whole") {
  for (const int64_t place : {0, 100, 200}) {  // of the large file
    CAPTURE(place);
    Corpus corpus;
    for (int64_t i = 0; i < 201; ++i) corpus.add(i, hash_of(i), i == place ? 47'000 : 15);
    const Result result = split_of(corpus, 0.1);
    CHECK(!result.by_document);
    CHECK(result.drawn <= 0.061);
    CHECK(std::abs(result.share - 0.1) < 0.01);
    const std::vector<int64_t> counts = held_out(corpus, result);
    for (size_t i = 0; i < counts.size(); ++i)
      if (static_cast<int64_t>(i) != place) CHECK((counts[i] == 0 || counts[i] == 15));
    CHECK(counts[static_cast<size_t>(place)] > 4400);
    const int64_t last = 15 * place + 47'000 - 1;
    CHECK(std::binary_search(result.validation.begin(), result.validation.end(), last));
  }
}

TEST_CASE("validation split: a few files give their ends, in equal shares") {
  Corpus corpus;
  for (int64_t i = 0; i < 3; ++i) corpus.add(i, hash_of(i), 1000 * (i + 1));
  CHECK(held_out(corpus, split_of(corpus, 0.1)) == std::vector<int64_t>{100, 200, 300});
}

TEST_CASE("validation split: one document is cut in its middle, at the share to the token") {
  Corpus corpus;
  corpus.add(0, 5, 12'345);
  const Result tenth = split_of(corpus, 0.1), half = split_of(corpus, 0.5);
  CHECK(!tenth.by_document);
  CHECK(tenth.drawn == 0);
  CHECK(tenth.validation.size() == 1235);
  CHECK(tenth.validation.front() == 12'345 - 1235);
  CHECK(half.validation.size() == 6173);
}

TEST_CASE("validation split: where all documents are equal, the last ones are held out whole") {
  Corpus corpus;
  for (int64_t i = 0; i < 1000; ++i) corpus.add(0, 99, 7);
  for (const double share : {0.1, 0.5}) {
    const Result result = split_of(corpus, share);
    CHECK(!result.by_document);
    CHECK(std::ssize(result.validation) == std::llround(7000 * share));
    CHECK(result.validation.size() % 7 == 0);
  }
}

TEST_CASE("validation split: the cut is at a document's end that is near, else inside a document") {
  Corpus near, far;
  near.add(0, 1, 892), near.add(0, 2, 108);
  far.add(0, 1, 860), far.add(0, 2, 140);
  CHECK(held_out(near, split_of(near, 0.1)) == std::vector<int64_t>{0, 108});
  CHECK(held_out(far, split_of(far, 0.1)) == std::vector<int64_t>{0, 100});
}

TEST_CASE("validation split: less than half a token is none") {
  Corpus corpus;
  corpus.add(0, 1, 2), corpus.add(0, 2, 2);
  CHECK(split_of(corpus, 0.1).validation.empty());
  CHECK(split_of(corpus, 0.25).validation.size() == 1);
  CHECK(split_of(corpus, 0.5).validation.size() == 2);
}

TEST_CASE("validation split: whatever the documents are, the share is missed by a fifth at most") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    auto next = [&, n = uint64_t{0}](uint64_t below) mutable { return mix_bits(seed << 20 | ++n) % below; };
    Corpus corpus;
    const auto files = static_cast<int64_t>(1 + next(12));
    for (int64_t file = 0; file < files; ++file)
      for (uint64_t i = 1 + next(20); i > 0; --i)  // from 1 to 20,000 tokens; a few documents are equal
        corpus.add(file, next(4) == 0 ? 77 : next(UINT64_MAX) >> 1,
                   static_cast<int64_t>(1 + (next(2) << next(15)) + next(4)));
    for (const double share : {0.01, 0.1, 0.37, 0.5}) {
      CAPTURE(share);
      const double wanted = share * static_cast<double>(corpus.tokens.tokens());
      const Result result = split_of(corpus, share);
      const auto got = static_cast<double>(result.validation.size());
      CHECK(std::abs(got - wanted) <= std::max(0.2 * wanted, 0.5));
    }
  }
}
