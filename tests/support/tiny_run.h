// A training run small enough to be repeated in a test, and what it has written but for the times.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "engine/io/json.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

namespace crossply::test {

// In memory where there is such a disk: every save waits for the disk several times.
inline std::vector<std::string> tiny_run(const std::string& out, const std::vector<std::string>& more = {}) {
  return joined(
      split_words("--data arith:3 --train-samples 100 --test-samples 20 --width 16 --ffn 24 --layers 2 --heads 2 "
                  "--batch 4 --eval-samples 8 --answer-samples 0 --out"),
      std::vector{out}, more);
}

// Metrics without what another run has measured: the times.
inline std::string timeless(const std::string& path) {
  std::istringstream in(read_text(path));
  std::string out;
  for (std::string line; std::getline(in, line);) {
    nlohmann::json object = known_json(line);
    object.erase("seconds"), object.erase("tokens_per_s");
    out += json_text(object) + "\n";
  }
  return out;
}

}  // namespace crossply::test
