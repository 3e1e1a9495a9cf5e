// A record: what a comparison found, thinned to what figures and tables need, without paths; a file of dev/experiments.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "eval/dunnett.h"
#include "eval/statistics.h"

namespace crossply::figures {

struct RecordedRun {
  std::string name;  // as in --arch
  std::string optimizer = "adamw";
  double lr = 0, muon_lr = NAN;
  uint64_t seed = 0;
  std::string state;                         // as in results.json: done, failed, ...
  double test_loss = NAN;                    // after the last step
  double answers = NAN, hard_answers = NAN;  // shares of 1; hard: those that a known shortcut does not find
  double parameters = 0, flops_per_token = 0, memory = 0, tokens_per_second = NAN, seconds = NAN;
  int64_t tokens = 0;                      // of training
  std::vector<double> step, loss;          // of every evaluation, as many of each
  std::vector<double> answer_step, share;  // of every test of answers, as many of each
};

struct RecordedRate {
  double rate = NAN, test_loss = NAN;  // of the seed that chooses
};

// The runs of an architecture with an optimizer that are done, at the rate that the comparison chose for it; by seed.
// Without those of the seed that chose it and is not reported.
struct RecordedArm {
  std::string name;
  double lr = NAN;
  bool at_edge = false;  // the smallest or the largest of several rates
  double muon_lr = NAN;
  std::vector<uint64_t> lost = {};  // seeds that failed at this rate
  std::vector<RecordedRate> tried = {};
  std::string setting = "";  // data and flags that arms share which may be compared
  std::map<uint64_t, RecordedRun> runs = {};
};

struct Record {
  std::string path;
  std::vector<RecordedRun> runs;
  std::vector<RecordedArm> arms;  // in the order of the comparison; those of which some run is done

  // Throws Exit::bad_data where there is none of that name.
  const RecordedArm& arm(const std::string& name) const;
};

// The record of the comparison in a directory, from its results.json, as text: a run a line. Throws Exit::no_input,
// Exit::bad_data.
std::string make_record(const std::string& directory);
// Throws Exit::no_input, Exit::bad_data.
Record read_record(const std::string& path);

using RunMeasure = double (*)(const RecordedRun&);
// As eval/dunnett.h wants them; of a seed that failed the loss is NaN.
ArmLosses losses_of(const RecordedArm& arm);
// Of every run of an arm, by seed, where it is known.
std::vector<double> values_of(const RecordedArm& arm, RunMeasure measure);
// Seed by seed, the arm's minus the baseline's, of the seeds that both have.
std::vector<double> differences_of(const RecordedArm& arm, const RecordedArm& baseline, RunMeasure measure);

}  // namespace crossply::figures
