// A record: what a comparison found, thinned to what figures and tables need, without paths; a file of dev/experiments.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/statistics.h"

namespace crossply {

struct RecordedRun {
  std::string name;  // as in --arch
  double lr = 0;
  uint64_t seed = 0;
  bool done = false;
  double test_loss = NAN, answers = NAN, steps_valid = NAN;  // after the last step; shares of 1
  double parameters = 0, flops_per_token = 0, memory = 0, tokens_per_second = NAN, seconds = NAN;
  int64_t tokens = 0;                             // of training
  std::vector<double> step, loss;                 // of every evaluation
  std::vector<double> answer_step, share, valid;  // of every test of answers
};

// The runs of one name at its best rate, the one with the lowest test loss from the first seed; by seed.
struct RecordedArm {
  std::string name;
  double lr = NAN;
  bool at_edge = false;  // the smallest or the largest of several rates
  std::map<uint64_t, RecordedRun> runs;
};

struct Record {
  std::string name;      // the file's, without .json
  nlohmann::json flags;  // those that all runs have in common
  std::vector<RecordedRun> runs;

  // In the order of the comparison; without those of which no run is done.
  std::vector<RecordedArm> arms() const;
  // Throws Exit::bad_data where there is none of that name.
  RecordedArm arm(const std::string& name) const;
};

// The record of the comparison in a directory, from its results.json, as text: a run a line. Throws Exit::no_input,
// Exit::bad_data.
std::string make_record(const std::string& directory);
// Throws Exit::no_input, Exit::bad_data.
Record read_record(const std::string& path);

using RunMeasure = double (*)(const RecordedRun&);
// Of every run of an arm, by seed, where it is known.
std::vector<double> values_of(const RecordedArm& arm, RunMeasure measure);
// Seed by seed, the arm's minus the yardstick's, of the seeds that both have.
std::vector<double> differences_of(const RecordedArm& arm, const RecordedArm& yardstick, RunMeasure measure);

}  // namespace crossply
