// RUN/kept.json: the checkpoints that --keep never removes, those of --save-at and of the end of a stable phase.
//   {"checkpoints": [{"step": 100, "tokens": 409600, "words": 307200}, ...]}
// words: those of a directory that prepare has made, by its mean of words a token.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

namespace crossply {

class KeptCheckpoints {
 public:
  // Reads the file, if there is one; throws Exit::bad_data for what this class has not written.
  // data: --data of the run.
  KeptCheckpoints(const std::string& run_dir, const std::string& data);
  // To be called before the checkpoint is written, so that none is there which is not listed.
  void add(int64_t step, int64_t tokens);
  const std::set<int64_t>& steps() const { return steps_; }

 private:
  const std::string path_;
  const std::string data_;
  nlohmann::json list_;
  std::set<int64_t> steps_;
};

}  // namespace crossply
