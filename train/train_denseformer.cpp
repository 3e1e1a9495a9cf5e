// train_denseformer: depth-weighted averages. Behind each block, the residual stream is replaced by a learned
// combination of the embedding and all block outputs so far: plain numbers, the same for all tokens and channels.
//
// X_0 (B, T, C) is the embedding, Y_0 = X_0, and for block i = 1 .. L
//
//   X_i = Block_i(Y_{i-1})                                  LLaMA's block, unchanged
//   Y_i = sum_{j in S_i} a_i[j] X_j                         if p divides i, else Y_i = X_i
//   S_i = { j <= i : i - j is a multiple of k }             always with i itself
//
// with dilation k and period p. Y_L goes to the final norm. The combinations read the X_j, never an earlier Y_j. The
// a_i are all that is new: signed, without softmax or other constraint.
//
// Start: a_i = (0 .. 0 1), which is LLaMA. They learn at --lr and do not decay.
//
// Cost, with n = sum over the i that p divides of (floor(i/k) + 1):
//   parameters      n;  at k = p = 1 it is L (L+3)/2
//   FLOPs a token   2 C n more in the forward, twice that in the backward. Small beside the memory traffic: combination
//                   i reads |S_i| streams and writes one.
//   memory          all X_j stay until the backward, and one Y_i for each combination
//
// Pagliardini et al., "DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted Averaging", arXiv
// 2402.02622; with the sizes and data of SATFormer (arXiv 2605.03953), which has it as a baseline.
//
// Presets (--preset; train/settings/presets.cpp): V = 32,000, q/k norm, T = 4096, 524,288 tokens a step, cosine to a
// tenth:
//
//                                                         k = p = 1 (default)    --dilation 4 --period 5
//   name       C     F     L   H   learning rate  steps   added  total           added  total
//   130m       768   3072  11  12  2e-3           9,536   77     128,404,173     5      128,404,101
//   340m       1024  4096  18  16  1.5e-3         19,073  189    334,798,269     9      334,798,089
//   760m       1536  6144  19  24  1e-3           38,146  209    766,440,529     9      766,440,329
//   760m-thin  1536  4352  24  16  1e-3           38,146  324    757,020,996     15     757,020,687
//   1.3b       2048  5632  24  32  8e-4           57,220  324    1,298,765,124   15     1,298,764,815
//
// (SATFormer runs it at the sizes up to 760m.) Its text says dilation 4, period 5. The presets 130m-text, 340m-text and
// 760m-text have that, and the text's rates, 1e-3, 1.5e-3 and 2e-3. Its configuration files say 1 and 1, the default. 4
// and 5 are hardly a DenseFormer at these depths: up to 760m no combination reads the embedding, and none stands behind
// the last block.
//
// Options:
//   --dilation k        a combination reads every k-th output, counted down from the latest.
//   --period p          one combination after every p blocks. DenseFormer's paper takes k = 4, p = 5 for 48 blocks and
//                       finds them as good as 1 and 1 (perplexity 17.87 and 17.84, plain 18.61).
//
// models/denseformer.cpp is the connection; kernels/depth/depth_mix.h has the combination and its gradients.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "denseformer", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
