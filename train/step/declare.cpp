#include "train/step/declare.h"

#include <algorithm>

#include "data/digest.h"
#include "models/combined.h"

namespace crossply {

void declare(ParameterTable& params, const TrainPlan& plan) {
  declare_model(params, plan.config);
  const Config& c = plan.config;
  if (plan.initial_config && plan.initial_config->arch != c.arch) start_beside(plan.initial_config->arch, params, c);
  if (plan.initial_config && !has_engram(*plan.initial_config)) start_engram_as_plain(params);
  for (Parameter& row : params.rows()) {
    if (plan.router_lr > 0 && row.follows_router_lr()) row.lr_mul = plan.router_lr / plan.lr;
    if (plan.freeze_routers && row.weighs()) row.lr_mul = 0;
    if (plan.decay_all) row.wd_mul = 1;
    row.muon = has_muon(plan.optimizer) && row.matrix() && row.lr_mul != 0;
  }
  apply_transfer(params, c, plan.transfer, plan.muon.scale, plan.init.empty());
}

Batch batch_of(const TrainPlan& plan, int64_t T, Teacher* teacher) {
  return {.B = plan.batch,
          .T = T,
          .dtype = storage_type(plan),
          .plan = plan_mode(plan.plan),
          .teacher = teacher,
          .z_loss = plan.z_loss,
          .eight_bits = plan.matmul == "fp8",
          .documents = plan.documents};
}

std::string digest_of(const ParameterTable& params) {
  Digest digest;
  for (const Tensor& weights : {params.values(), params.bf16_copy()}) {
    const size_t bytes = weights.data != nullptr ? weights.bytes() : 0;
    std::vector<std::byte> piece(std::min(bytes, size_t{64} << 20));
    for (size_t at = 0; at < bytes; at += piece.size()) {
      const size_t n = std::min(piece.size(), bytes - at);
      params.device().copy_out(piece.data(), static_cast<const std::byte*>(weights.data) + at, n);
      digest.add(piece.data(), n);
    }
  }
  return str(std::hex, digest.value());
}

}  // namespace crossply
