#include "data/shards.h"

#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <map>
#include <numeric>

#include "data/shard_writer.h"
#include "tests/support/child.h"
#include "tests/support/data_check.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Tokens that say where they stand: first, first + 1, ...
std::vector<uint32_t> counting(uint32_t first, size_t n) {
  std::vector<uint32_t> tokens(n);
  for (size_t i = 0; i < n; ++i) tokens[i] = first + static_cast<uint32_t>(i);
  return tokens;
}

void check_window(const Source& source, int64_t index, int32_t first) {
  const Sample s = read_sample(source, index);
  for (size_t t = 0; t < s.tokens.size(); ++t) {
    CHECK(s.tokens[t] == first + static_cast<int32_t>(t));
    CHECK(s.targets[t] == first + static_cast<int32_t>(t) + 1);
  }
}

// A valid file of 20 uint16 tokens with one int32 of its header replaced.
std::string with_header(size_t place, int32_t value) {
  const TempDir dir;
  write_shard(dir.file("x.bin"), counting(0, 20), ShardFormat::uint16);
  std::string bytes = read_text(dir.file("x.bin"));
  std::memcpy(bytes.data() + 4 * place, &value, 4);
  return bytes;
}

}  // namespace

TEST_CASE("shards: the bytes of both formats") {
  const TempDir dir;
  write_shard(dir.file("a.bin"), {1, 0xABCD}, ShardFormat::uint16);
  write_shard(dir.file("b.bin"), {1, 0x01020304}, ShardFormat::uint32);
  const std::string a = read_text(dir.file("a.bin")), b = read_text(dir.file("b.bin"));
  REQUIRE((a.size() == 1028 && b.size() == 1032));
  const auto header = [](const std::string& bytes, size_t i) {
    int32_t value = 0;
    std::memcpy(&value, bytes.data() + 4 * i, 4);
    return value;
  };
  CHECK((header(a, 0) == 20240520 && header(a, 1) == 1 && header(a, 2) == 2));
  CHECK((header(a, 3) == 0 && header(a, 255) == 0));
  CHECK((header(b, 0) == 20240801 && header(b, 1) == 7 && header(b, 2) == 2));
  CHECK(a.substr(1024) == std::string("\x01\x00\xCD\xAB", 4));
  CHECK(b.substr(1024) == std::string("\x01\x00\x00\x00\x04\x03\x02\x01", 8));
  CHECK(!std::filesystem::exists(dir.file("a.bin.tmp")));
  check_fails(Exit::internal, {"token 1 is 65536"}, [&] {
    write_shard(dir.file("c.bin"), {0, 65536}, ShardFormat::uint16);
  });
  check_fails(Exit::io, {"nowhere"}, [&] { write_shard(dir.file("nowhere/c.bin"), {0}, ShardFormat::uint16); });
  CHECK(!std::filesystem::exists(dir.file("c.bin")));
}

TEST_CASE("shards: windows follow each other within a file and never straddle two") {
  for (ShardFormat format : {ShardFormat::uint16, ShardFormat::uint32}) {
    const TempDir dir;
    write_shard(dir.file("t_2.bin"), counting(2000, 31), format);  // 3 windows of 10, to the last token
    write_shard(dir.file("t_1.bin"), counting(1000, 30), format);  // 2 windows: the third lacks its last target
    write_shard(dir.file("t_3.bin"), counting(3000, 10), format);  // none
    write_shard(dir.file("t_4.bin"), counting(4000, 11), format);  // 1
    write_shard(dir.file("t_5.bin"), {}, format);
    write_shard(dir.file("v_1.bin"), counting(5000, 21), format);
    const Dataset data = open_dataset(data_options(dir.file("t_*.bin"), 10, dir.file("v_*.bin")));
    REQUIRE((data.train->size() == 6 && data.test->size() == 2));
    const std::vector<int32_t> firsts = {1000, 1010, 2000, 2010, 2020, 4000};
    for (int64_t i = 0; i < 6; ++i) check_window(*data.train, i, firsts[static_cast<size_t>(i)]);
    for (int64_t i = 0; i < 2; ++i) check_window(*data.test, i, static_cast<int32_t>(5000 + 10 * i));
    CHECK((data.train->vocab_size() == 0 && data.tokenizer.vocab_size() == 0 && data.train->task() == nullptr));
    check_fails(Exit::internal, {"window 6 of 6"}, [&] { read_sample(*data.train, 6); });

    const Dataset split = open_dataset(data_options(dir.file("t_*.bin"), 10));
    CHECK((split.train->size() == 5 && split.test->size() == 1));
    check_window(*split.train, 4, 2020);
    check_window(*split.test, 0, 4000);
  }
}

