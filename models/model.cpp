#include "models/model.h"

#include <algorithm>

#include "models/gpt2.h"
#include "models/llama.h"
#include "models/registry.h"

namespace crossply {

void declare_model(ParameterTable& params, const Config& c) {
  const Shape table{c.vocab_size, c.hidden_size};
  const Init normal = Init::normal(c.initializer_range);
  params.add("model.embed_tokens.weight", table, normal, Role::embedding);
  if (c.gpt2())
    params.add("model.embed_positions.weight", Shape{c.max_position_embeddings, c.hidden_size}, normal,
               Role::embedding);
  for (int i = 0; i < c.num_hidden_layers; ++i)
    c.gpt2() ? declare_gpt2_block(params, c, i) : declare_llama_block(params, c, i);
  params.add("model.norm.weight", Shape{c.hidden_size}, Init::constant(1), Role::final_norm);
  if (c.gpt2() && c.bias) params.add("model.norm.bias", Shape{c.hidden_size}, Init::constant(0), Role::final_norm);
  if (!c.tie_word_embeddings) params.add("lm_head.weight", table, normal, Role::head);
  find_architecture(c.arch).make(c)->declare(params, c);
}

namespace {

// The embeddings (B, T, C), which the first block reads.
Value* embed(const Build& b) {
  Value* x = ops::embedding(b.tape, "embed", b.tokens, b.parameter("model.embed_tokens.weight"));
  return b.config.gpt2() ? ops::positions(b.tape, "positions", x, b.parameter("model.embed_positions.weight")) : x;
}

// All blocks; longest: a sequence with what is cached of it; rope: the table of angles, which a LLaMA's attention takes
// its positions from.
void record_blocks(const Build& b, Connection& connection, int64_t longest) {
  const Config& c = b.config;
  Value* rope = c.gpt2() ? nullptr : ops::rope_positions(b.tape, longest, c.rope_frequencies(), c.rope_factor());
  for (int i = 0; i < c.num_hidden_layers; ++i) {
    c.gpt2() ? record_gpt2_block(b, connection, i) : record_llama_block(b, connection, i, rope);
    if (b.tape.probed() && i + 1 < c.num_hidden_layers) b.mark("hidden", i + 1, connection.hidden());
  }
}

// All but the logits.
ops::LogitHead record_hidden(const Build& b) {
  const Config& c = b.config;
  const int64_t longest = std::max(b.T, b.tape.cache_length());
  if (c.gpt2() && longest > c.max_position_embeddings)
    fail(Exit::usage, "sequences of ", longest, " tokens: the model has learned ", c.max_position_embeddings,
         " positions; ask for no more");
  if (c.sliding_window > 0 && longest > c.sliding_window)
    fail(Exit::usage, "sequences of ", longest, " tokens: the model attends within a window of ", c.sliding_window,
         ", which is not computed here; ask for no more");
  const auto connection = find_architecture(c.arch).make(c);
  Value* embeddings = embed(b);
  b.mark("hidden", 0, embeddings);
  connection->begin(b, embeddings);
  record_blocks(b, *connection, longest);
  Value* x = connection->finish();
  b.mark("hidden", static_cast<int>(c.num_hidden_layers), x);
  return record_head(b, x);
}

}  // namespace

ops::LogitHead record_head(const Build& b, Value* x) {
  const bool normalised = !b.params.contains("model.norm.weight");  // by the connection
  return {normalised ? x : backbone_norm(b, "norm", x, "model.norm"),
          b.parameter(b.config.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight")};
}

static Graph record_all(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T,
                        Teacher* teacher) {
  Graph graph;
  graph.tokens = tape.input("tokens", Shape{B, T}, Dtype::i32);
  ops::LogitHead taught;  // first, so that of the teacher's activations one is left when the student's begin
  if (teacher != nullptr)
    tape.frozen("teacher.", [&] {
      taught = record_hidden(Build{tape, teacher->params, teacher->config, B, T, graph.tokens});
    });
  const ops::LogitHead own = record_hidden(Build{tape, params, config, B, T, graph.tokens});
  if (tape.cache_length() > 0) {
    if (T == 1) graph.logits = ops::linear(tape, "logits", own.inp, own.weight, Shape{B, T, config.vocab_size});
    return graph;
  }
  graph.targets = tape.input("targets", Shape{B, T}, Dtype::i32);
  graph.head = own;
  if (teacher == nullptr) {
    graph.losses = ops::cross_entropy(tape, "loss", own.inp, own.weight, graph.targets);
  } else {
    const ops::Distilled loss = ops::distill(tape, "loss", own, taught, graph.targets, teacher->how);
    graph.losses = loss.losses, graph.ce = loss.ce;
  }
  return graph;
}

Graph record_model(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T, Teacher* teacher) {
  const Graph graph = record_all(tape, params, config, B, T, teacher);
  ops::fuse_linears(tape);
  return graph;
}

}  // namespace crossply
