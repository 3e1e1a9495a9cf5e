// Scores against the model's own logits, token by token, and against themselves in other company.
#include "eval/mean_loss.h"
#include "eval/scorer.h"

#include "eval/decode.h"
#include "tests/support/backends.h"
#include "tests/support/data_check.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Scored {
  explicit Scored(const std::string& arch, int64_t V = 7, int64_t longest = 11, const std::string& name = "cpu")
      : config(tiny_config(arch)), device(make_device(name)) {
    config.vocab_size = V;
    config.max_position_embeddings = longest;
    declare_model(params, config);
    params.allocate(*device, Dtype::f32, false);
    params.initialise(5);
  }
  std::vector<Score> operator()(const std::vector<Passage>& passages, int64_t batch_tokens = 4096) {
    return Scorer(*device, params, config, batch_tokens).score(passages);
  }
  // What the model says with its cache, one token after the other.
  Score by_token(const Passage& passage) {
    Decoder decoder(*device, params, config, 1, config.max_position_embeddings);
    Score score;
    for (size_t t = 1; t < passage.tokens.size(); ++t) {
      const std::vector<float>& z = decoder.feed({passage.tokens[t - 1]});
      if (t < passage.first) continue;
      double sum = 0;
      for (const float logit : z) sum += std::exp(static_cast<double>(logit));
      score.logprob += static_cast<double>(z[static_cast<size_t>(passage.tokens[t])]) - std::log(sum);
      score.greedy = score.greedy && most_likely(0, z.data(), std::ssize(z)) == passage.tokens[t];
    }
    return score;
  }
  // The prompt, and what the model finds most likely after it.
  Passage continued(const std::vector<int32_t>& prompt, int64_t count) {
    Decoder decoder(*device, params, config, 1, config.max_position_embeddings);
    return passage_of(prompt, generate(decoder, {prompt}, count, {}, most_likely)[0], config.max_position_embeddings);
  }

  Config config;
  std::unique_ptr<Device> device;
  ParameterTable params;
};

std::vector<Passage> random_passages(const Config& config, size_t count) {
  Random random(3, 4);
  std::vector<Passage> passages;
  for (size_t i = 0; i < count; ++i) {
    Passage passage;
    const int64_t n = 2 + random.below(config.max_position_embeddings);  // up to one token that is not read
    for (int64_t t = 0; t < n; ++t) passage.tokens.push_back(static_cast<int32_t>(random.below(config.vocab_size)));
    passage.first = 1 + static_cast<size_t>(random.below(n - 1));
    passages.push_back(passage);
  }
  return passages;
}

}  // namespace

TEST_CASE("scorer: log-probabilities and greedy flags are those of the model's logits") {
  for (const char* arch : {"llama", "gpt2", "lime", "hyper", "mudd"}) {
    CAPTURE(arch);
    Scored model(arch);
    std::vector<Passage> passages = random_passages(model.config, 40);
    for (int32_t token = 0; token < 7; ++token) passages.push_back(model.continued({token, 3}, 6));
    for (int32_t token = 0; token < 7; ++token) {  // almost
      passages.push_back(passages[40 + static_cast<size_t>(token)]);
      int32_t& changed = passages.back().tokens[5];
      changed = (changed + 1) % 7;
    }
    const std::vector<Score> scores = model(passages, 64);
    REQUIRE(scores.size() == passages.size());
    for (size_t i = 0; i < passages.size(); ++i) {
      CAPTURE(i);
      const Score want = model.by_token(passages[i]);
      CHECK(std::abs(scores[i].logprob - want.logprob) <= 1e-5 * std::max(1.0, -want.logprob));
      CHECK(scores[i].greedy == want.greedy);
      if (i >= 40) CHECK(scores[i].greedy == (i < 47));
    }
  }
}

TEST_CASE("scorer: every device finds the same") {
  Scored model("lime");
  const std::vector<Passage> passages =
      joined(random_passages(model.config, 3), std::vector{model.continued({1, 3}, 6)});
  const std::vector<Score> want = model(passages);
  for (const std::string& name : fast_devices()) {
    CAPTURE(name);
    const std::vector<Score> got = Scored("lime", 7, 11, name)(passages, 20);
    for (size_t i = 0; i < passages.size(); ++i) {
      CHECK(got[i].logprob == doctest::Approx(want[i].logprob).epsilon(1e-5));
      CHECK(got[i].greedy == want[i].greedy);
    }
  }
}

