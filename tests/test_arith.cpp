#include "data/arith.h"

#include <algorithm>
#include <map>
#include <set>

#include "tests/data_check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

std::vector<int32_t> ids(const std::string& text) { return Tokenizer::words(arith_words()).encode(text); }

std::optional<int32_t> value_of(const std::string& text) { return arith_evaluate(ids(text)); }

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

int64_t operators(const std::vector<int32_t>& tokens) {
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

DataOptions options(int k, int64_t train, int64_t test, uint64_t seed = 1) {
  DataOptions o;
  o.spec = "arith:" + std::to_string(k);
  o.seed = seed;
  o.train_samples = train;
  o.test_samples = test;
  return o;
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
      const TaskSample sample = arith_sample(k, random);
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
    CHECK(longest == arith_bound(k));  // 20,000 samples reach it
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
  const Dataset data = open_dataset(options(3, 20000, 5000)), again = open_dataset(options(3, 20000, 5000));
  const Dataset other = open_dataset(options(3, 20000, 5000, 2));
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
    ArithSource source(1, 0);
    TaskSource::Seen seen;
    Random random(1, 1);
    source.fill(1000, seen, [&] { return arith_sample(1, random); });
  });
}

TEST_CASE("arith: the samples that open_dataset gives by default") {
  const Dataset data = open_dataset(options(6, 0, 0));
  CHECK((data.train->size() == 50000 && data.test->size() == 10000));
  CHECK(data.train->seq_len() == 85);  // the bound is 86
  CHECK(data.tokenizer.vocab_size() == 21);
}

TEST_CASE("arith: only what follows the prompt is a target") {
  DataOptions padded = options(4, 50, 10);
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
  const Dataset exact = open_dataset(options(3, 2000, 1));
  bool has_longest = false;
  for (int64_t i = 0; i < 2000; ++i) has_longest |= read_sample(*exact.train, i).targets.back() == arith::eos;
  CHECK(has_longest);
}

TEST_CASE("arith: the judge") {
  // The one sample is the prompt 3 + 0 - 2 - 0 = with the solution 3 + 9 - 0 = 3 + 9 = 1.
  ArithSource source(3, 0);
  TaskSource::Seen seen;
  source.fill(1, seen, [] {
    const auto tokens = ids("3 + 0 - 2 - 0 = 3 + 9 - 0 = 3 + 9 = 1 <eos>");
    return TaskSample{{tokens.begin(), tokens.end()}, 8};
  });
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

  const Dataset data = open_dataset(options(5, 500, 1));
  const Task& task = *data.train->task();
  for (int64_t i = 0; i < 500; ++i) {
    const auto& source5 = dynamic_cast<const ArithSource&>(*data.train);
    const auto all = source5.sequence(i);
    const std::vector<int32_t> gold(all.begin() + static_cast<int64_t>(task.prompt(i).size()), all.end());
    const auto v = task.judge(i, gold);
    CHECK((v.answer && v.steps && static_cast<int64_t>(gold.size()) <= task.max_new_tokens()));
  }
}
