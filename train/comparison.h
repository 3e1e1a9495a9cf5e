// What `compare` knows about its runs, and what it makes of that: a table, results.md, results.json and compare.svg.
#pragma once

#include <string>
#include <vector>

#include "train/arch_list.h"
#include "train/plan.h"

namespace crossply {

enum class RunState { waiting, done, stopped, failed };

struct ComparedRun {
  ArchChoice choice;
  TrainOptions options;  // complete
  TrainResult result;    // before the run, and where it failed: the plan
  RunState state = RunState::waiting;
  std::string error = "";  // why it failed
};

// The first run is the yardstick, with which the others are compared. Of a run that is not done, the numbers are the
// last that it had, with their step; "-" where there are none.
struct Comparison {
  std::string data;  // as in --data
  std::string out;   // the directory of the comparison; each run's directory is in it
  std::vector<ComparedRun> runs;
  int64_t test_size = 0;  // sequences in the test set; 0: unknown
};

// For a terminal of `width` columns: as many of the table's columns as fit, a line for each run that is not done, and
// what the numbers are of.
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
// Of the comparison in a directory: its architectures as --arch names them, and its flags. False if there is none.
// Throws Exit::bad_data if results.json is damaged.
bool take_comparison_settings(const std::string& out, std::string& archs, TrainOptions& options);
// For a comparison that is resumed: takes what is known of its runs from the results.json in its directory, so that
// nothing is lost if this one ends before it reaches them. Throws Exit::usage if the directory holds files but no
// comparison, or one with runs that `comparison` does not name or has other flags for; Exit::bad_data if results.json
// is damaged.
void take_up(Comparison& comparison);
// How many of the runs from `first` on still have steps to do.
int64_t unfinished_runs(const Comparison& comparison, size_t first);

}  // namespace crossply
