#include "eval/loss.h"

#include <algorithm>
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

MeanLoss mean_loss(Device& device, Tape& tape, const Graph& graph, const Source& source, int64_t sequences) {
  const int64_t B = graph.tokens->shape[0], T = graph.tokens->shape[1];
  MeanLoss mean;
  mean.sequences = std::min(sequences, source.size());
  std::vector<int32_t> tokens(static_cast<size_t>(B * T)), targets(tokens.size());
  double sum = 0;
  for (int64_t first = 0; first < mean.sequences; first += B) {
    for (int64_t b = 0; b < B; ++b) {
      source.read(std::min(first + b, mean.sequences - 1), &tokens[static_cast<size_t>(b * T)],
                  &targets[static_cast<size_t>(b * T)]);
      // The last batch may be only partly full.
      if (first + b >= mean.sequences) std::fill_n(&targets[static_cast<size_t>(b * T)], T, -1);
    }
    mean.scored += std::count_if(targets.begin(), targets.end(), [](int32_t target) { return target >= 0; });
    load_batch(device, graph, tokens.data(), targets.data());
    tape.forward(Step{});
    sum += sum_losses(device, graph);
  }
  if (mean.scored > 0) mean.loss = sum / static_cast<double>(mean.scored);
  return mean;
}

}  // namespace crossply
