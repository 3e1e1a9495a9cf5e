#include "engine/buckets.h"

#include <algorithm>
#include <utility>

namespace crossply {

Buckets::Buckets(ParameterTable& params, int rank, int size, int64_t bytes) : rank_(rank), size_(size) {
  CHECK_THAT(0 <= rank && rank < size && bytes > 0, "rank ", rank, " of ", size);
  const int64_t unit = size * leaf;
  params.lay_out(unit, size == 1 ? 64 : unit);
  const int64_t all = params.flat_size(), middle = size == 1 ? 0 : params.bf16_only_begin();
  const int64_t most = std::max(bytes / 4 / unit, int64_t{1}) * unit;
  for (const Range& region : {Range{middle, all}, Range{0, middle}})
    for (int64_t end = region.end; end > region.begin;) {
      const int64_t begin = std::max(region.begin, size == 1 ? 0 : end - most);
      list_.push_back({{begin, end}, (end - begin) / size, 0, size > 1 && region.begin == middle});
      end = begin;
    }
  for (auto bucket = list_.rbegin(); bucket != list_.rend(); ++bucket)
    bucket->own = std::exchange(own_size_, own_size_ + bucket->slice);
}

Buckets::Buckets(const ParameterTable& params)
    : rank_(0), size_(1), list_{{{0, params.flat_size()}, params.flat_size()}}, own_size_(params.flat_size()) {}

int64_t Buckets::largest() const {
  int64_t most = 0;
  for (const Bucket& bucket : list_) most = std::max(most, bucket.flat.size());
  return most;
}

std::vector<OwnPart> Buckets::parts_of(const Parameter& row, int rank) const {
  std::vector<OwnPart> parts;
  for (auto bucket = list_.rbegin(); bucket != list_.rend(); ++bucket) {
    const Range own = bucket->slice_of(rank);
    const int64_t begin = std::max(own.begin, row.offset), end = std::min(own.end, row.offset + row.shape.numel());
    if (begin < end) parts.push_back({begin - row.offset, end - row.offset, bucket->own + begin - own.begin});
  }
  return parts;
}

}  // namespace crossply
