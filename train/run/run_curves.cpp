#include "train/run/run_curves.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <filesystem>
#include <map>
#include <numeric>

#include "engine/io/file.h"
#include "engine/io/json.h"
#include "eval/statistics.h"
#include "train/run/metrics.h"

namespace crossply {
namespace {

using nlohmann::json;

// NaN where the line has no such number.
double number(const json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : NAN;
}

// With a teacher: as the test loss is.
double loss_of(const json& line) { return number(line, line.contains("ce") ? "ce" : "loss"); }

size_t last_fiftieth(size_t steps) { return (steps + 49) / 50; }

// Which of the points that stand for `width` steps each has this step.
double place(double step, double width) { return std::ceil(step / width); }

using Columns = std::vector<std::vector<double>*>;

// Adds a point to columns of which the first has the steps; one for the same `width` steps as the last takes its place.
void add_point(const Columns& columns, const std::vector<double>& values, double width) {
  std::vector<double>& steps = *columns[0];
  const bool replaces = !steps.empty() && width > 1 && place(steps.back(), width) == place(values[0], width);
  for (size_t c = 0; c < columns.size(); ++c) {
    if (replaces) columns[c]->back() = values[c];
    else columns[c]->push_back(values[c]);
  }
}

// Of the points for the same `width` steps the last stays.
void thin(const Columns& columns, double width) {
  const std::vector<double> steps = *columns[0];
  for (std::vector<double>* column : columns) {
    size_t kept = 0;
    for (size_t i = 0; i < steps.size(); ++i)
      if (i + 1 == steps.size() || place(steps[i], width) != place(steps[i + 1], width))
        (*column)[kept++] = (*column)[i];
    column->resize(kept);
  }
}

void add_evaluation(const Columns& columns, const std::vector<double>& values, double& width) {
  add_point(columns, values, width);
  while (columns[0]->size() > CurveBuilder::max_points) thin(columns, width *= 2);
}

}  // namespace

void CurveBuilder::add(const json& line) {
  const double step = number(line, "step"), test = number(line, "test_loss");
  const double answers = number(line, "answers_correct");
  const double tokens = number(line, "tokens"), seconds = number(line, "seconds");
  add_step(step, loss_of(line), tokens, seconds);
  RunCurves& c = curves_;
  if (!std::isnan(test))
    add_evaluation({&c.test_step, &c.test_loss, &c.test_tokens, &c.test_seconds, &c.test_sequences},
                   {step, test, tokens, seconds, number(line, "test_sequences")}, test_width_);
  if (!std::isnan(answers))
    add_evaluation({&c.answer_step, &c.answers, &c.steps_valid, &c.hard_answers},
                   {step, answers, number(line, "steps_valid"), number(line, "hard_correct")}, answer_width_);
}

void CurveBuilder::add_step(double step, double loss, double tokens, double seconds) {
  RunCurves& c = curves_;
  const double weight = std::isnan(loss) ? 0 : 1;
  const bool joins = c.width > 1 && !c.step.empty() && place(c.step.back(), c.width) == place(step, c.width);
  double mean = loss, all = weight;
  if (joins) {
    all += weights_.back();
    if (weight == 0) mean = c.loss.back();
    else if (all > weight) mean = c.loss.back() + (loss - c.loss.back()) / all;
  }
  add_point({&c.step, &c.loss, &c.tokens, &c.seconds, &weights_}, {step, mean, tokens, seconds, all}, c.width);
  while (c.step.size() > max_points) widen();
}

// Each point takes in its neighbour.
void CurveBuilder::widen() {
  RunCurves& c = curves_;
  c.width *= 2;
  for (size_t i = 1; i < c.step.size(); ++i) {
    if (place(c.step[i - 1], c.width) != place(c.step[i], c.width) || weights_[i - 1] == 0) continue;
    const double all = weights_[i - 1] + weights_[i], own = weights_[i] == 0 ? 0 : weights_[i] * c.loss[i];
    c.loss[i] = (weights_[i - 1] * c.loss[i - 1] + own) / all;
    weights_[i] = all;
  }
  thin({&c.step, &c.loss, &c.tokens, &c.seconds, &weights_}, c.width);
}

RunCurves read_curves(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_type type = std::filesystem::status(path, error).type();
  if (type == std::filesystem::file_type::none) fail_io("inspect", path, error.value());
  if (type != std::filesystem::file_type::regular) return {};  // opening a pipe would wait for a writer
  CurveBuilder builder;
  std::deque<double> tail;
  size_t steps = 0;
  each_line(path, [&](const std::string& text, bool) {
    const json line = parse_line(text);
    if (!line.is_object() || std::isnan(number(line, "step"))) return;
    builder.add(line);
    tail.push_back(loss_of(line));
    if (tail.size() > last_fiftieth(++steps)) tail.pop_front();
  });
  RunCurves curves = builder.curves();
  if (curves.step.size() < steps) curves.tail.assign(tail.begin(), tail.end());
  return curves;
}

double final_loss(const RunCurves& curves) {
  const std::vector<double>& of = curves.tail.empty() ? curves.loss : curves.tail;
  const size_t count = curves.tail.empty() ? last_fiftieth(of.size()) : of.size();
  const auto begin = of.end() - static_cast<std::ptrdiff_t>(count);
  return count > 0 ? std::accumulate(begin, of.end(), 0.0) / static_cast<double>(count) : NAN;
}

double last_loss(const RunCurves& curves) {
  const std::vector<double>& of = curves.tail.empty() ? curves.loss : curves.tail;
  const auto last = std::find_if(of.rbegin(), of.rend(), [](double loss) { return std::isfinite(loss); });
  return last == of.rend() ? NAN : *last;
}

MeanCurve mean_of(const std::vector<SteppedCurve>& curves) {
  struct Values {
    std::vector<double> x, y;
  };
  std::map<double, Values> at;
  for (const SteppedCurve& curve : curves)
    for (size_t i = 0; i < curve.step.size(); ++i)
      if (std::isfinite(curve.x[i]) && std::isfinite(curve.y[i]))
        at[curve.step[i]].x.push_back(curve.x[i]), at[curve.step[i]].y.push_back(curve.y[i]);
  MeanCurve out;
  for (const auto& [step, values] : at) {
    if (values.y.size() != curves.size()) continue;
    const Spread y = spread_of(values.y);
    out.step.push_back(step);
    out.curve.x.push_back(spread_of(values.x).mean), out.curve.y.push_back(y.mean);
    if (y.n > 1) out.curve.low.push_back(y.mean - y.sd), out.curve.high.push_back(y.mean + y.sd);
  }
  return out;
}

void write_run_picture(const std::string& path, const std::string& title, const RunCurves& c) {
  const Curve loss{"training loss", c.step, c.loss}, test{"test loss", c.test_step, c.test_loss};
  const Curve answers{"answers", c.answer_step, c.answers}, valid{"steps valid", c.answer_step, c.steps_valid};
  std::vector<Panel> panels = {{"loss", "", {loss, test}}};
  if (!c.answers.empty()) panels.push_back({"right on test prompts", "", {answers, valid}, true});
  write_curve_svg(path, title, "step", panels);
}

}  // namespace crossply
