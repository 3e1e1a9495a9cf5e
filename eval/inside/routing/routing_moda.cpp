// Of moda: the shares of a query's one softmax that go to the sequence and to what lower layers kept for the token.
#include <cmath>

#include "cli/format.h"
#include "eval/inside/routing/routing.h"
#include "kernels/block/softmax.h"

namespace crossply {
namespace {

// What a layer attends to beside the sequence: keys by their names in the probe, of which layer, and of its MLP or not.
struct Slot {
  size_t layer;
  bool mlp;
  std::string key() const { return str(mlp ? "depth_key." : "key.", layer); }
};
std::vector<Slot> slots_of(const RoutingInput& in, int64_t reader) {
  const int64_t window = in.config.integer("depth_window");
  std::vector<Slot> slots;
  for (int64_t u = window > 0 ? std::max<int64_t>(0, reader - window) : 0; u < reader; ++u) {
    if (reader < in.config.integer("depth_start")) break;
    slots.push_back({static_cast<size_t>(u), false});
    if (in.config.flag("ffn_kv")) slots.push_back({static_cast<size_t>(u), true});
  }
  return slots;
}

// The shares of one layer, summed over tokens and heads: of the sequence, then of each slot.
class Shares {
 public:
  Shares(const RoutingInput& in, size_t layer, const std::vector<Slot>& slots)
      : sizes_(in.probe.sizes(in.probe.attentions()[layer])),
        scale_(1 /
               (std::sqrt(static_cast<double>(sizes_.D)) * attention_divisor(in.config, static_cast<int64_t>(layer)))),
        queries_(&in.probe.at(str("query.", layer))),
        keys_(&in.probe.at(str("key.", layer))) {
    for (const Slot& slot : slots) slots_.push_back(&in.probe.at(slot.key()));
  }
  void add(int64_t t, int64_t h, std::vector<double>& sums) {
    const double* q = &(*queries_)[static_cast<size_t>(sizes_.query_head(0, h) + t * sizes_.query_stride)];
    logits_.clear();
    for (int64_t j = sizes_.lower(0, t); j <= t; ++j) logits_.push_back(logit(q, *keys_, j, h));
    const size_t seen = logits_.size();
    for (const auto* slot : slots_) logits_.push_back(logit(q, *slot, t, h));
    shares_.resize(logits_.size());
    softmax_row_ref(shares_.data(), logits_.data(), static_cast<int64_t>(shares_.size()));
    for (size_t i = 0; i < shares_.size(); ++i) sums[i < seen ? 0 : i + 1 - seen] += shares_[i];
  }

 private:
  double logit(const double* q, const std::vector<double>& keys, int64_t row, int64_t h) const {
    const double* key = &keys[static_cast<size_t>(sizes_.key_head(0, h / sizes_.group) + row * sizes_.key_stride)];
    double dot = 0;
    for (int64_t d = 0; d < sizes_.D; ++d) dot += q[d] * key[d];
    return scale_ * dot;
  }

  AttentionSizes sizes_;
  double scale_;
  const std::vector<double>*queries_, *keys_;
  std::vector<const std::vector<double>*> slots_;
  std::vector<double> logits_, shares_;
};

// Means over tokens and heads, by layer: of the sequence, then of each slot.
RoutingRows mean_shares(const RoutingInput& in, const std::vector<std::vector<Slot>>& slots) {
  RoutingRows means;
  std::vector<std::string> names;
  for (size_t l = 0; l < slots.size(); ++l) {
    means.emplace_back(slots[l].size() + 1, 0.0);
    names.push_back(str("query.", l)), names.push_back(str("key.", l));
    for (const Slot& slot : slots[l])
      if (slot.mlp) names.push_back(slot.key());
  }
  const int64_t H = in.config.num_attention_heads;
  double heads = 0;  // of all tokens
  in.run_all(names, [&](int64_t n) {
    heads += static_cast<double>(n * H);
    for (size_t l = 0; l < slots.size(); ++l) {
      Shares shares(in, l, slots[l]);
      for (int64_t row = 0; row < n * H; ++row) shares.add(row / H, row % H, means[l]);
    }
  });
  for (auto& row : means)
    for (double& share : row) share /= heads;
  return means;
}

RoutingFound look_moda(const RoutingInput& in) {
  const auto L = static_cast<size_t>(in.layers());
  std::vector<std::vector<Slot>> slots;
  for (size_t l = 0; l < L; ++l) slots.push_back(slots_of(in, static_cast<int64_t>(l)));
  const RoutingRows means = mean_shares(in, slots);
  RoutingMap attention{"attention_slots", "the sequence, and lower layers' attention", routing_rows(L, L)};
  RoutingMap mlp{"mlp_slots", "lower layers' MLPs", routing_rows(L, L)};
  RoutingCurve depth{"depth", "share of a layer's attention that goes to what lower layers kept", {}};
  depth.shares = true;
  RoutingFound found;
  found.table = {{"layer", "the sequence", "attention's", "most", "the MLPs'", "most"}};
  for (size_t l = 0; l < L; ++l) {
    double of_attention = 0, of_mlp = 0;
    for (size_t s = 0; s < slots[l].size(); ++s) {
      const double share = means[l][s + 1];
      (slots[l][s].mlp ? mlp : attention).rows[l][slots[l][s].layer] = share;
      (slots[l][s].mlp ? of_mlp : of_attention) += share;
    }
    const double sequence = means[l][0];
    found.table.push_back({str(l), routing_number(sequence), routing_number(of_attention),
                           largest_of(attention.rows[l], l), routing_number(of_mlp), largest_of(mlp.rows[l], l)});
    attention.rows[l][l] = sequence;
    depth.y.push_back(of_attention + of_mlp);
  }
  found.notes = "shares of one softmax, mean over tokens and heads; \"of\" j: layer j's slot\n";
  found.bands = {{"share of each layer's slots (column) in the attention of a layer (row); the diagonal: the sequence",
                  HeatScale::shares,
                  {attention},
                  "layer, from 0"}};
  if (in.config.flag("ffn_kv")) found.bands[0].maps.push_back(mlp);
  found.curves = {depth};
  return found;
}

}  // namespace

std::vector<RoutingKind> routing_of_moda() {
  return {{"moda", true, look_moda,
           "moda: the shares of a query's softmax over the sequence and the slots of its token together, in the mean "
           "over tokens and heads: of the sequence, of the keys and values of each lower layer's attention, and of "
           "those of its MLP. Layers count from 0.",
           "MoDA: arXiv 2603.15619. The paper's maps are not compared here."}};
}

}  // namespace crossply
