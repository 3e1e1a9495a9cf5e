// How new models start and in which groups their parameters learn: by the specification's tables, row for row.
#include <set>

#include "tests/support/twin.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Sizes large enough for statistics, with H, K, D, C apart. The spread of ordinary matrices stays LLaMA's 0.02.
constexpr int64_t C = 256, H = 64, K = 32, D = 4, L = 6;
const double root_C = std::sqrt(static_cast<double>(C));

// gpt2: with biases, and the K heads of the LLaMA's keys for its queries, too.
Config config_of(const std::string& text, bool gpt2 = false) {
  Config config;
  config.arch = gpt2 ? "gpt2" : "llama";
  config.max_position_embeddings = 24;
  config.vocab_size = 7;
  config.hidden_size = C;
  config.intermediate_size = 96;
  config.num_hidden_layers = L;
  config.num_attention_heads = gpt2 ? K : H;
  config.num_key_value_heads = K;
  config.qk_norm = !gpt2;
  config.check(Exit::usage, "test");
  REQUIRE(config.head_dim == (gpt2 ? C / K : D));
  return connected(text, config);
}

ParameterTable declared(const Config& config) {
  ParameterTable params;
  declare_model(params, config);
  return params;
}

int layer_of(const Parameter& row) { return std::stoi(row.name.substr(std::string("model.layers.").size())); }

// How elements start: with a known value, or drawn with mean 0, where value() knows none.
enum class Drawn { no, normal, uniform };
struct Start {
  std::function<std::optional<double>(const Parameter&, int64_t)> value;
  Drawn drawn = Drawn::no;
  std::function<double(const Parameter&)> spread;  // the standard deviation
};
std::optional<double> unknown(const Parameter&, int64_t) { return {}; }

Start all(double value) {
  return {[value](const Parameter&, int64_t) { return value; }, Drawn::no, {}};
}
Start exactly(const std::function<double(const Parameter&, int64_t)>& value) { return {value, Drawn::no, {}}; }
Start normal(double spread) {
  return {unknown, Drawn::normal, [spread](const Parameter&) { return spread; }};
}
Start uniform(double bound) {
  return {unknown, Drawn::uniform, [bound](const Parameter&) { return bound / std::sqrt(3.0); }};
}

// Between the two, whatever it is.
Start within(double low, double high) {
  return exactly([=](const Parameter& row, int64_t i) {
    const double x = row.init.at(1, stream_of(row.name), i);
    return x >= low && x <= high ? x : NAN;
  });
}
// A number for each layer, from the first one's to the last one's.
double falls(const Parameter& row, int64_t i, double first, double last) {
  return first + (last - first) * static_cast<double>(i) / static_cast<double>(row.shape[0] - 1);
}

// LIMe's routers: the identity on the own layer, variance 1 / (entries read) on the others that are read.
// With own_random the own layer is drawn, too; factor: of the spread.
Start router(const std::function<bool(int64_t layer, int64_t source)>& reads, bool own_random = false,
             double factor = 1) {
  return {[=](const Parameter& row, int64_t i) -> std::optional<double> {
            const int64_t to = i / row.shape[1], from = i % row.shape[1], layer = layer_of(row), source = from / K;
            if (source == layer && own_random) return {};
            if (source == layer) return from % K == to ? 1.0 : 0.0;
            if (!reads(layer, source)) return 0.0;
            return {};
          },
          Drawn::uniform,
          [=](const Parameter& row) {
            int64_t read = 1;
            for (int64_t source = 0; source < layer_of(row); ++source) read += reads(layer_of(row), source);
            return factor / std::sqrt(static_cast<double>(read * K));
          }};
}

// Hyper-connections: the stream a sublayer reads in front of the identity.
Start one_stream(int64_t E, bool by_sublayer) {
  return exactly([=](const Parameter& row, int64_t i) {
    const bool mlp = row.name.find("mlp_hc") != std::string::npos;
    const int64_t index = by_sublayer ? 2 * layer_of(row) + mlp : layer_of(row);
    const int64_t stream = i / (E + 1), column = i % (E + 1);
    return column == 0 ? stream == index % E : column - 1 == stream;
  });
}
Start own_score(double value) {
  return exactly([value](const Parameter& row, int64_t i) { return value * last_column(row, i); });
}

