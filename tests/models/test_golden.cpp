// Whole models against numbers that others computed: losses and gradients of the specification, in double.

#include "tests/support/twin.h"

using namespace crossply;
using namespace crossply::test;

namespace {

enum Kind { M, G, H };
struct Code {
  int code;
  Kind kind;
};

double golden_number(const Code& code, int block, int64_t i, int64_t j) {
  const double di = static_cast<double>(i), dj = static_cast<double>(j);
  const double s = std::sin(1.7 * code.code + 0.9 * block + 0.7 * di + 1.3 * dj + 0.37 * di * dj);
  return code.kind == M ? 0.4 * s : code.kind == G ? 1 + 0.2 * s : 0.5 + 0.2 * s;
}

// By the end of the name, the first that fits. `as_is`: stored as the specification's matrices (in, out); linear
// weights are (out, in).
struct Rule {
  std::string suffix;
  Code code;
  bool as_is;
};
// Of each rule the code with its kind, and the end of the name.
std::vector<Rule> read_rules(const std::string& as_is, const std::string& transposed) {
  std::vector<Rule> rules;
  const std::string kinds = "MGH";
  for (const std::string& text : {as_is, transposed}) {
    const std::vector<std::string> words = split_words(text);
    for (size_t i = 0; i < words.size(); i += 2)
      rules.push_back(
          {words[i + 1], {std::stoi(words[i]), static_cast<Kind>(kinds.find(words[i].back()))}, text == as_is});
  }
  return rules;
}
const std::vector<Rule> golden_rules = read_rules(
    R"(77G depth_k_norm.weight  1M embed_tokens.weight  2G model.norm.weight  10G input_layernorm.weight
    11G post_attention_layernorm.weight  12G q_norm.weight  13G k_norm.weight  19G input_layernorm_q.weight
    20G input_layernorm_k.weight  21G input_layernorm_v.weight  24M static_weight  27M _hc.static_beta
    28M _hc.static_alpha  30M _hc.dynamic_alpha_proj  31M _hc.dynamic_beta_scale  32M _hc.dynamic_alpha_scale
    33G _hc.norm.weight  34M _hc.norm.bias  52M self_attention_res_proj.weight
    53G self_attention_res_norm.weight  54M mlp_res_proj.weight  55G mlp_res_norm.weight
    56M output_attn_res_proj.weight  57G output_attn_res_norm.weight  43M attn_hc.fn  44M attn_hc.base
    45H attn_hc.scale  46M ffn_hc.fn  47M ffn_hc.base  48H ffn_hc.scale  49M hc_head.hc_fn  50M hc_head.hc_base
    51H hc_head.hc_scale  58G model.resid_lambdas  59M model.x0_lambdas  61M ve_gate.weight
    62M model.backout_lambda  63M attn_hyper_connection.hc_norm.weight
    64M attn_hyper_connection.input_mix_weight_down.weight  65M attn_hyper_connection.input_mix_weight_up.weight
    66M attn_hyper_connection.block_inject_weight.weight  67M mlp_hyper_connection.hc_norm.weight
    68M mlp_hyper_connection.input_mix_weight_down.weight  69M mlp_hyper_connection.input_mix_weight_up.weight
    70M mlp_hyper_connection.block_inject_weight.weight  71M hyper_connection_mixer.hc_norm.weight
    72M hyper_connection_mixer.input_mix_weight_down.weight
    73M hyper_connection_mixer.input_mix_weight_up.weight)",
    R"(75M depth_k_proj.weight  76M depth_v_proj.weight  3M q_proj.weight  4M k_proj.weight  5M v_proj.weight
    6M o_proj.weight  7M gate_proj.weight  8M up_proj.weight  9M down_proj.weight  14M alpha_proj.weight
    22M w1.weight  23M w2.weight)");

