// train_mhc: manifold-constrained hyper-connections (mHC). The residual stream becomes E streams, as in train_hyper,
// but every token computes its coefficients from all of its streams, and these are bounded: what mixes the streams has
// rows and columns that sum to 1, so that through any depth the streams neither grow nor vanish.
//
// S_1 .. S_E (B, T, C) all start as the embedding. Around each of the 2 L sublayers f (attention, feed-forward), with
// vec(S) (E C) a token's streams in a row:
//
//   l      = scale * (fn vec(S) / rms(vec(S))) + base      fn (E (E+2), E C), base (E (E+2)), a scale for each of three
//   pre_i  = sigmoid(l_i) + eps                            groups: E rows for pre, E for post, E E for comb
//   post_i = 2 sigmoid(l_{E+i})
//   comb   = softmax over each row of the E E others, + eps; then its columns and, iters - 1 times, its rows and its
//            columns are divided by their sums + eps (Sinkhorn)
//
//   S_i <- post_i f(norm(sum_j pre_j S_j)) + sum_k comb[k,i] S_k
//
// and sum_i (sigmoid(l_i) + eps) S_i, with an fn, base and scale of the head's own, goes to the final norm. The blocks
// themselves are LLaMA's. comb[k,i] goes from stream k to stream i.
//
// Start: pre = 1/E, post = 1, comb the identity but for e^-8, all of them with scale 0.01: nearly LLaMA, as long as the
// streams are equal. Equal streams with equal coefficients stay equal for ever; fn, which starts as N(0, 0.02), parts
// them. The papers do not say how fn and base start; these are our choice. base and scale do not decay, fn does.
//
// Cost, with M = E (E+2) rows of fn (identity: 2 E, permutations: 2 E + E!):
//   parameters      2 L (M (E C + 1) + 3) + E E C + E + 1   (identity: 2 for 3; reads previous: without the last three)
//   FLOPs a token   2 L * 2 E C (M + 1 + E + 1) + 2 E C (E + 1) in the forward, without the last term with reads
//                   previous; twice that in the backward; and about 3 E^2 * 2 iters for Sinkhorn
//   memory          the streams in front of every sublayer stay until the backward, 2 L E of them instead of 2 L, and
//                   of each token M + 1 + E (E+3) numbers for each sublayer; Sinkhorn's steps are computed again
//   bytes           at E = 4 14 C elements a token and sublayer in the forward (S and the output read, the next S
//                   written; that read, and what the next sublayer reads written), 27 C in the backward, as long as
//                   what a kernel reads twice comes from the caches
//
// Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880; names, the place of each eps and the
// last read are those of DeepSeek-V4's code. The paper divides rows first, from exp instead of a softmax, the code
// columns last: converged the two agree. They do not converge for peaked logits: after 20 iterations rows may be off by
// some percent, columns never. The published sizes are mixtures of experts, which crossply does not train.
//
// Presets (--preset; train/settings/presets.cpp), at the settings of train_llama:
//
//   name          added      total                      name       added      total
//   arith-quick   25,309     91,805                     130m       1,634,903  130,038,999
//   150m          1,782,413  153,645,197                340m       3,556,305  338,354,385
//   1b            6,325,093  1,082,397,541              1.3b       9,471,253  1,308,236,053
//   deep32        1,578,693  48,015,557                 deep128    6,302,469  153,451,781
//
// Options:
//   --hc-mult E               streams; 4 (default)
//   --mixing sinkhorn         or permutations: comb = sum_p softmax(l)_p P_p over all E! permutations, whose rows and
//                             columns sum to 1 exactly (mHC-lite, arXiv 2601.05732; E <= 4); or identity: comb = I
//   --reads own               or previous (DeepSeek-V4.1): a sublayer reads by the pre of the one before, so that the
//                             write also reads, in one pass, and coefficients need not be waited for; the first
//                             sublayer reads the embedding, the last pre makes the output
//   --start even              or one_hot: base of pre is 1 for stream s mod E of sublayer s and -1 for the others, as
//                             ports of mHC-lite have it
//   --hc-sinkhorn-iters 20    iterations
//   --hc-eps 1e-6             the eps above
//
// models/mhc.cpp is the connection; kernels/depth/streams/mhc.h has the coefficients and their gradients, hyper.h the
// write.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "mhc", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
