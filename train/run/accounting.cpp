#include "train/run/accounting.h"

#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "kernels/devices.h"
#include "kernels/optim/muon_matrices.h"
#include "models/model.h"
#include "train/settings/gpus.h"

namespace crossply {
namespace {

bool is_table(const Parameter& row) { return row.role == Role::embedding || row.role == Role::table; }

bool is_multiplied(const Parameter& row, bool tied) {
  switch (row.role) {
    case Role::head:
    case Role::input_projection:
    case Role::output_projection:
    case Role::width_router: return true;
    case Role::embedding: return tied && row.name == "model.embed_tokens.weight";
    default: return row.between_widths;
  }
}

}  // namespace

Accounting account(const TrainPlan& plan, const ParameterTable& params, double flops_per_token) {
  const Config& c = plan.config;
  Accounting all;
  all.parameters = params.count(), all.flops_per_token = flops_per_token;
  const auto without_tables = [](const ParameterTable& table) {
    int64_t sum = 0;
    for (const Parameter& row : table.rows()) sum += is_table(row) ? 0 : row.shape.numel();
    return sum;
  };
  for (const Parameter& row : params.rows())
    if (is_multiplied(row, c.tie_word_embeddings)) all.matrix += row.shape.numel();
  all.non_embedding = without_tables(params);
  ParameterTable by_application;
  declare_applications(by_application, applied(c));
  const int64_t R = stack_passes(c), heads = c.loop.exit_gate ? R : 1;
  for (const Parameter& row : by_application.rows())
    if (!is_table(row)) all.applied += row.shape.numel() * (row.role == Role::head ? heads : R);
  const int64_t A = applications_of(c).count() * R;
  all.attention_of_palm =
      12.0 * static_cast<double>(A * c.num_attention_heads * c.head_dim) * static_cast<double>(plan.data.seq_len);
  const std::vector<const Parameter*> matrices = muon_matrices(params);
  all.muon_matrices = std::ssize(matrices);
  const size_t steps = newton_schulz_of(plan.muon.polynomial, plan.muon.steps).steps.size();
  for (const Parameter* row : matrices) {
    all.muon_parameters += row->shape.numel();
    all.newton_schulz += newton_schulz_flops(row->shape[0], row->shape[1], steps);
  }
  return all;
}

double peak_flops(const TrainPlan& plan, const Device& device, int ranks) {
  if (backend_of(plan.device) != Backend::cuda || plan.matmul == "fp8") return 0;
  return ranks * peak_flops(device.describe(), storage_type(plan));
}

nlohmann::json to_json(const Accounting& a) {
  return {{"parameters", a.parameters},
          {"matrix_parameters", a.matrix},
          {"non_embedding_parameters", a.non_embedding},
          {"flops_per_token", a.flops_per_token},
          {"flops_per_token_6n", a.six_n()},
          {"flops_per_token_palm", a.palm()},
          {"newton_schulz_flops_per_step", a.newton_schulz}};
}

std::string describe(const Accounting& a, double tokens) {
  const auto of_run = [&](double flops) { return format_number("%.4g", flops * tokens); };
  return str("parameters: ", format_count(a.parameters), "\n  ", format_count(a.matrix), " in matrices, ",
             format_count(a.non_embedding), " without embeddings\n",
             "training FLOPs per token: ", format_number("%.4g", a.flops_per_token), "; by 6 N ",
             format_number("%.4g", a.six_n()), ", as PaLM counts ", format_number("%.4g", a.palm()),
             "\n  of the run: ", of_run(a.flops_per_token), "; by 6 N ", of_run(a.six_n()), ", as PaLM counts ",
             of_run(a.palm()), "\n");
}

std::vector<std::string> describe_optimizer(const TrainPlan& plan, const Accounting& a, double tokens) {
  if (!has_muon(plan.optimizer)) return {};
  const double share = a.newton_schulz / (a.newton_schulz + a.flops_per_token * tokens);
  std::vector<std::string> lines = {
      str(plan.optimizer, ": ", format_count(a.muon_matrices), " matrices, ", format_count(a.muon_parameters),
          " parameters at --muon-lr ", plan.muon.lr),
      str("adamw: ", format_count(a.parameters - a.muon_parameters), " parameters at --lr ", plan.lr),
      str("Newton-Schulz: ", format_number("%.3g", 1e-9 * a.newton_schulz), " GFLOP a step, ",
          format_number("%.2g", 100 * share), " % of it")};
  if (share > 0.2) lines.push_back("warning: a larger --accumulate makes Newton-Schulz's share of a step smaller");
  return lines;
}

}  // namespace crossply
