#include "data/arith.h"

#include <algorithm>
#include <array>

namespace crossply {
namespace {

using namespace arith;

constexpr std::array<int32_t, modulus> inverse = {0, 1, 6, 4, 3, 9, 2, 8, 7, 5, 10};  // of 0: never used

int32_t mod(int32_t x) { return (x % modulus + modulus) % modulus; }
bool is_number(int32_t token) { return token >= zero && token < vocab_size; }
bool is_operator(int32_t token) { return token >= plus && token <= over; }
bool is_sum(int32_t token) { return token == plus || token == minus; }
bool is_product(int32_t token) { return token == times || token == over; }

struct Split {
  int32_t a, b;
  uint8_t op;
};

// a op b with value x: a and op uniform, redrawn where no b exists.
Split split(int32_t x, Random& random) {
  while (true) {
    const int32_t a = static_cast<int32_t>(random.below(modulus));
    const uint8_t op = static_cast<uint8_t>(plus + random.below(4));
    if (op == plus) return {a, mod(x - a), op};
    if (op == minus) return {a, mod(a - x), op};
    if (a != 0 && op == times) return {a, mod(x * inverse[a]), op};
    if (a != 0 && x != 0) return {a, mod(a * inverse[x]), op};
    if (a != 0 || x != 0) continue;
    const int32_t b = static_cast<int32_t>(random.below(modulus));  // 0 * b, or 0 / b
    if (op == times || b != 0) return {a, b, op};
  }
}

// Replaces one number of the state, chosen uniformly, by an operation with its value.
void expand(std::vector<uint8_t>& state, Random& random) {
  int64_t nth = random.below(std::count_if(state.begin(), state.end(), is_number));
  auto at = state.begin();
  while (!is_number(*at) || nth-- > 0) ++at;
  const uint8_t left = at == state.begin() ? pad : *(at - 1), right = at + 1 == state.end() ? pad : *(at + 1);
  const Split s = split(*at - zero, random);
  const bool brackets = left == over || (is_sum(s.op) && (left == times || is_product(right) || left == minus));
  std::vector<uint8_t> text = {static_cast<uint8_t>(zero + s.a), s.op, static_cast<uint8_t>(zero + s.b)};
  if (brackets) text.insert(text.begin(), open), text.push_back(close);
  at = state.erase(at);
  state.insert(at, text.begin(), text.end());
}

// Shunting yard: two stacks and no recursion, so that no nesting is too deep.
class Evaluator {
 public:
  bool take(int32_t token) {
    if (wants_operand_) {
      if (token == open) return operators_.push_back(token), true;
      wants_operand_ = false;
      return is_number(token) && (values_.push_back(token - zero), true);
    }
    if (token == close) {
      if (!apply_while(plus) || operators_.empty()) return false;
      return operators_.pop_back(), true;
    }
    wants_operand_ = true;
    return is_operator(token) && apply_while(is_sum(token) ? plus : times) && (operators_.push_back(token), true);
  }

  std::optional<int32_t> value() {
    if (wants_operand_ || !apply_while(plus) || !operators_.empty()) return std::nullopt;
    return values_.back();
  }

 private:
  // Applies the operators on top of the stack down to a bracket, or to one that binds less than `lowest`.
  bool apply_while(int32_t lowest) {
    while (!operators_.empty() && operators_.back() != open && (lowest == plus || is_product(operators_.back()))) {
      const int32_t op = operators_.back(), b = values_.back();
      operators_.pop_back();
      values_.pop_back();
      int32_t& a = values_.back();
      if (op == over && b == 0) return false;
      a = mod(op == plus ? a + b : op == minus ? a - b : op == times ? a * b : a * inverse[b]);
    }
    return true;
  }

  std::vector<int32_t> values_, operators_;
  bool wants_operand_ = true;
};

// Whether `solution` (without eos) is a chain of right steps from k - 1 operators down to the plain number `value`.
bool is_valid_chain(std::span<const int32_t> solution, int k, int32_t value) {
  for (int operators = k - 1; operators >= 0; --operators) {
    const auto end = std::find(solution.begin(), solution.end(), equals);
    const auto segment = solution.first(static_cast<size_t>(end - solution.begin()));
    if (std::count_if(segment.begin(), segment.end(), is_operator) != operators) return false;
    if (end == solution.end()) return segment.size() == 1 && segment[0] == zero + value;
    if (arith_evaluate(segment) != value) return false;
    solution = solution.subspan(segment.size() + 1);
  }
  return false;
}

}  // namespace

const std::vector<std::string>& arith_words() {
  static const std::vector<std::string> words = {"<pad>", "<cls>", "<eos>", "+", "-", "*", "/", "(", ")", "=", "0",
                                                 "1",     "2",     "3",     "4", "5", "6", "7", "8", "9", "10"};
  return words;
}

TaskSample arith_sample(int k, Random& random) {
  std::vector<std::vector<uint8_t>> states = {{static_cast<uint8_t>(zero + random.below(modulus))}};
  for (int i = 0; i < k; ++i) {
    states.push_back(states.back());
    expand(states.back(), random);
  }
  TaskSample sample;
  for (int i = k; i >= 0; --i) {
    const auto& state = states[static_cast<size_t>(i)];
    sample.tokens.insert(sample.tokens.end(), state.begin(), state.end());
    sample.tokens.push_back(i > 0 ? equals : eos);
  }
  sample.prompt = static_cast<int64_t>(states.back().size()) + 1;
  return sample;
}

int64_t arith_bound(int k) {
  int64_t bound = 1 + k + 1;  // the answer, the equals signs, eos
  for (int i = 1; i <= k; ++i) bound += 4 * i - 1;
  return bound;
}

std::optional<int32_t> arith_evaluate(std::span<const int32_t> tokens) {
  Evaluator evaluator;
  for (int32_t token : tokens)
    if (!evaluator.take(token)) return std::nullopt;
  return evaluator.value();
}

ArithSource::ArithSource(int k, int64_t seq_len)
    : TaskSource({seq_len > 0 ? seq_len : arith_bound(k) - 1, arith::vocab_size, pad, arith::eos}), k_(k) {}

int64_t ArithSource::max_new_tokens() const { return arith_bound(k_ - 1); }

Task::Verdict ArithSource::judge(int64_t index, const std::vector<int32_t>& generated) const {
  const auto gold = sequence(index);
  const int32_t value = gold[gold.size() - 2] - zero;
  const Answer answer = cut_at_eos(generated, arith::eos);
  const bool right = answer.has_eos && !answer.tokens.empty() && answer.tokens.back() == zero + value;
  return {right, right && is_valid_chain(answer.tokens, k_, value)};
}

Dataset open_arith(int k, const DataOptions& options) {
  const int64_t needed = arith_bound(k) - 1;
  if (options.seq_len != 0 && options.seq_len < needed)
    fail(Exit::usage, "arith:", k, " needs a sequence length of at least ", needed, ", not ", options.seq_len);
  return fill_task(options, "arith", std::make_unique<ArithSource>(k, options.seq_len), 50000,
                   std::make_unique<ArithSource>(k, options.seq_len), 10000, arith_words(),
                   [&](Random& random) { return arith_sample(k, random); });
}

}  // namespace crossply
