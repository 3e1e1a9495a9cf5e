// Of resformer, satformer, relay and shortcuts: how much of the first layer's values, of those below, or of a table's
// comes in; of sla and ala: which layer's keys and values each head reads.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/io/printable.h"
#include "eval/inside/routing/routing.h"
#include "kernels/block/softmax.h"
#include "models/connection.h"

namespace crossply {
namespace {

const char* const first_panel = "weight of the first layer's values, by layer";

// -----------------------------------------------------------------------------------------------------------------
// ResFormer

struct ValueWeights {
  double first, own;
};

// Of layer n > 0, as in models/resformer.cpp.
ValueWeights value_weights(const RoutingInput& in, int n) {
  const std::string& variant = in.config.text("variant");
  const int64_t L = in.layers(), last_k = in.config.integer("last_k");
  const int64_t most = variant == "sparse" && last_k == 0 ? std::max<int64_t>(1, 3 * L / 8) : last_k;
  if (!takes_first(n, most, L)) return {0, 1};
  if (variant == "identity") return {0.5, 0.5};
  if (variant == "constant") return {2, 1};
  if (variant == "sparse") return {5, 1};
  if (variant == "svformer") return {1, 0};
  const std::string scalars = layer_name(n, "self_attn.value_residual_mixing.");
  const double own = in.parameter(scalars + "lambda2")[0];
  if (variant == "learnable") return {in.parameter(scalars + "lambda1")[0], own};
  const std::vector<double> logits = in.parameter("model.lambda_manager.lambda_logits");
  std::vector<double> shares(logits.size());
  softmax_row_ref(shares.data(), logits.data(), L - 1);
  return {in.parameter("model.lambda_manager.lambda_scale")[0] * shares[static_cast<size_t>(n) - 1], own};
}

RoutingFound look_resformer(const RoutingInput& in) {
  RoutingFound found;
  RoutingCurve first{"first", first_panel, {NAN}}, own{"own", "weight of the layer's own values", {1}};
  found.table = {{"layer", "first layer's values", "own values"}, {"0", "-", "1.000"}};
  for (int n = 1; n < in.layers(); ++n) {
    const ValueWeights w = value_weights(in, n);
    first.y.push_back(w.first), own.y.push_back(w.own);
    found.table.push_back({str(n), routing_number(w.first), routing_number(w.own)});
  }
  found.curves = {first, own};
  return found;
}

// -----------------------------------------------------------------------------------------------------------------
// Gates

RoutingFound look_gates(const RoutingInput& in, const char* panel, const char* heading) {
  const auto L = static_cast<size_t>(in.layers()), K = static_cast<size_t>(in.config.num_key_value_heads);
  std::vector<std::string> names;
  for (size_t n = 0; n < L; ++n)
    if (in.probe.has(str("gate.", n))) names.push_back(str("gate.", n));
  RoutingCurve gates{"mean_gate", panel, std::vector<double>(L, NAN)};  // NaN: a layer without a gate
  for (size_t l = 0; l < L; ++l)
    if (in.probe.has(str("gate.", l))) gates.y[l] = 0;
  double tokens = 0;
  in.run_all(names, [&](int64_t n) {
    tokens += static_cast<double>(n);
    for (size_t l = 0; l < L; ++l) {
      if (!in.probe.has(str("gate.", l))) continue;
      const std::vector<double>& gate = in.probe.at(str("gate.", l));  // (1, T, K)
      gates.y[l] += std::accumulate(gate.begin(), gate.begin() + n * static_cast<int64_t>(K), 0.0);
    }
  });
  RoutingFound found;
  found.table = {{"layer", heading}};
  for (size_t l = 0; l < L; ++l) {
    gates.y[l] /= tokens * static_cast<double>(K);
    found.table.push_back({str(l), routing_number(gates.y[l])});
  }
  found.curves = {gates};
  found.notes = "means over tokens and key/value heads, -: no gate; --what gates tells more\n";
  return found;
}

RoutingFound look_satformer(const RoutingInput& in) {
  return look_gates(in, first_panel, "mean weight of the first layer's values");
}
RoutingFound look_relay(const RoutingInput& in) {
  return look_gates(in, "weight of the values that the layer below used, by layer", "mean weight of the values below");
}

// Of which lane a sublayer writes into the other's.
RoutingCurve lane_curve(const RoutingInput& in, const char* name, const char* panel, int64_t from, int64_t to) {
  const std::vector<double> post = in.parameter("model.lane_post");  // (layers with lanes, 2, 2)
  RoutingCurve curve{name, panel, std::vector<double>(static_cast<size_t>(in.layers()), NAN)};
  for (size_t i = 0, n = post.size() / 4; i < n; ++i)
    curve.y[curve.y.size() - n + i] = post[4 * i + static_cast<size_t>(2 * from + to)];
  return curve;
}

// The mean weights with which shortcuts' tail mixes its three sources: tail 0 into the last layer's stream and perhaps
// its values, tail 1 into the output.
void add_tail(RoutingFound& found, const RoutingInput& in) {
  const std::vector<std::string> sources = {"embedding", "middle", "stream"};
  const std::vector<std::string> outputs[] = {{"last_layer", "last_values"}, {"output"}};
  std::vector<double> bias[2], sums[2];
  for (size_t i = 0; i < 2; ++i) {
    bias[i] = in.parameter(str("model.mudd_tail.", i, ".bias"));
    sums[i].resize(bias[i].size());
  }
  double tokens = 0;
  in.run_all({"tail.0", "tail.1"}, [&](int64_t n) {
    tokens += static_cast<double>(n);
    for (size_t i = 0; i < 2; ++i)
      for (size_t e = 0; e < sums[i].size() * static_cast<size_t>(n); ++e)
        sums[i][e % sums[i].size()] += in.probe.at(str("tail.", i))[e];
  });
  for (size_t i = 0; i < 2; ++i)
    for (size_t k = 0; k < sums[i].size(); ++k)
      found.facts.emplace_back(str("tail.", outputs[i][k / 3], ".", sources[k % 3]),
                               sums[i][k] / tokens + 0.1 * bias[i][k]);
}

RoutingFound look_shortcuts(const RoutingInput& in) {
  RoutingFound found = look_gates(in, "gate of the values that are added, by layer", "mean gate of the added values");
  const auto L = static_cast<size_t>(in.layers());
  const auto numbers = [&](const char* flag, const char* name, double without) {
    return in.config.flag(flag) ? in.parameter(name) : std::vector<double>(L, without);
  };
  std::vector<RoutingCurve> curves = {
      {"resid", "factor of the stream before a layer", numbers("resid", "model.resid_lambdas", 1)},
      {"x0", "weight of the embedding before a layer", numbers("x0", "model.x0_lambdas", 0)}};
  if (in.config.flag("unet") && L > 1) {
    const std::vector<double> skips = in.parameter("model.skip_weights");
    RoutingCurve skip{"skip", "weight of the mirrored layer's output", std::vector<double>(L, NAN)};
    std::copy(skips.begin(), skips.end(), skip.y.end() - std::ssize(skips));
    curves.push_back(skip);
  }
  if (in.config.integer("lanes_from") > 0) {
    curves.push_back(lane_curve(in, "attn_to_1", "factor of attention's output in the MLP's lane", 0, 1));
    curves.push_back(lane_curve(in, "mlp_to_0", "factor of the MLP's output in attention's lane", 1, 0));
  }
  for (const RoutingCurve& curve : curves) {
    found.table[0].push_back(curve.name);
    for (size_t l = 0; l < L; ++l) found.table[l + 1].push_back(routing_number(curve.y[l]));
    found.curves.push_back(curve);
  }
  if (in.config.flag("backout")) found.facts.emplace_back("backout", in.parameter("model.backout_lambda")[0]);
  if (in.config.text("mudd_tail") != "none") add_tail(found, in);
  return found;
}

// -----------------------------------------------------------------------------------------------------------------
// Skipping heads

// What attention reads, and what each layer has to choose from: its values; in a combination, another part of which may
// have changed these, or made all layers' the same, its keys.
std::pair<const char*, const char*> read_and_own(const Probe& probe) {
  return probe.has("given_key.0") ? std::pair{"key.", "given_key."} : std::pair{"value.", "own_value."};
}

// The layer whose values, among those of layers 0 .. l, key/value head `from`, head `at` of layer l's attention reads,
// seen in the numbers.
size_t layer_read(const RoutingInput& in, size_t l, int64_t at, int64_t from) {
  const Probe& probe = in.probe;
  const auto [reads, owns] = read_and_own(probe);
  const auto same = [&, value = str(reads, l)](size_t s) {
    const std::string own = str(owns, s);
    if (!probe.has(own)) return false;  // a layer without values of its own
    const int64_t heads = probe.shape(value)[2], own_heads = probe.shape(own)[2], D = probe.shape(own)[3];
    for (int64_t t = 0; t < probe.shape(own)[1]; ++t)
      if (!std::equal(&probe.at(value)[static_cast<size_t>((t * heads + at) * D)],
                      &probe.at(value)[static_cast<size_t>((t * heads + at) * D)] + D,
                      &probe.at(own)[static_cast<size_t>((t * own_heads + from) * D)]))
        return false;
    return true;
  };
  for (size_t s = l + 1; s-- > 0;)
    if (same(s)) return s;
  fail(Exit::internal, in.name, ": head ", at, " of layer ", l, " reads the values of no layer");
}

RoutingFound look_skips(const RoutingInput& in) {
  const auto L = static_cast<size_t>(in.layers()), H = static_cast<size_t>(in.config.num_attention_heads);
  const auto [read, own] = read_and_own(in.probe);
  std::vector<std::string> names;
  for (size_t l = 0; l < L; ++l)
    for (const std::string& one : {str(read, l), str(own, l)})
      if (in.probe.has(one)) names.push_back(one);
  in.run_any(names);
  RoutingMap shares{"share_of_heads", "share of heads", routing_rows(L, L)};
  RoutingMap reads{"layer_read", "layer read by each head (column)", routing_rows(L, H)};
  RoutingFound found;
  found.table = {{"layer", "heads that read another layer", "and which"}};
  for (size_t l = 0; l < L; ++l) {
    const auto group = static_cast<int64_t>(H) / in.config.num_key_value_heads;
    const auto shared = static_cast<int64_t>(H) / in.probe.shape(str("value.", l))[2];
    std::fill_n(shares.rows[l].begin(), l + 1, 0.0);
    std::string which;
    size_t skipping = 0;
    for (size_t j = 0; j < H; ++j) {
      const size_t s = layer_read(in, l, static_cast<int64_t>(j) / shared, static_cast<int64_t>(j) / group);
      reads.rows[l][j] = static_cast<double>(s);
      shares.rows[l][s] += 1 / static_cast<double>(H);
      skipping += s != l;
    }
    for (size_t s = 0; s < l; ++s)
      if (shares.rows[l][s] > 0) which += (which.empty() ? "" : " ") + str(s);
    found.table.push_back({str(l), str(skipping, " of ", H), which.empty() ? "-" : excerpt(which)});
  }
  found.bands = {{"share of a layer's query heads (row) that read the keys and values of a layer (column)",
                  HeatScale::shares,
                  {shares}},
                 {"which layer that is, for each query head (column) of a layer (row)",
                  HeatScale::shares,
                  {reads},
                  "query head, from 0"}};
  return found;
}

const char* const skips_measured =
    "sla, ala, kv_share: which layer's keys and values each query head reads, a fixed choice of the architecture, "
    "found by the values that reach attention. Layers count from 0; in a plain model each reads its own.";

RoutingKind skips_of(const char* arch, const char* paper) {
  return {arch, false, look_skips, skips_measured, paper, true};
}

}  // namespace

std::vector<RoutingKind> routing_of_values() {
  return {
      {"resformer", false, look_resformer,
       "resformer: the weights of the first layer's values and of a layer's own in what its attention reads (0 and 1 "
       "where it does not mix). Layers count from 0.",
       "ResFormer (arXiv 2410.17897): the paper's own picture is not at hand, so nothing is claimed of it."},
      {"satformer", true, look_satformer,
       "satformer: the mean gate, over tokens and key/value heads, with which a layer adds the first layer's values. "
       "Layers count from 0.",
       "SATFormer (arXiv 2605.03953): gates are near zero in early and middle layers and large for a few late heads."},
      {"relay", true, look_relay,
       "relay: the mean gate, over tokens and key/value heads, with which a layer adds the values that the layer below "
       "used. Layers count from 0.",
       "Relay is an example of this repository, of no paper."},
      {"shortcuts", true, look_shortcuts,
       "shortcuts: the mean gate, over tokens and key/value heads, with which a layer adds values of a table or of the "
       "embedding, and the factors of the stream, of the embedding and of the mirrored layer's output in front of each "
       "layer, or between two lanes. Layers count from 0.",
       "Embedding shortcuts come from speed-run codes, of which no such picture is at hand."},
      skips_of(
          "sla",
          "Skip-layer attention (arXiv 2406.11274) is a design; no picture of it is compared with here. As others "
          "report, its best for 12 layers, a small GPT-2, is 9 heads that read 9 layers below. The vertical attention "
          "paper (openreview.net, A6uabXKiXc) lets 1 of 3 heads read 4 layers below in a model of 6 layers, 3 of 6 "
          "read 6 below in one of 8, and 6 of 12 read 9 below in one of 12, and shows no map of it."),
      skips_of(
          "kv_share",
          "Cross-layer attention (arXiv 2405.12981) and the shared suffix of Gemma 3n are designs; there is nothing to "
          "compare a map with."),
      skips_of("ala",
               "Adaptive layerwise attention (arXiv 2409.10870) is a design; here in the simple form of the vertical "
               "attention paper (openreview.net, A6uabXKiXc), whose last layer's heads each read another one of every "
               "second layer, and which shows no map of it.")};
}

}  // namespace crossply
