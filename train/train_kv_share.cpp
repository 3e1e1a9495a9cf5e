// train_kv_share: keys and values shared across layers. Only some layers, the owners, project keys and values; the
// layers above an owner, up to the next one, attend to its keys and values with queries of their own.
//
// With n = rmsnorm(x), the input of layer i's attention, and o(i) <= i the nearest owner at or below it:
//
//   q_i = rope(Wq_i n_i)          k_o = rope(Wk_o n_o),  v_o = Wv_o n_o         o = o(i); q/k norms where there are
//   x   = x + Wo_i attention(q_i, k_o, v_o)                                     all else is LLaMA's
//
//   --sharing cla       every c-th layer is an owner: o(i) = i - i mod c (cross-layer attention)
//   --sharing suffix    the last s layers share with the one below them: o(i) = min(i, L - s - 1) (Gemma 3n and 4)
//   --sharing list      owners by number
//
// Layers that own nothing have no k_proj, v_proj and k_norm. An owner's keys and values get gradients from all who read
// them. Start: LLaMA's, of what there is.
//
// Cost, with n layers that own nothing:
//   parameters      2 C K D n less (and D n, with q/k norms)
//   FLOPs a token   4 C K D n less in the forward, twice that in the backward
//   memory          keys and values of the owners alone, until the backward of the owner; in generation as many caches
//                   as owners: (L - n) / L of LLaMA's
//
// Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", arXiv 2405.12981, which finds
// c = 2 best. Gemma widens the feed-forward part of the layers that share; here --ffn is the same for all, so that a
// model is smaller than its LLaMA: compare at equal parameters by a larger --ffn, or say that it is smaller.
//
// Presets (--preset; train/settings/presets.cpp), at the settings of train_llama:
//
//   name          owners  total          less
//   arith-quick   2       62,400         4,096
//   150m          6       144,784,896    7,077,888
//   1b            8       1,059,295,232  16,777,216
//   130m          6       122,505,536    5,898,560
//
// Options:
//   --sharing KIND             cla (default), suffix, list.
//   --cla-factor c             for cla: 2 (default). 1 is LLaMA.
//   --num-kv-shared-layers s   for suffix: 0 (default) is LLaMA; Gemma 3n shares 15 of its 35 layers.
//   --kv-owners LIST           for list: ascending, from 0, as in [0,4,8].
//
// models/kv_share.cpp is the connection.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "kv_share", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
