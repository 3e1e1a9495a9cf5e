// train_mudd: MUDDFormer, multiway dynamic dense connections. Behind each block, four mixtures of the embedding and all
// block outputs so far are made, with weights that each token computes: one becomes the next block's queries, one its
// keys, one its values, one its residual stream.
//
// X_0 (B, T, C) is the embedding, X_n what block n puts out. Behind block n, with N = n+1 sources and W = 4 ways (W = 1
// behind the last block, whose way goes to the final norm), for each token
//
//   p      = gelu(rms(X_n) W1^T)                            W1 (W N, C), rms without a gain, exact gelu
//   w      = p W2^T + a                                     W2 (W N, W N), a (W, N): one weight for each way and source
//   A_c    = sum_{l=0}^{n} w[c,l] rms(X_l) * pre_l          pre_l (C), one for each source
//   way c  = rms(A_c) * post_c + X_n                        post_c (C)
//
//   q = rmsnorm_q(way Q) Wq^T,  k = rmsnorm_k(way K) Wk^T,  v = rmsnorm_v(way V) Wv^T
//   x = way R + Wo attention(rope(q), rope(k), v),  X_{n+1} = x + SwiGLU(rmsnorm(x))
//
// Block 1 reads the embedding by all four ways. New are W1, W2, a, pre, post, of each mixture its own, and the norms in
// front of keys and values.
//
// Start: W2 = 0, a = 0, pre = 1, post = 0.001, W1 normal with spread 1/sqrt(C). Then A_c = 0 and every way is X_n: the
// model is LLaMA. Of all that is new inside the mixtures, only a and W2 have a gradient at the first step. W1 and W2
// decay like any matrix, a and the gains do not.
//
// Cost, with s1 = sum_{n=1}^{L-1} (n+1), s2 = sum_{n=1}^{L-1} (n+1)^2:
//   parameters      4 C s1 + 16 s2 + 4 s1 + C (L+1) + (L+1)^2 + (L+1) + 2 C L, and with prepost
//                   C (L (L+3)/2 + 4 (L-1) + 1) for the gains; together that is
//                   C (5 L^2 + 21 L - 12)/2 + (16 L^3 + 33 L^2 + 23 L)/3 - 18
//   FLOPs a token   16 C s1 + 32 s2 + 4 C (L+1) + 2 (L+1)^2 more in the forward, twice that in the backward. Small
//                   beside the memory traffic: a mixture reads N streams and writes four.
//   memory          all rms(X_l) once (they are the same for all readers), four streams and the weights for each block
//
// Xiao et al., "MUDDFormer: Breaking Residual Bottlenecks in Transformers via Multiway Dynamic Dense Connections",
// arXiv 2502.12170; here as SATFormer's code (arXiv 2605.03953) has it for a baseline, but for W1.
//
// Presets (--preset; train/settings/presets.cpp): V = 32,000, q/k norm, T = 4096, 524,288 tokens a step, cosine to a
// tenth:
//
//   name       C     F     L   H   learning rate  steps   added      total        --norm none
//   130m       768   3072  11  12  2e-3           9,536   324,912    128,729,008  128,638,384
//   340m       1024  4096  18  16  1.5e-3         19,073  1,051,620  335,849,700  335,585,508
//   760m       1536  6144  19  24  1e-3           38,146  1,724,136  768,164,456  767,731,304
//
// Options:
//   --norm KIND                 prepost (default, SATFormer's): as above. none: sum_l w[c,l] X_l is the way itself, and
//                               a starts as (0 .. 0 1), which is LLaMA again.
//   --intermediate-sizes LIST   every layer's F. The presets let it rise from F/2 to 3F/2, to the nearest 256, as
//                               SATFormer's code (MUDDFormer's rounds to 128); the sum over the layers stays the same.
//                               [] (default without a preset, or given): all alike.
//   --w1-init KIND              fan_in (default): W1 starts with spread 1/sqrt(C), as in MUDDFormer's code. literal:
//                               1/C, as in SATFormer's; the weights of each token then learn more slowly.
//
// Where the codes differ: in W1's start, see --w1-init. MUDDFormer's JAX code has one pre-gain a source, shared by all
// mixtures, adds X_n and norms on way R only, and rounds the width of p up; here each mixture has its own gains, all
// four ways are alike and p has W N entries, as in SATFormer's.
//
// models/mudd.cpp is the connection; multiway_mix.h has the four mixtures at once, gelu.h and matmul.h their
// weights.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "mudd", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
