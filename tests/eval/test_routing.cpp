// analyze --what routing and circuits: what they say of the models, against what the models compute.
#include "engine/io/json.h"
#include "tests/support/cases.h"
#include "tests/support/routed.h"

using namespace crossply;
using namespace crossply::test;

namespace {

double number(double x) { return std::isfinite(x) ? x : 0; }

// Every row and what it should be; NaN: nothing there.
void check_rows(const RoutingRows& rows, const RoutingRows& want, double tolerance = 1e-12) {
  REQUIRE(rows.size() == want.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    REQUIRE(rows[r].size() == want[r].size());
    for (size_t c = 0; c < rows[r].size(); ++c) {
      CAPTURE(r);
      CAPTURE(c);
      CHECK(std::isfinite(rows[r][c]) == std::isfinite(want[r][c]));
      CHECK(number(rows[r][c]) == doctest::Approx(number(want[r][c])).epsilon(tolerance));
    }
  }
}
RoutingRows lower_triangle(size_t L, double below, double diagonal) {
  RoutingRows rows = routing_rows(L, L);
  for (size_t l = 0; l < L; ++l)
    for (size_t j = 0; j <= l; ++j) rows[l][j] = j < l ? below : diagonal;
  return rows;
}

// The first C numbers of `name` are the sum over sources of weights[i] times those of source(i).
void check_mixture(Routed& r, const std::string& name, double scale, const std::vector<double>& weights,
                   const std::function<std::string(size_t)>& source) {
  CAPTURE(name);
  for (int64_t c = 0; c < r.model.config.hidden_size; ++c) {
    double sum = 0, size = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!std::isfinite(weights[i])) continue;
      sum += weights[i] * r.at(source(i), c), size += std::abs(weights[i] * r.at(source(i), c));
    }
    CHECK(std::abs(sum - r.at(name, c) / scale) <= 3e-6 * (size + 1e-3));
  }
}
std::string hidden_name(size_t i) { return str("hidden.", i); }

std::vector<Case> routed_cases() {
  std::vector<Case> list;
  for (const Case& c : cases())
    if ((c.config.arch == "lime" || !has_loop(c.config)) && !find_routings(c.config).parts.empty()) list.push_back(c);
  return list;
}

}  // namespace

TEST_CASE("routing: lime's maps are of the weights that the values are mixed with") {
  for (const Case& c : routed_cases()) {
    if (c.config.arch != "lime") continue;
    CAPTURE(c.name);
    Routed r(c.config);
    const RoutingFound found = r.look();
    r.run();
    Probe probe(*r.model.device, r.model.params, r.model.config, 1, routing_tokens, "tiny");
    const int64_t K = c.config.num_key_value_heads, D = c.config.head_dim;
    for (int l = 0; l < r.layers(); ++l) {
      const std::vector<double> W = lime_weights(r.input(probe), l);
      std::vector<double> all(static_cast<size_t>(l) + 1);
      double total = 0;
      for (int64_t h = 0; h < K; ++h) {
        std::vector<double> head(all.size());
        double head_total = 0;
        for (int64_t d = 0; d < D; ++d) {
          double sum = 0;
          for (int64_t s = 0; s <= l; ++s)
            for (int64_t k = 0; k < K; ++k)
              sum += W[static_cast<size_t>(h * (l + 1) * K + s * K + k)] * r.at(str("own_value.", s), k * D + d);
          CHECK(sum == doctest::Approx(r.at(str("value.", l), h * D + d)).epsilon(1e-5).scale(0.1));
        }
        for (int64_t i = 0; i < (l + 1) * K; ++i) {
          const double x = std::abs(W[static_cast<size_t>(h * (l + 1) * K + i)]);
          head[static_cast<size_t>(i / K)] += x, all[static_cast<size_t>(i / K)] += x, total += x, head_total += x;
        }
        for (size_t j = 0; j < head.size(); ++j)
          CHECK(map_of(found, str("head_map.", h))[static_cast<size_t>(l)][j] ==
                doctest::Approx(head[j] / head_total).epsilon(1e-12));
      }
      for (size_t j = 0; j < all.size(); ++j)
        CHECK(map_of(found, "layer_map")[static_cast<size_t>(l)][j] == doctest::Approx(all[j] / total).epsilon(1e-12));
    }
  }
  Routed plain(tiny_config("lime"));
  plain.start(true);
  check_rows(map_of(plain.look(), "layer_map"), lower_triangle(4, 0, 1));
  check_rows(map_of(plain.look(), "head_map.1"), lower_triangle(4, 0, 1));
}