// The rows whose name contains `part`; the first rule that fits a row is its rule.
struct Rule {
  std::string part;
  double lr_mul, wd_mul;
  Start start;
};
struct Model {
  std::string choice;       // as of --arch of compare
  std::vector<Rule> rules;  // for what it adds to the backbone and what it starts differently
};

std::vector<Model> lime_models() {
  const Rule k{"k_proj.weight", 1, 1, uniform(1 / root_C)}, v{"v_proj.weight", 1, 1, uniform(1 / root_C)};
  auto routed = [](const std::function<bool(int64_t, int64_t)>& reads) {
    return Rule{"lime_router", 10, 0, router(reads)};
  };
  return {
      {"lime", {k, v, routed([](int64_t, int64_t) { return true; })}},
      {"lime:routing=last:window=2", {k, v, routed([](int64_t l, int64_t s) { return s > l - 2; })}},
      {"lime:routing=first:window=2", {k, v, routed([](int64_t, int64_t s) { return s < 2; })}},
      {"lime:routing=average", {k, v}},
      {"lime:routing=own", {k, v}},
      {"lime:kv_init=normal", {routed([](int64_t, int64_t) { return true; })}},
      {"lime:router_init=random", {k, v, {"lime_router", 10, 0, router([](int64_t, int64_t) { return true; }, true)}}},
      {"lime:routing=last:window=2:router_init=random:router_bound=literal",  // the pseudocode's: sqrt(3 K / n)
       {k, v, {"lime_router", 10, 0, router([](int64_t l, int64_t s) { return s > l - 2; }, true, K)}}},
      {"lime:router_bound=literal",
       {k, v, {"lime_router", 10, 0, router([](int64_t, int64_t) { return true; }, false, K)}}},
  };
}

// Layer 0 has the backbone's keys and values. The literal bound takes all sizes of a tensor (1, K, C, D) but the first.
std::vector<Model> lime_static_models(bool gpt2) {
  std::vector<Model> models;
  for (const std::string arch : {"lime_static", "lime_dynamic"})
    for (const std::string kv_init : {"", ":kv_init=literal", ":kv_init=fan_in"}) {
      const double bound =
          kv_init == ":kv_init=fan_in" ? 1 / root_C : 1 / std::sqrt(static_cast<double>(gpt2 ? C * C : K * C * D));
      std::vector<Rule> rules = {{"layers.0.self_attn.k_proj.weight", 1, 1, normal(0.02)},
                                 {"layers.0.self_attn.v_proj.weight", 1, 1, normal(0.02)},
                                 {"k_proj.weight", 1, 1, uniform(bound)},
                                 {"v_proj.weight", 1, 1, uniform(bound)},
                                 {"lime_layernorm", 1, 0, all(1)}};
      if (arch == "lime_static") rules.push_back({"lime_router", 10, 0, normal(0.1)});
      else rules.push_back({"lime_router", 10, 1, normal(0.02)});
      models.push_back({arch + kv_init, rules});
    }
  return models;
}

std::vector<Model> hyper_models(bool gpt2) {
  auto rules = [](int64_t E, bool by_sublayer) {
    return std::vector<Rule>{{"static_alpha", 1, 0, one_stream(E, by_sublayer)},
                             {"static_beta", 1, 0, all(1)},
                             {"dynamic_alpha_proj", 1, 1, all(0)},
                             {"dynamic_beta_proj", 1, 1, all(0)},
                             {"dynamic_alpha_scale", 1, 1, all(0.01)},
                             {"dynamic_beta_scale", 1, 1, all(0.01)}};
  };
  const Rule gain{"_hc.norm.weight", 1, 0, all(1)}, bias{"_hc.norm.bias", 1, 0, all(0)};
  const Start smaller = normal(0.02 / std::sqrt(3.0) / (gpt2 ? std::sqrt(2.0 * L) : 1));
  return {
      {"hyper", rules(4, false)},
      {"hyper:dynamic=false", {{"static_alpha", 1, 0, one_stream(4, false)}, {"static_beta", 1, 0, all(1)}}},
      {"hyper:prenorm=rmsnorm:norm=rmsnorm", joined(rules(4, false), std::vector{gain})},
      {"hyper:rate=3:layer_index=sublayer:norm=layernorm:output_init_scale=true",
       joined(rules(3, true),
              std::vector<Rule>{gain, bias, {"o_proj.weight", 1, 1, smaller}, {"down_proj.weight", 1, 1, smaller}})},
  };
}

