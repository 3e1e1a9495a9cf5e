// All weights of a model in training, row by row: what lies between rows depends on the number of ranks.
#pragma once

#include <vector>

#include "train/step/trainer.h"

namespace crossply::test {

inline std::vector<float> weights(const Trainer& trainer) {
  std::vector<float> all;
  for (const Parameter& row : trainer.params().rows()) {
    const std::vector<float> values = trainer.params().read(row.value);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace crossply::test
