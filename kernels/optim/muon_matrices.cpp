#include "kernels/optim/muon_matrices.h"

#include <algorithm>

namespace crossply {
namespace {

constexpr double beta2 = 0.95;           // NorMuon's
constexpr double first_momentum = 0.85;  // of a warm-up

}  // namespace

std::vector<const Parameter*> muon_matrices(const ParameterTable& params) {
  std::vector<const Parameter*> matrices;
  for (const Parameter& row : params.rows())
    if (row.muon) matrices.push_back(&row);
  std::sort(matrices.begin(), matrices.end(),
            [](const Parameter* a, const Parameter* b) { return a->offset < b->offset; });
  return matrices;
}

Range muon_range(const ParameterTable& params) {
  const std::vector<const Parameter*> matrices = muon_matrices(params);
  if (matrices.empty()) return {};
  const Range range{matrices.front()->offset, matrices.back()->offset + matrices.back()->shape.numel()};
  for (const Parameter& row : params.rows())
    CHECK_THAT(row.muon || row.offset < range.begin || row.offset >= range.end, row.name, " lies among the matrices");
  return range;
}

int64_t muon_row_moments(const ParameterTable& params) {
  int64_t rows = 0;
  for (const Parameter* matrix : muon_matrices(params)) rows += matrix->shape[0];
  return rows;
}

MuonMatrices::MuonMatrices(ParameterTable& params, const MuonOptions& options, double weight_decay, bool cautious)
    : params_(params),
      options_(options),
      iteration_(newton_schulz_of(options.polynomial, options.steps)),
      cautious_(cautious),
      range_(muon_range(params)),
      matrices_(muon_matrices(params)) {
  if (empty()) return;
  Device& device = params.device();
  flat_ = part_of(params.gradients(), range_);
  if (params.bf16_copy_bytes() > 0) {
    directions_ = Arena(device, "Muon's directions", static_cast<size_t>(range_.size()) * size_of(Dtype::bf16));
    flat_ = {directions_.data(), Dtype::bf16, Shape{range_.size()}};
  }
  const int64_t moments = options.normalize_rows ? muon_row_moments(params) : 0;
  if (moments > 0)
    moments_ = Arena(device, "second moments of rows", static_cast<size_t>(moments) * size_of(params.dtype()));
  int64_t next = 0;
  for (const Parameter* row : matrices_) {
    const int64_t begin = row->offset - range_.begin, m = row->shape[0];
    rows_.push_back({begin, begin + row->shape.numel(), row->lr_mul, weight_decay * row->wd_mul,
                     muon_scale_of(options.scale, m, row->shape[1])});
    each_.push_back(part_of(flat_, {begin, begin + row->shape.numel()}));
    each_.back().shape = row->shape;
    row_moments_.emplace_back();
    if (moments > 0) row_moments_.back() = part_of({moments_.data(), params.dtype(), Shape{moments}}, {next, next + m});
    next += m;
  }
}

double MuonMatrices::momentum_at(int64_t k) const {
  if (options_.momentum_warmup == 0) return options_.momentum;
  const double done = std::min(1.0, static_cast<double>(k) / static_cast<double>(options_.momentum_warmup));
  return first_momentum + (options_.momentum - first_momentum) * done;
}

Tensor MuonMatrices::row_moments(const Parameter& row) const {
  const auto found = std::find(matrices_.begin(), matrices_.end(), &row);
  return found == matrices_.end() ? Tensor{} : row_moments_[static_cast<size_t>(found - matrices_.begin())];
}

void MuonMatrices::update(const Tensor& m, const Tensor& factor, const Tensor& numbers) {
  if (empty()) return;
  const Stream stream = params_.device().stream();
  muon_momentum(flat_, m, part_of(params_.gradients(), range_), factor, numbers, options_.nesterov, stream);
  newton_schulz(each_, iteration_, stream);
  for (size_t i = 0; options_.normalize_rows && i < each_.size(); ++i)
    normalize_rows(each_[i], row_moments_[i], beta2, factor, stream);
  muon_update(part_of(params_.values(), range_), part_of(params_.bf16_copy(), range_), flat_, factor, numbers, rows_,
              cautious_, stream);
}

}  // namespace crossply
