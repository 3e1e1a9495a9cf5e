#include "data/tokenizer.h"

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "tests/support/data_check.h"

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
  CHECK((t.decode({5, 0}) == "<pad>" && t.decode({1, 5, 2}) == "Tom is"));  // what stands for nothing has no text
  CHECK((t.decode({-1}).empty() && t.name_of(-1) == "<-1>" && t.name_of(1) == "Tom"));
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
  Ids begun;
  CHECK((t.encode_begin(all, begun) == all.size() && begun == ids));  // no byte waits for another
  CHECK((t.decode({256}).empty() && t.name_of(256) == "<256>"));
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
  const Json json = known_json(read_text(dir.file("tokenizer.json")));
  CHECK(json["model"]["type"] == "WordLevel");
  CHECK(json["model"]["vocab"]["a"] == 1);
  CHECK(json["pre_tokenizer"]["type"] == "WhitespaceSplit");
  CHECK(!std::filesystem::exists(dir.file("tokenizer.json.tmp")));

  Tokenizer::bytes().save(dir.path.string());
  const Tokenizer bytes = Tokenizer::load(dir.path.string());
  CHECK(bytes.vocab_size() == 256);
  CHECK(bytes.decode(bytes.encode("any \xFF\x00 bytes")) == "any \xFF\x00 bytes");
  const Json vocab = known_json(read_text(dir.file("tokenizer.json")))["model"]["vocab"];
  // GPT-2's names: a space is U+0120, a line break U+010A, a soft hyphen (0xAD) the last of the 68 replaced ones.
  const std::vector<std::pair<std::string, int>> names = {
      {"A", 65},         {"!", 33},         {"~", 126},        {"\xC4\x80", 0},   {"\xC4\xA0", 32},  {"\xC4\x8A", 10},
      {"\xC4\xA1", 127}, {"\xC4\xA2", 128}, {"\xC5\x82", 160}, {"\xC2\xA1", 161}, {"\xC5\x83", 173}, {"\xC3\xBF", 255}};
  for (const auto& name : names) CHECK(vocab.value(name.first, -1) == name.second);

  check_fails(Exit::io, {"nowhere"}, [&] { bytes.save(dir.file("nowhere")); });
}

TEST_CASE("tokenizer: one of another kind leaves token ids; what is no tokenizer is refused") {
  const TempDir dir;
  const std::string path = dir.file("tokenizer.json");
  const auto refuses = [&](const std::string& contents, const std::string& why) {
    write_text(path, contents);
    check_fails(Exit::bad_data, {path, why}, [&] { Tokenizer::load(dir.path.string()); });
  };
  const auto is_foreign = [&](const std::string& contents, const std::string& what) {
    write_text(path, contents);
    const Tokenizer t = Tokenizer::load(dir.path.string());
    CHECK_MESSAGE((t.is_foreign() && has(t.describe(), what)), contents << ": " << t.describe());
    CHECK((t.encode(" 7 0\n") == Ids{7, 0} && t.decode({7, 0}) == "7 0" && t.vocab_size() == 0 && t.eos() == -1));
    check_fails(Exit::usage, {"\"seven\"", what, "integers"}, [&] { t.encode("seven"); });
  };
  refuses("", "not a JSON object");
  refuses("[1]", "not a JSON object");
  refuses("{\"model\": ", "not a JSON object");
  refuses("{}", "is no tokenizer");
  refuses("{\"model\": {\"type\": 3, \"vocab\": {}}}", "is no tokenizer");
  refuses("{\"model\": {\"type\": \"BPE\"}}", "is no tokenizer");
  Tokenizer::words({"b", "a"}).save(dir.path.string());
  const Json words = known_json(read_text(path));
  const auto patched = [](Json json, const char* at, const Json& value) {
    json[Json::json_pointer(at)] = value;
    return json_text(json);
  };
  is_foreign(patched(words, "/model/type", "Unigram"), "Unigram");
  is_foreign(patched(words, "/pre_tokenizer", nullptr), "pre-tokenizer missing");
  is_foreign(patched(words, "/pre_tokenizer/type", "Whitespace"), "Whitespace");
  is_foreign(patched(words, "/pre_tokenizer", 5), "pre-tokenizer 5");
  is_foreign(patched(words, "/pre_tokenizer", Json::object()), "pre-tokenizer without a type");
  is_foreign(patched(words, "/normalizer", {{"type", "Lowercase"}}), "normalizer");
  is_foreign(patched(words, "/added_tokens", Json::array({{{"id", 2}, {"content", "<s>"}}})), "added_tokens");
  refuses(patched(words, "/model/vocab", Json::array()), "not an object");
  for (const Json& id : {Json(2), Json(-1), Json("x"), Json(1.5), Json(1ull << 40)})
    refuses(patched(words, "/model/vocab/b", id), "expected an integer below 2");
  refuses(patched(words, "/model/vocab/b", 1), "same id");
  refuses(patched(words, "/model/vocab", {{"a b", 0}}), "whitespace");
  refuses(patched(words, "/model/vocab", {{"", 0}}), "empty");
  Tokenizer::bytes().save(dir.path.string());
  const Json bytes = known_json(read_text(path));
  refuses(patched(bytes, "/model/merges", Json::array({"a b"})), "merge 0");
  refuses(patched(bytes, "/model/vocab", {{"a", 0}}), "no token for the byte");
  refuses(patched(bytes, "/model/vocab", Json::array()), "not an object");
  refuses(patched(bytes, "/model/vocab/A", 66), "same id");
  is_foreign(patched(bytes, "/normalizer", {{"type", "Lowercase"}}), "normalizer");
  std::filesystem::remove(path);
  std::filesystem::create_symlink("tokenizer.json", path);  // a loop: it cannot be looked at, but that is not "none"
  check_fails(Exit::io, {path}, [&] { Tokenizer::load(dir.path.string()); });
  std::filesystem::remove(path);
  write_text(dir.file("tokenizer.model"), "sentences");
  CHECK(Tokenizer::load(dir.path.string()).is_foreign());
}

