// Of attnres: what the mixtures in front of sublayers read, in the mean over tokens, with their entropies.
#include <cmath>

#include "cli/format.h"
#include "eval/inside/routing/routing.h"
#include "kernels/block/softmax.h"

namespace crossply {
namespace {

// The sources of every mixture, those of attention and feed-forward parts in turn, and the last one's, by the model's
// rule: 0 is the embeddings, j what sublayer j - 1 has put out, or the sum of its block with that.
std::vector<std::vector<size_t>> sources_of(const RoutingInput& in) {
  const int64_t block = in.config.integer("attn_res_block_size");
  std::vector<std::vector<size_t>> read;
  std::vector<size_t> finished;
  for (int64_t j = 0; j <= 2 * in.layers(); ++j) {
    read.push_back(finished);
    read.back().push_back(static_cast<size_t>(j));
    if (block == 0 || j % (2 * block) == 0) finished.push_back(static_cast<size_t>(j));
  }
  return read;
}

// proj * gain of mixture j.
std::vector<double> query_of(const RoutingInput& in, int64_t j) {
  const std::string rows = j == 2 * in.layers()
                               ? "model.output_attn_res"
                               : str("model.layers.", j / 2, j % 2 == 0 ? ".self_attention_res" : ".mlp_res");
  std::vector<double> query = in.parameter(rows + "_proj.weight");
  const std::vector<double> gain = in.parameter(rows + "_norm.weight");
  for (size_t c = 0; c < query.size(); ++c) query[c] *= gain[c];
  return query;
}

struct MeanWeights {
  RoutingRows rows;             // by mixture and source
  std::vector<double> entropy;  // of a token's weights, by mixture
};

MeanWeights mean_weights(const RoutingInput& in, const std::vector<std::vector<size_t>>& read) {
  const size_t M = read.size(), C = static_cast<size_t>(in.config.hidden_size);
  MeanWeights mean{routing_rows(M, M), std::vector<double>(M)};
  RoutingRows queries;
  std::vector<std::string> names;
  for (size_t j = 0; j < M; ++j) {
    queries.push_back(query_of(in, static_cast<int64_t>(j)));
    names.push_back(str("source.", j));
    for (const size_t s : read[j]) mean.rows[j][s] = 0;
  }
  double tokens = 0;
  in.run_all(names, [&](int64_t n) {
    tokens += static_cast<double>(n);
    for (size_t t = 0; t < static_cast<size_t>(n); ++t)
      for (size_t j = 0; j < M; ++j) {
        std::vector<double> logits, weights(read[j].size());
        for (const size_t s : read[j]) {
          const double* x = &in.probe.at(names[s])[t * C];
          double squares = 0, product = 0;
          for (size_t c = 0; c < C; ++c) squares += x[c] * x[c], product += queries[j][c] * x[c];
          logits.push_back(product / std::sqrt(squares / static_cast<double>(C) + in.config.norm_eps));
        }
        softmax_row_ref(weights.data(), logits.data(), static_cast<int64_t>(weights.size()));
        for (size_t i = 0; i < weights.size(); ++i) mean.rows[j][read[j][i]] += weights[i];
        mean.entropy[j] += map_entropy(weights);
      }
  });
  for (size_t j = 0; j < M; ++j) {
    for (double& w : mean.rows[j]) w /= tokens;
    mean.entropy[j] /= tokens;
  }
  return mean;
}

RoutingFound look_attnres(const RoutingInput& in) {
  const auto read = sources_of(in);
  const MeanWeights mean = mean_weights(in, read);
  const std::string panel = "entropy of a token's weights over depth in nats; the most there could be: ln(sources)";
  RoutingCurve attention{"entropy.attention", panel, {}}, mlp{"entropy.mlp", panel, {}},
      most{"the most, attention", panel, {}, {}, {}, true};
  RoutingFound found;
  found.table = {{"layer", "attn: newest", "embedding", "most beside", "mlp: newest", "embedding", "mlp entropy"}};
  for (size_t l = 0; l < static_cast<size_t>(in.layers()); ++l) {
    const std::vector<double>&a = mean.rows[2 * l], &m = mean.rows[2 * l + 1];
    attention.y.push_back(mean.entropy[2 * l]), mlp.y.push_back(mean.entropy[2 * l + 1]);
    most.y.push_back(std::log(static_cast<double>(read[2 * l].size())));
    found.table.push_back({str(l), routing_number(a[2 * l]), routing_number(a[0]), largest_of(a, 2 * l),
                           routing_number(m[2 * l + 1]), routing_number(m[0]), routing_number(mlp.y.back())});
  }
  found.notes =
      "newest: weight of the last source, the sum so far or the latest output;\n"
      "most beside: the largest of the others; entropy: of a token's weights, in nats\n";
  found.bands = {
      {"weight of each source (column; 0: the embeddings) by the mixture (row; attention and feed-forward "
       "part of each layer in turn, then the last)",
       HeatScale::shares,
       {{"weights", "mean over tokens", mean.rows}}}};
  found.curves = {attention, mlp, most};
  return found;
}

}  // namespace

std::vector<RoutingKind> routing_of_attnres() {
  return {
      {"attnres", true, look_attnres,
       "attnres: the weights a of a mixture, softmax_s(<w.g, x_s> / rms(x_s)), in the mean over tokens; source 0 is "
       "the embeddings, source j what sublayer j - 1 has put out, or with blocks the sum of its block up to there. "
       "Entropy: of a token's weights, then the mean. Layers and sources count from 0.",
       "Attention residuals: arXiv 2603.15031. The paper's maps are not compared here."}};
}

}  // namespace crossply
