// --shuffle documents: each epoch has all documents, in another order, cut into windows anew.
#include <set>

#include "data/document_shuffle.h"
#include "data/loader.h"
#include "data/shards.h"
#include "engine/rng.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t T = 7;
constexpr uint32_t eot = 5;
using Documents = std::vector<std::vector<int32_t>>;

// Documents of 1 to 40 tokens, of which one is the mark, and all others tell the document.
Documents some_documents(int64_t count, bool before, uint32_t first = 10) {
  Random random(3, first);
  Documents all;
  for (int64_t d = 0; d < count; ++d) {
    const int64_t rest = static_cast<int64_t>(random.below(40));
    std::vector<int32_t> document(static_cast<size_t>(rest), static_cast<int32_t>(first + d));
    document.insert(before ? document.begin() : document.end(), eot);
    all.push_back(document);
  }
  return all;
}

std::string write(const Scratch& scratch, const std::string& name, const Documents& documents) {
  std::vector<uint32_t> tokens;
  for (const auto& document : documents) tokens.insert(tokens.end(), document.begin(), document.end());
  write_shard(scratch.file(name), tokens, ShardFormat::uint16);
  return scratch.file(name);
}

DataOptions options_of(const Scratch& scratch, const std::string& mark) {
  DataOptions options;
  options.spec = scratch.file("train_*.bin"), options.val_spec = scratch.file("val_*.bin");
  options.seq_len = T, options.seed = 11;
  options.shuffle = "documents", options.documents = mark, options.eot = eot;
  return options;
}

// All tokens of an epoch, and the last target.
std::vector<int32_t> stream_of_epoch(const Source& source, int64_t epoch) {
  std::vector<int32_t> all, tokens(T), targets(T);
  for (int64_t i = 0; i < source.size(); ++i) {
    source.read_of_epoch(epoch, i, tokens.data(), targets.data());
    if (i > 0) CHECK_MESSAGE(all.back() == tokens[0], "window " << i << " does not begin with the last target");
    if (i > 0) all.pop_back();
    for (int64_t t = 0; t + 1 < T; ++t) CHECK(targets[t] == tokens[t + 1]);
    all.insert(all.end(), tokens.begin(), tokens.end());
    all.push_back(targets.back());
  }
  return all;
}

// Cut at the marks.
Documents documents_in(const std::vector<int32_t>& stream, bool before) {
  Documents all(1);
  for (const int32_t token : stream) {
    if (before && token == eot && !all.back().empty()) all.emplace_back();
    all.back().push_back(token);
    if (!before && token == eot) all.emplace_back();
  }
  return all;
}

}  // namespace

TEST_CASE("document shuffle: an epoch is every document once, in an order of its own") {
  const Scratch scratch;
  for (const std::string mark : {"after", "before", "auto"}) {
    for (const bool before : {false, true}) {
      if (mark != "auto" && before != (mark == "before")) continue;
      CAPTURE(mark);
      CAPTURE(before);
      const Documents first = some_documents(30, before), second = some_documents(25, before, 200);
      write(scratch, "train_1.bin", first), write(scratch, "train_2.bin", second), write(scratch, "val_1.bin", first);
      const Dataset data = open_dataset(options_of(scratch, mark));
      const Source& source = *data.train;
      Documents wanted = joined(first, second);
      CHECK(source.documents() == std::ssize(wanted));
      int64_t total = 0;
      for (const auto& document : wanted) total += std::ssize(document);
      CHECK(source.size() == (total - 1) / T);
      std::multiset<std::vector<int32_t>> all(wanted.begin(), wanted.end());
      std::set<std::vector<int32_t>> orders;
      for (int64_t epoch = 0; epoch < 4; ++epoch) {
        const std::vector<int32_t> stream = stream_of_epoch(source, epoch);
        CHECK(std::ssize(stream) == source.size() * T + 1);
        Documents found = documents_in(stream, before);
        found.pop_back();  // the last one may be cut
        std::multiset<std::vector<int32_t>> left = all;
        for (const auto& document : found) {
          const auto one = left.find(document);
          CHECK_MESSAGE(one != left.end(), "a document that is cut, or there twice");
          if (one != left.end()) left.erase(one);
        }
        int64_t tokens_left = 0;
        for (const auto& document : left) tokens_left += std::ssize(document);
        CHECK(tokens_left <= T + 41);
        orders.insert(stream);
      }
      CHECK(orders.size() == 4);
      DataOptions other = options_of(scratch, mark);
      CHECK(orders.contains(stream_of_epoch(*open_dataset(other).train, 2)));
      other.seed = 12;
      CHECK(!orders.contains(stream_of_epoch(*open_dataset(other).train, 2)));
    }
  }
}

