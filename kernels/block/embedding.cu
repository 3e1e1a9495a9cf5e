// Not yet run on hardware: only in the emulator.
#include "kernels/block/embedding.h"

#include <bit>

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int threads = 256;

// A token that is not a word makes its row NaN: the host cannot look at tokens without waiting for the GPU. Bound by
// memory: a row of the table in f32 and one of out.
template <int width, class S>
__global__ void embedding_forward_kernel(S* out, const float* weight, const int32_t* tokens, int64_t rows, int64_t V,
                                         int64_t C) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (n >= rows) return;
  const int64_t token = tokens[n];
  const bool known = token >= 0 && token < V;
  for (int64_t c = threadIdx.x * width; c < C; c += blockDim.x * width) {
    Floats<width> x;
    if (known) x = load<width>(weight + token * C + c);
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = known ? x[i] : NAN;
    store<width>(out + n * C + c, x);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// The backward sorts the positions by word, and by position where the word is the same. Then the rows of dout that a
// word's row takes are neighbours in the list, however frequent the word is.

// The word in the upper half, the position in the lower; what is no word comes last.
constexpr uint64_t no_key = ~uint64_t{0};
constexpr uint32_t no_word = ~uint32_t{0};
__device__ __forceinline__ uint32_t word_of(uint64_t key) { return static_cast<uint32_t>(key >> 32); }

__global__ void make_keys_kernel(uint64_t* keys, const int32_t* tokens, int64_t rows, int64_t V, int64_t count) {
  const int64_t n = first_of_thread<1>();
  if (n >= count) return;
  const int64_t token = n < rows ? tokens[n] : -1;
  const bool known = token >= 0 && token < V;
  keys[n] = known ? static_cast<uint64_t>(token) << 32 | static_cast<uint64_t>(n) : no_key;
}

// Bitonic: runs of `size` keys become sorted, up and down in turn, by exchanges over distances size / 2, size / 4, ...;
// all keys differ, so there is one result. These fit into shared memory:
constexpr int tile = sort_tile;
__device__ __forceinline__ void sort_pair(uint64_t& low, uint64_t& high, bool up) {
  if ((low > high) != up) return;
  const uint64_t before = low;
  low = high, high = before;
}

__global__ void sort_tile_kernel(uint64_t* keys, int64_t first_size, int64_t last_size) {
  SHARED(own, Array<uint64_t, tile>);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * tile;
  for (int i = static_cast<int>(threadIdx.x); i < tile; i += threads) own[i] = keys[begin + i];
  for (int64_t size = first_size; size <= last_size; size *= 2) {
    for (int distance = size < tile ? static_cast<int>(size) / 2 : tile / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int pair = static_cast<int>(threadIdx.x); pair < tile / 2; pair += threads) {
        const int low = 2 * pair - (pair & (distance - 1));
        sort_pair(own[low], own[low + distance], ((begin + low) & size) == 0);
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < tile; i += threads) keys[begin + i] = own[i];
}

__global__ void sort_step_kernel(uint64_t* keys, int64_t size, int64_t distance, int64_t pairs) {
  const int64_t pair = first_of_thread<1>();
  if (pair >= pairs) return;
  const int64_t low = 2 * pair - (pair & (distance - 1));
  sort_pair(keys[low], keys[low + distance], (low & size) == 0);
}

// A window is so many neighbours in the list. Its sums go to dweight where their word begins in it; the first goes to
// the window's row of `partial` (windows, C) where its word began before. Bound by memory: dout once, and the rows of
// dweight that have words.
constexpr int window = sort_window, at_once = 4;

template <int width, class S>
__global__ void embedding_backward_kernel(float* dweight, float* partial, const S* dout, const uint64_t* keys,
                                          int64_t rows, int64_t C) {
  const int64_t w = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * width;
  const int64_t begin = w * window, end = begin + window < rows ? begin + window : rows;
  if (begin >= rows || c >= C) return;
  uint32_t word = word_of(keys[begin]);
  bool goes_on = begin > 0 && word_of(keys[begin - 1]) == word;
  Floats<width> sum{};
  const auto write = [&] {
    if (word != no_word)
      store_or_accumulate<width>((goes_on ? partial + w * C : dweight + word * C) + c, sum, !goes_on);
  };
  for (int64_t first = begin; first < end; first += at_once) {
    uint64_t key[at_once];
    Floats<width> x[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) key[i] = first + i < end ? keys[first + i] : no_key;
#pragma unroll
    for (int i = 0; i < at_once; ++i)  // several rows are on their way before the first is added
      x[i] = load_if<width>(key[i] != no_key, dout, static_cast<int64_t>(key[i] & no_word) * C + c);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (word_of(key[i]) != word) {
        write();
        word = word_of(key[i]), goes_on = false, sum = {};
      }
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] += x[i][k];
    }
  }
  write();
}

