// train_attnres: attention residuals. There is no residual stream: every sublayer attends, token by token, over what
// the embedding and the sublayers before it have put out.
//
// y_0 (B, T, C) is the embedding, y_1 .. y_2L what the sublayers put out, attention and feed-forward in turn. Before
// sublayer j = 1 .. 2L stands a mixture with a query w_j (C) and a gain g_j (C), and so does one before the final norm:
//
//   h_j = sum_s a_s x_s          a = softmax_s( <w_j . g_j, x_s> / rms(x_s) )         rms(x) = sqrt(mean(x^2) + eps)
//   y_j = sublayer_j(h_j)                                                            LLaMA's, norm and all, unchanged
//
//   Full (--attn-res-block-size 0)   the x_s are y_0 .. y_{j-1}
//   in blocks of m layers            y_0, the sum over each finished block, and that over the present one, as far as
//                                    it has come: ceil(L/m) + 1 sources at the end
//
// The mixture takes the rows as they are; only the logits see them normalised. eps is the norms'.
//
// Start: w = 0 and g = 1. All weights are equal then and h is the mean of what LLaMA would add up, which the sublayer's
// norm does not tell from the sum, but for eps: a new model is nearly LLaMA. w and g learn at --lr and do not decay.
// The first mixture has one source, so its w and g learn nothing; they are there as in the published checkpoints.
//
// Cost:
//   parameters      2 C (2L+1)
//   FLOPs a token   4 C for each source of each mixture and 2 C for each output, its square; Full: 4 C (2L+1)(L+1) +
//                   2 C (2L+1) in the forward, twice that in the backward
//   memory          the outputs (Full) or sums (blocks) stay until the backward, as LLaMA's streams do, with two
//                   numbers for each token, source and mixture, and so do the mixtures
//   bytes           what decides: Full reads (2L+1)(L+1) rows a token where LLaMA's sums read 4L; blocks of m about
//                   2L (L/2m + 2)
//
// Kimi Team, "Attention Residuals", arXiv 2603.15031, and its use in Kimi K3, arXiv 2607.24653: names and block
// bookkeeping are those of K3's code (the paper counts blocks in sublayers, K3 and we in layers; K3 has 93 layers in
// blocks of 12). The published sizes are mixtures of experts, which crossply does not train.
//
// Presets (--preset; train/settings/presets.cpp), at the settings of train_llama:
//
//   name          added    total                      name       added    total
//   arith-quick   576      67,072                     130m       35,328   128,439,424
//   150m          38,400   151,901,184                340m       75,776   334,873,856
//   1b            135,168  1,076,207,616              1.3b       200,704  1,298,965,504
//   deep32        33,280   46,470,144                 deep128    131,584  147,280,896
//
// Options:
//   --attn-res-block-size m   layers of a block; 4 (default), 0 for Full. The paper's eight blocks are m = L/8. Its
//                             losses at 436M active parameters: plain 1.766, in blocks 1.746, Full 1.737.
//
// models/attnres.cpp is the connection; kernels/depth/query_mix.h has the mixture and its gradients.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "attnres", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
