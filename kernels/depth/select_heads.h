// Heads chosen across the depth, as skip-layer attention reads them: every output head is one head of one of several
// layers' keys (or values).
//
//   out[b,t,j,:] = sources[choice[j].source][b,t,choice[j].head,:]
//
//   dsource[b,t,k,:] = sum over the j that chose head k of this source of dout[b,t,j,:]       set, or added
//
// A head that nobody chose gets zero when set. sources, dsource: (B,T,K,D); out, dout: (B,T,J,D) with J the size of
// choice. On the CPU all are f32 or all bf16. No output may alias an input.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/depth/members.h"

namespace crossply {

void select_heads_forward(const Tensor& out, const std::vector<Tensor>& sources, const std::vector<HeadChoice>& choice,
                          Stream stream);
// The gradient of one source; call it once for each.
void select_heads_backward(const Grad& dsource, const Tensor& dout, const std::vector<HeadChoice>& choice, int source,
                           Stream stream);

// kernels/depth/select_heads.cu
CUDA_TWIN void select_heads_forward_cuda(const Tensor& out, const std::vector<Tensor>& sources,
                                         const std::vector<HeadChoice>& choice, int64_t K, int64_t D);
CUDA_TWIN void select_heads_backward_cuda(const Grad& dsource, const Tensor& dout,
                                          const std::vector<HeadChoice>& choice, int source, int64_t K, int64_t D);

// The gather's lists: head k of the source was chosen as heads j[first[k]] to j[first[k + 1] - 1] of out, for which
// first(K+1) and j(J) have room.
template <class Index>
void find_readers(Index* first, Index* j, const std::vector<HeadChoice>& choice, int source, int64_t K) {
  Index count = first[0] = 0;
  for (int64_t k = 0; k < K; ++k) {
    for (size_t i = 0; i < choice.size(); ++i)
      if (choice[i].source == source && choice[i].head == k) j[count++] = static_cast<Index>(i);
    first[k + 1] = count;
  }
}

template <class T>
void select_heads_forward_ref(T* out, const std::vector<const T*>& sources, const std::vector<HeadChoice>& choice,
                              int64_t N, int64_t K, int64_t D) {
  for (int64_t n = 0; n < N; ++n) {
    for (const HeadChoice& c : choice) {
      const T* from = sources[static_cast<size_t>(c.source)] + (n * K + c.head) * D;
      out = std::copy(from, from + D, out);
    }
  }
}

template <class T>
void select_heads_backward_ref(T* dsource, const T* dout, const std::vector<HeadChoice>& choice, int source, int64_t N,
                               int64_t K, int64_t D, bool accumulate) {
  if (!accumulate) std::fill(dsource, dsource + N * K * D, T(0));
  for (int64_t n = 0; n < N; ++n) {
    for (const HeadChoice& c : choice) {
      if (c.source == source)
        for (int64_t d = 0; d < D; ++d) dsource[(n * K + c.head) * D + d] += dout[d];
      dout += D;
    }
  }
}

}  // namespace crossply
