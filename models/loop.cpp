#include "models/loop.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"
#include "engine/params.h"
#include "kernels/block/ops.h"
#include "models/gpt2.h"
#include "models/llama.h"

namespace crossply {

// Nothing where the text is no list of numbers of blocks.
static std::vector<int64_t> listed_layers(const LoopOptions& loop) {
  std::vector<int64_t> layers;
  const nlohmann::json list = try_parse_json(loop.layers);
  for (const nlohmann::json& item : list.is_array() ? list : nlohmann::json::array()) {
    if (!holds<int64_t>(item, 0, 4096)) return {};
    layers.push_back(item.get<int64_t>());
  }
  return layers;
}

bool has_loop(const Config& config) { return config.loop.kind != "none"; }
bool has_anchor(const Config& config) { return config.loop.kind == "anchor"; }
int64_t stack_passes(const Config& config) { return config.loop.kind == "stack" ? config.loop.passes : 1; }

int64_t Applications::pass(int64_t v) const {
  return v < prelude || v >= prelude + passes * core ? 0 : (v - prelude) / core;
}

int64_t Applications::stored(int64_t v) const {
  if (!tied || v < prelude) return v;
  const int64_t in_core = v - prelude;
  return in_core < passes * core ? prelude + in_core % core : v - (passes - 1) * core;
}

Applications applications_of(const Config& config) {
  const int64_t L = config.num_hidden_layers, third = L / 3;
  const LoopOptions& loop = config.loop;
  if (!has_anchor(config)) return {L, 0, 0, 1, true};
  Applications all{third, third + (L % 3 > 0), 0, loop.passes, loop.tied};
  all.coda = L - all.prelude - all.core;
  if (const std::vector<int64_t> layers = listed_layers(loop); layers.size() == 3)
    all.prelude = layers[0], all.core = layers[1], all.coda = layers[2];
  return all;
}

std::string described_layers(const Config& config) {
  const int64_t L = config.num_hidden_layers, A = applications_of(config).count() * stack_passes(config);
  return A == L ? str(L) : str(L, ", run as ", A);
}

static void check_anchor(const Config& config, Exit code, const std::string& where) {
  const LoopOptions& loop = config.loop;
  const int64_t L = config.num_hidden_layers;
  if (!std::isfinite(loop.alpha)) fail(code, where, ": loop_alpha must be finite, is ", loop.alpha);
  if (loop.layers == "[]" ? !loop.tied : listed_layers(loop).size() != 3)
    fail(code, where, ": loop_layers ", excerpt(loop.layers),
         " must be [P,M,Q], how many blocks the prelude, the core and "
         "the coda have",
         loop.tied ? ", or [] for thirds" : "; without loop_tied they must be given");
  const Applications all = applications_of(config);
  const int64_t stored = all.prelude + (all.tied ? 1 : all.passes) * all.core + all.coda;
  if (all.prelude < 0 || all.core < 1 || all.coda < 0 || stored != L)
    fail(code, where, ": loop_layers ", all.prelude, ", ", all.core, ", ", all.coda,
         all.tied ? "" : str(" with ", all.passes, " cores"), " are ", stored, " blocks, num_hidden_layers is ", L,
         "; the core needs one at least");
}

// Without a loop, and of a stack: options that have no effect.
static void check_idle(const Config& config, Exit code, const std::string& where) {
  LoopOptions idle = config.loop;
  idle.kind = "none", idle.exit_gate = false, idle.exit_beta = LoopOptions().exit_beta;  // check_exits() looks at these
  if (has_loop(config)) idle.passes = 1;
  if (idle == LoopOptions()) return;
  fail(code, where,
       has_loop(config) ? ": a stack has passes and an exit gate; its other options have no effect"
                        : ": without a loop its other options have no effect; add loop anchor");
}

static void check_exits(const Config& config, Exit code, const std::string& where) {
  const LoopOptions& loop = config.loop;
  if (loop.exit_gate && (loop.kind != "stack" || loop.passes < 2 || loop.passes > max_exits))
    fail(code, where, ": exit_gate needs loop stack with 2 to ", max_exits, " passes, not ", loop.kind, " with ",
         loop.passes);
  if (!(loop.exit_beta >= 0) || !std::isfinite(loop.exit_beta))
    fail(code, where, ": exit_beta must be 0 or more, is ", loop.exit_beta);
  if (!loop.exit_gate && loop.exit_beta != LoopOptions().exit_beta)
    fail(code, where, ": exit_beta has no effect without exit_gate");
}

void check_loop(const Config& config, Exit code, const std::string& where) {
  const LoopOptions& loop = config.loop;
  const auto one_of = [&](const char* key, const std::string& value, std::initializer_list<const char*> words) {
    if (std::find(words.begin(), words.end(), value) != words.end()) return;
    std::string known;
    for (const char* word : words) known += (known.empty() ? "" : ", ") + std::string(word);
    fail(code, where, ": ", key, " '", excerpt(value), "' is not known; give of ", known);
  };
  one_of("loop", loop.kind, {"none", "anchor", "stack"});
  one_of("loop_norm", loop.norm, {"none", "passes", "all"});
  one_of("block_norm", config.block_norm, {"pre", "branch", "sum"});
  if (loop.passes < 1 || loop.passes > 4096) fail(code, where, ": loop_passes must be in 1..4096, is ", loop.passes);
  check_exits(config, code, where);
  if (!has_anchor(config)) check_idle(config, code, where);
  else check_anchor(config, code, where);
  const int64_t runs = applications_of(config).count() * stack_passes(config);
  if (runs > 4096) fail(code, where, ": ", runs, " applications of blocks; there may be 4096");
  if (loop.kind == "stack" && config.arch == "gemma3n")
    fail(code, where, ": gemma3n's embeddings belong to the tokens, so its passes cannot begin anew; try loop anchor");
}

std::string loop_remark(const Config& config) {
  const LoopOptions& loop = config.loop;
  if (!has_loop(config) || loop.passes > 1) return "";
  if (loop.kind == "stack") return "note: --loop stack with one pass is the model without a loop; give --loop-passes";
  if (loop.end && loop.alpha != 0) return "";
  if (loop.norm == "none") return "note: with these options --loop anchor changes nothing";
  return loop.alpha == 0 ? "" : "note: with one pass and --loop-end false the anchor is never added";
}

Config applied(const Config& config) {
  if (!has_anchor(config)) return config;
  const Applications all = applications_of(config);
  std::vector<int> blocks;
  for (int64_t v = 0; v < all.count(); ++v) blocks.push_back(static_cast<int>(all.stored(v)));
  Config out = config.with_blocks(blocks);
  out.loop.layers = str("[", all.prelude, ",", all.core, ",", all.coda, "]");
  return out;
}

RowNames::RowNames(const Config& config) : applications_(applications_of(config)) {
  if (!applications_.tied || applications_.passes == 1) return;
  ParameterTable rows;
  const Config all = applied(config);
  for (int v = 0; v < all.num_hidden_layers; ++v)
    all.gpt2() ? declare_gpt2_block(rows, all, v) : declare_llama_block(rows, all, v);
  for (const Parameter& row : rows.rows()) of_blocks_.insert(row.name);
}

std::string RowNames::of(const std::string& name) const {
  constexpr std::string_view layers = "model.layers.";
  if (of_blocks_.empty() || !name.starts_with(layers)) return name;
  const size_t dot = name.find('.', layers.size());
  const int64_t v = parse_integer(name.substr(layers.size(), dot - layers.size())).value();
  const int64_t pass = of_blocks_.contains(name) ? 0 : applications_.pass(v);
  const std::string rest = name.substr(dot), stored = std::to_string(applications_.stored(v));
  return pass == 0 ? std::string(layers) + stored + rest : str("model.passes.", pass, ".layers.", stored, rest);
}

}  // namespace crossply
