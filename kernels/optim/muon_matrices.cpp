#include "kernels/optim/muon_matrices.h"

#include <algorithm>
#include <utility>

namespace crossply {
namespace {

constexpr double beta2 = 0.95;           // NorMuon's
constexpr double first_momentum = 0.85;  // of a warm-up

std::vector<const Parameter*> matrices_of(const ParameterTable& params) {
  std::vector<const Parameter*> matrices;
  for (const Parameter& row : params.rows())
    if (row.muon) matrices.push_back(&row);
  std::sort(matrices.begin(), matrices.end(),
            [](const Parameter* a, const Parameter* b) { return a->offset < b->offset; });
  return matrices;
}

}  // namespace

double MuonOptions::momentum_at(int64_t k) const {
  if (momentum_warmup == 0) return momentum;
  const double done = std::min(1.0, static_cast<double>(k) / static_cast<double>(momentum_warmup));
  return first_momentum + (momentum - first_momentum) * done;
}

Range muon_range(const ParameterTable& params) {
  const std::vector<const Parameter*> matrices = matrices_of(params);
  if (matrices.empty()) return {};
  const Range range{matrices.front()->offset, matrices.back()->offset + matrices.back()->shape.numel()};
  for (const Parameter& row : params.rows())
    CHECK_THAT(row.muon || row.offset < range.begin || row.offset >= range.end, row.name, " lies among the matrices");
  return range;
}

MuonMatrices::MuonMatrices(ParameterTable& params, const MuonOptions& options, double weight_decay, bool cautious)
    : params_(params),
      options_(options),
      iteration_(newton_schulz_of(options.polynomial, options.steps)),
      cautious_(cautious),
      range_(muon_range(params)),
      matrices_(matrices_of(params)) {
  if (empty()) return;
  int64_t moments = 0;
  for (const Parameter* row : matrices_) {
    const int64_t begin = row->offset - range_.begin;
    rows_.push_back({begin, begin + row->shape.numel(), row->lr_mul, weight_decay * row->wd_mul,
                     muon_scale_of(options.scale, row->shape[0], row->shape[1])});
    moments_begin_.push_back(std::exchange(moments, moments + row->shape[0]));
  }
  if (params.bf16_copy_bytes() > 0)
    directions_ =
        Arena(params.device(), "Muon's directions", static_cast<size_t>(range_.size()) * size_of(Dtype::bf16));
  if (options.normalize_rows)
    moments_ = Arena(params.device(), "second moments of rows", static_cast<size_t>(moments) * size_of(params.dtype()));
}

Tensor MuonMatrices::directions() const {
  if (directions_.data() == nullptr) return part_of(params_.gradients(), range_);
  return {directions_.data(), Dtype::bf16, Shape{range_.size()}};
}

Tensor MuonMatrices::row_moments(const Parameter& row) const {
  const auto found = std::find(matrices_.begin(), matrices_.end(), &row);
  if (found == matrices_.end() || moments_.data() == nullptr) return {};
  const int64_t begin = moments_begin_[static_cast<size_t>(found - matrices_.begin())];
  const auto all = static_cast<int64_t>(moments_.bytes() / size_of(params_.dtype()));
  return part_of({moments_.data(), params_.dtype(), Shape{all}}, {begin, begin + row.shape[0]});
}

void MuonMatrices::update(const Tensor& m, const Tensor& factor, const Tensor& numbers) {
  if (empty()) return;
  const Stream stream = params_.device().stream();
  const Tensor u = directions(), values = part_of(params_.values(), range_);
  muon_momentum(u, m, part_of(params_.gradients(), range_), factor, numbers, options_.nesterov, stream);
  std::vector<Tensor> list;
  for (size_t i = 0; i < matrices_.size(); ++i) {
    list.push_back(part_of(u, {rows_[i].begin, rows_[i].end}));
    list.back().shape = matrices_[i]->shape;
  }
  newton_schulz(list, iteration_, stream);
  for (size_t i = 0; i < matrices_.size() && options_.normalize_rows; ++i)
    normalize_rows(list[i], row_moments(*matrices_[i]), beta2, factor, stream);
  muon_update(values, part_of(params_.bf16_copy(), range_), u, factor, numbers, rows_, cautious_, stream);
}

}  // namespace crossply