std::vector<Model> mudd_models(bool gpt2) {
  std::vector<Rule> common = {{"da.w2", 1, 1, all(0)}};
  for (const std::string way : {"q", "k", "v"}) {
    common.push_back({"input_layernorm_" + way + ".weight", 1, 0, all(1)});
    if (gpt2) common.push_back({"input_layernorm_" + way + ".bias", 1, 0, all(0)});
  }
  auto with = [&](double w1, const std::vector<Rule>& more) {
    return joined(common, std::vector<Rule>{{"da.w1", 1, 1, normal(w1)}}, more);
  };
  const std::vector<Rule> prepost = {
      {"static_weight", 1, 0, all(0)}, {"pre_da_norms", 1, 0, all(1)}, {"post_da_norms", 1, 0, all(1e-3)}};
  return {
      {"mudd", with(1 / root_C, prepost)},
      {"mudd:w1_init=fan_in", with(1 / root_C, prepost)},
      {"mudd:w1_init=literal", with(1 / (root_C * root_C), prepost)},
      {"mudd:norm=none", with(1 / root_C, {{"static_weight", 1, 0, exactly(last_column)}})},
  };
}

// of_comb: element i of what base has behind those of pre and post.
std::vector<Rule> mhc_rules(const std::function<double(int64_t)>& of_comb, bool head, int64_t E = 4,
                            bool one_hot = false) {
  const auto base = [of_comb, E, one_hot](const Parameter& row, int64_t i) {
    const int64_t sublayer = 2 * layer_of(row) + (row.name.find("ffn_hc") != std::string::npos ? 1 : 0);
    const double pre = one_hot ? (i == sublayer % E ? 1 : -1) : -std::log(static_cast<double>(E - 1));
    return i < E ? pre : i < 2 * E ? 0 : of_comb(i - 2 * E);
  };
  std::vector<Rule> rules = {
      {"_hc.fn", 1, 1, normal(0.02)}, {"_hc.base", 1, 0, exactly(base)}, {"_hc.scale", 1, 0, all(0.01)}};
  if (head)
    rules = joined(rules, std::vector<Rule>{{"hc_head.hc_fn", 1, 1, normal(0.02)},
                                            {"hc_head.hc_base", 1, 0, all(0)},
                                            {"hc_head.hc_scale", 1, 0, all(0.01)}});
  return rules;
}

