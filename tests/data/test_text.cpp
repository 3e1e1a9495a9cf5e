#include "tests/support/data_check.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("data: a title names the file or the directory, without what is around it") {
  CHECK(short_name("text:a/b/c.txt") == "text:c.txt");
  CHECK(short_name("a/tokens/train_*.bin") == "tokens");
  CHECK(short_name("uint16:a/b.bin") == "uint16:b.bin");
  CHECK(short_name("train_*.bin") == "train_*.bin");
  CHECK(short_name("arith:4") == "arith:4");
}

TEST_CASE("text: consecutive windows of bytes, the last tenth for testing") {
  const TempDir dir;
  std::string bytes;
  for (int i = 0; i < 255; ++i) bytes += static_cast<char>(255 - i);  // 19 windows of 13, and a rest of 8
  write_text(dir.file("a"), bytes);
  const Dataset data = open_dataset(data_options("text:" + dir.file("a"), 12));
  CHECK((data.train->size() == 18 && data.test->size() == 1));
  CHECK((data.train->seq_len() == 12 && data.train->vocab_size() == 256 && data.tokenizer.vocab_size() == 256));
  CHECK(data.train->task() == nullptr);
  for (int64_t i = 0; i < 19; ++i) {
    const Sample s = i < 18 ? read_sample(*data.train, i) : read_sample(*data.test, i - 18);
    for (int64_t t = 0; t < 12; ++t) {
      CHECK(s.tokens[static_cast<size_t>(t)] == 255 - (13 * i + t));
      CHECK(s.targets[static_cast<size_t>(t)] == 255 - (13 * i + t + 1));
    }
  }
  CHECK(data.tokenizer.decode(data.tokenizer.encode(bytes)) == bytes);
  data.train->check_tokens(256);
  check_fails(Exit::bad_data, {"256", "100"}, [&] { data.train->check_tokens(100); });
  check_fails(Exit::internal, {"window 18 of 18"}, [&] { read_sample(*data.train, 18); });
}

TEST_CASE("text: the whole of a file, every byte but the first scored once") {
  const TempDir dir;
  for (const int64_t N : {2, 3, 12, 13, 14, 25, 26, 100}) {
    std::string bytes;
    for (int64_t i = 0; i < N; ++i) bytes += static_cast<char>(i);
    write_text(dir.file("a"), bytes);
    DataOptions o = data_options("text:" + dir.file("a"), 12);
    o.whole = true;
    const Dataset data = open_dataset(o);
    CHECK((data.train == nullptr && data.test->seq_len() == std::min<int64_t>(12, N - 1)));
    CHECK(data.test->file_tokens() == N);
    check_scored_once(*data.test, 1, N);
  }
  write_text(dir.file("one"), "x");
  DataOptions o = data_options("text:" + dir.file("one"), 12);
  o.whole = true;
  check_fails(Exit::bad_data, {"one", "1 bytes"}, [&] { open_dataset(o); });
}

