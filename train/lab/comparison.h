// What `compare` knows about its runs, and what it makes of that: a table, results.md, results.json and compare.svg.
//
// An arm is an architecture with an optimizer. Where it has several learning rates to choose among, a seed of its own
// tries them all, and is tested on the first half of the test set. A parabola through the best and the rates beside it
// chooses the rate, also where nobody tried it. The seeds that count are trained at that rate alone and are tested on
// the second half, by which nothing was chosen. Of Muon, whose other parameters are AdamW's, --muon-lr is chosen so,
// and at the best of those --lr. arms.cpp has these rules, tuning.h the choice.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "eval/dunnett.h"
#include "eval/statistics.h"
#include "train/lab/claims.h"
#include "train/lab/tuning.h"
#include "train/run/plan.h"
#include "train/settings/arch_list.h"

namespace crossply {

// The seed that chooses among rates.
constexpr uint64_t usual_choosing_seed = 0;

// Steps of a run whose losses its record keeps, by which machines are compared (machines.h).
constexpr size_t compared_steps = 20;

enum class RunState { waiting, running, done, stopped, failed };

// An architecture at one rate, from one seed.
struct ComparedRun {
  ArchChoice choice;
  TrainPlan plan;
  TrainResult result;  // before the run, and where it failed: the plan
  RunState state = RunState::waiting;
  std::string error = "";                 // why it failed
  std::string directory = "";             // in that of the comparison
  int64_t side_by_side = 1;               // runs that shared the machine
  bool tried = false;                     // by this program
  bool found = false;                     // its rate was not asked for: extend() added it
  bool rated = true;                      // no: its arm's rate is not known yet, and it cannot begin
  bool more = false;                      // one of Rules::more_seeds
  bool elsewhere = false;                 // another process has it (claims.h)
  std::string environment = "";           // as its record has it, in JSON, where its directory is gone,
  std::vector<double> first_losses = {};  // and the training losses of its first steps
  std::string pairs = "";                 // accuracy on minimal pairs, in JSON
};

// One of several machines: its share of the arms.
struct MachinePart {
  int64_t number = 1, of = 1;
};

// What a comparison does besides training every arm from the same seeds.
struct Rules {
  std::vector<uint64_t> backbone_seeds = {};  // of the first architecture; none: as all others
  bool hold_decay = false;                    // weight decay times rate stays that of the middle rate
  bool more_seeds = false;                    // three for arms whose spread is unlike the others', and the best three
  std::string pairs = "";                     // minimal pairs, scored after each reported run; "": none
  bool every_rate = false;                    // all seeds at each rate, which is an arm of its own: none is chosen
  bool operator==(const Rules&) const = default;
};

// The first run's architecture is the baseline, with which the others are compared. Of a run that is not done, the
// numbers are the last that it had, with their step; "-" where there are none.
struct Comparison {
  std::string data;                      // as in --data
  std::string out;                       // the directory of the comparison; each run's directory is in it
  std::vector<ComparedRun> runs;         // all that are known to be needed: by add_arm() and extend()
  int64_t test_size = 0;                 // sequences in the test set; 0: unknown
  std::string data_digest = "";          // of files; "" of what is generated
  std::vector<std::string> others = {};  // runs in `out` that are not compared now, as results.json had them
  std::string data_note = "";            // on validation files among the training files; "" where there are none
  std::vector<double> rates = {};        // --lr, and --muon-lr of the arms of Muon, before any were added at an edge
  std::vector<double> muon_rates = {};
  std::optional<uint64_t> choosing_seed = {};  // tries the rates and is not reported; none where no arm has a choice
  Rules rules = {};
  MachinePart part = {};                     // of its arms, which this machine trains
  std::set<std::string> only = {};           // architectures that are trained, with the first; none: all
  std::shared_ptr<Claims> claims = nullptr;  // where several processes share the runs
  double weight_decay = 0;                   // as in --weight-decay; with rules.hold_decay runs have others
};

// What is compared, by its flags.
struct Experiment {
  std::string archs = "llama,lime";
  std::vector<std::string> optimizers;  // none: that of `train`
  std::vector<double> rates;            // the same; of AdamW
  std::vector<double> muon_rates;       // of the matrices of Muon; none: by the rule of one run, for each of `rates`
  std::vector<uint64_t> seeds;          // as reported; none: that of `train`
  std::optional<uint64_t> choosing_seed;
  Rules rules;
  bool begun = false;              // an earlier comparison goes on, whose seed that chooses stays
  int64_t jobs = 0;                // runs side by side; 0: chosen
  std::vector<std::string> notes;  // to be printed
  std::string program;             // compare as it was called, for commands to paste
  Settings settings;
};

// That which Muon keeps while its own rate is chosen, and with --hold-decay the one that weight decay is of.
double middle_rate(const std::vector<double>& rates);

// One of an arm's two rates, tried while the other stays.
struct RateAxis {
  bool muon = false;          // --muon-lr; else --lr
  size_t asked = 0;           // how many rates there are before any is added at an edge
  std::vector<size_t> tried;  // by rate
  RateChoice choice = {};     // so far
  bool settled = false;       // all are tried, and no other is needed
};

// Numbers are places in Comparison::runs.
struct Arm {
  std::string name;  // of the architecture, and where there are several, of the optimizer: "lime muon"
  std::string arch, optimizer;
  double rate = NAN;                // of Rules::every_rate: the one it is trained at
  std::vector<RateAxis> axes = {};  // with the seed that chooses; none where there is no choice
  std::vector<size_t> sweep = {};   // all their runs
  std::vector<size_t> seeds = {};   // the reported ones
  std::vector<size_t> more = {};    // those of Rules::more_seeds
  double lr = NAN, muon_lr = NAN;   // chosen so far, or of the arm that this one follows; NaN: none
  bool settled = false;             // these are final; nothing is judged before
  bool works = false;               // there is a rate at which seeds end well
  bool mine = true;                 // of this machine's part
  bool at_edge = false;             // a rate is the smallest or the largest of several
  bool has_rate() const { return settled && std::isfinite(lr); }
};
bool is_of(const ComparedRun& run, const Arm& arm);
std::vector<Arm> arms_of(const Comparison& comparison);
// Those that are reported, but for the backbone's own.
std::vector<uint64_t> seeds_of(const Comparison& comparison);
std::vector<std::string> optimizers_of(const Comparison& comparison);
std::string arm_name(const Comparison& comparison, const ComparedRun& run);  // of the arm that a run is of
bool chooses(const Comparison& comparison, const ComparedRun& run);          // is it of the seed that tries the rates?
// The rate that is tried: --lr, of Muon --muon-lr.
double rate_of(const ComparedRun& run);
std::string rate_name(const ComparedRun& run);  // " lr 0.003", " muon-lr 0.02"
// --lr or --muon-lr as it was asked for: what an arm of this optimizer begins with.
const std::vector<double>& rates_asked(const Comparison& comparison, const std::string& optimizer);
// Adds the runs of an arm that are known to be needed: at each rate that was asked for, and of each reported seed.
// like: complete but for rate, seed, part of the test set and directory.
void add_arm(Comparison& comparison, const ComparedRun& like, const std::vector<uint64_t>& seeds);
// More reported seeds of an arm; and a run of the seed that chooses, at rates that nobody asked for.
void add_seeds(Comparison& comparison, const ComparedRun& like, const std::vector<uint64_t>& seeds);
void add_try(Comparison& comparison, const Arm& arm, double lr, double muon_lr);
// Names the directories of runs that have none yet. All runs that are planned are there by then.
void name_directories(Comparison& comparison);
// Adds what has turned out to be needed: rates beyond the edge at which an arm's best is, at most three on each axis,
// Muon's second axis, more seeds. Gives the reported seeds their arm's rates. Takes up what `others` know of these.
// Returns whether anything changed.
bool extend(Comparison& comparison);

// The run to begin next, of this machine's part: first the rates, then seed after seed, so that what is there at any
// time is of all architectures. None where all are done, or wait for one that is running.
std::optional<size_t> next_run(const Comparison& comparison);
// Those of an arm that are needed, as far as they are known: its rates, and once they are settled its seeds.
std::vector<size_t> needed(const Arm& arm);
// Runs that this program has yet to do, or does; and those with all that are needed. The best rates are not known
// before the rest is, but how many runs that makes is.
int64_t runs_left(const Comparison& comparison);
int64_t runs_in_all(const Comparison& comparison);
// Of the runs that are needed, those that ended by themselves: done or failed. A stopped run is not among them.
int64_t runs_ended(const Comparison& comparison);
// Of an arm, without rates beyond an edge that are not known yet.
size_t runs_planned(const Arm& arm);
// The same as runs_left with those that were stopped, or failed otherwise than by diverging: what --resume would do.
int64_t runs_unfinished(const Comparison& comparison);
// Of each architecture that came to nothing the run that says why: one whose loss is not finite at every rate, or one
// that failed otherwise, so that nobody knows which rate is the best.
std::vector<const ComparedRun*> failures_of(const Comparison& comparison);
// As far as it tells the runs of the comparison apart: "lime lr 0.003 seed 2".
std::string run_name(const Comparison& comparison, const ComparedRun& run);
std::string run_directory(const ComparedRun& run);
std::string record_path(const Comparison& comparison, const ComparedRun& run);
// The records in a directory, by name; none where there is no such directory.
std::vector<std::string> record_paths(const std::string& directory);
// A rate as short as it is exact: 0.003, 1e-05.
std::string lr_text(double lr);
const char* name_of(RunState state);
bool is_done(const ComparedRun& run);
// Ended with a loss that is not finite: the run's own end, while anything else that failed may end well the next time.
bool diverged(const ComparedRun& run);
bool is_unfinished(const ComparedRun& run);  // neither: another try may bring it to its end
int64_t steps_of(const ComparedRun& run);
// Sequences in the run's part of the test set; 0: unknown.
int64_t test_size_of(const Comparison& comparison, const ComparedRun& run);
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
// The same of the further seeds of Rules::more_seeds.
Spread further_spread(const Comparison& comparison, const Arm& arm);
double tokens_per_second_of(const Comparison& comparison, const Arm& arm);  // NaN: not known, or of a shared machine
// The arms that one is compared with: the first architecture's with the same optimizer, and its own architecture's with
// the first optimizer; null where that is the arm itself.
const Arm* first_architecture(const std::vector<Arm>& arms, const Arm& arm);
const Arm* first_optimizer(const std::vector<Arm>& arms, const Arm& arm);
// The same with frozen routers; null: there is none.
const Arm* control_of(const std::vector<Arm>& arms, const Arm& arm);
// The test losses of an arm's reported seeds that have ended.
ArmLosses losses_of(const Comparison& comparison, const Arm& arm);
// Arms and the one that they are compared with: all are judged together (eval/dunnett.h), by their test losses, each
// once its rate and the baseline's are settled.
struct Family {
  const Arm* baseline;
  std::vector<const Arm*> arms;
  FamilyVerdict verdict;            // its arms are these
  std::vector<ArmLosses> losses{};  // of the arms, as they were judged: an unsteady one has more seeds
  const Verdict& of(const Arm& arm) const { return verdict.arms.at(place_of(arm)); }
  const ArmLosses& losses_of(const Arm& arm) const { return losses.at(place_of(arm)); }
  bool has(const Arm& arm) const;

