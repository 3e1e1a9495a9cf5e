// train_llama: the plain transformer that every other architecture is compared with.
//
// Each block is two sublayers on one residual stream x (B, T, C):
//
//   x = x + Wo attention(rope(Wq n), rope(Wk n), Wv n)   n = rmsnorm(x); causal, H query heads on K key/value heads
//   x = x + Wdown (silu(Wgate m) * (Wup m))                 m = rmsnorm(x)
//
// so a layer reads only what the layer below wrote. The head is the embedding matrix (tied) or its own.
// Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv 2302.13971.
//
// Presets (--preset; train/settings/presets.cpp), the baselines of the LIMe papers:
//
//   name            V       C     F     L          H   K   T     steps   batch  parameters
//   arith-quick     21      32    128   4          4   4   41    6,000   64     66,496
//   arith           21      32    128   4          4   4   85    19,531  512    66,496
//   prosqa          66      768   3072  12         12  12  384   1,400   128    113,316,096
//   150m            50,257  768   3072  12         12  12  2048  20,000  1024   151,862,784
//   1b              50,257  2048  8192  16         32  8   2048  20,000  1024   1,076,072,448
//   1.2b            50,257  2048  8192  16         32  32  2048  20,000  1024   1,176,735,744
//   deep32/64/128   50,257  256   1024  32/64/128  8   8   2048  5,000   1024   46,436,864 / 80,007,680 / 147,149,312
//   d12             32,768  768   2048  12         6   6   2048  2,520   256    135,288,576 (nanochat's)
//   d20             32,768  1280  3456  20         10  10  2048  4,980   512    480,436,480 (nanochat's)
//
// prosqa is for fine-tuning: --init gives sizes and the tokenizer of the questions. Its row is without --init.
// Learning rate 1e-3 (d20: 7e-4; prosqa: 1e-4), linear for the generated tasks, cosine for language modelling.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "llama", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
    Trainer trainer(plan, *data.train, find_checkpoint(plan, dir), dir.group());  // initialises, or goes on
    Run run(plan, data, dir, trainer);
    while (run.more()) {
      trainer.next_batch();          // tokens and targets (B, T), --accumulate times
      trainer.forward_backward();    // runs the tape: losses, and gradients that accumulate
      trainer.update();              // AdamW, at the schedule's rate; nothing where a number is not finite
      trainer.take_loss_and_norm();  // ends the run where one of them is not finite
      run.show_progress();
      if (run.time_to_evaluate()) run.evaluate();
      run.write_metrics();  // with the scores, if there are some
      if (run.time_to_save()) run.save();
    }
    return run.finish();
  });
}
