#include "eval/inside/sae_vectors.h"

#include <algorithm>
#include <numeric>

namespace crossply {
namespace {

int64_t max_of(const std::vector<int64_t>& lengths) { return lengths.empty() ? 0 : std::ranges::max(lengths); }

void scale(std::vector<float>& values, double factor) {
  for (float& x : values) x = static_cast<float>(static_cast<double>(x) * factor);
}

void shuffle(std::vector<int64_t>& list, Random& random) {
  for (int64_t i = std::ssize(list) - 1; i > 0; --i)
    std::swap(list[static_cast<size_t>(i)], list[static_cast<size_t>(random.below(i + 1))]);
}

}  // namespace

SaeReader::SaeReader(Probe& probe, int layers, const std::vector<TokenWindow>& windows, int64_t capacity)
    : probe_(probe), windows_(windows), T_(std::ssize(windows[0].tokens)) {
  D_ = probe_.shape(sae_value).numel() / T_;
  keeps_ = tokens(0, size()) <= capacity;
  kept_.resize(keeps_ ? windows_.size() : 0);
  probe_.keep(sae_value);
  for (int layer = 0; layer < layers; ++layer)
    if (const std::string gate = str("gate.", layer); probe_.has(gate)) {
      probe_.keep(gate);
      gate_layers_.push_back(layer);
    }
}

int64_t SaeReader::tokens(int64_t begin, int64_t end) const {
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) count += window(i).length;
  return count;
}

void SaeReader::scale_by(double factor) {
  factor_ = factor;
  for (SaeWindow& one : kept_) scale(one.values, factor);
}

const SaeWindow& SaeReader::read(int64_t i) {
  SaeWindow& result = keeps_ ? kept_[static_cast<size_t>(i)] : last_;
  if (!keeps_ || result.values.empty()) run(window(i), &result);
  return result;
}

void SaeReader::run(const TokenWindow& window, SaeWindow* result) {
  probe_.run(window.tokens.data());
  const std::vector<double>& values = probe_.at(sae_value);
  result->values.assign(values.begin(), values.begin() + window.length * D_);
  scale(result->values, factor_);
  result->gates.assign(gate_layers_.size(), {});
  for (size_t g = 0; g < gate_layers_.size(); ++g) {
    const std::vector<double>& gates = probe_.at(str("gate.", gate_layers_[g]));
    const int64_t heads = std::ssize(gates) / T_;
    for (int64_t t = 0; t < window.length; ++t) {
      const auto first = gates.begin() + t * heads;
      result->gates[g].push_back(std::accumulate(first, first + heads, 0.0) / static_cast<double>(heads));
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------

VectorBuffer::VectorBuffer(int64_t D, int64_t rows, std::vector<int64_t> lengths, int64_t capacity, uint64_t seed,
                           Fill fill)
    : D_(D),
      rows_(rows),
      capacity_(std::max(capacity, rows + max_of(lengths))),
      lengths_(std::move(lengths)),
      fill_(std::move(fill)),
      random_(seed, stream_of("order of vectors")),
      window_random_(seed, stream_of("order of windows")),
      windows_(lengths_.size()) {
  total_ = std::accumulate(lengths_.begin(), lengths_.end(), int64_t{0});
  CHECK_THAT(rows >= 1 && total_ >= rows, total_, " vectors are less than a batch of ", rows);
  std::iota(windows_.begin(), windows_.end(), int64_t{0});
  next_window_ = windows_.size();  // no pass has begun
}

void VectorBuffer::add_windows() {
  while (true) {
    if (next_window_ == windows_.size()) {
      if (holds_all() && !vectors_.empty()) return;
      if (!holds_all()) shuffle(windows_, window_random_);
      next_window_ = 0;
    }
    const int64_t i = windows_[next_window_], have = std::ssize(vectors_) / D_;
    if (have + lengths_[static_cast<size_t>(i)] > capacity_) return;
    const std::span<const float> more = fill_(i);
    vectors_.insert(vectors_.end(), more.begin(), more.end());
    ++next_window_;
  }
}

void VectorBuffer::refill() {
  if (!holds_all()) {  // what was not given out moves to the front
    std::vector<int64_t> left(order_.begin() + at_, order_.end());
    std::ranges::sort(left);
    for (int64_t to = 0; to < std::ssize(left); ++to)
      std::copy_n(vectors_.begin() + left[static_cast<size_t>(to)] * D_, D_, vectors_.begin() + to * D_);
    vectors_.resize(left.size() * static_cast<size_t>(D_));
    order_.clear();
  }
  vectors_.reserve(static_cast<size_t>(std::min(total_, capacity_) * D_));
  add_windows();
  if (order_.empty()) {
    order_.resize(vectors_.size() / static_cast<size_t>(D_));
    std::iota(order_.begin(), order_.end(), int64_t{0});
  }
  shuffle(order_, random_);
  at_ = 0;
}

void VectorBuffer::next(float* batch) {
  if (at_ + rows_ > count()) refill();
  for (int64_t i = 0; i < rows_; ++i)
    std::copy_n(vectors_.begin() + order_[static_cast<size_t>(at_ + i)] * D_, D_, batch + i * D_);
  at_ += rows_;
}

}  // namespace crossply
