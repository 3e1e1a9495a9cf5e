// The bounds of flags' values, which files of settings share.
#pragma once

#include <cstdint>
#include <limits>

namespace crossply {

// The largest value of most integers: of sizes, and of steps and samples. Products of them stay far below 2^63.
constexpr int64_t max_size = int64_t{1} << 30, max_count = int64_t{1} << 40;
constexpr double max_number = std::numeric_limits<double>::max();
constexpr double max_beta = 0.999999;  // of AdamW: at 1 its moments would never move

}  // namespace crossply