TEST_CASE("routing: of LIMe's first version, what heads retrieve and what top-p prunes") {
  for (const Case& c : routed_cases()) {
    if (!c.config.arch.starts_with("lime_") || is_combined(c.config.arch)) continue;
    CAPTURE(c.name);
    Routed r(c.config);
    const RoutingFound found = r.look();
    r.run();
    const auto K = static_cast<size_t>(c.config.num_key_value_heads);
    const RoutingRows& mean = map_of(found, "mean_retrieval");
    double zeros = 0;
    for (size_t l = 1; l < 4; ++l) {
      const size_t H = static_cast<size_t>(c.config.num_attention_heads), D = static_cast<size_t>(c.config.head_dim);
      const std::vector<float> Wo =
          r.model.params.read(r.model.params.at(str("model.layers.", l, ".self_attn.o_proj.weight")).value);
      double expected = 0, norms = 0;
      std::vector<double> retrieved(l + 1);
      for (size_t h = 0; h < H; ++h) {
        double squares = 0;
        for (size_t i = 0; i < Wo.size(); ++i)
          if (i % (H * D) / D == h) squares += static_cast<double>(Wo[i] * Wo[i]);
        norms += std::sqrt(squares);
        const size_t k = h / (H / K);
        for (size_t m = 0; m <= l; ++m) {
          const double p = r.at(str("route.", l), static_cast<int64_t>(k * (l + 1) + m));
          expected += std::sqrt(squares) * static_cast<double>(m) * p;
          retrieved[m] += p / static_cast<double>(H);
          CHECK(map_of(found, str("router_map.", k))[l][m] == doctest::Approx(p).epsilon(1e-6));
          if (m == l) CHECK(map_of(found, "self_retrieval_by_head")[l][k] == doctest::Approx(p).epsilon(1e-6));
          zeros += h % (H / K) == 0 && p == 0;
        }
      }
      for (size_t m = 0; m <= l; ++m) CHECK(mean[l][m] == doctest::Approx(retrieved[m]).epsilon(1e-6));
      CHECK(curve_of(found, "self_retrieval")[l] == mean[l][l]);
      CHECK(curve_of(found, "expected_stream")[l] == doctest::Approx(expected / norms).epsilon(1e-6));
    }
    CHECK(curve_of(found, "retrieved_without_self")[1] ==
          doctest::Approx((mean[2][1] + mean[3][1]) / 2).epsilon(1e-12));
    CHECK(curve_of(found, "retrieved_with_self")[1] ==
          doctest::Approx((mean[1][1] + mean[2][1] + mean[3][1]) / 3).epsilon(1e-12));
    CHECK(curve_of(found, "retrieved_with_self")[0] == curve_of(found, "retrieved_without_self")[0]);
    CHECK(std::isnan(curve_of(found, "retrieved_without_self")[3]));
    CHECK(curve_of(found, "retrieved_with_self")[3] == mean[3][3]);
    if (c.config.arch != "lime_static") continue;
    CHECK(fact_of(found, "pruned_in_training") == (c.config.number("top_p") < 1));
    if (c.config.number("top_p") < 1) CHECK(fact_of(found, "pruned") == zeros);
    CHECK(fact_of(found, "router_weights") == static_cast<double>(K) * 9);
  }
}

