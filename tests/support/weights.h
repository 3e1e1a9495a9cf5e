// All weights of a model in training.
#pragma once

#include <vector>

#include "train/step/trainer.h"

namespace crossply::test {

inline std::vector<float> weights(const Trainer& trainer) { return trainer.params().read(trainer.params().values()); }

}  // namespace crossply::test