std::vector<Model> other_models() {
  const std::string gates = "alpha_proj", scores = "vertical_attention.scores";
  return {
      {"vertical", {{scores, 10, 1, all(0)}}},
      {"vertical:init_diag=4", {{scores, 10, 1, own_score(4)}}},
      {"vertical:map=unet", {}},
      {"sla", {}},
      {"ala", {}},
      {"resformer", {{"lambda_scale", 1, 0, all(L)}, {"lambda_logits", 1, 0, all(0)}, {"lambda2", 1, 0, all(0.5)}}},
      {"resformer:lambda_scale=frozen",
       {{"lambda_scale", 0, 0, all(L)}, {"lambda_logits", 1, 0, all(0)}, {"lambda2", 1, 0, all(0.5)}}},
      {"resformer:lambda2=frozen",
       {{"lambda_scale", 1, 0, all(L)}, {"lambda_logits", 1, 0, all(0)}, {"lambda2", 0, 0, all(0.5)}}},
      {"resformer:variant=learnable", {{"lambda1", 1, 0, all(0.5)}, {"lambda2", 1, 0, all(0.5)}}},
      {"resformer:variant=identity", {}},
      {"resformer:variant=svformer", {}},
      {"satformer", {{gates, 1, 1, normal(0.02)}}},
      {"satformer:gate_init=normal", {{gates, 1, 1, normal(0.02)}}},
      {"satformer:gate_init=uniform", {{gates, 1, 1, uniform(1 / root_C)}}},
      {"denseformer", {{"dwa_modules", 1, 0, exactly(last_column)}}},
      {"denseformer:dilation=2:period=3", {{"dwa_modules", 1, 0, exactly(last_column)}}},
      {"attnres", {{"_res_proj", 1, 0, all(0)}, {"_res_norm", 1, 0, all(1)}}},
      {"kv_share", {}},
      {"shortcuts",
       {{"resid_lambdas", 5, 0.5, exactly([](const Parameter& row, int64_t i) { return falls(row, i, 1.15, 1.05); })},
        {"x0_lambdas", 5, 0, exactly([](const Parameter& row, int64_t i) { return falls(row, i, 0.2, 0.05); })},
        {"backout_lambda", 5, 0, all(0.2)},
        {"value_embeds", 1, 0.1, uniform(std::sqrt(3.0) / root_C)},
        {"ve_gate", 1, 1, within(0, 0.02)}}},
      {"shortcuts:resid=false:x0=false:backout=false:unet=true:value_from=x0:lanes_from=1:mudd_tail=residual",
       {{"skip_weights", 5, 0, all(1)},
        {"lane_post", 5, 0, exactly([](const Parameter&, int64_t i) { return i % 4 == 1 ? 1.5 : 1.0; })},
        {"lane_resid", 5, 0, all(std::sqrt(1.1))},
        {"ve_proj", 1, 1, uniform(std::sqrt(3.0) / root_C)},
        {"ve_gate", 1, 1, within(0, 0.02)},
        {"w1.weight", 0.25, 1, uniform(1 / root_C)},
        {"w2.weight", 0.25, 1, all(0)},
        {"mudd_tail.0.bias", 0.25, 0, all(0)},
        {"mudd_tail.1.bias", 0.25, 0, all(0)}}},
      {"mhc", mhc_rules([](int64_t i) { return i % 5 == 0 ? 0. : -8.; }, true)},
      {"mhc:hc_mult=3:mixing=permutations:reads=previous",
       mhc_rules([](int64_t i) { return i == 0 ? 0. : -8.; }, false, 3)},
      {"mhc:mixing=identity", mhc_rules([](int64_t) { return 0.; }, true)},
      {"mhc:hc_mult=3:start=one_hot", mhc_rules([](int64_t i) { return i % 4 == 0 ? 0. : -8.; }, true, 3, true)},
      {"gated_streams",
       {{"hc_norm", 1, 0, all(0)},
        {"input_mix_weight_down", 1, 1, normal(0.02)},
        {"input_mix_weight_up", 1, 1, normal(0.02)},
        {"block_inject_weight", 1, 1, normal(0.02)}}},
      {"gemma3n",
       {{"embed_tokens_per_layer", 5, 0, normal(0.02)},
        {"per_layer_model_projection", 1, 1, normal(0.02)},
        {"per_layer_projection_norm", 1, 0, all(1)},
        {"per_layer_input_gate", 1, 1, normal(0.02)},
        {"per_layer_projection", 1, 1, normal(0.02)},
        {"post_per_layer_input_norm", 1, 0, all(0)},
        {"linear_left", 1, 1, normal(0.02)},
        {"linear_right", 1, 1, normal(0.02)},
        {"post_laurel_norm", 1, 0, all(0)}}},
      {"gemma3n:laurel_form=paper:hidden_size_per_layer_input=0",
       {{"linear_left", 1, 1, normal(0.02)}, {"linear_right", 1, 1, all(0)}}},
      {"depth_attention", {}},
      {"relay", {{"relay_gate", 1, 1, normal(0.02)}}},
  };
}

// A GPT-2 has no q/k norm, so no gains of it.
std::vector<Model> moda_models(bool gpt2) {
  std::vector<Rule> rules = {{"depth_k_proj", 1, 1, normal(0.02)}, {"depth_v_proj", 1, 1, normal(0.02)}};
  if (!gpt2) rules.push_back({"depth_k_norm", 1, 0, all(1)});
  return {{"moda", rules}, {"moda:depth_start=4:depth_window=2", rules}, {"moda:ffn_kv=false", {}}};
}

