// Of vertical: the maps of its scores and of the mixtures that tokens really get, with their entropies.
#include <cmath>

#include "cli/format.h"
#include "eval/inside/routing/routing.h"
#include "kernels/block/softmax.h"

namespace crossply {
namespace {

constexpr double vertical_norm_eps = 1e-12;  // as in the model, added to squared norms

// Row l of alpha: of the scores, or of a fixed map.
std::vector<double> alpha_of(const RoutingInput& in, int l) {
  std::vector<double> alpha(static_cast<size_t>(l) + 1);
  const std::string& map = in.config.text("map");
  if (map == "learned") {
    const std::vector<double> scores = in.parameter(str("model.layers.", l, ".vertical_attention.scores"));
    softmax_row_ref(alpha.data(), scores.data(), l + 1);
    return alpha;
  }
  const int L = in.layers(), mirrored = L - 2 - l + static_cast<int>(in.config.integer("mirror_offset"));
  double count = 0;
  for (int i = 0; i <= l; ++i) {
    const bool read = i == l || (map == "inet" ? i < 2 : l >= (L + 1) / 2 && i == mirrored);
    alpha[static_cast<size_t>(i)] = read, count += read;
  }
  for (double& x : alpha) x /= count;
  return alpha;
}

double mean_map_entropy(const RoutingRows& rows) {
  double sum = 0;
  for (const auto& row : rows) sum += map_entropy(row);
  return sum / static_cast<double>(rows.size());
}

// The mean over tokens of every layer's softmax_i(ln alpha_i - ln |h^i|).
RoutingRows mean_tilde(const RoutingInput& in, const RoutingRows& alpha) {
  const size_t L = alpha.size(), C = static_cast<size_t>(in.config.hidden_size);
  RoutingRows mean = routing_rows(L, L);
  for (size_t l = 0; l < L; ++l) std::fill_n(mean[l].begin(), l + 1, 0.0);
  std::vector<std::string> names;
  for (size_t i = 0; i < L; ++i) names.push_back(str("hidden.", i));
  double tokens = 0;
  std::vector<double> norms(L), weights(L);
  in.run_all(names, [&](int64_t n) {
    tokens += static_cast<double>(n);
    for (size_t t = 0; t < static_cast<size_t>(n); ++t) {
      for (size_t i = 0; i < L; ++i) {
        const double* h = &in.probe.at(names[i])[t * C];
        double squares = vertical_norm_eps;
        for (size_t c = 0; c < C; ++c) squares += h[c] * h[c];
        norms[i] = std::sqrt(squares);
      }
      for (size_t l = 0; l < L; ++l) {
        double sum = 0;
        for (size_t i = 0; i <= l; ++i) sum += weights[i] = alpha[l][i] / norms[i];
        for (size_t i = 0; i <= l; ++i) mean[l][i] += weights[i] / sum;
      }
    }
  });
  for (auto& row : mean)
    for (double& x : row) x /= tokens;
  return mean;
}

RoutingFound look_vertical(const RoutingInput& in) {
  const auto L = static_cast<size_t>(in.layers());
  RoutingRows alpha = routing_rows(L, L);
  for (size_t l = 0; l < L; ++l) {
    const std::vector<double> row = alpha_of(in, static_cast<int>(l));
    std::copy(row.begin(), row.end(), alpha[l].begin());
  }
  const RoutingRows tilde = mean_tilde(in, alpha);
  const double most = std::lgamma(static_cast<double>(L) + 1) / static_cast<double>(L);
  const double e_alpha = mean_map_entropy(alpha), e_tilde = mean_map_entropy(tilde);
  RoutingFound found;
  const std::string panel = "entropy of a layer's weights in nats; the most there could be: ln(layer + 1)";
  RoutingCurve of_alpha{"row_entropy.alpha", panel, {}}, of_tilde{"row_entropy.tilde", panel, {}},
      largest{"the most", panel, {}, {}, {}, true};
  found.table = {{"layer", "alpha: below", "embedding", "tilde: below", "embedding", "most beside it", "entropy"}};
  for (size_t l = 0; l < L; ++l) {
    of_alpha.y.push_back(map_entropy(alpha[l])), of_tilde.y.push_back(map_entropy(tilde[l]));
    largest.y.push_back(std::log(static_cast<double>(l) + 1));
    found.table.push_back({str(l), routing_number(alpha[l][l]), routing_number(alpha[l][0]),
                           routing_number(tilde[l][l]), routing_number(tilde[l][0]), largest_of(tilde[l], l),
                           routing_number(of_tilde.y.back())});
  }
  found.bands = {{"weight of each representation (column; 0: the embeddings) by the layer (row) that mixes them",
                  HeatScale::shares,
                  {{"alpha", "alpha", alpha}, {"tilde", "alpha~, mean", tilde}}}};
  found.curves = {of_alpha, of_tilde, largest};
  found.facts = {{"entropy.alpha", e_alpha}, {"entropy.tilde", e_tilde}, {"entropy.most", most}};
  const auto share = [&](double e) { return most > 0 ? format_number(" (%.1f%%)", 100 * e / most) : std::string(); };
  found.notes = str("entropy of alpha ", routing_number(e_alpha), share(e_alpha), ", of alpha~ ",
                    routing_number(e_tilde), share(e_tilde), ", at most ", routing_number(most), " nats\n");
  return found;
}

}  // namespace

std::vector<RoutingKind> routing_of_vertical() {
  return {
      {"vertical", true, look_vertical,
       "vertical: alpha, the softmax of a layer's scores (or its fixed map), and alpha~, what a token's mixture gets: "
       "softmax_i(ln alpha_i - ln |h^i|), in the mean over tokens; h^0 is the embeddings, and the diagonal the layer "
       "below, which alone a plain layer reads. Entropy: the mean over layers of -sum a ln a, in nats; ln(L!)/L with "
       "equal weights. Layers count from 0.",
       "Vertical attention (openreview.net, A6uabXKiXc): learned maps are strong on the diagonal and on the first and "
       "second representation, and sparse in the middle. Not the paper's numbers, but computed from the maps that it "
       "prints, of alpha or of alpha~, which it does not say: entropies of 0.920, 1.121 and 1.415 nats for 6, 8 and 12 "
       "layers, 84 to 85 % of the most there could be."}};
}

}  // namespace crossply