TEST_CASE("shards: the last hundredth is for testing, and fewer samples can be asked for") {
  const TempDir dir;
  write_shard(dir.file("a.bin"), counting(0, 5001), ShardFormat::uint16);
  DataOptions o = data_options(dir.file("a.bin"), 10);
  const Dataset data = open_dataset(o);
  CHECK((data.train->size() == 495 && data.test->size() == 5));
  check_window(*data.test, 0, 4950);
  o.train_samples = 7, o.test_samples = 2;
  const Dataset fewer = open_dataset(o);
  CHECK((fewer.train->size() == 7 && fewer.test->size() == 2));
  check_window(*fewer.test, 1, 4960);
  o.test_samples = 6;
  check_fails(Exit::usage, {"6 test samples", "only 5"}, [&] { open_dataset(o); });
  write_shard(dir.file("b.bin"), counting(0, 11), ShardFormat::uint16);
  check_fails(Exit::bad_data, {"one window"}, [&] { open_dataset(data_options(dir.file("b.bin"), 10)); });
  check_fails(Exit::bad_data, {"12 tokens of one window"}, [&] { open_dataset(data_options(dir.file("b.bin"), 11)); });
  write_shard(dir.file("none.bin"), {}, ShardFormat::uint16);
  check_fails(Exit::bad_data, {"none.bin", "no shard has the 11 tokens", "smaller --seq"},
              [&] { open_dataset(data_options(dir.file("a.bin"), 10, dir.file("none.bin"))); });
}

TEST_CASE("shards: random windows begin anywhere in their split, and straddle neither two splits nor two files") {
  const TempDir dir;
  write_shard(dir.file("t_1.bin"), counting(0, 14), ShardFormat::uint16);    // 2 windows of 5, a rest of 3
  write_shard(dir.file("t_2.bin"), counting(100, 4), ShardFormat::uint16);   // none
  write_shard(dir.file("t_3.bin"), counting(200, 11), ShardFormat::uint16);  // 2 windows, the last one for testing
  const Dataset data = open_dataset(data_options(dir.file("t_*.bin"), 5));
  REQUIRE((data.train->size() == 3 && data.test->size() == 1));
  check_offsets(*data.train, {0, 1, 2, 3, 4, 5, 200});
  check_offsets(*data.test, {205});
  check_fails(Exit::internal, {"offset 1 of 1"}, [&] {
    std::vector<int32_t> room(10);
    data.test->read_at(1, 5, room.data(), room.data() + 5);
  });
  DataOptions o = data_options(dir.file("t_[13].bin"), 5);
  o.whole = true;
  check_offsets(*open_dataset(o).test, {0, 1, 2, 3, 4, 5, 6, 7, 8, 200, 201, 202, 203, 204, 205});
  o.spec = dir.file("t_[12].bin");
  const Dataset padded = open_dataset(o);  // what is shorter than a window is one, padded
  REQUIRE(padded.test->offsets(padded.test->seq_len()) == 10);
  std::vector<int32_t> tokens(5), targets(5);
  padded.test->read_at(9, padded.test->seq_len(), tokens.data(), targets.data());
  CHECK(tokens == std::vector<int32_t>{100, 101, 102, 0, 0});
  CHECK(targets == std::vector<int32_t>{101, 102, 103, -1, -1});

  const RandomSamples random(*data.train, 700, 8), same(*data.train, 700, 8), other(*data.train, 700, 9);
  CHECK((random.size() == 700 && random.seq_len() == 5));
  std::map<int32_t, int> drawn;
  int differ = 0;
  for (int64_t i = 0; i < 700; ++i) {
    const Sample sample = read_sample(random, i);
    CHECK(sample == read_sample(same, i));
    differ += sample == read_sample(other, i) ? 0 : 1;
    ++drawn[sample.tokens[0]];
  }
  CHECK(drawn.size() == 7);
  for (const auto& [first, count] : drawn) CHECK((count > 60 && count < 140));  // 100 each, 9 the standard deviation
  CHECK(differ > 500);
}

