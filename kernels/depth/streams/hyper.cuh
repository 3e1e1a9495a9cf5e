// What hyper.cu and hyper_read.cu share. A warp takes a token, a lane the same columns of all its streams: these are in
// registers, in arrays for `most` streams, of which E are there: all of them where E is a constant, `exact`, so that no
// load waits behind a test; exact = 0 stands for any E.
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/cuda/cuda.cuh"
#include "kernels/depth/streams/hyper.h"

namespace crossply::hyper {

constexpr int warps = 8;  // tokens a block

template <int exact>
constexpr int max_of = exact > 0 ? exact : static_cast<int>(max_streams);
template <int exact>
__device__ __forceinline__ int number_of_streams(int E) {
  return exact > 0 ? exact : E;
}

// Calls body(S{}, exact, wide) with constants: the storage, E if it is one of the usual numbers (0: any), and whether
// 16-byte accesses fit.
template <class F>
void with_instance(Dtype dtype, int64_t E, int64_t C, std::initializer_list<const void*> tensors, F&& body) {
  with_storage(dtype, [&]<class S>(S storage) {
    with_width<S>(C, tensors, [&](auto width) {
      if constexpr (width == 1) body(storage, std::integral_constant<int, 0>{}, std::false_type{});
      else if (E == 2) body(storage, std::integral_constant<int, 2>{}, std::true_type{});
      else if (E == 4) body(storage, std::integral_constant<int, 4>{}, std::true_type{});
      else if (E == 8) body(storage, std::integral_constant<int, 8>{}, std::true_type{});
      else body(storage, std::integral_constant<int, 0>{}, std::true_type{});
    });
  });
}

// Columns of a stream to a lane, where sums for all pairs of streams are in registers too.
template <int exact, bool wide, class S>
constexpr int width_with_sums = wide ? (max_of<exact> == 8 ? 4 : widest<S>) : 1;

template <int width>
using Columns = Floats<width>;

// Columns c.. of a token's streams x (E,C); 0 where there is no stream.
template <int most, int width, class S>
__device__ __forceinline__ void load_streams(Array<Columns<width>, most>& to, const S* x, int E, int64_t C, int64_t c) {
#pragma unroll
  for (int i = 0; i < most; ++i) {
    to[i] = {};
    if (i < E) to[i] = load<width>(x + i * C + c);
  }
}

// The same as it lies in memory, from x (E,C) on. An int counts the elements of a token, in fewer instructions.
template <int most, int width, class S>
__device__ __forceinline__ void load_streams(Array<Packed<width, S>, most>& to, const S* x, int E, int C) {
#pragma unroll
  for (int i = 0; i < most; ++i) {
    to[i] = {};
    if (i < E) to[i] = load_packed<width>(x + i * C);
  }
}

// sum += a * x
template <int64_t width>
__device__ __forceinline__ void add_scaled(Array<float, width>& sum, float a, const Array<float, width>& x) {
#pragma unroll
  for (int i = 0; i < width; ++i) sum[i] += a * x[i];
}

template <int64_t width>
__device__ __forceinline__ float dot(const Array<float, width>& a, const Array<float, width>& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < width; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace crossply::hyper
