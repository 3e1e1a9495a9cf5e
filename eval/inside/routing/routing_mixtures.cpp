// Of denseformer and mudd: the weights of earlier outputs in the streams that blocks read.
#include <algorithm>
#include <cmath>

#include "eval/inside/routing/routing.h"

namespace crossply {
namespace {

// -----------------------------------------------------------------------------------------------------------------
// DenseFormer

RoutingFound look_denseformer(const RoutingInput& in) {
  const auto L = static_cast<size_t>(in.layers()), dilation = static_cast<size_t>(in.config.integer("dilation"));
  const auto period = static_cast<size_t>(in.config.integer("period"));
  RoutingMap map{"weights", "weights", routing_rows(L + 1, L + 1)};
  RoutingFound found;
  found.table = {{"after block", "its output", "embedding", "smallest other", "largest other"}};
  for (size_t i = 0; i <= L; ++i) {
    std::vector<double>& row = map.rows[i];
    if (i == 0 || i % period != 0) {
      row[i] = 1;  // what comes out is what the next block reads
    } else {
      const std::vector<double> weights = in.parameter(str("model.dwa_modules.alphas.", i - 1, ".weight"));
      for (size_t s = 0; s < weights.size(); ++s) row[i % dilation + s * dilation] = weights[s];
    }
    if (i > 0)
      found.table.push_back(
          {str(i - 1), routing_number(row[i]), routing_number(row[0]), smallest_of(row, i), largest_of(row, i)});
  }
  found.bands = {{"weight of each output (column; 0: the embeddings) in the stream that a block (row) reads",
                  HeatScale::signs,
                  {map}}};
  found.notes = "\"of\": 0 the embeddings, j the output of block j-1; plain: 1 at its output\n";
  return found;
}

// -----------------------------------------------------------------------------------------------------------------
// MUDDFormer

constexpr const char* ways_of_mudd[] = {"query", "key", "value", "stream"};

// One mixture's weights (ways, sources): the static ones, and sums over tokens of the others and of their squares.
struct MuddMixture {
  size_t ways, sources;
  std::vector<double> base, sum, squares;
  void add(const double* dynamic) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += dynamic[i], squares[i] += dynamic[i] * dynamic[i];
  }
};

std::vector<MuddMixture> mudd_mixtures(const RoutingInput& in, double& tokens) {
  std::vector<MuddMixture> all;
  std::vector<std::string> names;
  for (int i = 0; i < in.layers(); ++i) {
    const size_t sources = static_cast<size_t>(i) + 2;
    MuddMixture m{i + 1 < in.layers() ? std::size(ways_of_mudd) : 1,
                  sources,
                  in.parameter(str("model.layers.", i, ".da.static_weight")),
                  {},
                  {}};
    m.sum.resize(m.base.size()), m.squares = m.sum;
    all.push_back(m);
    names.push_back(str("route.", i));
  }
  in.run_all(names, [&](int64_t n) {
    tokens += static_cast<double>(n);
    for (size_t i = 0; i < all.size(); ++i)
      for (size_t t = 0; t < static_cast<size_t>(n); ++t) all[i].add(&in.probe.at(names[i])[t * all[i].base.size()]);
  });
  return all;
}

RoutingFound look_mudd(const RoutingInput& in) {
  const auto L = static_cast<size_t>(in.layers());
  std::vector<RoutingMap> means, spreads;
  for (const char* way : ways_of_mudd) {
    means.push_back({str("mean.", way), way, routing_rows(L + 1, L + 1)});
    spreads.push_back({str("spread.", way), way, routing_rows(L + 1, L + 1)});
  }
  double tokens = 0;
  const std::vector<MuddMixture> mixtures = mudd_mixtures(in, tokens);
  RoutingFound found;
  found.table = {{"reader", "query", "key", "value", "stream"}};
  for (size_t i = 0; i < L; ++i) {
    const MuddMixture& m = mixtures[i];
    std::vector<std::string> cells = {i + 1 < L ? str("layer ", i + 1) : "final norm", "-", "-", "-", "-"};
    for (size_t w = 0; w < m.ways; ++w) {
      const size_t way = m.ways == 1 ? 3 : w;  // the last mixture's one goes to the final norm
      std::vector<double>& row = means[way].rows[i + 1];
      for (size_t s = 0; s < m.sources; ++s) {
        const size_t at = w * m.sources + s;
        const double dynamic = m.sum[at] / tokens;
        row[s] = dynamic + m.base[at];
        spreads[way].rows[i + 1][s] = std::sqrt(std::max(0.0, m.squares[at] / tokens - dynamic * dynamic));
      }
      cells[way + 1] = strongest_of(row);
    }
    found.table.push_back(cells);
  }
  found.bands = {
      {"mean weight of each output (column; 0: the embeddings) in what a layer (row) reads", HeatScale::signs, means},
      {"standard deviation of these weights over tokens", HeatScale::shares, spreads}};
  found.notes = str("strongest mean weights; \"of\": 0 the embeddings, j the output of block j-1\n",
                    in.config.text("norm") == "prepost"
                        ? "the layer below comes on top of these; all 0 at the start of training\n"
                        : "a plain model has 1 at the layer below\n");
  return found;
}

}  // namespace

std::vector<RoutingKind> routing_of_mixtures() {
  return {
      {"denseformer", false, look_denseformer,
       "denseformer: the weight a_i[j] of X_j (X_0: the embeddings, X_j: what block j-1 has put out) in the stream Y_i "
       "that block i reads, or the final norm for the last i; with sign. Where no average is taken (period), the "
       "block's output goes on as it is; white: not among the sources (dilation). A plain model is the identity.",
       "DenseFormer (arXiv 2402.02622): the paper's own picture is not at hand, so nothing is claimed of it."},
      {"mudd", true, look_mudd,
       "mudd: the weight of X_j (X_0: the embeddings, X_j: what block j-1 has put out), a token's own plus the static "
       "one, in what layer i reads as queries, keys, values and residual stream; the last row's stream goes to the "
       "final norm. Mean over tokens, with sign, and standard deviation. With norms around the mixture (prepost) "
       "X_j is normalised, and the layer below comes on top.",
       "MUDDFormer (arXiv 2502.12170): the paper's own picture is not at hand, so nothing is claimed of it."}};
}

}  // namespace crossply
