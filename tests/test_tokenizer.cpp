#include "data/tokenizer.h"

#include <nlohmann/json.hpp>

#include "tests/data_check.h"

using namespace crossply;
using namespace crossply::test;

using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

TEST_CASE("tokenizer: words") {
  const Tokenizer t = Tokenizer::words({"<pad>", "Tom", "is", "\xC3\xA9t\xC3\xA9", "\"quoted\\"});
  CHECK(t.vocab_size() == 5);
  CHECK(t.encode(" Tom\tis \n \xC3\xA9t\xC3\xA9 \"quoted\\ ") == Ids{1, 2, 3, 4});
  CHECK(t.decode({1, 2, 0}) == "Tom is <pad>");
  CHECK((t.encode("").empty() && t.encode(" \n").empty() && t.decode({}).empty()));
  check_fails(Exit::usage, {"\"Tim\"", "5 words"}, [&] { t.encode("Tom is Tim"); });
  CHECK(t.decode({5, 0}) == "<5> " + t.decode({0}));
  CHECK(t.decode({-1}) == "<-1>");
  CHECK(t.eos() == -1);
  CHECK(Tokenizer::words({"a", "<eos>"}).eos() == 1);
  check_fails(Exit::internal, {"twice"}, [] { Tokenizer::words({"a", "a"}); });
  check_fails(Exit::internal, {"not one word"}, [] { Tokenizer::words({"a b"}); });
  check_fails(Exit::internal, {"not one word"}, [] { Tokenizer::words({""}); });
}

TEST_CASE("tokenizer: bytes") {
  const Tokenizer t = Tokenizer::bytes();
  CHECK(t.vocab_size() == 256);
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  const Ids ids = t.encode(all);
  REQUIRE(ids.size() == 256);
  for (int b = 0; b < 256; ++b) CHECK(ids[static_cast<size_t>(b)] == b);
  CHECK(t.decode(ids) == all);
  CHECK(t.decode({256}) == "<256>");
}

TEST_CASE("tokenizer: none reads and writes integers") {
  const Tokenizer t;
  CHECK(t.vocab_size() == 0);
  CHECK(t.encode("7 0\n50256") == Ids{7, 0, 50256});
  CHECK(t.decode({7, 0, 50256}) == "7 0 50256");
  for (const char* word : {"x", "7x", "-1", "1.5", "99999999999", "+1"})
    check_fails(Exit::usage, {word, "integers"}, [&] { t.encode(word); });
}

TEST_CASE("tokenizer: saved and loaded") {
  const TempDir dir;
  CHECK(Tokenizer::load(dir.path.string()).vocab_size() == 0);
  Tokenizer().save(dir.path.string());
  CHECK(std::filesystem::is_empty(dir.path));

  Tokenizer::words({"b", "a", "\"quoted\\", "\xC3\xA9"}).save(dir.path.string());
  const Tokenizer words = Tokenizer::load(dir.path.string());
  CHECK(words.vocab_size() == 4);
  CHECK(words.encode("\xC3\xA9 a b \"quoted\\") == Ids{3, 1, 0, 2});
  CHECK(words.decode({3, 2, 1, 0}) == "\xC3\xA9 \"quoted\\ a b");
  const Json json = Json::parse(read_text(dir.file("tokenizer.json")));
  CHECK(json["model"]["type"] == "WordLevel");
  CHECK(json["model"]["vocab"]["a"] == 1);
  CHECK(json["pre_tokenizer"]["type"] == "WhitespaceSplit");
  CHECK(!std::filesystem::exists(dir.file("tokenizer.json.tmp")));

  Tokenizer::bytes().save(dir.path.string());
  const Tokenizer bytes = Tokenizer::load(dir.path.string());
  CHECK(bytes.vocab_size() == 256);
  CHECK(bytes.decode(bytes.encode("any \xFF\x00 bytes")) == "any \xFF\x00 bytes");
  const Json vocab = Json::parse(read_text(dir.file("tokenizer.json")))["model"]["vocab"];
  // GPT-2's names: a space is U+0120, a line break U+010A, a soft hyphen (0xAD) the last of the 68 replaced ones.
  const std::vector<std::pair<std::string, int>> names = {
      {"A", 65},         {"!", 33},          {"~", 126},         {"\xC4\x80", 0},   {"\xC4\xA0", 32},  {"\xC4\x8A", 10},
      {"\xC4\xA1", 127}, {"\xC4\xA2", 128}, {"\xC5\x82", 160}, {"\xC2\xA1", 161}, {"\xC5\x83", 173}, {"\xC3\xBF", 255}};
  for (const auto& name : names) CHECK(vocab.value(name.first, -1) == name.second);

  check_fails(Exit::io, {"nowhere"}, [&] { bytes.save(dir.file("nowhere")); });
}

TEST_CASE("tokenizer: a tokenizer.json of another kind is refused") {
  const TempDir dir;
  const std::string path = dir.file("tokenizer.json");
  const auto refuses = [&](const std::string& contents, const std::string& why) {
    write_text(path, contents);
    check_fails(Exit::bad_data, {path, why}, [&] { Tokenizer::load(dir.path.string()); });
  };
  refuses("", "not a JSON object");
  refuses("[1]", "not a JSON object");
  refuses("{\"model\": ", "not a JSON object");
  refuses("{}", "Supported are");
  refuses("{\"model\": {\"type\": 3}}", "missing");
  Tokenizer::words({"b", "a"}).save(dir.path.string());
  const Json words = Json::parse(read_text(path));
  const auto patched = [](Json json, const char* at, const Json& value) {
    json[Json::json_pointer(at)] = value;
    return json.dump();
  };
  refuses(patched(words, "/model/type", "Unigram"), "Unigram");
  refuses(patched(words, "/pre_tokenizer", nullptr), "pre-tokenizer missing");
  refuses(patched(words, "/pre_tokenizer/type", "Whitespace"), "Whitespace");
  refuses(patched(words, "/normalizer", {{"type", "Lowercase"}}), "normalizer");
  refuses(patched(words, "/added_tokens", Json::array({{{"id", 2}, {"content", "<s>"}}})), "added_tokens");
  refuses(patched(words, "/model/vocab", Json::array()), "no vocab");
  for (const Json& id : {Json(2), Json(-1), Json("x"), Json(1.5), Json(1ull << 40)})
    refuses(patched(words, "/model/vocab/b", id), "expected an integer below 2");
  refuses(patched(words, "/model/vocab/b", 1), "same id");
  refuses(patched(words, "/model/vocab", {{"a b", 0}}), "whitespace");
  refuses(patched(words, "/model/vocab", {{"", 0}}), "empty");
  Tokenizer::bytes().save(dir.path.string());
  const Json bytes = Json::parse(read_text(path));
  refuses(patched(bytes, "/model/merges", Json::array({"a b"})), "merges");
  refuses(patched(bytes, "/model/vocab", {{"a", 0}}), "256 bytes");
  refuses(patched(bytes, "/model/vocab/A", 66), "same id");
}
