// How layers are connected across depth: the one thing in which the architectures differ. The backbone is written once
// and asks its connection at four places: what a sublayer reads, how a layer projects its queries, keys and values,
// what its queries attend to, and how a sublayer's output is written back. The defaults are the plain
// residual stream, so a connection overrides only what it changes. One file per connection (docs/add-a-connection.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/attention/ops.h"
#include "kernels/block/ops.h"
#include "kernels/depth/ops.h"
#include "models/config.h"
#include "models/loop.h"
#include "models/packed_documents.h"

namespace crossply {

// What recording a model needs; the sizes are those of this tape.
struct Build {
  Tape& tape;
  ParameterTable& params;
  const Config& config;
  int64_t B, T;
  Value* tokens = nullptr;                   // (B, T), not where only a head is recorded
  const DocumentInput* documents = nullptr;  // null: a row is one
  const RowNames* names = nullptr;           // of a loop, whose rows are named otherwise on disk
  Value* rope = nullptr;                     // a LLaMA's table of angles, ops::rope_positions
  std::string part = "";                     // of a combination, the part that records

  std::string stored_name(const std::string& name) const { return names == nullptr ? name : names->of(name); }
  Parameter& row(const std::string& name) const { return params.at(stored_name(name)); }
  Value* parameter(const std::string& name) const { return tape.parameter(row(name)); }
  // Null where the model has none of this name.
  Value* find(const std::string& name) const { return params.contains(stored_name(name)) ? parameter(name) : nullptr; }
  // Tape::mark, of layer i: "gate.3"; a name that another part has used gets the part in front.
  void mark(const std::string& name, int i, Value* value) const {
    const std::string full = str(name, ".", i);
    const bool used =
        !part.empty() && std::ranges::any_of(tape.marks(), [&](const auto& m) { return m.first == full; });
    tape.mark(used ? part + "." + full : full, value);
  }
};

// One of a layer's two sublayers.
struct Sublayer {
  int layer;
  bool mlp;
  std::string name() const { return "L" + std::to_string(layer) + (mlp ? ".mlp" : ".attn"); }
};

struct KeyValue {
  Value *k, *v;  // (B, T, K, D)
};
struct QueryKeyValue {
  Value *q, *k, *v;  // q: (B, T, H, D)
};

inline std::string layer_name(int layer, const std::string& rest) {
  return "model.layers." + std::to_string(layer) + "." + rest;
}

// Is layer n (from 0) one of those that take in something of the first layer: all but itself, or the last_k last ones?
inline bool takes_first(int n, int64_t last_k, int64_t L) { return n > 0 && (last_k == 0 || n >= L - last_k); }

// The backbone's norm, with the rows `rows`.weight and, in a GPT-2 with biases, `rows`.bias: RMSNorm, or LayerNorm.
inline Value* backbone_norm(const Build& b, const std::string& name, Value* x, const std::string& rows) {
  Value* gain = b.parameter(rows + ".weight");
  return b.config.gpt2() ? ops::layernorm(b.tape, name, x, gain, b.find(rows + ".bias"), b.config.norm_eps)
                         : ops::rmsnorm(b.tape, name, x, gain, b.config.norm_eps);
}
// What the backbone divides the attention logits of a layer by, beside sqrt(D).
inline double attention_divisor(const Config& config, int64_t layer) {
  return config.scale_attn_by_inverse_layer_idx ? static_cast<double>(layer + 1) : 1;
}
// How the queries of a layer attend.
inline ops::Attended attended(const Build& b, int layer) {
  return {.divisor = attention_divisor(b.config, layer),
          .window = b.config.window_of(layer),
          .documents = b.documents != nullptr ? b.documents->bounds : nullptr};
}
// The spread with which a sublayer's output projection starts; GPT-2's shrinks with the number of sublayers.
inline double output_spread(const Config& c) {
  return c.initializer_range / (c.gpt2() ? std::sqrt(2.0 * static_cast<double>(c.num_hidden_layers)) : 1);
}

// Removes a product or a norm of the backbone from a layer: its .weight, and its .bias where the backbone has one.
inline void remove_module(ParameterTable& params, int layer, const std::string& rows) {
  params.remove(layer_name(layer, rows + ".weight"));
  if (const std::string bias = layer_name(layer, rows + ".bias"); params.contains(bias)) params.remove(bias);
}

// For every row whose name contains `part`: its start becomes this.
inline void start_at(ParameterTable& params, const std::string& part, const Init& init) {
  for (Parameter& row : params.rows())
    if (row.name.find(part) != std::string::npos) row.init = init;
}

class Connection {
 public:
  virtual ~Connection() = default;

  // Adds the connection's parameters, and may change or remove the backbone's (declared before).
  virtual void declare(ParameterTable&, const Config&) const {}
  // When all are declared, those of other connections and of an Engram beside it, too: may change how they learn.
  virtual void all_declared(ParameterTable&) const {}

  // For a start from the weights of the plain backbone, a LLaMA or a GPT-2: changes how the connection's parameters
  // (declared before) start, so that the model computes the plain one's numbers bit for bit. Returns what the user
  // should know, mostly nothing; throws Exit::usage with the reason where no start does that.
  virtual std::string start_as_plain(ParameterTable&, const Config& c) const {
    fail(Exit::usage, c.arch, " does not say how it could start as a ", c.backbone, "; train it from scratch");
  }
  // What the user should know of these options, beside their help; mostly nothing.
  virtual std::string remark(const Config&) const { return ""; }
  // The plain backbone's parameter that a parameter starts as; one of no such name starts by its rule.
  virtual std::string plain_name(const std::string& name) const { return name; }

