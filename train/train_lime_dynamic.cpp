// train_lime_dynamic: the first version of LIMe, with routers that look at the token. Every token decides anew from
// which layers its key/value heads are projected; train_lime_static has the same mixture, decided once for all.
//
// X_0 (B, T, C) is the embedding, X_m the residual stream behind layer m, rms(X) = X / sqrt(mean_C(X^2) + eps). For
// token t and key/value head h of layer l = 2 .. L (layer 1 is LLaMA's),
//
//   U_m         = rms(X_m) * g_l                                 g_l (C): one more norm for each layer, for all streams
//   a[t,h,:]    = softmax_m( U_{l-1}[t] . Wr_l[h l + m] )        Wr_l (K l, C): the router, no bias
//   Z[t,h]      = sum_{m=0}^{l-1} a[t,h,m] U_m[t]
//   k[t,h]      = Z[t,h] Wk_l[h]^T,  v[t,h] = Z[t,h] Wv_l[h]^T   Wk_l[h], Wv_l[h] (D, C): LLaMA's, cut into heads
//
// Queries, rotation, attention and feed-forward are LLaMA's. New are Wr_l and g_l.
//
// Start: Wr_l normal with spread 0.02, so the logits of a new model have a spread of 0.02 sqrt(C), 0.9 at C = 2048: the
// weights are of moderate size everywhere and the model is not LLaMA. With Wr_l = 0 it is train_lime_static with equal
// weights. Wr_l decays like any matrix and learns ten times as fast as the rest; g_l starts at 1. Wk_l and Wv_l start
// uniform in +-1/sqrt(K D C), see --kv-init.
//
// Cost, with S = L (L+1)/2 - 1 pairs of a layer and a stream:
//   parameters      K C S + C (L-1)
//   FLOPs a token   4 K C S more in the forward (half logits, half mixtures; 2 per multiply-add), twice that backward
//   memory          all rms(X_m) and K S weights a token stay until the backward; the mixtures are made again there
//
// Gerasimov et al., "You Do Not Fully Utilize Transformer's Representation Capacity", arXiv 2502.09245, version 1.
//
// Presets (--preset; train/settings/presets.cpp). The paper's is 1.2b; it prints +0.075 %, its own counts say +0.75 %:
//
//   name          added      total
//   arith(-quick) 1,248      67,744
//   150m          718,080    152,580,864
//   1b            2,242,560  1,078,315,008       (grouped heads, not in the paper: K l router rows)
//   1.2b          8,878,080  1,185,613,824
//   deep32        1,087,232  47,524,096          (the paper trains its deep models with fixed routers)
//
// Options:
//   --kv-init KIND    literal: the bound as the paper's pseudocode computes it, from a tensor (1, K, C, D) whose fan-in
//                     a library takes to be K D C (default); fan_in: +-1/sqrt(C), the usual one.
//   --router-lr R     the rate of Wr_l; the paper's 1e-2 is ten times --lr, the default.
//   --decay routers   Wr_l decays and nothing else, as the paper's text says; usual (default): the matrices, Wr_l among
//                     them, as in the code.
//
// docs/papers/lime.md lists where the presets differ from the paper's tables, why, and the flag for the other.
//
// The paper's text feeds the router with X_{l-1}, its pseudocode with U_{l-1}, and so do the authors' code of this
// version (an early commit, 601cd30, of their repository) and this.
// models/lime_static.cpp is the connection; head_mix.h mixes and projects, softmax.h and matmul.h route.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "lime_dynamic", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
