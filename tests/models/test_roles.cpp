// What every row of every architecture is: its role, and whether it is a matrix of Muon's.
#include <regex>
#include <set>

#include "tests/support/cases.h"
#include "train/step/declare.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using enum Role;

struct RoleOfRow {
  Role role;
  bool matrix = false;  // as long as it has more than one row and column
};
// By name without "model." and "layers.N."; * is any other number.
using Kinds = std::map<std::string, RoleOfRow>;

// These rows, which are all of one kind; matrix: as in RoleOfRow.
Kinds rows_of(Role role, const std::string& names, bool matrix = false) {
  Kinds rows;
  for (const std::string& name : split_words(names)) rows[name] = {role, matrix};
  return rows;
}

Kinds joined(Kinds all, const std::vector<Kinds>& more) {
  for (const Kinds& kinds : more) all.insert(kinds.begin(), kinds.end());
  return all;
}

Kinds at_both_sublayers(const std::string& attn, const std::string& mlp, const Kinds& rows) {
  Kinds both;
  for (const auto& [name, kind] : rows) both[attn + name] = both[mlp + name] = kind;
  return both;
}

const Kinds backbones = joined(
    rows_of(embedding, "embed_tokens.weight embed_positions.weight"),
    {rows_of(head, "lm_head.weight"), rows_of(final_norm, "norm.weight norm.bias"),
     rows_of(norm,
             "input_layernorm.weight post_attention_layernorm.weight self_attn.q_norm.weight self_attn.k_norm.weight "
             "input_layernorm_2.weight post_attention_layernorm_2.weight"),
     rows_of(bias,
             "input_layernorm.bias post_attention_layernorm.bias input_layernorm_2.bias "
             "post_attention_layernorm_2.bias self_attn.q_proj.bias self_attn.k_proj.bias "
             "self_attn.v_proj.bias self_attn.o_proj.bias mlp.up_proj.bias mlp.down_proj.bias"),
     rows_of(input_projection,
             "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight mlp.gate_proj.weight "
             "mlp.up_proj.weight",
             true),
     rows_of(output_projection, "self_attn.o_proj.weight mlp.down_proj.weight", true),
     rows_of(width_router, "early_exit_gate.weight"), rows_of(bias, "early_exit_gate.bias"),
     rows_of(table, "engram.embed.weight"), rows_of(input_projection, "engram.wkv.weight", true),
     rows_of(norm, "engram.q_weight engram.k_weight")});

// What the connections add.
const std::map<std::string, Kinds> connections = {
    {"lime", rows_of(source_router, "self_attn.lime_router.weight")},
    {"lime_static",
     joined(rows_of(source_router, "self_attn.lime_router.weight"), {rows_of(norm, "lime_layernorm.weight")})},
    {"lime_dynamic",
     joined(rows_of(width_router, "self_attn.lime_router.proj.weight"), {rows_of(norm, "lime_layernorm.weight")})},
    {"hyper", at_both_sublayers("attn_hc.", "mlp_hc.",
                                joined(rows_of(source_router, "static_alpha static_beta"),
                                       {rows_of(width_router, "dynamic_alpha_proj dynamic_beta_proj"),
                                        rows_of(scalar, "dynamic_alpha_scale dynamic_beta_scale"),
                                        rows_of(norm, "norm.weight"), rows_of(bias, "norm.bias")}))},
    {"vertical", rows_of(source_router, "vertical_attention.scores")},
    {"resformer",
     rows_of(scalar,
             "lambda_manager.lambda_scale lambda_manager.lambda_logits self_attn.value_residual_mixing.lambda1 "
             "self_attn.value_residual_mixing.lambda2")},
    {"satformer", rows_of(width_router, "self_attn.value_residual_mixing.alpha_proj.weight")},
    {"denseformer", rows_of(source_router, "dwa_modules.alphas.*.weight")},
    {"mudd", joined(rows_of(norm,
                            "input_layernorm_q.weight input_layernorm_k.weight input_layernorm_v.weight "
                            "da.pre_da_norms.*.weight da.post_da_norms.*.weight"),
                    {rows_of(bias, "input_layernorm_q.bias input_layernorm_k.bias input_layernorm_v.bias"),
                     rows_of(width_router, "da.w1.weight"), rows_of(source_router, "da.w2.weight da.static_weight")})},
    {"attnres",
     joined(at_both_sublayers("self_attention_res_", "mlp_res_",
                              joined(rows_of(width_router, "proj.weight"), {rows_of(norm, "norm.weight")})),
            {rows_of(width_router, "output_attn_res_proj.weight"), rows_of(norm, "output_attn_res_norm.weight")})},
    {"mhc", joined(at_both_sublayers("attn_hc.", "ffn_hc.",
                                     joined(rows_of(width_router, "fn", true), {rows_of(scalar, "base scale")})),
                   {rows_of(width_router, "hc_head.hc_fn"), rows_of(scalar, "hc_head.hc_base hc_head.hc_scale")})},
    {"shortcuts",
     joined(rows_of(source_router,
                    "resid_lambdas x0_lambdas backout_lambda skip_weights lane_post lane_resid "
                    "mudd_tail.*.w2.weight mudd_tail.*.bias"),
            {rows_of(table, "value_embeds.*.weight"), rows_of(input_projection, "self_attn.ve_proj.weight", true),
             rows_of(width_router, "self_attn.ve_gate.weight mudd_tail.*.w1.weight")})},
    {"gated_streams",
     joined(at_both_sublayers(
                "attn_hyper_connection.", "mlp_hyper_connection.",
                joined(rows_of(width_router, "input_mix_weight_down.weight input_mix_weight_up.weight", true),
                       {rows_of(norm, "hc_norm.weight"), rows_of(width_router, "block_inject_weight.weight")})),
            {rows_of(final_norm, "hyper_connection_mixer.hc_norm.weight"),
             rows_of(width_router,
                     "hyper_connection_mixer.input_mix_weight_down.weight "
                     "hyper_connection_mixer.input_mix_weight_up.weight",
                     true)})},
    {"gemma3n",
     joined(rows_of(table, "embed_tokens_per_layer.weight"),
            {rows_of(input_projection,
                     "per_layer_model_projection.weight per_layer_input_gate.weight laurel.linear_left.weight", true),
             rows_of(output_projection, "per_layer_projection.weight laurel.linear_right.weight", true),
             rows_of(norm,
                     "per_layer_projection_norm.weight post_per_layer_input_norm.weight "
                     "laurel.post_laurel_norm.weight")})},
    {"moda", joined(rows_of(input_projection, "mlp.depth_k_proj.weight mlp.depth_v_proj.weight", true),
                    {rows_of(norm, "mlp.depth_k_norm.weight")})},
    {"relay", rows_of(width_router, "self_attn.relay_gate.weight")},
};