TEST_CASE("scorer: the sum over a batch is evaluate's loss") {
  Scored model("llama");
  const Counting source(9, 6);
  BatchModel batches(*model.device, model.params, model.config, Batch{3, 6, Dtype::f32, /*training=*/false});
  const auto group = one_rank_group();
  const MeanLoss mean = mean_loss(batches, source, 0, *group);
  std::vector<Passage> passages;
  for (int64_t i = 0; i < source.size(); ++i) {
    std::vector<int32_t> tokens(6), targets(6);
    source.read(i, tokens.data(), targets.data());
    tokens.push_back(targets.back());
    passages.push_back({tokens, static_cast<size_t>(1 + i % 3)});  // the first i % 3 targets do not count
  }
  double sum = 0;
  for (const Score& score : model(passages)) sum -= score.logprob;
  CHECK(sum / static_cast<double>(mean.scored) == doctest::Approx(mean.loss).epsilon(1e-6));
}

// Not bit for bit: a product of 16 rows or fewer sums in another order than one of more.
TEST_CASE("scorer: the company that a passage has changes no more than the rounding") {
  for (const char* arch : {"llama", "gpt2", "hyper"}) {
    CAPTURE(arch);
    Scored model(arch, 301, 45);
    const std::vector<Passage> passages = random_passages(model.config, 60);
    const std::vector<Score> together = model(passages), again = model(passages);
    const auto check = [](const Score& got, const Score& want) {
      CHECK(std::abs(got.logprob - want.logprob) <= 1e-6 * std::max(1.0, -want.logprob));
      CHECK(got.greedy == want.greedy);
    };
    for (const int64_t batch_tokens : {1, 100, 777}) {
      const std::vector<Score> parts = model(passages, batch_tokens);
      for (size_t i = 0; i < passages.size(); ++i) check(parts[i], together[i]);
    }
    for (size_t i = 0; i < 6; ++i) check(model({passages[i]})[0], together[i]);
    for (size_t i = 0; i < passages.size(); ++i) CHECK(again[i].logprob == together[i].logprob);
  }
  CHECK(Scored("llama")({}).empty());
}

TEST_CASE("scorer: logits that are not finite are an error") {
  Scored model("llama");
  std::vector<double> nothing(static_cast<size_t>(model.config.hidden_size), std::nan(""));
  model.params.write(model.params.at("model.norm.weight"), nothing.data());
  check_fails(Exit::not_finite, {"token 2", "position 1"}, [&] { model({Passage{{1, 2}, 1}}); });
}

TEST_CASE("scorer: a context that is too long loses its beginning") {
  const Passage fits = passage_of({1, 2, 3}, {4, 5}, 4), cut = passage_of({0, 0, 1, 2, 3}, {4, 5}, 4);
  CHECK((fits.tokens == std::vector<int32_t>{1, 2, 3, 4, 5} && fits.first == 3));
  CHECK((cut.tokens == fits.tokens && cut.first == 3));
  const Passage all = passage_of({9}, {1, 2, 3, 4}, 4);
  CHECK((all.tokens == std::vector<int32_t>{9, 1, 2, 3, 4} && all.first == 1));
}

TEST_CASE("scorer: the windows of a text score every token once, with all the context that fits") {
  for (const size_t n : {0, 1, 3, 4, 5, 8, 11, 12, 13}) {
    CAPTURE(n);
    std::vector<int32_t> ids(n), scored;
    std::iota(ids.begin(), ids.end(), 100);
    std::vector<int32_t> all = {7};
    all.insert(all.end(), ids.begin(), ids.end());
    for (const Passage& passage : rolling_passages(all, 1, 4)) {
      CHECK(passage.tokens.size() == std::min<size_t>(n + 1, 5));  // full, unless the text is too short
      CHECK((passage.first >= 1 && passage.first < passage.tokens.size()));
      scored.insert(scored.end(), passage.tokens.begin() + static_cast<ptrdiff_t>(passage.first), passage.tokens.end());
      for (size_t t = 1; t < passage.tokens.size(); ++t)  // neighbours in the text
        CHECK(passage.tokens[t] == (passage.tokens[t - 1] == 7 ? 100 : passage.tokens[t - 1] + 1));
    }
    CHECK(scored == ids);
  }
  // Three given tokens in the first window.
  const std::vector<Passage> given = rolling_passages({7, 8, 9, 100, 101, 102}, 3, 4);
  REQUIRE(given.size() == 2);
  CHECK((given[0].tokens == std::vector<int32_t>{7, 8, 9, 100, 101} && given[0].first == 3));
  CHECK((given[1].tokens == std::vector<int32_t>{8, 9, 100, 101, 102} && given[1].first == 4));
  CHECK(rolling_passages({7, 8}, 2, 4).empty());
}
