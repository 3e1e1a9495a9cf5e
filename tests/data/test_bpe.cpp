#include "data/bpe/bpe.h"

#include <omp.h>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/rng.h"
#include "tests/support/data_check.h"

using namespace crossply;
using namespace crossply::test;

using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

namespace {

struct Draws {
  uint64_t seed, count = 0;
  size_t below(size_t n) { return random_bits(seed, 0, count++) % n; }
};

Json level(bool use_regex) { return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", use_regex}}; }

// A byte-level file: the bytes are the tokens 0 to 255, what a merge makes the next ones.
Json byte_level(const std::vector<std::string>& merges, const Json& pre_tokenizer = nullptr) {
  Json vocab = Json::object();
  for (const std::string& name : byte_names()) vocab[name] = vocab.size();
  for (const std::string& merge : merges) {
    std::string both = merge;
    both.erase(both.find(' '), 1);
    if (!vocab.contains(both)) vocab[both] = vocab.size();
  }
  return {{"version", "1.0"},
          {"added_tokens", Json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", pre_tokenizer.is_null() ? level(true) : pre_tokenizer},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
}

// Without any cut but this one.
Json cut_by(const Json& pre_tokenizer) {
  return {{"type", "Sequence"}, {"pretokenizers", {pre_tokenizer, level(false)}}};
}
Json split(const Json& pattern, const std::string& behavior, bool invert = false) {
  return cut_by({{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", invert}});
}

// Like Llama 2's: <unk>, 256 bytes, then the characters and what merges make.
Json of_characters(const std::vector<std::string>& characters, const std::vector<std::vector<std::string>>& merges) {
  Json vocab = {{"<unk>", 0}};
  for (int b = 0; b < 256; ++b) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(b));
    vocab[name] = vocab.size();
  }
  for (const std::string& character : characters) vocab[character] = vocab.size();
  for (const auto& merge : merges) vocab[merge[0] + merge[1]] = vocab.size();
  const std::string mark = "\u2581";
  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", mark}};
  const Json back = {{"type", "Replace"}, {"pattern", {{"String", mark}}}, {"content", " "}};
  return {{"normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "Prepend"}, {"prepend", mark}}, replace}}}},
          {"pre_tokenizer", nullptr},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {back,
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}},
              {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
          {"model",
           {{"type", "BPE"},
            {"unk_token", "<unk>"},
            {"fuse_unk", true},
            {"byte_fallback", true},
            {"vocab", vocab},
            {"merges", merges}}}};
}

Json added(int id, const std::string& content, const Json& more = Json::object()) {
  Json token = {{"id", id}, {"content", content}, {"special", true}, {"normalized", false}};
  token.update(more);
  return token;
}

Tokenizer read(const TempDir& dir, const Json& json) {
  write_text(dir.file("tokenizer.json"), json_text(json));
  return Tokenizer::read(dir.file("tokenizer.json"));
}

// Where a text of spaces and the letters a and b is cut: neighbours of one piece merge, as far as these merges go.
std::vector<std::string> pieces(const TempDir& dir, const Json& pre_tokenizer, const std::string& text) {
  const Tokenizer t = read(dir, byte_level({"a a", "b b", "a b", "b a", "aa aa", "bb bb", "ab ab", "aa b", "a bb",
                                            "\u0120 a", "\u0120 b", "a \u0120", "b \u0120"},
                                           pre_tokenizer));
  std::vector<std::string> tokens;
  for (const int32_t id : t.encode(text)) tokens.push_back(t.decode({id}));
  return tokens;
}

using Strings = std::vector<std::string>;

}  // namespace

TEST_CASE("bpe: the merge that stands first is made first, of equal ones the leftmost") {
  const TempDir dir;
  const Tokenizer t = read(dir, byte_level({"b c", "a b", "a bc", "a a", "aa aa"}));
  CHECK(t.encode("abc") == Ids{258});
  CHECK(t.encode("ab") == Ids{257});
  CHECK(t.encode("aaa") == Ids{259, 'a'});
  CHECK(t.encode("aaaaaaa") == Ids{260, 259, 'a'});
  CHECK(t.decode({260, 258, 'x'}) == "aaaaabcx");
  CHECK((t.encode("").empty() && t.vocab_size() == 261 && t.separator() == std::string()));
  // Both writings of the merges, and the first line of a merges.txt.
  Json lists = byte_level({"b c", "a b", "a bc", "a a", "aa aa"});
  lists["model"]["merges"] = Json::array();
  for (const auto& [left, right] :
       std::vector<std::pair<std::string, std::string>>{{"b", "c"}, {"a", "b"}, {"a", "bc"}, {"a", "a"}, {"aa", "aa"}})
    lists["model"]["merges"].push_back(Json::array({left, right}));
  CHECK(read(dir, lists) == t);
  lists["model"]["merges"] = {"#version: 0.2", "b c", "a b", "a bc", "a a", "aa aa"};
  CHECK(read(dir, lists).encode("abcaaa") == Ids{258, 259, 'a'});
}

TEST_CASE("bpe: a long piece is merged as a short one is, and in no time") {
  const TempDir dir;
  std::vector<std::string> merges;
  for (std::string a = "a"; a.size() < 64; a += a) merges.push_back(a + " " + a);
  merges.insert(merges.end(), {"b a", "a b", "b b", "ab b", "aa b"});
  const Tokenizer t = read(dir, byte_level(merges));
  CHECK(t.encode(std::string(1 << 20, 'a')) == Ids((1 << 20) / 64, 261));
  CHECK(t.encode(std::string(1 << 20, ' ')).size() == 1 << 20);
  // Text of few letters, whose pieces are merged in both ways: the definition, one merge at a time.
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const std::string& merge : merges)
    pairs.push_back({merge.substr(0, merge.find(' ')), merge.substr(merge.find(' ') + 1)});
  Draws rng{3};
  for (const size_t length : {1, 2, 7, 47, 48, 49, 50, 200, 1000}) {
    std::string text;
    for (size_t i = 0; i < length; ++i) text += rng.below(3) == 0 ? 'b' : 'a';
    Strings symbols;
    for (const char c : text) symbols.push_back(std::string(1, c));
    for (bool merged = true; merged;) {
      merged = false;
      for (const auto& [left, right] : pairs) {
        for (size_t i = 0; i + 1 < symbols.size() && !merged; ++i) {
          if (symbols[i] != left || symbols[i + 1] != right) continue;
          symbols[i] += right, merged = true;
          symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        }
        if (merged) break;
      }
    }
    Strings got;
    for (const int32_t id : t.encode(text)) got.push_back(t.decode({id}));
    CHECK(got == symbols);
  }
}

TEST_CASE("bpe: the pieces of GPT-2's ByteLevel") {
  const TempDir dir;
  CHECK(pieces(dir, level(true), "aaaa aab") == Strings{"aaaa", " ", "aab"});
  CHECK(pieces(dir, level(true), "a  a") == Strings{"a", " ", " a"});
  Json prefix = level(true);
  prefix["add_prefix_space"] = true;
  CHECK(pieces(dir, prefix, "a a") == Strings{" a", " a"});
  CHECK(pieces(dir, prefix, " a") == Strings{" a"});
  prefix["use_regex"] = false;
  CHECK(pieces(dir, prefix, "aa bb") == Strings{" ", "aa", " ", "bb"});
}

TEST_CASE("bpe: every behavior of a split, inverted too, at a text and at an expression") {
  const TempDir dir;
  const Json b = {{"String", "b"}}, expression = {{"Regex", "b+"}};
  CHECK(pieces(dir, split(b, "Isolated"), "aabba") == Strings{"aa", "b", "b", "a"});
  CHECK(pieces(dir, split(expression, "Isolated"), "aabba") == Strings{"aa", "bb", "a"});
  CHECK(pieces(dir, split(b, "Removed"), "aabba") == Strings{"aa", "a"});
  CHECK(pieces(dir, split(b, "Removed", true), "aabba") == Strings{"b", "b"});
  CHECK(pieces(dir, split(b, "MergedWithPrevious"), "aabba") == Strings{"aab", "b", "a"});
  CHECK(pieces(dir, split(b, "MergedWithNext"), "aabba") == Strings{"aa", "b", "ba"});
  CHECK(pieces(dir, split(b, "Contiguous"), "aabba") == Strings{"aa", "bb", "a"});
  CHECK(pieces(dir, split({{"Regex", "a"}}, "Isolated", true), "aabb") == Strings{"a", "a", "bb"});
  CHECK(pieces(dir, split({{"Regex", "(?=b)"}}, "Isolated"), "aabba") == Strings{"aa", "b", "ba"});
  const Json digits = cut_by({{"type", "Digits"}, {"individual_digits", true}});
  CHECK(pieces(dir, digits, "aa1aa12") == Strings{"aa", "1", "aa", "1", "2"});
}

TEST_CASE("bpe: ignore_merges takes a piece that is a token whole, though no merge makes it") {
  const TempDir dir;
  Json json = byte_level({"a b"});
  json["model"]["vocab"]["abc"] = 257;
  CHECK(read(dir, json).encode("abc") == Ids{256, 'c'});
  json["model"]["ignore_merges"] = true;
  CHECK(read(dir, json).encode("abc abcd") == Ids{257, 32, 256, 'c', 'd'});
}

TEST_CASE("bpe: added tokens") {
  const TempDir dir;
  Json json = byte_level({"a a"});
  json["added_tokens"] = {added(257, "<s>"),
                          added(258, "<s>>"),
                          added(259, "<word>", {{"single_word", true}}),
                          added(260, "<l>", {{"lstrip", true}}),
                          added(261, "<r>", {{"rstrip", true}}),
                          added(262, "aa<", {{"normalized", true}, {"special", false}})};
  const Tokenizer t = read(dir, json);
  CHECK(t.vocab_size() == 263);
  CHECK(t.encode("aa<s>aa") == Ids{256, 257, 256});
  CHECK(t.encode("<s>><s") == Ids{258, '<', 's'});  // the longest
  CHECK(t.encode("aa<") == Ids{262});
  CHECK(t.encode("aa<s") == Ids{262, 's'});
  CHECK(t.encode("x<word>") == Ids{'x', '<', 'w', 'o', 'r', 'd', '>'});
  CHECK(t.encode(".<word> ") == Ids{'.', 259, ' '});
  CHECK(t.encode("x <l> <r> y") == Ids{'x', 260, ' ', 261, 'y'});
  CHECK(t.encode("\u3000\n<l>") == Ids{260});
  CHECK(t.decode(t.encode("aa<s>aa")) == "aa<s>aa");
}

TEST_CASE("bpe: space that an added token took is no other token that wants the space before it") {
  const TempDir dir;
  Json json = byte_level({});
  json["added_tokens"] = {added(256, "  ", {{"lstrip", true}, {"rstrip", true}}), added(257, "<r>", {{"rstrip", true}}),
                          added(258, "\n")};
  const Tokenizer t = read(dir, json);
  CHECK(t.encode("a      b") == Ids{'a', 256, 'b'});
  CHECK(t.encode("a     b   ") == Ids{'a', 256, 'b', 256});
  CHECK(t.encode("<r>    x") == Ids{257, 'x'});
  CHECK(t.encode("<r> \n x") == Ids{257, 258, ' ', 'x'});
}

TEST_CASE("bpe: two added tokens that are normalized to the same text are refused") {
  const TempDir dir;
  Json json = byte_level({});
  json["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", "x"}}}, {"content", "a"}};
  json["added_tokens"] = {added(256, "<a>", {{"normalized", true}}), added(257, "<x>", {{"normalized", true}})};
  check_fails(Exit::bad_data, {"\"<x>\"", "same text", "not computed here"}, [&] { read(dir, json); });
  json["added_tokens"][1]["normalized"] = false;
  CHECK(read(dir, json).encode("<x><a>") == Ids{257, 256});
}

TEST_CASE("bpe: characters with a token for each byte of one that is missing") {
  const TempDir dir;
  const std::string mark = "\u2581";
  const Json json = of_characters({mark, "a", "b"}, {{"a", "b"}, {mark, "ab"}});
  const Tokenizer t = read(dir, json);
  CHECK(t.encode("ab ab") == Ids{261, 261});
  CHECK(t.encode("\u00e9b") == Ids{257, 1 + 0xC3, 1 + 0xA9, 259});
  CHECK(t.decode(t.encode("ab ab")) == " ab ab");
  for (const char* text : {"ab ab", "\u00e9b", " a", "", "a  \n\U0001F600"})
    CHECK(t.decode(t.encode(text), true) == text);
  Json metaspace = json;
  metaspace["normalizer"] = nullptr;
  metaspace["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", mark}, {"prepend_scheme", "first"}, {"split", true}};
  metaspace["added_tokens"] = Json::array({added(262, "<s>")});
  CHECK(read(dir, metaspace).encode("ab ab<s>ab") == Ids{261, 261, 262, 260});
  // A text's begin is asked for: what follows may be no begin.
  Ids ids;
  metaspace["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", "[^!]+|!"}}}, {"behavior", "Isolated"}, {"invert", false}},
        metaspace["pre_tokenizer"]}}};
  const Tokenizer first = read(dir, metaspace);
  CHECK(first.encode("ab!ab") == Ids{261, 1 + '!', 260});
  CHECK((first.encode_begin("ab!ab!ab!ab!ab", ids) == 0 && ids.empty()));
  metaspace["pre_tokenizer"]["pretokenizers"][1]["prepend_scheme"] = "always";
  CHECK((read(dir, metaspace).encode_begin("ab!ab!ab!ab!ab", ids) > 0 && ids[0] == 261 && ids[2] == 1 + '!'));
  metaspace["normalizer"] = {{"type", "NFC"}};
  metaspace["pre_tokenizer"]["pretokenizers"][1]["prepend_scheme"] = "first";
  check_fails(Exit::bad_data, {"prepend_scheme first, after a normalizer"}, [&] { read(dir, metaspace); });
  // Without ByteFallback a byte is written by its name.
  Json named = json;
  named["decoder"]["decoders"].erase(1);
  CHECK(read(dir, named).decode(t.encode("\u00e9b"), true) == "<0xC3><0xA9>b");
}

