// Files of minimal pairs: what is read, what is refused with its line, and how right pairs and ties are counted.
#include "eval/minimal_pairs.h"

#include <sstream>

#include "engine/io/json.h"
#include "tests/support/data_check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Ids = std::vector<int32_t>;

const Tokenizer bytes = Tokenizer::bytes();
const Tokenizer words = Tokenizer::words({"<eos>", "the", "cat", "cats", "sleep", "sleeps"});
constexpr const char* line =
    R"({"sentence_good": "ab", "sentence_bad": "ac", "field": "syntax", "linguistics_term": "x", "UID": "y"})";

ScoreRequests requests(const Tokenizer& tokenizer = bytes, int64_t longest = 16, int32_t prefix = 200) {
  return ScoreRequests(tokenizer, tokenizer.vocab_size(), longest, prefix);
}
MinimalPair parse(const std::string& text, const Tokenizer& tokenizer = bytes) {
  return parse_minimal_pair(text, "f: line 3", requests(tokenizer, 16, tokenizer.is_bytes() ? 200 : 0));
}
std::string with(const std::string& good, const std::string& bad) {
  return str(R"({"sentence_good": )", good, R"(, "sentence_bad": )", bad,
             R"(, "field": "syntax", "linguistics_term": "x"})");
}

}  // namespace

TEST_CASE("minimal_pairs: a sentence is a space and its text, after the token that begins texts") {
  const MinimalPair pair = parse(line);
  CHECK((pair.tokens.good == Ids{200, ' ', 'a', 'b'} && pair.tokens.bad == Ids{200, ' ', 'a', 'c'}));
  CHECK((pair.phenomenon == "x" && pair.field == "syntax"));
  const MinimalPair of_words = parse(with(R"("the cat sleeps")", R"("the cat sleep")"), words);
  CHECK((of_words.tokens.good == Ids{0, 1, 2, 5} && of_words.tokens.bad == Ids{0, 1, 2, 4}));
  // A sentence that brings the token along has it once, as the harness has it.
  CHECK(parse(with(R"("<eos> the cat")", R"("the cat")"), words).tokens.good == Ids{0, 1, 2});
  // The same tokens as a request of the harness's.
  const ScoreRequest request = requests().parse(R"({"context": "", "continuation": " ab"})", "line 1");
  CHECK(request.passages[0].tokens == pair.tokens.good);
}

TEST_CASE("minimal_pairs: what is no pair is refused with its line") {
  struct Case {
    std::string line, says;
  };
  for (const Case& bad : std::vector<Case>{
           {"", "ends too early"},
           {"{", "ends too early"},
           {"[1]", "a pair is a JSON object, not [1]"},
           {"{}", "\"sentence_good\" is missing"},
           {R"({"sentence_good": "a", "sentence_bad": "b", "field": "c"})", "\"linguistics_term\" is missing"},
           {R"({"sentence_good": "a", "sentence_bad": "b", "linguistics_term": "c"})", "\"field\" is missing"},
           {with("5", "\"b\""), "\"sentence_good\" is 5"},
           {with("\"a\"", "null"), "\"sentence_bad\" is null"},
           {with("\"a\"", "\"\""), "\"sentence_bad\" is \"\""},
           {with("\" \"", "\"b\""), "\"sentence_good\" is empty"},
           {with("\"a\"", "\"0123456789abcdefgh\""), "\"sentence_bad\" has 19 tokens, the model's longest sequence 16"},
       }) {
    CAPTURE(bad.line);
    check_fails(Exit::bad_data, {"f: line 3", bad.says}, [&] { parse(bad.line); });
  }
  check_fails(Exit::bad_data, {"f: line 3", "dog", "words"}, [] { parse(with("\"the dog\"", "\"the\""), words); });
  check_fails(Exit::bad_data, {"no tokens", "<eos>"}, [] { parse(with("\"<eos>\"", "\"the\""), words); });
  check_fails(Exit::bad_data, {"f: line 3", "--prefix-token"},
              [] { parse_minimal_pair(line, "f: line 3", requests(bytes, 16, -1)); });
  CHECK(parse(with("\"0123456789abcde\"", "\"a\"")).tokens.good.size() == 17);  // as long as it may be
}

