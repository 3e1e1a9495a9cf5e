#include "models/disk/file_layout.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

namespace crossply {
namespace {

struct Renamed {
  const char *row, *tensor;
  bool transposed = false;
};
// Without .weight and .bias. Outside the blocks, then inside them.
constexpr std::array outside = {Renamed{"model.embed_tokens", "transformer.wte"},
                                Renamed{"model.embed_positions", "transformer.wpe"},
                                Renamed{"model.norm", "transformer.ln_f"}};
constexpr std::array inside = {Renamed{"input_layernorm", "ln_1"},
                               Renamed{"self_attn.q_proj", "attn.c_attn", true},
                               Renamed{"self_attn.k_proj", "attn.c_attn", true},
                               Renamed{"self_attn.v_proj", "attn.c_attn", true},
                               Renamed{"self_attn.o_proj", "attn.c_proj", true},
                               Renamed{"post_attention_layernorm", "ln_2"},
                               Renamed{"input_layernorm_2", "ln_1_2"},
                               Renamed{"post_attention_layernorm_2", "ln_2_2"},
                               Renamed{"mlp.up_proj", "mlp.c_fc", true},
                               Renamed{"mlp.down_proj", "mlp.c_proj", true}};

// A GPT-2's row: the name of its tensor, and whether it is transposed there.
std::pair<std::string, bool> gpt2_name(const std::string& row) {
  const size_t dot = row.rfind('.');
  const std::string stem = row.substr(0, dot), end = row.substr(dot);
  for (const Renamed& r : outside)
    if (stem == r.row) return {r.tensor + end, false};
  const std::string blocks = "model.layers.";
  const size_t rest = row.starts_with(blocks) ? row.find('.', blocks.size()) : std::string::npos;
  if (rest == std::string::npos || rest > dot) return {row, false};
  for (const Renamed& r : inside)
    if (stem.substr(rest + 1) == r.row)
      return {"transformer.h." + row.substr(blocks.size(), rest + 1 - blocks.size()) + r.tensor + end,
              r.transposed && end == ".weight"};
  return {row, false};
}

}  // namespace

std::vector<FileTensor> file_layout(const ParameterTable& params, const Config& config) {
  std::vector<FileTensor> tensors;
  std::unordered_map<std::string, size_t> index;
  for (const Parameter& row : params.rows()) {
    const auto [name, transposed] = config.gpt2() ? gpt2_name(row.name) : std::pair{row.name, false};
    Shape shape = row.shape;
    if (transposed) std::swap(shape.dim[0], shape.dim[1]);
    const auto [at, fresh] = index.emplace(name, tensors.size());
    if (fresh) {
      tensors.push_back({name, shape, {&row}, transposed});
    } else {
      FileTensor& tensor = tensors[at->second];
      tensor.shape.dim[static_cast<size_t>(shape.rank - 1)] += shape[shape.rank - 1];
      tensor.rows.push_back(&row);
    }
  }
  return tensors;
}

std::string file_name(const std::string& name, const Config& config) {
  const bool bare =
      name.starts_with("wte.") || name.starts_with("wpe.") || name.starts_with("h.") || name.starts_with("ln_f.");
  return config.gpt2() && bare ? "transformer." + name : name;
}

bool is_no_row(const std::string& name, const Config& config) {
  if (config.tie_word_embeddings && name == "lm_head.weight") return true;
  if (config.gpt2()) return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");  // the causal mask
  return name.ends_with(".rotary_emb.inv_freq");
}

}  // namespace crossply
