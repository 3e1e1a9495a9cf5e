// train_ala: adaptive layerwise attention, as the vertical attention paper simplifies it. Only the last layer differs
// from LLaMA: its heads attend to the keys and values of every s-th layer, so that the output sees all depths at once.
//
// With M = ceil(L / s), query head j of layer L, j = 0 .. H-1:
//
//   c    = L - s (j mod M)                                  which layer it reads: L, L-s, L-2s, ..., and again from L
//   O[j] = attention(q_L[j], k_c[g], v_c[g])                g = floor(j K / H): the same key/value head as in its own
//                                                           layer; causal, at the same positions
//
// Keys are taken behind norm and rotation, which depends on the position only. Gradients flow back into the layers that
// are read. All other layers are LLaMA's, and so is the last one with s >= L.
//
// Nothing is added, nothing has to start: no parameters, no FLOPs. The last layer's attention gets a copy of the keys
// and values that its heads have chosen, H of them where LLaMA has K. Key/value heads of layer L that nobody reads get
// no gradient: number 1 in va100m, 1 and 3 in va300m.
//
// Verma and Pilanci's adaptive layerwise attention, arXiv 2409.10870, lets the last layer attend to learned features of
// every s-th layer; reading their keys and values instead, which exist already, is the simplification of the vertical
// attention paper (train_vertical), where it is a baseline called ALA(-).
//
// Presets (--preset; train/settings/presets.cpp): data and schedule as in train_vertical; the last layer's heads read,
// in order:
//
//   name     C    F     L   H   K   layers read by heads 0, 1, ...        added  total
//   va50m    192  768   6   3   1   6 4 2                                     0  53,086,656
//   va100m   384  1536  8   6   3   8 6 4 2 8 6                               0  119,740,800
//   va300m   768  3072  12  12  4   12 10 8 6 4 2 12 10 8 6 4 2               0  319,703,808
//
// Options:
//   --stride s            every so many-th layer, counted down from L. The paper's is 2 at all sizes, the default.
//   --include-self BOOL   true (default): as above. false: layer L is not among those read, but
//                         c = L - s (1 + j mod (M-1)); with M = 1 it keeps its own.
//
// The paper leaves details open. That layer L itself is among those read is our reading: at va50m it gives three layers
// to three heads. models/sla.cpp is the connection (with train_sla's), kernels/depth/select_heads.h gathers the heads.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "ala", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
