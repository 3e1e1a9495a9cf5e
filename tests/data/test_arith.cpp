#include "data/arith.h"

#include <map>

#include "tests/support/check.h"
#include "tests/support/data_check.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

namespace {

std::vector<int32_t> ids(const std::string& text) { return Tokenizer::words(arith_words()).encode(text); }

std::optional<int64_t> value_of(const std::string& text) { return arith_evaluate(ids(text)); }

// Integers, written as one writes them: a token per digit; a full stop is eos.
std::vector<int32_t> integer_ids(const std::string& text) {
  std::string words;
  for (const char c : text) words += c == '.' ? "<eos> " : std::string{c, ' '};
  return ids(words);
}

std::optional<int64_t> integer_value(const std::string& text) {
  return arith_evaluate(integer_ids(text), arith::Numbers::integers);
}

// The states of a chain without eos.
std::vector<std::vector<int32_t>> segments(const TaskSample& sample) {
  std::vector<std::vector<int32_t>> out(1);
  for (uint8_t token : sample.tokens) {
    if (token == arith::eos) break;
    if (token == arith::equals) out.emplace_back();
    else out.back().push_back(token);
  }
  return out;
}

template <class Tokens>
int64_t operators(const Tokens& tokens) {
  return std::count_if(tokens.begin(), tokens.end(), [](int32_t t) { return t >= arith::plus && t <= arith::over; });
}

// Of 20,000 samples each, for every k: how many have the fewest tokens, two more, four more ...
struct Published {
  int64_t fewest;
  std::vector<double> counts;
};
const std::map<int, Published> published = {
    {3, {20, {}}},  // only the mean is known
    {4, {30, {4322, 3156, 3370, 4989, 1919, 1695, 549}}},
    {5, {42, {2383, 1857, 1946, 3262, 3205, 2634, 1816, 1841, 556, 384, 116}}},
    {6, {56, {1406, 1035, 1161, 1917, 1982, 2707, 2077, 2125, 1721, 1622, 949, 616, 449, 118, 88, 27}}}};

struct Moments {
  double n = 0, sum = 0, squares = 0;
  void add(double x, double times = 1) { n += times, sum += times * x, squares += times * x * x; }
  double mean() const { return sum / n; }
  double variance_of_mean() const { return (squares / n - mean() * mean()) / n; }
};

const ArithSource& arith_of(const std::unique_ptr<Source>& source) { return dynamic_cast<const ArithSource&>(*source); }

void set_only_sample(ArithSource& source, const std::vector<int32_t>& tokens) {
  const auto prompt = std::find(tokens.begin(), tokens.end(), arith::equals) - tokens.begin() + 1;
  TaskSource::Seen seen;
  source.fill(1, seen, [&] { return TaskSample{{tokens.begin(), tokens.end()}, prompt}; });
}

// The numbers of a state; a negative one where it has a leading zero or a token that is no digit.
std::vector<int32_t> integers_in(const std::vector<int32_t>& state) {
  std::vector<int32_t> numbers;
  bool in_number = false;
  for (const int32_t token : state) {
    const int32_t digit = token - arith::zero;
    if (digit >= 0 && !in_number) numbers.push_back(digit);
    else if (digit >= 0) numbers.back() = numbers.back() == 0 || digit > 9 ? -1000 : 10 * numbers.back() + digit;
    in_number = digit >= 0;
  }
  return numbers;
}

std::set<std::vector<uint8_t>> as_set(const ArithSource& source, bool prompts) {
  std::set<std::vector<uint8_t>> all;
  for (int64_t i = 0; i < source.size(); ++i) {
    const auto tokens = prompts ? source.prompt_tokens(i) : source.sequence(i);
    all.emplace(tokens.begin(), tokens.end());
  }
  return all;
}

// How many samples of `test` have their prompt, or the whole sequence, in `train`.
int64_t known(const ArithSource& test, const ArithSource& train, bool prompts) {
  const auto trained = as_set(train, prompts);
  int64_t count = 0;
  for (int64_t i = 0; i < test.size(); ++i) {
    const auto tokens = prompts ? test.prompt_tokens(i) : test.sequence(i);
    count += trained.contains({tokens.begin(), tokens.end()});
  }
  return count;
}

}  // namespace

