// What losses on the logits of a head share on the CPU: which rows are scored, their logits by chunks, exponentials.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/block/matmul.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

namespace crossply {

// e = exp(factor * (z - largest)) for one row; returns the sum. e may be z. What cannot change a float sum becomes 0,
// so that no denormals reach the products; NaN takes the other branch. A float sum over the whole vocabulary would
// drift, hence blocks.
template <class S>
double exponentials_of(float* e, const S* z, float largest, int64_t V, float factor = 1) {
  double sum = 0;
  for (int64_t begin = 0; begin < V; begin += 2048) {
    Vec16 part{};
    for_vectors(begin, std::min(V, begin + 2048), [&](int64_t v, auto count) {
      Vec16 x;
      load(x, z + v, count);
      x = factor * (x - largest);
      Vec16 exponential = x;
      exp_in_place(exponential);
      put_where_less(exponential, x, Vec16{} - 60.f, Vec16{});
      clear_beyond(exponential, count);
      part += exponential;
      store(e + v, exponential, count);
    });
    sum += static_cast<double>(sum_of_lanes(part));
  }
  return sum;
}

// The numbers of the scored rows, ascending. The other rows get their zeros here; dinp may be null.
template <class S>
const std::vector<int64_t>& scored_rows(float* losses, S* dinp /*(rows,C)*/, const int32_t* targets, int64_t rows,
                                        int64_t C) {
  std::vector<int64_t>& scored = empty_list<int64_t>();
  scored.reserve(static_cast<size_t>(rows));
  for (int64_t n = 0; n < rows; ++n) {
    if (targets[n] >= 0) {
      scored.push_back(n);
    } else {
      losses[n] = 0;
      if (dinp != nullptr) std::fill(dinp + n * C, dinp + (n + 1) * C, S(0.f));
    }
  }
  return scored;
}

// `to` row to_row(i) = `from` row from_row(i), for each i below count.
template <class S, class To, class From>
void copy_rows(S* to, const S* from, int64_t count, int64_t C, To to_row, From from_row) {
  parallel_for(count, 32768 / C, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) std::copy_n(from + from_row(i) * C, C, to + to_row(i) * C);
  });
}

// Rows whose logits exist at the same time: 64 MB of them, but never below 128, because every chunk reads the weight
// twice and updates dweight (64 rows were slower by a quarter at V = 128000), and few enough to gather cheaply.
template <class S>
int64_t chunk_rows(int64_t V) {
  return std::clamp<int64_t>((int64_t{64} << 20) / (V * static_cast<int64_t>(sizeof(S))), 128, 4096);
}

template <class S>
S* head_scratch(int64_t count, int slot) {
  return reinterpret_cast<S*>(scratch_f32((static_cast<size_t>(count) * sizeof(S) + 3) / 4, slot));
}

// Calls loss(row, count, z) for the scored rows, chunk by chunk: z (count, V) has the logits of the rows row[0], row[1]
// and so on of inp (rows, C), and becomes dz. From that dinp (rows, C), unless null, and dweight (V, C) get theirs.
// Without any scored row a dweight that is set becomes zeros.
template <class S, class Loss>
void for_logits(const std::vector<int64_t>& scored, S* dinp, const Grad& dweight, const S* inp, const S* weight,
                int64_t V, int64_t C, Stream stream, Loss loss) {
  const int64_t total = static_cast<int64_t>(scored.size()), most = std::min(total, chunk_rows<S>(V));
  S* z = head_scratch<S>(most * V, 2);
  S* gathered = head_scratch<S>(2 * most * C, 3);  // the rows of inp, then those of dinp
  const Tensor head = view(weight, {V, C});
  if (total == 0 && dinp != nullptr && !dweight.accumulate) std::fill_n(dweight.as<float>(), V * C, 0.f);
  for (int64_t begin = 0; begin < total; begin += most) {
    const int64_t count = std::min(most, total - begin);
    const int64_t* row = scored.data() + begin;
    const auto own = [=](int64_t i) { return row[i]; };
    const auto packed = [](int64_t i) { return i; };
    const bool in_place = row[count - 1] - row[0] == count - 1;  // no gaps: nothing to gather
    if (!in_place) copy_rows(gathered, inp, count, C, packed, own);
    const S* x = in_place ? inp + row[0] * C : gathered;
    matmul_forward({view(z, {count, V})}, view(x, {count, C}), {head}, stream);
    loss(row, count, z);
    if (dinp == nullptr) continue;
    S* dx = in_place ? dinp + row[0] * C : gathered + most * C;
    matmul_backward_weight({dweight, dweight.accumulate || begin > 0}, view(z, {count, V}), view(x, {count, C}),
                           stream);
    matmul_backward_input({view(dx, {count, C}), false}, {view(z, {count, V})}, {head}, stream);
    if (!in_place) copy_rows(dinp, dx, count, C, own, packed);
  }
}

}  // namespace crossply
