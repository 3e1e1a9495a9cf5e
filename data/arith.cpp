#include "data/arith.h"

#include <algorithm>
#include <array>

namespace crossply {
namespace {

using namespace arith;

constexpr std::array<int32_t, modulus> inverse = {0, 1, 6, 4, 3, 9, 2, 8, 7, 5, 10};  // of 0: never used

template <class T>
T mod(T x) {
  return (x % modulus + modulus) % modulus;
}
bool is_number(int32_t token) { return token >= zero; }  // of a state that is being built: zero + n, for integers too
bool is_operator(int32_t token) { return token >= plus && token <= over; }
bool is_sum(int32_t token) { return token == plus || token == minus; }
bool is_product(int32_t token) { return token == times || token == over; }

struct Split {
  int32_t a, b;
  uint8_t op;
};

// a op b with value x modulo 11: a and op uniform, redrawn where no b exists.
Split split_residue(int32_t x, Random& random) {
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

// The same over 0..largest: op uniform, then one of the pairs that there are.
Split split_integer(int32_t x, Random& random) {
  const auto draw = [&](int32_t from, int32_t to) { return from + static_cast<int32_t>(random.below(to - from + 1)); };
  const uint8_t op = static_cast<uint8_t>(plus + random.below(4));
  if (op == plus) {
    const int32_t a = draw(0, x);
    return {a, x - a, op};
  }
  if (op == minus) {
    const int32_t b = draw(0, largest - x);
    return {x + b, b, op};
  }
  if (op == over) {
    const int32_t b = draw(1, largest / std::max(x, 1));
    return {x * b, b, op};
  }
  if (x == 0) {
    const int32_t other = draw(0, largest);
    return random.below(2) == 0 ? Split{0, other, op} : Split{other, 0, op};
  }
  int32_t a = draw(1, x);
  while (x % a != 0) a = draw(1, x);
  return {a, x / a, op};
}

// Replaces one number of the state, chosen uniformly, by an operation with its value.
void expand(std::vector<uint8_t>& state, Numbers numbers, Random& random) {
  int64_t nth = random.below(std::count_if(state.begin(), state.end(), is_number));
  auto at = state.begin();
  while (!is_number(*at) || nth-- > 0) ++at;
  const uint8_t left = at == state.begin() ? pad : *(at - 1), right = at + 1 == state.end() ? pad : *(at + 1);
  const Split s = numbers == Numbers::residues ? split_residue(*at - zero, random) : split_integer(*at - zero, random);
  const bool brackets = left == over || (is_sum(s.op) && (left == times || is_product(right) || left == minus));
  std::vector<uint8_t> text = {static_cast<uint8_t>(zero + s.a), s.op, static_cast<uint8_t>(zero + s.b)};
  if (brackets) text.insert(text.begin(), open), text.push_back(close);
  at = state.erase(at);
  state.insert(at, text.begin(), text.end());
}

// Integers have two digits at most, and a token for each.
static_assert(largest < 100);
void append_state(const std::vector<uint8_t>& state, Numbers numbers, std::vector<uint8_t>& tokens) {
  for (const uint8_t token : state) {
    const int n = token - zero;
    if (numbers == Numbers::residues || n < 10) {
      tokens.push_back(token);
      continue;
    }
    tokens.push_back(static_cast<uint8_t>(zero + n / 10));
    tokens.push_back(static_cast<uint8_t>(zero + n % 10));
  }
}

// A residue is a digit too: the only one of its number.
bool is_digit(int32_t token, Numbers numbers) {
  return token >= zero && token < (numbers == Numbers::residues ? vocab_size : zero + 10);
}

// How many of the first tokens are one number; none where it is none.
size_t number_length(std::span<const int32_t> tokens, Numbers numbers) {
  if (numbers == Numbers::residues) return !tokens.empty() && is_digit(tokens[0], numbers) ? 1 : 0;
  const auto end = std::find_if(tokens.begin(), tokens.end(), [&](int32_t t) { return !is_digit(t, numbers); });
  return static_cast<size_t>(end - tokens.begin());
}

// The number of these digits; a leading zero makes none, nor do more digits than 64 bits always hold.
std::optional<int64_t> number_of(std::span<const int32_t> digits) {
  constexpr size_t max_digits = 18;
  if (digits.size() > max_digits || (digits.size() > 1 && digits[0] == zero)) return std::nullopt;
  int64_t number = 0;
  for (const int32_t digit : digits) number = 10 * number + digit - zero;
  return number;
}

// a = a op b; false where that is nothing.
bool apply_residues(int64_t& a, int32_t op, int64_t b) {
  if (op == over && b == 0) return false;
  a = mod(op == plus ? a + b : op == minus ? a - b : op == times ? a * b : a * inverse[static_cast<size_t>(b)]);
  return true;
}
bool apply_integers(int64_t& a, int32_t op, int64_t b) {
  if (op == plus) return !__builtin_add_overflow(a, b, &a);
  if (op == minus) return !__builtin_sub_overflow(a, b, &a);
  if (op == times) return !__builtin_mul_overflow(a, b, &a);
  if (b == -1) return !__builtin_sub_overflow(int64_t{0}, a, &a);  // the one quotient that can leave 64 bits
  if (b == 0 || a % b != 0) return false;
  a /= b;
  return true;
}

// Shunting yard: two stacks and no recursion, so that no nesting is too deep.
class Evaluator {
 public:
  explicit Evaluator(Numbers numbers) : apply_(numbers == Numbers::residues ? apply_residues : apply_integers) {}

  bool take_number(int64_t number) {
    if (!wants_operand_) return false;
    wants_operand_ = false;
    values_.push_back(number);
    return true;
  }

  bool take_sign(int32_t token) {
    if (wants_operand_) return token == open && (operators_.push_back(token), true);
    if (token == close) {
      if (!apply_while(plus) || operators_.empty()) return false;
      return operators_.pop_back(), true;
    }
    wants_operand_ = true;
    return is_operator(token) && apply_while(is_sum(token) ? plus : times) && (operators_.push_back(token), true);
  }

  std::optional<int64_t> value() {
    if (wants_operand_ || !apply_while(plus) || !operators_.empty()) return std::nullopt;
    return values_.back();
  }

 private:
  // Applies the operators on top of the stack down to a bracket, or to one that binds less than `lowest`.
  bool apply_while(int32_t lowest) {
    while (!operators_.empty() && operators_.back() != open && (lowest == plus || is_product(operators_.back()))) {
      const int32_t op = operators_.back();
      const int64_t b = values_.back();
      operators_.pop_back();
      values_.pop_back();
      if (!apply_(values_.back(), op, b)) return false;
    }
    return true;
  }

  bool (*apply_)(int64_t& a, int32_t op, int64_t b);
  std::vector<int64_t> values_;
  std::vector<int32_t> operators_;
  bool wants_operand_ = true;
};

// What stands at the end of an answer where its number should: a token, or all digits that end it.
std::span<const int32_t> last_number(std::span<const int32_t> tokens, Numbers numbers) {
  if (numbers == Numbers::residues) return tokens.last(std::min<size_t>(1, tokens.size()));
  const auto begin = std::find_if(tokens.rbegin(), tokens.rend(), [&](int32_t t) { return !is_digit(t, numbers); });
  return tokens.last(static_cast<size_t>(begin - tokens.rbegin()));
}

// Whether `solution` (without eos) is a chain of right steps from k - 1 operators down to the plain number `answer`.
bool is_valid_chain(std::span<const int32_t> solution, int64_t k, std::span<const int32_t> answer, Numbers numbers) {
  const auto value = number_of(answer);
  for (int64_t operators = k - 1; operators >= 0; --operators) {
    const auto end = std::find(solution.begin(), solution.end(), equals);
    const auto segment = solution.first(static_cast<size_t>(end - solution.begin()));
    if (std::count_if(segment.begin(), segment.end(), is_operator) != operators) return false;
    if (end == solution.end()) return std::ranges::equal(segment, answer);
    if (arith_evaluate(segment, numbers) != value) return false;
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

std::optional<ArithSpec> parse_arith(std::string_view spec) {
  constexpr std::string_view prefix = "arith:";
  if (!spec.starts_with(prefix)) return std::nullopt;
  spec.remove_prefix(prefix.size());
  const bool integers = spec.ends_with('i');
  if (integers) spec.remove_suffix(1);
  const bool mixture = spec.size() == 3 && spec[1] == '-';
  if (spec.size() != 1 && !mixture) return std::nullopt;
  const int fewest = spec.front() - '0', most = spec.back() - '0';
  if (fewest < 3 || most > 6 || (mixture && fewest >= most)) return std::nullopt;
  return ArithSpec{fewest, most, integers ? Numbers::integers : Numbers::residues};
}

TaskSample arith_sample(const ArithSpec& spec, Random& random) {
  int k = spec.most;
  if (spec.fewest < spec.most) k = spec.fewest + static_cast<int>(random.below(spec.most - spec.fewest + 1));
  const bool residues = spec.numbers == Numbers::residues;
  std::vector<std::vector<uint8_t>> states = {
      {static_cast<uint8_t>(zero + random.below(residues ? modulus : largest + 1))}};
  for (int i = 0; i < k; ++i) {
    states.push_back(states.back());
    expand(states.back(), spec.numbers, random);
  }
  TaskSample sample;
  for (int i = k; i >= 0; --i) {
    append_state(states[static_cast<size_t>(i)], spec.numbers, sample.tokens);
    sample.tokens.push_back(i > 0 ? equals : eos);
    if (i == k) sample.prompt = static_cast<int64_t>(sample.tokens.size());
  }
  return sample;
}

int64_t arith_bound(const ArithSpec& spec) {
  const int k = spec.most, digits = spec.numbers == Numbers::residues ? 1 : 2;
  int64_t bound = digits + k + 1;  // the answer, the equals signs, eos
  for (int i = 1; i <= k; ++i) bound += i + (i + 1) * digits + 2 * (i - 1);
  return bound;
}

double arith_chance(const ArithSpec& spec) { return 1.0 / (spec.numbers == Numbers::residues ? modulus : largest + 1); }

std::optional<int64_t> arith_evaluate(std::span<const int32_t> tokens, Numbers numbers) {
  Evaluator evaluator(numbers);
  while (!tokens.empty()) {
    const size_t digits = number_length(tokens, numbers);
    const auto number = number_of(tokens.first(digits));
    if (!number || !(digits > 0 ? evaluator.take_number(*number) : evaluator.take_sign(tokens[0]))) return std::nullopt;
    tokens = tokens.subspan(std::max<size_t>(1, digits));
  }
  return evaluator.value();
}

ArithSource::ArithSource(const ArithSpec& spec, int64_t seq_len)
    : TaskSource({seq_len > 0 ? seq_len : arith_bound(spec) - 1, arith::vocab_size, pad, arith::eos}), spec_(spec) {}

int64_t ArithSource::max_new_tokens() const {
  const int k = spec_.most;
  const int64_t solution = arith_bound({k - 1, k - 1, spec_.numbers});
  // Another order of steps may multiply first: a state can have as many digits as the prompt.
  return spec_.numbers == Numbers::residues ? solution : solution + k * (k - 1);
}

Task::Verdict ArithSource::judge(int64_t index, const std::vector<int32_t>& generated) const {
  const auto all = sequence(index), prompt = prompt_tokens(index);
  const std::vector<int32_t> gold(all.begin(), all.end() - 1);  // without eos
  const auto value = last_number(gold, spec_.numbers);
  const Answer answer = cut_at_eos(generated, arith::eos);
  if (!answer.has_eos || !std::ranges::equal(last_number(answer.tokens, spec_.numbers), value)) return {false, false};
  const int64_t k = std::count_if(prompt.begin(), prompt.end(), is_operator);  // the sample's own: tiers may be mixed
  return {true, is_valid_chain(answer.tokens, k, value, spec_.numbers)};
}

std::string ArithSource::text_of(std::span<const uint8_t> words) const {
  std::string text;
  bool after_digit = false;
  for (const uint8_t word : words) {
    if (word <= arith::eos) continue;
    const bool digit = is_digit(word, spec_.numbers), of_same_number = digit && after_digit;
    text += (text.empty() || of_same_number ? "" : " ") + arith_words()[word];
    after_digit = digit && spec_.numbers == Numbers::integers;
  }
  return text;
}

std::vector<int32_t> ArithSource::words_of(const std::string& text) const {
  const bool integers = spec_.numbers == Numbers::integers;
  const auto is_figure = [](char c) { return c >= '0' && c <= '9'; };
  std::vector<int32_t> words;
  bool after_number = false;
  for (size_t begin = 0, end; begin < text.size(); begin = end) {
    end = begin + 1;
    if (text[begin] == ' ') continue;
    const bool number = is_figure(text[begin]);
    while (number && end < text.size() && is_figure(text[end])) ++end;
    if (number && after_number) words.push_back(-1);  // "1 2" is not 12
    after_number = number;
    const size_t step = number && integers ? 1 : end - begin;  // integers have a word for each digit
    for (size_t at = begin; at < end; at += step) {
      const auto found = std::find(arith_words().begin() + plus, arith_words().end(), text.substr(at, step));
      words.push_back(found == arith_words().end() ? -1 : static_cast<int32_t>(found - arith_words().begin()));
    }
  }
  return words;
}

TaskSplits open_arith(const ArithSpec& spec, const DataOptions& options) {
  const int64_t needed = arith_bound(spec) - 1, tiers = spec.most - spec.fewest + 1;
  if (options.seq_len != 0 && options.seq_len < needed)
    fail(Exit::usage, options.spec, " needs a sequence length of at least ", needed, ", not ", options.seq_len);
  return fill_task(options, "arith", std::make_unique<ArithSource>(spec, options.seq_len), 50000 * tiers,
                   std::make_unique<ArithSource>(spec, options.seq_len), 10000, arith_words(),
                   [&](Random& random) { return arith_sample(spec, random); });
}

}  // namespace crossply
