// Files of minimal pairs, in the JSON lines of BLiMP (arXiv 1912.00582), and how many of them a model gets right.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "eval/pair_scorer.h"
#include "eval/score_request.h"

namespace crossply {

struct MinimalPair {
  TokenPair tokens;
  std::string phenomenon, field;  // "island_effects", "syntax"
};
struct PairFile {
  std::string name;  // without directory and .jsonl
  std::vector<MinimalPair> pairs;
};

// A line of such a file: "sentence_good", "sentence_bad", "linguistics_term" and "field"; other keys mean nothing.
// Throws Exit::bad_data, with `where`.
MinimalPair parse_minimal_pair(std::string_view line, const std::string& where, const ScoreRequests& requests);
// Every *.jsonl of a directory, in the order of their names, or one file. Throws Exit::no_input for none, and bad_data,
// with file and line.
std::vector<PairFile> read_minimal_pairs(const std::string& path, const ScoreRequests& requests);

// A pair is right if the bad sentence is not the more likely one: as in lm-evaluation-harness, a tie is right.
struct PairAccuracy {
  int64_t pairs = 0, right = 0, ties = 0;
  void add(const PairScore& score);
  double share() const { return static_cast<double>(right) / static_cast<double>(pairs); }
};
struct PairResults {
  std::vector<PairAccuracy> files;  // as the files
  std::map<std::string, PairAccuracy> phenomena, fields;
  PairAccuracy all;
};
// scores: of the pairs of all files, one after the other.
PairResults count_pairs(const std::vector<PairFile>& files, const std::vector<PairScore>& scores);
// Right ones, ties and pairs, in all, by phenomenon and by field.
nlohmann::ordered_json to_json(const PairResults& results);
// Tables of at most 80 columns.
std::string describe(const std::vector<PairFile>& files, const PairResults& results);
// The same, and the log-probabilities of all pairs.
nlohmann::ordered_json to_json(const std::vector<PairFile>& files, const std::vector<PairScore>& scores,
                               const PairResults& results);

}  // namespace crossply
