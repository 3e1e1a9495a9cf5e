#include "eval/attention_probe.h"

#include <algorithm>
#include <cmath>

#include "engine/numbers.h"
#include "eval/batch_model.h"

namespace crossply {
namespace {

std::vector<double> copy_of(const Tensor& tensor, Device& device) {
  std::vector<double> numbers;
  with_real(tensor.dtype, [&](auto real) {
    std::vector<decltype(real)> host(static_cast<size_t>(tensor.numel()));
    device.copy_out(host.data(), tensor.data, tensor.bytes());
    numbers.assign(host.begin(), host.end());
  });
  return numbers;
}

bool all_finite(const std::vector<double>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x); });
}

// The layer of a node: names begin with "L3.".
int layer_of(const Node& node) {
  const auto layer = node.name[0] == 'L' ? parse_integer(node.name.substr(1, node.name.find('.') - 1)) : std::nullopt;
  CHECK_THAT(layer, node.op(), " ", node.name, " does not say by its name, like L3.attn, which layer it belongs to");
  return static_cast<int>(*layer);
}

}  // namespace

AttentionInputs::AttentionInputs(const ops::AttentionNode& node, Device& device)
    : scale_(node.scale),
      finite_output_(all_finite(copy_of(node.out[0]->tensor, device))),
      T_(node.in[0]->shape[1]),
      H_(node.in[0]->shape[2]),
      K_(node.in[1]->shape[2]),
      D_(node.in[0]->shape[3]),
      q_(copy_of(node.in[0]->tensor, device)),
      k_(copy_of(node.in[1]->tensor, device)) {}

void AttentionInputs::probabilities(int64_t b, int64_t h, int64_t n, double* P) const {
  std::fill_n(P, n * n, 0.0);
  for (int64_t t = 0; t < n; ++t) {
    const double* q = &q_[static_cast<size_t>(((b * T_ + t) * H_ + h) * D_)];
    double *row = P + t * n, max = -INFINITY, sum = 0;
    for (int64_t j = 0; j <= t; ++j) {
      const double* k = &k_[static_cast<size_t>(((b * T_ + j) * K_ + h / (H_ / K_)) * D_)];
      double dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < D_; ++d) dot += q[d] * k[d];
      row[j] = scale_ * dot;
      max = std::max(max, row[j]);
    }
    for (int64_t j = 0; j <= t; ++j) sum += row[j] = std::exp(row[j] - max);
    for (int64_t j = 0; j <= t; ++j) row[j] /= sum;
  }
}

AttentionProbe::AttentionProbe(Device& device, ParameterTable& params, const Config& config, int64_t T)
    : device_(device), tape_(params.dtype()), graph_(record_model(tape_, params, config, 1, T)) {
  for (size_t n = 0; n < tape_.nodes().size(); ++n)
    if (const auto* node = dynamic_cast<const ops::AttentionNode*>(tape_.nodes()[n].get()))
      ops_.push_back({n, layer_of(*node), node->in[0]->shape[2]});
  tape_.plan(PlanMode::reuse);  // what an op reads is still there right after it
  tape_.allocate(device_);
}

void AttentionProbe::run(const int32_t* tokens, const std::function<void(size_t, const AttentionInputs&)>& see) {
  const std::vector<int32_t> targets(static_cast<size_t>(graph_.tokens->shape.numel()),
                                     -1);  // the loss is not asked for
  load_batch(device_, graph_, tokens, targets.data());
  size_t next = 0;
  tape_.watch([&](size_t n, bool) {
    if (next == ops_.size() || ops_[next].node != n) return;
    see(next, AttentionInputs(dynamic_cast<const ops::AttentionNode&>(*tape_.nodes()[n]), device_));
    ++next;
  });
  tape_.forward(Step{});
}

}  // namespace crossply
