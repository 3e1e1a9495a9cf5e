// What the lines that `score` reads mean in tokens.
#include "engine/io/json.h"
#include "eval/score_request.h"

#include "tests/support/data_check.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

const Tokenizer bytes = Tokenizer::bytes();
const Tokenizer words = Tokenizer::words({"<eos>", "2", "3", "5", "+", "="});

ScoreRequest parse(const std::string& line, const Tokenizer& tokenizer = bytes, int64_t V = 256, int64_t longest = 16,
                   int32_t prefix = 200) {
  return ScoreRequests(tokenizer, V, longest, prefix).parse(line, "line 3");
}
Passage passage(const std::string& line, const Tokenizer& tokenizer = bytes) {
  const ScoreRequest request = parse(line, tokenizer);
  REQUIRE((request.kind == ScoreRequest::pair && request.passages.size() == 1));
  return request.passages[0];
}
Ids of_bytes(const std::string& text) { return bytes.encode(text); }

}  // namespace

TEST_CASE("score_request: a context and its continuation, split where the harness splits") {
  const Passage plain = passage(R"({"context": "ab", "continuation": " cd"})");
  CHECK((plain.tokens == of_bytes("ab cd") && plain.first == 2));
  // Spaces of any kind at the end of the context are scored.
  for (const char* space : {" ", "  ", "\\n", " \\t", "\u00a0", "\u3000 ", "\u2028", "\u0085", "\u205f\u200a"}) {
    CAPTURE(space);
    const Passage moved = passage(str(R"({"context": "ab)", space, R"(", "continuation": "cd"})"));
    CHECK((moved.first == 2 && moved.tokens.size() > 4));
  }
  CHECK(passage("{\"context\": \"ab\u200b\", \"continuation\": \"c\"}").first == 5);  // no space to Unicode
  const Passage sum = passage(R"({"context": "2 + 3 =", "continuation": " 5"})", words);
  CHECK((sum.tokens == Ids{1, 4, 2, 5, 3} && sum.first == 4));
  const Passage ids = passage(R"({"context": [1, 2], "continuation": [3]})");
  CHECK((ids.tokens == Ids{1, 2, 3} && ids.first == 2));
  CHECK(passage(R"({"context": [1, 2], "continuation": "a"})").tokens == Ids{1, 2, 97});
}

TEST_CASE("score_request: nothing before the continuation") {
  for (const char* context : {R"("")", "[]", R"("  ")"}) {
    CAPTURE(context);
    const Passage begun = passage(str("{\"context\": ", context, R"(, "continuation": "cd"})"));
    CHECK((begun.first == 1 && begun.tokens[0] == 200));
  }
  const Passage own = passage(R"({"context": [], "continuation": [200, 5]})");  // brings its beginning along
  CHECK((own.tokens == Ids{200, 5} && own.first == 1));
  CHECK(passage(R"({"context": "ab", "continuation": [99]})").tokens == of_bytes("abc"));
  const auto without = [](const char* line) { parse(line, bytes, 256, 16, -1); };
  without(R"({"context": "a", "continuation": "b"})");
  for (const char* line :
       {R"({"context": "", "continuation": "b"})", R"({"text": "b"})", R"({"context": "", "max_new_tokens": 1})"})
    check_fails(Exit::bad_data, {"line 3", "--prefix-token"}, [&] { without(line); });
}

TEST_CASE("score_request: what is too long") {
  const ScoreRequest cut = parse(R"({"context": "0123456789abcdefgh", "continuation": "xy"})");
  CHECK((cut.truncated && cut.passages[0].tokens == of_bytes("3456789abcdefghxy") && cut.passages[0].first == 15));
  const ScoreRequest fits = parse(R"({"context": "0123456789abcde", "continuation": "xy"})");
  CHECK((!fits.truncated && fits.passages[0].tokens.size() == 17));
  check_fails(Exit::bad_data, {"line 3", "17 tokens", "16"},
              [] { parse(R"({"context": "a", "continuation": "0123456789abcdefg"})"); });
  const ScoreRequest text = parse(R"({"text": "0123456789abcdefgh"})");
  CHECK((text.kind == ScoreRequest::text && !text.truncated && text.passages.size() == 2));
  CHECK(text.passages[0].tokens[0] == 200);
  CHECK(parse(R"({"text": ""})").passages.empty());
}

