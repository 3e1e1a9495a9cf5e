#include "train/settings/transfer.h"

#include <algorithm>
#include <cmath>

#include "models/combined.h"

namespace crossply {
namespace {

// What a row's numbers are multiplied with; rate: without the part of the depth that decay leaves out.
struct RowFactors {
  double start = 1, rate = 1, depth = 1, eps = 1, norm = 1;
  bool decays_by_rate = false;
};

class TransferRules {
 public:
  TransferRules(const Config& c, const TransferOptions& o, const std::string& muon_scale)
      : gpt2_(c.gpt2()),
        gated_streams_(c.arch == "gated_streams"),
        queries_normed_(c.qk_norm),
        completep_(o.rule == "completep"),
        muon_by_rms_(muon_scale == "rms"),
        width_(static_cast<double>(c.hidden_size) / static_cast<double>(o.base_width)),
        layers_(completep_ ? static_cast<double>(c.num_hidden_layers) / static_cast<double>(o.base_layers) : 1),
        residual_(completep_ ? std::pow(layers_, -o.depth_alpha) : 1),
        depth_(completep_ ? std::pow(layers_, o.depth_alpha - 1) : 1),
        heads_(o.base_head_width > 0
                   ? std::sqrt(static_cast<double>(o.base_head_width) / static_cast<double>(c.head_dim))
                   : 1) {}

  RowFactors of(const Parameter& row) const {
    RowFactors f = by_role(row);
    // Attention's logits: sqrt(D0) / D in the place of 1 / sqrt(D).
    const bool queries = row.name.find("self_attn.q_proj.") != std::string::npos;
    const bool gain = row.name.ends_with("self_attn.q_norm.weight");
    if (queries_normed_ ? gain : queries) f.start *= heads_, f.rate *= heads_, f.eps /= heads_, f.norm *= heads_;
    return f;
  }
  // A norm whose gain is 1 + w.
  bool adds_to_one(const Parameter& row) const { return gated_streams_ && row.role == Role::final_norm; }

 private:
  RowFactors by_role(const Parameter& row) const {
    const bool random = row.init.rule.starts_with("normal(");  // what is uniform has a bound of 1/sqrt(C) already
    const double of_width = 1 / std::sqrt(width_), in_block = residual_ / width_;
    const double matrix_rate = !row.muon ? 1 / width_ : muon_by_rms_ ? of_width : 1;
    switch (row.role) {
      case Role::embedding:
      case Role::head:
      case Role::table: return {1, 1, 1, 1 / width_};
      case Role::input_projection:
      case Role::width_router: return {random ? of_width : 1, matrix_rate, depth_, in_block, 1, true};
      case Role::output_projection:
        return {(random ? of_width : 1) * residual_ * (gpt2_ ? std::sqrt(layers_) : 1),
                residual_ * matrix_rate,
                depth_,
                1 / width_,
                residual_,
                true};
      case Role::final_norm: return {1 / width_, 1 / width_, 1, 1, 1 / width_};
      case Role::source_router: return {1, 1 / layers_, 1, in_block};
      case Role::bias:
        if (row.name.ends_with("o_proj.bias") || row.name.ends_with("down_proj.bias"))
          return {residual_, residual_, depth_, 1 / width_, residual_};
        break;
      case Role::norm:
      case Role::scalar: break;
    }
    return {1, 1, depth_, in_block};
  }

  const bool gpt2_, gated_streams_, queries_normed_, completep_, muon_by_rms_;
  const double width_, layers_, residual_, depth_, heads_;  // mN, mL, r, d, h
};

}  // namespace

std::string without_rule(const Config& c) {
  if (is_combined(c.arch)) return c.arch + ", a combination,";
  for (const char* arch : {"mudd", "gemma3n", "moda", "depth_attention", "shortcuts"})
    if (c.arch == arch) return c.arch;
  if (has_loop(c)) return "--loop " + c.loop.kind;
  if (has_engram(c)) return "--engram-layers";
  if (c.block_norm != "pre") return "--block-norm " + c.block_norm;
  // Its coordinates are not flat, nor are those of shortcuts (dev/LOG.md).
  if (c.arch == "lime" && c.text("kv_init") == "uniform") return "lime with kv_init uniform";
  return "";
}

void check_transfer(const Config& config, const TransferOptions& o) {
  if (o.rule == "none") return;
  if (o.base_width < 1) fail(Exit::usage, "--transfer ", o.rule, " needs --base-width, the width that was tuned");
  if (o.rule == "completep" && o.base_layers < 1)
    fail(Exit::usage, "--transfer completep needs --base-layers, the depth that was tuned");
  if (const std::string what = without_rule(config); !what.empty())
    fail(Exit::usage, "--transfer ", o.rule, ": ", what, " has no rule; leave one of them out");
}

void apply_transfer(ParameterTable& params, const Config& config, const TransferOptions& options,
                    const std::string& muon_scale, bool starts) {
  if (options.rule == "none") return;
  const TransferRules rules(config, options, muon_scale);
  for (Parameter& row : params.rows()) {
    const RowFactors f = rules.of(row);
    if (starts && f.start != 1)
      row.init = rules.adds_to_one(row) ? Init::constant(f.start - 1) : row.init.times(f.start);
    row.lr_mul *= f.rate * f.depth;
    if (f.decays_by_rate) row.wd_mul /= f.rate;
    row.eps_mul = f.eps;
    row.norm_mul = f.norm;
  }
}

}  // namespace crossply