TEST_CASE("arith: the evaluator knows brackets, precedence and division modulo 11") {
  for (const char* chain :
       {"( 7 + 5 ) / ( 6 + 4 * 3 - 2 * 7 ) = 1 / ( 6 + 4 * 3 - 2 * 7 ) = 1 / ( 6 + 1 - 2 * 7 ) = 1 / ( 7 - 2 * 7 ) = "
        "1 / ( 7 - 3 ) = 1 / 4 = 3",
        "6 / ( ( 2 + 9 + 4 - 4 / 9 ) * 5 ) = 6 / ( ( 2 + 2 - 4 / 9 ) * 5 ) = 6 / ( ( 2 + 2 - 9 ) * 5 ) = "
        "6 / ( ( 2 + 4 ) * 5 ) = 6 / ( 6 * 5 ) = 6 / 8 = 9",
        "1 * 3 + 0 - 2 - 0 = 3 + 0 - 2 - 0 = 3 + 9 - 0 = 3 + 9 = 1", "10 - 5 * ( 2 - 3 ) / ( 4 / 6 ) + 0 = 1"}) {
    const std::vector<int32_t> all = ids(chain);
    const std::span<const int32_t> tokens(all);
    const int32_t want = all.back() - arith::zero;
    for (size_t begin = 0, end; begin < all.size(); begin = end + 1) {
      end = static_cast<size_t>(std::find(all.begin() + static_cast<int64_t>(begin), all.end(), arith::equals) -
                                all.begin());
      CHECK(arith_evaluate(tokens.subspan(begin, end - begin)) == want);
    }
  }
  CHECK(value_of("8 - 3 - 2") == 3);  // from left to right
  CHECK(value_of("1 / 2 / 3") == 2);  // 6 / 3
  CHECK(value_of("2 - 3 * 4 + 1") == 2);
  CHECK(value_of("( ( 5 ) )") == 5);
  for (int a = 0; a < 11; ++a)
    for (int b = 1; b < 11; ++b) {
      const auto quotient = value_of(std::to_string(a) + " / " + std::to_string(b));
      REQUIRE(quotient.has_value());
      CHECK(*quotient * b % 11 == a);
    }
}

TEST_CASE("arith: what is no expression has no value, and no garbage is too much") {
  for (const char* text :
       {"",        "+",     "3 +",     "+ 3",   "3 3",   "( 3",           "3 )",   "( )",     "3 ( 4 )", "( 3 ) 4",
        "3 + * 4", "3 = 3", "3 <eos>", "<pad>", "4 / 0", "4 / ( 3 - 3 )", "0 / 0", "( 4 / 0", "( 3 ) )", "3 + ( 4"})
    CHECK_MESSAGE(!value_of(text).has_value(), text);
  CHECK(!arith_evaluate(std::vector<int32_t>{-1}).has_value());
  CHECK(!arith_evaluate(std::vector<int32_t>{1 << 30}).has_value());
  CHECK(!arith_evaluate(std::vector<int32_t>(1000000, arith::open)).has_value());
  Random random(1, 2);
  for (int i = 0; i < 100000; ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(random.below(12)));
    for (int32_t& t : tokens) t = static_cast<int32_t>(arith::plus + random.below(arith::vocab_size - arith::plus));
    const auto value = arith_evaluate(tokens);
    if (value) CHECK((*value >= 0 && *value < 11));
  }
}

