#include "models/model.h"

#include <algorithm>

#include "models/llama.h"
#include "models/registry.h"

namespace crossply {

void declare_model(ParameterTable& params, const Config& c) {
  const Shape table{c.vocab_size, c.hidden_size};
  params.add("model.embed_tokens.weight", table, Init::normal(c.initializer_range), 1, 0);
  for (int i = 0; i < c.num_hidden_layers; ++i) declare_llama_block(params, c, i);
  params.add("model.norm.weight", Shape{c.hidden_size}, Init::constant(1), 1, 0);
  if (!c.tie_word_embeddings) params.add("lm_head.weight", table, Init::normal(c.initializer_range), 1, 1);
  find_architecture(c.arch).make(c)->declare(params, c);
}

Graph record_model(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T) {
  const Build build{tape, params, config, B, T};
  const auto connection = find_architecture(config.arch).make(config);
  Graph graph;
  graph.tokens = tape.input("tokens", Shape{B, T}, Dtype::i32);
  Value* rope = ops::rope_positions(tape, std::max(T, tape.cache_length()), config.rope_frequencies());
  Value* embed = build.parameter("model.embed_tokens.weight");
  connection->begin(build, ops::embedding(tape, "embed", graph.tokens, embed));
  for (int i = 0; i < config.num_hidden_layers; ++i) record_llama_block(build, *connection, i, rope);
  Value* x =
      ops::rmsnorm(tape, "norm", connection->finish(), build.parameter("model.norm.weight"), config.rms_norm_eps);
  Value* head = config.tie_word_embeddings ? embed : build.parameter("lm_head.weight");
  if (tape.cache_length() > 0) {
    graph.logits = ops::linear(tape, "logits", x, head, Shape{B, T, config.vocab_size});
  } else {
    graph.targets = tape.input("targets", Shape{B, T}, Dtype::i32);
    graph.losses = ops::cross_entropy(tape, "loss", x, head, graph.targets);
  }
  return graph;
}

}  // namespace crossply