TEST_CASE("routing: uniform static routers of 32 layers and 8 heads lose 288 weights at 0.9, as published") {
  Config config = tiny_config("llama");
  config.num_hidden_layers = 32, config.num_attention_heads = config.num_key_value_heads = 8, config.head_dim = 2;
  Routed r(connected("lime_static", config));
  set(r.model, "lime_router.weight", 0);
  const RoutingFound found = r.look();
  CHECK(fact_of(found, "pruned") == 288);
  CHECK(fact_of(found, "pruned_top_p") == 0.9);
  CHECK(fact_of(found, "pruned_in_training") == 0);
  CHECK(fact_of(found, "router_weights") == 4216);
  CHECK(fact_of(found, "router_cells_of_paper") == 7936);
  CHECK(curve_of(found, "self_retrieval")[31] == doctest::Approx(1.0 / 32).epsilon(1e-6));
  CHECK(curve_of(found, "expected_stream")[31] == doctest::Approx(15.5).epsilon(1e-6));
}

TEST_CASE("routing: alpha~ of vertical attention is what its mixtures are made with") {
  for (const Case& c : routed_cases()) {
    if (c.config.arch != "vertical") continue;
    CAPTURE(c.name);
    Routed r(c.config);  // one token
    const RoutingFound found = r.look();
    r.run();
    for (size_t l = 0; l < 4; ++l) check_mixture(r, str("mixed.", l), 1, map_of(found, "tilde")[l], hidden_name);
  }
  Routed r(tiny_config("vertical"));
  r.start(false);
  RoutingRows uniform = routing_rows(4, 4);
  for (size_t l = 0; l < 4; ++l) std::fill_n(uniform[l].begin(), l + 1, 1 / static_cast<double>(l + 1));
  check_rows(map_of(r.look(), "alpha"), uniform);
  r.start(true);
  check_rows(map_of(r.look(), "alpha"), lower_triangle(4, 0, 1));
  check_rows(map_of(r.look(), "tilde"), lower_triangle(4, 0, 1));
  CHECK(fact_of(r.look(), "entropy.tilde") == 0);
}

TEST_CASE("routing: the entropies of vertical attention's fixed and uniform maps are the published ones") {
  struct Published {
    int64_t layers;
    double uniform, inet, unet;
  };
  for (const auto& [layers, uniform, inet, unet] :
       {Published{6, 1.0965, 0.848, 0.3466}, {8, 1.3256, 0.911, 0.3466}, {12, 1.6656, 0.973, 0.3466}}) {
    Config config = tiny_config("llama");
    config.num_hidden_layers = layers;
    const auto entropy = [&](const std::string& arch) {
      Routed r(connected(arch, config));
      r.start(false);
      const RoutingFound found = r.look();
      CHECK(fact_of(found, "entropy.most") == doctest::Approx(uniform).epsilon(1e-4));
      return fact_of(found, "entropy.alpha");
    };
    CHECK(std::abs(entropy("vertical") - uniform) < 5.1e-5);
    CHECK(std::abs(entropy("vertical:map=inet") - inet) < 5.1e-4);
    CHECK(std::abs(entropy("vertical:map=unet") - unet) < 5.1e-5);
  }
}

namespace {

// Gated streams of which no channel is read by another factor than the rest, so that means over channels say all.
void gate_evenly(TinyModel& model) {
  for (const Parameter& row : model.params.rows()) {
    if (!has(row.name, "mix_weight_up") && !has(row.name, "hc_norm")) continue;
    const int64_t columns = row.shape.rank == 1 ? 1 : row.shape[1], stream = columns * model.config.hidden_size;
    model.fill(row.name, [=](int64_t i) { return std::sin(static_cast<double>(i / stream * columns + i % columns)); });
  }
}

}  // namespace