TEST_CASE("score_request: a token that begins every text is given; with score_begin it is scored given itself") {
  const TempDir dir;
  Json json = tiny_bpe_json();
  json["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single", {{{"SpecialToken", {{"id", "<|endoftext|>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
                            {"special_tokens", {{"<|endoftext|>", {{"ids", Json::array({256})}}}}}};
  write_text(dir.file("tokenizer.json"), json_text(json));
  const Tokenizer tokenizer = Tokenizer::read(dir.path.string());
  const auto passages = [&](const std::string& line, int32_t prefix = 256) {
    return parse(line, tokenizer, 259, 16, prefix).passages;
  };
  for (const char* text : {R"("the")", R"("<|endoftext|>the")", "[256, 258]"}) {
    CAPTURE(text);
    const auto plain = passages(str("{\"text\": ", text, "}"));
    const auto harness = passages(str("{\"text\": ", text, ", \"score_begin\": true}"));
    REQUIRE((plain.size() == 1 && harness.size() == 1));
    CHECK((plain[0].tokens == Ids{256, 258} && plain[0].first == 1));
    CHECK((harness[0].tokens == Ids{256, 256, 258} && harness[0].first == 1));
  }
  CHECK(passages(R"({"text": ""})").empty());  // nothing but what begins a text
  CHECK(passages(R"({"text": [258]})")[0].tokens == Ids{256, 258});
  CHECK(passages(R"({"text": [200, 258]})", 200)[0].tokens == Ids{200, 258});  // --prefix-token
  check_fails(Exit::bad_data, {"line 3", "score_begin"}, [&] { passages(R"({"text": "a", "score_begin": 1})"); });
  check_fails(Exit::bad_data, {"line 3", "score_begin"},
              [&] { passages(R"({"context": "a", "continuation": "b", "score_begin": true})"); });
}

TEST_CASE("score_request: generation") {
  const ScoreRequest request =
      parse(R"({"id": [1, {"a": null}], "context": "ab", "max_new_tokens": 4, "until": "\n"})");
  CHECK((request.kind == ScoreRequest::generation && request.prompt == of_bytes("ab") && request.max_new == 4));
  CHECK((request.until == std::vector<std::string>{"\n"} && !request.truncated && request.passages.empty()));
  CHECK(json_text(request.id) == R"([1,{"a":null}])");
  const ScoreRequest cut = parse(R"({"context": "0123456789abcdef", "max_new_tokens": 6, "until": ["a", "bc"]})");
  CHECK((cut.prompt == of_bytes("6789abcdef") && cut.truncated && cut.until.size() == 2 && cut.id.is_discarded()));
  CHECK(parse(R"({"context": [], "max_new_tokens": 6})").prompt == Ids{200});
}

TEST_CASE("score_request: what is no request is refused with its line") {
  struct Case {
    const char *line, *says;
  };
  for (const Case& bad : {
           Case{"", "ends too early, at byte 0"},
           {"{", "ends too early, at byte 1"},
           {"[1]", "a JSON object"},
           {"7", "a JSON object"},
           {"{}", "\"context\""},
           {R"({"id": 1, "context": "a"})", "\"continuation\""},
           {R"({"context": 5, "continuation": "a"})", "\"context\" is 5"},
           {R"({"context": {"a": 1}, "continuation": "a"})", "expected a text"},
           {R"({"context": "a", "continuation": null})", "\"continuation\" is null"},
           {R"({"context": "a", "continuation": ""})", "\"continuation\" \"\" has no tokens"},
           {R"({"context": "", "continuation": []})", "\"continuation\" [] has no tokens"},
           {R"({"context": [], "continuation": [200]})", "\"continuation\" [200] has no tokens"},
           {R"({"context": "a", "continuation": [1, 256]})", "256 is outside the vocabulary of 256"},
           {R"({"context": "a", "continuation": [-1]})", "-1"},
           {R"({"context": "a", "continuation": [1.5]})", "1.5"},
           {R"({"context": "a", "continuation": [4294967297]})", "4294967297"},
           {R"({"context": "a", "continuation": [99999999999999999999]})", "no integer"},
           {R"({"context": "a", "continuation": ["b"]})", "no integer"},
           {R"({"text": "a", "temperature": 1})", "temperature"},
           {R"({"context": "a", "continuation": "b", "text": "c"})", "\"text\""},
           {R"({"context": "a", "max_new_tokens": 0})", "max_new_tokens"},
           {R"({"context": "a", "max_new_tokens": 16})", "expected 1 to 15"},
           {R"({"context": "a", "max_new_tokens": 2.5})", "2.5"},
           {R"({"context": "a", "max_new_tokens": "8"})", "max_new_tokens"},
           {R"({"context": "a", "max_new_tokens": 2, "until": [""]})", "until"},
           {R"({"context": "a", "max_new_tokens": 2, "until": [3]})", "until"},
       }) {
    CAPTURE(bad.line);
    check_fails(Exit::bad_data, {"line 3", bad.says}, [&] { parse(bad.line); });
  }
  check_fails(Exit::bad_data, {"line 3", "7", "words"}, [] { parse(R"({"text": "2 + 7"})", words, 6); });
  check_fails(Exit::bad_data, {"line 3"}, [] { parse("{\"text\": \"\xff\"}"); });
  check_fails(Exit::bad_data, {"line 3"},
              [] { parse("{\"text\": " + std::string(5000, '[') + std::string(5000, ']') + "}"); });
}
