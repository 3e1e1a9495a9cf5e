// Loader: an endless stream of batches from a Source. Sample g of the stream belongs to epoch g / size and is element
// permute(g % size) of a permutation that (seed, epoch) determines. So nothing is dropped where an epoch ends inside a
// batch, and the position alone restores everything: a resumed run, or one of several ranks, just seeks.
#pragma once

#include <cstdint>

#include "data/source.h"

namespace crossply {

// Element `index` of the permutation of {0, ..., n-1} that `key` selects. No table: any n costs the same memory, none.
int64_t permute(int64_t index, int64_t n, uint64_t key);

class Loader {
 public:
  // The source must outlive the loader.
  Loader(const Source& source, int64_t batch, uint64_t seed, bool shuffle);
  void next(int32_t* tokens /*(B,T)*/, int32_t* targets /*(B,T)*/);
  // Samples consumed since the start of the stream.
  int64_t position() const { return position_; }
  void seek(int64_t position);
  double epochs() const { return static_cast<double>(position_) / static_cast<double>(source_.size()); }

 private:
  int64_t index_at(int64_t position) const;

  const Source& source_;
  int64_t batch_;
  uint64_t seed_;
  bool shuffle_;
  int64_t position_ = 0;
};

}  // namespace crossply