TEST_CASE("routing: the outputs times the coefficients of several streams are what their sublayers read") {
  const auto output = [](size_t t) {
    return t == 0 ? std::string("hidden.0") : str(t % 2 == 1 ? "attn_output." : "mlp_output.", (t - 1) / 2);
  };
  for (const Case& c : routed_cases()) {
    const bool hyper = c.config.arch == "hyper", mhc = c.config.arch == "mhc";
    if (!hyper && !mhc && c.config.arch != "gated_streams") continue;
    CAPTURE(c.name);
    Routed r(c.config);
    if (!hyper && !mhc) gate_evenly(r.model);
    set(r.model, "engram.wkv", 0);  // what it writes is no layer's output, and in no map
    const RoutingFound found = r.look();
    const RoutingRows& coefficients = map_of(found, "coefficients");
    r.run();
    for (size_t s = 0; s < 8; ++s)
      check_mixture(r, str(s % 2 == 0 ? "attn_read." : "mlp_read.", s / 2), 1, coefficients[s], output);
    check_mixture(r, mhc ? "last_out.0" : "hidden.4", hyper ? c.config.number("rate") : 1, coefficients[8], output);
    const RoutingRows& layers = map_of(found, "layers");
    CHECK(layers[1][1] ==
          doctest::Approx((coefficients[2][1] + coefficients[2][2] + coefficients[3][1] + coefficients[3][2]) / 4));
    CHECK(layers[1][2] == coefficients[3][3]);
    CHECK(layers[4][4] == doctest::Approx((coefficients[8][7] + coefficients[8][8]) / 2));
    if (!hyper) continue;
    r.start(false);
    check_rows(map_of(r.look(), "coefficients"), lower_triangle(9, 1, 1));
    RoutingRows folded = lower_triangle(5, 1, 1);
    for (size_t l = 0; l < 4; ++l) folded[l][l + 1] = 1;
    check_rows(map_of(r.look(), "layers"), folded);
  }
}

TEST_CASE("routing: the outputs times the weights of denseformer and mudd are what their blocks read") {
  for (const Case& c : routed_cases()) {
    const bool mudd = c.config.arch == "mudd";
    if (c.config.arch != "denseformer" && !(mudd && c.config.text("norm") == "none")) continue;
    CAPTURE(c.name);
    Routed r(c.config);
    const RoutingFound found = r.look();
    r.run();
    for (size_t i = 1; i < 4; ++i)
      check_mixture(r, str("mixed.", i), 1, map_of(found, mudd ? "mean.stream" : "weights")[i], hidden_name);
    r.start(false);
    const RoutingFound start = r.look();
    for (size_t i = 1; i < 4; ++i)
      for (size_t j = 0; j <= i; ++j)
        for (const char* map : {"mean.query", "mean.key", "mean.value", "mean.stream"}) {
          if (!mudd) map = "weights";
          CHECK(number(map_of(start, map)[i][j]) == (i == j ? 1 : 0));
        }
  }
  Routed r(tiny_config("mudd"));  // the layer below comes on top
  r.start(false);
  const RoutingFound start = r.look();
  for (const auto& row : map_of(start, "mean.value"))
    for (const double x : row) CHECK(number(x) == 0);
}

TEST_CASE("routing: the sources times the weights of attnres are what its sublayers read") {
  for (const Case& c : routed_cases()) {
    if (c.config.arch != "attnres") continue;
    CAPTURE(c.name);
    Routed r(c.config);  // one token
    const RoutingFound found = r.look();
    r.run();
    const auto source = [](size_t i) { return str("source.", i); };
    for (size_t l = 0; l < 4; ++l) check_mixture(r, str("mixed.", l), 1, map_of(found, "weights")[2 * l], source);
    r.start(false);  // all that a mixture reads has the same weight
    const RoutingFound start = r.look();
    for (const auto& row : map_of(start, "weights")) {
      const auto read = static_cast<double>(std::ranges::count_if(row, [](double x) { return std::isfinite(x); }));
      for (const double x : row)
        if (std::isfinite(x)) CHECK(x == doctest::Approx(1 / read));
    }
  }
}

TEST_CASE("routing: the layers of kv_share read their owners") {
  for (const auto& [choice, owners] :
       std::map<std::string, std::vector<int>>{{"kv_share", {0, 0, 2, 2}},
                                               {"kv_share:sharing=suffix:num_kv_shared_layers=2", {0, 1, 1, 1}},
                                               {"kv_share:sharing=list:kv_owners=[0,3]", {0, 0, 0, 3}}}) {
    CAPTURE(choice);
    Routed r(tiny_with(choice, 2));
    const RoutingFound found = r.look();
    for (size_t l = 0; l < 4; ++l) CHECK(map_of(found, "share_of_heads")[l][static_cast<size_t>(owners[l])] == 1);
  }
}

