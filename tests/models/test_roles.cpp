// What every row of every architecture is: its role, and whether it is a matrix of Muon's.
#include <map>
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

const Kinds backbones = {
    {"embed_tokens.weight", {embedding}},
    {"embed_positions.weight", {embedding}},
    {"lm_head.weight", {head}},
    {"norm.weight", {final_norm}},
    {"norm.bias", {final_norm}},
    {"input_layernorm.weight", {norm}},
    {"input_layernorm.bias", {bias}},
    {"post_attention_layernorm.weight", {norm}},
    {"post_attention_layernorm.bias", {bias}},
    {"self_attn.q_norm.weight", {norm}},
    {"self_attn.k_norm.weight", {norm}},
    {"self_attn.q_proj.weight", {input_projection, true}},
    {"self_attn.q_proj.bias", {bias}},
    {"self_attn.k_proj.weight", {input_projection, true}},
    {"self_attn.k_proj.bias", {bias}},
    {"self_attn.v_proj.weight", {input_projection, true}},
    {"self_attn.v_proj.bias", {bias}},
    {"self_attn.o_proj.weight", {output_projection, true}},
    {"self_attn.o_proj.bias", {bias}},
    {"mlp.gate_proj.weight", {input_projection, true}},
    {"mlp.up_proj.weight", {input_projection, true}},
    {"mlp.up_proj.bias", {bias}},
    {"mlp.down_proj.weight", {output_projection, true}},
    {"mlp.down_proj.bias", {bias}},
};

Kinds at_both_sublayers(const std::string& attn, const std::string& mlp, const Kinds& rows) {
  Kinds both;
  for (const auto& [name, kind] : rows) both[attn + name] = both[mlp + name] = kind;
  return both;
}

Kinds joined(Kinds all, const Kinds& more) {
  all.insert(more.begin(), more.end());
  return all;
}

// What the connections add.
const std::map<std::string, Kinds> connections = {
    {"lime", {{"self_attn.lime_router.weight", {source_router}}}},
    {"lime_static", {{"self_attn.lime_router.weight", {source_router}}, {"lime_layernorm.weight", {norm}}}},
    {"lime_dynamic", {{"self_attn.lime_router.proj.weight", {width_router}}, {"lime_layernorm.weight", {norm}}}},
    {"hyper", at_both_sublayers("attn_hc.", "mlp_hc.",
                                {{"static_alpha", {source_router}},
                                 {"static_beta", {source_router}},
                                 {"dynamic_alpha_proj", {width_router}},
                                 {"dynamic_beta_proj", {width_router}},
                                 {"dynamic_alpha_scale", {scalar}},
                                 {"dynamic_beta_scale", {scalar}},
                                 {"norm.weight", {norm}},
                                 {"norm.bias", {bias}}})},
    {"vertical", {{"vertical_attention.scores", {source_router}}}},
    {"resformer",
     {{"lambda_manager.lambda_scale", {scalar}},
      {"lambda_manager.lambda_logits", {scalar}},
      {"self_attn.value_residual_mixing.lambda1", {scalar}},
      {"self_attn.value_residual_mixing.lambda2", {scalar}}}},
    {"satformer", {{"self_attn.value_residual_mixing.alpha_proj.weight", {width_router}}}},
    {"denseformer", {{"dwa_modules.alphas.*.weight", {source_router}}}},
    {"mudd",
     {{"input_layernorm_q.weight", {norm}},
      {"input_layernorm_q.bias", {bias}},
      {"input_layernorm_k.weight", {norm}},
      {"input_layernorm_k.bias", {bias}},
      {"input_layernorm_v.weight", {norm}},
      {"input_layernorm_v.bias", {bias}},
      {"da.w1.weight", {width_router}},
      {"da.w2.weight", {source_router}},
      {"da.static_weight", {source_router}},
      {"da.pre_da_norms.*.weight", {norm}},
      {"da.post_da_norms.*.weight", {norm}}}},
    {"attnres", joined(at_both_sublayers("self_attention_res_", "mlp_res_",
                                         {{"proj.weight", {width_router}}, {"norm.weight", {norm}}}),
                       {{"output_attn_res_proj.weight", {width_router}}, {"output_attn_res_norm.weight", {norm}}})},
    {"mhc", joined(at_both_sublayers("attn_hc.", "ffn_hc.",
                                     {{"fn", {width_router, true}}, {"base", {scalar}}, {"scale", {scalar}}}),
                   {{"hc_head.hc_fn", {width_router}}, {"hc_head.hc_base", {scalar}}, {"hc_head.hc_scale", {scalar}}})},
    {"shortcuts",
     {{"resid_lambdas", {source_router}},
      {"x0_lambdas", {source_router}},
      {"backout_lambda", {source_router}},
      {"value_embeds.*.weight", {table}},
      {"self_attn.ve_gate.weight", {width_router}}}},
    {"gated_streams", joined(at_both_sublayers("attn_hyper_connection.", "mlp_hyper_connection.",
                                               {{"hc_norm.weight", {norm}},
                                                {"input_mix_weight_down.weight", {width_router, true}},
                                                {"input_mix_weight_up.weight", {width_router, true}},
                                                {"block_inject_weight.weight", {width_router}}}),
                             {{"hyper_connection_mixer.hc_norm.weight", {final_norm}},
                              {"hyper_connection_mixer.input_mix_weight_down.weight", {width_router, true}},
                              {"hyper_connection_mixer.input_mix_weight_up.weight", {width_router, true}}})},
    {"relay", {{"self_attn.relay_gate.weight", {width_router}}}},
};

std::string without_numbers(const std::string& name) {
  static const std::regex where("^model\\.(layers\\.[0-9]+\\.)?"), number("\\.[0-9]+\\.");
  return std::regex_replace(std::regex_replace(name, where, ""), number, ".*.");
}

// Checks the row; false if neither table has its name.
bool check_row(const Parameter& row, const std::string& arch, std::set<std::string>& found) {
  const std::string name = without_numbers(row.name);
  for (const auto& [owner, kinds] : {std::pair{arch, connections.contains(arch) ? connections.at(arch) : Kinds{}},
                                     std::pair{std::string("backbone"), backbones}}) {
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
                                         "backout_lambda"};
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
