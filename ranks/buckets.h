// How the flat arrays of a parameter table are divided among the ranks of a job (ZeRO: Rajbhandari et al. 2019, stage 1).
//
// The flat index is cut into buckets, from its end to its beginning, as the backward finishes gradients; every bucket
// into `size` slices of equal length, of which slice r is rank r's. Its owner alone has the moments of a slice. With one
// rank all of it is one bucket and one slice.
//
//   flat    | bucket 2      | bucket 1      | bucket 0      |
//   owner   |  0  |  1  |...|  0  |  1  |...|  0  |  1  |...|
//   own     the owner's slices of bucket 2, 1, 0, one after the other, in the order of the flat index
#pragma once

#include <vector>

#include "engine/params.h"
#include "ranks/comm.h"

namespace crossply {

// Elements [begin, end) of something flat.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

struct Bucket {
  Range flat;
  int64_t slice = 0;    // its length
  int64_t own = 0;      // where the owner's slice begins in an array of own slices
  bool narrow = false;  // the ranks read these weights in bf16 only
  Range slice_of(int rank) const { return {flat.begin + rank * slice, flat.begin + (rank + 1) * slice}; }
};

// A part of a row that this rank owns: elements [begin, end) of the row lie from `own` on in an array of own slices.
struct OwnPart {
  int64_t begin, end, own;
};

class Buckets {
 public:
  // The table must be laid out for this many ranks (ParameterTable::lay_out). bytes: of f32 gradients in a bucket, about.
  Buckets(const ParameterTable& params, const Place& place, int64_t bytes);
  const std::vector<Bucket>& list() const { return list_; }  // in the order in which the backward finishes them
  int64_t own_size() const { return own_size_; }             // elements of an array of own slices
  int64_t largest() const;                                   // elements of the largest bucket
  const Place& place() const { return place_; }
  // In the order of the row; the padding between rows belongs to nobody's parts.
  std::vector<OwnPart> own_parts(const Parameter& row) const;

 private:
  Place place_;
  std::vector<Bucket> list_;
  int64_t own_size_ = 0;
};

}  // namespace crossply
