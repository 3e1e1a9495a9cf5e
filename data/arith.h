// The arithmetic expression task: simplify an expression over the integers modulo 11, one operator at a time.
//
//   ( 7 + 5 ) / 4 = 1 / 4 = 3 <eos>
//
// k is the number of operators of the expression. A sample is built backwards: a number, then k times one number of it
// is replaced by `a op b` of the same value; the states are written from the last to the first, joined by `=`. The
// prompt ends with the first `=`; everything behind it is scored. No division is by zero.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "data/task_source.h"

namespace crossply {

namespace arith {
constexpr uint8_t pad = 0, cls = 1, eos = 2, plus = 3, minus = 4, times = 5, over = 6, open = 7, close = 8, equals = 9,
                  zero = 10;  // the number n is token zero + n
constexpr int32_t modulus = 11, vocab_size = zero + modulus;
}  // namespace arith

const std::vector<std::string>& arith_words();  // by id

// A whole chain with k operators and its eos.
TaskSample arith_sample(int k, Random& random);
// The most tokens a chain can have: a state with i operators has at most 4i - 1.
int64_t arith_bound(int k);

// The value of an expression, 0..10; nothing if the tokens are no expression or divide by zero. Takes any garbage.
std::optional<int32_t> arith_evaluate(std::span<const int32_t> tokens);

class ArithSource : public TaskSource {
 public:
  ArithSource(int k, int64_t seq_len /*0: the bound*/);
  int64_t max_new_tokens() const override;
  // answer: eos came, and the token right before it is the value. steps: every segment has the value of the prompt and
  // one operator less than the segment before it, and the last one is a single number.
  Verdict judge(int64_t index, const std::vector<int32_t>& generated) const override;

 private:
  int k_;
};

Dataset open_arith(int k, const DataOptions& options);

}  // namespace crossply