 private:
  size_t place_of(const Arm& arm) const;
};
// With each optimizer, the architectures against the first; and of each architecture the optimizers against the first.
std::vector<Family> families_of_architectures(const Comparison& comparison, const std::vector<Arm>& arms);
// Every arm that has a control, against that; all of them are judged together.
std::vector<Family> families_of_controls(const Comparison& comparison, const std::vector<Arm>& arms);
std::vector<Family> families_of_optimizers(const Comparison& comparison, const std::vector<Arm>& arms);
// "lower by 0.0207 +- 0.0100: significant"
std::string verdict_text(const Comparison& comparison, const Family& family, const Arm& arm);
// Of runs, relative to the baseline; NaN where none is done, or none had the machine for itself.
double relative_time(const Comparison& comparison, const std::vector<size_t>& of);
double relative_memory(const Comparison& comparison, const ComparedRun& run);

// "0.004", with Muon's own behind it "0.004, muon 0.02", while rates are being tried ", so far"; "-": none is known.
std::string rates_text(const Arm& arm);
std::string rates_text(const std::string& optimizer, double lr, double muon_lr);
// By what a rate may be multiplied or divided for 0.01 nats: "x1.8"; of Muon's both rates: "muon x1.8, x2.4".
std::string basins_text(const Arm& arm);

// For a terminal of `width` columns: as many of the table's columns as fit, and a line for each run that is not done.
// What the numbers are of stands in results_markdown().
std::string results_table(const Comparison& comparison, size_t width = 80);
// Of several seeds: which differences from the baseline are significant. "" of one seed.
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

// Writes OUT/records/DIRECTORY.json of each run that has ended by itself: all that the comparison needs to know of it.
// With its record a run is done, though its directory may be gone; records may be brought to another machine, where the
// comparison then goes on. Returns the text of the first Exit::io error; "" if all are written.
std::string write_records(const Comparison& comparison);
// A run as results.json has it, and back: what only the run could say. path: where it stood, for errors.
nlohmann::json to_json(const Comparison& comparison, const ComparedRun& run);
void take_up(ComparedRun& run, const nlohmann::json& saved, const std::string& out, const std::string& path);
// The training losses of the first compared_steps steps, of a run and of its record.
std::vector<double> first_losses(const ComparedRun& run);
std::vector<double> recorded_losses(const nlohmann::json& record);
// Where a run was trained (recorded_environment()).
nlohmann::json environment_of(const Comparison& comparison, const ComparedRun& run);
// Takes up runs that other processes have ended since. Returns whether there are any.
bool take_new_records(Comparison& comparison);
// The records in another directory, of the same comparison on another machine. Runs that are known already stay.
void take_records(Comparison& comparison, const std::string& directory);
// Takes the runs of the comparison from its `others`, and the rates that were found beyond an edge. Returns whether
// there was one.
bool take_others(Comparison& comparison);

// Which architectures have a number of parameters that differs by more than a tenth from the baseline's, in one line;
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