TEST_CASE("minimal_pairs: the files of a directory, or one file") {
  const TempDir dir;
  const std::string path = dir.path.string();
  check_fails(Exit::no_input, {path, ".jsonl"}, [&] { read_minimal_pairs(path, requests()); });
  check_fails(Exit::no_input, {"nowhere"}, [&] { read_minimal_pairs(dir.file("nowhere"), requests()); });
  write_text(dir.file("b.jsonl"), str(line, "\r\n", line));
  write_text(dir.file("a.jsonl"), str(line, "\n"));
  write_text(dir.file("README"), "no pairs");
  const std::vector<PairFile> files = read_minimal_pairs(path, requests());
  REQUIRE(files.size() == 2);
  CHECK((files[0].name == "a" && files[0].pairs.size() == 1 && files[1].name == "b" && files[1].pairs.size() == 2));
  CHECK(read_minimal_pairs(dir.file("b.jsonl"), requests()).size() == 1);
  write_text(dir.file("c.jsonl"), str(line, "\n\n", line, "\n"));
  check_fails(Exit::bad_data, {"c.jsonl: line 2 is empty"}, [&] { read_minimal_pairs(path, requests()); });
  write_text(dir.file("c.jsonl"), "");
  check_fails(Exit::bad_data, {"c.jsonl", "no pair"}, [&] { read_minimal_pairs(path, requests()); });
}

TEST_CASE("minimal_pairs: a tie is right and counted, by file, phenomenon and field") {
  const auto pair = [](const char* phenomenon, const char* field) { return MinimalPair{{}, phenomenon, field}; };
  const std::vector<PairFile> files = {
      {"one", {pair("p", "f"), pair("p", "f"), pair("q", "f")}},
      {"a name that is longer than the table is wide, which has room for eighty columns and no more",
       {pair("p", "g")}}};
  const std::vector<PairScore> scores = {{-1, -2}, {-2, -2}, {-3, -2.5}, {-4, -4.5}};
  const PairResults results = count_pairs(files, scores);
  const auto check = [](const PairAccuracy& got, int64_t pairs, int64_t right, int64_t ties) {
    CHECK((got.pairs == pairs && got.right == right && got.ties == ties));
  };
  check(results.files[0], 3, 2, 1), check(results.files[1], 1, 1, 0);
  check(results.phenomena.at("p"), 3, 3, 1), check(results.phenomena.at("q"), 1, 0, 0);
  check(results.fields.at("f"), 3, 2, 1), check(results.fields.at("g"), 1, 1, 0);
  check(results.all, 4, 3, 1);
  std::istringstream table(describe(files, results));
  for (std::string row; std::getline(table, row);) CHECK_MESSAGE(row.size() <= 80, row);
  CHECK(has(describe(files, results), "75.00%"));
  const auto json = to_json(files, scores, results);
  CHECK((json["pairs"] == 4 && json["right"] == 3 && json["ties"] == 1 && json["accuracy"] == 0.75));
  CHECK(json_text(json["phenomena"]["p"]) == R"({"pairs":3,"right":3,"accuracy":1.0,"ties":1})");
  CHECK((json_text(json["files"]["one"]["good"]) == "[-1.0,-2.0,-3.0]" && json["files"].size() == 2));
  CHECK_THROWS(count_pairs(files, {{-1, -2}}));
}

// The published files where they are at hand; they are not part of the project.
TEST_CASE("minimal_pairs: BLiMP's files") {
  for (const std::string dir : {"../shared/data/blimp", "../../shared/data/blimp"}) {
    if (!std::filesystem::exists(dir)) continue;
    const std::vector<PairFile> files = read_minimal_pairs(dir, requests(bytes, 1000));
    size_t pairs = 0, equal = 0;
    for (const PairFile& file : files)
      for (const MinimalPair& pair : file.pairs) ++pairs, equal += pair.tokens.good == pair.tokens.bad;
    CHECK((files.size() == 67 && pairs == 67000 && equal == 7));  // 7 pairs differ in nothing
    return;
  }
  MESSAGE("skipped: there is no ../shared/data/blimp");
}
