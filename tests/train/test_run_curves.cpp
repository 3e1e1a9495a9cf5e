// The curves of a run: of bounded size however long it is, and with the numbers of its metrics.
#include <cmath>
#include <numeric>

#include "engine/io/json.h"
#include "tests/support/temp_dir.h"
#include "train/run/metrics.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

namespace {

double loss_at(int64_t step) {
  return 1 + 1 / std::sqrt(static_cast<double>(step)) + 0.01 * static_cast<double>(step % 7);
}

json line_of(int64_t step, int64_t eval_every = 0) {
  json line = {
      {"step", step}, {"loss", loss_at(step)}, {"tokens", 64 * step}, {"seconds", 0.5 * static_cast<double>(step)}};
  if (eval_every > 0 && step % eval_every == 0) line["test_loss"] = 2 * loss_at(step), line["answers_correct"] = 0.5;
  return line;
}

size_t numbers_in(const RunCurves& c) {
  size_t sum = 0;
  for (const auto* list :
       {&c.step, &c.loss, &c.tokens, &c.seconds, &c.test_step, &c.test_loss, &c.test_tokens, &c.test_seconds,
        &c.test_sequences, &c.answer_step, &c.answers, &c.steps_valid, &c.hard_answers, &c.tail})
    sum += list->capacity();
  return sum;
}

}  // namespace

TEST_CASE("run curves: after a million steps they are no larger than after thirty thousand") {
  CurveBuilder builder;
  json line = line_of(1);
  size_t early = 0;
  for (int64_t step = 1; step <= 1000000; ++step) {
    line["step"] = step, line["loss"] = loss_at(step), line["test_loss"] = 2 * loss_at(step);
    builder.add(line);
    if (step == 30000) early = numbers_in(builder.curves());
  }
  const RunCurves& curves = builder.curves();
  CHECK(numbers_in(curves) <= early);
  CHECK(numbers_in(curves) < size_t{400} << 10);  // 3 MiB
  CHECK(curves.step.size() > CurveBuilder::max_points / 4);
  CHECK((curves.step.back() == 1000000 && curves.test_step.back() == 1000000));
  CHECK(curves.test_loss.back() == 2 * loss_at(1000000));
}

TEST_CASE("run curves: every point stands for as many steps in a row, with their mean") {
  CurveBuilder builder;
  const int64_t steps = 5 * static_cast<int64_t>(CurveBuilder::max_points) / 2 + 3, width = 4;
  for (int64_t step = 1; step <= steps; ++step) builder.add(line_of(step, 1000));
  const RunCurves& curves = builder.curves();
  REQUIRE(std::ssize(curves.step) == (steps + width - 1) / width);
  for (size_t i = 0; i < curves.step.size(); ++i) {
    const int64_t first = width * static_cast<int64_t>(i) + 1, last = std::min(first + width - 1, steps);
    double sum = 0;
    for (int64_t step = first; step <= last; ++step) sum += loss_at(step);
    CHECK(curves.step[i] == static_cast<double>(last));
    CHECK(curves.tokens[i] == static_cast<double>(64 * last));
    CHECK(curves.loss[i] == doctest::Approx(sum / static_cast<double>(last - first + 1)).epsilon(1e-12));
  }
  CHECK(curves.test_step.size() == static_cast<size_t>(steps / 1000));  // few: all of them
  CHECK(curves.test_tokens[1] == 64 * 2000);
}

TEST_CASE("run curves: those of a file are those of the run, and its last loss is the mean of all last steps") {
  const TempDir dir;
  const std::string path = dir.file("metrics.jsonl");
  constexpr int64_t steps = 40000;
  std::string text;
  for (int64_t step = 1; step <= steps; ++step) text += json_text(line_of(step, 100)) + "\n";
  write_text(path, text);
  const RunCurves read = read_curves(path);
  const Metrics metrics(path, steps);
  CHECK((read.step == metrics.curves().step && read.loss == metrics.curves().loss));
  CHECK(read.test_loss == metrics.curves().test_loss);
  CHECK(metrics.curves().tail.empty());
  double sum = 0;
  for (int64_t step = steps - steps / 50 + 1; step <= steps; ++step) sum += loss_at(step);
  CHECK(final_loss(read) == sum / (steps / 50));
  CHECK((read.width == 4 && read.loss.back() != loss_at(steps)));
  CHECK(last_loss(read) == loss_at(steps));  // no mean
  write_text(path, text + "{\"step\":40001,\"loss\":null}\n");
  CHECK(last_loss(read_curves(path)) == loss_at(steps));
  write_text(path, text.substr(0, text.find("{\"loss\"", 4000)));
  const RunCurves few = read_curves(path);
  CHECK((few.tail.empty() && few.width == 1));  // their points are enough
  CHECK(last_loss(few) == few.loss.back());
  CHECK(std::isnan(last_loss({})));
}

TEST_CASE("run curves: a line that is far too long is passed over, whatever follows it") {
  const TempDir dir;
  const std::string path = dir.file("metrics.jsonl"), line = json_text(line_of(1)) + "\n";
  write_text(path, line + std::string(3 << 20, 'x') + "\n\n" + json_text(line_of(2)));
  CHECK(read_curves(path).step == std::vector<double>{1, 2});
  std::vector<size_t> lengths;
  std::vector<bool> ended;
  each_line(path, [&](const std::string& text, bool whole) { lengths.push_back(text.size()), ended.push_back(whole); });
  REQUIRE(lengths.size() == 4);
  CHECK((lengths[1] < 2 << 20 && lengths[2] == 0));
  CHECK(ended == std::vector<bool>{true, true, true, false});
}
