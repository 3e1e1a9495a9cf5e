#include "data/loader.h"

#include <algorithm>
#include <bit>

#include "engine/rng.h"

namespace crossply {
namespace {

// A Feistel network: a bijection of {0, ..., 4^half_bits - 1}, whatever the rounds mix in.
uint64_t feistel(uint64_t x, int half_bits, uint64_t key) {
  constexpr uint64_t rounds = 6;
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = x >> half_bits, right = x & mask;
  for (uint64_t round = 0; round < rounds; ++round) {
    const uint64_t mixed = left ^ (random_bits(key, round, right) & mask);
    left = right;
    right = mixed;
  }
  return left << half_bits | right;
}

}  // namespace

int64_t permute(int64_t index, int64_t n, uint64_t key) {
  CHECK_THAT(index >= 0 && index < n, "element ", index, " of ", n);
  if (n == 1) return 0;
  // Halves of fewer than four bits would make some orders more likely than others.
  const int half_bits = std::max<int>(4, (static_cast<int>(std::bit_width(static_cast<uint64_t>(n - 1))) + 1) / 2);
  // Cycle walking: apply the larger bijection until it comes back below n. The cycle through `index` always does, and
  // from 64 elements on the domain is at most 4 n, which means at most four tries on average.
  uint64_t x = static_cast<uint64_t>(index);
  do x = feistel(x, half_bits, key);
  while (x >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(x);
}

Loader::Loader(const Source& source, int64_t batch, uint64_t seed, bool shuffle)
    : source_(source), batch_(batch), seed_(seed), shuffle_(shuffle) {
  CHECK_THAT(source.size() > 0 && batch > 0, "a source of ", source.size(), " samples in batches of ", batch);
}

void Loader::next(int32_t* tokens, int32_t* targets) {
  const int64_t T = source_.seq_len();
  for (int64_t b = 0; b < batch_; ++b) {
    const int64_t position = position_ + b;
    source_.read_of_epoch(position / source_.size(), index_at(position), tokens + b * T, targets + b * T);
  }
  position_ += batch_;
}

void Loader::seek(int64_t position) {
  CHECK_THAT(position >= 0, "cannot seek to ", position);
  position_ = position;
}

int64_t Loader::index_at(int64_t position) const {
  const int64_t size = source_.size(), epoch = position / size, index = position % size;
  if (!shuffle_) return index;
  return permute(index, size, random_bits(seed_, stream_of("loader"), static_cast<uint64_t>(epoch)));
}

}  // namespace crossply