std::vector<Model> all_models(bool gpt2) {
  return joined(lime_models(), lime_static_models(gpt2), hyper_models(gpt2), mudd_models(gpt2), moda_models(gpt2),
                other_models());
}

double start_of(const Parameter& row, int64_t i) { return row.init.at(1, stream_of(row.name), i); }

// Checks the known elements of the row; the others, divided by their spread, go to `drawn`.
void sort_elements(const Parameter& row, const Start& start, std::vector<double>& drawn) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < row.shape.numel(); ++i) {
    const double got = start_of(row, i);
    const std::optional<double> want = start.value(row, i);
    if (want) wrong += !(got == *want);
    else drawn.push_back(got / start.spread(row));
  }
  CHECK(wrong == 0);
}

// Mean 0 and spread 1 within four standard errors, and the range of the distribution.
void check_drawn(const std::vector<double>& x, Drawn from) {
  const double n = static_cast<double>(x.size()), root3 = std::sqrt(3.0) * (1 + 1e-12);
  REQUIRE(n >= 500);
  double sum = 0, square = 0, largest = 0;
  for (const double v : x) sum += v, square += v * v, largest = std::max(largest, std::abs(v));
  CHECK(std::abs(sum / n) < 4 / std::sqrt(n));
  CHECK(std::abs(std::sqrt(square / n) - 1) < 4 / std::sqrt(2 * n));
  if (from == Drawn::uniform) CHECK(largest <= root3);
  else CHECK(largest > 2.5);  // of 500 normal numbers some are; a uniform one never is
}

// A row that the connection leaves to the backbone.
void check_plain(const Parameter& row, const Parameter& plain) {
  CHECK(row.lr_mul == plain.lr_mul);
  CHECK(row.wd_mul == plain.wd_mul);
  for (int64_t i = 0; i < std::min<int64_t>(64, row.shape.numel()); ++i) CHECK(start_of(row, i) == start_of(plain, i));
}

void check_model(const Model& model, bool gpt2) {
  const Config config = config_of(model.choice, gpt2);
  ParameterTable params = declared(config), plain = declared(plain_of(config));
  std::vector<std::vector<double>> drawn(model.rules.size());
  std::vector<int> rows(model.rules.size());
  for (const Parameter& row : params.rows()) {
    CAPTURE(row.name);
    size_t which = 0;
    while (which < model.rules.size() && row.name.find(model.rules[which].part) == std::string::npos) ++which;
    if (which == model.rules.size()) {
      REQUIRE_MESSAGE(plain.contains(row.name), "no rule for what " << model.choice << " adds");
      check_plain(row, plain.at(row.name));
      continue;
    }
    const Rule& rule = model.rules[which];
    ++rows[which];
    CHECK(row.lr_mul == rule.lr_mul);
    CHECK(row.wd_mul == rule.wd_mul);
    sort_elements(row, rule.start, drawn[which]);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(model.rules[i].part);
    CHECK(rows[i] > 0);
    if (model.rules[i].start.drawn != Drawn::no) check_drawn(drawn[i], model.rules[i].start.drawn);
  }
}

// The model and the plain one as they come, every number by its rule.
Twin new_twin(const Config& config) {
  Twin twin(config);
  twin.plain.params.initialise(1);
  twin.model.params.initialise(1);
  return twin;
}

}  // namespace

TEST_CASE("initial: the backbone starts normal with spread 0.02; gains and embeddings do not decay") {
  ParameterTable params = declared(config_of("llama"));
  const Start matrix = normal(0.02);
  for (const Parameter& row : params.rows()) {
    CAPTURE(row.name);
    CHECK(row.lr_mul == 1);
    CHECK(row.wd_mul == (row.shape.rank == 2 && row.name != "model.embed_tokens.weight" ? 1 : 0));
    std::vector<double> drawn;
    sort_elements(row, row.shape.rank == 2 ? matrix : all(1), drawn);
    if (row.shape.rank == 2) check_drawn(drawn, Drawn::normal);
  }
}

