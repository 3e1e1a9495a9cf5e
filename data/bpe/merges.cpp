#include "data/bpe/merges.h"

#include <algorithm>
#include <limits>
#include <queue>

namespace crossply {

void Merges::reserve(size_t count) {
  std::vector<Slot> old = std::move(slots_);
  size_t size = 2;
  shift_ = 63;
  while (size < 2 * count + 2) size *= 2, --shift_;
  slots_ = std::vector<Slot>(size);
  mask_ = size - 1, count_ = 0;
  for (const Slot& slot : old)
    if (slot.key != none) add(static_cast<int32_t>(slot.key >> 32), static_cast<int32_t>(slot.key), slot.result);
}

void Merges::add(int32_t left, int32_t right, Result result) {
  if (2 * (count_ + 1) > slots_.size()) reserve(2 * (count_ + 1));
  const uint64_t key = key_of(left, right);
  size_t at = place_of(key);
  while (slots_[at].key != none && slots_[at].key != key) at = (at + 1) & mask_;
  count_ += slots_[at].key == none;
  slots_[at] = {key, result};
}

std::vector<std::pair<int32_t, int32_t>> Merges::in_order() const {
  std::vector<Slot> used;
  for (const Slot& slot : slots_)
    if (slot.key != none) used.push_back(slot);
  std::sort(used.begin(), used.end(), [](const Slot& a, const Slot& b) { return a.result.rank < b.result.rank; });
  std::vector<std::pair<int32_t, int32_t>> pairs;
  for (const Slot& slot : used) pairs.push_back({static_cast<int32_t>(slot.key >> 32), static_cast<int32_t>(slot.key)});
  return pairs;
}

void Merges::apply(std::vector<int32_t>& symbols) const {
  constexpr size_t few = 48;  // above it a queue is faster than looking for the least rank each time
  if (symbols.size() <= few) apply_to_few(symbols);
  else apply_to_many(symbols);
}

void Merges::apply_to_few(std::vector<int32_t>& symbols) const {
  constexpr uint32_t never = std::numeric_limits<uint32_t>::max();  // what rank -1 is as well
  thread_local std::vector<Result> pairs;                           // of each symbol with the next
  size_t n = symbols.size();
  pairs.clear();
  for (size_t i = 0; i + 1 < n; ++i) pairs.push_back(find(symbols[i], symbols[i + 1]));
  while (n > 1) {
    uint32_t least = never;
    size_t at = 0;
    for (size_t i = 0; i + 1 < n; ++i)
      if (static_cast<uint32_t>(pairs[i].rank) < least) least = static_cast<uint32_t>(pairs[i].rank), at = i;
    if (least == never) break;
    symbols[at] = pairs[at].id;
    --n;
    for (size_t i = at + 1; i < n; ++i) symbols[i] = symbols[i + 1], pairs[i - 1] = pairs[i];
    if (at + 1 < n) pairs[at] = find(symbols[at], symbols[at + 1]);
    if (at > 0) pairs[at - 1] = find(symbols[at - 1], symbols[at]);
  }
  symbols.resize(n);
}

void Merges::apply_to_many(std::vector<int32_t>& symbols) const {
  struct Candidate {
    int32_t rank;
    uint32_t at;
    int32_t left, right, id;
    bool operator<(const Candidate& other) const {  // the greatest is taken first
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  const auto n = static_cast<uint32_t>(symbols.size());
  std::vector<uint32_t> next(n), previous(n);  // n: there is none
  std::vector<Candidate> first;
  const auto candidate = [&](uint32_t left, uint32_t right) {
    const Result result = find(symbols[left], symbols[right]);
    return Candidate{result.rank, left, symbols[left], symbols[right], result.id};
  };
  for (uint32_t i = 0; i < n; ++i) {
    next[i] = i + 1, previous[i] = i > 0 ? i - 1 : n;
    if (i + 1 < n)
      if (const Candidate c = candidate(i, i + 1); c.rank >= 0) first.push_back(c);
  }
  std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(first));
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    const uint32_t right = symbols[best.at] == best.left ? next[best.at] : n;
    if (right == n || symbols[right] != best.right) continue;  // another merge took one of them
    symbols[best.at] = best.id;
    symbols[right] = -1;
    next[best.at] = next[right];
    if (next[right] < n) {
      previous[next[right]] = best.at;
      if (const Candidate c = candidate(best.at, next[right]); c.rank >= 0) queue.push(c);
    }
    if (previous[best.at] < n)
      if (const Candidate c = candidate(previous[best.at], best.at); c.rank >= 0) queue.push(c);
  }
  symbols.erase(std::remove(symbols.begin(), symbols.end(), -1), symbols.end());
}

}  // namespace crossply
