// Tensor: a typed view of memory that somebody else owns. Always dense and row-major, at most four dimensions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/check.h"
#include "engine/dtype.h"

namespace crossply {

// Sizes of the dimensions, outermost first: Shape{B, T, C}.
struct Shape {
  std::array<int64_t, 4> dim{1, 1, 1, 1};
  int rank = 0;

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) {
    CHECK_THAT(sizes.size() <= 4, "a tensor has at most 4 dimensions, got ", sizes.size());
    int64_t product = 1;
    for (int64_t size : sizes) {
      dim[rank++] = size;
      if (__builtin_mul_overflow(product, size, &product) || product > (int64_t{1} << 46))
        fail(Exit::usage, "a tensor of this shape is larger than any memory: ", str());
    }
  }
  int64_t operator[](int i) const { return dim[i]; }
  int64_t numel() const { return dim[0] * dim[1] * dim[2] * dim[3]; }
  bool operator==(const Shape& o) const { return rank == o.rank && dim == o.dim; }
  std::string str() const {
    std::string s = "(";
    for (int i = 0; i < rank; ++i) s += (i ? ", " : "") + std::to_string(dim[i]);
    return s + ")";
  }
};

// Memory begins at a multiple of so many bytes, and so does every tensor of a tape that has a place of its own.
constexpr size_t place_unit = 256;

struct Tensor {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
  Shape shape;

  int64_t dim(int i) const { return shape.dim[i]; }
  int64_t numel() const { return shape.numel(); }
  size_t bytes() const { return static_cast<size_t>(numel()) * size_of(dtype); }
  // Typed access; a wrong type is a bug, so it is loud.
  template <class T>
  T* as() const {
    CHECK_THAT(dtype == DtypeOf<T>::value, "tensor is ", name_of(dtype), ", asked for ", name_of(DtypeOf<T>::value));
    return static_cast<T*>(data);
  }
  std::string str() const { return std::string(name_of(dtype)) + shape.str(); }
};

// The gradient that a backward writes: it accumulates into the old values, or overwrites them.
struct Grad : Tensor {
  bool accumulate = false;

  Grad() = default;
  Grad(const Tensor& tensor, bool accumulates) : Tensor(tensor), accumulate(accumulates) {}
};

template <class T>
T* data_or_null(const Tensor& tensor) {
  return tensor.data == nullptr ? nullptr : tensor.as<std::remove_const_t<T>>();
}

// A Tensor does not carry const: every kernel's contract says what it writes.
template <class T>
Tensor view(const T* data, Shape shape) {
  return Tensor{const_cast<T*>(data), DtypeOf<T>::value, shape};
}

// Calls body(float{}) or body(double{}), whichever the dtype names: how an entry point reaches its templated reference.
template <class F>
void with_real(Dtype dtype, F&& body) {
  CHECK_THAT(dtype == Dtype::f32 || dtype == Dtype::f64, "expected an f32 or f64 tensor, got ", name_of(dtype));
  if (dtype == Dtype::f64) body(double{});
  else body(float{});
}

// Calls body(float{}) or body(bf16{}): how an entry point reaches its fast code, which stores in that type.
template <class F>
void with_storage(Dtype dtype, F&& body) {
  CHECK_THAT(dtype == Dtype::f32 || dtype == Dtype::bf16, "expected an f32 or bf16 tensor, got ", name_of(dtype));
  if (dtype == Dtype::bf16) body(bf16{});
  else body(float{});
}

}  // namespace crossply