TEST_CASE("arith: every segment of every sample has the same value and one operator less than the one before") {
  for (int k = 3; k <= 6; ++k) {
    Random random(7, static_cast<uint64_t>(k));
    Moments length;
    std::map<int64_t, double> histogram;
    const auto& [fewest, counts] = published.at(k);
    std::array<double, 4> operator_count{};
    std::array<double, 11> answer_count{};
    int64_t shortest = 1000, longest = 0, wrong = 0;
    constexpr int samples = 20000;
    for (int i = 0; i < samples; ++i) {
      const TaskSample sample = arith_sample({k, k}, random);
      const int64_t n = static_cast<int64_t>(sample.tokens.size());
      length.add(static_cast<double>(n));
      ++histogram[n];
      shortest = std::min(shortest, n), longest = std::max(longest, n);
      const auto states = segments(sample);
      const int32_t answer = states.back().back() - arith::zero;
      ++answer_count[static_cast<size_t>(answer)];
      wrong += states.size() != static_cast<size_t>(k + 1) || states.back().size() != 1;
      wrong += sample.tokens.back() != arith::eos;
      wrong += sample.prompt != static_cast<int64_t>(states[0].size()) + 1;
      for (size_t s = 0; s < states.size(); ++s) {
        wrong += operators(states[s]) != k - static_cast<int64_t>(s) || arith_evaluate(states[s]) != answer;
        wrong += states[s].size() > std::max<size_t>(1, 4 * (states.size() - 1 - s) - 1);
      }
      for (int32_t t : states[0])
        if (t >= arith::plus && t <= arith::over) ++operator_count[static_cast<size_t>(t - arith::plus)];
    }
    CAPTURE(k);
    CHECK(wrong == 0);
    CHECK(longest == arith_bound({k, k}));  // 20,000 samples reach it
    CHECK(shortest == fewest);
    const std::array<double, 4> share = {.266, .267, .243, .224};
    for (size_t op = 0; op < 4; ++op)
      CHECK(operator_count[op] / (samples * k) == doctest::Approx(share[op]).epsilon(.02));
    // Five standard deviations of a binomial count; a fair generator fails one in a million times.
    for (double count : answer_count) CHECK(std::abs(count - samples / 11.) < 5 * std::sqrt(samples * 10. / 121));
    if (k == 3) {
      CHECK(std::abs(length.mean() - 22.2) < .05 + 5 * std::sqrt(length.variance_of_mean()));
      continue;
    }
    Moments want;
    for (size_t i = 0; i < counts.size(); ++i) {
      const int64_t tokens = fewest + 2 * static_cast<int64_t>(i);
      const double got = histogram[tokens], count = counts[i];
      want.add(static_cast<double>(tokens), count);
      CHECK_MESSAGE(std::abs(got - count) < 4.5 * std::sqrt(got + count),
                    tokens << " tokens: " << got << " samples, published " << count);
    }
    CHECK(std::abs(length.mean() - want.mean()) < 4 * std::sqrt(length.variance_of_mean() + want.variance_of_mean()));
    CHECK(histogram.size() == counts.size());
  }
}

TEST_CASE("arith: sets are disjoint, without duplicates, and a function of the seed") {
  const Dataset data = open_dataset(task_options("arith:3", 20000, 5000)),
                again = open_dataset(task_options("arith:3", 20000, 5000));
  const Dataset other = open_dataset(task_options("arith:3", 20000, 5000, 2));
  CHECK((data.train->size() == 20000 && data.test->size() == 5000 && data.train->vocab_size() == 21));
  std::set<std::vector<int32_t>> all;
  int64_t same = 0;
  for (const auto* split : {&data.train, &data.test})
    for (int64_t i = 0; i < (*split)->size(); ++i) all.insert(read_sample(**split, i).tokens);
  CHECK(all.size() == 25000);
  for (int64_t i = 0; i < 1000; ++i) {
    CHECK(read_sample(*data.train, i) == read_sample(*again.train, i));
    CHECK(read_sample(*data.test, i) == read_sample(*again.test, i));
    same += read_sample(*data.train, i) == read_sample(*other.train, i);
  }
  CHECK(same < 10);
  check_fails(Exit::usage, {"more samples than there are"}, [] {
    ArithSource source({1, 1}, 0);
    TaskSource::Seen seen;
    Random random(1, 1);
    source.fill(1000, seen, [&] { return arith_sample({1, 1}, random); });
  });
}

TEST_CASE("arith: the samples that open_dataset gives by default") {
  const Dataset data = open_dataset(task_options("arith:6", 0, 0));
  CHECK((data.train->size() == 50000 && data.test->size() == 10000));
  CHECK(data.train->seq_len() == 85);  // the bound is 86
  CHECK(data.tokenizer.vocab_size() == 21);
}

