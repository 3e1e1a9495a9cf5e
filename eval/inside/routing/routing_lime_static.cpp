// Of lime_static and lime_dynamic (LIMe's first version): which earlier stream each key/value head retrieves.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cli/format.h"
#include "eval/inside/routing/routing.h"
#include "kernels/block/softmax.h"

namespace crossply {
namespace {

// p[l] (K, l+1): the weight of stream m for head h of layer l, in the mean over tokens where they have their own;
// nothing for layer 0, which has one stream to read. Stream 0 is the embeddings, stream l is what a plain layer reads.
using Retrieval = std::vector<std::vector<double>>;

Retrieval retrieval_of(const RoutingInput& in) {
  Retrieval p(static_cast<size_t>(in.layers()));
  std::vector<std::string> names;
  for (size_t l = 1; l < p.size(); ++l) names.push_back(str("route.", l));
  if (in.windows.empty()) {
    in.run_any(names);
    for (size_t l = 1; l < p.size(); ++l) p[l] = in.probe.at(names[l - 1]);
    return p;
  }
  int64_t tokens = 0;
  for (size_t l = 1; l < p.size(); ++l) p[l].assign(static_cast<size_t>(in.config.num_key_value_heads) * (l + 1), 0.0);
  in.run_all(names, [&](int64_t n) {
    tokens += n;
    for (size_t l = 1; l < p.size(); ++l) {
      const std::vector<double>& route = in.probe.at(names[l - 1]);  // (1, T, K, l+1)
      for (size_t i = 0; i < static_cast<size_t>(n) * p[l].size(); ++i) p[l][i % p[l].size()] += route[i];
    }
  });
  for (auto& layer : p)
    for (double& x : layer) x /= static_cast<double>(tokens);
  return p;
}

// p(h|r) of the key/value heads: the Frobenius norms of the columns of the output projection that read their query
// heads, as shares.
std::vector<double> head_shares(const RoutingInput& in, size_t l) {
  const auto H = static_cast<size_t>(in.config.num_attention_heads), D = static_cast<size_t>(in.config.head_dim);
  const auto K = static_cast<size_t>(in.config.num_key_value_heads);
  const std::vector<double> Wo = in.parameter(str("model.layers.", l, ".self_attn.o_proj.weight"));  // (C, H*D)
  std::vector<double> squares(H), shares(K);
  for (size_t i = 0; i < Wo.size(); ++i) squares[i % (H * D) / D] += Wo[i] * Wo[i];
  double sum = 0;
  for (size_t h = 0; h < H; ++h) sum += std::sqrt(squares[h]);
  for (size_t h = 0; h < H; ++h) shares[h / (H / K)] += std::sqrt(squares[h]) / sum;
  return shares;
}

// By the rule of top-p: how many weights it sets to 0, of those of all heads and layers with a router.
struct Pruned {
  double p;
  std::vector<int64_t> layers = {};
  int64_t all() const { return std::accumulate(layers.begin(), layers.end(), int64_t{0}); }
};

Pruned pruned_by(const RoutingInput& in, double top_p) {
  Pruned pruned{top_p};
  for (int l = 0; l < in.layers(); ++l) {
    pruned.layers.push_back(0);
    if (l == 0) continue;
    const std::vector<double> logits = in.parameter(str("model.layers.", l, ".self_attn.lime_router.weight"));
    std::vector<float> kept(static_cast<size_t>(l) + 1), row(kept.size());
    for (size_t at = 0; at < logits.size(); at += row.size()) {
      std::vector<float> numbers(logits.begin() + static_cast<std::ptrdiff_t>(at),
                                 logits.begin() + static_cast<std::ptrdiff_t>(at + row.size()));
      softmax_row_ref(row.data(), numbers.data(), l + 1);
      std::fill(kept.begin(), kept.end(), 1.0f);
      prune_row_ref(kept.data(), row.data(), l + 1, top_p);
      pruned.layers.back() += std::count(kept.begin(), kept.end(), 0.0f);
    }
  }
  return pruned;
}

void add_pruned(const RoutingInput& in, RoutingFound& found) {
  const double trained = in.config.number("top_p");
  const Pruned pruned = pruned_by(in, trained < 1 ? trained : 0.9);
  const int64_t L = in.layers(), K = in.config.num_key_value_heads;
  const int64_t causal = K * (L * (L + 1) / 2 - 1), square = K * L * (L - 1);
  found.facts.insert(found.facts.end(), {{"pruned_top_p", pruned.p},
                                         {"pruned_in_training", trained < 1},
                                         {"pruned", static_cast<double>(pruned.all())},
                                         {"router_weights", static_cast<double>(causal)},
                                         {"router_cells_of_paper", static_cast<double>(square)}});
  const auto share = [&](int64_t of) {
    return of == 0 ? "" : format_number(", %.1f%%", 100 * static_cast<double>(pruned.all()) / static_cast<double>(of));
  };
  found.notes += str("top-p ", pruned.p, trained < 1 ? " prunes " : " (not in training) would prune ", pruned.all(),
                     " of ", causal, " router weights", share(causal), "\n");
  found.notes +=
      str("of the ", square, " cells that the paper counts, with those beyond the diagonal", share(square), "\n");
}

// What is said of one layer.
struct Retrieved {
  double self = 0, least = INFINITY, most = -INFINITY, expected = 0;
};

Retrieved retrieved_of(const RoutingInput& in, const std::vector<double>& p, size_t l, std::vector<RoutingMap>& heads,
                       std::vector<double>& mean, std::vector<double>& by_head) {
  Retrieved r;
  const std::vector<double> shares = head_shares(in, l);
  const auto K = static_cast<double>(heads.size());
  std::fill_n(mean.begin(), l + 1, 0.0);
  for (size_t h = 0; h < heads.size(); ++h) {
    for (size_t m = 0; m <= l; ++m) {
      const double x = p[h * (l + 1) + m];
      heads[h].rows[l][m] = x;
      mean[m] += x / K;
      r.expected += shares[h] * static_cast<double>(m) * x;
    }
    const double self = by_head[h] = p[h * (l + 1) + l];
    r.least = std::min(r.least, self), r.most = std::max(r.most, self);
  }
  r.self = mean[l];
  return r;
}

// Of every stream, the mean over the layers above that may read it; self: with the one that reads it as a plain layer
// does.
std::vector<double> mean_by_stream(const RoutingRows& mean, bool self) {
  std::vector<double> by_stream(mean.size(), NAN);
  for (size_t m = 0; m < mean.size(); ++m) {
    double sum = 0, count = 0;
    for (size_t l = std::max<size_t>(1, self ? m : m + 1); l < mean.size(); ++l) sum += mean[l][m], ++count;
    if (count > 0) by_stream[m] = sum / count;
  }
  return by_stream;
}

RoutingFound look_retrieval(const RoutingInput& in) {
  const auto L = static_cast<size_t>(in.layers()), K = static_cast<size_t>(in.config.num_key_value_heads);
  const Retrieval p = retrieval_of(in);
  RoutingMap mean{"mean_retrieval", "mean over heads", routing_rows(L, L)};
  RoutingMap self{"self_retrieval_by_head", "by head", routing_rows(L, K)};
  std::vector<RoutingMap> heads;
  for (size_t h = 0; h < K; ++h) heads.push_back({str("router_map.", h), str("head ", h), routing_rows(L, L)});
  const std::vector<double> none(L, NAN);
  RoutingCurve self_curve{"self_retrieval", "self-retrieval weight by layer: mean over heads, and their range", none,
                          none, none};
  const std::string panel = "expected retrieved stream by layer; a plain layer l retrieves stream l";
  RoutingCurve expected{"expected_stream", panel, none}, plain{"plain", panel, none, {}, {}, true};
  self_curve.shares = true;
  expected.y[0] = plain.y[0] = 0;  // layer 0 has no other
  RoutingFound found;
  found.table = {{"layer", "self-retrieval", "by head", "most beside itself", "expected stream"}};
  for (size_t l = 1; l < L; ++l) {
    const Retrieved r = retrieved_of(in, p[l], l, heads, mean.rows[l], self.rows[l]);
    self_curve.y[l] = r.self, self_curve.low[l] = r.least, self_curve.high[l] = r.most;
    expected.y[l] = r.expected, plain.y[l] = static_cast<double>(l);
    found.table.push_back({str(l), routing_number(r.self), str(routing_number(r.least), " to ", routing_number(r.most)),
                           largest_of(mean.rows[l], l), format_number("%.2f", r.expected)});
  }
  found.bands = {
      {"mean retrieval A[l,m] by layer (row) and stream (column; 0: the embeddings)", HeatScale::shares, {mean}},
      {"self-retrieval p(l|h,l) by layer (row) and key/value head (column)",
       HeatScale::shares,
       {self},
       "key/value head, from 0"},
      {"router maps p(m|h,l) of each key/value head", HeatScale::shares, heads}};
  const char* by_stream = "mean retrieval by stream, over the layers above; without self: but for the next one";
  found.curves = {self_curve,
                  expected,
                  plain,
                  {"retrieved_without_self", by_stream, mean_by_stream(mean.rows, false), {}, {}, false, true},
                  {"retrieved_with_self", by_stream, mean_by_stream(mean.rows, true), {}, {}, false, true}};
  found.notes = "layer 0 has one stream to read; a plain layer l retrieves stream l alone\n";
  if (in.config.arch == "lime_static") add_pruned(in, found);
  return found;
}

const char* const retrieval_measured =
    "lime_static, lime_dynamic: p(m|h,l) is the weight of stream m (0: the embeddings; m: what block m-1 put out) for "
    "key/value head h of layer l, of lime_dynamic in the mean over the tokens. Self-retrieval: p(l|h,l), 1 in a plain "
    "layer; mean retrieval: the mean over heads; expected stream: sum over heads of p(h|l) sum_m m p(m|h,l), with "
    "p(h|l) the share of the head's Frobenius norm in the output projection. Layers count from 0.";
const char* const retrieval_paper =
    "LIMe (arXiv 2502.09245, version 1): static routers' layers 11 to 16 of 16 favour stream 10; dynamic ones' last "
    "layer favours streams 2 to 4; of 128 layers roughly the first 80 are self-retrieving. Top-p 0.9 prunes 23, 21 and "
    "19 % of the cells that it counts for 32, 64 and 128 layers, with those beyond the diagonal; of the router weights "
    "that there are, that is 44, 41 and 37 %.";

}  // namespace

std::vector<RoutingKind> routing_of_lime_v1() {
  return {{"lime_static", false, look_retrieval, retrieval_measured, retrieval_paper},
          {"lime_dynamic", true, look_retrieval, retrieval_measured, retrieval_paper}};
}

}  // namespace crossply
