// Sums over the rows of several sources, on the CPU: what the mixtures over depth have in common (depth_mix.cpp,
// query_mix.cpp, depth_attention.cpp, kernels/attention/depth_merge.cpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

namespace crossply {

// sum_c a[c] * b[c] over columns [begin, end). One machine code for all that need the columns behind the last whole
// vector: with one source, the backward's own dot must be pbar to the bit, and inlined twice it could be rounded twice.
template <class Vec, class A, class B>
[[gnu::noinline]] float dot_columns(const A* a, const B* b, int64_t begin, int64_t end) {
  Vec dot = {}, u, v;
  for (int64_t c = begin; c < end; c += lanes_of<Vec>) {
    load(u, a + c);
    load(v, b + c);
    dot += u * v;
  }
  return sum_of_lanes(dot);
}

// The dot product of whole rows. All kernels that need the same bits call this one.
template <class A, class B>
float dot_row(const A* a, const B* b, int64_t width) {
  const int64_t whole = width / lanes_of<Vec16> * lanes_of<Vec16>;
  return dot_columns<Vec16>(a, b, 0, whole) + dot_columns<float>(a, b, whole, width);
}

// Columns [begin, end) of mix_row, for a few inputs whose sums stay in registers: out = from + them, from may be null.
template <class Vec, int Inputs, bool Dot, class Out, class From, class S>
void mix_columns(Out* out, From from, float* dots, const S* inp, const S* const* inputs, const float* weights,
                 int64_t at, int64_t begin, int64_t end) {
  constexpr bool accumulate = !std::is_null_pointer_v<From>;
  const S* x[Inputs];
  float w[Inputs];
  Vec dot[Inputs] = {};
  for (int i = 0; i < Inputs; ++i) x[i] = inputs[i] + at, w[i] = weights[i];
  for (int64_t c = begin; c < end; c += lanes_of<Vec>) {
    Vec total, y, v;
    if constexpr (Dot) load(y, inp + c);
    if constexpr (accumulate) load(total, from + c);
    for (int i = 0; i < Inputs; ++i) {
      load(v, x[i] + c);
      if constexpr (Dot) dot[i] += v * y;
      if (accumulate || i > 0) total += w[i] * v;
      else total = w[i] * v;  // not 0 + w * v, which would lose the sign of -0
    }
    store(out + c, total);
  }
  if constexpr (Dot)
    for (int i = 0; i < Inputs; ++i) dots[i] += sum_of_lanes(dot[i]);
}

template <int Inputs, bool Dot, class Out, class From, class S>
void mix_group(Out* out, From from, float* dots, const S* inp, const S* const* x, const float* w, int64_t at,
               int64_t width) {
  const int64_t whole = width / lanes_of<Vec16> * lanes_of<Vec16>;
  if (whole > 0) mix_columns<Vec16, Inputs, Dot>(out, from, dots, inp, x, w, at, 0, whole);
  if (whole == width) return;
  mix_columns<float, Inputs, false>(out, from, nullptr, inp, x, w, at, whole, width);
  if constexpr (Dot)
    for (int i = 0; i < Inputs; ++i) dots[i] += dot_columns<float>(x[i] + at, inp, whole, width);
}

// The sum of a row between two groups of inputs, which must not be rounded: in the row itself if that is of floats.
template <class Out>
float* sums_of(Out* out, int64_t width) {
  if constexpr (std::is_same_v<Out, float>) return out;
  else return scratch_f32(static_cast<size_t>(width), 2);
}

// Both directions are this weighted sum over any number of inputs; the backward needs the dots as well:
//   out[c] = (accumulate ? out[c] : 0) + sum_i w[i] * x[i][at + c],   c < width
//   dots[i] += sum_c x[i][at + c] * inp[c]                     if Dot
template <bool Dot, class Out, class S>
void mix_row(Out* out, float* dots, const S* inp, const S* const* x, const float* w, int64_t inputs, int64_t at,
             int64_t width, bool accumulate) {
  float* sums = sums_of(out, width);
  for (int64_t i = 0; i < inputs;) {
    const int64_t left = inputs - i, step = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    float* d = Dot ? dots + i : nullptr;
    const auto group = [&](auto* to, auto from) {
      if (step == 8) mix_group<8, Dot>(to, from, d, inp, x + i, w + i, at, width);
      else if (step == 4) mix_group<4, Dot>(to, from, d, inp, x + i, w + i, at, width);
      else if (step == 2) mix_group<2, Dot>(to, from, d, inp, x + i, w + i, at, width);
      else mix_group<1, Dot>(to, from, d, inp, x + i, w + i, at, width);
    };
    const auto group_into = [&](auto* to) {
      if (i > 0) group(to, sums);
      else if (accumulate) group(to, out);
      else group(to, nullptr);
    };
    if (step == left) group_into(out);
    else group_into(sums);
    i += step;
  }
}

// From logits to weights. The largest exponential is 1, so that the weight of a single source is exactly 1.
inline void softmax_over_sources(float* w, const float* z, int64_t S) {
  float max = z[0], sum = 0;
  for (int64_t s = 1; s < S; ++s) max = z[s] > max || std::isnan(z[s]) ? z[s] : max;
#pragma omp simd reduction(+ : sum)
  for (int64_t s = 0; s < S; ++s) sum += w[s] = exp_f32(z[s] - max);
#pragma omp simd
  for (int64_t s = 0; s < S; ++s) w[s] /= sum;
}

// How threads share the work. `blocks` depends on the shape alone, because every block has a partial sum of its own.
struct WorkSplit {
  int64_t blocks;
  bool small;  // not worth waking the threads
  WorkSplit(int64_t items, int64_t elements, int64_t least = 8 /*items of a block*/)
      : blocks(std::clamp<int64_t>(items / least, 1, 64)), small(elements <= 32768) {}
  int64_t grain() const { return small ? blocks : 1; }
};

// Columns [begin, end): out = (accumulate ? out : 0) + sums - scale * x
template <class Vec, class S>
void subtract_scaled(S* out, const float* sums, float scale, const S* x, int64_t begin, int64_t end, bool accumulate) {
  for (int64_t c = begin; c < end; c += lanes_of<Vec>) {
    Vec total, v, before;
    load(total, sums + c);
    load(v, x + c);
    if (accumulate) {
      load(before, out + c);
      total += before;
    }
    total -= scale * v;
    store(out + c, total);
  }
}

}  // namespace crossply
