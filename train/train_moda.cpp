// train_moda: MoDA, mixture-of-depths attention. A token attends to the tokens before it and, in the same softmax, to
// slots: keys and values that lower layers kept for this token.
//
// q (B, T, H, D), k and v (B, T, K, D) are a layer's queries, keys and values, q and k normed where q/k norm is on, and
// rotated by RoPE; G = H/K queries share a key/value head. Layer u leaves two slots for every token:
//
//   (k_u, v_u)      the keys and values of its attention
//   (kf_u, vf_u)    kf = rotate(norm(Wkf x)), vf = Wvf x, with x the normed input of the MLP; with --ffn-kv
//
// kf is normed where q/k norm is on, with a gain of its own, and rotated as k is. Layer n reads the slots of layers
// lo..n-1, where lo is n minus --depth-window, or 0. Layers below --depth-start read none. For every token t and head:
//
//   z = <q_t, k_j> / sqrt(D) for j <= t,  and  <q_t, kd_s> / sqrt(D) for every slot s of token t
//   p = softmax(z)                                                   one softmax over both kinds
//   o = sum_j p_j v_j + sum_s p_s vd_s
//
// The causal mask does not apply to slots, for they are of the token itself: query and slot are rotated by the same
// position, which cancels in their product. A GPT-2 rotates neither, and divides both kinds of logits alike.
//
// Start: Wkf and Wvf start as the projections of keys and values do, the gain at 1. A slot of zeros, too, takes a share
// of the softmax, so it cannot start as a LLaMA unless --depth-start is the number of layers.
//
// Cost:
//   parameters      2 C K D for each layer that another one reads, by default the first L-1; D more with q/k norm.
//                   None without --ffn-kv
//   FLOPs a token   4 C K D for each such layer, and 4 H D for each slot that a layer reads; by default layer n reads
//                   2n. Twice that in the backward
//   memory          kf and vf, 2 K D numbers a token for each such layer; the keys and values of a layer stay until
//                   its last reader has gone backward
//   bytes           2 K D numbers a token for each slot that a layer reads: over all layers 2 K D L (L-1), which grows
//                   with L^2. --depth-window makes it linear
//   generation      the cache is LLaMA's: slots are of the newest token's own layers
//
// arXiv 2603.15619, and its code, https://github.com/hustvl/MoDA: kernels and a naive reference, which crossply equals.
// Its models for language are not public. Ours are: x is the normed MLP input (the paper says "the FFN's input"), the
// norm and the rotation of kf, --depth-start and --depth-window. Its vision models have no slots of the MLP.
// The paper's perplexities of C4 at 700M: 18.59 without slots, 18.48 with those of attention, 18.21 with both.
//
// Presets (--preset; train/settings/presets.cpp), at the settings of train_llama:
//
//   name          slots of the layers       total        name       slots of the layers       total
//   arith-quick   0, 2, 4, 6                72,640       130m       0, 2, .. 20               140,201,216
//   150m          0, 2, .. 22               164,838,912  1b         0, 2, .. 30               1,107,529,728
//
// Options:
//   --depth-start n    the first layer that reads slots, from 1 (default). The number of layers: none does
//   --depth-window w   a layer reads the slots of the w layers right below it; 0 (default): of all lower ones
//   --ffn-kv b         true (default): the MLP's input leaves a slot, too; false: attention's keys and values alone
//
// models/moda.cpp is the connection; kernels/attention/depth_merge.h has the joint softmax and its gradients.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "moda", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
