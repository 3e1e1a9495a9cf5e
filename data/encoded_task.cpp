#include "data/encoded_task.h"

#include <algorithm>

#include "engine/io/printable.h"

namespace crossply {
namespace {

int32_t end_of_text(const Tokenizer& tokenizer) {
  if (tokenizer.is_bytes()) return 0;  // no text has it
  if (tokenizer.eos() < 0)
    fail(Exit::bad_data, "the model's tokenizer, ", tokenizer.describe(), ", has no token that ends a text, which a ",
         "task's answers need: say \"eos_token\" in the model's tokenizer_config.json");
  return tokenizer.eos();
}

class EncodedTask : public Source, public Task {
 public:
  EncodedTask(std::unique_ptr<TaskSource> words, const Tokenizer& tokenizer)
      : words_(std::move(words)), tokenizer_(tokenizer), eos_(end_of_text(tokenizer)) {
    for (int64_t i = 0; i < words_->size(); ++i) add(i);
    for (int32_t word = 0; word < words_->vocab_size(); ++word) {
      const uint8_t one[] = {static_cast<uint8_t>(word)};
      max_tokens_of_word_ = std::max(max_tokens_of_word_, std::ssize(tokenizer_.encode(" " + words_->text_of(one))));
    }
  }

  int64_t longest() const { return samples_.longest(); }
  void set_seq_len(int64_t T) { T_ = T; }

  int64_t size() const override { return samples_.size(); }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return tokenizer_.vocab_size(); }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    samples_.read(index, T_, eos_, tokens, targets);
  }
  const Task* task() const override { return this; }
  std::vector<int32_t> prompt(int64_t index) const override {
    const auto tokens = samples_.prompt(index);
    return {tokens.begin(), tokens.end()};
  }
  int32_t eos() const override { return eos_; }
  int64_t max_new_tokens() const override { return words_->max_new_tokens() * max_tokens_of_word_; }
  bool is_hard(int64_t index) const override { return words_->is_hard(index); }
  Verdict judge(int64_t index, const std::vector<int32_t>& generated) const override {
    const Answer answer = cut_at_eos(generated, eos_);
    std::vector<int32_t> words = words_->words_of(tokenizer_.decode(answer.tokens, true));
    if (answer.has_eos) words.push_back(words_->eos());
    return words_->judge(index, words);
  }

 private:
  void add(int64_t index) {
    const std::string all = words_->text_of(words_->sequence(index));
    const std::string question = words_->text_of(words_->prompt_tokens(index));
    std::vector<int32_t> tokens = tokenizer_.prefix();
    append(question, tokens);
    const int64_t prompt = std::ssize(tokens);
    append(all.substr(question.size()), tokens);
    tokens.push_back(eos_);
    samples_.add(tokens, prompt);
  }
  void append(const std::string& text, std::vector<int32_t>& tokens) {
    const std::vector<int32_t> ids = tokenizer_.encode(text);
    if (const std::string back = tokenizer_.decode(ids, true); back != text) refuse(text, back);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  }

  [[noreturn]] void refuse(const std::string& text, const std::string& back) const {
    const auto [different, ignored] = std::mismatch(text.begin(), text.end(), back.begin(), back.end());
    const auto at = static_cast<size_t>(different - text.begin()), from = at < 20 ? 0 : at - 20;
    fail(Exit::bad_data, "the model's tokenizer, ", tokenizer_.describe(), ", changes this task's text: '",
         excerpt(text.substr(from, 40)), "' comes back as '", excerpt(back.substr(std::min(from, back.size()), 40)),
         "'; take a model whose tokenizer has these characters");
  }

  std::unique_ptr<TaskSource> words_;
  Tokenizer tokenizer_;
  int32_t eos_;
  SampleStore<int32_t> samples_;
  int64_t T_ = 0;
  ptrdiff_t max_tokens_of_word_ = 1;  // tokens of a word of the task
};

}  // namespace

Dataset encode_task(TaskSplits words, const DataOptions& options) {
  const Tokenizer& tokenizer = options.of_model;
  auto train = std::make_unique<EncodedTask>(std::move(words.train), tokenizer);
  auto test = std::make_unique<EncodedTask>(std::move(words.test), tokenizer);
  const int64_t needed = std::max(train->longest(), test->longest()) - 1;
  if (options.seq_len != 0 && options.seq_len < needed)
    fail(Exit::usage, options.spec, " in the tokens of the model, ", tokenizer.describe(),
         ", needs a sequence length of at least ", needed, ", not ", options.seq_len, "; give --seq ", needed);
  const int64_t T = options.seq_len != 0 ? options.seq_len : needed;
  train->set_seq_len(T), test->set_seq_len(T);
  return {std::move(train), std::move(test), tokenizer};
}

}  // namespace crossply
