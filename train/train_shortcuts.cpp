// train_shortcuts: embedding shortcuts, the depth connections of the speed-run codes. Every layer's input takes in the
// embedding again; some layers' values take in rows of tables of their own, one for each token of the vocabulary; and
// the output loses a part of what the middle of the model had.
//
// x_0 (B, T, C) is the embedding and x the residual stream, which starts as it. For layers i = 0 .. L-1
//
//   x  <- r_i x + s_i x_0                                     r, s (L): learned
//   xh  = norm(x)
//   v   = Wv xh + c sigmoid(Wg xh[0:G]) VE_i[token]           where i mod 2 = (L-1) mod 2; Wg (K, G), VE_i (V, K D)
//   x  <- x + attention;   x <- x + mlp                       LLaMA's, unchanged; x_mid = x after layer floor(L/2)
//
// and x - b x_mid goes to the final norm, with b learned.
//
// Start, as nanochat's: r falls from 1.15 to 1.05 over the layers, s from 0.2 to 0.05, b = 0.2, the tables are uniform
// in +-sqrt(3/C), the gates in 0 .. 0.02. With r = 1, s = b = 0 and tables of zeros it is LLaMA, bit for bit: so starts
// --init. Decay: tables a tenth of --weight-decay, r a half, gates as matrices, s and b none. r, s and b learn at five
// times --lr. nanochat's own rates belong to another optimizer, Muon; these are our choice.
//
// Cost, with n tables (L/2, rounded up):
//   parameters      n (V K D + K G) + 2 L + 1
//   FLOPs a token   3 C L + 3 C + n (2 K G + 2 K D) in the forward, twice that in the backward
//   memory          the tables with their gradients and two moments, 16 bytes a number: 0.62 GB each for GPT-2's
//                   vocabulary and K D = 768. A step touches B T rows of each, and AdamW walks through all of them:
//                   in a small model with a large vocabulary the tables decide about time, too. Each layer's stream
//                   stays twice
//
// There is no paper; value tables come after value residuals (arXiv 2410.17897). The form is that of karpathy/nanochat
// (gpt.py, July 2026), which normalises the embedding too, without a gain (--embed-norm true);
// KellerJordan/modded-nanogpt has five tables in layers 1, 2, 8, 9, 10 of 11 (--value-embeds list --value-layers
// [1,2,8,9,10], with gates up to 2: --gate-scale 2, of 6 channels, and the embedding's first 6 beside them, which we do
// not have). Of nanochat's, smearing, the logits' cap, norms behind the rotation, the factor 1.2 on queries and keys
// and the squared ReLU are not here: they do not connect layers.
//
// Presets (--preset; train/settings/presets.cpp), at the settings of train_llama; most of what is added are tables:
//
//   name          added        total                      name       added        total
//   arith-quick   1,449        67,945                     130m       147,456,887  275,860,983
//   150m          231,585,145  383,447,929                340m       294,913,765  629,711,845
//   1b            205,853,473  1,281,925,921              1.3b       786,436,657  2,085,201,457
//   deep32        205,854,273  252,291,137                deep128    823,417,089  970,566,401
//   d12           150,995,401  286,283,977                d20        419,431,641  899,868,121
//
// d12 and d20 are nanochat's sizes, tokens and vocabulary, and have --embed-norm true.
//
// Options:
//   --value-embeds alternate   none, or list with --value-layers: the layers that have a table
//   --gate-channels G          12 (0, the default) or the width, where that is smaller
//   --gate-scale c             3
//   --resid, --x0, --backout   true; false leaves r, s or b out
//   --embed-norm               false
//   --unet, --value-from, --attn-saved, --lanes-from, --mudd-tail, --mudd-width   below
//
// What later speed runs added is off unless it is asked for; each stands alone. v counts layers from 0, out_v is what
// layer v has put out, xm the middle, a the stream.
//
//   --unet true            before layer v of the last floor(L/2): a <- a + w out_(L-1-v), w starts at 1. Then r and s
//                          above. A weight of 1 doubles the stream there; qlabs-eng/slowrun lives with it
//   --value-from x0        Wve x_0, with Wve (K D, C), in place of a table's row: no tables, no vocabulary in the count
//   --attn-saved m         in layers above m attention reads norm(out_m); its output still goes to the stream
//   --lanes-from s         from layer s on there are two lanes, a and b, equal at first. Attention reads a, the MLP
//                          reads b; of an output y, a <- rho a + p y and b <- rho b + p' y. The output is (a + b) / 2.
//                          xm and out_v mean a. Start: rho = sqrt(1.1), p = p' = 1, but attention's p' is 1.5
//   --mudd-tail residual   before the last layer a <- a + c . (x_0, xm, a), and behind it x <- x + c' . (x_0, xm, a as
//                          it was before the first of these), with three numbers for each token,
//                          c(x) = (W2 gelu(W1 x) + bias) / 10, W1 (--mudd-width, C). x is a, then the output; no norm.
//              both        and the last layer's values take in another such sum, in as many heads as queries have
//
// They decay not at all but for Wve, which is a matrix like others, and W1 and W2. w, rho and p learn at five
// times --lr, the tail at a quarter. FLOPs of a forward: 3 C for each scaled sum, of which --unet has L/2, --lanes-from
// 4 a layer and one for its x_0; 2 K D C for each Wve; 2 (W C + 3 W + 3 C) for each sum of the tail.
//
// Forms and starts are those of qlabs-eng/slowrun (--unet, --value-from) and KellerJordan/modded-nanogpt (the others).
// There, the tail's last bias starts at -5 in place of --backout; its first form read other layers.
//
// models/shortcuts.cpp is the connection; kernels/depth/channel_gate.h, value_mix.h and multiway_mix.h have its
// operations.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "shortcuts", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