TEST_CASE("arith: only what follows the prompt is a target") {
  DataOptions padded = task_options("arith:4", 50, 10);
  padded.seq_len = 64;
  const Dataset data = open_dataset(padded);
  CHECK(data.train->seq_len() == 64);
  for (int64_t i = 0; i < 50; ++i) {
    const Sample s = read_sample(*data.train, i);
    const auto prompt = data.train->task()->prompt(i);
    REQUIRE(prompt.back() == arith::equals);
    CHECK(std::count(prompt.begin(), prompt.end(), arith::equals) == 1);
    CHECK(std::equal(prompt.begin(), prompt.end(), s.tokens.begin()));
    const auto end = std::find(s.tokens.begin(), s.tokens.end(), arith::eos);
    const int64_t n = end - s.tokens.begin(), first = static_cast<int64_t>(prompt.size()) - 1;
    for (int64_t t = 0; t < 64; ++t) {
      const size_t at = static_cast<size_t>(t);
      CHECK(s.targets[at] == (t >= first && t < n ? s.tokens[at + 1] : -1));
      if (t > n) CHECK(s.tokens[at] == arith::pad);
    }
  }
  padded.seq_len = 40;
  check_fails(Exit::usage, {"arith:4", "at least 41"}, [&] { open_dataset(padded); });
  // The longest sample's eos is a target too, although it is no input.
  const Dataset exact = open_dataset(task_options("arith:3", 2000, 1));
  bool has_longest = false;
  for (int64_t i = 0; i < 2000; ++i) has_longest |= read_sample(*exact.train, i).targets.back() == arith::eos;
  CHECK(has_longest);
}

TEST_CASE("arith: the judge") {
  // The one sample is the prompt 3 + 0 - 2 - 0 = with the solution 3 + 9 - 0 = 3 + 9 = 1.
  ArithSource source({3, 3}, 0);
  set_only_sample(source, ids("3 + 0 - 2 - 0 = 3 + 9 - 0 = 3 + 9 = 1 <eos>"));
  const auto verdict = [&](const std::string& text) { return verdict_of(source, ids(text)); };
  CHECK(verdict("3 + 9 - 0 = 3 + 9 = 1 <eos>") == "answer+steps");
  CHECK(verdict("3 - 2 - 0 = 1 - 0 = 1 <eos>") == "answer+steps");            // another order
  CHECK(verdict("3 + 9 - 0 = 3 + 9 = 1 <eos> = 4 <pad>") == "answer+steps");  // after eos nothing counts
  CHECK(verdict("3 + 9 - 0 = 3 + 9 = 1") == "wrong");                         // no eos
  CHECK(verdict("3 + 9 - 0 = 3 + 9 = 2 <eos>") == "wrong");
  CHECK(verdict("1 <eos>") == "answer");  // steps left out
  CHECK(verdict("3 + 9 = 1 <eos>") == "answer");
  CHECK(verdict("3 + 9 - 0 = 3 + 9 = 3 + 9 = 1 <eos>") == "answer");  // a step twice
  CHECK(verdict("3 + 9 - 0 = 3 + 8 = 1 <eos>") == "answer");          // a wrong step
  CHECK(verdict("3 + 9 - 0 = 3 + 9 = ( 1 <eos>") == "answer");
  CHECK(verdict("3 + 9 - 0 = 3 + 9 = 5 = 1 <eos>") == "answer");
  CHECK(verdict("3 + 9 - 0 3 + 9 = 1 <eos>") == "answer");
  CHECK(verdict("= = = 1 <eos>") == "answer");
  CHECK(verdict("<eos>") == "wrong");
  CHECK(verdict("") == "wrong");
  CHECK(!source.judge(0, {-5, 1 << 30, arith::eos}).answer);

  const Dataset data = open_dataset(task_options("arith:5", 500, 1));
  const Task& task = *data.train->task();
  for (int64_t i = 0; i < 500; ++i) {
    const std::vector<int32_t> gold = solution_of(arith_of(data.train), i);
    const auto v = task.judge(i, gold);
    CHECK((v.answer && v.steps && static_cast<int64_t>(gold.size()) <= task.max_new_tokens()));
  }
}

