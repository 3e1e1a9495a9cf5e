// The scales of tensors that are rounded to eight bits, from what was largest in them in the last steps: so a tensor is
// read once, and its scale is there before it is. As Transformer Engine's recipe of that name has it (its release 2,
// DelayedScaling), but for the scales, which are powers of two here: they round nothing themselves.
//
//   m = the largest amax of the last `remembered` steps        scale = 2^floor(log2(largest / m)), or 1 where m is 0
//
// largest: the largest number of the eight bits. What is larger than any of the last steps' numbers by so much that it
// does not fit becomes the largest. An amax that is not finite counts as 0.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/tape.h"

namespace crossply {

class DelayedScales {
 public:
  static constexpr size_t remembered = 16;

  explicit DelayedScales(const std::vector<QuantizedTensor>& tensors);
  bool empty() const { return histories_.empty(); }
  // One step's largest numbers, in the tensors' order; of several rows of as many, as of ranks, the largest. Returns
  // the first tensor of which one is not finite, for what is rounded to eight bits is finite again; else "".
  std::string add(const std::vector<float>& amaxes);
  // 2^k and 2^-k, in the tensors' order.
  std::vector<float> scales() const;
  std::vector<float> inverses() const;

  // {"L0.attn.project.in": [3.25, 3.5], ...}: the latest last.
  nlohmann::json to_json() const;
  // Throws Exit::bad_data, with `where`, for what to_json has not written of these tensors.
  void read(const nlohmann::json& json, const std::string& where);

 private:
  int exponent(size_t i) const;  // k
  std::vector<QuantizedTensor> tensors_;
  std::vector<std::vector<float>> histories_;
};

}  // namespace crossply
