#include "models/transplant.h"

#include <algorithm>
#include <functional>
#include <unordered_map>

#include "engine/numbers.h"
#include "engine/printable.h"
#include "models/connection.h"

namespace crossply {
namespace {

const std::string blocks_prefix = "model.layers.";

// A row of a block: the block, and the rest of the name. Block -1: of none.
struct RowName {
  int block = -1;
  std::string rest;
};
RowName split(const std::string& row) {
  if (!row.starts_with(blocks_prefix)) return {-1, row};
  const size_t dot = row.find('.', blocks_prefix.size());
  return {static_cast<int>(parse_integer(row.substr(blocks_prefix.size(), dot - blocks_prefix.size())).value()),
          row.substr(dot + 1)};
}

std::string part_of(const RowName& name) {
  const std::string stem = name.rest.substr(0, name.rest.rfind('.'));
  if (name.block < 0) {
    if (stem == "model.embed_tokens" || stem == "lm_head") return "embedding";
    return stem == "model.embed_positions" ? "positions" : stem == "model.norm" ? "final_norm" : "connection";
  }
  if (stem == "input_layernorm") return "attention_norm";
  if (stem == "post_attention_layernorm") return "mlp_norm";
  if (stem.starts_with("mlp.") && stem.ends_with("_proj")) return "mlp";
  for (const char* one : {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
    if (stem == std::string("self_attn.") + one) return "attention";
  return "connection";
}

// The leading part of `from` in every dimension.
std::vector<double> leading(const std::vector<float>& from, const Shape& all, const Shape& part, double factor) {
  std::vector<double> to;
  const int64_t rows = part.rank == 2 ? part[0] : 1, width = part[part.rank - 1], stride = all[all.rank - 1];
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < width; ++j) to.push_back(factor * static_cast<double>(from[i * stride + j]));
  return to;
}

// Can `part` be the leading part of `all`? What a connection adds has a meaning in its whole only.
bool fits(const Shape& all, const Shape& part, const std::string& kind) {
  if (all.rank != part.rank || all.rank > 2 || kind == "connection") return all == part;
  return std::equal(part.dim.begin(), part.dim.begin() + part.rank, all.dim.begin(), std::less_equal<int64_t>());
}

}  // namespace

std::vector<int> parse_blocks(const std::string& text, int64_t L) {
  std::vector<int> blocks;
  const auto refuse = [&](const std::string& entry) {
    fail(Exit::usage, "--blocks: '", excerpt(entry), "' is neither a block, 0 to ", L - 1,
         ", nor a range of them like 0-", L - 1, ", nor fresh:N");
  };
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    begin = end + 1;
    if (entry.starts_with("fresh:")) {
      const auto count = parse_integer(entry.substr(6));
      if (!count || *count < 1 || *count > 4096) refuse(entry);
      blocks.insert(blocks.end(), static_cast<size_t>(*count), fresh_block);
      continue;
    }
    const size_t dash = entry.find('-');
    const auto first = parse_integer(entry.substr(0, dash));
    const auto last = dash == std::string::npos ? first : parse_integer(entry.substr(dash + 1));
    if (!first || !last || *first < 0 || *last >= L || *first > *last) refuse(entry);
    for (int64_t block = *first; block <= *last; ++block) blocks.push_back(static_cast<int>(block));
  }
  return blocks;
}

Config transplanted_config(const Config& source, const Transplant& t, int64_t C, int64_t H) {
  Config config = source;
  config.num_hidden_layers = std::ssize(t.blocks);
  if (C == 0 && H == 0) {
    config.check(Exit::usage, "transplant");
    return config;
  }
  const int64_t old_C = source.hidden_size, old_H = source.num_attention_heads, K = source.num_key_value_heads;
  if (C == 0) C = old_C;
  if (H == 0) H = old_H * C / old_C;
  if (C < 1 || C > old_C || H < 1 || H > old_H)
    fail(Exit::usage, "--width ", C, " --heads ", H, ": the source has width ", old_C, " and ", old_H,
         " heads, of which a part can be taken");
  config.hidden_size = C;
  config.num_attention_heads = H;
  config.num_key_value_heads = std::max<int64_t>(1, K * H / old_H);
  config.intermediate_size = std::max<int64_t>(1, source.intermediate_size * C / old_C);
  if (config.gpt2() && C != H * source.head_dim)
    fail(Exit::usage, "--width ", C, " --heads ", H, ": a gpt2 is as wide as its heads, ", H, " x ", source.head_dim);
  config.check(Exit::usage, "transplant");
  return config;
}

std::vector<std::string> transplant(const ParameterTable& from, const Config& source, ParameterTable& to,
                                    const Config& target, const Transplant& t) {
  std::unordered_map<std::string, const Parameter*> theirs;
  for (const Parameter& row : from.rows()) theirs[row.name] = &row;
  std::vector<std::string> kept;
  const bool rescales = t.rescale_queries && source.scale_attn_by_inverse_layer_idx;
  for (Parameter& row : to.rows()) {
    const RowName name = split(row.name);
    const std::string kind = part_of(name);
    const int block = name.block < 0 ? -1 : t.blocks[static_cast<size_t>(name.block)];
    if (!t.parts.contains(kind) || (name.block >= 0 && block == fresh_block)) continue;
    const std::string wanted = name.block < 0 ? row.name : layer_name(block, name.rest);
    const auto found = theirs.find(wanted);
    if (found == theirs.end() || !fits(found->second->shape, row.shape, kind)) {
      kept.push_back(row.name);
      continue;
    }
    const bool query = rescales && name.rest.starts_with("self_attn.q_proj.");
    const double factor = query ? attention_divisor(target, name.block) / attention_divisor(source, block) : 1;
    to.write(row, leading(from.read(found->second->value), found->second->shape, row.shape, factor).data());
  }
  return kept;
}

}  // namespace crossply
