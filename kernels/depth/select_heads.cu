// Not yet run on hardware: only in the emulator.
#include "kernels/depth/select_heads.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Every element is read and written once: bytes bound both. A thread has `vectors` accesses under way. The tables come
// as arguments and go to shared memory, where threads can read different places of them at once.
constexpr int max_heads = 256, threads = 256, vectors = 4;

template <class S>
struct Choices {
  const S* head[max_heads];  // the first token's
  int count;
};

// Elements as they are, without a way through floats.
template <int width, class S>
struct alignas(access_bytes<width, S>) Raw {
  S s[width];
};

// from_row: elements from a source's token to the next.
template <int width, class S>
__global__ void __launch_bounds__(threads)
    select_kernel(S* out, const Choices<S> choices, int64_t n, int64_t from_row, int64_t D) {
  SHARED(heads, Array<const S*, max_heads>);
  if (static_cast<int>(threadIdx.x) < choices.count) heads[threadIdx.x] = choices.head[threadIdx.x];
  __syncthreads();
  const auto head_vectors = static_cast<uint32_t>(D / width), count = static_cast<uint32_t>(choices.count);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (threads * vectors) + threadIdx.x;
  Raw<width, S> x[vectors];
#pragma unroll
  for (int k = 0; k < vectors; ++k) {
    const int64_t vector = first + k * threads;
    if (vector * width >= n) break;
    const uint32_t head = static_cast<uint32_t>(vector) / head_vectors;  // of all tokens' heads
    const S* from = heads[head % count] + head / count * from_row;
    x[k] = reinterpret_cast<const Raw<width, S>*>(from)[static_cast<uint32_t>(vector) % head_vectors];
  }
#pragma unroll
  for (int k = 0; k < vectors; ++k)
    if ((first + k * threads) * width < n) reinterpret_cast<Raw<width, S>*>(out)[first + k * threads] = x[k];
}

// As find_readers leaves them.
struct HeadReaderTable {
  int16_t first[max_heads + 1], j[max_heads];
};

template <int width, class S>
__global__ void __launch_bounds__(threads) gather_kernel(S* dsource, const S* dout, const HeadReaderTable readers,
                                                         int64_t n, int64_t K, int64_t J, int64_t D, bool accumulate) {
  SHARED(table, HeadReaderTable);
  for (int i = static_cast<int>(threadIdx.x); i < max_heads + 1; i += threads) table.first[i] = readers.first[i];
  if (threadIdx.x < max_heads) table.j[threadIdx.x] = readers.j[threadIdx.x];
  __syncthreads();
  const auto head_vectors = static_cast<uint32_t>(D / width);
#pragma unroll
  for (int i = 0; i < vectors; ++i) {
    const int64_t vector = static_cast<int64_t>(blockIdx.x) * (threads * vectors) + i * threads + threadIdx.x;
    if (vector * width >= n) return;
    const uint32_t head = static_cast<uint32_t>(vector) / head_vectors;
    const auto k = head % static_cast<uint32_t>(K), token = head / static_cast<uint32_t>(K);
    const S* dy = dout + token * J * D + static_cast<uint32_t>(vector) % head_vectors * width;
    Floats<width> sum = load_if<width>(accumulate, dsource, vector * width);
    for (int r = table.first[k]; r < table.first[k + 1]; ++r) {
      const Floats<width> term = load<width>(dy + table.j[r] * D);
#pragma unroll
      for (int c = 0; c < width; ++c) sum[c] += term[c];
    }
    store<width>(dsource + vector * width, sum);
  }
}

template <class S>
uint32_t blocks_for(int64_t n, int width) {
  CHECK_THAT(n / width < int64_t{1} << 32, "select_heads: ", n, " elements are too many for a GPU");
  return blocks_of(n / width, threads * vectors);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void select_heads_forward_cuda(const Tensor& out, const std::vector<Tensor>& sources,
                               const std::vector<HeadChoice>& choice, int64_t K, int64_t D) {
  CHECK_THAT(choice.size() <= max_heads, "select_heads_forward: ", choice.size(), " heads are too many for a GPU");
  with_storage(out.dtype, [&]<class S>(S) {
    Choices<S> choices;
    choices.count = 0;
    for (const HeadChoice& c : choice)
      choices.head[choices.count++] = sources[static_cast<size_t>(c.source)].as<S>() + c.head * D;
    with_width<S>(aligned16(sources) ? D : 1, {out.data}, [&](auto width) {
      launch({"select_heads", blocks_for<S>(out.numel(), width), threads}, select_kernel<width, S>, out.as<S>(),
             choices, out.numel(), K * D, D);
    });
  });
}

void select_heads_backward_cuda(const Grad& dsource, const Tensor& dout, const std::vector<HeadChoice>& choice,
                                int source, int64_t K, int64_t D) {
  const int64_t J = static_cast<int64_t>(choice.size());
  CHECK_THAT(K <= max_heads && J <= max_heads, "select_heads_backward: ", K, " or ", J,
             " heads are too many for a GPU");
  HeadReaderTable readers{};
  find_readers(readers.first, readers.j, choice, source, K);
  if (dsource.accumulate && readers.first[K] == 0) return;
  with_access(dsource.dtype, D, {dsource.data, dout.data}, [&]<class S>(S, auto width) {
    launch({"select_heads_backward", blocks_for<S>(dsource.numel(), width), threads}, gather_kernel<width, S>,
           dsource.as<S>(), dout.as<S>(), readers, dsource.numel(), K, J, D, dsource.accumulate);
  });
}

}  // namespace crossply
