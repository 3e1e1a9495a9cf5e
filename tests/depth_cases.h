// What the tests of kernels/depth share. A case is a struct of vectors, given and computed, whose members() names them
// all: so that the same case exists in other types, and can be looked at as one list of numbers.
#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

namespace crossply::test {

constexpr Stream fast{Backend::cpu}, reference{Backend::reference};

// Those that store in T.
template <class T>
std::vector<Backend> backends_of() {
  return std::is_same_v<T, bf16> ? fast_backends() : all_backends();
}

// Calls body(backend, size) for what is to be tested against the reference: emulated, small sizes have to do.
template <class Size, class F>
void for_sizes(const std::vector<Size>& of_cpu, const std::vector<Size>& of_gpu, F&& body) {
  for (const Backend backend : fast_backends())
    for (const Size& size : backend == Backend::cuda ? of_gpu : of_cpu) {
      CAPTURES(backend);
      body(backend, size);
    }
}

// A vector as a tensor, an empty one as a tensor without data.
template <class T>
Tensor tensor_of(const std::vector<T>& x, Shape shape) {
  return x.empty() ? Tensor{} : view(x, shape);
}
template <class T>
Tensor tensor_of(const std::vector<T>& x) {
  return tensor_of(x, Shape{static_cast<int64_t>(x.size())});
}
template <class T>
std::vector<Tensor> tensors_of(const std::vector<std::vector<T>>& rows, Shape shape) {
  std::vector<Tensor> list;
  for (const auto& row : rows) list.push_back(tensor_of(row, shape));
  return list;
}

// One list after the other.
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

// Where it is NaN.
template <class T>
std::vector<size_t> nans_of(const std::vector<T>& x) {
  std::vector<size_t> found;
  for (size_t i = 0; i < x.size(); ++i)
    if (is_nan(x[i])) found.push_back(i);
  return found;
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
