#include "eval/mean_loss.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "engine/buckets.h"

namespace crossply {

MeanLoss mean_loss(BatchModel& model, const Source& source, int64_t sequences, ProcessGroup& group) {
  const int64_t B = model.batch().B, T = model.batch().T, replicas = model.layout().replicas;
  const World& world = group.world;
  MeanLoss mean;
  mean.sequences = sequences > 0 ? std::min(sequences, source.size()) : source.size();
  std::vector<int32_t> tokens(static_cast<size_t>(B * T)), targets(tokens.size());
  // Batch b is rank b % size's; its sums stand at (b % size, b / size, replica).
  const int64_t batches = (mean.sequences + B - 1) / B, each = (batches + world.size - 1) / world.size * replicas;
  Device& device = model.device();
  const Arena arena(device, "sums of losses", static_cast<size_t>(world.size * each) * sizeof(double));
  const Tensor sums{arena.data(), Dtype::f64, Shape{world.size * each}};
  const auto first_of = [&](int64_t b) { return b % world.size * each + b / world.size * replicas; };
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t i = 0; i < B; ++i) {
      const size_t at = static_cast<size_t>(i * T);
      source.read(std::min(b * B + i, mean.sequences - 1), &tokens[at], &targets[at]);
      // The last batch may be only partly full.
      if (b * B + i >= mean.sequences) std::fill_n(&targets[at], T, -1);
    }
    mean.scored += std::count_if(targets.begin(), targets.end(), [](int32_t target) { return target >= 0; });
    if (b % world.size == world.rank)
      model.run(tokens.data(), targets.data(), Step{}, part_of(sums, {first_of(b), first_of(b) + replicas}));
  }
  if (world.rank >= batches) {  // so that devices stay alike in what they have recorded
    model.run(tokens.data(), targets.data(), Step{});
    model.take_losses();
  }
  if (!world.alone()) group.comm().gather(sums), group.comm().wait(group.comm().mark());
  std::vector<double> host(static_cast<size_t>(sums.numel()));
  device.copy_out(host.data(), sums.data, sums.bytes());
  double sum = 0;
  for (int64_t b = 0; b < batches; ++b) {
    const double* of_replicas = &host[static_cast<size_t>(first_of(b))];
    sum += std::accumulate(of_replicas, of_replicas + replicas, 0.0);
  }
  if (mean.scored > 0) mean.loss = sum / static_cast<double>(mean.scored);
  return mean;
}

}  // namespace crossply
