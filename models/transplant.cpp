#include "models/transplant.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <unordered_map>

#include "engine/io/printable.h"
#include "engine/numbers.h"
#include "engine/rng.h"
#include "engine/split.h"
#include "models/connection.h"

namespace crossply {
namespace {

// A row's name, cut at its block's number, which is the first number in it: model.layers.3.mlp.up_proj.weight, and
// model.dwa_modules.alphas.3.weight, DenseFormer's weights behind block 3.
struct RowName {
  std::string before;
  int block = -1;  // of none: all of the name is `before`
  std::string after;
};
RowName split(const std::string& row) {
  for (size_t dot = row.find('.'); dot != std::string::npos; dot = row.find('.', dot + 1)) {
    const size_t begin = dot + 1, end = row.find('.', begin);
    if (end == std::string::npos) break;
    if (const auto block = parse_integer(row.substr(begin, end - begin)))
      return {row.substr(0, begin), static_cast<int>(*block), row.substr(end)};
  }
  return {row, -1, ""};
}

// The leading part of `from` in every dimension.
std::vector<double> leading(const std::vector<float>& from, const Shape& all, const Shape& part, double factor) {
  std::vector<double> to(static_cast<size_t>(part.numel()));
  const int64_t width = part[part.rank - 1], stride = all[all.rank - 1];
  for (int64_t i = 0; i < part.numel(); ++i)
    to[static_cast<size_t>(i)] =
        factor * static_cast<double>(from[static_cast<size_t>(i / width * stride + i % width)]);
  return to;
}

bool is_leading(const Shape& all, const Shape& part) {
  return all.rank == part.rank && part.rank <= 2 &&
         std::equal(part.dim.begin(), part.dim.begin() + part.rank, all.dim.begin(), std::less_equal<int64_t>());
}

// Of what a connection adds to a block, by its name behind the block's number: does it mean the same at another place?
// Gates and factors of the first layer's values, the norm of keys' and values' input, the streams of hyper-connections.
bool means_the_same_anywhere(const std::string& after) {
  for (const char* begin : {".self_attn.value_residual_mixing.", ".self_attn.relay_gate.", ".lime_layernorm.",
                            ".attn_hc.", ".mlp_hc.", ".ffn_hc."})
    if (after.starts_with(begin)) return true;
  return false;
}

// Every block of the source where it was?
bool is_in_place(const std::vector<int>& blocks, int64_t L) {
  std::vector<int> all(static_cast<size_t>(L));
  std::iota(all.begin(), all.end(), 0);
  return blocks == all;
}

}  // namespace

std::vector<int> parse_blocks(const std::string& text, int64_t L) {
  std::vector<int> blocks;
  const auto refuse = [&](const std::string& entry) {
    fail(Exit::usage, "--blocks: '", excerpt(entry), "' is neither a block, 0 to ", L - 1,
         ", nor a range of them like 0-", L - 1, ", nor fresh:N");
  };
  for (const std::string& entry : split_commas(text)) {
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

std::string transplant_part(const std::string& row) {
  static const std::map<std::string, std::string> parts = {{"model.embed_tokens", "embedding"},
                                                           {"lm_head", "embedding"},
                                                           {"model.embed_positions", "positions"},
                                                           {"self_attn.q_proj", "attention"},
                                                           {"self_attn.k_proj", "attention"},
                                                           {"self_attn.v_proj", "attention"},
                                                           {"self_attn.o_proj", "attention"},
                                                           {"self_attn.q_norm", "attention"},
                                                           {"self_attn.k_norm", "attention"},
                                                           {"mlp.gate_proj", "mlp"},
                                                           {"mlp.up_proj", "mlp"},
                                                           {"mlp.down_proj", "mlp"},
                                                           {"post_attention_layernorm", "mlp_norm"},
                                                           {"post_attention_layernorm_2", "mlp_norm"},
                                                           {"model.norm", "final_norm"}};
  const RowName name = split(row);
  const bool in_block = name.block >= 0 && row == layer_name(name.block, name.after.substr(1));
  const std::string rest = in_block ? name.after.substr(1) : row, stem = rest.substr(0, rest.rfind('.'));
  if (in_block && stem.starts_with("input_layernorm")) return "attention_norm";  // MUDDFormer has one for each way
  const auto found = parts.find(stem);
  return found == parts.end() ? "connection" : found->second;
}

Config transplanted_config(const Config& source, const Transplant& t, int64_t C, int64_t H) {
  const int64_t old_C = source.hidden_size, old_H = source.num_attention_heads, D = source.head_dim;
  const int64_t G = old_H / source.num_key_value_heads;  // query heads of a key/value head
  if (C == 0) C = old_C;
  if (H == 0) H = old_H * C / old_C;
  const std::string asked = str("--width ", C, " --heads ", H, ": ");
  if (C < 1 || C > old_C || H < 1 || H > old_H)
    fail(Exit::usage, asked, "the source has width ", old_C, " and ", old_H, " heads, of which a part can be taken");
  if (source.gpt2() && C != H * D)
    fail(Exit::usage, asked, "a gpt2 is as wide as its heads, ", H, " x ", D, "; give --width ", H * D, " --heads ", H);
  if (H > G && H % G != 0)
    fail(Exit::usage, asked, "the source's keys and values serve ", G, " query heads each; take a multiple of ", G);
  Config config = source.with_blocks(t.blocks);
  config.hidden_size = C;
  config.num_attention_heads = H;
  config.num_key_value_heads = std::max<int64_t>(1, H / G);
  config.intermediate_size = std::max<int64_t>(1, source.intermediate_size * C / old_C);
  config.check(Exit::usage, "transplant");
  return config;
}

void initialise_fresh(ParameterTable& to, uint64_t seed) {
  to.initialise(random_bits(seed, stream_of("transplant"), 0));
}

std::vector<std::string> transplant(const ParameterTable& from, const Config& source, ParameterTable& to,
                                    const Config& target, const Transplant& t) {
  std::unordered_map<std::string, const Parameter*> theirs;
  for (const Parameter& row : from.rows()) theirs[row.name] = &row;
  const bool in_place = is_in_place(t.blocks, source.num_hidden_layers);
  const bool narrower =
      target.hidden_size < source.hidden_size || target.num_attention_heads < source.num_attention_heads;
  // What a connection adds is taken as a whole.
  const auto fits = [&](const RowName& name, int block, bool of_connection, const Shape& all, const Shape& own) {
    if (!of_connection) return all == own || (narrower && is_leading(all, own));
    const bool stays = name.block < 0 ? in_place : name.block == block;
    return all == own && (stays || (name.block >= 0 && means_the_same_anywhere(name.after)));
  };
  std::vector<std::string> kept;
  for (const Parameter& row : to.rows()) {
    const RowName name = split(row.name);
    const std::string part = transplant_part(row.name);
    const bool of_place = name.block < 0 || name.after.starts_with(".engram.");  // stays where engram_layers names it
    const int block = of_place ? name.block : t.blocks.at(static_cast<size_t>(name.block));
    if (!t.parts.contains(part) || (name.block >= 0 && block == fresh_block)) continue;
    const auto found = theirs.find(name.block < 0 ? row.name : str(name.before, block, name.after));
    if (found == theirs.end() || !fits(name, block, part == "connection", found->second->shape, row.shape)) {
      kept.push_back(row.name);
      continue;
    }
    const bool query = t.rescale_queries && name.after.starts_with(".self_attn.q_proj.");
    const double factor = query ? attention_divisor(target, name.block) / attention_divisor(source, block) : 1;
    to.write(row, leading(from.read(found->second->value), found->second->shape, row.shape, factor).data());
  }
  return kept;
}

}  // namespace crossply
