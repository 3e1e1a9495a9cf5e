// train_vertical: vertical attention. Before each block, the stream is replaced by a weighted mean of the embedding and
// all block outputs so far; which of them a block looks at is learned, with one number for each.
//
// h^1 (B, T, C) is the embedding, h^{l+1} what block l puts out. Block l = 1 .. L has scores s_l (l). For each token,
//
//   a       = softmax(s_l)                                  the same for all tokens
//   w_i     = (a_i / |h^i|) / sum_{j <= l} (a_j / |h^j|)    |h|: the length of the token's vector
//   v_l     = sum_{i <= l} w_i h^i
//   h^{l+1} = v_l + attention and feed-forward on v_l       LLaMA's block, unchanged
//
// There is no mixture behind the last block. The division by the lengths keeps late outputs, which are much longer than
// early ones, from drowning them; gradients flow through it. As a softmax it is w = softmax_i(s_l[i] - ln |h^i|).
//
// Start: s_l = 0 (the paper does not say), so all sources contribute vectors of equal length and the embedding, the
// shortest, has the largest weight: a new model is not LLaMA, which has all weight on i = l. Scores learn at a rate of
// their own (--router-lr: ten times --lr, 1e-2 in the presets; the paper finds 1e-4 too slow and 1e-1 unstable) and
// decay, too.
//
// Cost:
//   parameters      L (L+1)/2, one for each layer and source; none with a fixed map
//   FLOPs a token   C L (L+1) + 2 C L - 2 C more in the forward (mixtures and squared lengths; the first block has
//                   nothing to mix), twice that in the backward
//   memory          h^1 .. h^L stay until the backward, and the weights of every token: L (L+1)/2 numbers
//
// "Vertical Attention: Automatic Exploration of Inter-Layer Connections in Transformer-based Language Models",
// anonymous submission, openreview.net/forum?id=A6uabXKiXc (no arXiv number known).
//
// Presets (--preset; train/settings/presets.cpp): V = 128,256, heads of 128 (H D = 2 C), head and embedding apart, T =
// 4096, 20,000 steps of 1,048,576 tokens at a constant 1e-4:
//
//   name     C    F     L   H   K   added  total          fixed maps: total as train_llama
//   va50m    192  768   6   3   1   21     53,086,677     53,086,656
//   va100m   384  1536  8   6   3   36     119,740,836    119,740,800
//   va300m   768  3072  12  12  4   78     319,703,886    319,703,808
//
// The paper prints 53,086,677 and 319,703,886, too (as the sizes of its plain models). Its 100m column contradicts
// itself, 28 added and 119,740,844 in total; 8 blocks have 36 scores.
//
// Options:
//   --map KIND          learned (default), or fixed weights in place of a, equal for all sources allowed:
//                       inet: h^1, h^2 and h^l;  unet: h^l, and in the second half also h^{L+1-l}.
//                       The paper shows its fixed maps as pictures only; equal weights are our reading.
//   --residual BOOL     false takes the paper's equations by the letter: no residuals, sublayers replace what they
//                       read. Its text leaves the blocks as they are, and so does the default, true.
//   --init-diag X       s_l[l], the score of the ordinary stream, starts at X; 0 (default). 4 is nearly LLaMA.
//   --mirror-offset N   which source unet mirrors: 1 (default) is h^{L+1-l}, what the mirrored block reads; 2 is
//                       h^{L+2-l}, what it puts out.
//
// models/vertical.cpp is the connection; depth_mix.h has the mixture, its gradients and those of the lengths.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "vertical", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