TEST_CASE("routing: values mixed with these weights are what attention reads") {
  for (const Case& c : routed_cases()) {
    const std::string& arch = c.config.arch;
    if (arch != "resformer" && arch != "satformer" && arch != "relay") continue;
    CAPTURE(c.name);
    const int64_t K = c.config.num_key_value_heads, D = c.config.head_dim;
    Routed r(c.config);
    const RoutingFound found = r.look();
    r.run();
    for (size_t n = 1; n < 4; ++n) {
      if (arch == "resformer") {
        const double first = curve_of(found, "first")[n], own = curve_of(found, "own")[n];
        for (int64_t i = 0; i < K * D; ++i)
          CHECK(first * r.at("own_value.0", i) + (own == 0 ? 0 : own * r.at(str("own_value.", n), i)) ==
                doctest::Approx(r.at(str("value.", n), i)).epsilon(1e-5).scale(0.1));
        continue;
      }
      if (!r.values->has(str("gate.", n))) {
        CHECK(std::isnan(curve_of(found, "mean_gate")[n]));
        continue;
      }
      double mean = 0;
      for (int64_t k = 0; k < K; ++k) mean += r.at(str("gate.", n), k) / static_cast<double>(K);
      CHECK(curve_of(found, "mean_gate")[n] == doctest::Approx(mean).epsilon(1e-12));
    }
  }
}

TEST_CASE("routing: the layers that skipping heads read") {
  const auto reads = [](const std::string& choice, int64_t K) {
    Routed r(tiny_with(choice, K, false));
    return map_of(r.look(), choice.find('+') == std::string::npos ? "layer_read" : "sla.layer_read");
  };
  check_rows(reads("sla:distance=1:heads=1", 2), {{0, 0, 0, 0}, {0, 1, 1, 1}, {1, 2, 2, 2}, {2, 3, 3, 3}});
  check_rows(reads("sla:distance=2:heads=3", 4), {{0, 0, 0, 0}, {1, 1, 1, 1}, {0, 0, 0, 2}, {1, 1, 1, 3}});
  check_rows(reads("sla", 2), {{0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}, {0, 0, 3, 3}});
  check_rows(reads("ala", 2), {{0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}, {3, 1, 3, 1}});
  check_rows(reads("ala:stride=1", 1), {{0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}, {3, 2, 1, 0}});
  check_rows(reads("ala:include_self=false", 2), {{0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}, {1, 1, 1, 1}});
  Routed r(tiny_with("ala", 2, false));
  CHECK(map_of(r.look(), "share_of_heads")[3] == std::vector<double>{0, 0.5, 0, 0.5});
  // What another part does to values is not what heads read.
  for (const std::string beside :
       {"resformer", "resformer:variant=svformer", "satformer", "relay", "depth_attention"}) {
    CAPTURE(beside);
    const size_t colon = beside.find(':');
    const std::string arch = beside.substr(0, colon) + "+sla:distance=1:heads=1";
    check_rows(reads(arch + (colon == std::string::npos ? "" : beside.substr(colon)), 2),
               reads("sla:distance=1:heads=1", 2));
  }
}

TEST_CASE("routing: means are over all tokens that count") {
  for (const Case& c : routed_cases()) {
    if (!find_routings(c.config).reads_data()) continue;
    CAPTURE(c.name);
    Routed all(c.config, {3, 1}), three(c.config, {3}), other(c.config, {3, 1});
    other.windows.erase(other.windows.begin());
    const RoutingFound found = all.look(), first = three.look(), second = other.look();
    const auto mean = [](const std::vector<double>& a, const std::vector<double>& b) {
      std::vector<double> row;
      for (size_t i = 0; i < a.size(); ++i) row.push_back((3 * a[i] + b[i]) / 4);
      return row;
    };
    for (const RoutingBand& band : found.bands)
      for (const RoutingMap& map : band.maps) {
        CAPTURE(map.name);
        RoutingRows want;
        for (size_t r = 0; r < map.rows.size(); ++r)
          want.push_back(mean(map_of(first, map.name)[r], map_of(second, map.name)[r]));
        if (map.name.find("spread") == std::string::npos) check_rows(map.rows, want, 1e-9);
      }
    for (const RoutingCurve& curve : found.curves)
      if (curve.name == "mean_gate")
        check_rows({curve.y}, {mean(curve_of(first, curve.name), curve_of(second, curve.name))}, 1e-9);
  }
}

