// train_sla: skip-layer attention. Some query heads of a layer attend to the keys and values of a layer far below,
// which are there already; the other heads attend to the layer's own.
//
// With distance N and h skipping heads, query head j of layer l = 1 .. L, j = 0 .. H-1:
//
//   s    = l - N  if l > N and j < h,  else l               which layer it reads
//   O[j] = attention(q_l[j], k_s[g], v_s[g])                g = floor(j K / H): the same key/value head as in its own
//                                                           layer; causal, at the same positions
//
// Keys are taken behind norm and rotation: a rotation depends on the position only, so another layer's fit. Gradients
// flow back into the layer that was read. Everything else is LLaMA, and so is a model with N >= L.
//
// Nothing is added, nothing has to start: no parameters, no FLOPs. What changes from LLaMA's first step on is which
// keys and values are read, and that those of the lower layers stay until the upper ones have been differentiated.
// Key/value heads that no query head reads get no gradient: head 0 of layers 7 and 8 in va100m, heads 0 and 1 of layers
// 10 to 12 in va300m.
//
// Chen et al., "Skip-Layer Attention: Bridging Abstract and Detailed Dependencies in Transformers", arXiv 2406.11274;
// in the sizes of the vertical attention paper (train_vertical), which has it as a baseline.
//
// Presets (--preset; train/settings/presets.cpp): data and schedule as in train_vertical; layers read -> from:
//
//   name     C    F     L   H   K   N   h   reading          added  total
//   va50m    192  768   6   3   1   4   1   5->1 6->2            0  53,086,656
//   va100m   384  1536  8   6   3   6   3   7->1 8->2            0  119,740,800
//   va300m   768  3072  12  12  4   9   6   10->1 11->2 12->3    0  319,703,808
//
// Options:
//   --distance N        how many layers below; 0 (default): floor(3 L / 4), at least 1: the paper's value at each size.
//   --sla-heads h       how many query heads skip; 0 (default): floor(H / 2), the paper's, too.
//
// For 12 layers of 12 heads the method's own paper is reported to have found N = 9 and h = 9 best. The vertical
// attention paper does not say which heads skip (here the first ones), nor whether keys and values are reused or made
// anew from the lower layer's output: here they are reused, which adds no parameters, as is said of the method.
//
// models/sla.cpp is the connection (with train_ala's), select_heads.h gathers the heads that attention reads.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "sla", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
