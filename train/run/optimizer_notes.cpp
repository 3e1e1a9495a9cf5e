#include "train/run/optimizer_notes.h"

#include "cli/format.h"
#include "kernels/optim/muon_matrices.h"

namespace crossply {

std::vector<std::string> describe_optimizer(const TrainPlan& plan, const ParameterTable& params,
                                            double training_flops) {
  if (plan.optimizer == "adamw") return {};
  const size_t steps = newton_schulz_of(plan.muon.polynomial, plan.muon.steps).steps.size();
  const std::vector<const Parameter*> matrices = muon_matrices(params);
  int64_t elements = 0;
  double flops = 0;
  for (const Parameter* row : matrices) {
    elements += row->shape.numel();
    flops += newton_schulz_flops(row->shape[0], row->shape[1], steps);
  }
  const double share = flops / (flops + training_flops);
  std::vector<std::string> lines = {
      str(plan.optimizer, ": ", format_count(std::ssize(matrices)), " matrices, ", format_count(elements),
          " parameters at --muon-lr ", plan.muon.lr),
      str("adamw: ", format_count(params.count() - elements), " parameters at --lr ", plan.lr),
      str("Newton-Schulz: ", format_number("%.3g", 1e-9 * flops), " GFLOP a step, ", format_number("%.2g", 100 * share),
          " % of it")};
  if (share > 0.2) lines.push_back("warning: a larger --accumulate makes Newton-Schulz's share of a step smaller");
  return lines;
}

}  // namespace crossply