// The row's element i by its rule; blocks count from 1, model-level rows are block 0.
double golden_element(const Parameter& row, int64_t i) {
  const std::string prefix = "model.layers.", dwa = "model.dwa_modules.alphas.";
  if (row.name.starts_with(dwa)) return golden_number({18, M}, std::stoi(row.name.substr(dwa.size())) + 1, 0, i);
  if (const std::string tables = "model.value_embeds."; row.name.starts_with(tables))
    return golden_number({60, M}, std::stoi(row.name.substr(tables.size())) + 1, static_cast<int>(i / row.shape[1]),
                         i % row.shape[1]);
  const int block = row.name.starts_with(prefix) ? std::stoi(row.name.substr(prefix.size())) + 1 : 0;
  const int sublayer = row.name.find("mlp_hc.") != std::string::npos ? 8 : 0;  // codes of attention's, then the MLP's
  if (row.name.ends_with("dynamic_beta_proj")) return golden_number({29 + sublayer, M}, block, i, 0);  // (C, 1) there
  for (const auto& [part, code] : {std::pair{"da.pre_da_norms.", Code{25, G}}, {"da.post_da_norms.", Code{26, H}}})
    if (const size_t at = row.name.find(part); at != std::string::npos)
      return golden_number(code, block, std::stoi(row.name.substr(at + std::strlen(part))), i);
  const int64_t columns = row.shape.rank == 1 ? row.shape[0] : row.shape[1];
  for (const Rule& rule : golden_rules) {
    if (!row.name.ends_with(rule.suffix)) continue;
    const int64_t row_index = i / columns, column = i % columns;
    const Code code{rule.code.code + sublayer, rule.code.kind};
    return golden_number(code, block, rule.as_is ? row_index : column, rule.as_is ? column : row_index);
  }
  FAIL("no rule for " << row.name);
  return 0;
}

// The loss, the norm of all gradients, and some of them: parameter, element as stored, value.
using Gradients = std::vector<std::tuple<std::string, int64_t, double>>;
void check_golden(const std::string& choice, double loss, double norm, const Gradients& gradients, double eps = 1e-6) {
  CAPTURE(choice);
  Config config = tiny_with(choice);
  config.norm_eps = eps;
  TinyModel model(config, "reference", PlanMode::reuse, Dtype::f64);
  for (Parameter& row : model.params.rows()) model.fill(row.name, [&](int64_t i) { return golden_element(row, i); });
  model.use({3, 1, 4, 1, 5, 0, 0, 0, 0, 0}, {1, 4, 1, 5, -1, -1, -1, -1, -1, -1});
  CHECK(std::abs(model.step() - loss) < 1e-9);
  double square = 0;
  for (const double g : model.values<double>(model.params.gradients())) square += g * g;
  CHECK(std::sqrt(square) == doctest::Approx(norm).epsilon(1e-8));
  for (const auto& [name, element, want] : gradients) {
    const auto gradient = model.values<double>(model.params.at(name).grad);
    CHECK_MESSAGE(gradient[static_cast<size_t>(element)] == doctest::Approx(want).epsilon(1e-8), name);
  }
}

}  // namespace

