#include "eval/sampling.h"

#include <set>

#include "eval/stop_strings.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// By token, 0 where it cannot be drawn.
std::vector<double> distribution(const std::vector<float>& logits, const std::vector<int32_t>& seen,
                                 const SamplingOptions& options) {
  std::vector<double> all(logits.size());
  for (const Candidate& c : probabilities(logits.data(), std::ssize(logits), seen, options))
    all[static_cast<size_t>(c.token)] = c.probability;
  return all;
}

void check_distribution(const std::vector<float>& chances, const SamplingOptions& options,
                        const std::vector<double>& want) {
  std::vector<float> logits;
  for (const float chance : chances) logits.push_back(std::log(chance) + 3);
  check_close("probabilities", distribution(logits, {}, options), want, 1e-6);  // of float logits
}

// All that the pieces show; `waits` is what finish() gives.
std::string shown(StopStrings& stop, const std::vector<std::string>& pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += stop.add(piece);
  return text;
}

}  // namespace

TEST_CASE("sampling: distributions computed by hand") {
  const std::vector<float> four{0.2f, 0.1f, 0.4f, 0.3f};
  check_distribution(four, {.temperature = 1}, {0.2, 0.1, 0.4, 0.3});
  check_distribution(four, {.temperature = 0.5}, {4 / 30., 1 / 30., 16 / 30., 9 / 30.});
  check_distribution(four, {.temperature = 0}, {0, 0, 1, 0});
  check_distribution(four, {.temperature = 1, .top_k = 2}, {0, 0, 4 / 7., 3 / 7.});
  check_distribution(four, {.temperature = 1, .top_k = 9}, {0.2, 0.1, 0.4, 0.3});
  check_distribution({0.2f, 0.4f, 0.2f, 0.2f}, {.temperature = 1, .top_k = 2}, {0.2, 0.4, 0.2, 0.2});  // as likely
  check_distribution(four, {.temperature = 1, .top_p = 0}, {0, 0, 1, 0});
  check_distribution(four, {.temperature = 1, .top_p = 0.39}, {0, 0, 1, 0});
  check_distribution(four, {.temperature = 1, .top_p = 0.41}, {0, 0, 4 / 7., 3 / 7.});
  check_distribution(four, {.temperature = 1, .top_p = 0.71}, {2 / 9., 0, 4 / 9., 3 / 9.});
  check_distribution(four, {.temperature = 1, .min_p = 0.49}, {2 / 9., 0, 4 / 9., 3 / 9.});
  check_distribution(four, {.temperature = 1, .min_p = 1}, {0, 0, 1, 0});
  // After top-k the first one has 4/7, which is more than 0.55: so it stands alone.
  check_distribution(four, {.temperature = 1, .top_k = 2, .top_p = 0.55}, {0, 0, 1, 0});
  // The temperature comes before: 16/30 is more than 0.5.
  check_distribution(four, {.temperature = 0.5, .top_p = 0.5}, {0, 0, 1, 0});
}

TEST_CASE("sampling: the repetition penalty counts a token once, and greedily too") {
  const std::vector<float> logits{2, -1, 1.5, 0};
  const SamplingOptions penalty{.temperature = 1, .repetition_penalty = 2};
  const double a = std::exp(1.), b = std::exp(-2.), c = std::exp(1.5), all = a + b + c + 1;
  check_close("probabilities", distribution(logits, {0, 1, 0, 0}, penalty),
              std::vector<double>{a / all, b / all, c / all, 1 / all}, 1e-12);
  CHECK(distribution(logits, {0}, {.repetition_penalty = 2}) == std::vector<double>{0, 0, 1, 0});
  CHECK(distribution(logits, {0}, {.repetition_penalty = 1}) == std::vector<double>{1, 0, 0, 0});
}

