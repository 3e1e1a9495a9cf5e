// How layers are connected across depth: the one thing in which the architectures differ. The backbone is written once
// and asks its connection at four places: what a sublayer reads, which keys and values a layer attends to, what happens
// to the heads' outputs, and how a sublayer's output is written back. The defaults are the plain residual stream, so a
// connection overrides only what it changes. One file per connection, one line in registry.cpp.
#pragma once

#include <string>

#include "engine/ops.h"
#include "models/config.h"

namespace crossply {

// What recording a model needs; the sizes are those of this tape.
struct Build {
  Tape& tape;
  ParameterTable& params;
  const Config& config;
  int64_t B, T;

  Value* parameter(const std::string& name) const { return tape.parameter(params.at(name)); }
};

// One of a layer's two sublayers.
struct Site {
  int layer;
  bool mlp;
  std::string name() const { return "L" + std::to_string(layer) + (mlp ? ".mlp" : ".attn"); }
};

struct KeyValue {
  Value *k, *v;  // (B, T, K, D); k is rotated
};

inline std::string layer_name(int layer, const std::string& rest) {
  return "model.layers." + std::to_string(layer) + "." + rest;
}

class Connection {
 public:
  virtual ~Connection() = default;

  // Adds the connection's parameters, and may change how the backbone's (declared before) start.
  virtual void declare(ParameterTable&, const Config&) const {}

  // Called once per recording with the embeddings (B, T, C).
  virtual void begin(const Build& build, Value* embeddings) {
    build_ = &build;
    x_ = embeddings;
  }
  // What the sublayer reads, before its norm: (B, T, C).
  virtual Value* read(const Site&) { return x_; }
  // The keys and values the layer's queries attend to, given its own.
  virtual KeyValue kv(int /*layer*/, KeyValue own) { return own; }
  // The heads' outputs (B, T, H, D) on their way to the output projection.
  virtual Value* heads(int /*layer*/, Value* out) { return out; }
  // Takes the sublayer's output (B, T, C).
  virtual void write(const Site& site, Value* y) { x_ = ops::add(build_->tape, site.name() + ".residual", x_, y); }
  // What the final norm reads.
  virtual Value* finish() { return x_; }

 protected:
  const Build* build_ = nullptr;
  Value* x_ = nullptr;  // the residual stream
};

}  // namespace crossply
