// train_gated_streams: gated residual streams, as in Qwen3.8-Flash-Next. The residual stream becomes E streams, as in
// train_hyper, but they are not mixed among themselves, and a sublayer reads them channel by channel.
//
// S_1 .. S_E (B, T, C) all start as the embedding. Around each of the 2 L sublayers f (attention, feed-forward):
//
//   N_i = S_i / rms(S_i) * (1 + w_i)                       w_i (C), one for each stream
//   G   = sigmoid(up silu(down vec(N) / E))                vec(N) (E C): the streams in a row; down (R, E C) and up
//                                                          (E C, R)
//   x   = (1/E) sum_i G_i N_i                              elementwise; what f reads, without another norm
//   S_i <- S_i + 2 sigmoid((inject vec(N))_i / E) f(x)     inject (E, E C)
//
// and one more x, with a w, down and up of its own, goes to the head, without a final norm. The blocks are LLaMA's
// without their norms.
//
// Start: w = 0, all matrices as the others of the model, so G is nearly 1/2 and the factors of f are nearly 1: half of
// LLaMA's function, as long as the streams are equal; inject parts them. w does not decay, the matrices do.
//
// Cost, with R = C / 32 (--hc-lowrank; Qwen has C / 8 beside experts, which a dense model's products do not outweigh):
//   parameters      2 L E C (1 + 2 R + E) + E C (1 + 2 R), less the norms' (2 L + 1) C
//   FLOPs a token   2 L * 2 E C (2 R + E + 2) + 2 E C (2 R + 1) in the forward, twice that in the backward; that the
//                   backward computes N, G and the network's output again is not counted
//   memory          the streams in front of every sublayer stay until the backward, 2 L E of them instead of 2 L, and
//                   of each token R + 2 E numbers for each sublayer; N and G are there while their read is computed
//   bytes           34 C elements a token and sublayer in the forward at E = 4: S read, N written and read twice, the
//                   network's output written and read, then S read and the next S written, what f reads and puts out;
//                   75 C in the backward. On a CPU N, the network's output and their gradients are of some tokens at a
//                   time and stay in the caches: 14 C and 23 C come from memory
//
// After Qwen's code in transformers (qwen4_exp, Qwen4ExpTextGatedResidual); there is no paper. How it starts is that of
// a port to Megatron. The published model is a mixture of experts, which crossply does not train.
//
// Presets (--preset; train/settings/presets.cpp), at the settings of train_llama:
//
//   name          added       total                      name       added       total
//   arith-quick   7,264       73,760                     130m       3,714,816   132,118,912
//   150m          4,038,912   155,901,696                340m       10,402,816  345,200,896
//   1b            35,854,336  1,111,926,784              1.3b       53,254,144  1,352,018,944
//   deep32        1,377,024   47,813,888                 deep128    5,456,640   152,605,952
//
// Options:
//   --hc-count E              streams; 4 (default)
//   --hc-lowrank R            hidden width of the network that computes the gates; 0 (default): a 32nd of the width
//
// models/gated_streams.cpp is the connection; kernels/depth/streams/gated_streams.h has its norm, gates and write, with
// their gradients.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "gated_streams", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
