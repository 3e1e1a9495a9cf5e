// Generation by chunks, in bf16, and of rows together, against token by token, fp32 and each row alone.
#include "eval/decode.h"

#include <set>

#include "tests/support/cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

std::vector<int32_t> random_tokens(int64_t count, int64_t V, uint64_t stream) {
  Random random(5, stream);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>(random.below(V)));
  return tokens;
}

// The logits (rows, V) after `count` tokens of every prompt, fed one by one from the decoder's position on.
std::vector<float> logits_after(Decoder& decoder, const std::vector<std::vector<int32_t>>& prompts, int64_t count) {
  std::vector<float> logits;
  while (decoder.position() < count) {
    std::vector<int32_t> tokens;
    for (const auto& prompt : prompts) tokens.push_back(prompt[static_cast<size_t>(decoder.position())]);
    logits = decoder.feed(tokens);
  }
  return logits;
}

}  // namespace

TEST_CASE("decode: a prompt read in chunks leaves what reading it token by token does, in every architecture") {
  for (const Case& c : cases()) {
    if (has_loops(c.config, /*per_sequence=*/true)) continue;
    CAPTURE(c.name);
    Config config = c.config;
    config.max_position_embeddings = 90;
    TinyModel model(config);
    struct Form {
      int64_t rows, length;  // of the decoder
      std::vector<int64_t> prompts;
      int64_t read;
    };
    // One short chunk; two, of which the second begins anew before the end; rows of several lengths.
    for (const Form& form : std::vector<Form>{{1, 90, {12}, 11}, {1, 90, {90}, 89}, {3, 40, {30, 26, 40}, 25}}) {
      std::vector<std::vector<int32_t>> prompts;
      for (const int64_t length : form.prompts) prompts.push_back(random_tokens(length, 7, prompts.size()));
      Decoder chunks(*model.device, model.params, config, form.rows, form.length);
      chunks.read(prompts);
      CHECK(chunks.position() == form.read);
      const auto got = logits_after(chunks, prompts, form.read + 1);
      chunks.reset();  // a used cache
      chunks.read(prompts);
      CHECK(logits_after(chunks, prompts, form.read + 1) == got);
      Decoder single(*model.device, model.params, config, form.rows, form.length);
      const auto want = logits_after(single, prompts, form.read + 1);
      for (size_t i = 0; i < want.size(); ++i)  // hundreds of ulps: other kernels, other sums, over many tokens
        CHECK(std::abs(got[i] - want[i]) < 5e-5f * std::max(1.f, std::abs(want[i])));
    }
  }
}

TEST_CASE("decode: layers that attend to the same keys and values have one cache") {
  for (const auto& [choice, owners] : std::map<std::string, size_t>{
           {"llama", 4}, {"kv_share", 2}, {"kv_share:sharing=suffix:num_kv_shared_layers=3", 1}, {"ala:stride=3", 4}}) {
    CAPTURE(choice);
    TinyModel model(tiny_with(choice, 2));
    Tape tape(Dtype::f32, 50);
    record_model(tape, model.params, model.config, 1, 1);
    std::set<const Value*> caches;
    for (const auto& node : tape.nodes())
      if (node->op() == std::string("cached_attn")) caches.insert(node->reads.begin(), node->reads.end());
    CHECK(caches.size() == 2 * owners);
  }
}

TEST_CASE("decode: what is not worth a chunk is left to feed()") {
  TinyModel model(tiny_config("llama"));
  const auto stays = [&](int64_t rows, size_t length) {
    Decoder decoder(*model.device, model.params, model.config, rows, 100);
    decoder.read(std::vector(static_cast<size_t>(rows), std::vector<int32_t>(length, 1)));
    return decoder.position() == 0;
  };
  CHECK(stays(1, 8));
  CHECK(!stays(1, 9));
  CHECK(stays(64, 16));
  CHECK(!stays(64, 17));
}

TEST_CASE("decode: a row's tokens do not depend on its neighbours, and a row may end itself") {
  for (const std::string arch : {"llama", "lime", "hyper"}) {
    CAPTURE(arch);
    TinyModel model(tiny_config(arch));
    const std::vector<std::vector<int32_t>> prompts{random_tokens(20, 7, 0), random_tokens(3, 7, 1),
                                                    random_tokens(33, 7, 2), random_tokens(20, 7, 3)};
    const auto write = [&](const std::vector<std::vector<int32_t>>& some) {
      Decoder decoder(*model.device, model.params, model.config, std::ssize(some), 60);
      return generate(decoder, some, 12, {}, most_likely);
    };
    const auto together = write(prompts);
    for (size_t row = 0; row < prompts.size(); ++row) CHECK(write({prompts[row]})[0] == together[row]);
    Decoder decoder(*model.device, model.params, model.config, 4, 60);
    const auto two = [&, seen = std::vector<int>(4)](size_t row, int32_t token) mutable {
      CHECK(token == together[row][static_cast<size_t>(seen[row])]);
      return ++seen[row] < 2;
    };
    for (const auto& written : generate(decoder, prompts, 12, {}, most_likely, two)) CHECK(written.size() == 2);
  }
}

// The root mean square over all scored tokens of the loss minus that of fp32.
TEST_CASE("decode: bf16 is about as far from fp32 as the training tape's bf16 is") {
  for (const Case& c : cases()) {
    if (has_loops(c.config, /*per_sequence=*/true)) continue;
    CAPTURE(c.name);
    TinyModel exact(c.config), bf16_model(c.config, "cpu", PlanMode::reuse, Dtype::bf16);
    bf16_model.take(exact);
    refresh_bf16_copy(bf16_model.params);
    exact.loss(), bf16_model.loss();
    const auto want = exact.values<float>(exact.graph.losses->tensor);
    const auto trained = bf16_model.values<float>(bf16_model.graph.losses->tensor);
    Decoder decoder(*bf16_model.device, bf16_model.params, c.config, TinyModel::B, TinyModel::T, Dtype::bf16);
    double of_training = 0, of_decoder = 0, largest = 0;
    for (int64_t t = 0; t < TinyModel::T; ++t) {
      const auto& logits =
          decoder.feed({exact.tokens[static_cast<size_t>(t)], exact.tokens[static_cast<size_t>(TinyModel::T + t)]});
      for (int64_t b = 0; b < TinyModel::B; ++b) {
        const size_t i = static_cast<size_t>(b * TinyModel::T + t);
        if (exact.targets[i] < 0) continue;
        double sum = 0;
        for (int64_t v = 0; v < 7; ++v) {
          const auto logit = static_cast<double>(logits[static_cast<size_t>(b * 7 + v)]);
          sum += std::exp(logit), largest = std::max(largest, std::abs(logit));
        }
        const double loss = std::log(sum) - static_cast<double>(logits[static_cast<size_t>(b * 7 + exact.targets[i])]);
        of_training += std::pow(static_cast<double>(trained[i] - want[i]), 2);
        of_decoder += std::pow(loss - static_cast<double>(want[i]), 2);
      }
    }
    of_training = std::sqrt(of_training / exact.scored), of_decoder = std::sqrt(of_decoder / exact.scored);
    // Training does not round the logits; here each is, by at most 2^-9 of the largest: the target's, and the sum's.
    CHECK(of_decoder <= 2 * of_training + 2 * 0x1p-9 * largest);
    CHECK(of_decoder > 0);
  }
}
