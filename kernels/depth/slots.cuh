// Keys and values of several layers for one token, as the kernels of attention over depth take them.
#pragma once

#include <vector>

#include "engine/tensor.h"
#include "kernels/cuda/cuda.cuh"

namespace crossply {

template <class S>
struct Slots {
  const S* keys[max_inputs];
  const S* values[max_inputs];
  int count;

  Slots(const char* name, const std::vector<Tensor>& keys_of, const std::vector<Tensor>& values_of)
      : count(static_cast<int>(keys_of.size())) {
    check_inputs(name, keys_of.size());
    for (size_t s = 0; s < keys_of.size(); ++s) keys[s] = keys_of[s].as<S>(), values[s] = values_of[s].as<S>();
  }
};
template <class S>
struct SlotGradients {
  S* keys[max_inputs];
  S* values[max_inputs];
  bool add_keys[max_inputs], add_values[max_inputs];

  SlotGradients(const std::vector<Grad>& keys_of, const std::vector<Grad>& values_of) {
    for (size_t s = 0; s < keys_of.size(); ++s) {
      keys[s] = keys_of[s].as<S>(), values[s] = values_of[s].as<S>();
      add_keys[s] = keys_of[s].accumulate, add_values[s] = values_of[s].accumulate;
    }
  }
};

// D, or one column if some of these tensors allow no wide accesses.
template <class... Lists>
int64_t columns_of(int64_t D, const Lists&... lists) {
  return (aligned16(lists) && ...) ? D : 1;
}

}  // namespace crossply
