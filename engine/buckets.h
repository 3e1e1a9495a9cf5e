// How the flat arrays of a parameter table are divided among the ranks of a job (ZeRO, stage 1: Rajbhandari et al.,
// arXiv 1910.02054).
//
// The flat index is cut into buckets, from its end to its beginning, as the backward finishes gradients; every bucket
// into `size` slices of equal length, multiples of a leaf, of which slice r is rank r's. Its owner alone has the
// moments of a slice. With one rank all of it is one bucket and one slice.
//
//   flat    | bucket 2      | bucket 1      | bucket 0      |
//   owner   |  0  |  1  |...|  0  |  1  |...|  0  |  1  |...|
//   own     the owner's slices of bucket 2, 1, 0, one after the other
#pragma once

#include <vector>

#include "engine/params.h"

namespace crossply {

// Elements [begin, end) of something flat.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
inline Tensor part_of(const Tensor& flat, const Range& range) {
  auto* data = static_cast<std::byte*>(flat.data);
  if (data != nullptr) data += static_cast<size_t>(range.begin) * size_of(flat.dtype);
  return {data, flat.dtype, Shape{range.size()}};
}

struct Bucket {
  Range flat;
  int64_t slice = 0;       // its length
  int64_t own = 0;         // where the owner's slice begins in an array of own slices
  bool bf16_only = false;  // of rows whose values every rank has in bf16 only
  Range slice_of(int rank) const { return {flat.begin + rank * slice, flat.begin + (rank + 1) * slice}; }
  Range own_range() const { return {own, own + slice}; }
};

// Elements [begin, end) of a row, which lie from `own` on in their owner's array of own slices.
struct OwnPart {
  int64_t begin, end, own;
};

class Buckets {
 public:
  // Lays the table out for so many ranks: before it gets its memory. bytes: of f32 gradients in a bucket, about.
  Buckets(ParameterTable& params, int rank, int size, int64_t bytes);
  // One bucket of one rank, over a table as it lies.
  explicit Buckets(const ParameterTable& params);
  const std::vector<Bucket>& list() const { return list_; }  // in the order in which the backward finishes them
  int64_t own_size() const { return own_size_; }             // elements of an array of own slices
  int64_t largest() const;                                   // elements of the largest bucket
  int rank() const { return rank_; }
  int size() const { return size_; }
  // The parts of a row that a rank owns, in order.
  std::vector<OwnPart> parts_of(const Parameter& row, int rank) const;

 private:
  int rank_, size_;
  std::vector<Bucket> list_;
  int64_t own_size_ = 0;
};

}  // namespace crossply
