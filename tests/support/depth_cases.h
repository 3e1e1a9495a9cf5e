// What the tests of kernels/depth share. A case is a struct of vectors, given and computed, whose members() names them
// all: so that the same case exists in other types, and can be looked at as one list of numbers.
#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

#include "tests/support/op.h"

namespace crossply::test {

// Those that store in T.
template <class T>
std::vector<Backend> backends_of() {
  return std::is_same_v<T, bf16> ? fast_backends() : all_backends();
}

// A vector as a tensor, an empty one as a tensor without data.
template <class T>
Tensor tensor_of(const std::vector<T>& x, Shape shape) {
  return x.empty() ? Tensor{} : view(x.data(), shape);
}
template <class T>
Tensor tensor_of(const std::vector<T>& x) {
  return tensor_of(x, Shape{static_cast<int64_t>(x.size())});
}

// The lists, one after the other.
template <class T>
std::vector<T> joined(const std::vector<std::vector<T>>& parts) {
  std::vector<T> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

template <class To, class From>
void convert_into(std::vector<To>& to, const std::vector<From>& from) {
  to = convert<To>(from);
}
template <class To, class From>
void convert_into(std::vector<std::vector<To>>& to, const std::vector<std::vector<From>>& from) {
  to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = convert<To>(from[i]);
}
// The case `from` in the types of `to`.
template <class To, class From>
void convert_members(To& to, From& from) {
  std::apply([&](auto&... out) { std::apply([&](auto&... in) { (convert_into(out, in), ...); }, from.members()); },
             to.members());
}

template <class T>
std::vector<float> flat(const std::vector<T>& x) {
  return convert<float>(x);
}
template <class T>
std::vector<float> flat(const std::vector<std::vector<T>>& parts) {
  return convert<float>(joined(parts));
}
// These vectors, or vectors of them, as one list of floats.
template <class... Parts>
std::vector<float> flat(const Parts&... parts) requires(sizeof...(Parts) > 1) {
  return joined(std::vector<std::vector<float>>{flat(parts)...});
}

// For memory that begins between two multiples of 16 bytes: x behind one element more, and what comes of it.
template <class T>
std::vector<T> one_later(std::vector<T> x) {
  x.insert(x.begin(), T(0));
  return x;
}
template <class T>
std::vector<T> one_earlier(std::vector<T> x) {
  x.erase(x.begin());
  return x;
}
template <class T>
Tensor from_second(const Tensor& x, Shape shape) {
  return view(x.as<T>() + 1, shape);
}

}  // namespace crossply::test
