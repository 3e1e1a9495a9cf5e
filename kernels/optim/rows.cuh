// Updates that go through rows of the flat arrays, each with numbers of its own, on a GPU: a block takes a piece of one
// span, which is a row, or several without a gap that have the same numbers.
#pragma once

#include <vector>

#include "kernels/cuda/cuda.cuh"

namespace crossply {

constexpr int row_threads = 256;
constexpr int64_t row_piece = 4096;

// An argument by value, so that nothing is copied and waited for; at most 4 KiB together with the others.
template <class Numbers>
struct RowSpans {
  static constexpr int most = 3800 / static_cast<int>(sizeof(Numbers) + 24);
  struct Span {
    int64_t begin, end;
    uint32_t first_block;
    Numbers of;
  } span[most];
  int count;
};

// The span of this block: the last one that begins at it or before.
template <class Numbers>
__device__ __forceinline__ int span_of_block(const RowSpans<Numbers>& spans) {
  int r = 0;
  for (int beyond = spans.count; beyond - r > 1;) {
    const int middle = (r + beyond) / 2;
    if (spans.span[middle].first_block <= blockIdx.x) r = middle;
    else beyond = middle;
  }
  return r;
}

// Calls several(i) for what this thread has of span r, `width` elements from i on, and single(i) at an end within a
// vector.
template <int width, class Numbers, class Several, class Single>
__device__ __forceinline__ void for_span(const RowSpans<Numbers>& spans, int r, Several&& several, Single&& single) {
  const int64_t begin = spans.span[r].begin, end = spans.span[r].end;
  const int64_t first =
      begin / width * width + static_cast<int64_t>(blockIdx.x - spans.span[r].first_block) * row_piece;
  const int64_t last = first + row_piece < end ? first + row_piece : end;
  for (int64_t i = first + threadIdx.x * width; i < last; i += row_threads * width) {
    if (i >= begin && i + width <= end) several(i);
    else
      for (int64_t k = i < begin ? begin : i; k < i + width && k < end; ++k) single(k);
  }
}

// Calls go(spans, blocks) with all rows, as often as that takes. numbers_of(row): a span's, which compare by ==.
template <class Row, class NumbersOf, class Go>
void with_spans(const std::vector<Row>& rows, int width, NumbersOf&& numbers_of, Go&& go) {
  RowSpans<decltype(numbers_of(rows[0]))> spans{};
  uint32_t blocks = 0;
  for (size_t i = 0; i < rows.size();) {
    const auto of = numbers_of(rows[i]);
    const int64_t begin = rows[i].begin;
    int64_t end = rows[i].end;
    for (++i; i < rows.size() && rows[i].begin == end && numbers_of(rows[i]) == of; ++i) end = rows[i].end;
    if (begin == end) continue;
    if (spans.count == spans.most) go(spans, blocks), spans.count = 0, blocks = 0;
    spans.span[spans.count++] = {begin, end, blocks, of};
    blocks += blocks_of(end - begin / width * width, row_piece);
  }
  if (spans.count > 0) go(spans, blocks);
}

}  // namespace crossply
