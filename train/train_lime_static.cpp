// train_lime_static: the first version of LIMe, with fixed routers. Before a head projects its keys and values, it
// averages what the embedding and all layers so far have written, with positive weights of its own.
//
// X_0 (B, T, C) is the embedding, X_m the residual stream behind layer m, rms(X) = X / sqrt(mean_C(X^2) + eps). For
// each of the K key/value heads h of layer l = 2 .. L (layer 1 is LLaMA's),
//
//   a[h,:] = softmax(R_l[h,:])                        R_l (K, l): one number for each stream, the same for all tokens
//   Z[h]   = sum_{m=0}^{l-1} a[h,m] rms(X_m) * g_l    g_l (C): one more norm for each layer, the same for all streams
//   k[h]   = Z[h] Wk_l[h]^T,  v[h] = Z[h] Wv_l[h]^T   Wk_l[h], Wv_l[h] (D, C): LLaMA's matrices, cut into heads
//
// Queries, rotation, attention and feed-forward are LLaMA's. New are R_l and g_l. The second version (train_lime) mixes
// the heads that are already projected, with signed weights: cheaper, and keys and values of all layers can be reused.
//
// Start: R_l normal with spread 0.1, so each head begins near the plain mean, and the model not as LLaMA (it would be
// LLaMA if all of a[h,:] stood on m = l-1 and g_l were the layer's input gain). R_l learns ten times as fast as the
// rest and does not decay; g_l starts at 1. Wk_l and Wv_l start uniform in +-1/sqrt(K D C), see --kv-init.
//
// Cost, with S = L (L+1)/2 - 1 pairs of a layer and a stream:
//   parameters      K S + C (L-1)
//   FLOPs a token   2 K C S more in the forward (2 per multiply-add), twice that in the backward
//   memory          all rms(X_m) stay until the backward; the mixtures, K times as large, are made again there
//
// Gerasimov et al., "You Do Not Fully Utilize Transformer's Representation Capacity", arXiv 2502.09245, version 1.
//
// Presets (--preset; train/settings/presets.cpp). The paper's are 1.2b and, with --top-p 0.9, the deep ones (C = 256, F
// = 1024, 8 heads, 5,000 steps):
//
//   name          added   total                  name         added    total
//   arith(-quick) 132     66,628                 deep32       12,152   46,449,016
//   150m          9,372   151,872,156            deep64       32,760   80,040,440
//   1.2b          35,040  1,176,770,784          deep128      98,552   147,247,864
//
// The paper has K = H. With grouped heads there is a row of R_l for each key/value head (1b: 31,800, 1,076,104,248).
//
// Options:
//   --top-p P         keeps the fewest largest weights of a head whose sum exceeds P, sets the others to 0, and divides
//                     what is left by its sum; in training, too, anew at every step. Pruned logits have no gradient
//                     then, and come back when those that are kept fall. 1.0 prunes nothing.
//   --top-p-renormalize false     leaves what is left as it is, as the paper can be read; pruned logits learn, too
//   --kv-init KIND    literal: the bound as the paper's pseudocode computes it, from a tensor (1, K, C, D) whose fan-in
//                     a library takes to be K D C (default); fan_in: +-1/sqrt(C), the usual one.
//   --router-lr R     the rate of R_l; the paper's 1e-2 is ten times --lr, the default.
//   --decay routers   R_l decays and nothing else; usual (default): the matrices, as in the code.
//
// docs/papers/lime.md lists where the presets differ from the paper's tables, why, and the flag for the other.
//
// The paper does not say that pruned weights are renormalised; the authors' code of this version (an early commit,
// 601cd30, of their repository) does it. There the mask is made once, when the model is built. The norm g_l is in the
// pseudocode and the code, not in the text; the paper's parameter count needs it.
// models/lime_static.cpp is the connection; head_mix.h mixes and projects, softmax.h weighs and prunes.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "lime_static", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
