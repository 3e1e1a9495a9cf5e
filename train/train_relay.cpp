// train_relay: values handed from layer to layer, an idea from none of the papers (docs/add-a-connection.md).
//
// ResFormer and SATFormer add the first layer's values to those of every layer. Here a layer adds what the layer below
// attended to, so the values of all layers travel up, and every token and key/value head gates what it lets pass:
//
//   V'_n = V_n + g_n V'_{n-1}        g_n = relu(x Wg_n)        n = 1 .. L-1, Wg_n (K, C), normal(0.02)
//
// It adds (L-1) K C numbers and as little time as SATFormer. With Wg = 0 it is LLaMA, bit for bit. models/relay.cpp is
// the connection; the mixture is kernels/depth/value_mix.h.
//
// Presets: those of train_llama. arith: 384 added, 66,880 in all.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "relay", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
