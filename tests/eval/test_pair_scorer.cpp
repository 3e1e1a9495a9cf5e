// Scores of minimal pairs against those of their whole sentences, in every architecture, and pairs with known winners.
#include "eval/pair_scorer.h"

#include "eval/decode.h"
#include "eval/scorer.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Ids = std::vector<int32_t>;

struct Model {
  explicit Model(const Config& of, const std::string& name = "cpu") : config(of), device(make_device(name)) {
    declare_model(params, config);
    params.allocate(*device, Dtype::f32, false);
    params.initialise(5);
  }
  std::vector<PairScore> pairs(const std::vector<TokenPair>& pairs, int64_t batch_tokens = 4096) {
    return PairScorer(*device, params, config, batch_tokens).score(pairs);
  }
  // By the whole sentences, each alone.
  std::vector<PairScore> sentences(const std::vector<TokenPair>& pairs) {
    std::vector<Passage> passages;
    for (const TokenPair& pair : pairs) passages.push_back({pair.good, 1}), passages.push_back({pair.bad, 1});
    const std::vector<Score> scores = Scorer(*device, params, config, 4096).score(passages);
    std::vector<PairScore> both;
    for (size_t i = 0; i < pairs.size(); ++i) both.push_back({scores[2 * i].logprob, scores[2 * i + 1].logprob});
    return both;
  }

  Config config;
  std::unique_ptr<Device> device;
  ParameterTable params;
};

Config sized(Config config, int64_t longest = 11) {
  config.max_position_embeddings = longest;
  return config;
}

Ids random_ids(Random& random, int64_t count) {
  Ids ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(random.below(7)));
  return ids;
}
// After the token 3: so many shared ones, then others of each sentence.
TokenPair pair_of(Random& random, int64_t shared, int64_t good, int64_t bad) {
  const Ids begin = joined(Ids{3}, random_ids(random, shared));
  TokenPair pair{joined(begin, random_ids(random, good)), joined(begin, random_ids(random, bad))};
  const size_t next = begin.size();
  if (good > 0 && bad > 0) pair.bad[next] = (pair.good[next] + 1) % 7;
  return pair;
}
// Nothing shared, all but one token, one sentence within the other, equal ones, the longest of `longest`, then any.
std::vector<TokenPair> all_kinds(int64_t longest, int64_t more) {
  Random random(3, 4);
  std::vector<TokenPair> pairs = {pair_of(random, 0, 4, 2),           pair_of(random, 0, 1, 1),
                                  pair_of(random, 6, 1, 1),           pair_of(random, 5, 0, 3),
                                  pair_of(random, 5, 2, 0),           pair_of(random, 4, 0, 0),
                                  pair_of(random, longest - 1, 1, 1), pair_of(random, 0, longest, longest)};
  for (int64_t i = 0; i < more; ++i) {
    const int64_t shared = random.below(5);
    pairs.push_back(pair_of(random, shared, 1 + random.below(longest - shared), 1 + random.below(longest - shared)));
  }
  return pairs;
}

void check_alike(const std::vector<PairScore>& got, const std::vector<PairScore>& want, double tolerance) {
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(std::abs(got[i].good - want[i].good) <= tolerance * std::max(1.0, -want[i].good));
    CHECK(std::abs(got[i].bad - want[i].bad) <= tolerance * std::max(1.0, -want[i].bad));
    const double difference = want[i].good - want[i].bad;  // of a few ulps: no decision
    if (std::abs(difference) > 1e-4) CHECK((got[i].good > got[i].bad) == (difference > 0));
  }
}

}  // namespace

TEST_CASE("pairs: the scores are those of the whole sentences, in every architecture") {
  const std::vector<TokenPair> pairs = all_kinds(11, 30);
  for (const Case& c : cases()) {
    if (has_loops(c.config, /*per_sequence=*/true)) continue;
    CAPTURE(c.name);
    Model model(sized(c.config));
    check_alike(model.pairs(pairs, 100), model.sentences(pairs), 2e-5);
  }
}

