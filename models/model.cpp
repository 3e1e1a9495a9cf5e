#include "models/model.h"

#include <algorithm>

#include "models/gpt2.h"
#include "models/llama.h"
#include "models/registry.h"

namespace crossply {

// Every application as a layer of its own.
static void declare_applications(ParameterTable& params, const Config& c) {
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
  const auto connection = find_architecture(c.arch).make(c);
  connection->declare(params, c);
  declare_engram(params, c, connection->streams());
}

void declare_model(ParameterTable& params, const Config& config) {
  if (!has_loop(config)) return declare_applications(params, config);
  ParameterTable all;
  declare_applications(all, applied(config));
  const RowNames names(config);
  for (const Parameter& row : all.rows()) {
    const std::string name = names.of(row.name);
    if (!params.contains(name))
      params.add(name, row.shape, row.init, Role::scalar, {row.lr_mul, row.wd_mul, row.between_widths}).role = row.role;
    else if (!(params.at(name).shape == row.shape))
      fail(Exit::usage, "loop: ", name, " is ", params.at(name).shape.str(), " in one pass and ", row.shape.str(),
           " in another; give all applications of a block the same sizes, or loop_tied false");
  }
}

namespace {

// The embeddings (B, T, C), which the first block reads.
Value* embed(const Build& b) {
  Value* x = ops::embedding(b.tape, "embed", b.tokens, b.parameter("model.embed_tokens.weight"));
  return b.config.gpt2() ? ops::positions(b.tape, "positions", x, b.parameter("model.embed_positions.weight")) : x;
}

// The norms and additions of a loop, at the ends of the prelude and of each pass.
class Loop {
 public:
  Loop(const Build& build, Connection& connection)
      : b_(build), connection_(connection), options_(build.config.loop), all_(applications_of(build.config)) {}

  // Before application v.
  void before(int64_t v) {
    if (!has_loop(b_.config) || v != all_.prelude) return;
    if (options_.norm == "all") normalise("loop.prelude");
    anchor_ = options_.alpha != 0 ? connection_.stream() : nullptr;
  }
  // After it.
  void after(int64_t v) {
    if (!has_loop(b_.config)) return;
    for (int64_t r = 0; r < all_.passes; ++r)
      if (v + 1 == all_.end_of_pass(r)) end_pass(r);
  }

 private:
  void end_pass(int64_t r) {
    const std::string name = str("loop.pass.", r);
    if (options_.norm != "none") normalise(name);
    if (anchor_ != nullptr && (r + 1 < all_.passes || options_.end))
      connection_.set_stream(ops::add_scaled(b_.tape, name + ".anchor", connection_.stream(), anchor_, options_.alpha));
  }
  void normalise(const std::string& name) {
    connection_.set_stream(ops::rmsnorm(b_.tape, name + ".norm", connection_.stream(), nullptr, b_.config.norm_eps));
  }

  const Build& b_;
  Connection& connection_;
  const LoopOptions& options_;
  const Applications all_;
  Value* anchor_ = nullptr;
};

// All blocks; longest: a sequence with what is cached of it; rope: the table of angles, which a LLaMA's attention takes
// its positions from.
void record_blocks(const Build& b, Connection& connection, int64_t longest, EngramInputs& inputs) {
  const Config& c = b.config;
  Value* rope = c.gpt2() ? nullptr : ops::rope_positions(b.tape, longest, c.rope_frequencies(), c.rope_factor());
  Loop loop(b, connection);
  Engrams engrams(b, connection, inputs);
  for (int i = 0; i < c.num_hidden_layers; ++i) {
    loop.before(i);
    engrams.before(i);
    c.gpt2() ? record_gpt2_block(b, connection, i) : record_llama_block(b, connection, i, rope);
    loop.after(i);
    if (b.tape.probed() && i + 1 < c.num_hidden_layers) b.mark("hidden", i + 1, connection.hidden());
  }
}

// Loops, norms of the stream and Engram need one; repetition alone, without a norm and an addition, does not.
void require_stream(const Build& b, Connection& connection) {
  const Config& c = b.config;
  const bool touched = has_loop(c) && (c.loop.norm != "none" || c.loop.alpha != 0);
  if (connection.stream() != nullptr || !(touched || has_engram(c) || c.block_norm == "sum")) return;
  if (has_engram(c))
    fail(Exit::usage, c.arch, " has no stream between its blocks that Engram could write to, for its sublayers read ",
         "the outputs of all lower ones, or were mixed before: leave out engram_layers");
  fail(Exit::usage, c.arch,
       " has no stream between its blocks that a norm could be of, for its sublayers read the outputs ",
       "of all lower ones: ",
       touched ? "take loop_norm none and loop_alpha 0, which repeats the core" : "take block_norm branch");
}

// All but the logits.
ops::LogitHead record_hidden(const Build& b, EngramInputs& inputs) {
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
  require_stream(b, *connection);
  record_blocks(b, *connection, longest, inputs);
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

static ops::LogitHead record_applied(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T,
                                     Graph& graph) {
  const Config all = applied(config);
  const RowNames names(config);
  return record_hidden(Build{tape, params, all, B, T, graph.tokens, &names}, graph.engrams);
}

static Graph record_all(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T,
                        Teacher* teacher) {
  Graph graph;
  graph.tokens = tape.input("tokens", Shape{B, T}, Dtype::i32);
  ops::LogitHead taught;  // first, so that of the teacher's activations one is left when the student's begin
  if (teacher != nullptr)
    tape.frozen("teacher.", [&] { taught = record_applied(tape, teacher->params, teacher->config, B, T, graph); });
  const ops::LogitHead own = record_applied(tape, params, config, B, T, graph);
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
