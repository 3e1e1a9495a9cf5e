// What every analysis of the program `analyze` starts from: models, data, and random windows of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/source.h"

namespace crossply {

struct AnalysisOptions {
  std::vector<std::string> models;  // model or run directories
  DataOptions data;
  std::string split, device = "cpu";
  std::string out;                      // a directory; empty: nothing is written
  int64_t sequences = 100, length = 0;  // length 0: 100, or fewer where model or data have no more
  uint64_t seed = 42;
  double tau = 0.9, eta = 0.9;  // of ranks and of masses
};

// The first `length` of these tokens; the rest is padding.
struct TokenWindow {
  std::vector<int32_t> tokens;  // (T)
  int64_t length;
};
// N windows of T tokens, at most a sequence of the source: of files, from any place of the split with the same chance.
// They depend on the files, what of them is in the split, T and the seed, not on the source's sequences. Of a task, a
// random sequence, taken from its start and at most up to the end of its answer.
std::vector<TokenWindow> random_windows(const Source& source, int64_t T, int64_t N, uint64_t seed);

// Makes the directory. Throws Exit::usage unless the program `analyze` can write DIR/NAME.json, .csv and .svg without
// losing what it did not write: where there is one of them, it is a file, and the .json must say that it did.
void prepare_analysis_out(const std::string& dir, const std::string& name);

// --what attention.
void analyze_attention(const AnalysisOptions& options);

}  // namespace crossply