TEST_CASE("shards: the whole of all files, every token but each one's first scored once") {
  const TempDir dir;
  write_shard(dir.file("a.bin"), counting(0, 25), ShardFormat::uint16);
  write_shard(dir.file("b.bin"), counting(25, 3), ShardFormat::uint16);  // shorter than a window
  write_shard(dir.file("c.bin"), counting(28, 1), ShardFormat::uint16);  // nothing to score
  write_shard(dir.file("d.bin"), counting(29, 12), ShardFormat::uint16);
  DataOptions o = data_options(dir.file("?.bin"), 10);
  o.whole = true;
  const Dataset data = open_dataset(o);
  CHECK((data.train == nullptr && data.test->size() == 3 + 1 + 2 && data.test->file_tokens() == 41));
  check_scored_once(*data.test, 1, 41, {25, 28, 29});
  check_fails(Exit::bad_data, {"token 11 is 40"}, [&] { data.test->check_tokens(40); });
  o.seq_len = 1000;
  const Dataset longest = open_dataset(o);
  CHECK((longest.test->seq_len() == 24 && longest.test->size() == 3));
  check_scored_once(*longest.test, 1, 41, {25, 28, 29});
  o.spec = dir.file("c.bin");
  check_fails(Exit::bad_data, {"c.bin", "2 tokens"}, [&] { open_dataset(o); });
}

TEST_CASE("shards: every damaged header is refused, wherever the shard stands") {
  const auto refuses = [](const std::string& bytes, const std::vector<std::string>& why) {
    const TempDir dir;
    write_shard(dir.file("a.bin"), counting(0, 50), ShardFormat::uint16);
    write_text(dir.file("b.bin"), bytes);
    std::vector<std::string> parts = why;
    parts.push_back("b.bin");
    check_fails(Exit::bad_data, parts, [&] { open_dataset(data_options(dir.file("*.bin"), 4)); });
  };
  refuses("", {"0 bytes", "1024"});
  refuses(std::string(1023, '\0'), {"1023 bytes"});
  refuses(std::string(2000, '\0'), {"magic number is 0", "20240520", "20240801"});
  refuses(with_header(0, 20240522), {"magic number is 20240522"});  // llm.c's evaluation sets are another format
  refuses(with_header(1, 7), {"version is 7, expected 1"});
  refuses(with_header(0, 20240801), {"version is 1, expected 7"});
  refuses(with_header(2, 19), {"19 tokens", "1062", "1064"});
  refuses(with_header(2, 21), {"21 tokens", "1066", "1064"});
  refuses(with_header(2, -1), {"-1 tokens"});
  refuses(with_header(2, INT32_MAX), {"2147483647 tokens", "4294968318"});
  refuses(with_header(2, INT32_MIN + 20), {"tokens"});  // 2 * that, in 32 bits, is 40 again
  const std::string whole = with_header(3, 0);
  for (size_t size : {size_t{1024}, size_t{1025}, whole.size() - 1}) refuses(whole.substr(0, size), {"20 tokens"});
  refuses(whole + '\0', {"1065"});
  // Validation shards are looked at just the same.
  const TempDir dir;
  write_shard(dir.file("a.bin"), counting(0, 50), ShardFormat::uint16);
  write_text(dir.file("v.bin"), whole.substr(0, 1060));
  check_fails(Exit::bad_data, {"v.bin"}, [&] { open_dataset(data_options(dir.file("a.bin"), 4, dir.file("v.bin"))); });
}

