// What `compare` knows about its runs, and what it makes of that: a table, results.md, results.json and compare.svg.
#pragma once

#include <string>
#include <vector>

#include "train/arch_list.h"
#include "train/trainer.h"

namespace crossply {

enum class RunState { waiting, done, stopped, failed };

struct ComparedRun {
  ArchChoice choice;
  TrainOptions options;  // complete
  TrainResult result;    // before the run, and where it failed: the plan
  RunState state = RunState::waiting;
  std::string error = "";  // why it failed
};

// The first run is the yardstick, with which the others are compared. Numbers of runs that are not done are "-".
struct Comparison {
  std::string data;  // as in --data
  std::string out;   // the directory of the comparison; each run's directory is in it
  std::vector<ComparedRun> runs;
};

// For a terminal of `width` columns: as many of the table's columns as fit, and a line for each run that is not done.
std::string results_table(const Comparison& comparison, size_t width = 80);
// Everything, in Markdown.
std::string results_markdown(const Comparison& comparison);
// Everything, with all settings, for programs; the curves by the paths of the runs' metrics.jsonl.
std::string results_json(const Comparison& comparison);
// compare.svg, results.json and results.md in the directory of the comparison.
void write_results(const Comparison& comparison);

// Which architectures have a number of parameters that differs by more than a tenth from the yardstick's, in one line;
// "" if none has.
std::string parameter_warning(const Comparison& comparison);
// For a comparison that is resumed: takes what is known of its runs from the results.json in its directory, so that
// nothing is lost if this one ends before it reaches them. Throws Exit::usage if the directory holds files but no
// comparison, or one with runs that `comparison` does not name; Exit::bad_data if results.json is damaged.
void take_up(Comparison& comparison);

}  // namespace crossply
