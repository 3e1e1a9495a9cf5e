// A tiny model beside the plain backbone with the same weights: what an architecture must equal at a neutral setting.
#pragma once

#include <string>
#include <vector>

#include "models/registry.h"
#include "tests/support/tiny.h"

namespace crossply::test {

struct Twin {
  TinyModel plain, model;

  explicit Twin(const Config& config) : plain(plain_of(config), "cpu"), model(config, "cpu") {}
  // The model with the plain one's weights where it has them, and its own parameters set by `neutral`.
  Twin(const Config& config, const std::function<void(TinyModel&)>& neutral) : Twin(config) {
    model.take(plain);
    neutral(model);
  }
};

// Losses and all gradients that both have, bit for bit.
inline void check_same_bits(Twin twin) {
  CHECK(twin.plain.step() == twin.model.step());
  for (Parameter& row : twin.plain.params.rows()) {
    if (!twin.model.params.contains(row.name)) continue;
    CAPTURE(row.name);
    const auto want = twin.plain.values<float>(row.grad);
    const auto got = twin.model.values<float>(twin.model.params.at(row.name).grad);
    for (size_t i = 0; i < want.size(); ++i) CHECK(want[i] == got[i]);
  }
}

// The same to rounding, where the neutral setting computes the same number in another order. `norms`: what shares the
// work of input_layernorm; the gradients must then add up to the plain one's.
inline void check_same(Twin twin, double tolerance, const std::vector<std::string>& norms = {"input_layernorm"}) {
  CHECK(twin.plain.step() == doctest::Approx(twin.model.step()).epsilon(tolerance));
  for (Parameter& row : twin.plain.params.rows()) {
    if (is_key_bias(row, twin.plain.config)) continue;
    const std::string norm = "input_layernorm";
    const size_t at = row.name.find(norm);
    const bool shared = at != std::string::npos;
    std::vector<float> sum(static_cast<size_t>(row.shape.numel()), 0.f);
    int parts = 0;
    for (const std::string& other : shared ? norms : std::vector<std::string>{""}) {
      const std::string name = shared ? row.name.substr(0, at) + other + row.name.substr(at + norm.size()) : row.name;
      if (!twin.model.params.contains(name)) continue;
      const auto part = twin.model.values<float>(twin.model.params.at(name).grad);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
      ++parts;
    }
    REQUIRE_MESSAGE(parts > 0, row.name);
    check_close(row.name, sum, twin.plain.values<float>(row.grad), 100 * tolerance);
  }
}

// 1 for the last column of a row, 0 elsewhere.
inline double last_column(const Parameter& row, int64_t i) {
  const int64_t width = row.shape[row.shape.rank - 1];
  return i % width == width - 1 ? 1 : 0;
}

}  // namespace crossply::test
