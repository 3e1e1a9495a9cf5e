// Of lime (LIMe's second version): how much of each layer's key/value heads the layers above read.
#include <cmath>

#include "eval/inside/routing/routing.h"

namespace crossply {
std::vector<double> lime_weights(const RoutingInput& in, int l) {
  const int64_t K = in.config.num_key_value_heads, columns = (l + 1) * K, window = in.config.integer("window");
  const std::string& routing = in.config.text("routing");
  std::vector<double> W(static_cast<size_t>(K * columns));
  if (l == 0 || routing == "average" || routing == "own") {
    const int first = routing == "own" ? l : 0;
    for (int64_t h = 0; h < K; ++h)
      for (int64_t s = first; s <= l; ++s) W[static_cast<size_t>(h * columns + s * K + h)] = 1.0 / (l + 1 - first);
    return W;
  }
  W = in.parameter(str("model.layers.", l, ".self_attn.lime_router.weight"));
  for (size_t i = 0; i < W.size(); ++i) {  // entries that the model passes over
    const int64_t s = static_cast<int64_t>(i) % columns / K;
    const bool read = routing == "last" ? s > l - window : routing == "first" ? s < window || s == l : true;
    if (!read) W[i] = 0;
  }
  return W;
}

namespace {

void normalise_shares(std::vector<double>& row, int l) {
  double sum = 0;
  for (int j = 0; j <= l; ++j) sum += row[static_cast<size_t>(j)];
  for (int j = 0; j <= l; ++j) row[static_cast<size_t>(j)] /= sum;
}

RoutingFound look_lime(const RoutingInput& in) {
  const auto L = static_cast<size_t>(in.layers()), K = static_cast<size_t>(in.config.num_key_value_heads);
  RoutingMap layers{"layer_map", "all heads", routing_rows(L, L)};
  std::vector<RoutingMap> heads;
  for (size_t h = 0; h < K; ++h) heads.push_back({str("head_map.", h), str("head ", h), routing_rows(L, L)});
  RoutingFound found;
  found.table = {{"layer", "itself", "layer 0", "layer 1", "most beside itself"}};
  for (size_t l = 0; l < L; ++l) {
    const std::vector<double> W = lime_weights(in, static_cast<int>(l));
    for (size_t j = 0; j <= l; ++j) {
      double all = 0;
      for (size_t h = 0; h < K; ++h) {
        double sum = 0;
        for (size_t from = 0; from < K; ++from) sum += std::abs(W[h * (l + 1) * K + j * K + from]);
        heads[h].rows[l][j] = sum / static_cast<double>(K);
        all += sum;
      }
      layers.rows[l][j] = all / static_cast<double>(K * K);
    }
    normalise_shares(layers.rows[l], static_cast<int>(l));
    for (RoutingMap& head : heads) normalise_shares(head.rows[l], static_cast<int>(l));
    const std::vector<double>& row = layers.rows[l];
    found.table.push_back({str(l), routing_number(row[l]), routing_number(row[0]), L > 1 ? routing_number(row[1]) : "-",
                           largest_of(row, l)});
  }
  found.bands = {{"share of |router weight| by layer (row) and the layer whose keys and values it reads",
                  HeatScale::shares,
                  {layers}},
                 {"the same for each key/value head of the reading layer", HeatScale::shares, heads}};
  found.notes = "itself and the layers below sum to 1; a plain LLaMA would have 1 at \"itself\"\n";
  return found;
}

}  // namespace

std::vector<RoutingKind> routing_of_lime() {
  return {
      {"lime", false, look_lime,
       "lime: A[l,j] is the mean over all pairs of key/value heads of |router weight| with which layer l reads layer "
       "j, divided by the sum over j <= l; for a head's map, the mean over the source heads alone. Weights are "
       "signed, so these are magnitudes. Layers count from 0; a plain LLaMA would be the identity.",
       "LIMe (arXiv 2502.09245, version 2): layers 2 to 4 (from 1) rely on the first layer's keys and values, and the "
       "last layers return to those of the first two."}};
}

}  // namespace crossply
