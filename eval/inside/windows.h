// Which tokens an analysis looks at: windows of the data.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/source.h"
#include "models/config.h"

namespace crossply {

// The first `length` of these tokens; the rest is padding.
struct TokenWindow {
  std::vector<int32_t> tokens, targets;  // (T) each; targets: what comes next, -1 where nothing is to be scored
  int64_t length;
  int64_t place = 0;  // of the source: where it begins, or of a task, which sequence it is
};
// What the tokens of these windows count: without padding.
struct WindowLengths {
  explicit WindowLengths(const std::vector<TokenWindow>& windows);
  int64_t windows = 0, shortest = 0, longest = 0, tokens = 0;
  std::string text() const;  // "128 windows of 256 tokens"
};

// How many of these tokens count: up to the last one that is scored.
int64_t scored_length(const std::vector<int32_t>& targets);

// N windows of T tokens, at most a sequence of the source: of files, from any place of the split with the same chance.
// They depend on the files, what of them is in the split, T and the seed, not on the source's sequences. Of a task, a
// random sequence, taken from its start and at most up to the end of its answer.
std::vector<TokenWindow> random_windows(const Source& source, int64_t T, int64_t N, uint64_t seed);

// How long windows can be: `asked`, or where that is 0, `usual` or as many as model and data have. Says on stderr where
// these are fewer. Throws Exit::usage for an `asked` that is of one token or longer than the model or the data's
// sequences, and bad_data where these have no two.
int64_t window_length(int64_t asked, int64_t usual, const std::string& model, const Config& config,
                      const std::string& data, const Source& source);

// How many positions of the windows are scored. Throws Exit::usage, naming the model, if none is.
int64_t scored_positions(const std::string& model, std::span<const TokenWindow> windows);

}  // namespace crossply
