// Any tokens as what a model generated for a task.
#include "data/arith.h"
#include "data/prosqa.h"
#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

namespace {

Dataset open(const std::string& spec) {
  DataOptions options;
  options.spec = spec, options.train_samples = 1, options.test_samples = 8;
  return open_dataset(options);
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Dataset datasets[] = {open("arith:3"), open("arith:3-6"), open("arith:4i"), open("prosqa")};
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < size; ++i)  // from ' ' on; what no vocabulary has is in there, too
    tokens.push_back(data[i] < 254 ? data[i] - ' ' : data[i] == 254 ? INT32_MIN : INT32_MAX);
  for (const Dataset& dataset : datasets) {
    const Task& task = *dataset.test->task();
    for (int64_t i = 0; i < dataset.test->size(); ++i) {
      const Task::Verdict verdict = task.judge(i, tokens);
      require(verdict.answer || !verdict.steps, "every step is right, but the answer is not");
    }
  }
  for (const auto numbers : {arith::Numbers::residues, arith::Numbers::integers}) arith_evaluate(tokens, numbers);
  return 0;
}