TEST_CASE("arith: a spec names the numbers of operators and what the numbers are") {
  using enum arith::Numbers;
  struct Case {
    const char* spec;
    int fewest, most;
    arith::Numbers numbers;
  };
  for (const auto& [spec, fewest, most, numbers] :
       {Case{"arith:3", 3, 3, residues}, Case{"arith:6", 6, 6, residues}, Case{"arith:4-6", 4, 6, residues},
        Case{"arith:3-4", 3, 4, residues}, Case{"arith:3i", 3, 3, integers}, Case{"arith:4-6i", 4, 6, integers}}) {
    CAPTURE(spec);
    const auto parsed = parse_arith(spec);
    REQUIRE(parsed.has_value());
    CHECK((parsed->fewest == fewest && parsed->most == most && parsed->numbers == numbers));
    CHECK(parse_data_spec(spec).kind == DataSpec::Kind::generated);
    CHECK(chance_of(spec) == (numbers == residues ? 1.0 / 11 : 1.0 / 51));
  }
  for (const std::string spec :
       {"arith:7",     "arith:2",   "arith:6-4", "arith:4-4", "arith:-",  "arith:i",     "arith:44",
        "arith:4-6-7", "arith:2-4", "arith:4-7", "arith:4-",  "arith:-4", "arith:4ii",   "arith:i4",
        "arith:4i-6",  "arith:4_6", "arith: 4",  "arith:",    "arith",    "arith:4-6i ", "Arith:4"}) {
    CAPTURE(spec);
    CHECK(!parse_arith(spec).has_value());
    CHECK(std::isnan(chance_of(spec)));
    check_fails(Exit::usage, {"unknown data \"" + spec + "\"", "arith:3", "4-6", "arith:6i"},
                [&] { open_dataset(data_options(spec, 0)); });
  }
  check_fails(Exit::usage, {"arith:4-6 needs", "at least 85, not 84"},
              [] { open_dataset(data_options("arith:4-6", 84)); });
  check_fails(Exit::usage, {"arith:4-6i needs", "at least 113"}, [] { open_dataset(data_options("arith:4-6i", 112)); });
}

TEST_CASE("arith: the samples of seed 42 are those that models were trained on; few test prompts were trained on") {
  struct Known {
    const char* tier;
    uint64_t train, test;  // digests
    int64_t prompts;       // of the 10,000 of the test set: those among the training prompts, in any order of steps
    int64_t of_mixture;    // sequences of the test set that arith:4-6 trains on
  };
  const Dataset mixture = open_dataset(task_options("arith:4-6", 0, 1, 42));
  for (const Known& want : {Known{"3", 0x8bf159b9f1e204aa, 0xee4ad594f2a88d11, 139, 0},
                            Known{"4", 0x1d002b1e2c985695, 0xf46a29d6e92c942c, 3, 1},
                            Known{"5", 0xa4ff6779c63129e3, 0xc9d56b5b391157d3, 0, 0},
                            Known{"6", 0x2b35ea649baee0d5, 0xad4d3fadfd1ade4e, 0, 0}}) {
    CAPTURE(want.tier);
    const Dataset data = open_dataset(task_options(str("arith:", want.tier), 0, 0, 42));
    CHECK((data.train->digest() == want.train && data.test->digest() == want.test));
    CHECK(known(arith_of(data.test), arith_of(data.train), false) == 0);
    CHECK(known(arith_of(data.test), arith_of(data.train), true) == want.prompts);
    CHECK(known(arith_of(data.test), arith_of(mixture.train), false) == want.of_mixture);
  }
}