TEST_CASE("initial: a GPT-2's output projections start smaller, biases at 0; only matrices of products decay") {
  for (const bool bias : {true, false}) {
    Config config = config_of("gpt2", true);
    config.bias = bias;
    ParameterTable params = declared(config);
    CHECK(params.contains("lm_head.weight"));
    CHECK(params.contains("model.norm.bias") == bias);
    const std::set<std::string> tables = {"model.embed_tokens.weight", "model.embed_positions.weight"};
    for (const Parameter& row : params.rows()) {
      CAPTURE(row.name);
      const bool matrix = row.shape.rank == 2,
                 output = row.name.ends_with("o_proj.weight") || row.name.ends_with("down_proj.weight");
      CHECK(row.lr_mul == 1);
      CHECK(row.wd_mul == (matrix && !tables.contains(row.name) ? 1 : 0));
      std::vector<double> drawn;
      const Start start = normal(0.02 / (output ? std::sqrt(2.0 * L) : 1));
      sort_elements(row, matrix ? start : all(row.name.ends_with(".bias") ? 0 : 1), drawn);
      if (matrix) check_drawn(drawn, Drawn::normal);
    }
  }
}

TEST_CASE("initial: what architectures add starts, learns and decays as specified, on both backbones") {
  std::map<std::string, int> covered;
  for (const bool gpt2 : {false, true})
    for (const Model& model : all_models(gpt2)) {
      CAPTURE(model.choice);
      CAPTURE(gpt2);
      check_model(model, gpt2);
      ++covered[parse_arch_list(model.choice)[0].arch];
    }
  const std::set<std::string> backbones = {"llama", "gpt2"};
  for (const Architecture& architecture : architectures())
    CHECK_MESSAGE((backbones.contains(architecture.name) || architecture.draft || covered[architecture.name] > 0),
                  architecture.name);
}

TEST_CASE("initial: LIMe's first layer has no router") {
  for (const std::string arch : {"lime", "lime_static", "lime_dynamic"}) {
    const ParameterTable params = declared(config_of(arch));
    for (const Parameter& row : params.rows())
      if (row.name.find("lime_router") != std::string::npos) CHECK_MESSAGE(layer_of(row) > 0, row.name);
  }
}

TEST_CASE("initial: a new denseformer, mudd or hyper with one stream is the plain backbone") {
  const std::vector<std::string> norms = {"input_layernorm_q", "input_layernorm_k", "input_layernorm_v"};
  for (const Config& plain : {tiny_config("llama", 2, true), tiny_gpt2(), tiny_gpt2(false)}) {
    for (const char* choice : {"denseformer", "denseformer:dilation=2:period=3"})
      check_same_bits(new_twin(connected(choice, plain)));
    for (const std::string norm : {"prepost", "none"}) {
      CAPTURE(norm);
      Twin twin = new_twin(connected("mudd:norm=" + norm, plain));
      CHECK(twin.plain.loss() == twin.model.loss());
      check_same(std::move(twin), 1e-6, norms);
    }
    for (const std::string dynamic : {"true", "false"}) {
      CAPTURE(dynamic);
      Twin twin = new_twin(connected("hyper:rate=1:prenorm=rmsnorm:dynamic=" + dynamic, plain));
      CHECK(twin.plain.loss() == twin.model.loss());
      check_same(std::move(twin), 1e-6);
    }
  }
}

TEST_CASE("initial: with decay=routers nothing else decays") {
  for (const std::string arch : {"lime", "lime:routing=first:window=2", "lime_static", "lime_dynamic"}) {
    CAPTURE(arch);
    const ParameterTable usual = declared(config_of(arch));
    const ParameterTable only = declared(config_of(arch + ":decay=routers"));
    REQUIRE(usual.rows().size() == only.rows().size());
    int routers = 0;
    for (size_t i = 0; i < only.rows().size(); ++i) {
      const Parameter &row = only.rows()[i], &before = usual.rows()[i];
      const bool router = row.name.find("lime_router") != std::string::npos;
      CAPTURE(row.name);
      CHECK(row.wd_mul == (router ? 1 : 0));
      CHECK((row.name == before.name && row.lr_mul == before.lr_mul && row.init.rule == before.init.rule));
      routers += router;
    }
    CHECK(routers == L - 1);
  }
}
