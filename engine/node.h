// Helpers for the files that define nodes.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/tape.h"

namespace crossply {

template <class N>
std::unique_ptr<N> make_node(const std::string& name, std::vector<Value*> in, std::vector<Value*> out) {
  auto node = std::make_unique<N>();
  node->name = name;
  node->in = std::move(in);
  node->out = std::move(out);
  return node;
}

// The tensors of values that may be null, and of their gradients.
inline Tensor tensor_of(const Value* value) { return value != nullptr ? value->tensor : Tensor{}; }
inline Tensor grad_of(const Value* value) {
  return value != nullptr && value->grad != nullptr ? value->grad->tensor : Tensor{};
}

// The matrix that multiplies activations: on a bf16 tape the parameter's bf16 copy, else the parameter.
inline Tensor matmul_weight(const Value* weight, Dtype activations) {
  return activations == Dtype::bf16 ? weight->parameter->bf16_copy : weight->tensor;
}

inline std::vector<Tensor> tensors_of(const std::vector<Value*>& values) {
  std::vector<Tensor> list;
  for (const Value* value : values) list.push_back(tensor_of(value));
  return list;
}
inline std::vector<Tensor> grads_of(const std::vector<Value*>& values) {
  std::vector<Tensor> list;
  for (const Value* value : values) list.push_back(grad_of(value));
  return list;
}

// The values of the list that are not null.
inline std::vector<Value*> present(std::vector<Value*> values) {
  std::erase(values, nullptr);
  return values;
}

inline std::vector<Value*> joined(std::vector<Value*> a, const std::vector<Value*>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace crossply