TEST_CASE("arith: a mixture has as many samples of each number of operators, each judged by its own") {
  const Dataset data = open_dataset(task_options("arith:4-6", 0, 0));
  CHECK((data.train->size() == 150000 && data.test->size() == 10000 && data.train->seq_len() == 85));
  for (const auto* split : {&data.train, &data.test}) {
    const ArithSource& source = arith_of(*split);
    std::map<int64_t, double> tiers;
    int64_t wrong = 0;
    for (int64_t i = 0; i < source.size(); ++i) {
      const int64_t k = operators(source.prompt_tokens(i));
      ++tiers[k];
      if (i >= 2000) continue;
      std::vector<int32_t> solution = solution_of(source, i);
      wrong += std::count(solution.begin(), solution.end(), arith::equals) != k - 1;
      wrong += !source.judge(i, solution).steps;
      const auto second = std::find(solution.begin(), solution.end(), arith::equals) + 1;
      const Task::Verdict late = source.judge(i, {second, solution.end()});  // a step left out
      wrong += !late.answer || late.steps;
    }
    CHECK(wrong == 0);
    CHECK((tiers.size() == 3 && tiers.begin()->first == 4));
    const double n = static_cast<double>(source.size());
    for (const auto& [k, count] : tiers)  // five standard deviations of a binomial count
      CHECK_MESSAGE(std::abs(count - n / 3) < 5 * std::sqrt(n * 2 / 9), k << " operators: " << count);
  }
}

TEST_CASE("arith: a model of a mixture is evaluated on one of its tiers, and on longer samples than it knows") {
  const TempDir scratch;
  const std::string run = scratch.file("run");
  const std::vector<std::string> samples = split_words("--train-samples 40 --test-samples 8");
  check_outcome(train(scratch, joined(split_words("--data arith:3-4 --width 16 --ffn 24 --layers 2 --heads 2 --batch 4 "
                                                  "--steps 2 --answer-samples 4 --out"),
                                      std::vector{run}, samples)),
                Exit::done, "answers: guessing gets 9.1%");
  for (const std::string spec : {"arith:3", "arith:4", "arith:6", "arith:3i"}) {
    CAPTURE(spec);
    const Outcome got = run_program_inside(scratch, joined(split_words("evaluate --answers 8 --model"),
                                                           std::vector<std::string>{run, "--data", spec}, samples));
    check_outcome(got, Exit::done, spec + ", generated; the model was trained on arith:3-4");
    CHECK(has(got.output, "prompts 8\n"));
  }
}

TEST_CASE("arith: integers have no remainder, no leading zero and 64 bits") {
  const std::string chain =  // the paper's
      "(7+5)/(6+4*3-2*7)=12/(6+4*3-2*7)=12/(6+12-2*7)=12/(18-2*7)=12/(18-14)=12/4=3";
  for (size_t begin = 0, end; begin < chain.size(); begin = end + 1) {
    end = std::min(chain.find('=', begin), chain.size());
    CHECK(integer_value(chain.substr(begin, end - begin)) == 3);
  }
  const std::map<std::string, int64_t> values = {{"0", 0},
                                                 {"10", 10},
                                                 {"7-12", -5},
                                                 {"3-(4-5)*2", 5},
                                                 {"(0-6)/3", -2},
                                                 {"6/(0-1)", -6},
                                                 {"7-5-1", 1},
                                                 {"0/5", 0},
                                                 {"24/4/2", 3},
                                                 {"999999999999999999", 999999999999999999},
                                                 {"(0-2147483648)*4294967296", INT64_MIN},
                                                 {"2147483648*4294967295", 9223372034707292160}};
  for (const auto& [text, value] : values) CHECK_MESSAGE(integer_value(text) == value, text);
  for (const char* text : {"7/2", "1/5", "0/0", "4/(2-2)", "07", "00", "3+05", "1000000000000000000", "12(3)", "(3)4",
                           "()", "", "1+", "2147483648*4294967296", "(0-2147483648)*4294967296/(0-1)",
                           "(0-2147483648)*4294967296-1", "999999999999999999*999999999999999999"})
    CHECK_MESSAGE(!integer_value(text).has_value(), text);
  CHECK(!arith_evaluate(ids("10"), arith::Numbers::integers).has_value());  // the residue's token
  CHECK(!arith_evaluate(std::vector<int32_t>(1000000, arith::zero + 9), arith::Numbers::integers).has_value());
  Random random(3, 4);
  int64_t valid = 0;
  for (int i = 0; i < 100000; ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(random.below(12)));
    for (int32_t& t : tokens) t = static_cast<int32_t>(arith::plus + random.below(arith::vocab_size - arith::plus));
    const auto value = arith_evaluate(tokens, arith::Numbers::integers);
    if (!value) continue;
    ++valid;
    tokens.insert(tokens.begin(), arith::open), tokens.push_back(arith::close);
    CHECK(arith_evaluate(tokens, arith::Numbers::integers) == value);
  }
  CHECK(valid > 5000);
}