  // Called once per recording with the embeddings (B, T, C).
  virtual void begin(const Build& build, Value* embeddings) {
    build_ = &build;
    x_ = embeddings;
  }
  // What the sublayer reads, normalised: (B, T, C).
  virtual Value* read(const Sublayer& sublayer) { return norm(sublayer, x_); }
  // What a sublayer's read() has returned, of this connection or of another one beside it, for those who keep it.
  virtual void offer(const Sublayer& /*sublayer*/, Value* /*x*/) {}
  // The layer's own queries, keys and values, before q/k norm and RoPE where the backbone has these; x is what read()
  // returned. k and v are null in a layer without keys and values, whose kv() has others.
  virtual QueryKeyValue project(int layer, Value* x) {
    const auto heads = linears(layer, x, {queries(layer), keys(layer), values(layer)});
    return {heads[0], heads[1], heads[2]};
  }
  // The keys and values the layer's queries attend to, given its own; k is normalised and rotated by now. They may have
  // any number of heads that divides the queries'.
  virtual KeyValue kv(int /*layer*/, KeyValue own) { return own; }
  // What the layer's queries read, (B, T, H, D), given its own queries, keys and values; q and k are normalised and
  // rotated by now. ops::attention may come once, twice under two names, or not at all. Here once, to what kv() says.
  virtual Value* attend(int layer, QueryKeyValue own) {
    const KeyValue read = asks_->kv(layer, {own.k, own.v});
    return ops::attention(build_->tape, Sublayer{layer, false}.name(), own.q, read.k, read.v, attended(*build_, layer));
  }
  // Takes the sublayer's output (B, T, C).
  virtual void write(const Sublayer& sublayer, Value* y) {
    x_ = ops::add(build_->tape, sublayer.name() + ".residual", x_, y);
  }
  // What the final norm reads.
  virtual Value* finish() { return x_; }
  // What flows between sublayers, for loops and the like, which put another in its place: (B, T, C), or several streams
  // (B, T, E, C). Where sublayers read the outputs of all lower ones there is none, and nobody may ask for it. Whoever
  // is given another drops what it has computed from the old one.
  virtual bool has_stream() const { return true; }
  // As many as it keeps beside each other.
  virtual int64_t streams() const { return 1; }
  virtual Value* stream() { return x_; }
  virtual void set_stream(Value* x) { x_ = x; }
  // For those who look into the model, after each block: what it has put out, (B, T, C), as one stream, before the
  // connection makes the next block's input of it.
  virtual Value* hidden() { return x_; }

 protected:
  // The backbone's norm in front of a sublayer.
  Value* norm(const Sublayer& sublayer, Value* x) const {
    const char* rows = sublayer.mlp ? "post_attention_layernorm" : "input_layernorm";
    return backbone_norm(*build_, sublayer.name() + ".norm", x, layer_name(sublayer.layer, rows));
  }
  // The backbone's projections of attention, and products of several of them with one input.
  ops::Projection queries(int layer) const { return projection(layer, 'q', build_->config.num_attention_heads); }
  ops::Projection keys(int layer) const { return projection(layer, 'k', build_->config.num_key_value_heads); }
  ops::Projection values(int layer) const { return projection(layer, 'v', build_->config.num_key_value_heads); }
  std::vector<Value*> linears(int layer, Value* x, const std::vector<ops::Projection>& projections) const {
    const auto heads = ops::linears(build_->tape, Sublayer{layer, false}.name() + ".project", x, projections);
    for (const auto& [letter, name] : {std::pair{'q', "own_query"}, {'k', "own_key"}, {'v', "own_value"}})
      for (size_t i = 0; i < heads.size(); ++i)
        if (projections[i].name == projection_name(layer, letter)) build_->mark(name, layer, heads[i]);
    return heads;
  }

  const Build* build_ = nullptr;
  Value* x_ = nullptr;  // the residual stream

 private:
  friend class Combined;
  Connection* asks_ = this;  // for keys and values; a part of a combination asks that
  static std::string projection_name(int layer, char which) { return str("L", layer, ".attn.", which); }
  ops::Projection projection(int layer, char which, int64_t heads) const {
    const std::string rows = layer_name(layer, str("self_attn.", which, "_proj"));
    return {projection_name(layer, which), build_->parameter(rows + ".weight"),
            Shape{build_->B, build_->T, heads, build_->config.head_dim}, build_->find(rows + ".bias")};
  }
};

// What a sublayer reads.
inline Value* read_and_offer(Connection& connection, const Sublayer& sublayer) {
  Value* x = connection.read(sublayer);
  connection.offer(sublayer, x);
  return x;
}

// A sublayer's output to its connection, with the second norm of block_norm: of the output, or of the stream after it.
inline void write_normed(const Build& b, Connection& connection, const Sublayer& sublayer, Value* y) {
  const std::string& kind = b.config.block_norm;
  const std::string rows =
      layer_name(sublayer.layer, sublayer.mlp ? "post_attention_layernorm_2" : "input_layernorm_2");
  const auto norm = [&](Value* x) { return backbone_norm(b, sublayer.name() + ".norm_2", x, rows); };
  connection.write(sublayer, kind == "branch" ? norm(y) : y);
  if (kind == "sum") connection.set_stream(norm(connection.stream()));
}

}  // namespace crossply
