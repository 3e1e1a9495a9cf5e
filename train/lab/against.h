// curves --against: the runs of a figure, compared with one of them.
#pragma once

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "train/run/run_curves.h"

namespace crossply {

// A run, its losses by step, and its flags.json; null where there is none.
struct CurveRun {
  std::string dir;
  SteppedCurve losses;  // over --x
  nlohmann::json settings;
  std::map<std::string, SteppedCurve> over = {};  // over every axis that there is
  std::map<double, double> sequences = {};        // by step, of the test loss
  double last = NAN, width = 1;  // the loss of the last step; steps that a point of `losses` stands for
  std::string missing = "";      // why there are no losses
};
// The runs of one name.
struct CurveGroup {
  std::string name, path;  // path: a name that no other has
  bool named = true;       // by the command line, which could name it otherwise
  std::vector<CurveRun> runs = {};
};

// What --x takes, and what the axis then says.
inline const std::map<std::string, std::string> x_labels = {{"step", "step"},
                                                            {"tokens", "tokens"},
                                                            {"flops", "FLOPs of training"},
                                                            {"seconds", "seconds of training, without pauses"}};

using Differences = std::vector<std::pair<std::string, std::set<std::string>>>;
// Of the flags that say what losses are of, those that the runs have otherwise, with a row for each value.
Differences loss_differences(const std::vector<CurveGroup>& groups, bool test);

struct Against {
  std::string name, loss, x;  // of the run that others are compared with; as --loss and --x
  int64_t smooth;
};
// Adds a panel of differences, and returns what is said below the table. looks: of each group. Throws Exit::usage where
// the losses do not compare, or there is no such name.
std::string compare_against(const Against& o, const std::vector<CurveGroup>& groups, const std::vector<int>& looks,
                            std::vector<Panel>& panels);

}  // namespace crossply
