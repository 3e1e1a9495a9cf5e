// curves --against: differences, and the place of an equal loss.
#include "train/lab/equal_loss.h"

#include <cmath>

#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Losses at steps 1, 2, 3 ..., of so many test sequences; `each` x a step.
MeasuredLoss measured(const std::vector<double>& y, double each = 1, double sequences = 0, double last_sequences = -1) {
  MeasuredLoss loss;
  for (size_t i = 0; i < y.size(); ++i) {
    loss.step.push_back(static_cast<double>(i + 1)), loss.x.push_back(each * loss.step.back());
    loss.y.push_back(y[i]);
    loss.sequences.push_back(i + 1 == y.size() && last_sequences >= 0 ? last_sequences : sequences);
  }
  return loss;
}

RunLosses compared(const std::string& name, const std::vector<double>& y, double flops = 1, double sequences = 0,
                   double last_sequences = -1) {
  RunLosses run{name, y.back(), NAN, last_sequences >= 0 ? last_sequences : sequences};
  for (const char* axis : {"step", "tokens", "flops", "seconds"})
    run.over[axis] = measured(y, axis == std::string("flops") ? flops : 1, sequences, last_sequences);
  return run;
}

}  // namespace

TEST_CASE("equal loss: the difference is taken at the same place, on the line between the other's points") {
  const Curve same = difference_of(measured({5, 4, 3}), measured({6, 4.5, 3.25}));
  CHECK(same.x == std::vector<double>{1, 2, 3});
  CHECK(same.y == std::vector<double>{-1, -0.5, -0.25});
  const Curve between = difference_of(measured({5, 4, 3}, 1.5), measured({6, 4, 3}));  // at 1.5 and 3; 4.5 is outside
  CHECK(between.x == std::vector<double>{1.5, 3});
  CHECK(between.y == std::vector<double>{0, 1});
  // The last evaluations are over more sequences: they are compared with each other, not with those before.
  const Curve ends = difference_of(measured({5, 4, 3}, 1, 8, 100), measured({5, 5, 5}, 1, 8, 100));
  CHECK(ends.y == std::vector<double>{0, -1, -2});
  const Curve apart = difference_of(measured({5, 4, 3}, 0.75, 8, 100), measured({5, 5, 5}, 1, 8, 100));
  CHECK(apart.x == std::vector<double>{1.5});
}

TEST_CASE("equal loss: it is reached between two points, never, or before the first one") {
  const MeasuredLoss loss = measured({5, 4, 2, 3});
  CHECK(reach(loss, 3, 0).x == 2.5);
  CHECK(reach(loss, 4, 0).x == 2);
  CHECK(reach(loss, 2, 0).how == Reached::How::not_for_good);  // chance, perhaps
  CHECK(reach(measured({5, 2, 4, 2, 1}), 3, 0).x == 3.5);
  CHECK(reach(loss, 1.99, 0).how == Reached::How::never);
  CHECK(reach(loss, 1.99, 0).lowest == 2);
  CHECK(reach(loss, 5, 0).how == Reached::How::before_first);
  CHECK(std::isnan(reach(loss, 5, 0).x));
  CHECK(reach(measured({5, 4, 2}, 1, 8, 100), 3, 8).how == Reached::How::never);  // the last one is another loss
  CHECK(last_comparable(measured({5, 4, 2}, 1, 8, 100)) == 1);
  CHECK(last_comparable(loss) == 3);
}

TEST_CASE("equal loss: means of training losses know nothing of later steps") {
  const MeasuredLoss mean = mean_of_last(measured({8, 4, 2, 0}), 2);
  CHECK(mean.y == std::vector<double>{6, 3, 1});
  CHECK(mean.x == std::vector<double>{2, 3, 4});
  CHECK(mean_of_last(measured({8, 4}), 3).x.empty());
}

TEST_CASE("equal loss: the report says how much less, which loss, and why a number is missing") {
  // Twice the FLOPs a step, and half of the steps and a little: 1.75 steps, 3.5 of 4 FLOPs.
  const RunLosses a = compared("llama", {5, 4, 3, 2});
  const std::string fewer = comparison_against(a, {compared("lime", {5, 1}, 2)}, "test loss");
  CHECK(has(fewer, "against llama, test loss 2.0000"));
  CHECK(has(fewer, "lime     -1.0000   -  43.8 %  87.5 %   43.8 %\n"));
  CHECK(has(fewer, "lime reaches llama's final test loss 2.0000 after 87.5 % of its FLOPs: 12.5 % fewer\n"));
  CHECK(!has(fewer, "note"));
  const std::string more = comparison_against(a, {compared("lime", {5, 1}, 4)}, "test loss");
  CHECK(has(more, "after 175.0 % of its FLOPs: 75.0 % more\n"));

  const std::string never = comparison_against(a, {compared("lime", {5, 2.5})}, "test loss");
  CHECK(has(never, "lime     +0.5000   -       -      -        -\n"));
  CHECK(has(never, "note: lime never reaches llama's test loss 2.0000: its lowest is 2.5000\n"));
  CHECK(!has(never, "reaches llama's final"));
  const std::string chance = comparison_against(a, {compared("lime", {5, 1, 2.5})}, "test loss");
  CHECK(has(chance, "note: lime does not stay below llama's test loss 2.0000: its lowest is 1.0000, its last 2.5000"));
  CHECK(!has(chance, " % of its"));
  const std::string early = comparison_against(a, {compared("lime", {1.5, 1})}, "test loss");
  CHECK(has(early, "note: lime is below llama's test loss 2.0000 from its first point on"));
  CHECK(!has(early, " % of its"));

  RunLosses without = compared("lime", {5, 1});
  without.over.erase("flops"), without.lacks["flops"] = "x has no \"flops_per_token\"; resume the run";
  const std::string lacking = comparison_against(a, {without}, "test loss");
  CHECK(has(lacking, "note: no FLOPs for lime: x has no \"flops_per_token\"; resume the run\n"));
  CHECK((!has(lacking, "of its FLOPs") && has(lacking, "of its tokens: 56.2 % fewer\n")));
}

TEST_CASE("equal loss: a last evaluation over more sequences is not compared with those before") {
  const RunLosses a = compared("llama", {5, 4, 2}, 1, 8, 100);
  const std::string text = comparison_against(a, {compared("lime", {4.5, 3.5, 1}, 1, 8, 100)}, "test loss");
  CHECK(has(text, "lime     -1.0000"));  // of the ends, both over 100
  CHECK(has(text, "lime reaches llama's test loss 4.0000 of step 2 after 75.0 % of its tokens: 25.0 % fewer\n"));
  CHECK(has(text,
            "note: llama's last test loss is over other test sequences than those before; equal loss is taken at "
            "step 2, over 8; --eval-samples 0 compares the ends\n"));
  const std::string stopped = comparison_against(a, {compared("lime", {4.5, 3.5, 3}, 1, 8)}, "test loss");
  CHECK(has(stopped,
            "note: no difference for lime: its last test loss is over 8 test sequences, that of llama over 100"));
}
