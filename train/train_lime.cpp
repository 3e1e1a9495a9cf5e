// train_lime: LIMe (layer-integrated memory) with key/value routing. Attention in layer l sees keys and values mixed
// from all layers so far.
//
// Every layer i projects its own key and value heads k_i[h], v_i[h] (K heads of width D) as in LLaMA. From the second
// layer on, what its queries attend to is, with learned weights W_l (K, (l+1) K), signed and unconstrained,
//
//   k~_l[h] = sum_{i <= l} sum_{h'} W_l[h, i K + h'] k_i[h']        and v~_l likewise, with the same weights
//
// Nothing else changes, so LIMe adds K^2 (L (L+1)/2 - 1) numbers: 144 at the arithmetic sizes, 8,640 at 1B. W_l starts
// as [random | identity], learns ten times as fast as the rest, and does not decay. With W_l = [0 | I] it is LLaMA, bit
// for bit. models/lime.cpp is the connection, kernels/depth/route.h the mixture and its gradients.
// Gerasimov et al., "You Do Not Fully Utilize Transformer's Representation Capacity", arXiv 2502.09245.
//
// Presets (--preset; train/settings/presets.cpp): those of train_llama, plus LIMe's parameters:
//
//   name         added    total               name      added     total
//   arith(-quick) 144     66,640              deep32    33,728    46,470,592
//   150m         11,088   151,873,872         deep64    133,056   80,140,736
//   1b           8,640    1,076,081,088       deep128   528,320   147,677,632
//   1.2b         138,240  1,176,873,984
//
// Options:
//   --routing KIND        which layers a layer reads. full (default): all so far. last: the --window j latest ones.
//                         first: the first j, and its own. average: the plain mean of each head, without parameters.
//                         own: its own alone, which is LLaMA but for how keys and values start: the control for that
//   --kv-init KIND        how the projections of keys and values start. uniform (default, the code's): in +-1/sqrt(C);
//                         normal: as LLaMA's
//   --router-init KIND    identity (default): the block of the own layer starts as the identity; random: as the others
//   --router-bound KIND   the bound of random entries, where n layers are read. fan_in (default, the code's):
//                         sqrt(3 / (n K)), so that their variance is 1 / (n K); literal: the pseudocode's sqrt(3 K / n)
//   --decay routers       W_l decays and nothing else, as version 1 can be read. usual (default), as in the code: the
//                         matrices, and W_l not at all
//
// docs/papers/lime.md lists where the presets differ from the paper's tables, why, and the flag for the other.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "lime", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
