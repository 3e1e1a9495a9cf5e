// The losses that evaluations give: over all of a set, and over random batches of it.

#include "engine/io/json.h"
#include "eval/mean_loss.h"
#include "tests/support/data_check.h"
#include "tests/support/program.h"
#include "tests/support/tiny.h"
#include "train/settings/train_plan.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// The number behind `name` in a program's output.
double number_after(const std::string& output, const std::string& name) {
  const size_t at = output.find(name);
  REQUIRE_MESSAGE(at != std::string::npos, "no '" << name << "' in: " << output);
  return std::stod(output.substr(at + name.size()));
}

// A model of 7-token sequences in `dir`, trained a little on a text, and the text.
struct Trained {
  TempDir dir;
  std::string text = dir.file("text"), model = dir.file("run"), said;

  explicit Trained(const std::string& bytes) {
    write_text(text, bytes);
    const Outcome got = train(dir, split_words("--width 8 --ffn 8 --layers 1 --heads 2 --seq 7 --batch 4 --steps 6 "
                                               "--lr 1e-2 --eval-samples 0 --data text:" +
                                               text + " --out " + model));
    check_outcome(got, Exit::done, "step 6/6");
    said = got.output;
  }
  std::string evaluate(const std::string& more) {
    const Outcome got =
        run_program_inside(dir, split_words("evaluate --model " + model + " --data text:" + text + more));
    check_outcome(got, Exit::done, "perplexity");
    return got.output;
  }
};

std::string random_text(int64_t bytes) {
  Random random(3, 4);
  std::string text;
  for (int64_t i = 0; i < bytes; ++i) text += static_cast<char>('a' + random.below(3) * random.below(3));
  return text;
}

}  // namespace

TEST_CASE("evaluation: --eval-samples 0 is all of the test set, as evaluate has it") {
  Trained t(random_text(6000));
  CHECK_MESSAGE(has(t.said, "(all 75 sequences)"), t.said);
  const std::string last = t.said.substr(t.said.find("step 6: test loss"));
  CHECK(number_after(last, "test loss ") == doctest::Approx(number_after(t.evaluate(""), "loss ")).epsilon(1e-4));

  TinyModel model(tiny_config("llama"), "cpu");
  BatchModel batches(*model.device, model.params, model.config, {2, 6, Dtype::f32, false});
  const MeanLoss all = mean_loss(batches, Counting(5), 0, *one_rank_group());
  CHECK(all.sequences == 5);
  CHECK(all.loss == mean_loss(batches, Counting(5), 5, *one_rank_group()).loss);
}

TEST_CASE("evaluation: a part of the test sequences is spread over all of them: floor((i + 0.5) N / n)") {
  for (const int64_t N : {1, 5, 7, 100})
    for (const int64_t n : {1, 2, 3, 5, 100}) {
      const Counting all(N);
      const SpreadSamples spread(all, n);
      REQUIRE(spread.size() == std::min(n, N));
      for (int64_t i = 0; i < spread.size(); ++i) CHECK(spread.place(i) == (2 * i + 1) * N / (2 * spread.size()));
    }
  const int64_t N = int64_t{1} << 40;
  const Counting many(N);  // (2 i + 1) N would not fit
  CHECK(SpreadSamples(many, 1 << 30).place((1 << 30) - 1) == N - 512);

  TrainPlan plan;
  CHECK(sequences_tested(plan, 600, false) == 512);
  CHECK(sequences_tested(plan, 600, true) == 600);
  CHECK(sequences_tested(plan, 50, false) == 50);
  plan.eval_rule = "spread";
  CHECK(sequences_tested(plan, 600, true) == 512);
}

TEST_CASE(
    "evaluation: a run of compare that chose a rate, or was chosen, is evaluated on its own half of the test set") {
  const TempDir dir;
  write_text(dir.file("text"), random_text(6000));
  const std::string out = dir.file("trial"), data = "text:" + dir.file("text");
  const Outcome compared = run_program_inside(
      dir, split_words("compare --arch llama --lr 1e-2,2e-2 --seeds 1 --width 8 --ffn 8 --layers 1 --heads 2 --seq 7 "
                       "--batch 4 --steps 6 --eval-samples 0 --data " +
                       data + " --out " + out));
  check_outcome(compared, Exit::done, "llama");
  int halves = 0;
  const auto results = known_json(read_text(out + "/results.json"));
  for (const auto& run : results["runs"]) {
    if (run["state"] != "done") continue;
    const bool chooses = run["seed"] == 0;
    const std::string model = out + "/" + run["directory"].get<std::string>();
    const Outcome got = run_program_inside(dir, split_words("evaluate --model " + model + " --data " + data));
    check_outcome(got, Exit::done, chooses ? "kept from training, first half" : "kept from training, second half");
    CHECK(run["test_loss_sequences"] == (chooses ? 37 : 38));  // of 75
    CHECK(number_after(got.output, "loss ") == doctest::Approx(run["test_loss"].get<double>()).epsilon(1e-4));
    halves |= chooses ? 1 : 2;
  }
  CHECK(halves == 3);
}

TEST_CASE("evaluation: --estimate is the mean of random batches with its spread, the same for the same seed") {
  Trained t(random_text(6000));
  const std::string few = t.evaluate(" --estimate 3 --batch 2 --seed 5"), name = "estimate of 3 batches of 2: mean ";
  CHECK(few == t.evaluate(" --estimate 3 --batch 2 --seed 5"));
  CHECK(few != t.evaluate(" --estimate 3 --batch 2 --seed 6"));
  check_outcome(
      run_program_inside(t.dir, {"evaluate", "--model", t.model, "--data", "text:" + t.text, "--estimates", "5"}),
      Exit::usage, "--estimates has no effect without --estimate");
  const double loss = number_after(few, "loss "), spread = number_after(few, "standard deviation ");
  CHECK(loss == number_after(t.evaluate(""), "loss "));
  CHECK(has(few, " of 10 such\n"));
  CHECK(spread > 0);
  CHECK(std::abs(number_after(few, name) - loss) < 5 * spread / std::sqrt(10));
  // 100 times the windows: a tenth of the spread, which ten estimates know to a quarter
  const std::string many = t.evaluate(" --estimate 300 --batch 2 --estimates 20");
  CHECK(number_after(many, "standard deviation ") < 0.3 * spread);
  CHECK(std::abs(number_after(many, "mean ") - loss) < 0.1 * spread + 0.01);

  Trained same(std::string(2000, 'x'));  // all windows are alike
  const std::string still = same.evaluate(" --estimate 4 --estimates 3");
  CHECK(number_after(still, "estimate of 4 batches of 12: mean ") ==
        doctest::Approx(number_after(still, "loss ")).epsilon(1e-3));
  CHECK(has(still, "standard deviation 0.0000 of 3 such\n"));
}

TEST_CASE("evaluation: a batch larger than the data is as large as the data") {
  Trained t(random_text(600));
  const std::string usual = t.evaluate("");
  CHECK(t.evaluate(" --batch 1000000000") == usual);  // its rows would take terabytes
  CHECK(t.evaluate(" --batch 1000000000 --samples 3") == t.evaluate(" --batch 3 --samples 3"));
}