TEST_CASE("shards: missing files and mixed formats") {
  const TempDir dir;
  check_fails(Exit::no_input, {"*.bin"}, [&] { open_dataset(data_options(dir.file("*.bin"), 4)); });
  write_shard(dir.file("a.bin"), counting(0, 50), ShardFormat::uint16);
  write_shard(dir.file("b.bin"), counting(0, 50), ShardFormat::uint32);
  const std::vector<std::string> parts = {"a.bin", "b.bin", "uint16", "uint32"};
  check_fails(Exit::bad_data, parts, [&] { open_dataset(data_options(dir.file("*.bin"), 4)); });
  check_fails(Exit::bad_data, parts, [&] { open_dataset(data_options(dir.file("a.bin"), 4, dir.file("b.bin"))); });
  check_fails(Exit::no_input, {"c.bin"}, [&] { open_dataset(data_options(dir.file("a.bin"), 4, dir.file("c.bin"))); });
}

TEST_CASE("shards: a token beyond the vocabulary is found, wherever it is") {
  constexpr size_t n = 70000;
  for (ShardFormat format : {ShardFormat::uint16, ShardFormat::uint32}) {
    for (size_t place : {size_t{0}, size_t{65535}, size_t{65536}, n - 1}) {
      const TempDir dir;
      std::vector<uint32_t> tokens(n, 999);
      write_shard(dir.file("a.bin"), tokens, format);
      const uint32_t bad = format == ShardFormat::uint16 ? 1000 : 0xFFFFFFFF;  // an int32 of -1 would mean "not scored"
      tokens[place] = bad;
      write_shard(dir.file("b.bin"), tokens, format);
      const Dataset data = open_dataset(data_options(dir.file("a.bin"), 16, dir.file("b.bin")));
      data.train->check_tokens(1000);
      check_fails(Exit::bad_data, {"a.bin", "token 0 is 999", "only 999"}, [&] { data.train->check_tokens(999); });
      check_fails(Exit::bad_data, {"b.bin", str("token ", place, " is ", bad)}, [&] { data.test->check_tokens(1000); });
      const Dataset split = open_dataset(data_options(dir.file("*.bin"), 16));  // both splits have windows of b.bin
      check_fails(Exit::bad_data, {"b.bin"}, [&] { split.train->check_tokens(1000); });
      check_fails(Exit::bad_data, {"b.bin"}, [&] { split.test->check_tokens(1000); });
    }
  }
}

TEST_CASE("shards: more files than the process may have open") {
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{40, before.rlim_max};
  const TempDir dir;
  const std::string whole = with_header(3, 0);
  for (int i = 0; i < 60; ++i) write_text(dir.file(str("s", 100 + i, ".bin")), whole);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  const Dataset data = open_dataset(data_options(dir.file("*.bin"), 4));
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK(data.train->size() + data.test->size() == 60 * 4);
}

// Whether body() holds in a process that may never have more than 24 files open. A hard limit cannot be raised again.
template <class F>
bool holds_with_few_files(F&& body) {
  const int status = in_child([&] {
    const rlimit few{24, 24};
    return ::setrlimit(RLIMIT_NOFILE, &few) == 0 && body() ? 0 : 1;
  });
  if (status > 1) MESSAGE("the process ended with ", status);
  return status == 0;
}

