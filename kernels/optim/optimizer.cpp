#include "kernels/optim/optimizer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/optim/convert.h"
#include "kernels/optim/sum_slices.h"

namespace crossply {
void refresh_bf16_copy(ParameterTable& params) {
  if (params.bf16_copy_bytes() == 0) return;
  const Stream stream = params.device().stream();
  const Range whole{0, params.values().numel()}, lent{whole.end, params.flat_size()};
  convert(part_of(params.bf16_copy(), whole), params.values(), stream);
  if (params.lends()) convert(part_of(params.bf16_copy(), lent), params.lent_values(), stream);
}

Optimizer::Optimizer(ParameterTable& params, const Buckets& buckets, const AdamwOptions& options,
                     const MuonOptions& muon)
    : params_(params),
      buckets_(buckets),
      options_(options),
      muon_(params, buckets, muon, options.weight_decay, options.cautious),
      numbers_(params.device(), "numbers of a step", sizeof(Numbers)),
      m_(params.device(), "first moments", static_cast<size_t>(buckets.own_size()) * size_of(params.dtype())),
      v_(params.device(), "second moments",
         static_cast<size_t>(buckets.own_size() - muon_.own().size()) * size_of(params.dtype())) {
  if (const int64_t masters = (params.flat_size() - params.values().numel()) / buckets.size(); params.lends())
    masters_ = Arena(params.device(), "own f32 parameters", static_cast<size_t>(masters) * size_of(params.dtype()));
  for (const Bucket& bucket : buckets.list()) add_parts(bucket);
  take_masters();
}

Tensor Optimizer::v(const Range& own) const {
  const int64_t begin = own.begin < muon_.own().end ? own.begin : own.begin - muon_.own().size();
  return part_of(flat(v_), {begin, begin + own.size()});
}

Tensor Optimizer::own_values(const Bucket& bucket) const {
  if (!params_.lends() || !bucket.bf16_only) return part_of(params_.values(), bucket.slice_of(buckets_.rank()));
  const int64_t begin = bucket.own - params_.bf16_only_begin() / buckets_.size();
  return part_of(flat(masters_), {begin, begin + bucket.slice});
}

void Optimizer::take_masters() {
  const auto from_second = [&](const Range& range) {
    const int64_t begin = params_.values().numel();
    return part_of(params_.lent_values(), {range.begin - begin, range.end - begin});
  };
  for (const Bucket& bucket : buckets_.list())
    if (params_.lends() && bucket.bf16_only)
      copy(own_values(bucket), from_second(bucket.slice_of(buckets_.rank())), params_.device().stream());
}

void Optimizer::return_masters() {
  for (const Bucket& bucket : buckets_.list())
    if (params_.lends() && bucket.bf16_only)
      copy(part_of(params_.gradients(), bucket.slice_of(buckets_.rank())), own_values(bucket),
           params_.device().stream());
}

std::vector<AdamwRow> Optimizer::rows_in(const Range& flat) const {
  std::vector<AdamwRow> rows;
  for (const Parameter& row : params_.rows()) {
    const int64_t begin = std::max(row.offset, flat.begin);
    const int64_t end = std::min(row.offset + row.shape.numel(), flat.end);
    if (begin < end)
      rows.push_back(
          {begin - flat.begin, end - flat.begin, row.lr_mul, options_.weight_decay * row.wd_mul, row.eps_mul});
  }
  std::sort(rows.begin(), rows.end(), [](const AdamwRow& a, const AdamwRow& b) { return a.begin < b.begin; });
  return rows;
}

// This rank's slice of a bucket: in front of Muon's matrices, they themselves, and behind them.
void Optimizer::add_parts(const Bucket& bucket) {
  const Range slice = bucket.slice_of(buckets_.rank()), matrices = muon_range(params_);
  const Range before{slice.begin, std::min(slice.end, matrices.begin)};
  const Range among{std::max(slice.begin, matrices.begin), std::min(slice.end, matrices.end)};
  const Range behind{std::max(slice.begin, matrices.end), slice.end};
  for (const auto& [flat, muon] : {std::pair{before, false}, {among, true}, {behind, false}}) {
    if (flat.size() <= 0) continue;
    const Range in_slice{flat.begin - slice.begin, flat.end - slice.begin};
    const Range own{bucket.own + in_slice.begin, bucket.own + in_slice.end};
    const Tensor values = part_of(own_values(bucket), in_slice);
    if (muon) muon_parts_.push_back({flat, own, values, muon_.rows_in(flat)});
    else parts_.push_back({flat, own, values, rows_in(flat)});
  }
}

void Optimizer::begin_step(const StepRates& rates, double scale) {
  const AdamwConstants constants{options_.beta1, options_.beta2, options_.eps};
  const Numbers next{scale, adamw_numbers(constants, step + 1, rates.lr, scale, rates.decay),
                     MuonNumbers{rates.muon_lr, muon_.momentum_at(step), rates.decay}};
  ++step;
  params_.device().copy_in(numbers_.data(), &next, sizeof next);
}

void Optimizer::update_by_adamw() {
  constexpr int64_t numbers = sizeof(AdamwNumbers) / sizeof(double);
  for (const AdamwPart& part : parts_)
    adamw_update(part.values, part_of(m(), part.own), v(part.own), part_of(params_.bf16_copy(), part.flat),
                 part_of(params_.gradients(), part.flat), number(1, numbers), part.rows,
                 {options_.beta1, options_.beta2, options_.eps, options_.cautious}, params_.device().stream());
}

void Optimizer::update() {
  CHECK_THAT(muon_.empty() || buckets_.size() == 1, "nobody brings Muon's matrices to their owners");
  std::vector<size_t> all(muon_.matrices().size());
  std::iota(all.begin(), all.end(), size_t{0});
  make_directions();
  orthogonalise(all);
  apply_directions();
  update_by_adamw();
}

}  // namespace crossply
