// How an entry point checks its tensors and reaches its three bodies.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// Calls cuda(), or cpu(S{}) with the type S in which tensors of this dtype are stored (float or bf16), or
// reference(T{}) with the scalar T of the plain loops (float or double). They look like [&]<class S>(S) { ... }.
template <class Cuda, class Cpu, class Reference>
void dispatch(Stream stream, Dtype dtype, Cuda&& cuda, Cpu&& cpu, Reference&& reference) {
  if (stream.backend == Backend::cuda) return cuda();
  if (stream.backend == Backend::cpu) return with_storage(dtype, cpu);
  with_real(dtype, reference);
}

// Calls body(flag) with the flag as a constant, for code that is compiled for each of its values.
template <class F>
void with_flag(bool flag, F&& body) {
  if (flag) body(std::true_type{});
  else body(std::false_type{});
}

// A tensor as rows of its last dimension.
struct Rows {
  int64_t count, width;
};
inline Rows rows_of(const Tensor& tensor) {
  const int rank = tensor.shape.rank;
  CHECK_THAT(rank >= 1 && tensor.dim(rank - 1) >= 1, tensor.str());
  return {tensor.numel() / tensor.dim(rank - 1), tensor.dim(rank - 1)};
}

// Where the tensors' elements are; of each item of the list, tensor(item). The vector is the thread's own, so only the
// first step allocates, and holds until these types and slot are asked for again: two lists at once need two slots.
template <class T, int slot = 0, class List, class Projection = std::identity>
const std::vector<T*>& data_of(const List& list, Projection tensor = {}) {
  static thread_local std::vector<T*> data;
  data.clear();
  for (const auto& item : list) data.push_back(std::invoke(tensor, item).template as<std::remove_const_t<T>>());
  return data;
}

// "out f32(2, 3), inp f32(6)", from the text of the macro's arguments and what they are.
template <class... Tensors>
std::string named(std::string_view names, const Tensors&... tensors) {
  std::string text;
  const auto append = [&](const Tensor& tensor) {
    const size_t end = std::min(names.find(','), names.size());
    text += (text.empty() ? "" : ", ") + std::string(names.substr(0, end)) + " " + tensor.str();
    names.remove_prefix(std::min(names.size(), end + 2));
  };
  (append(tensors), ...);
  return text;
}

}  // namespace crossply

// An entry point's promise about the shapes of its tensors, which the error names: CHECK_SHAPES(a == b, out, inp).
#define CHECK_SHAPES(condition, ...) CHECK_THAT(condition, ::crossply::named(#__VA_ARGS__, __VA_ARGS__))
