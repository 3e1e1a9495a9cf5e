// Not yet run on hardware: only in the emulator.
#include "kernels/optim/newton_schulz.h"

#include <map>
#include <utility>

#include "kernels/block/matmul.cuh"
#include "kernels/optim/gradient_norm.h"

namespace crossply {
namespace {

// Matrices of one shape are multiplied together: X lies in scratch memory, one matrix behind the other, and goes back
// and forth between two places. A matrix has the bits that it has alone, whatever is beside it.
//
//   bytes of a matrix (m, n) in scratch: 2 m n + 2 s^2 numbers with s = min(m, n), and 8 for each 4,096 of its own
constexpr int slot_x = 0, slot_next = 1, slot_a = 2, slot_map = 3, slot_sums = 4;
constexpr size_t bytes_at_once = size_t{256} << 20;
constexpr int threads = 256, warps = threads / warp_size;

// to[matrix * pieces + piece] = the squares of a leaf of a matrix of n elements.
template <int width, class S>
__global__ void matrix_squares_kernel(double* to, const Pointers<const S> from, int64_t n) {
  const S* x = from.x[blockIdx.y];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * leaf, end = begin + leaf < n ? begin + leaf : n;
  double sum = 0;
  for (int64_t i = begin + threadIdx.x * width; i < end; i += threads * width) {
    const Floats<width> v = load<width>(x + i);
#pragma unroll
    for (int k = 0; k < width; ++k) sum += static_cast<double>(v[k]) * static_cast<double>(v[k]);
  }
  sum = block_sum<warps>(sum);
  if (threadIdx.x == 0) to[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

// What each matrix is multiplied with at first.
__global__ void first_factor_kernel(double* to, const double* squares, int64_t pieces, double safety) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < pieces; i += threads) sum += squares[static_cast<int64_t>(blockIdx.x) * pieces + i];
  sum = block_sum<warps>(sum);
  const double norm = safety * sqrt(sum);
  if (threadIdx.x == 0) to[blockIdx.x] = 1 / (norm > 1e-7 ? norm : 1e-7);
}

template <int width, class S>
__global__ void scale_matrices_kernel(S* to, int64_t apart, const Pointers<const S> from, const double* factors,
                                      int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(from.x[blockIdx.y] + i);
  const auto by = static_cast<float>(factors[blockIdx.y]);
#pragma unroll
  for (int k = 0; k < width; ++k) x[k] *= by;
  store<width>(to + blockIdx.y * apart + i, x);
}

// Elements from one matrix to the next: each begins at a multiple of 256 bytes.
int64_t apart_of(int64_t n, Dtype dtype) {
  const int64_t unit = 256 / static_cast<int64_t>(size_of(dtype));
  return (n + unit - 1) / unit * unit;
}

// Of scratch memory, for one matrix: the bytes of each slot.
ScratchBytes scratch_of_one(const Shape& shape, Dtype dtype) {
  const int64_t m = shape[0], n = shape[1], small = std::min(m, n);
  ScratchBytes bytes{};
  bytes[slot_x] = bytes[slot_next] = static_cast<size_t>(apart_of(m * n, dtype)) * size_of(dtype);
  bytes[slot_a] = bytes[slot_map] = static_cast<size_t>(apart_of(small * small, dtype)) * size_of(dtype);
  bytes[slot_sums] = static_cast<size_t>(leaves_of(m * n) + 1) * sizeof(double);
  return bytes;
}

// How many matrices of this shape are multiplied at once.
int64_t max_at_once(const Shape& shape, Dtype dtype) {
  size_t one = 0;
  for (const size_t bytes : scratch_of_one(shape, dtype)) one += bytes;
  return std::clamp<int64_t>(static_cast<int64_t>(bytes_at_once / one), 1, max_inputs);
}

// X of all of them, divided by its norm, at `to`.
template <class S>
void begin_iteration(S* to, int64_t apart, const std::vector<Tensor>& batch, double safety) {
  const int64_t n = batch[0].numel(), pieces = leaves_of(n);
  const auto count = static_cast<uint32_t>(batch.size());
  double* squares = scratch<double>(count * (pieces + 1), slot_sums);
  double* factors = squares + count * pieces;
  const auto from = pointers_to<const S>("newton_schulz", batch);
  with_width<S>(n, batch, [&](auto width) {
    launch({"matrix_squares", {static_cast<uint32_t>(pieces), count}, threads}, matrix_squares_kernel<width, S>,
           squares, from, n);
    launch({"first_factor", count, threads}, first_factor_kernel, factors, squares, pieces, safety);
    const uint32_t blocks = blocks_of(n, elementwise_threads * width);
    launch({"scale_matrices", {blocks, count}, elementwise_threads}, scale_matrices_kernel<width, S>, to, apart, from,
           factors, n);
  });
}

template <class S>
void iterate(const std::vector<Tensor>& batch, const NewtonSchulz& iteration) {
  const Dtype dtype = batch[0].dtype;
  const int64_t m = batch[0].dim(0), n = batch[0].dim(1), small = std::min(m, n), large = std::max(m, n);
  const auto count = static_cast<int64_t>(batch.size());
  const int64_t apart = apart_of(m * n, dtype), apart_small = apart_of(small * small, dtype);
  Matrix x{scratch<S>(count * apart, slot_x), dtype, n, false, apart};
  Matrix next{scratch<S>(count * apart, slot_next), dtype, n, false, apart};
  const Matrix a{scratch<S>(count * apart_small, slot_a), dtype, small, false, apart_small};
  const Matrix map{scratch<S>(count * apart_small, slot_map), dtype, small, false, apart_small};
  begin_iteration(static_cast<S*>(x.data), apart, batch, iteration.safety);
  const auto size = [count](int64_t M, int64_t N, int64_t K) { return ProductSize{M, N, K, count, false, true}; };
  for (const auto& step : iteration.steps) {
    const auto c1 = static_cast<float>(step[0]), c3 = static_cast<float>(step[1]), c5 = static_cast<float>(step[2]);
    if (m <= n) multiply(a, x, transposed(x), size(small, small, large), nullptr);
    else multiply(a, transposed(x), x, size(small, small, large), nullptr);
    multiply(map, a, a, size(small, small, small), a.data, {}, {}, {c5, c3});
    if (m <= n) multiply(next, map, x, size(m, n, small), x.data, {}, {}, {1, c1});
    else multiply(next, x, map, size(m, n, small), x.data, {}, {}, {1, c1});
    std::swap(x, next);
  }
  for (int64_t i = 0; i < count; ++i)
    copy_on_device(batch[static_cast<size_t>(i)].data, static_cast<S*>(x.data) + i * apart, batch[0].bytes());
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

ScratchBytes newton_schulz_scratch_cuda(const std::vector<Shape>& matrices, Dtype dtype) {
  std::map<std::pair<int64_t, int64_t>, int64_t> counts;
  for (const Shape& shape : matrices) ++counts[{shape[0], shape[1]}];
  ScratchBytes most{};
  for (const auto& [shape, count] : counts) {
    const Shape one{shape.first, shape.second};
    const auto at_once = static_cast<size_t>(std::min(count, max_at_once(one, dtype)));
    const ScratchBytes bytes = scratch_of_one(one, dtype);
    for (size_t slot = 0; slot < most.size(); ++slot) most[slot] = std::max(most[slot], at_once * bytes[slot]);
  }
  return most;
}

void newton_schulz_cuda(const std::vector<Tensor>& matrices, const NewtonSchulz& iteration) {
  std::map<std::pair<int64_t, int64_t>, std::vector<Tensor>> of_shape;
  for (const Tensor& x : matrices) of_shape[{x.dim(0), x.dim(1)}].push_back(x);
  for (const auto& [shape, all] : of_shape) {
    const auto most = static_cast<size_t>(max_at_once(all[0].shape, all[0].dtype));
    for (size_t begin = 0; begin < all.size(); begin += most) {
      const std::vector<Tensor> batch(all.begin() + static_cast<std::ptrdiff_t>(begin),
                                      all.begin() + static_cast<std::ptrdiff_t>(std::min(begin + most, all.size())));
      with_storage(batch[0].dtype, [&]<class S>(S) { iterate<S>(batch, iteration); });
    }
  }
}

}  // namespace crossply