std::string without_numbers(const std::string& name) {
  static const std::regex where("^model\\.(passes\\.[0-9]+\\.)?(layers\\.[0-9]+\\.)?"), number("\\.[0-9]+\\.");
  return std::regex_replace(std::regex_replace(name, where, ""), number, ".*.");
}

// Checks the row; false if neither table has its name.
bool check_row(const Parameter& row, const std::string& arch, std::set<std::string>& found) {
  const std::string name = without_numbers(row.name);
  std::vector<std::pair<std::string, Kinds>> tables = {{"backbone", backbones}};
  for (const std::string& part : parts_of(arch))
    if (connections.contains(part)) tables.emplace_back(part, connections.at(part));
  for (const auto& [owner, kinds] : tables) {
    const auto line = kinds.find(name);
    if (line == kinds.end()) continue;
    found.insert(owner + " " + name);
    CHECK(row.role == line->second.role);
    CHECK(row.matrix() == (line->second.matrix && row.shape[0] > 1 && row.shape[1] > 1));
    return true;
  }
  return false;
}

}  // namespace

TEST_CASE("roles: every row of every architecture is what this table says") {
  std::set<std::string> found, all;
  for (const Case& c : cases()) {
    if (find_architecture(c.config.arch).draft) continue;
    CAPTURE(c.name);
    ParameterTable params;
    declare_model(params, c.config);
    for (const Parameter& row : params.rows()) {
      CAPTURE(row.name);
      CHECK_MESSAGE(check_row(row, c.config.arch, found), "say in this table what the row is");
    }
  }
  for (const auto& [name, kind] : backbones) all.insert("backbone " + name);
  for (const auto& [arch, kinds] : connections)
    for (const auto& [name, kind] : kinds) all.insert(str(arch, " ", name));
  for (const std::string& line : all) CHECK_MESSAGE(found.contains(line), "no model has this row: " << line);
}

TEST_CASE("roles: a map with one row or one column is no matrix") {
  ParameterTable mudd, gated;
  declare_model(mudd, tiny_with("mudd:intermediate_sizes=[1,2,5,6]"));
  declare_model(gated, tiny_with("gated_streams:hc_lowrank=1"));
  for (const char* rest : {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}) {
    CHECK(!mudd.at(layer_name(0, rest)).matrix());
    CHECK(mudd.at(layer_name(1, rest)).matrix());
    CHECK(gated.at(layer_name(0, rest)).matrix());
  }
  for (const char* rest : {"input_mix_weight_down.weight", "input_mix_weight_up.weight"})
    CHECK(!gated.at(layer_name(0, std::string("attn_hyper_connection.") + rest)).matrix());
}

TEST_CASE("roles: --router-lr sets the learning rate of these rows and of no others") {
  const std::set<std::string> routers = {"self_attn.lime_router.weight",
                                         "self_attn.lime_router.proj.weight",
                                         "vertical_attention.scores",
                                         "resid_lambdas",
                                         "x0_lambdas",
                                         "backout_lambda",
                                         "skip_weights",
                                         "lane_post",
                                         "lane_resid",
                                         "mudd_tail.*.w1.weight",
                                         "mudd_tail.*.w2.weight",
                                         "mudd_tail.*.bias"};
  for (const Case& c : cases()) {
    if (find_architecture(c.config.arch).draft) continue;
    CAPTURE(c.name);
    TrainPlan plan;
    plan.config = c.config, plan.lr = 0.001;
    ParameterTable usual, other;
    declare(usual, plan);
    plan.router_lr = 0.003;
    declare(other, plan);
    for (size_t i = 0; i < usual.rows().size(); ++i) {
      const Parameter& row = usual.rows()[i];
      CAPTURE(row.name);
      const double want = routers.contains(without_numbers(row.name)) ? 3 : row.lr_mul;
      CHECK(other.rows()[i].lr_mul == doctest::Approx(want));
    }
  }
}