TEST_CASE("text: random windows begin anywhere in their split") {
  const TempDir dir;
  std::string bytes;
  for (int i = 0; i < 15; ++i) bytes += static_cast<char>(i);  // 3 windows of 4 + 1
  write_text(dir.file("a"), bytes);
  DataOptions o = data_options("text:" + dir.file("a"), 4);
  check_offsets(*open_dataset(o).train, {0, 1, 2, 3, 4, 5});
  check_offsets(*open_dataset(o).test, {10});
  o.whole = true;
  check_offsets(*open_dataset(o).test, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  o.test_samples = 2;
  check_offsets(*open_dataset(o).test, {0, 1, 2, 3, 4});
}

TEST_CASE("text: sizes that are too small, too many samples, missing files, unknown sources") {
  const TempDir dir;
  write_text(dir.file("two"), std::string(20, 'x'));
  write_text(dir.file("short"), std::string(19, 'x'));
  write_text(dir.file("empty"), "");
  const Dataset two = open_dataset(data_options("text:" + dir.file("two"), 9));
  CHECK((two.train->size() == 1 && two.test->size() == 1));
  check_fails(Exit::bad_data, {"short", "19 bytes", "at least 20"},
              [&] { open_dataset(data_options("text:" + dir.file("short"), 9)); });
  check_fails(Exit::bad_data, {"empty", "0 bytes"},
              [&] { open_dataset(data_options("text:" + dir.file("empty"), 9)); });
  check_fails(Exit::no_input, {"missing"}, [&] { open_dataset(data_options("text:" + dir.file("missing"), 9)); });
  check_fails(Exit::no_input, {dir.path.string(), ".txt", ".md"},
              [&] { open_dataset(data_options("text:" + dir.path.string(), 9)); });
  DataOptions o = data_options("text:" + dir.file("two"), 9);
  o.train_samples = 2;
  check_fails(Exit::usage, {"asked for 2 train samples", "only 1"}, [&] { open_dataset(o); });
  o.train_samples = -1;
  check_fails(Exit::usage, {"negative"}, [&] { open_dataset(o); });
  o.train_samples = 1, o.val_spec = "x.bin";
  check_fails(Exit::usage, {"token shards, not of"}, [&] { open_dataset(o); });
  for (const char* spec : {"", "arith", "arith:2", "arith:44", "prosqa:1", "corpus.txt"}) {
    DataOptions unknown;
    unknown.spec = spec;
    check_fails(Exit::usage, {"arith:3", "6", "prosqa", "text:", ".bin"}, [&] { open_dataset(unknown); });
  }
}

TEST_CASE("text: a file that is cut short while it is used is an error, not a signal") {
  const TempDir dir;
  write_text(dir.file("a"), std::string(100000, 'x'));
  const Dataset data = open_dataset(data_options("text:" + dir.file("a"), 9));
  std::filesystem::resize_file(dir.file("a"), 15);
  CHECK(read_sample(*data.train, 0).tokens == std::vector<int32_t>(9, 'x'));
  check_fails(Exit::io, {"shortened"}, [&] { read_sample(*data.train, 1); });
  check_fails(Exit::io, {"shortened"}, [&] { read_sample(*data.test, 0); });
}

TEST_CASE("text: the digest changes with any byte") {
  const TempDir dir;
  const std::string text(3'000'001, 'x');
  const auto digest = [&](const std::string& bytes) {
    write_text(dir.file("a"), bytes);
    return open_dataset(data_options("text:" + dir.file("a"), 9)).train->digest();
  };
  const uint64_t want = digest(text);
  CHECK(digest(text) == want);
  for (const size_t place : {size_t{0}, size_t{1 << 20}, text.size() - 1}) {
    std::string other = text;
    other[place] = 'y';
    CHECK(digest(other) != want);
  }
  CHECK(digest(text.substr(1)) != want);
  CHECK(digest(std::string(64, '\0')) != digest(std::string(65, '\0')));
}

TEST_CASE("data: the files behind a spec") {
  CHECK(data_files("text:corpus.bin") == std::vector<std::string>{"corpus.bin"});
  CHECK((data_files("arith:3").empty() && data_files("prosqa").empty() && data_files("").empty()));
}

TEST_CASE("data: a sequence length beyond any model's is refused before it is added to") {
  const TempDir dir;
  write_text(dir.file("a"), std::string(100, 'x'));
  for (const int64_t T : {int64_t{1} << 31, INT64_MAX / 2, INT64_MAX})
    check_fails(Exit::usage, {std::to_string(T)}, [&] { open_dataset(data_options("text:" + dir.file("a"), T)); });
}

namespace {

// All tokens of a text, in windows of one and a target.
std::vector<int32_t> all_tokens(DataOptions o) {
  o.whole = true, o.seq_len = 1;
  const Dataset data = open_dataset(o);
  std::vector<int32_t> tokens = {read_sample(*data.test, 0).tokens[0]};
  for (int64_t i = 0; i < data.test->size(); ++i) tokens.push_back(read_sample(*data.test, i).targets[0]);
  return tokens;
}

std::vector<int32_t> joined(const Tokenizer& tokenizer, const std::vector<std::string>& texts) {
  std::vector<int32_t> ids;
  for (const std::string& text : texts) {
    const std::vector<int32_t> more = tokenizer.encode(text);
    ids.insert(ids.end(), more.begin(), more.end());
    if (tokenizer.eos() >= 0) ids.push_back(tokenizer.eos());
  }
  return ids;
}

}  // namespace

TEST_CASE("text: a directory or a pattern is its files, one behind the other") {
  const TempDir dir;
  std::filesystem::create_directories(dir.file("t/deep"));
  write_text(dir.file("t/b.txt"), "second");
  write_text(dir.file("t/a.md"), "first");
  write_text(dir.file("t/deep/c.jsonl"), "{\"text\": \"third\"}\n \n{\"id\": 1, \"text\": \"fourth\"}");
  write_text(dir.file("t/image.png"), "no");
  write_text(dir.file("t/.hidden.txt"), "no");
  const std::vector<std::string> files = {dir.file("t/a.md"), dir.file("t/b.txt"), dir.file("t/deep/c.jsonl")};
  CHECK(data_files("text:" + dir.file("t")) == files);
  CHECK(data_files("text:" + dir.file("t/*.txt")) == std::vector{files[1]});
  CHECK(data_files("text:" + dir.file("t*")) == files);
  const std::vector<std::string> texts = {"first", "second", "third", "fourth"};
  CHECK(all_tokens(data_options("text:" + dir.file("t"), 1)) == joined(Tokenizer::bytes(), texts));
  // one file without a tokenizer is what it is
  const std::vector<int32_t> of_lines = joined(Tokenizer::bytes(), {"third", "fourth"});  // never those of the JSON
  CHECK(all_tokens(data_options("text:" + files[2], 1)) == of_lines);
  write_text(dir.file("JSON"), read_text(files[2]));
  CHECK(all_tokens(data_options("text:" + dir.file("JSON"), 1)) == of_lines);
  std::filesystem::copy(dir.file("JSON"), dir.file("JSON.txt"));
  CHECK(all_tokens(data_options("text:" + dir.file("JSON.txt"), 1)) ==
        joined(Tokenizer::bytes(), {read_text(files[2])}));
  DataOptions o = data_options("text:" + dir.file("t"), 1);
  o.tokenizer = write_tiny_bpe(dir.path.string());
  const Tokenizer bpe = Tokenizer::read(o.tokenizer);
  CHECK(all_tokens(o) == joined(bpe, texts));
  o.tokenizer.clear(), o.of_model = bpe;
  CHECK(all_tokens(o) == joined(bpe, texts));
  check_fails(Exit::no_input, {"none"}, [&] { open_dataset(data_options("text:" + dir.file("none*"), 1)); });
}

TEST_CASE("text: what is encoded and long is read across its blocks") {
  const TempDir dir;
  std::filesystem::create_directories(dir.file("t"));
  std::string text;
  for (uint32_t i = 0; i < 2'100'000; ++i) text += static_cast<char>('!' + i * 2654435761u % 90);
  write_text(dir.file("t/a.txt"), text.substr(0, 1'500'000));
  write_text(dir.file("t/b.txt"), text.substr(1'500'000));
  const Dataset data = open_dataset(data_options("text:" + dir.file("t"), 999));
  REQUIRE(data.train->file_tokens() == 2'100'000);
  for (const int64_t i : {0, 1047, 1048, 1049, 1500}) {
    const Sample s = read_sample(*data.train, i);
    CHECK(std::equal(s.tokens.begin(), s.tokens.end(), text.begin() + 1000 * i));
    CHECK(std::equal(s.targets.begin(), s.targets.end(), text.begin() + 1000 * i + 1));
  }
}

TEST_CASE("text: tokens of a tokenizer are cut like bytes, and any change shows") {
  const TempDir dir;
  std::string text;
  for (int i = 0; i < 100; ++i) text += "the cat ";
  write_text(dir.file("a"), text);
  DataOptions o = data_options("text:" + dir.file("a"), 9);
  o.tokenizer = dir.path.string();
  write_tiny_bpe(o.tokenizer);
  const Dataset data = open_dataset(o);
  const std::vector<int32_t> ids = joined(Tokenizer::read(o.tokenizer), {text});
  REQUIRE((data.tokenizer.is_bpe() && data.train->vocab_size() == 259));
  REQUIRE(data.train->file_tokens() == std::ssize(ids));
  const int64_t windows = std::ssize(ids) / 10, test = windows / 10;
  REQUIRE((data.train->size() == windows - test && data.test->size() == test));
  for (int64_t i = 0; i < windows; ++i) {
    const Sample s = i < windows - test ? read_sample(*data.train, i) : read_sample(*data.test, i - (windows - test));
    CHECK(std::equal(s.tokens.begin(), s.tokens.end(), ids.begin() + 10 * i));
    CHECK(std::equal(s.targets.begin(), s.targets.end(), ids.begin() + 10 * i + 1));
  }
  const uint64_t digest = data.train->digest();
  CHECK((digest == data.test->digest() && digest == open_dataset(o).train->digest()));
  write_text(dir.file("a"), text + "!");
  CHECK(open_dataset(o).train->digest() != digest);
  write_text(dir.file("a"), text + "\xff");
  check_fails(Exit::bad_data, {dir.file("a"), "not UTF-8", str("byte ", text.size())}, [&] { open_dataset(o); });
  o.spec = "arith:3";
  check_fails(Exit::usage, {"--tokenizer", "text:", "own words"}, [&] { open_dataset(o); });
  o.spec = dir.file("x.bin");
  check_fails(Exit::usage, {"--tokenizer", "know their tokenizer"}, [&] { open_dataset(o); });
}
