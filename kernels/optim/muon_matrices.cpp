#include "kernels/optim/muon_matrices.h"

#include <algorithm>
#include <numeric>

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

std::vector<int> muon_owners(const ParameterTable& params, int ranks) {
  const std::vector<const Parameter*> matrices = muon_matrices(params);
  std::vector<double> costs, loads(static_cast<size_t>(ranks));
  for (const Parameter* matrix : matrices) costs.push_back(newton_schulz_flops(matrix->shape[0], matrix->shape[1], 1));
  std::vector<size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<int> owners(matrices.size());
  for (const size_t i : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    owners[i] = static_cast<int>(least - loads.begin());
    *least += costs[i];
  }
  return owners;
}

std::vector<const Parameter*> own_muon_matrices(const ParameterTable& params, int rank, int ranks) {
  const std::vector<const Parameter*> matrices = muon_matrices(params);
  const std::vector<int> owners = muon_owners(params, ranks);
  std::vector<const Parameter*> own;
  for (size_t i = 0; i < matrices.size(); ++i)
    if (owners[i] == rank) own.push_back(matrices[i]);
  return own;
}

int64_t muon_row_moments(const ParameterTable& params, int rank, int ranks) {
  int64_t rows = 0;
  for (const Parameter* matrix : own_muon_matrices(params, rank, ranks)) rows += matrix->shape[0];
  return rows;
}

// A rank's slices lie in an array of own slices in the order of the flat arrays, so there is one such range.
Range own_muon_range(const ParameterTable& params, const Buckets& buckets) {
  const Range range = muon_range(params);
  Range own;
  for (const Bucket& bucket : buckets.list()) {
    const Range slice = bucket.slice_of(buckets.rank());
    const int64_t begin = std::max(slice.begin, range.begin), end = std::min(slice.end, range.end);
    if (begin >= end) continue;
    const Range part{bucket.own + begin - slice.begin, bucket.own + end - slice.begin};
    own = own.size() == 0 ? part : Range{std::min(own.begin, part.begin), std::max(own.end, part.end)};
  }
  return own;
}

MuonMatrices::MuonMatrices(ParameterTable& params, const Buckets& buckets, const MuonOptions& options,
                           double weight_decay, bool cautious)
    : params_(params),
      options_(options),
      iteration_(newton_schulz_of(options.polynomial, options.steps)),
      weight_decay_(weight_decay),
      cautious_(cautious),
      rank_(buckets.rank()),
      range_(muon_range(params)),
      own_(own_muon_range(params, buckets)),
      matrices_(muon_matrices(params)),
      owners_(muon_owners(params, buckets.size())),
      row_moments_(matrices_.size()) {
  if (empty()) return;
  Device& device = params.device();
  if (params.bf16_copy_bytes() > 0)
    directions_ = Arena(device, "Muon's directions", static_cast<size_t>(range_.size()) * size_of(Dtype::bf16));
  if (!options.normalize_rows) return;
  const int64_t moments = muon_row_moments(params, rank_, buckets.size());
  moments_ = Arena(device, "second moments of rows", static_cast<size_t>(moments) * size_of(params.dtype()));
  int64_t next = 0;
  for (size_t i = 0; i < matrices_.size(); ++i) {
    if (owners_[i] != rank_) continue;
    const int64_t m = matrices_[i]->shape[0];
    row_moments_[i] = part_of({moments_.data(), params.dtype(), Shape{moments}}, {next, next + m});
    next += m;
  }
}

Tensor MuonMatrices::directions(const Range& flat) const {
  if (directions_.bytes() == 0) return part_of(params_.gradients(), flat);
  return part_of({directions_.data(), Dtype::bf16, Shape{range_.size()}},
                 {flat.begin - range_.begin, flat.end - range_.begin});
}

std::vector<MuonRow> MuonMatrices::rows_in(const Range& flat) const {
  std::vector<MuonRow> rows;
  for (const Parameter* row : matrices_) {
    const int64_t begin = std::max(row->offset, flat.begin);
    const int64_t end = std::min(row->offset + row->shape.numel(), flat.end);
    if (begin < end)
      rows.push_back({begin - flat.begin, end - flat.begin, row->lr_mul, weight_decay_ * row->wd_mul,
                      muon_scale_of(options_.scale, row->shape[0], row->shape[1])});
  }
  return rows;
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

void MuonMatrices::make_directions(const std::vector<MuonPart>& parts, const Tensor& m, const Tensor& factor,
                                   const Tensor& numbers) {
  for (const MuonPart& part : parts)
    muon_momentum(directions(part.flat), part_of(m, part.own), part_of(params_.gradients(), part.flat), factor, numbers,
                  options_.nesterov, params_.device().stream());
}

void MuonMatrices::orthogonalise(const std::vector<size_t>& places, const Tensor& factor) {
  const Stream stream = params_.device().stream();
  std::vector<Tensor> each;
  std::vector<size_t> own;
  for (const size_t i : places) {
    if (owners_[i] != rank_) continue;
    const Parameter& row = *matrices_[i];
    each.push_back(directions({row.offset, row.offset + row.shape.numel()}));
    each.back().shape = row.shape;
    own.push_back(i);
  }
  newton_schulz(each, iteration_, stream);
  for (size_t k = 0; options_.normalize_rows && k < each.size(); ++k)
    normalize_rows(each[k], row_moments_[own[k]], beta2, factor, stream);
}

void MuonMatrices::try_products() {
  std::vector<Tensor> one_of_each;
  for (const Parameter* row : matrices_) {
    if (std::ranges::count(one_of_each, row->shape, &Tensor::shape) > 0) continue;
    one_of_each.push_back(directions({row->offset, row->offset + row->shape.numel()}));
    one_of_each.back().shape = row->shape;
  }
  newton_schulz(one_of_each, iteration_, params_.device().stream());
}

void MuonMatrices::apply(const std::vector<MuonPart>& parts, const Tensor& factor, const Tensor& numbers) {
  for (const MuonPart& part : parts)
    muon_update(part.values, part_of(params_.bf16_copy(), part.flat), directions(part.flat), factor, numbers, part.rows,
                cautious_, params_.device().stream());
}

}  // namespace crossply