TEST_CASE("bpe: begin and end of a text") {
  const TempDir dir;
  Json json = byte_level({"a a"});
  json["added_tokens"] = {added(257, "<bos>"), added(258, "<|endoftext|>"), added(259, "<stop>")};
  CHECK((read(dir, json).prefix().empty() && read(dir, json).eos() == 258));
  write_text(dir.file("tokenizer_config.json"), R"({"eos_token": {"content": "<stop>"}})");
  CHECK(read(dir, json).eos() == 259);
  write_text(dir.file("tokenizer_config.json"), R"({"eos_token": "<stop>"})");
  CHECK(Tokenizer::read(dir.path.string()).eos() == 259);
  write_text(dir.file("tokenizer_config.json"), "no JSON");
  CHECK(read(dir, json).eos() == 258);
  const Json text = {{"Sequence", {{"id", "A"}}}}, bos = {{"SpecialToken", {{"id", "<bos>"}}}},
             stop = {{"SpecialToken", {{"id", "<stop>"}}}};
  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {{{"type", "ByteLevel"}},
        {{"type", "TemplateProcessing"},
         {"single", {bos, text, stop}},
         {"special_tokens", {{"<bos>", {{"ids", Json::array({257})}}}, {"<stop>", {{"ids", Json::array({259})}}}}}}}}};
  const Tokenizer t = read(dir, json);
  CHECK((t.prefix() == Ids{257} && t.eos() == 259 && t.encode("a") == Ids{'a'}));
  json["post_processor"]["processors"][1]["special_tokens"]["<bos>"]["ids"] = Json::array({260});
  check_fails(Exit::bad_data, {"post-processor"}, [&] { read(dir, json); });
}

