#include "data/encoded_task.h"

#include "data/arith.h"
#include "data/prosqa.h"
#include "tests/support/data_check.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

DataOptions few(const std::string& spec, const Tokenizer& of_model) {
  DataOptions o;
  o.spec = spec, o.of_model = of_model, o.train_samples = 40, o.test_samples = 20, o.seed = 5;
  return o;
}

Tokenizer tiny_bpe(const TempDir& scratch) { return Tokenizer::read(write_tiny_bpe(scratch.path.string())); }

// What of a sample is scored, as text; and what is not.
std::pair<std::string, std::string> texts_of(const Source& source, const Tokenizer& tokenizer, int64_t index) {
  const Sample s = read_sample(source, index);
  std::vector<int32_t> prompt = source.task()->prompt(index), scored;
  for (const int32_t target : s.targets)
    if (target >= 0) scored.push_back(target);
  CHECK(scored.back() == source.task()->eos());
  scored.pop_back();
  for (size_t t = 0; t < s.targets.size(); ++t) {
    if (t < prompt.size()) CHECK(s.tokens[t] == prompt[t]);
    const bool is_scored = t + 1 >= prompt.size() && t + 1 < prompt.size() + scored.size() + 1;
    CHECK((s.targets[t] >= 0) == is_scored);
    if (is_scored && t + 1 < s.tokens.size() && t + 1 < prompt.size() + scored.size())
      CHECK(s.tokens[t + 1] == s.targets[t]);
  }
  return {tokenizer.decode(prompt, true), tokenizer.decode(scored)};
}

std::vector<int32_t> answered(const Tokenizer& tokenizer, const std::string& text, int32_t eos) {
  std::vector<int32_t> ids = tokenizer.encode(text);
  ids.push_back(eos);
  return ids;
}

}  // namespace

TEST_CASE("encoded task: the samples are those of the words, in the same order") {
  const TempDir scratch;
  for (const Tokenizer& tokenizer : {Tokenizer::bytes(), tiny_bpe(scratch)})
    for (const char* spec : {"prosqa", "arith:4", "arith:4-6i"}) {
      CAPTURE(spec);
      const Dataset words = open_dataset(few(spec, Tokenizer())), encoded = open_dataset(few(spec, tokenizer));
      CHECK(encoded.tokenizer == tokenizer);
      int64_t longest = 0;
      for (const auto part : {&Dataset::train, &Dataset::test}) {
        const auto& own = dynamic_cast<const TaskSource&>(*(words.*part));
        const Source& source = *(encoded.*part);
        REQUIRE(source.size() == own.size());
        CHECK(source.vocab_size() == tokenizer.vocab_size());
        CHECK(source.seq_len() == encoded.train->seq_len());
        for (int64_t i = 0; i < own.size(); ++i) {
          const auto [question, solution] = texts_of(source, tokenizer, i);
          CHECK(question == own.text_of(own.prompt_tokens(i)));
          CHECK(question + solution == own.text_of(own.sequence(i)));
          CHECK(source.task()->is_hard(i) == own.is_hard(i));
          const std::vector<int32_t> gold = answered(tokenizer, solution, source.task()->eos());
          const Task::Verdict v = source.task()->judge(i, gold);
          CHECK((v.answer && v.steps));
          CHECK(static_cast<int64_t>(gold.size()) <= source.task()->max_new_tokens());
          longest = std::max(longest, static_cast<int64_t>(source.task()->prompt(i).size() + gold.size()));
        }
      }
      CHECK(encoded.train->seq_len() == longest - 1);
      DataOptions shorter = few(spec, tokenizer), longer = few(spec, tokenizer);
      shorter.seq_len = longest - 2, longer.seq_len = longest + 6;
      check_fails(Exit::usage, {spec, str("at least ", longest - 1), str("not ", longest - 2)},
                  [&] { open_dataset(shorter); });
      CHECK(open_dataset(longer).test->seq_len() == longest + 6);
    }
}

TEST_CASE("encoded task: answers are compared as text, whatever tokens they are made of") {
  const TempDir scratch;
  const Tokenizer tokenizer = tiny_bpe(scratch);
  const Dataset data = open_dataset(few("prosqa", tokenizer));
  const Task& task = *data.test->task();
  const auto solution = texts_of(*data.test, tokenizer, 0).second;
  const std::string answer = solution.substr(solution.find("###"));
  const auto verdict = [&](const std::string& text) { return verdict_of(task, answered(tokenizer, text, task.eos())); };
  CHECK(verdict(solution) == "answer+steps");
  CHECK(verdict(" " + solution) == "answer+steps");
  CHECK(verdict(answer) == "answer");
  CHECK(verdict("so: " + answer) == "answer");
  CHECK(verdict(answer + " Yes.") == "wrong");
  CHECK(verdict("") == "wrong");
  CHECK(verdict("###") == "wrong");
  std::vector<int32_t> with_more = answered(tokenizer, solution, task.eos());
  with_more.insert(with_more.end(), {0, 255, 257});
  CHECK(verdict_of(task, with_more) == "answer+steps");  // what follows the end does not count
  CHECK(verdict_of(task, {-1, 1 << 20, 255, 254}) == "wrong");
  // A BPE may write the same text in other tokens.
  std::vector<int32_t> letters;
  for (const char c : solution) letters.push_back(static_cast<unsigned char>(c));
  CHECK(verdict_of(task, letters) == "answer+steps");
}

TEST_CASE("encoded task: numbers of integers are whole") {
  ArithSource source({3, 3, arith::Numbers::integers}, 0);
  using Words = std::vector<int32_t>;
  const auto zero = static_cast<int32_t>(arith::zero);
  CHECK(source.words_of(" 12 / 4 = 3") == Words{zero + 1, zero + 2, arith::over, zero + 4, arith::equals, zero + 3});
  CHECK(source.words_of("12/4") == Words{zero + 1, zero + 2, arith::over, zero + 4});
  CHECK(source.words_of("1 2") == Words{zero + 1, -1, zero + 2});
  CHECK(source.words_of("x=") == Words{-1, arith::equals});
  ArithSource residues({3, 3}, 0);
  CHECK(residues.words_of("10 + 11") == Words{zero + 10, arith::plus, -1});
  const uint8_t text[] = {arith::open, arith::zero + 10, arith::minus, arith::zero, arith::close, arith::eos};
  CHECK(residues.text_of(text) == "( 10 - 0 )");
}

TEST_CASE("encoded task: a tokenizer that changes the text is refused") {
  const TempDir scratch;
  nlohmann::json object = tiny_bpe_json();
  object["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", "#"}}}, {"content", "x"}};
  write_text(scratch.file("tokenizer.json"), json_text(object));
  const Tokenizer without = Tokenizer::read(scratch.path.string());
  check_fails(Exit::bad_data, {"changes this task's text", "###", "xxx"},
              [&] { open_dataset(few("prosqa", without)); });
  CHECK(open_dataset(few("arith:3", without)).test->size() == 20);
}

TEST_CASE("encoded task: a tokenizer that cannot write the task is refused") {
  const TempDir scratch;
  nlohmann::json object = tiny_bpe_json();
  object["added_tokens"] = nlohmann::json::array();
  object["model"]["vocab"].erase("<|endoftext|>");
  object["model"]["vocab"]["the"] = 256;
  write_text(scratch.file("tokenizer.json"), json_text(object));
  const Tokenizer endless = Tokenizer::read(scratch.path.string());
  check_fails(Exit::bad_data, {"no token that ends a text", "eos_token"},
              [&] { open_dataset(few("prosqa", endless)); });
}
