// A tiny model beside the plain backbone with the same weights: what an architecture must equal at a neutral setting.
#pragma once

#include <string>
#include <vector>

#include "models/registry.h"
#include "tests/tiny.h"

namespace crossply::test {

struct Twin {
  TinyModel llama, model;

  explicit Twin(const Config& config)
      : llama(tiny_config("llama", config.num_key_value_heads, config.qk_norm), "cpu"), model(config, "cpu") {}
  // The model with LLaMA's weights where it has them, and its own parameters set by `neutral`.
  Twin(const Config& config, const std::function<void(TinyModel&)>& neutral) : Twin(config) {
    model.take(llama);
    neutral(model);
  }
};

// Losses and all gradients that both have, bit for bit.
inline void check_same_bits(Twin twin) {
  CHECK(twin.llama.step() == twin.model.step());
  for (Parameter& row : twin.llama.params.rows()) {
    if (!twin.model.params.contains(row.name)) continue;
    CAPTURE(row.name);
    const auto want = twin.llama.values<float>(row.grad);
    const auto got = twin.model.values<float>(twin.model.params.at(row.name).grad);
    for (size_t i = 0; i < want.size(); ++i) CHECK(want[i] == got[i]);
  }
}

// The same to rounding, where the neutral setting computes the same number in another order. `norms`: what shares the
// work of input_layernorm, by its end of the name; the gradients must then add up to LLaMA's.
inline void check_same(Twin twin, double tolerance,
                       const std::vector<std::string>& norms = {"input_layernorm.weight"}) {
  CHECK(twin.llama.step() == doctest::Approx(twin.model.step()).epsilon(tolerance));
  for (Parameter& row : twin.llama.params.rows()) {
    const std::string norm = "input_layernorm.weight";
    const bool shared = row.name.ends_with(norm);
    std::vector<float> sum(static_cast<size_t>(row.shape.numel()), 0.f);
    int parts = 0;
    for (const std::string& end : shared ? norms : std::vector<std::string>{""}) {
      const std::string name = shared ? row.name.substr(0, row.name.size() - norm.size()) + end : row.name;
      if (!twin.model.params.contains(name)) continue;
      const auto part = twin.model.values<float>(twin.model.params.at(name).grad);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
      ++parts;
    }
    REQUIRE_MESSAGE(parts > 0, row.name);
    check_close(row.name, sum, twin.llama.values<float>(row.grad), 100 * tolerance);
  }
}

// 1 for the last column of a row, 0 elsewhere.
inline double last_column(const Parameter& row, int64_t i) {
  const int64_t width = row.shape[row.shape.rank - 1];
  return i % width == width - 1 ? 1 : 0;
}

}  // namespace crossply::test