TEST_CASE("bpe: a fingerprint is of what decides the ids, and not of how the file writes it") {
  const TempDir dir;
  Json json = byte_level({"a a", "b b"});
  json["pre_tokenizer"].erase("use_regex");
  json["added_tokens"] = {added(258, "<s>"), added(259, "<t>")};
  const Tokenizer t = read(dir, json);
  Json full = json;  // with each value that is otherwise taken for granted
  full["pre_tokenizer"]["use_regex"] = true, full["pre_tokenizer"]["trim_offsets"] = true;
  for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
    full["model"][key] = nullptr;
  for (const char* key : {"fuse_unk", "byte_fallback", "ignore_merges"}) full["model"][key] = false;
  full["model"]["merges"] = Json::array({Json::array({"a", "a"}), Json::array({"b", "b"})});
  for (const char* key : {"truncation", "padding", "post_processor"}) full[key] = nullptr;
  for (const char* key : {"single_word", "lstrip", "rstrip"}) full["added_tokens"][0][key] = false;
  CHECK((read(dir, full) == t && read(dir, full).describe() == t.describe()));
  const auto differs = [&](const char* at, const Json& value) {
    Json other = full;
    other[Json::json_pointer(at)] = value;
    const Tokenizer o = read(dir, other);
    CHECK_MESSAGE((!(o == t) && o.describe() != t.describe()), at);
  };
  differs("/model/merges", {"b b", "a a"});
  differs("/model/ignore_merges", true);
  Json swapped = full["model"]["vocab"];
  std::swap(swapped["aa"], swapped["bb"]);
  differs("/model/vocab", swapped);
  differs("/pre_tokenizer/use_regex", false);
  differs("/pre_tokenizer/add_prefix_space", true);
  differs("/pre_tokenizer", split({{"Regex", "a+"}}, "Isolated"));
  differs("/normalizer", {{"type", "NFC"}});
  for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"})
    differs((std::string("/added_tokens/0/") + flag).c_str(), true);
  differs("/added_tokens/0/special", false);
  differs("/added_tokens/0/content", "<r>");
  const auto template_of = [](const Json& single) -> Json {
    return {{"type", "TemplateProcessing"},
            {"single", single},
            {"special_tokens", {{"<s>", {{"ids", Json::array({258})}}}}}};
  };
  const Json text = {{"Sequence", {{"id", "A"}}}}, token = {{"SpecialToken", {{"id", "<s>"}}}};
  differs("/post_processor", template_of({token, text}));
  differs("/post_processor", template_of({text, token}));
}