TEST_CASE("sampling: the distributions that the processors of transformers 5.23 give") {
  struct Setting {
    std::vector<double> want;
    double penalty, temperature;
    int64_t top_k;
    double top_p, min_p;
  };
  const std::vector<float> logits{2.5f, -1.25f, 0.75f, 3.0f, -0.5f, 1.5f, 2.75f, -3.0f, 0.25f, 1.0f};
  for (const Setting& s : std::vector<Setting>{
           {{0.3880934837, 0, 0, 0.2948659874, 0, 0.0930070056, 0.2240335233, 0, 0, 0}, 1.3, 0.7, 6, 0.85, 0.1},
           {{0.2096579953, 0, 0.06528817564, 0.2926013032, 0, 0.1076420039, 0.2476816558, 0, 0, 0.07712886613},
            1.0,
            1.5,
            0,
            0.9,
            0},
           {{0.3144836264, 0, 0, 0.3144836264, 0, 0.1156920607, 0.2553406865, 0, 0, 0}, 1.2, 1.0, 4, 1, 0},
           {{0.2361228311, 0, 0, 0.4411355246, 0, 0, 0.3227416443, 0, 0, 0}, 1.0, 0.8, 0, 1, 0.25},
           {{0, 0, 0, 0.5774953652, 0, 0, 0.4225046348, 0, 0, 0}, 0.8, 1.0, 0, 0.7, 0},
           {{0.2457408626, 0, 0.07652449686, 0.2161715809, 0, 0.1261675657, 0.1901602847, 0, 0.05483219803,
             0.0904030112},
            1.3,
            1.5,
            8,
            0.95,
            0.12}})
    check_close("probabilities",
                distribution(logits, {3, 1, 3, 6}, {s.temperature, s.top_k, s.top_p, s.min_p, s.penalty}), s.want,
                1e-9);
}

TEST_CASE("sampling: what is drawn has its share of the numbers from 0 to 1") {
  const std::vector<Candidate> three{{7, 0.5}, {3, 0.25}, {9, 0.25}, {4, 0}};
  for (const auto& [u, token] : std::vector<std::pair<double, int32_t>>{
           {0, 7}, {0.4999, 7}, {0.5, 3}, {0.7499, 3}, {0.75, 9}, {1 - 0x1p-53, 9}, {1, 9}})
    CHECK(draw(three, u) == token);
  std::set<double> numbers;
  for (const int64_t n : {0, 1, 2})
    for (const uint64_t seed : {1, 2})
      for (const int64_t prompt : {0, 1})
        for (const int64_t sample : {0, 1}) numbers.insert(sampling_number(seed, prompt, sample, n));
  CHECK(numbers.size() == 24);
}

TEST_CASE("stop strings: found wherever the tokens end, and never shown") {
  const std::string text = "so é — aaab <end> more";  // with characters of two and three bytes
  for (const std::string end : {"<end>", "é", "—", "aab", "ab <"}) {
    const std::string want = text.substr(0, text.find(end));
    for (size_t i = 0; i <= text.size(); ++i) {
      for (size_t j = i; j <= text.size(); ++j) {
        StopStrings stop({"never", end});
        CHECK(shown(stop, {text.substr(0, i), text.substr(i, j - i), text.substr(j)}) + stop.finish() == want);
        CHECK(stop.found());
      }
    }
  }
}

TEST_CASE("stop strings: what may begin one is held back, and no more") {
  StopStrings stop({"\n\nQ:", "ab"});
  CHECK(stop.add("one\n") == "one");
  CHECK(stop.add("\n") == "");
  CHECK(stop.add("\nQ") == "\n");
  CHECK(stop.add("x") == "\n\nQx");
  CHECK(stop.add("a") == "");
  CHECK(!stop.found());
  CHECK(stop.finish() == "a");
  CHECK(stop.finish() == "");
  CHECK(stop.add("yabz") == "y");
  CHECK(stop.found());
  CHECK(stop.add("more") + stop.finish() == "");
  StopStrings first({"cd", "b"});
  CHECK(shown(first, {"abcd"}) == "a");  // whichever comes first in the text
  StopStrings none({});
  CHECK(shown(none, {"a", "", "b"}) + none.finish() == "ab");
}
