// train_satformer: selective access to early representations. As in ResFormer (train_resformer), attention's values
// take in the first layer's; here each token and each head decides how much, behind a gate that can stay shut.
//
// V_n (B, T, K, D) are layer n's values, right behind their projection, x_n (B, T, C) what they were projected from,
// the normalised stream. From layer 2 on, for token t and key/value head j,
//
//   g_n[t,j]  = relu( x_n[t] . Wa_n[j] )                    Wa_n (K, C): all that is new
//   V'_n[t,j] = V_n[t,j] + g_n[t,j] V_1[t,j]                in place of V_n; queries, keys and all else are LLaMA's
//
// V_1 is not detached: it learns from all layers. Generation caches V'_n, so it needs no more memory than LLaMA's.
//
// Start: Wa_n normal with spread 0.02 (SATFormer's code; its text has another, see --gate-init), decaying like any
// matrix. So half of all gates are open in a new model, by 0.008 sqrt(C) on average: 0.22 at 130m, 0.36 at 1.3b. With
// Wa_n = 0 it is LLaMA bit for bit (so with tanh and identity), but relu then never learns.
//
// Cost (M layers take in: L-1, or --last-k):
//   parameters      M C K
//   FLOPs a token   M (2 C K + 2 K D) more in the forward, twice that in the backward
//   memory          V_1, and the gates: M K numbers a token (V'_n replaces V_n)
//
// Gunasekaran et al., "Transformers with Selective Access to Early Representations", arXiv 2605.03953.
//
// Presets (--preset; train/settings/presets.cpp): V = 32,000, q/k norm, T = 4096, 524,288 tokens a step, cosine to a
// tenth:
//
//   name       C     F     L   H   learning rate  steps   added      total
//   130m       768   3072  11  12  2e-3           9,536   92,160     128,496,256
//   340m       1024  4096  18  16  1.5e-3         19,073  278,528    335,076,608
//   760m       1536  6144  19  24  1e-3           38,146  663,552    767,103,872
//   760m-thin  1536  4352  24  16  1e-3           38,146  565,248    757,585,920
//   1.3b       2048  5632  24  32  8e-4           57,220  1,507,328  1,300,272,128
//
// Where text and configuration files disagree, the files have it. 130m-text, 340m-text and 760m-text have the text's
// rates, 1e-3, 1.5e-3 and 2e-3, and its start of the gates (--gate-init uniform).
//
// The file of SATFormer's 1.3b asks for F = 5504 and 24 heads, which do not divide C: here it has its baselines' 5632
// and 32. Its code decays every parameter; here gains do not decay. Its gates may also have a bias, off in all its
// configurations and left out here.
//
// Options:
//   --gate KIND         relu (default), or the paper's ablations: sigmoid, tanh, identity, softmax over a token's heads
//                       (times K, so that the mean gate is 1), softmax_sigmoid (that times sigmoid).
//   --last-k M          only the last M layers take in V_1; 0 (default): all from the second on, as the paper.
//   --gate-init KIND    normal (default): spread 0.02, SATFormer's code. uniform: in +-1/sqrt(C), its text; half of the
//                       gates then open by 0.23 at any C.
//
// models/satformer.cpp is the connection: the gate's rows ride in the matrix product for queries, keys and values;
// kernels/depth/gate.h has the gates, kernels/depth/value_mix.h the gated sum.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "satformer", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