TEST_CASE("bpe: what is not computed is refused by name, and leaves a model's ids") {
  const TempDir dir;
  const auto foreign = [&](const char* at, const Json& value, const std::string& name) {
    Json json = byte_level({"a a"});
    json[Json::json_pointer(at)] = value;
    check_fails(Exit::bad_data, {"tokenizer.json", name, "not computed here"}, [&] { read(dir, json); });
    CHECK(Tokenizer::load(dir.path.string()).is_foreign());
  };
  foreign("/normalizer", {{"type", "NFKC"}}, "normalizer NFKC");
  foreign("/normalizer", {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", "b"}}, "Replace");
  const Json twice = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  foreign("/normalizer", {{"type", "Sequence"}, {"normalizers", Json(40, twice)}}, "512 times as long");
  foreign("/normalizer", {{"type", "Prepend"}, {"prepend", std::string(1000, 'a')}}, "1001 times as long");
  foreign("/pre_tokenizer", {{"type", "Whitespace"}}, "Whitespace");
  foreign("/pre_tokenizer", 5, "the pre-tokenizer 5,");
  foreign("/pre_tokenizer", nullptr, "neither bytes");
  foreign("/pre_tokenizer/surprise", 1, "surprise");
  foreign("/pre_tokenizer", split({{"Regex", "a"}}, "Sideways"), "behavior");
  foreign("/pre_tokenizer", split({{"Text", "a"}}, "Isolated"), "pattern");
  foreign("/post_processor", {{"type", "Surprise"}}, "post-processor Surprise");
  foreign("/decoder", {{"type", "WordPiece"}}, "decoder WordPiece");
  foreign("/truncation", 8, "truncation");
  foreign("/padding", true, "padding");
  foreign("/surprise", 1, "surprise");
  foreign("/version", "2.0", "2.0");
  foreign("/model/dropout", 0.1, "dropout");
  foreign("/model/continuing_subword_prefix", "##", "continuing_subword_prefix");
  foreign("/model/end_of_word_suffix", "</w>", "end_of_word_suffix");
  foreign("/model/byte_fallback", true, "byte_fallback");
  foreign("/model/surprise", 1, "surprise");
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token"}) {
    Json json = byte_level({"a a"});
    json["model"][key] = nullptr;
    CHECK(read(dir, json).encode("aa") == Ids{256});
  }
}

TEST_CASE("bpe: a file that contradicts itself is refused") {
  const TempDir dir;
  const auto refused = [&](const char* at, const Json& value, const std::string& why) {
    Json json = byte_level({"a a", "aa aa"});
    json[Json::json_pointer(at)] = value;
    check_fails(Exit::bad_data, {"tokenizer.json", why}, [&] { read(dir, json); });
  };
  refused("/model/vocab/a", 98, "same id, 98");
  refused("/model/vocab/a", -1, "the id of \"a\"");
  refused("/model/vocab/a", 1 << 30, "the id of \"a\"");
  refused("/model/vocab/a", "x", "the id of \"a\"");
  refused("/model/vocab/", 300, "without text");
  refused("/model/merges", {"a q", "a c"}, "merge 0");
  refused("/model/merges", {"aa"}, "merge 0");
  refused("/model/merges", Json::array({Json::array({"a", "a", "a"})}), "merge 0");
  refused("/model/merges", {1}, "merge 0");
  refused("/model/merges", "a a", "not a list");
  refused("/added_tokens", Json::array({added(259, "<s>")}), "its place gives 258");
  refused("/added_tokens", Json::array({added(258, "a")}), "its place gives 97");
  refused("/added_tokens", Json::array({added(258, "<s>"), added(258, "<s>")}), "twice");
  refused("/added_tokens", Json::array({added(258, "")}), "no text");
  refused("/added_tokens", Json::array({added(258, "<s>", {{"lstrip", 1}})}), "lstrip");
  refused("/added_tokens", Json::array({added(258, "<s>", {{"surprise", 1}})}), "surprise");
  refused("/added_tokens", "<s>", "not a list");
  refused("/pre_tokenizer", split({{"Regex", "("}}, "Isolated"), "regular expression");
  Json hole = byte_level({"a a"});  // an id that no token has is none of a text, and written as a number
  hole["model"]["vocab"]["aa"] = 300;
  CHECK((read(dir, hole).decode({299, 300, 301}) == "aa" && read(dir, hole).vocab_size() == 301));
  CHECK((read(dir, hole).name_of(299) == "<299>" && read(dir, hole).name_of(300) == "aa"));
}

TEST_CASE("bpe: broken UTF-8 is refused with its place") {
  const TempDir dir;
  const Tokenizer t = read(dir, byte_level({"a a"}));
  for (const std::string bad : {"\xFF", "\xC3", "\xED\xA0\x80", "\xC0\x80", "\xF4\x90\x80\x80"})
    check_fails(Exit::bad_data, {"byte 9 of"}, [&] { t.encode("123456789" + bad); });
}

TEST_CASE("bpe: threads, and a text that comes in pieces, change no id") {
  const TempDir dir;
  Json json = byte_level(
      {"a a", "\u0120 a", "a b", "1 1", "\u0120 \u0120"},
      split({{"Regex", R"([^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"}}, "Isolated"));
  json["added_tokens"] = {added(261, "<s>"), added(262, "<s>\n"), added(263, "\u00e9!", {{"normalized", true}})};
  const Tokenizer t = read(dir, json);
  const std::vector<std::string> words = {"a",     "aab",    " ", "   ", "\n",         "1",
                                          "11111", "\u00e9", "!", "<",   "\U0001F600", "b"};
  Draws rng{5};
  for (const bool tokens : {false, true}) {
    std::string text;
    while (text.size() < (tokens ? 700000 : 1500000)) {
      text += words[rng.below(words.size())];
      if (rng.below(3) == 0) text += std::string(rng.below(40), rng.below(2) == 0 ? ' ' : '7');
      if (tokens && rng.below(50) == 0) text += "<s>";
    }
    Ids one, several, pieces;
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    one = t.encode(text);
    omp_set_num_threads(3);
    several = t.encode(text);
    omp_set_num_threads(threads);
    CHECK(one == several);
    CHECK(t.decode(one) == text);
    std::string waiting;
    for (size_t at = 0; at < text.size();) {
      const size_t size = std::min<size_t>(text.size() - at, 1 + rng.below(60000));
      waiting += text.substr(at, size), at += size;
      const size_t valid = valid_utf8(waiting);
      waiting.erase(0, t.encode_begin(std::string_view(waiting).substr(0, valid), pieces));
    }
    const Ids rest = t.encode(waiting);
    pieces.insert(pieces.end(), rest.begin(), rest.end());
    CHECK((one == pieces && waiting.size() < 70000));
  }
}
