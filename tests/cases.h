// The tiny models that every check of whole models runs through.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/reference/ops.h"
#include "models/registry.h"
#include "tests/tiny.h"

namespace crossply::test {

struct Case {
  std::string name;
  Config config;
};

inline Case with(const std::string& arch, const std::map<std::string, std::string>& options, int64_t K = 2) {
  Config config = tiny_config(arch, K, K == 4);
  std::string name = arch;
  for (const auto& option : options) {
    config.options[option.first] = option.second;
    name += " " + option.first + "=" + option.second;
  }
  config.check(Exit::usage, "test");
  return {name, config};
}

// Has the model an op of plain loops only, which no GPU computes; or, per_sequence, one that cannot generate?
inline bool has_loops(const Config& config, bool per_sequence = false) {
  ParameterTable params;
  declare_model(params, config);
  Tape tape(Dtype::f32);
  record_model(tape, params, config, 1, 2);
  for (const auto& node : tape.nodes())
    if (const auto* op = dynamic_cast<const ReferenceNode*>(node.get()))
      if (op->loops->per_sequence() || !per_sequence) return true;
  return false;
}

// Every architecture and every option that changes what is computed.
inline std::vector<Case> cases() {
  std::vector<Case> list;
  for (const Architecture& architecture : architectures()) {
    const std::string& arch = architecture.name;
    list.push_back({arch + " grouped heads", tiny_config(arch, 2)});
    list.push_back({arch + " full heads, q/k norm", tiny_config(arch, 4, true)});
    list.push_back({arch + " one key head, untied, H*D != C", tiny_config(arch, 1, true, false, 6)});
  }
  for (const std::string routing : {"average", "last", "first"})
    list.push_back(with("lime", {{"routing", routing}, {"window", "2"}}));
  for (const std::string renormalize : {"true", "false"})
    list.push_back(with("lime_static", {{"top_p", "0.6"}, {"top_p_renormalize", renormalize}}));
  for (const std::string rate : {"1", "2", "3"})
    list.push_back(with("hyper", {{"rate", rate}, {"dynamic", rate == "2" ? "false" : "true"}}));
  list.push_back(
      with("hyper", {{"norm", "layernorm"}, {"prenorm", "rmsnorm"}, {"layer_index", "sublayer"}, {"rate", "2"}}, 4));
  list.push_back(with("hyper", {{"norm", "rmsnorm"}, {"output_init_scale", "true"}, {"dynamic_norm_eps", "0.01"}}));
  for (const std::string map : {"unet", "inet"}) list.push_back(with("vertical", {{"map", map}}));
  list.push_back(with("vertical", {{"map", "unet"}, {"mirror_offset", "2"}}));
  list.push_back(with("vertical", {{"residual", "false"}}));
  list.push_back(with("sla", {{"distance", "1"}, {"heads", "1"}}));
  list.push_back(with("sla", {{"distance", "2"}, {"heads", "3"}}, 4));
  list.push_back(with("ala", {{"stride", "1"}}));
  list.push_back(with("ala", {{"stride", "3"}}));
  list.push_back(with("ala", {{"include_self", "false"}}));
  for (const std::string variant : {"identity", "constant", "learnable", "sparse", "svformer"})
    list.push_back(with("resformer", {{"variant", variant}}));
  list.push_back(with("resformer", {{"last_k", "2"}}));
  list.push_back(with("resformer", {{"last_k", "2"}, {"variant", "svformer"}}));
  for (const std::string gate : {"sigmoid", "softmax", "softmax_sigmoid", "tanh", "identity"})
    list.push_back(with("satformer", {{"gate", gate}}));
  list.push_back(with("satformer", {{"last_k", "2"}}, 4));
  list.push_back(with("denseformer", {{"dilation", "2"}}));
  list.push_back(with("denseformer", {{"dilation", "2"}, {"period", "3"}}));
  list.push_back(with("mudd", {{"norm", "none"}}));
  list.push_back(with("mudd", {{"intermediate_sizes", "[4,5,6,9]"}}));
  return list;
}

}  // namespace crossply::test
