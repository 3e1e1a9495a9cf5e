#include "train/run/optimizer_notes.h"

#include "cli/format.h"
#include "kernels/optim/newton_schulz.h"

namespace crossply {

std::vector<std::string> describe_optimizer(const TrainPlan& plan, const ParameterTable& params,
                                            double training_flops) {
  if (plan.optimizer == "adamw") return {};
  const size_t steps = newton_schulz_of(plan.muon.polynomial, plan.muon.steps).steps.size();
  int64_t matrices = 0, elements = 0, others = 0;
  double flops = 0;
  for (const Parameter& row : params.rows()) {
    (row.muon ? elements : others) += row.shape.numel();
    if (!row.muon) continue;
    ++matrices;
    flops += newton_schulz_flops(row.shape[0], row.shape[1], steps);
  }
  const double share = flops / (flops + training_flops);
  std::vector<std::string> lines = {
      str(plan.optimizer, ": ", format_count(matrices), " matrices, ", format_count(elements),
          " parameters at --muon-lr ", plan.muon.lr, " (adamw: ", format_count(others), " at --lr ", plan.lr, "); ",
          format_number("%.3g", 1e-9 * flops), " GFLOP a step, ", format_number("%.2g", 100 * share), " % of it")};
  if (share > 0.2)
    lines.push_back("warning: Newton-Schulz is a large part of a step; a larger --accumulate makes it smaller");
  return lines;
}

}  // namespace crossply
