#include "models/model.h"

#include <algorithm>

#include "models/gpt2.h"
#include "models/llama.h"
#include "models/registry.h"

namespace crossply {

void declare_applications(ParameterTable& params, const Config& c) {
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
  if (c.loop.exit_gate) {
    params.add("model.early_exit_gate.weight", Shape{1, c.hidden_size}, normal, Role::width_router, {.wd_mul = 1});
    params.add("model.early_exit_gate.bias", Shape{1}, Init::constant(0), Role::bias);
  }
  const auto connection = find_architecture(c.arch).make(c);
  connection->declare(params, c);
  declare_engram(params, c, connection->streams());
  connection->all_declared(params);
}

void declare_model(ParameterTable& params, const Config& config) {
  if (!has_anchor(config)) return declare_applications(params, config);
  ParameterTable all;
  declare_applications(all, applied(config));
  const RowNames names(config);
  for (const Parameter& row : all.rows()) {
    const std::string name = names.of(row.name);
    Parameter stored = row;
    stored.name = name;
    if (!params.contains(name)) params.add(stored);
    else if (!(params.at(name).shape == row.shape))
      fail(Exit::usage, "loop: ", name, " is ", params.at(name).shape.str(), " in one pass and ", row.shape.str(),
           " in another; give all applications of a block the same sizes, or loop_tied false");
  }
}

namespace {

// The embeddings (B, T, C), which the first block reads.
Value* embed(const Build& b) {
  Value* x = ops::embedding(b.tape, "embed", b.tokens, b.parameter("model.embed_tokens.weight"));
  if (!b.config.gpt2()) return x;
  Value* table = b.parameter("model.embed_positions.weight");
  if (b.documents == nullptr) return ops::positions(b.tape, "positions", x, table);
  return ops::add(b.tape, "positions.add", x, ops::embedding(b.tape, "positions", b.documents->positions, table));
}

// The norms and additions of a loop, at the ends of the prelude and of each pass.
class Loop {
 public:
  Loop(const Build& build, Connection& connection)
      : b_(build), connection_(connection), options_(build.config.loop), all_(applications_of(build.config)) {}

