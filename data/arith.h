// The arithmetic expression task: simplify an expression one operator at a time.
//
//   ( 7 + 5 ) / 4 = 1 / 4 = 3 <eos>      over the integers modulo 11, a token per number
//   ( 7 + 5 ) / 4 = 1 2 / 4 = 3 <eos>    over the integers, a token per digit
//
// k is the number of operators of the expression. A sample is built backwards: a number, then k times one number of it
// is replaced by `a op b` of the same value; the states are written from the last to the first, joined by `=`. The
// prompt ends with the first `=`; everything behind it is scored. No division is by zero; over the integers all are
// exact.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "data/task_source.h"

namespace crossply {

namespace arith {
constexpr uint8_t pad = 0, cls = 1, eos = 2, plus = 3, minus = 4, times = 5, over = 6, open = 7, close = 8, equals = 9,
                  zero = 10;  // the number n is token zero + n
constexpr int32_t modulus = 11, vocab_size = zero + modulus;

enum class Numbers { residues, integers };
constexpr int32_t largest = 50;  // of the integers in a sample; the smallest is 0
}  // namespace arith

// What arith:6, arith:4-6 or arith:6i names.
struct ArithSpec {
  int fewest, most;  // operators
  arith::Numbers numbers = arith::Numbers::residues;
};
std::optional<ArithSpec> parse_arith(std::string_view spec);  // nothing where it is no such spec

const std::vector<std::string>& arith_words();  // by id

// A whole chain and its eos; every number of operators of the spec has the same chance.
TaskSample arith_sample(const ArithSpec& spec, Random& random);
// The most tokens a chain can have. A state with i operators has i + 1 numbers and at most i - 1 pairs of brackets.
int64_t arith_bound(const ArithSpec& spec);
// The share of the answers that a guess gets: they are uniform but for duplicates that were left out.
double arith_chance(const ArithSpec& spec);

// The value of an expression; a residue is 0..10. Nothing if the tokens are no expression, divide by zero or, over the
// integers, with a remainder, or leave 64 bits. Takes any garbage.
std::optional<int64_t> arith_evaluate(std::span<const int32_t> tokens,
                                      arith::Numbers numbers = arith::Numbers::residues);

class ArithSource : public TaskSource {
 public:
  ArithSource(const ArithSpec& spec, int64_t seq_len /*0: the bound*/);
  int64_t max_new_tokens() const override;
  // answer: eos came, and the number right before it is the value. steps: every segment has the value of the prompt and
  // one operator less than the segment before it, and the last one is a single number.
  Verdict judge(int64_t index, const std::vector<int32_t>& generated) const override;
  // "( 7 + 5 ) / 4 = 12 / 4 = 3"
  std::string text_of(std::span<const uint8_t> words) const override;
  std::vector<int32_t> words_of(const std::string& text) const override;

 private:
  ArithSpec spec_;
};

TaskSplits open_arith(const ArithSpec& spec, const DataOptions& options);

}  // namespace crossply