namespace {

std::string saved(const TempDir& scratch, const TinyModel& model, const std::string& name) {
  save_model(scratch.file(name), model.params, model.config);
  return scratch.file(name);
}
// On a shard of tokens that they know.
Outcome analyze(const TempDir& scratch, const std::string& what, const std::vector<std::string>& models) {
  write_shard(scratch.file("x.bin"), {1, 2, 3, 4, 5, 6, 0, 2, 5, 1, 3, 6, 2}, ShardFormat::uint16);
  return test::analyze(scratch, models, scratch.file("x.bin"), str("--what ", what, " --sequences 2 --length 6"));
}

}  // namespace

TEST_CASE("routing: the program tells of every architecture, and refuses a model that routes nothing") {
  const TempDir scratch;
  for (const Architecture& architecture : architectures()) {
    const std::string& arch = architecture.name;
    if (architecture.draft) continue;  // of other tests
    CAPTURE(arch);
    const std::string model = saved(scratch, TinyModel(tiny_config(arch)), arch);
    const Outcome got = analyze(scratch, "routing", {model});
    if (find_routing(arch) == nullptr) {
      const bool plain = arch == "llama" || arch == "gpt2";
      check_outcome(got, Exit::usage, str("a ", arch, plain ? " reads the layer below alone" : " has no maps"));
      continue;
    }
    check_outcome(got, Exit::done, "routing.json, .csv and .svg");
    check_width(got, scratch);
    const nlohmann::json found = out_json(scratch, "routing")["models"][0];
    CHECK(found["arch"] == arch);
    CHECK(found["maps"].size() + found["curves"].size() > 0);
    const std::string svg = out_text(scratch, "routing.svg");
    CHECK(svg.starts_with("<svg xmlns="));
    CHECK(!has(svg, "nan"));
    const std::string csv = out_text(scratch, "routing.csv");
    CHECK(!has(csv, "nan"));
    if (arch == "resformer") CHECK(has(csv, ",first,2,," + json_text(found["curves"]["first"]["y"][2]) + "\n"));
    if (arch == "sla") CHECK(has(svg, ">query head, from 0<"));
    if (arch == "lime_static") CHECK(has(svg, ">key/value head, from 0<"));
    if (arch == "hyper") CHECK(has(svg, "divided by its largest magnitude"));
  }
  // Two beside each other: one picture.
  check_outcome(analyze(scratch, "routing", {scratch.file("vertical"), scratch.file("resformer")}), Exit::done,
                "entropy of alpha ");
  const std::string svg = out_text(scratch, "routing.svg");
  check_has(svg, {">vertical: vertical<", "weight of each", "weight of the first layer's values"});
  CHECK(svg.ends_with("</svg>\n</svg>\n"));
}

