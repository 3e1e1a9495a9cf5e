// The numbers of a run over its steps, as metrics.jsonl has them.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/curve.h"

namespace crossply {

struct RunCurves {
  std::vector<double> step, loss;            // of every step, or fewer points (CurveBuilder)
  std::vector<double> tokens, seconds;       // at these, from the start; NaN where a line has none
  std::vector<double> test_step, test_loss;  // of every evaluation
  std::vector<double> test_tokens = {}, test_seconds = {};
  std::vector<double> test_sequences = {};                // that the test loss is of; NaN where a line does not say
  std::vector<double> answer_step, answers, steps_valid;  // shares of 1; empty where the data is no task
  std::vector<double> hard_answers;  // of those that a known shortcut does not find; NaN where the task has none
  std::vector<double> tail = {};     // where points stand for several steps: the loss of each of the last fiftieth
  double width = 1;                  // steps that a point of `loss` stands for
};

// Curves of bounded size out of any number of lines. Up to max_points steps each is a point. Beyond, a point stands
// for 2, 4, 8, ... steps in a row: it has their mean loss, and the step, tokens and seconds of the last. Evaluations
// are thinned to the last of as many steps. Runs of equal lengths keep the same steps.
class CurveBuilder {
 public:
  static constexpr size_t max_points = 1 << 14;  // several times as many as a figure has pixels
  void add(const nlohmann::json& line);
  const RunCurves& curves() const { return curves_; }

 private:
  void add_step(double step, double loss, double tokens, double seconds);
  void widen();
  RunCurves curves_;
  std::vector<double> weights_;  // steps with a loss in each point
  double test_width_ = 1, answer_width_ = 1;
};

// Of a file that a run may have left in any state, read line by line: what is not such a line is passed over; a file
// that is not there has none. Throws Exit::io for one that cannot be read.
RunCurves read_curves(const std::string& path);
// The training loss as one number: the mean of the last fiftieth of the steps; NaN of none.
double final_loss(const RunCurves& curves);
// That of the last step that has a finite one, and no mean; NaN if none of those that are known has.
double last_loss(const RunCurves& curves);

// A number over the steps, each of which stands at a place on an x axis; as many of each.
struct SteppedCurve {
  std::vector<double> step, x, y;
};
struct MeanCurve {
  Curve curve;                    // without a name
  std::vector<double> step = {};  // of each point
};
// The mean at the steps at which all have finite numbers; of several, in a band of a sample standard deviation to both
// sides.
MeanCurve mean_of(const std::vector<SteppedCurve>& curves);
// Of curves with bands only.
constexpr const char* about_bands = "mean \u00B1 one standard deviation over the seeds";

// curve.svg: the loss and, of a task, the answers.
void write_run_picture(const std::string& path, const std::string& title, const RunCurves& curves);

}  // namespace crossply
