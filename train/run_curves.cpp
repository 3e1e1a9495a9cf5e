#include "train/run_curves.h"

#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>

#include "engine/file.h"
#include "engine/json.h"
#include "eval/statistics.h"

namespace crossply {
namespace {

using nlohmann::json;

// NaN where the line has no such number.
double number(const json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : NAN;
}

}  // namespace

RunCurves curves_of(const std::vector<json>& lines) {
  RunCurves out;
  for (const json& line : lines) {
    const double step = number(line, "step"), test = number(line, "test_loss");
    const double answers = number(line, "answers_correct");
    out.step.push_back(step);
    out.loss.push_back(number(line, line.contains("ce") ? "ce" : "loss"));  // with a teacher: as the test loss is
    out.tokens.push_back(number(line, "tokens"));
    out.seconds.push_back(number(line, "seconds"));
    if (!std::isnan(test)) {
      out.test_step.push_back(step);
      out.test_loss.push_back(test);
    }
    if (!std::isnan(answers)) {
      out.answer_step.push_back(step);
      out.answers.push_back(answers);
      out.steps_valid.push_back(number(line, "steps_valid"));
      out.hard_answers.push_back(number(line, "hard_correct"));
    }
  }
  return out;
}

RunCurves read_curves(const std::string& path) {
  std::vector<json> lines;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return {};  // opening a pipe would wait for a writer
  errno = 0;
  std::ifstream in(path);
  if (!in) fail_io("open", path, errno != 0 ? errno : EIO);
  for (std::string text; std::getline(in, text);) {
    json line = try_parse_json(text);
    if (line.is_object() && !std::isnan(number(line, "step"))) lines.push_back(std::move(line));
  }
  if (in.bad()) fail_io("read", path, errno != 0 ? errno : EIO);
  return curves_of(lines);
}

double final_loss(const RunCurves& curves) {
  const auto end = curves.loss.end();
  const auto count = static_cast<std::ptrdiff_t>((curves.loss.size() + 49) / 50);
  return count > 0 ? std::accumulate(end - count, end, 0.0) / static_cast<double>(count) : NAN;
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
    out.last = step;
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
