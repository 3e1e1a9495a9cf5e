// A training run: a Trainer, its run directory, and what it tells. The loop over its steps stands in every trainer.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/devices.h"
#include "train/run/event_file.h"
#include "train/run/inputs.h"
#include "train/run/kept.h"
#include "train/run/metrics.h"
#include "train/run/plan.h"
#include "train/run/progress.h"
#include "train/run/run_dir.h"
#include "train/step/trainer.h"

namespace crossply {

// The directory --out, created and held for the ranks of `group`, which join here. Signals then only ask to stop.
// Throws Exit::device where the device is not there, or too small, before there is a directory.
RunDir claim_run_dir(const TrainPlan& plan, std::shared_ptr<ProcessGroup>& group);

// The loop of a trainer. dir: --out, created and held for the ranks of this job, who have met.
using Train = std::function<Exit(const TrainPlan& plan, const Dataset& data, const RunDir& dir)>;
// main() of a trainer. Parses the flags of the architecture, opens the data, resolves the plan and claims --out, after
// a check that the device is there; then calls `train`, unless --dry-run, --dump-tape, --dump-tensors or --steps 0 ask
// for less. The result is the exit code, also of what is thrown.
int train_program(int argc, char** argv, const std::string& arch, const Train& train);

// Keeps the run directory: metrics.jsonl and what is asked for beside it, curve.svg, flags.json, environment.jsonl,
// checkpoints; prints progress under plan.label. Of several ranks the first does, the others take their part in
// evaluations and checkpoints.
class Run {
 public:
  Run(const TrainPlan& plan, const Dataset& data, const RunDir& dir, Trainer& trainer);

  // Whether another step is to be done: --steps are not, and since the first one no SIGINT, SIGTERM, SIGHUP or SIGUSR1
  // has asked any rank to stop. Throws Exit::io if the run directory was removed.
  bool more() const;
  // The status line, with the step just done.
  void show_progress();
  bool time_to_evaluate() const { return is_due(eval_every_); }
  // The test loss and, of a task, the answers to its prompts: said, and added to the step's line of metrics, and so is
  // what the model's connections across depth do.
  void evaluate();
  // The step's line of metrics.jsonl, and of what else is asked for.
  void write_metrics();
  // So far; of the rank that writes metrics.
  const RunCurves& curves() const { return metrics_->curves(); }
  bool time_to_save() const { return is_due(save_every_) || plan_.kept_steps.contains(trainer_.steps_done()); }
  // A checkpoint, of which the newest --keep stay and those of kept.json, and the curves so far as a picture.
  void save();
  // Saves where a signal ended the run between two checkpoints, and says what is left to say: of a run that is done
  // where everything is, the last losses, and what to do next. Returns Exit::done,
  // Exit::stopped, or Exit::io for a run that is done and saved but could not write its figure.
  Exit finish();

 private:
  void begin();
  void remove_old();  // checkpoints beyond --keep
  void draw();
  void conclude() const;
  void note_straggler();
  void look_at_routing();
  // On a GPU the host waits once a step, for loss and norm.
  bool times_waiting() const { return !group_.world.alone() && backend_of(plan_.device) != Backend::cuda; }
  bool is_due(int64_t every) const {
    return trainer_.steps_done() % every == 0 || trainer_.steps_done() == plan_.steps;
  }

  const TrainPlan& plan_;
  const Dataset& data_;
  const RunDir& dir_;
  Trainer& trainer_;
  ProcessGroup& group_;
  const int64_t first_;  // the steps done before this run
  const int64_t eval_every_, save_every_;
  int64_t saved_;                                       // the step of the last checkpoint
  std::vector<std::pair<const char*, double>> scores_;  // of the last step's evaluation, for its line of metrics
  std::shared_ptr<const nlohmann::json> routing_;       // of the same; null: none
  Progress progress_;
  KeptCheckpoints kept_;
  std::optional<Metrics> metrics_;  // of rank 0, as what follows
  std::optional<MetricsTable> table_;
  std::optional<EventFile> events_;
  bool lacks_figure_ = false;  // the last figure could not be written
  int64_t lagging_ = 0;        // steps in a row in which one rank was slow,
  int laggard_ = -1;           // this one
};

// A whole run in this process, by the loop of the trainers, for a program of several runs; throws as a trainer ends.
// evaluated: called after each evaluation.
TrainResult train_run(const Settings& settings, const std::function<void(const RunCurves&)>& evaluated = {});
// The command that continues a prompt with a model, beside `program`. data: what it was trained on, as in --data; text:
// whether the model reads any text.
std::string generate_command(const std::string& program, const std::string& model, const std::string& data, bool text);

// Draws curve.svg of a run that is done, where --out has no such file but metrics. Returns the text of an Exit::io
// error, "" if there is none.
std::string draw_missing_figure(const Settings& settings);

}  // namespace crossply