TEST_CASE("architectures: the specification's golden losses and gradients, in double") {
  const std::string l = "model.layers.", emb = "model.embed_tokens.weight";
  check_golden("llama", 2.4329042095, 17.61264579,
               {{emb, 24, -1.00880811},
                {l + "0.self_attn.v_proj.weight", 0, -0.645432875},
                {l + "3.mlp.down_proj.weight", 3 * 6 + 2, -0.128825324},
                {l + "1.self_attn.q_norm.weight", 1, 0.0446031825}});
  check_golden("satformer", 2.3538606023, 19.05012873,
               {{emb, 24, -1.34790532},
                {l + "0.self_attn.v_proj.weight", 0, -0.989452172},
                {l + "1.self_attn.value_residual_mixing.alpha_proj.weight", 0, -0.272334489},
                {l + "3.self_attn.value_residual_mixing.alpha_proj.weight", 8 + 5, 1.42658058}});
  check_golden("satformer:gate=softmax", 2.6166121013, 17.76708929,
               {{emb, 24, -1.99753559},
                {l + "0.self_attn.v_proj.weight", 0, 0.441777278},
                {l + "1.self_attn.value_residual_mixing.alpha_proj.weight", 0, -0.00927837865},
                {l + "3.self_attn.value_residual_mixing.alpha_proj.weight", 8 + 5, -0.00427454930}});
  check_golden("denseformer", 2.0256778471, 4.66317073,
               {{emb, 24, -0.843848637},
                {"model.dwa_modules.alphas.1.weight", 0, -0.0275027484},
                {"model.dwa_modules.alphas.3.weight", 4, 0.216333601}});
  check_golden("mudd:norm=none", 3.2047637262, 167.87104236,
               {{emb, 24, 39.2574009},
                {l + "0.da.w1.weight", 0, -4.42988228},
                {l + "1.da.w2.weight", 5 * 12 + 3, 0.0666578147},
                {l + "2.da.static_weight", 2 * 4 + 1, -0.169929020}});
  check_golden("hyper:rate=2:norm=layernorm:prenorm=rmsnorm", 2.2149817565, 206.51247999,
               {{emb, 24, -13.7038215},
                {l + "0.attn_hc.static_alpha", 0, -0.000862170467},
                {l + "1.mlp_hc.dynamic_alpha_proj", 1, -0.433759789},
                {l + "2.attn_hc.dynamic_beta_scale", 0, -0.830844147},
                {l + "3.mlp_hc.norm.weight", 2, -0.0174313841}});
  check_golden("attnres:attn_res_block_size=0", 2.6010179635, 21.20285061,
               {{emb, 24, -1.11195588},
                {l + "1.self_attention_res_proj.weight", 0, -0.154031951},
                {l + "0.mlp_res_proj.weight", 3, -0.338918639},
                {l + "2.mlp_res_norm.weight", 2, -5.00251425e-03},
                {"model.output_attn_res_proj.weight", 1, -0.125315295}});
  check_golden("attnres:attn_res_block_size=2", 2.4356873559, 9.92742253,
               {{emb, 24, 0.952372688},
                {l + "1.self_attention_res_proj.weight", 0, 0.204281965},
                {l + "0.mlp_res_proj.weight", 3, -0.215888233},
                {"model.output_attn_res_norm.weight", 5, -0.127233087}});
  check_golden("kv_share", 2.1737393533, 10.12992350,
               {{emb, 24, -1.09675484},
                {l + "0.self_attn.k_proj.weight", 0, -0.586777329},
                {l + "2.self_attn.v_proj.weight", 8 + 2, 0.131682417},
                {l + "3.self_attn.q_proj.weight", 0, -2.86531428e-02}});
  check_golden("kv_share:sharing=suffix:num_kv_shared_layers=2", 2.1151151893, 10.17685860,
               {{emb, 24, 0.239488616},
                {l + "0.self_attn.k_proj.weight", 0, -0.466687046},
                {l + "1.self_attn.v_proj.weight", 8 + 2, -0.474918947},
                {l + "1.self_attn.k_norm.weight", 1, -0.217898971}});
  check_golden("depth_attention", 2.0797540984, 36.81622944,
               {{emb, 24, -1.02268181},
                {l + "0.self_attn.k_proj.weight", 0, -3.11342952},
                {l + "0.self_attn.v_proj.weight", 0, 0.943134332},
                {l + "2.self_attn.k_norm.weight", 1, 0.322029558}});
  check_golden("depth_attention:depth_start=2:depth_stride=4:depth_recent=1", 2.2396225699, 23.67795428,
               {{emb, 24, 1.46153145},
                {l + "0.self_attn.v_proj.weight", 0, -0.689040650},
                {l + "2.self_attn.k_norm.weight", 1, 0.156400250},
                {l + "3.self_attn.q_proj.weight", 0, 0.0239485538}});
  check_golden("moda", 2.1323024272, 7.86028016,
               {{emb, 24, 0.128234308},
                {l + "0.self_attn.k_proj.weight", 0, -0.443303513},
                {l + "1.mlp.depth_k_proj.weight", 8 + 2, 0.0329476600},
                {l + "2.mlp.depth_v_proj.weight", 3 * 8 + 5, -0.0707940004},
                {l + "0.mlp.depth_k_norm.weight", 1, -0.109912408}});
  check_golden("moda:depth_start=2:depth_window=2:ffn_kv=false", 2.4199833470, 47.28471432,
               {{emb, 24, -9.26832929},
                {l + "0.self_attn.v_proj.weight", 0, 1.45142862},
                {l + "2.self_attn.k_norm.weight", 1, -0.0568016025},
                {l + "3.self_attn.q_proj.weight", 0, -0.0191149009}});
  check_golden("moda:depth_start=2:depth_window=1", 2.4576039857, 32.61036726,
               {{emb, 24, -0.688699635},
                {l + "0.self_attn.k_proj.weight", 0, -0.378200428},
                {l + "1.mlp.depth_k_proj.weight", 8 + 2, 0.493310531},
                {l + "2.mlp.depth_k_norm.weight", 1, -0.191122222}});
  check_golden("mhc", 2.5399098016, 12.38162342,
               {{emb, 24, 1.54674184},
                {l + "0.attn_hc.fn", 0, -1.72878376e-07},
                {l + "1.ffn_hc.fn", 8 * 32 + 3, 7.98159481e-04},
                {l + "2.attn_hc.base", 9, -9.21372843e-04},
                {l + "3.ffn_hc.scale", 2, 3.51471232e-03},
                {"model.hc_head.hc_base", 1, 7.49038008e-03}});
  check_golden("mhc:reads=previous", 2.6181199318, 10.00972531,
               {{emb, 24, 0.636686564},
                {l + "0.attn_hc.fn", 0, 1.16395800e-02},
                {l + "1.ffn_hc.fn", 8 * 32 + 3, -2.08935869e-05},
                {l + "3.ffn_hc.scale", 2, 6.25084323e-03}});
  check_golden("mhc:mixing=identity", 2.5098883033, 11.75236706,
               {{emb, 24, 0.683588512},
                {l + "1.ffn_hc.fn", 5 * 32 + 3, 2.40725069e-04},
                {l + "2.attn_hc.base", 7, 1.44189665e-03}});
  check_golden("mhc:mixing=permutations", 2.5271720638, 13.10586671,
               {{emb, 24, 1.83114647},
                {l + "1.ffn_hc.fn", 5 * 32 + 3, -1.16354268e-04},
                {l + "2.attn_hc.base", 7, 1.07236808e-02},
                {l + "3.ffn_hc.base", 31, -2.63073887e-04}});
  check_golden("shortcuts:gate_channels=4", 2.8793226593, 12.57702430,
               {{emb, 24, -0.683985007},
                {"model.resid_lambdas", 2, 0.533011815},
                {"model.x0_lambdas", 1, -0.6895045},
                {"model.backout_lambda", 0, -3.58062367e-02},
                {"model.value_embeds.1.weight", 4 * 4 + 1, 0.103738402},
                {l + "3.self_attn.ve_gate.weight", 4 + 2, -1.37159561e-03}});
  const std::string attn = ".attn_hyper_connection.", mlp = ".mlp_hyper_connection.";
  check_golden("gated_streams:hc_lowrank=3", 2.1769939053, 2.92132476,
               {{emb, 24, 0.136204142},
                {l + "0" + attn + "hc_norm.weight", 9, -2.59238522e-02},
                {l + "1" + mlp + "input_mix_weight_down.weight", 32 + 5, 4.11184103e-04},
                {l + "2" + attn + "input_mix_weight_up.weight", 20 * 3 + 2, -2.39800905e-03},
                {l + "3" + mlp + "block_inject_weight.weight", 2 * 32 + 7, 1.81480009e-03},
                {"model.hyper_connection_mixer.hc_norm.weight", 3, 3.37504278e-03}});
  // Of dev/reference: epsilons that are not the default, large enough to show wherever they belong.
  check_golden("mudd:norm=none", 3.0682574977, 14.96059928,
               {{emb, 24, -2.30013729}, {l + "0.da.w1.weight", 0, 0.506642417}}, 1e-3);
  check_golden("mudd:norm=prepost", 2.9439760089, 14.11540485,
               {{emb, 24, 1.47393647},
                {l + "0.da.w1.weight", 0, -0.145792893},
                {l + "1.da.pre_da_norms.2.weight", 3, 0.100809239},
                {l + "2.da.post_da_norms.1.weight", 5, -0.014912549}},
               1e-3);
  check_golden("hyper:rate=2:norm=rmsnorm:dynamic_norm_eps=0.01:prenorm=rmsnorm", 2.9611581489, 38.57592651,
               {{emb, 24, -3.12911895},
                {l + "1.mlp_hc.dynamic_alpha_proj", 1, 0.0303287449},
                {l + "3.mlp_hc.norm.weight", 2, -0.0180681273}});
}
