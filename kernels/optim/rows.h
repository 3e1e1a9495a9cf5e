// Rows of the flat arrays that an update goes through, each with factors of its own: AdamwRow, MuonRow.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/check.h"
#include "kernels/cpu/cpu.h"

namespace crossply {

// CHECKs that the rows are ascending, without overlap, within n elements.
template <class Row>
void check_rows(const std::vector<Row>& rows, int64_t n) {
  int64_t last = 0;
  for (const Row& row : rows) {
    CHECK_THAT(last <= row.begin && row.begin <= row.end && row.end <= n, "row ", row.begin, " to ", row.end, " after ",
               last, ", of ", n, " elements");
    last = row.end;
  }
}

// Calls body(row) on the CPU's threads for the parts of the rows, of n elements, that each thread has.
template <class Row, class F>
void for_parts_of_rows(const std::vector<Row>& rows, int64_t n, F&& body) {
  parallel_for(n, 16384, [&](int64_t begin, int64_t end) {
    for (Row row : rows) {
      row.begin = std::max(row.begin, begin);
      row.end = std::min(row.end, end);
      if (row.begin < row.end) body(row);
    }
  });
}

}  // namespace crossply
