// train_depth_attention: Depth-Attention. Before a layer attends over the sequence, each token attends over depth: its
// values become a mixture with those that some lower layers had for the same token.
//
// q (B, T, H, D), k and v (B, T, K, D) are a layer's queries, keys and values, q and k normed where q/k norm is on, and
// rotated by RoPE; G = H/K queries share a key/value head. In layer n, for every token and key/value head:
//
//   m    = mean of the group's G queries
//   a    = softmax_j( <m, k_j> / sqrt(D) )      j: the sources, then n itself
//   v'_n = sum_j a_j v'_j + a_n v_n             v'_j: what source j has made of its own values in the same way
//
// and attention reads q_n, k_n and v'_n. m and all k_j are rotated by the token's position, which cancels in their
// product. The sources of layer n are the layers j < n that are multiples of --depth-stride, and the --depth-recent
// layers right below; layers below --depth-start have none, so that their v' is v.
//
// Start: nothing is added that is trained. There is no weight that turns the mixture off, even equal keys average the
// values, so it cannot start as a LLaMA unless --depth-start is the number of layers.
//
// Cost of a layer with n sources:
//   parameters      none
//   FLOPs a token   4 K D (n+1) in the forward, twice that in the backward: below 0.1 % of a layer
//   memory          the values before their mixing, K D numbers a token, and the weights a, K (n+1) in float32; the
//                   keys and values of the sources stay, as all layers' do
//   bytes           2 K D (n+1) + (H + K) D numbers a token in the forward, about three times that in the backward:
//                   each source collects its gradient from every layer above it
//   generation      the cache keeps k_n and v'_n, and has LLaMA's size; a mixture is of the token's own layers
//
// arXiv 2606.05014, and its code, https://github.com/hyq718/Depth-Attention: its sdpa and flash path, on which it
// trains. Its eager path mixes for each query head and norms keys by the reader's k_norm, which is another function.
// Its k_norm comes after RoPE, ours before, as in the backbone. The paper's 48 layers have stride 24: at most two
// sources, as by default here. Its gains at 3B are up to 2.3 points in the mean over tasks.
//
// Presets (--preset; train/settings/presets.cpp), at the settings of train_llama; the parameters are LLaMA's:
//
//   name          sources of the layers       total      name       sources of the layers       total
//   arith-quick   one, then two for one of 4  66,496     130m       one, two for the last 5     128,404,096
//
// Options:
//   --depth-start n    the first layer that reads lower ones, from 0 on; 1 (default). The number of layers: none does
//   --depth-stride s   layers 0, s, 2s, ... are read by all above them; 0 (default): half the number of layers
//   --depth-recent r   each layer also reads the r layers right below it; 0 (default)
//
// models/depth_attention.cpp is the connection; kernels/depth/depth_attention.h has the mixture and its gradients.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(
      argc, argv, "depth_attention", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
