// A run of several ranks gives what one rank gives.
#include <map>
#include <mutex>

#include "tests/backends.h"
#include "tests/cases.h"
#include "tests/temp_dir.h"
#include "tests/thread_job.h"
#include "tests/tiny.h"
#include "train/trainer.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> weights;
  bool operator==(const Outcome&) const = default;
};

TrainOptions options_for(const Config& config, const std::string& dtype, const std::string& sum, int64_t accumulate) {
  TrainOptions o;
  o.config = config;
  o.batch = 2, o.accumulate = accumulate, o.steps = 100, o.warmup = 2, o.lr = 0.01;
  o.dtype = dtype, o.sum = sum;
  o.bucket_bytes = 40000;  // several buckets, also of a tiny model
  return o;
}

Outcome train(TrainOptions o, int ranks, int64_t steps) {
  const Counting data(10);
  Outcome outcome;
  std::mutex mutex;
  on_ranks(ranks, [&](const std::shared_ptr<Job>& job) {
    TrainOptions own = o;
    own.job = job;
    Trainer trainer(own, data);
    std::vector<double> losses, norms;
    for (int64_t step = 0; step < steps; ++step) {
      const StepResult result = trainer.step();
      losses.push_back(result.loss), norms.push_back(result.norm);
    }
    losses.push_back(trainer.evaluate(data, 7));
    trainer.gather_values();
    const std::lock_guard lock(mutex);
    const bool first = outcome.losses.empty();
    if (first) outcome.losses = losses, outcome.norms = norms;
    CHECK(losses == outcome.losses);  // every rank knows the same
    for (const Parameter& row : trainer.params().rows()) {
      const std::vector<float> values = trainer.params().read(row.value);
      if (first) outcome.weights[row.name] = values;
      CHECK(values == outcome.weights[row.name]);
    }
  });
  return outcome;
}

}  // namespace

TEST_CASE("ranks: --sum tree gives the bits of one rank, every architecture, fp32 and bf16") {
  for (const Case& c : cases())
    for (const char* dtype : {"fp32", "bf16"}) {
      CAPTURES(c.name, dtype);
      const TrainOptions o = options_for(c.config, dtype, "tree", 8);
      const Outcome one = train(o, 1, 3);
      for (const int ranks : {2, 4}) {
        CAPTURE(ranks);
        const Outcome many = train(o, ranks, 3);
        CHECK(many.losses == one.losses);
        CHECK(many.norms == one.norms);
        CHECK(many.weights == one.weights);
      }
    }
}
