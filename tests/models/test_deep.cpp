// Depths at which what grows with their square would show.
#include <set>

#include "tests/support/cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// What the nodes of these ops write for the backward, in bytes.
double saved_bytes(const Tape& tape, const std::set<std::string>& ops) {
  double bytes = 0;
  for (const auto& node : tape.nodes())
    if (ops.contains(node->op()))
      for (const Value* value : node->saved) bytes += static_cast<double>(value->bytes());
  return bytes;
}

// A model of L layers that has taken a step.
std::unique_ptr<TinyModel> deep_model(const std::string& choice, int64_t L) {
  Config config = tiny_with(choice, 2);
  config.num_hidden_layers = L;
  auto model = std::make_unique<TinyModel>(config);
  CHECK(std::isfinite(model->step()));
  return model;
}

}  // namespace

TEST_CASE("architectures: 48 layers of attention residuals keep what the formula says beside the streams") {
  for (const int64_t size : {0, 6})
    for (const int64_t L : {12, 48}) {
      CAPTURE(size);
      CAPTURE(L);
      const auto model = deep_model(str("attnres:attn_res_block_size=", size), L);
      const int64_t N = TinyModel::B * TinyModel::T, C = model->config.hidden_size, mixtures = 2 * L + 1;
      int64_t read = size == 0 ? mixtures * (L + 1) : 1 + (L + size - 1) / size;
      for (int64_t i = 0; i < L && size > 0; ++i) read += 1 + (i + size - 1) / size + 2 + i / size;
      // Logits and weights of every source and token; squares, pbar and the query of every mixture or source.
      const auto want = static_cast<double>(2 * N * read + (2 * N + C) * mixtures);
      CHECK(saved_bytes(model->tape, {"query_mix", "query_source"}) == sizeof(float) * want);
    }
}

TEST_CASE("architectures: 48 layers of mHC keep a token's products, their norm and its reading weights") {
  for (const int64_t L : {12, 48}) {
    CAPTURE(L);
    const auto model = deep_model("mhc", L);
    const int64_t N = TinyModel::B * TinyModel::T, E = 4;
    const auto want = static_cast<double>(N * (2 * L * (E * (E + 2) + 1 + E) + E + 1 + E));
    CHECK(saved_bytes(model->tape, {"mhc_read"}) == sizeof(float) * want);
  }
}

TEST_CASE("architectures: 48 layers of gated streams keep the network's first product and the norms' factors") {
  for (const int64_t L : {12, 48}) {
    CAPTURE(L);
    const auto model = deep_model("gated_streams:hc_lowrank=3", L);
    const int64_t N = TinyModel::B * TinyModel::T, E = 4, R = 3;
    CHECK(saved_bytes(model->tape, {"gated_read"}) == sizeof(float) * static_cast<double>(N * (2 * L + 1) * (R + E)));
  }
}

TEST_CASE("architectures: memory and FLOPs grow with the depth, and not faster") {
  for (const std::string choice :
       {"mhc", "mhc:reads=previous", "kv_share", "kv_share:cla_factor=6", "shortcuts", "attnres:attn_res_block_size=6",
        "gated_streams", "depth_attention", "moda:depth_window=6", "moda:depth_window=3:ffn_kv=false"}) {
    CAPTURE(choice);
    const auto few = deep_model(choice, 12), some = deep_model(choice, 24), many = deep_model(choice, 48);
    const auto memory = [](const auto& m) { return static_cast<double>(m->tape.arena_bytes()); };
    const double flops = many->tape.training_flops() - some->tape.training_flops();
    CHECK(memory(many) - memory(some) == doctest::Approx(2 * (memory(some) - memory(few))).epsilon(0.1));
    if (choice.starts_with("attnres")) continue;  // of a block more mixtures read: its FLOPs are in test_architectures
    CHECK(flops == doctest::Approx(2 * (some->tape.training_flops() - few->tape.training_flops())).epsilon(1e-9));
  }
}