TEST_CASE("pairs: the company that a pair has changes no more than the rounding") {
  for (const char* arch : {"llama", "gpt2", "lime"}) {
    CAPTURE(arch);
    Model model(sized(tiny_config(arch)));
    const std::vector<TokenPair> pairs = all_kinds(11, 150);
    const std::vector<PairScore> want = model.sentences(pairs), once = model.pairs(pairs);
    for (const int64_t batch_tokens : {1, 37, 100, 777, 4096}) {
      const std::vector<PairScore> got = model.pairs(pairs, batch_tokens);
      check_alike(got, want, 1e-5);
      check_alike(got, once, 2e-6);
    }
    for (size_t i = 0; i < 9; ++i) check_alike(model.pairs({pairs[i]}), {want[i]}, 1e-5);
    const std::vector<PairScore> again = model.pairs(pairs);
    for (size_t i = 0; i < pairs.size(); ++i) CHECK((again[i].good == once[i].good && again[i].bad == once[i].bad));
    CHECK(model.pairs({}).empty());
  }
}

TEST_CASE("pairs: every device finds the same") {
  const std::vector<TokenPair> pairs = all_kinds(11, 4);
  Model model(sized(tiny_config("lime")));
  const std::vector<PairScore> want = model.sentences(pairs);
  for (const std::string& name : fast_devices()) {
    CAPTURE(name);
    check_alike(Model(sized(tiny_config("lime")), name).pairs(pairs, 60), want, 2e-5);
  }
}

TEST_CASE("pairs: what the model writes itself wins, and equal sentences tie") {
  Model model(sized(tiny_config("llama")));
  Random random(5, 6);
  std::vector<TokenPair> pairs;
  for (int64_t length = 1; length <= 9; ++length) {
    const Ids prompt = joined(Ids{3}, random_ids(random, length));
    Decoder decoder(*model.device, model.params, model.config, 1, 11);
    const int32_t likely = generate(decoder, {prompt}, 1, {}, most_likely)[0][0];
    const Ids good = joined(prompt, Ids{likely}), bad = joined(prompt, Ids{(likely + 1) % 7});
    pairs.push_back({good, bad}), pairs.push_back({bad, good}), pairs.push_back({good, good});
  }
  const std::vector<PairScore> scores = model.pairs(pairs, 50);
  for (size_t i = 0; i < scores.size(); i += 3) {
    CAPTURE(i);
    CHECK(scores[i].good > scores[i].bad);
    CHECK(scores[i + 1].good < scores[i + 1].bad);
    CHECK(scores[i + 2].good == scores[i + 2].bad);  // to the bit
    CHECK(scores[i + 2].good < 0);
  }
}

TEST_CASE("pairs: every token is read once") {
  const auto read = [](const Ids& good, const Ids& bad) {
    const PairTokens tokens = tokens_read({good, bad});
    return std::vector<int64_t>{tokens.shared, tokens.good, tokens.bad};
  };
  CHECK(read({3, 1, 2, 5}, {3, 1, 4, 6, 6}) == std::vector<int64_t>{2, 1, 2});
  CHECK(read({3, 1}, {3, 2}) == std::vector<int64_t>{1, 0, 0});  // both predicted by the first one
  CHECK(read({3, 1, 2}, {3, 1, 5}) == std::vector<int64_t>{2, 0, 0});
  CHECK(read({3, 1, 2}, {3, 1, 2, 4}) == std::vector<int64_t>{2, 0, 1});
  CHECK(read({3, 1, 2}, {3, 1, 2}) == std::vector<int64_t>{2, 0, 0});
  CHECK_THROWS(read({3, 1}, {4, 1}));
  CHECK_THROWS(read({3}, {3, 1}));
  Model model(sized(tiny_config("llama")));
  const std::vector<TokenPair> pairs = all_kinds(11, 20);
  int64_t sum = 0, last = 0;
  for (const TokenPair& pair : pairs) sum += tokens_read(pair).sum();
  PairScorer(*model.device, model.params, model.config, 50).score(pairs, [&](int64_t done, int64_t all) {
    CHECK((done > last && all == sum));
    last = done;
  });
  CHECK(last == sum);
}

TEST_CASE("pairs: logits that are not finite are an error") {
  Model model(sized(tiny_config("llama")));
  std::vector<double> nothing(static_cast<size_t>(model.config.hidden_size), std::nan(""));
  model.params.write(model.params.at("model.norm.weight"), nothing.data());
  check_fails(Exit::not_finite, {"token 2", "position 1"}, [&] { model.pairs({{{1, 2}, {1, 3}}}); });
}