// Adds to dweight what the windows after the one in which a word begins have of it, in order.
template <int width>
__global__ void embedding_join_kernel(float* dweight, const float* partial, const uint64_t* keys, int64_t windows,
                                      int64_t C) {
  const int64_t w = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * width;
  if (w + 1 >= windows || c >= C) return;
  const uint32_t word = word_of(keys[(w + 1) * window]);
  if (word == no_word || word_of(keys[(w + 1) * window - 1]) != word) return;  // ends here
  if (w > 0 && word_of(keys[w * window - 1]) == word) return;                  // began before
  int64_t last = w + 1, beyond = windows;                                      // of the windows that begin with it
  while (beyond - last > 1) {
    const int64_t middle = (last + beyond) / 2;
    if (word_of(keys[middle * window]) == word) last = middle;
    else beyond = middle;
  }
  Floats<width> sum{};
#pragma unroll 4
  for (int64_t other = w + 1; other <= last; ++other) {
    const Floats<width> x = load<width>(partial + other * C + c);
#pragma unroll
    for (int k = 0; k < width; ++k) sum[k] += x[k];
  }
  store_or_accumulate<width>(dweight + word * C + c, sum, true);
}

// The keys of all positions in order, and no_key up to a power of two.
const uint64_t* sorted_keys(const int32_t* tokens, int64_t rows, int64_t V) {
  const auto count = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(rows, tile))));
  uint64_t* keys = scratch<uint64_t>(count);
  const auto sort_tiles = [&](int64_t first_size, int64_t last_size) {
    launch({"sort_tile", blocks_of(count, tile), threads}, sort_tile_kernel, keys, first_size, last_size);
  };
  launch_elementwise("make_keys", count, 1, make_keys_kernel, keys, tokens, rows, V);
  sort_tiles(2, tile);
  for (int64_t size = 2 * tile; size <= count; size *= 2) {
    for (int64_t distance = size / 2; distance >= tile; distance /= 2)
      launch_elementwise("sort_step", count / 2, 1, sort_step_kernel, keys, size, distance);
    sort_tiles(size, size);
  }
  return keys;
}

// Threads side by side over the columns, and as many rows as then have room in a block.
dim3 block_for(int64_t C, int width) {
  const int64_t warps = (C / width + warp_size - 1) / warp_size;
  const auto across = static_cast<uint32_t>(std::min<int64_t>(warps * warp_size, threads));
  return dim3(across, threads / across);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void embedding_forward_cuda(const Tensor& out, const Tensor& weight, const Tensor& tokens) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = tokens.numel();
  with_access(out.dtype, C, {out.data, weight.data}, [&]<class S>(S, auto width) {
    const dim3 block = block_for(C, width);
    launch({"embedding_forward", blocks_of(rows, block.y), block}, embedding_forward_kernel<width, S>, out.as<S>(),
           weight.as<float>(), tokens.as<int32_t>(), rows, V, C);
  });
}

void embedding_backward_cuda(const Tensor& dweight, const Tensor& dout, const Tensor& tokens) {
  const int64_t V = dweight.dim(0), C = dweight.dim(1), rows = tokens.numel();
  CHECK_THAT(rows < int64_t{1} << 32, "embedding_backward: tokens ", tokens.str());
  const uint64_t* keys = sorted_keys(tokens.as<int32_t>(), rows, V);
  const int64_t windows = (rows + window - 1) / window;
  float* partial = scratch<float>(windows * C, 1);
  with_access(dout.dtype, C, {dweight.data, dout.data}, [&]<class S>(S, auto width) {
    const dim3 block = block_for(C, width), grid(blocks_of(windows, block.y), blocks_of(C, block.x * width));
    launch({"embedding_backward", grid, block}, embedding_backward_kernel<width, S>, dweight.as<float>(), partial,
           dout.as<S>(), keys, rows, C);
    launch({"embedding_join", grid, block}, embedding_join_kernel<width>, dweight.as<float>(), partial, keys, windows,
           C);
  });
}

}  // namespace crossply
