// Batches of vectors from a buffer that is smaller than all of them, and labels of tokens from a file.

#include "eval/inside/features.h"
#include "eval/inside/sae_vectors.h"
#include "eval/inside/token_labels.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Windows of vectors of one number: 1000 times the window, and the place in it.
struct NumberedWindows {
  std::vector<int64_t> lengths;
  std::vector<float> last;
  int64_t filled = 0;
  VectorBuffer buffer(int64_t rows, int64_t capacity, uint64_t seed) {
    return VectorBuffer(1, rows, lengths, capacity, seed, [this](int64_t i) {
      last.clear(), ++filled;
      for (int64_t t = 0; t < lengths[static_cast<size_t>(i)]; ++t) last.push_back(static_cast<float>(1000 * i + t));
      return std::span<const float>(last);
    });
  }
};

std::vector<float> drawn(VectorBuffer& buffer, int64_t rows, int64_t batches) {
  std::vector<float> all(static_cast<size_t>(rows * batches), NAN);
  for (int64_t i = 0; i < batches; ++i) buffer.next(&all[static_cast<size_t>(i * rows)]);
  return all;
}

std::map<float, int64_t> counts_of(const std::vector<float>& values) {
  std::map<float, int64_t> counts;
  for (const float x : values) ++counts[x];
  return counts;
}

}  // namespace

TEST_CASE("vector buffer: of more vectors than it holds, each pass gives every one once") {
  NumberedWindows windows{std::vector<int64_t>(20, 10), {}};
  VectorBuffer buffer = windows.buffer(8, 40, 3);
  CHECK(!buffer.holds_all());
  CHECK(buffer.capacity() == 40);
  const std::vector<float> first = drawn(buffer, 8, 25), second = drawn(buffer, 8, 25);  // 200 each
  CHECK(counts_of(first).size() == 200);
  CHECK(counts_of(second).size() == 200);
  CHECK(first != second);
  CHECK(windows.filled == 40);  // nothing is computed ahead
  CHECK(!std::ranges::is_sorted(std::vector<float>(first.begin(), first.begin() + 8)));

  const auto again = [&](uint64_t seed) {
    VectorBuffer other = windows.buffer(8, 40, seed);
    return drawn(other, 8, 25);
  };
  CHECK(again(3) == first);
  CHECK(again(4) != first);
}

TEST_CASE("vector buffer: what a batch leaves over comes first in the next filling") {
  NumberedWindows windows{std::vector<int64_t>(20, 10), {}};
  VectorBuffer buffer = windows.buffer(7, 45, 3);
  const auto counts = counts_of(drawn(buffer, 7, 400));  // 14 passes
  CHECK(counts.size() == 200);
  for (const auto& [value, count] : counts) CHECK_MESSAGE((count >= 13 && count <= 15), value);
}

TEST_CASE("vector buffer: what fits is filled once, and each pass is another order of all but the last few") {
  NumberedWindows windows{{10, 7, 9}, {}};
  VectorBuffer buffer = windows.buffer(5, 26, 3);
  CHECK(buffer.holds_all());
  for (int pass = 0; pass < 3; ++pass) {
    const auto counts = counts_of(drawn(buffer, 5, 5));
    CHECK(counts.size() == 25);
  }
  CHECK(windows.filled == 3);
  NumberedWindows small{{10, 10}, {}};
  CHECK(small.buffer(8, 1, 3).capacity() == 18);  // a batch and a window at least
}

TEST_CASE("token labels: a CSV with columns in any order, quotes, and others that are passed over") {
  const TempDir scratch;
  const std::string path = scratch.file("labels.csv");
  write_text(path,
             "\xef\xbb\xbftext,label,id\r\n\" the\",Functional Leading Space,262\r\n\n\"a \"\"b\"\",\nc\","
             "\"Structural Punctuation\",7\n");
  const TokenLabels read = read_token_labels(path, 300);
  CHECK(read.file == path);
  CHECK(read.labels ==
        std::map<int32_t, std::string>{{7, "Structural Punctuation"}, {262, "Functional Leading Space"}});
  CHECK(read_token_labels("", 300).labels.empty());
}

TEST_CASE("token labels: a row that is wrong is refused with file, line and values") {
  const TempDir scratch;
  const std::string path = scratch.file("labels.csv"), fine = "id,label\n5,Entity Marker Fragments\n";
  const auto refuses = [&](const std::string& text, const std::vector<std::string>& words) {
    write_text(path, text);
    check_fails(Exit::bad_data, words, [&] { read_token_labels(path, 300); });
  };
  refuses("", {"labels.csv", "is empty", "id,label"});
  refuses("token,label\n", {"labels.csv, line 1", "no column id", "token,label"});
  refuses("id,label,id\n", {"line 1", "two columns id"});
  refuses(fine + "6,Entity Marker Fragments,x\n", {"line 3", "3 values for 2 columns", "6,Entity Marker Fragments,x"});
  refuses(fine + "x6,Entity Marker Fragments\n", {"line 3", "'x6' is no token", "0 to 299"});
  refuses(fine + "300,Entity Marker Fragments\n", {"line 3", "'300'"});
  refuses(fine + "-1,Entity Marker Fragments\n", {"line 3", "'-1'"});
  refuses(fine + "\n6,Nouns\n", {"line 4", "'Nouns' of token 6", "Semantic Root Fragments, "});
  refuses(fine + "5,Structural Punctuation\n", {"line 3", "token 5", "Entity Marker Fragments", "Structural"});
  refuses(fine + "6,\"Entity\n", {"line 3", "not closed"});
  check_fails(Exit::no_input, {"missing.csv"}, [&] { read_token_labels(scratch.file("missing.csv"), 300); });
}