TEST_CASE("document shuffle: the position alone restores the stream, and without epochs the files' order remains") {
  const Scratch scratch;
  const Documents documents = some_documents(40, false);
  write(scratch, "train_1.bin", documents), write(scratch, "val_1.bin", documents);
  const Dataset data = open_dataset(options_of(scratch, "after"));
  std::vector<int32_t> file;
  for (const auto& document : documents) file.insert(file.end(), document.begin(), document.end());
  std::vector<int32_t> tokens(3 * T), targets(3 * T), again(3 * T);
  for (int64_t i = 0; i < data.train->size(); ++i) {
    data.train->read(i, tokens.data(), targets.data());
    CHECK(std::equal(tokens.begin(), tokens.begin() + T, file.begin() + i * T));
    CHECK(std::equal(targets.begin(), targets.begin() + T, file.begin() + i * T + 1));
  }
  Loader loader(*data.train, 3, 5, true), other(*data.train, 3, 5, true);
  for (int64_t step = 0; step < data.train->size(); ++step) {  // three epochs
    const int64_t position = loader.position();
    loader.next(tokens.data(), targets.data());
    other.seek(position + 300), other.next(again.data(), targets.data());
    other.seek(position), other.next(again.data(), targets.data());
    CHECK(again == tokens);
  }
}

TEST_CASE("document shuffle: a shard of which the end is for testing lends no token of that part") {
  const Scratch scratch;
  write(scratch, "one.bin", some_documents(200, false));
  DataOptions options = options_of(scratch, "after");
  options.spec = scratch.file("one.bin"), options.val_spec = "";
  const Dataset data = open_dataset(options);
  options.shuffle = "windows";
  const Dataset plain = open_dataset(options);
  CHECK(data.train->size() == plain.train->size());
  std::vector<int32_t> a(T), b(T), c(T), d(T);
  for (int64_t i = 0; i < plain.train->size(); ++i) {
    data.train->read(i, a.data(), b.data()), plain.train->read(i, c.data(), d.data());
    CHECK((a == c && b == d));
  }
}

TEST_CASE("document shuffle: text with an end-of-text token, bytes with a mark of the user's") {
  const Scratch scratch;
  std::string text;
  for (int i = 0; i < 60; ++i)
    text += std::string(static_cast<size_t>(1 + i % 9), static_cast<char>('a' + i % 26)) + "\n";
  write_text(scratch.file("text.txt"), text);
  DataOptions options;
  options.spec = "text:" + scratch.file("text.txt"), options.seq_len = T;
  options.shuffle = "documents", options.eot = '\n';
  const Dataset data = open_dataset(options);
  const int64_t windows = std::ssize(text) / (T + 1), tokens = (windows - windows / 10) * (T + 1);
  CHECK(data.train->size() == (tokens - 1) / T);
  CHECK(data.train->documents() == std::count(text.begin(), text.begin() + tokens - 1, '\n') + 1);
  const Documents found = documents_in(stream_of_epoch(*data.train, 0), false);
  for (size_t i = 0; i + 1 < found.size(); ++i)
    CHECK(std::set<int32_t>(found[i].begin(), found[i].end() - 1).size() <= 1);
}

TEST_CASE("document shuffle: what has no documents is refused by name") {
  const Scratch scratch;
  write(scratch, "train_1.bin", some_documents(30, false)), write(scratch, "val_1.bin", some_documents(9, false));
  const auto run = [&](const std::string& words) {
    return train(scratch, split_words("--width 16 --ffn 24 --layers 1 --heads 2 --batch 4 --steps 3 --vocab 300 " +
                                      words + " --out " + scratch.file("run")));
  };
  const std::string shards = "--seq 7 --data " + scratch.path.string() + " ";
  check_outcome(run(shards + "--shuffle documents"), Exit::usage, "--eot ID");
  check_outcome(run(shards + "--shuffle documents --eot 299"), Exit::usage, "is one document");
  check_outcome(run(shards + "--shuffle documents --eot 299 --dry-run"), Exit::usage, "is one document");
  check_outcome(run("--data arith:3 --shuffle documents"), Exit::usage, "is for files");
  check_outcome(run(shards + "--eot 5"), Exit::usage, "--shuffle documents");
  CHECK(!path_exists(scratch.file("run")));
  check_outcome(run(shards + "--shuffle documents --eot 5"), Exit::done, "each epoch 30 documents in another order");
}

TEST_CASE("document shuffle: a run that is stopped and resumed in another epoch has the same bits") {
  const Scratch scratch;
  write(scratch, "train_1.bin", some_documents(30, true)), write(scratch, "val_1.bin", some_documents(9, true));
  const auto words = [&](const std::string& more) {
    return split_words(
        "--width 16 --ffn 24 --layers 1 --heads 2 --batch 4 --seq 7 --vocab 300 --shuffle documents "
        "--eot 5 --lr 0.01 --warmup 1 --schedule constant --eval-every 1 --data " +
        scratch.path.string() + " " + more);
  };
  const std::string whole = scratch.file("whole"), parts = scratch.file("parts");
  check_outcome(train(scratch, words("--steps 50 --out " + whole)), Exit::done, "epochs");
  check_outcome(train(scratch, words("--steps 31 --out " + parts)), Exit::done, "epochs");
  check_outcome(train(scratch, {"--resume", "--steps", "50", "--out", parts}), Exit::done, "resumed after step 31");
  CHECK(timeless(whole + "/metrics.jsonl") == timeless(parts + "/metrics.jsonl"));
  check_outcome(train(scratch, {"--resume", "--steps", "60", "--eot", "6", "--out", parts}), Exit::usage, "eot");
}
