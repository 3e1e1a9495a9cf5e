// train_resformer: value residuals. What attention averages is no longer a layer's own values alone, but their mixture
// with the first layer's, which have seen the tokens themselves; two numbers a layer decide how much of each.
//
// V_n (B, T, K, D) are layer n's values, right behind their projection. From layer 2 on, attention gets
//
//   V'_n = a_n V_1 + b_n V_n                                in place of V_n; queries, keys and all else are LLaMA's
//
// V_1 is not detached: it learns from all layers. Where a_n and b_n come from is --variant:
//
//   variant     a_n                    b_n                  source
//   plus        c softmax(e)[n]        learned, from 1/2    SATFormer's baseline, the default: c from L, e (L-1) from 0
//   identity    1/2                    1/2                  ResFormer's repository, with svformer
//   learnable   learned, from 1/2      learned, from 1/2    as reported of the paper; so the next two
//   constant    2                      1
//   sparse      5                      1                    only in the last floor(3 L / 8) layers
//   svformer    1                      0                    the mixing layers have no Wv at all
//
// Start: with plus every a_n is L / (L-1) and every b_n 1/2, so a new model is not LLaMA; LLaMA is c = 0, b_n = 1. The
// softmax stays in training: it is a budget c, shared out over depth. None of these numbers decays; they learn at --lr.
//
// Cost (M layers mix: L-1, or --last-k):
//   parameters      plus: L + M;  learnable: 2 M;  identity, constant, sparse: 0;  svformer: -M C K D
//   FLOPs a token   3 K D M more in the forward, twice that in the backward;  svformer: 2 C K D M less
//   memory          V_1; where b_n is learned V_n, too, for its gradient
//
// Zhou et al., "Value Residual Learning", arXiv 2410.17897. plus as SATFormer's code has it (arXiv 2605.03953): its
// text holds b_n constant, its code learns it, and so does the default. Its runs keep parameters in bf16, where c is
// too large for any update to change it; here c learns.
//
// Presets (--preset; train/settings/presets.cpp), SATFormer's: V = 32,000, q/k norm, T = 4096, 524,288 tokens a step:
//
//   name       C     F     L   H   learning rate  steps   added  total           svformer
//   130m       768   3072  11  12  2e-3           9,536   21     128,404,117     122,505,856
//   340m       1024  4096  18  16  1.5e-3         19,073  35     334,798,115     316,972,288
//   760m       1536  6144  19  24  1e-3           38,146  37     766,440,357     723,972,992
//   760m-thin  1536  4352  24  16  1e-3           38,146  47     757,020,719     702,756,864
//   1.3b       2048  5632  24  32  8e-4           57,220  47     1,298,764,847   1,202,295,808
//
// The rates are those of its configuration files. 130m-text, 340m-text and 760m-text have the text's, 1e-3, 1.5e-3 and
// 2e-3, and its constant b_n (--lambda2 frozen).
//
// Options:
//   --variant KIND      the table above. The 2 and 5 of constant and sparse are fixed.
//   --last-k M          only the last M layers mix; 0 (default): all from the second on. plus keeps all entries of e in
//                       its softmax, as SATFormer's code does. svformer's other layers keep their Wv.
//   --lambda2 frozen    plus keeps b_n at 1/2, as SATFormer's text says.
//   --lambda-scale frozen   plus keeps c at L.
//
// models/resformer.cpp is the connection; value_mix.h mixes (in place of V_n where nothing needs it again),
// kernels/block/softmax.h shares the budget out.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "resformer", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
