// Where the vectors of a sparse autoencoder come from: the first layer's values in a model, window after window. Memory
// has a bound, whatever the number of tokens: what it does not hold, the model computes again.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/rng.h"
#include "eval/inside/probe.h"
#include "eval/inside/windows.h"

namespace crossply {

// The value that is looked at.
inline constexpr const char* sae_value = "own_value.0";

// What the model made of a window.
struct SaeWindow {
  std::vector<float> values;               // (length, D), scaled
  std::vector<std::vector<double>> gates;  // of each layer with gates, by token, the mean over heads
};

// Runs the model over windows. Where all of their vectors fit in the memory, once for each.
class SaeReader {
 public:
  // capacity: how many vectors are kept at most. probe and windows must live as long.
  SaeReader(Probe& probe, int layers, const std::vector<TokenWindow>& windows, int64_t capacity);

  int64_t D() const { return D_; }
  int64_t size() const { return std::ssize(windows_); }
  const TokenWindow& window(int64_t i) const { return windows_[static_cast<size_t>(i)]; }
  int64_t tokens(int64_t begin, int64_t end) const;  // of the windows [begin, end)
  const std::vector<int>& gate_layers() const { return gate_layers_; }

  // Valid until the next call.
  const SaeWindow& read(int64_t i);
  // Once: from now on all values are multiplied by this factor.
  void scale_by(double factor);
  // Whether each window is run once.
  bool keeps_all() const { return keeps_; }

 private:
  void run(const TokenWindow& window, SaeWindow* result);

  Probe& probe_;
  const std::vector<TokenWindow>& windows_;
  int64_t D_, T_;
  std::vector<int> gate_layers_;
  double factor_ = 1;
  bool keeps_;
  std::vector<SaeWindow> kept_;  // of all windows; empty values: not yet run
  SaeWindow last_;
};

// Batches of vectors in random order, from a buffer of at most `capacity` vectors, but of at least one batch and one
// window. Where all vectors fit, each pass over them is in another random order. Else each pass takes the windows in
// another random order, fills the buffer with whole windows, and shuffles in the buffer; what is left of it when it no
// longer holds a batch comes first in the next filling.
class VectorBuffer {
 public:
  // The vectors of window i, (lengths[i], D).
  using Fill = std::function<std::span<const float>(int64_t i)>;
  VectorBuffer(int64_t D, int64_t rows, std::vector<int64_t> lengths, int64_t capacity, uint64_t seed, Fill fill);

  void next(float* batch);  // (rows, D)
  int64_t capacity() const { return capacity_; }
  bool holds_all() const { return total_ <= capacity_; }

 private:
  int64_t count() const { return std::ssize(order_); }
  void refill();
  void add_windows();

  int64_t D_, rows_, total_ = 0, capacity_, at_ = 0;
  std::vector<int64_t> lengths_;
  Fill fill_;
  Random random_, window_random_;
  std::vector<float> vectors_;    // (count, D)
  std::vector<int64_t> order_;    // of these, given out from at_ on
  std::vector<int64_t> windows_;  // of a pass, in its order
  size_t next_window_ = 0;
};

}  // namespace crossply
