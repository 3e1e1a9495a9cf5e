// What `compare` knows about its runs, and what it makes of that: a table, results.md, results.json and compare.svg.
//
// Every architecture is trained at every rate with the first seed, and with the other seeds only at its best rate: that
// with the lowest test loss among those at which no seed diverged.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "eval/statistics.h"
#include "train/run/plan.h"
#include "train/settings/arch_list.h"

namespace crossply {

enum class RunState { waiting, running, done, stopped, failed };

// An architecture at one rate, from one seed.
struct ComparedRun {
  ArchChoice choice;
  TrainPlan plan;
  TrainResult result;  // before the run, and where it failed: the plan
  RunState state = RunState::waiting;
  std::string error = "";      // why it failed
  std::string directory = "";  // in that of the comparison
  int64_t side_by_side = 1;    // runs that shared the machine
  bool tried = false;          // by this program
};

// The first run's architecture is the yardstick, with which the others are compared. Of a run that is not done, the
// numbers are the last that it had, with their step; "-" where there are none.
struct Comparison {
  std::string data;                      // as in --data
  std::string out;                       // the directory of the comparison; each run's directory is in it
  std::vector<ComparedRun> runs;         // by architecture, then rate, then seed: all, though only some are needed
  int64_t test_size = 0;                 // sequences in the test set; 0: unknown
  std::string data_digest = "";          // of files; "" of what is generated
  std::vector<std::string> others = {};  // runs in `out` that are not compared now, as results.json had them
  std::string data_note = "";            // on validation files among the training files; "" where there are none
};

// What is compared, by its flags.
struct Experiment {
  std::string archs = "llama,lime";
  std::vector<double> rates;       // none: that of `train`
  std::vector<uint64_t> seeds;     // the same
  int64_t jobs = 0;                // runs side by side; 0: chosen
  std::vector<std::string> notes;  // to be printed
  std::string program;             // compare as it was called, for commands to paste
  Settings settings;
};

// An architecture in a comparison. Numbers are places in Comparison::runs.
struct Arm {
  std::string name;
  std::vector<size_t> sweep;  // every rate with the first seed
  std::vector<size_t> seeds;  // every seed at the best rate so far; the first run where there is none
  double lr = 0;              // that rate; NaN: none
  bool settled = false;       // all of the sweep is done or diverged; nothing is judged before
  bool works = false;         // no seed diverged at that rate
  bool at_edge = false;       // it is the smallest or the largest of several
};
std::vector<Arm> arms_of(const Comparison& comparison);
std::vector<double> rates_of(const Comparison& comparison);
std::vector<uint64_t> seeds_of(const Comparison& comparison);

// The run to begin next: first the rates, then seed after seed, so that what is there at any time is of all
// architectures. None where all are done, or wait for one that is running.
std::optional<size_t> next_run(const Comparison& comparison);
// Runs that this program has yet to do, or does; and those with all that are needed. The best rates are not known
// before the rest is, but how many runs that makes is.
int64_t runs_left(const Comparison& comparison);
int64_t runs_in_all(const Comparison& comparison);
// Of the runs that are needed, those that ended by themselves: done or failed. A stopped run is not among them.
int64_t runs_ended(const Comparison& comparison);
// The same as runs_left with those that were stopped, or failed otherwise than by diverging: what --resume would do.
int64_t runs_unfinished(const Comparison& comparison);
// Of each architecture that came to nothing the run that says why: one whose loss is not finite at every rate, or one
// that failed otherwise, so that nobody knows which rate is the best.
std::vector<const ComparedRun*> failures_of(const Comparison& comparison);
// As far as it tells the runs of the comparison apart: "lime lr 0.003 seed 2".
std::string run_name(const Comparison& comparison, const ComparedRun& run);
std::string run_directory(const ComparedRun& run);
// A rate as short as it is exact: 0.003, 1e-05.
std::string lr_text(double lr);
const char* name_of(RunState state);
bool is_done(const ComparedRun& run);
// Ended with a loss that is not finite: the run's own end, while anything else that failed may end well the next time.
bool diverged(const ComparedRun& run);
int64_t steps_of(const ComparedRun& run);
// "failed after step 3 of 10: WHY"; "" of a run that is done.
std::string remark(const ComparedRun& run);

// A number and the step that it is of; NaN where there is none.
struct Measured {
  double value = NAN;
  int64_t step = 0;
};
using Measure = Measured (*)(const ComparedRun&);
Measured train_loss(const ComparedRun& run);
Measured test_loss(const ComparedRun& run);
// Those of a task: shares of 1.
Measured answers(const ComparedRun& run);
Measured steps_valid(const ComparedRun& run);

// Over the seeds of an arm that are done.
Spread spread_over(const Comparison& comparison, const Arm& arm, Measure measure);
double tokens_per_second_of(const Comparison& comparison, const Arm& arm);  // NaN: not known, or of a shared machine
// Of the test losses of two arms, seed by seed: the first's minus the second's. None before both rates are settled.
Spread paired_difference(const Comparison& comparison, const Arm& arm, const Arm& yardstick);
// Of runs, relative to the yardstick; NaN where none is done, or none had the machine for itself.
double relative_time(const Comparison& comparison, const std::vector<size_t>& of);
double relative_memory(const Comparison& comparison, const ComparedRun& run);

// For a terminal of `width` columns: as many of the table's columns as fit, and a line for each run that is not done.
// What the numbers are of stands in results_markdown().
std::string results_table(const Comparison& comparison, size_t width = 80);
// Of several seeds: which differences from the yardstick are larger than the spread of seeds. "" of one seed.
std::string results_verdicts(const Comparison& comparison, size_t width = 80);
// Everything, in Markdown.
std::string results_markdown(const Comparison& comparison);
// Everything, with all settings, for programs; the curves by the paths of the runs' metrics.jsonl.
std::string results_json(const Comparison& comparison);
// Writes results.json, results.md, compare.svg and compare-dark.svg (for dark pages) in the comparison's directory.
// Returns the text of the first Exit::io error, such as that of a full disk; "" if all are written.
std::string write_results(const Comparison& comparison);
// compare.svg alone, while runs are going on.
std::string draw_comparison(const Comparison& comparison);

// A run as results.json has it, and back: what only the run could say. path: where it stood, for errors.
nlohmann::json to_json(const Comparison& comparison, const ComparedRun& run);
void take_up(ComparedRun& run, const nlohmann::json& saved, const std::string& out, const std::string& path);

// Which architectures have a number of parameters that differs by more than a tenth from the yardstick's, in one line;
// "" if none has.
std::string parameter_warning(const Comparison& comparison);
// Of the comparison in a directory: what it compares. False if there is none. Throws Exit::bad_data if results.json is
// damaged.
bool take_comparison_settings(const std::string& out, Experiment& experiment);
// For a comparison that is resumed: takes what is known of its runs from the results.json in its directory, so that
// nothing is lost if this one ends before it reaches them; runs that are not compared now are kept as they are. Throws
// Exit::usage if the directory holds files but no comparison, or runs with other flags, of those that are done also
// other numbers of test samples; Exit::bad_data if results.json is damaged, or the files of --data are others.
void take_up(Comparison& comparison);

}  // namespace crossply