  // Before application v.
  void before(int64_t v) {
    if (!has_anchor(b_.config) || v != all_.prelude) return;
    if (options_.norm == "all") normalise("loop.prelude");
    anchor_ = options_.alpha != 0 ? connection_.stream() : nullptr;
  }
  // After it.
  void after(int64_t v) {
    if (!has_anchor(b_.config)) return;
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

void record_blocks(const Build& b, Connection& connection, EngramInputs& inputs) {
  const Config& c = b.config;
  Loop loop(b, connection);
  Engrams engrams(b, connection, inputs);
  for (int i = 0; i < c.num_hidden_layers; ++i) {
    loop.before(i);
    engrams.before(i);
    c.gpt2() ? record_gpt2_block(b, connection, i) : record_llama_block(b, connection, i);
    loop.after(i);
    if (b.tape.probed() && i + 1 < c.num_hidden_layers) b.mark("hidden", i + 1, connection.hidden());
  }
}

// What a tape is asked for beyond what the model can do.
void check_length(const Config& c, int64_t longest) {
  if (c.gpt2() && longest > c.max_position_embeddings)
    fail(Exit::usage, "sequences of ", longest, " tokens: the model has learned ", c.max_position_embeddings,
         " positions; ask for no more");
}

// One pass, from the embeddings or what the pass before has put out, to the final norm; longest: a sequence with what
// is cached of it.
ops::LogitHead record_pass(Build b, Value* x, int64_t longest, EngramInputs& inputs) {
  if (!b.config.gpt2())
    b.rope = ops::rope_positions(b.tape, longest, b.config.rope_frequencies(), b.config.rope_factor());
  const auto connection = find_architecture(b.config.arch).make(b.config);
  b.mark("hidden", 0, x);
  connection->begin(b, x);
  record_blocks(b, *connection, inputs);
  x = connection->finish();
  b.mark("hidden", static_cast<int>(b.config.num_hidden_layers), x);
  return record_head(b, x);
}

// All but the logits: what the head reads after each pass of a stack, the last one's last.
std::vector<ops::LogitHead> record_passes(const Build& b, EngramInputs& inputs) {
  const int64_t longest = std::max(b.T, b.tape.cache_length()), R = stack_passes(b.config);
  check_length(b.config, longest);
  std::vector<ops::LogitHead> exits;
  Value* x = embed(b);
  for (int64_t r = 0; r < R; ++r)
    b.tape.named(r + 1 < R ? str("pass.", r, ".") : "", [&] {
      exits.push_back(record_pass(b, x, longest, inputs));
      x = exits.back().inp;
      // Gate and head read it at the end, and a connection may take the memory of its embeddings.
      if (b.config.loop.exit_gate && r + 1 < R) x = ops::copy(b.tape, "next", x);
    });
  return exits;
}

}  // namespace

ops::LogitHead record_head(const Build& b, Value* x) {
  const bool normalised = !b.params.contains("model.norm.weight");  // by the connection
  return {normalised ? x : backbone_norm(b, "norm", x, "model.norm"),
          b.parameter(b.config.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight"),
          b.config.final_logit_softcapping};
}

static std::vector<ops::LogitHead> record_applied(Tape& tape, ParameterTable& params, const Config& config, int64_t B,
                                                  int64_t T, Graph& graph) {
  const Config all = applied(config);
  const RowNames names(config);
  return record_passes(Build{tape, params, all, B, T, graph.tokens, graph.documents.get(), &names}, graph.engrams);
}

// The objective of several exits, and what becomes of it where each token leaves.
static void record_exits(Tape& tape, ParameterTable& params, const Config& config,
                         const std::vector<ops::LogitHead>& exits, Graph& graph) {
  Value* weight = tape.parameter(params.at("model.early_exit_gate.weight"));
  Value* bias = tape.parameter(params.at("model.early_exit_gate.bias"));
  const Shape& rows = graph.targets->shape;
  ops::Exits all{.weight = exits[0].weight, .softcap = exits[0].softcap, .beta = config.loop.exit_beta};
  for (size_t t = 0; t < exits.size(); ++t) {
    all.states.push_back(exits[t].inp);
    if (t + 1 < exits.size())
      all.gates.push_back(
          ops::linear(tape, str("exit.", t, ".gate"), exits[t].inp, weight, Shape{rows[0], rows[1], 1}, bias));
  }
  const ops::ExitLosses loss = ops::exit_loss(tape, "loss", all, graph.targets);
  graph.losses = loss.losses, graph.ce = loss.ce.back();
  for (size_t t = 0; t < exits.size(); ++t) {
    tape.mark(str("exit_loss.", t), loss.ce[t]);
    tape.mark(str("exit_weight.", t), loss.weights[t]);
  }
}

static Value* record_logits(Tape& tape, const ops::LogitHead& head, const Shape& shape) {
  if (head.softcap == 0) return ops::linear(tape, "logits", head.inp, head.weight, shape);
  return ops::softcap(tape, "logits", ops::linear(tape, "logits.uncapped", head.inp, head.weight, shape), head.softcap);
}

static void record_losses(Tape& tape, const ops::LogitHead& head, double z_loss, Graph& graph) {
  if (z_loss == 0) {
    graph.losses = ops::cross_entropy(tape, "loss", head, graph.targets);
    return;
  }
  const ops::LossAndSquares both = ops::cross_entropy_with_z(tape, "loss", head, graph.targets, z_loss);
  graph.losses = both.losses, graph.squares = both.squares;
}

static Graph record_all(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T,
                        const RecordOptions& options, bool generates) {
  Teacher* const teacher = options.teacher;
  Graph graph;
  graph.tokens = tape.input("tokens", Shape{B, T}, Dtype::i32);
  const bool positions = config.gpt2() || (teacher != nullptr && teacher->config.gpt2());
  graph.documents = add_documents(tape, options.documents, B, T, positions);
  ops::LogitHead taught;  // first, so that of the teacher's activations one is left when the student's begin
  if (teacher != nullptr)
    tape.frozen("teacher.",
                [&] { taught = record_applied(tape, teacher->params, teacher->config, B, T, graph).back(); });
  const std::vector<ops::LogitHead> exits = record_applied(tape, params, config, B, T, graph);
  const ops::LogitHead own = exits.back();
  if (generates) {
    if (T == 1) graph.logits = record_logits(tape, own, Shape{B, T, config.vocab_size});
    return graph;
  }
  graph.targets = tape.input("targets", Shape{B, T}, Dtype::i32);
  graph.head = own;
  if (teacher != nullptr) {
    if (config.loop.exit_gate)
      fail(Exit::usage, "a model with an exit gate learns of its own exits; leave out --teacher, or --exit-gate");
    const ops::Distilled loss = ops::distill(tape, "loss", own, taught, graph.targets, teacher->how);
    graph.losses = loss.losses, graph.ce = loss.ce;
  } else if (config.loop.exit_gate && tape.cache_length() == 0) {
    record_exits(tape, params, config, exits, graph);
  } else {
    record_losses(tape, own, options.z_loss, graph);
  }
  return graph;
}

Graph record_model(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T,
                   const RecordOptions& options) {
  CHECK_THAT(options.z_loss == 0 || (options.teacher == nullptr && !config.loop.exit_gate), "a z-loss of ",
             options.z_loss, " beside a teacher or an exit gate");
  const Graph graph = record_all(tape, params, config, B, T, options, tape.cache_length() > 0);
  ops::fuse_linears(tape);
  return graph;
}

Graph record_continuation(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T) {
  CHECK_THAT(tape.cache_length() >= T, "a continuation of ", T, " tokens on a tape that caches ", tape.cache_length());
  const Graph graph = record_all(tape, params, config, B, T, {}, /*generates=*/false);
  ops::fuse_linears(tape);
  return graph;
}

}  // namespace crossply