namespace {

// What the router's rows are multiplied with for a list of circuits.json.
RoutingRows read_as(const std::string& metric, RoutingRows embeddings, const std::vector<float>& final_gain,
                    bool centred) {
  for (std::vector<double>& e : embeddings) {
    const auto C = static_cast<double>(e.size());
    for (size_t c = 0; c < e.size() && metric == "published"; ++c) e[c] /= static_cast<double>(final_gain[c]);
    const double mean = centred ? std::accumulate(e.begin(), e.end(), 0.0) / C : 0;
    double squares = 0;
    for (const double x : e) squares += (x - mean) * (x - mean);
    for (double& x : e) x = metric == "raw" ? x : (x - mean) / std::sqrt(squares / C);
  }
  return embeddings;
}

double product_of(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// The mean cosine of all pairs, each vector less the mean of all.
double mean_cosine(RoutingRows all) {
  for (size_t c = 0; c < all[0].size(); ++c) {
    double mean = 0;
    for (const auto& e : all) mean += e[c] / static_cast<double>(all.size());
    for (auto& e : all) e[c] -= mean;
  }
  double sum = 0, pairs = 0;
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = 0; j < i; ++j, ++pairs)
      sum += product_of(all[i], all[j]) / std::sqrt(product_of(all[i], all[i]) * product_of(all[j], all[j]));
  return sum / pairs;
}

void check_circuits(const nlohmann::json& found, TinyModel& model) {
  const auto numbers = [&](const std::string& name) { return model.params.read(model.params.at(name).value); };
  const std::vector<float> E = numbers("model.embed_tokens.weight");
  RoutingRows embeddings;
  for (size_t v = 0; v < 7; ++v)
    embeddings.emplace_back(E.begin() + static_cast<int64_t>(v * 8), E.begin() + static_cast<int64_t>(v * 8 + 8));
  for (const nlohmann::json& circuit : found["circuits"]) {
    const size_t l = circuit["layer"], row = circuit["head"].get<size_t>() * (l + 1) + circuit["stream"].get<size_t>();
    const std::vector<float> gain = numbers(str("model.layers.", l, ".lime_layernorm.weight"));
    const std::vector<float> router = numbers(str("model.layers.", l, ".self_attn.lime_router.proj.weight"));
    std::vector<double> u;
    for (size_t c = 0; c < 8; ++c) u.push_back(static_cast<double>(gain[c]) * static_cast<double>(router[row * 8 + c]));
    for (const char* metric : {"unit", "raw", "published"}) {
      CAPTURE(metric);
      const RoutingRows read = read_as(metric, embeddings, numbers("model.norm.weight"), model.config.gpt2());
      const nlohmann::json& nearest = circuit[metric];
      REQUIRE(nearest["ids"].size() == 7);  // all that there are
      for (size_t i = 0; i < 7; ++i) {
        const double want = product_of(read[nearest["ids"][i].get<size_t>()], u);
        CHECK(nearest["scores"][i].get<double>() == doctest::Approx(want).epsilon(1e-6));
        if (i > 0) CHECK(nearest["scores"][i] <= nearest["scores"][i - 1]);
      }
    }
    CHECK(circuit["norm"].get<double>() == doctest::Approx(std::sqrt(product_of(u, u))).epsilon(1e-6));
    CHECK(circuit["consistency"].get<double>() == doctest::Approx(mean_cosine(embeddings)).epsilon(1e-6));
  }
}

}  // namespace

TEST_CASE("circuits: the tokens nearest to the rows of a dynamic router") {
  const TempDir scratch;
  for (const Config& config : {tiny_config("lime_dynamic"), connected("lime_dynamic", tiny_gpt2())}) {
    CAPTURE(config.backbone);
    TinyModel model(config);
    const Outcome got = analyze(scratch, "circuits", {saved(scratch, model, "dynamic")});
    check_outcome(got, Exit::done, " rows of routers; the model has no tokenizer that is read here, so ids");
    check_width(got, scratch);
    const nlohmann::json found = out_json(scratch, "circuits")["models"][0];
    CHECK(found["tokenizer"] == false);
    const auto rows = static_cast<size_t>(config.num_key_value_heads * (2 + 3 + 4));
    REQUIRE(found["circuits"].size() == rows);
    check_circuits(found, model);
    const std::string csv = out_text(scratch, "circuits.csv");
    CHECK(static_cast<size_t>(std::count(csv.begin(), csv.end(), '\n')) == 1 + rows * 3 * 7);
    CHECK(has(csv, json_text(found["circuits"][0]["norm"]) + ","));  // the same digits
  }
  check_outcome(analyze(scratch, "circuits", {saved(scratch, TinyModel(tiny_config("mudd")), "mudd")}), Exit::usage,
                "try --what routing");
  check_outcome(analyze(scratch, "circuits", {saved(scratch, TinyModel(tiny_config("llama")), "llama")}), Exit::usage,
                "try --what attention");
}

TEST_CASE("circuits: tokens are told as text, in one line") {
  const TempDir scratch;
  check_outcome(train(scratch,
                      {"--width", "8", "--ffn", "8", "--layers", "2", "--heads", "2", "--steps", "1", "--data",
                       "arith:3", "--out", scratch.file("run")},
                      "lime_dynamic"),
                Exit::done, "step 1/1");
  const Outcome got = run_program_inside(
      scratch, {"analyze", "--model", scratch.file("run"), "--data", "arith:3", "--what", "circuits"});
  check_outcome(got, Exit::done, "4 rows of routers\n");
  check_width(got, scratch);
}