TEST_CASE("tokenizer: data of another tokenizer than the model's is refused, with both named") {
  const TempDir dir;
  write_text(dir.file("merges.txt"), "a b");
  const Tokenizer none, bytes = Tokenizer::bytes(), foreign = Tokenizer::load(dir.path.string());
  const Tokenizer words = Tokenizer::words({"a", "b"}), other = Tokenizer::words({"b", "a"});
  for (const Tokenizer& model : {none, bytes, words, foreign}) require_same_tokenizer(model, "M", none, "x.bin");
  for (const Tokenizer& data : {none, bytes, words}) require_same_tokenizer(none, "M", data, "D");
  require_same_tokenizer(bytes, "M", bytes, "text:D");
  require_same_tokenizer(words, "M", words, "D");
  const auto refused = [](const Tokenizer& model, const Tokenizer& data, const std::vector<std::string>& parts) {
    check_fails(Exit::usage, parts, [&] { require_same_tokenizer(model, "M", data, "text:D"); });
  };
  refused(words, other, {"M has", "2 words (a b ...)", "text:D has 2 words (b a ...)", ".bin"});
  refused(words, bytes, {"2 words", "bytes"});
  Tokenizer many[2];
  for (const char* last : {"g", "h"}) many[*last - 'g'] = Tokenizer::words({"a", "b", "c", "d", "e", "f", last});
  CHECK(many[0].describe() != many[1].describe());
  refused(bytes, words, {"bytes", "2 words"});
  refused(foreign, bytes, {"merges.txt", "bytes", "token shards"});
  refused(foreign, words, {"merges.txt", "2 words", "token shards"});
}

TEST_CASE("tokenizer: a large one is read and written in time that grows with its size") {
  constexpr size_t count = 500000;  // looking every word up in a list would take an hour
  std::vector<std::string> list;
  for (size_t i = 0; i < count; ++i) list.push_back("w" + std::to_string(i * 7919 % 1000003));
  const TempDir dir;
  Tokenizer::words(list).save(dir.path.string());
  const Tokenizer t = Tokenizer::load(dir.path.string());
  CHECK((t.vocab_size() == count && t.encode(list[123456]) == Ids{123456}));
}

TEST_CASE("tokenizer: control characters and broken UTF-8 are escaped for a terminal, in one piece and in bytes") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a b\n\tc", "a b\n\tc"},
      {"\x1b[2J\x07\r\x7f", "\\x1b[2J\\x07\\x0d\\x7f"},
      {std::string("\0x", 2), "\\x00x"},
      {"\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80", "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"},
      {"\xC2\x9Bm", "\\xc2\\x9bm"},                    // a control character of two bytes
      {"\x9Bm\xFF\xC0\x9B", "\\x9bm\\xff\\xc0\\x9b"},  // none that UTF-8 has
      {"\xE0\x80\x9B", "\\xe0\\x80\\x9b"},             // a control character, too long
      {"\xED\xA0\x80\xF4\x90\x80\x80", "\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80"},
      {"\xE2\x82", "\\xe2\\x82"},
      {"\xE2\x82z", "\\xe2\\x82z"},
  };
  for (const auto& [text, want] : cases) {
    CHECK(printable(text) == want);
    Printable terminal;
    std::string got;
    for (const char c : text) got += terminal.add(std::string_view(&c, 1));
    CHECK(got + terminal.finish() == want);
  }
}

TEST_CASE("tokenizer: what a message quotes is one line that ends") {
  CHECK(excerpt("a b\n\tc\x1b[2J") == "a b  c\\x1b[2J");
  CHECK(excerpt(std::string(120, 'x')) == std::string(120, 'x'));
  CHECK(excerpt(std::string(121, 'x')) == std::string(120, 'x') + "...");
  CHECK(excerpt(std::string(119, 'x') + "\xE2\x82\xAC") == std::string(119, 'x') + "...");  // not half a character
}