TEST_CASE("arith: every segment of every integer sample has the same value and one operator less") {
  for (int k = 3; k <= 6; ++k) {
    CAPTURE(k);
    const ArithSpec spec{k, k, arith::Numbers::integers};
    Random random(8, static_cast<uint64_t>(k));
    std::array<double, 51> answer_count{};
    std::array<double, 4> operator_count{};
    int32_t smallest = 1000, largest = 0;
    int64_t longest = 0, wrong = 0;
    constexpr int samples = 20000;
    for (int i = 0; i < samples; ++i) {
      const TaskSample sample = arith_sample(spec, random);
      const auto states = segments(sample);
      const auto answers = integers_in(states.back());
      wrong += states.size() != static_cast<size_t>(k + 1) || answers.size() != 1 || sample.tokens.back() != arith::eos;
      wrong += sample.prompt != static_cast<int64_t>(states[0].size()) + 1;
      for (size_t s = 0; s < states.size(); ++s) {
        wrong += operators(states[s]) != k - static_cast<int64_t>(s);
        wrong += arith_evaluate(states[s], spec.numbers) != answers[0];
        wrong += states[s].size() > std::max<size_t>(2, 5 * (states.size() - 1 - s));
        for (const int32_t number : integers_in(states[s]))
          smallest = std::min(smallest, number), largest = std::max(largest, number);
      }
      for (int32_t t : states[0])
        if (t >= arith::plus && t <= arith::over) ++operator_count[static_cast<size_t>(t - arith::plus)];
      longest = std::max(longest, static_cast<int64_t>(sample.tokens.size()));
      if (answers[0] >= 0 && answers[0] <= 50) ++answer_count[static_cast<size_t>(answers[0])];
    }
    CHECK(wrong == 0);
    CHECK((smallest == 0 && largest == 50));
    CHECK((longest <= arith_bound(spec) && longest >= arith_bound(spec) - 5));
    // Five standard deviations of binomial counts.
    for (double count : answer_count) CHECK(std::abs(count - samples / 51.) < 5 * std::sqrt(samples * 50.) / 51);
    for (double count : operator_count) CHECK(std::abs(count - samples * k / 4.) < 5 * std::sqrt(samples * k * 3.) / 4);
  }
}

TEST_CASE("arith: the longest chains of integers, and answers in another order that are longer still") {
  for (int k = 3; k <= 6; ++k) {
    // 30 - (30 - (30 - ... - 10)) is 10 or 20; the innermost bracket goes first.
    std::string chain;
    for (int left = k; left >= 0; --left) {
      const bool even = (k - left) % 2 == 0;
      std::string state;
      for (int i = 0; i < left; ++i) state += i + 1 < left ? "30-(" : "30-";
      state += even ? "10" : "20";
      for (int i = 1; i < left; ++i) state += ")";
      chain += state + (left > 0 ? "=" : ".");
    }
    CAPTURE(chain);
    const ArithSpec spec{k, k, arith::Numbers::integers};
    const std::vector<int32_t> tokens = integer_ids(chain);
    CHECK(static_cast<int64_t>(tokens.size()) == arith_bound(spec));
    ArithSource source(spec, 0);
    set_only_sample(source, tokens);
    CHECK(source.judge(0, solution_of(source, 0)).steps);
    CHECK(static_cast<int64_t>(solution_of(source, 0).size()) <= source.max_new_tokens());
  }
  ArithSource source({3, 3, arith::Numbers::integers}, 0);
  set_only_sample(source, integer_ids("1*50*50/50=1*50*1=50*1=50."));
  const auto long_way = integer_ids("1*2500/50=2500/50=50.");
  CHECK(source.judge(0, long_way).steps);
  CHECK(static_cast<int64_t>(long_way.size()) <= source.max_new_tokens());
}

