// Attention residuals at a depth at which what grows with its square would show.
#include <cmath>
#include <set>

#include "tests/cases.h"

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

}  // namespace

TEST_CASE("architectures: 48 layers of attention residuals train, and keep what the formula says beside the streams") {
  for (const int64_t size : {0, 6})
    for (const int64_t L : {12, 48}) {
      CAPTURE(size);
      CAPTURE(L);
      Config config = tiny_with(str("attnres:attn_res_block_size=", size), 2);
      config.num_hidden_layers = L;
      TinyModel model(config);
      CHECK(std::isfinite(model.step()));
      const int64_t N = TinyModel::B * TinyModel::T, C = config.hidden_size, mixtures = 2 * L + 1;
      int64_t read = size == 0 ? mixtures * (L + 1) : 1 + (L + size - 1) / size;
      for (int64_t i = 0; i < L && size > 0; ++i) read += 1 + (i + size - 1) / size + 2 + i / size;
      // Logits and weights of every source and token; squares, pbar and the query of every mixture or source.
      const auto want = static_cast<double>(2 * N * read + (2 * N + C) * mixtures);
      CHECK(saved_bytes(model.tape, {"query_mix", "query_source"}) == sizeof(float) * want);
    }
}
