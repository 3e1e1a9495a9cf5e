// Of depth_attention: the shares with which a layer's values are mixed from those of lower layers and its own.
#include <cmath>

#include "cli/format.h"
#include "eval/inside/routing/routing.h"
#include "kernels/block/softmax.h"

namespace crossply {
namespace {

// The layers whose values layer l mixes, by the model's rule; its own is the last.
std::vector<size_t> mixed_by(const RoutingInput& in, int l) {
  const int64_t given = in.config.integer("depth_stride"), stride = given > 0 ? given : std::max(1, in.layers() / 2);
  std::vector<size_t> layers;
  for (int j = 0; j < l && l >= in.config.integer("depth_start"); ++j)
    if (j % stride == 0 || j >= l - in.config.integer("depth_recent")) layers.push_back(static_cast<size_t>(j));
  layers.push_back(static_cast<size_t>(l));
  return layers;
}

// The shares of the layers `mixed`, the reader last, in head k of token t: from queries and keys of its own.
std::vector<double> shares_of(const RoutingInput& in, const std::vector<size_t>& mixed, size_t t, size_t k) {
  const auto D = static_cast<size_t>(in.config.head_dim), H = static_cast<size_t>(in.config.num_attention_heads);
  const auto K = static_cast<size_t>(in.config.num_key_value_heads), G = H / K;
  const double* queries = &in.probe.at(str("query.", mixed.back()))[(t * H + k * G) * D];
  std::vector<double> logits, shares(mixed.size());
  for (const size_t j : mixed) {
    const double* key = &in.probe.at(str("mixing_key.", j))[(t * K + k) * D];
    double dot = 0;
    for (size_t i = 0; i < G * D; ++i) dot += queries[i] * key[i % D];
    logits.push_back(dot / (static_cast<double>(G) * std::sqrt(static_cast<double>(D))));
  }
  softmax_row_ref(shares.data(), logits.data(), static_cast<int64_t>(shares.size()));
  return shares;
}

RoutingFound look_depth_attention(const RoutingInput& in) {
  const auto L = static_cast<size_t>(in.layers()), K = static_cast<size_t>(in.config.num_key_value_heads);
  RoutingMap map{"shares", "mean over tokens and heads", routing_rows(L, L)};
  std::vector<double> entropy(L, 0);
  std::vector<std::vector<size_t>> mixed;
  std::vector<std::string> names;
  for (size_t l = 0; l < L; ++l) {
    mixed.push_back(mixed_by(in, static_cast<int>(l)));
    for (const size_t j : mixed[l]) map.rows[l][j] = 0;
    names.push_back(str("query.", l)), names.push_back(str("mixing_key.", l));
  }
  double heads = 0;  // of all tokens
  in.run_all(names, [&](int64_t n) {
    heads += static_cast<double>(n) * static_cast<double>(K);
    for (size_t l = 0; l < L; ++l)
      for (size_t row = 0; row < static_cast<size_t>(n) * K; ++row) {
        const std::vector<double> shares = shares_of(in, mixed[l], row / K, row % K);
        for (size_t s = 0; s < shares.size(); ++s) map.rows[l][mixed[l][s]] += shares[s];
        entropy[l] += map_entropy(shares);
      }
  });
  RoutingCurve curve{
      "entropy", "entropy of a head's shares over depth in nats; the most there could be: ln(layers)", {}},
      most{"the most", curve.panel, {}, {}, {}, true};
  RoutingFound found;
  found.table = {{"layer", "its own", "layer 0", "most beside", "entropy"}};
  for (size_t l = 0; l < L; ++l) {
    for (double& share : map.rows[l]) share /= heads;
    curve.y.push_back(entropy[l] / heads), most.y.push_back(std::log(static_cast<double>(mixed[l].size())));
    found.table.push_back({str(l), routing_number(map.rows[l][l]), routing_number(map.rows[l][0]),
                           largest_of(map.rows[l], l), routing_number(curve.y.back())});
  }
  found.notes = "shares of values, mean over tokens and heads; \"of\" j: layer j's, mixed there\n";
  found.bands = {{"share of each layer's values (column) in those that a layer (row) attends to",
                  HeatScale::shares,
                  {map},
                  "layer, from 0"}};
  found.curves = {curve, most};
  return found;
}

}  // namespace

std::vector<RoutingKind> routing_of_depth_attention() {
  return {{"depth_attention", true, look_depth_attention,
           "depth_attention: the weights a of a layer's values, softmax_j(<m, k_j> / sqrt(D)) with m the mean of a "
           "group's queries, in the mean over tokens and key/value heads; source j stands for its values as it mixed "
           "them. Entropy: of a head's weights, then the mean. Layers count from 0.",
           "Depth-Attention: arXiv 2606.05014. The paper's maps are not compared here."}};
}

}  // namespace crossply