TEST_CASE("arith: the judge of integers") {
  ArithSource source({3, 3, arith::Numbers::integers}, 0);
  set_only_sample(source, integer_ids("(7+5)/4+10=12/4+10=3+10=13."));
  const auto verdict = [&](const std::string& text) { return verdict_of(source, integer_ids(text)); };
  CHECK(verdict("12/4+10=3+10=13.") == "answer+steps");
  CHECK(verdict("12/4+10=3+10=13.=7") == "answer+steps");
  CHECK(verdict("12/4+10=3+10=13") == "wrong");  // no eos
  CHECK(verdict("12/4+10=3+10=14.") == "wrong");
  CHECK(verdict("12/4+10=3+10=3.") == "wrong");  // the last digit is not the number
  CHECK(verdict("12/4+10=3+10=113.") == "wrong");
  CHECK(verdict("12/4+10=3+10=013.") == "wrong");
  CHECK(verdict("12/4+10=3+11=13.") == "answer");
  CHECK(verdict("16/4+10=3+10=13.") == "answer");
  CHECK(verdict("13/4+10=3+10=13.") == "answer");  // a remainder
  CHECK(verdict("12/4+10=03+10=13.") == "answer");
  CHECK(verdict("12/4+10=13.") == "answer");
  CHECK(verdict("12/4+10=3+10=(13.") == "answer");
  CHECK(verdict("13.") == "answer");
  CHECK(verdict(std::string(100, '9') + "+1+1=3+10=13.") == "answer");
  CHECK(verdict(std::string(100000, '9') + ".") == "wrong");
  CHECK(verdict(".") == "wrong");
  CHECK(verdict("") == "wrong");
  CHECK(!source.judge(0, {-5, INT32_MAX, INT32_MIN, arith::eos}).answer);
  CHECK(!source.judge(0, {arith::zero + 10, arith::zero + 3, arith::eos}).answer);

  const Dataset data = open_dataset(task_options("arith:3-6i", 500, 1));
  const ArithSource& mixed = arith_of(data.train);
  CHECK(data.train->vocab_size() == 21);
  for (int64_t i = 0; i < 500; ++i) {
    std::vector<int32_t> gold = solution_of(mixed, i);
    CHECK((mixed.judge(i, gold).steps && static_cast<int64_t>(gold.size()) <= mixed.max_new_tokens()));
    int32_t& last = *(gold.end() - 2);
    last = arith::zero + (last - arith::zero + 1 + static_cast<int32_t>(i) % 9) % 10;
    CHECK(!mixed.judge(i, gold).answer);
  }
}

TEST_CASE("data: two halves of a test set are all of it once, in order, also as a task; one sample has no halves") {
  for (const int64_t n : {2, 7}) {
    DataOptions options = task_options("arith:3", 20, n);
    const Dataset whole = open_dataset(options);
    options.test_part = "first_half";
    const Dataset first = open_dataset(options);
    options.test_part = "second_half";
    const Dataset second = open_dataset(options);
    CHECK(first.test->size() == n / 2);
    CHECK(second.test->size() == n - n / 2);
    const int64_t T = whole.test->seq_len();
    CHECK(first.test->digest() == whole.test->digest());
    CHECK(second.train->size() == 20);
    std::vector<int32_t> want(2 * T), got(2 * T);
    for (int64_t i = 0; i < n; ++i) {
      const Source& half = *(i < n / 2 ? first : second).test;
      const int64_t place = i < n / 2 ? i : i - n / 2;
      whole.test->read(i, want.data(), want.data() + T);
      half.read(place, got.data(), got.data() + T);
      CHECK(got == want);
      const Task &of_whole = *whole.test->task(), &of_half = *half.task();
      CHECK(of_half.prompt(place) == of_whole.prompt(i));
      CHECK(of_half.is_hard(place) == of_whole.is_hard(i));
      const std::vector<int32_t> answer(want.begin() + std::ssize(of_whole.prompt(i)), want.begin() + T);
      CHECK(of_half.judge(place, answer).answer);
      CHECK(of_half.max_new_tokens() == of_whole.max_new_tokens());
      CHECK(of_half.eos() == of_whole.eos());
    }
  }
  DataOptions one = task_options("arith:3", 20, 1);
  one.test_part = "second_half";
  check_fails(Exit::bad_data, {"arith:3", "no half"}, [&] { open_dataset(one); });
}
