#include "eval/loss.h"

#include <vector>

namespace crossply {

void load_batch(Device& device, const Graph& graph, const int32_t* tokens, const int32_t* targets) {
  device.copy_in(graph.tokens->tensor.data, tokens, graph.tokens->tensor.bytes());
  device.copy_in(graph.targets->tensor.data, targets, graph.targets->tensor.bytes());
}

double sum_losses(Device& device, const Graph& graph) {
  const Tensor& losses = graph.losses->tensor;
  double sum = 0;
  with_real(losses.dtype, [&](auto real) {
    std::vector<decltype(real)> host(static_cast<size_t>(losses.numel()));
    device.copy_out(host.data(), losses.data, losses.bytes());
    for (const auto loss : host) sum += static_cast<double>(loss);
  });
  return sum;
}

}  // namespace crossply