TEST_CASE("shards: more files than the system ever lets the process open are read all the same") {
  const TempDir dir;
  for (uint32_t i = 0; i < 80; ++i)
    write_shard(dir.file(str("s", 100 + i, ".bin")), counting(100 * i, 21), ShardFormat::uint16);
  CHECK(holds_with_few_files([&] {
    const Dataset data = open_dataset(data_options(dir.file("s*.bin"), 10));
    data.train->check_tokens(10000);
    bool right = data.train->digest() != 0 && data.train->size() == 159;
    for (int64_t i = 0; i < data.train->size(); ++i)
      right = right && read_sample(*data.train, i).tokens[0] == 100 * (i / 2) + 10 * (i % 2);
    return right;
  }));
}

TEST_CASE("shards: a file that was closed meanwhile must be what it was when it is opened again") {
  const TempDir dir;
  const auto name = [&](int i) { return dir.file(str("s", 100 + i, ".bin")); };
  for (int i = 0; i < 80; ++i) write_shard(name(i), counting(0, 21), ShardFormat::uint16);
  const auto fails = [](Exit code, const std::string& says, const Source& source, int64_t index) {
    const Error error = error_of([&] { read_sample(source, index); });
    return error.code == code && has(error.what(), says);
  };
  CHECK(holds_with_few_files([&] {
    const Dataset data = open_dataset(data_options(dir.file("s*.bin"), 10));
    data.train->digest();  // opens them all, and so closes the first ones
    std::filesystem::last_write_time(name(0), std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
    bool right = read_sample(*data.train, 0).tokens[3] == 3;                       // another time, the same contents
    for (int64_t i = 2; i < data.train->size(); ++i) read_sample(*data.train, i);  // closes it again
    std::vector<uint32_t> other = counting(0, 21);
    other[20] = 7;
    write_shard(name(0), other, ShardFormat::uint16);
    right = right && fails(Exit::bad_data, name(0) + ": was changed while in use", *data.train, 0);
    std::filesystem::resize_file(name(1), 1030);
    return right && fails(Exit::io, "shortened", *data.train, 2);
  }));
}

TEST_CASE("shards: a file with many names is read once, and what reads a part reads only that") {
  const TempDir dir;
  write_shard(dir.file("one.bin"), std::vector<uint32_t>(1 << 20, 5), ShardFormat::uint16);  // 2 MiB
  for (int i = 0; i < 10; ++i) std::filesystem::create_symlink("one.bin", dir.file(str("s", i, ".bin")));
  const Dataset data = open_dataset(data_options(dir.file("s*.bin"), 64));
  const int64_t before = bytes_read();
  if (before == 0) return;
  data.train->check_when_read(6);
  read_sample(*data.train, 0);
  CHECK(bytes_read() - before < 1 << 20);
  data.train->check_tokens(6);
  data.train->digest();
  CHECK(bytes_read() - before < 3 << 20);
  data.train->check_when_read(5);
  check_fails(Exit::bad_data, {"s0.bin", "token 0 is 5", "vocabulary has only 5"},
              [&] { read_sample(*data.train, 0); });
}

TEST_CASE("shards: validation files that are training files are known by name, link and contents") {
  const TempDir dir;
  const auto both = [&](const std::string& data, const std::string& val, int64_t train_samples = 0) {
    DataOptions o = data_options(dir.file(data), 10, dir.file(val));
    o.train_samples = train_samples;
    const Dataset set = open_dataset(o);
    const int64_t by_name = std::ssize(set.test->files_of_both());
    set.train->digest();
    CHECK(set.test->files_of_both().size() == set.train->files_of_both().size());
    return std::vector<int64_t>{by_name, std::ssize(set.test->files_of_both()), std::ssize(set.test->files())};
  };
  write_shard(dir.file("train_1.bin"), counting(0, 31), ShardFormat::uint16);
  write_shard(dir.file("train_2.bin"), counting(100, 31), ShardFormat::uint16);
  write_shard(dir.file("val_1.bin"), counting(200, 31), ShardFormat::uint16);
  CHECK(both("train_*.bin", "val_*.bin") == std::vector<int64_t>{0, 0, 1});
  CHECK(both("*.bin", "val_*.bin") == std::vector<int64_t>{1, 1, 1});
  std::filesystem::create_symlink("train_2.bin", dir.file("val_2.bin"));
  CHECK(both("train_*.bin", "val_*.bin") == std::vector<int64_t>{1, 1, 2});
  write_shard(dir.file("val_3.bin"), counting(0, 31), ShardFormat::uint16);  // a copy: its contents tell
  CHECK(both("train_*.bin", "val_*.bin") == std::vector<int64_t>{1, 2, 3});
  write_shard(dir.file("train_3.bin"), {}, ShardFormat::uint16);  // nothing in it: nothing is shared
  write_shard(dir.file("val_4.bin"), {}, ShardFormat::uint16);
  CHECK(both("train_[23].bin", "val_[14].bin") == std::vector<int64_t>{0, 0, 1});
}

TEST_CASE("shards: a file of exactly the given name wins over the pattern") {
  const TempDir dir;
  write_shard(dir.file("a[1].bin"), counting(0, 50), ShardFormat::uint16);
  write_shard(dir.file("a1.bin"), counting(1000, 50), ShardFormat::uint16);
  check_window(*open_dataset(data_options(dir.file("a[1].bin"), 4)).train, 0, 0);
  check_window(*open_dataset(data_options(dir.file("a[0-9].bin"), 4)).train, 0, 1000);
  CHECK(data_files(dir.file("a[1].bin")) == std::vector{dir.file("a[1].bin")});
  CHECK(data_files(dir.file("a*.bin")) == std::vector{dir.file("a1.bin"), dir.file("a[1].bin")});
  check_fails(Exit::no_input, {"b*.bin"}, [&] { data_files(dir.file("b*.bin")); });
}

TEST_CASE("shards: a directory that cannot be read is not taken for a missing file") {
  const TempDir dir;
  std::filesystem::create_directory_symlink("loop", dir.file("loop"));
  for (const char* spec : {"loop/a.bin", "loop/*.bin"})
    check_fails(Exit::io, {"loop", "symbolic links"}, [&] { open_dataset(data_options(dir.file(spec), 4)); });
  check_fails(Exit::no_input, {"none"}, [&] { open_dataset(data_options(dir.file("none/*.bin"), 4)); });
}

TEST_CASE("shards: a file that changes while it is used is an error, not a signal") {
  for (ShardFormat format : {ShardFormat::uint16, ShardFormat::uint32}) {
    const TempDir dir;
    write_shard(dir.file("a.bin"), std::vector<uint32_t>(50000, 7), format);
    const Dataset data = open_dataset(data_options(dir.file("a.bin"), 16));
    data.train->check_tokens(8);
    const Sample before = read_sample(*data.train, 0);
    {
      std::fstream file(dir.file("a.bin"), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(1024 + (format == ShardFormat::uint16 ? 2 : 4) * 10);
      file.put(9);
    }
    check_fails(Exit::bad_data, {"a.bin", "changed", "tokens 0 to 16", " 9,", " 7 "},
                [&] { read_sample(*data.train, 0); });
    CHECK(read_sample(*data.train, 1) == before);  // all sevens
    std::filesystem::resize_file(dir.file("a.bin"), 2048);
    check_fails(Exit::io, {"a.bin", "shortened"}, [&] { read_sample(*data.train, data.train->size() - 1); });
    check_fails(Exit::io, {"a.bin", "shortened"}, [&] { read_sample(*data.test, 0); });
  }
}

TEST_CASE("shards: the digest changes with any token of any file, and only then") {
  const TempDir dir;
  std::vector<uint32_t> tokens = counting(0, 600000);  // more than two reads
  for (uint32_t& token : tokens) token %= 1000;
  const auto digest = [&] {
    const Dataset data = open_dataset(data_options(dir.file("*.bin"), 16));
    CHECK(data.train->digest() == data.test->digest());  // of the files, not of the split
    return data.train->digest();
  };
  write_shard(dir.file("a.bin"), tokens, ShardFormat::uint16);
  write_shard(dir.file("b.bin"), tokens, ShardFormat::uint16);
  const uint64_t want = digest();
  for (const size_t place : {size_t{0}, size_t{262143}, size_t{262144}, tokens.size() - 1}) {
    CAPTURE(place);
    std::vector<uint32_t> other = tokens;
    other[place] ^= 1;
    write_shard(dir.file("b.bin"), other, ShardFormat::uint16);
    CHECK(digest() != want);
  }
  write_shard(dir.file("b.bin"), tokens, ShardFormat::uint16);
  CHECK(digest() == want);
  std::filesystem::remove(dir.file("b.bin"));
  CHECK(digest() != want);
}

TEST_CASE("shards: the digest changes with validation shards, too") {
  const TempDir dir;
  write_shard(dir.file("a.bin"), counting(0, 50), ShardFormat::uint16);
  const auto digests = [&](uint32_t first) {
    write_shard(dir.file("v.bin"), counting(first, 50), ShardFormat::uint16);
    const Dataset data = open_dataset(data_options(dir.file("a.bin"), 16, dir.file("v.bin")));
    return std::vector<uint64_t>{data.train->digest(), data.test->digest()};
  };
  const auto want = digests(7), got = digests(8);
  CHECK((got[0] != want[0] && got[1] != want[1] && digests(7) == want));
}

TEST_CASE("shards: they know their tokenizer, and refuse another one") {
  const TempDir dir;
  std::filesystem::create_directory(dir.file("other"));
  const Tokenizer bpe = Tokenizer::read(write_tiny_bpe(dir.path.string()));
  const Tokenizer other = Tokenizer::read(write_tiny_bpe(dir.file("other"), false));
  write_shard(dir.file("a.bin"), counting(0, 50), ShardFormat::uint16, bpe.fingerprint());
  write_shard(dir.file("b.bin"), counting(0, 50), ShardFormat::uint16);  // does not say
  write_shard(dir.file("other/c.bin"), counting(0, 50), ShardFormat::uint16, other.fingerprint());
  const std::string a = read_text(dir.file("a.bin"));
  std::array<uint32_t, 7> header{};
  std::memcpy(header.data(), a.data(), sizeof header);
  CHECK((header[0] == 20240520 && header[1] == 1 && header[2] == 50 && header[3] == 1 && header[6] == 0));
  CHECK((uint64_t{header[5]} << 32 | header[4]) == bpe.fingerprint());

  const Dataset known = open_dataset(data_options(dir.file("a.bin"), 4));
  CHECK((known.tokenizer == bpe && known.train->vocab_size() == 259 && known.test->vocab_size() == 259));
  CHECK(open_dataset(data_options(dir.file("?.bin"), 4)).tokenizer == bpe);
  CHECK(open_dataset(data_options(dir.file("b.bin"), 4)).tokenizer.is_none());
  CHECK(open_dataset(data_options(dir.file("b.bin"), 4, dir.file("other/c.bin"))).tokenizer == other);
  DataOptions whole = data_options(dir.file("a.bin"), 4);
  whole.whole = true;
  CHECK(open_dataset(whole).tokenizer == bpe);
  check_fails(Exit::bad_data, {"a.bin", "c.bin", "different tokenizers"},
              [&] { open_dataset(data_options(dir.file("a.bin"), 4, dir.file("other/c.bin"))); });
  write_tiny_bpe(dir.file("other"));
  check_fails(Exit::bad_data, {"other/tokenizer.json", "not the tokenizer that", "c.bin"},
              [&] { open_dataset(data_options(dir.file("other/c.bin"), 4)); });
  std::filesystem::remove(dir.file("other/tokenizer.json"));
  check_fails(Exit::no_input, {"c.bin", "other/tokenizer.json", "missing"},
              [&] { open_dataset(data_options(dir.file("other/c.bin"), 4)); });
}

TEST_CASE("shards: tokens alone, where the spec says so") {
  const TempDir dir;
  for (const ShardFormat format : {ShardFormat::uint16, ShardFormat::uint32}) {
    const std::string prefix = format == ShardFormat::uint16 ? "uint16:" : "uint32:";
    write_shard(dir.file("with.bin"), counting(1000, 2001), format);
    write_text(dir.file("tokens.data"), read_text(dir.file("with.bin")).substr(1024));
    const Dataset data = open_dataset(data_options(prefix + dir.file("*.data"), 10));
    REQUIRE((data.train->size() == 198 && data.test->size() == 2));
    check_window(*data.train, 0, 1000);
    check_window(*data.test, 0, 1000 + 1980);
    CHECK(read_shard(prefix + dir.file("tokens.data"), 2) == std::vector<int32_t>{1000, 1001});
    CHECK(data_files(prefix + dir.file("*.data")) == std::vector{dir.file("tokens.data")});
    check_window(*open_dataset(data_options(dir.file("with.bin"), 10, prefix + dir.file("tokens.data"))).test, 0, 1000);
    check_fails(Exit::bad_data, {"with.bin", "header of a shard", "leave out " + prefix},
                [&] { open_dataset(data_options(prefix + dir.file("with.bin"), 10)); });
    write_text(dir.file("odd.data"), read_text(dir.file("tokens.data")) + "x");
    check_fails(Exit::bad_data, {"odd.data", prefix},
                [&] { open_dataset(data_options(prefix + dir.file("odd.data"), 10)); });
    std::filesystem::remove(dir.file("odd.data"));
  }
  write_text(dir.file("plain.bin"), std::string(2000, 'x'));
  check_fails(Exit::bad_data, {"magic", "uint16:" + dir.file("plain.bin")},
              [&] { open_dataset(data_options(dir.file("plain.bin"), 10)); });
}

TEST_CASE("shards: a directory stands for its train_*.bin and val_*.bin") {
  const TempDir dir;
  const std::string odd = dir.file("a[1]*");  // reads as a pattern, too
  std::filesystem::create_directory(odd);
  check_fails(Exit::no_input, {"a[1]*", "no train_*.bin", "text:"}, [&] { open_dataset(data_options(odd, 10)); });
  write_shard(odd + "/train_000001.bin", counting(0, 1001), ShardFormat::uint16);
  write_shard(odd + "/train_000002.bin", counting(5000, 1001), ShardFormat::uint16);
  CHECK(open_dataset(data_options(odd, 10)).train->size() == 198);  // the last hundredth is for testing
  write_shard(odd + "/val_000001.bin", counting(9000, 101), ShardFormat::uint16);
  const Dataset data = open_dataset(data_options(odd, 10));
  CHECK((data.train->size() == 200 && data.test->size() == 10));
  check_window(*data.test, 0, 9000);
  CHECK(data_files(odd) == std::vector{odd + "/train_000001.bin", odd + "/train_000002.bin"});
  DataOptions o = data_options(odd, 10);
  expand_directories(o);
  CHECK((o.spec.ends_with("/train_*.bin") && o.val_spec.ends_with("/val_*.bin")));
  check_fails(Exit::no_input, {"nowhere", "directory"}, [&] { open_dataset(data_options(dir.file("nowhere"), 10)); });
}

TEST_CASE("shards: what was written is read back from anywhere, up to the end of a file") {
  const TempDir dir;
  ShardWriter writer({dir.path, "train", ShardFormat::uint16, 7}, 0);
  std::vector<int32_t> ids(31);
  std::iota(ids.begin(), ids.end(), 100);
  writer.append({ids.begin(), ids.begin() + 10}), writer.append({ids.begin() + 10, ids.end()});
  writer.flush();
  for (int64_t first = 0; first < 31; ++first)
    for (int64_t count = 1; count < 40; ++count) {
      const int64_t n = std::min({count, 7 - first % 7, 31 - first});
      CHECK((writer.read(first, count) == std::vector<int32_t>(ids.begin() + first, ids.begin() + first + n)));
    }
}
