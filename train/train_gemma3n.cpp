// train_gemma3n: two small connections of Gemma 3n and 4. Every layer has embeddings of its own (PLE), and a low-rank
// branch runs beside its attention (LAuReL). The backbone is LLaMA's or GPT-2's block, not Gemma's.
//
// With e the embedding of the token, times sqrt(C), each layer v gets of it p_v (W), from a table and from e:
//
//   p_v = (norm((Wm e)_v / sqrt(C); gm) + sqrt(W) Tab[token]_v) / sqrt(2)      Wm (L W, C), Tab (V, L W): slice v
//
//   xh = norm(x);  y = attention(xh)
//   x  = (x + y + xh + norm(Wb Wa xh; gl)) / sqrt(2)          --laurel-form gemma; paper: x + y + Wb Wa xh
//   x  = x + mlp(norm(x))
//   x  = x + norm(Wo (gelu(Wg x) p_v); go)                    gelu by tanh; Wg (W, C), Wo (C, W), Wa (R, C), Wb (C, R)
//
// All norms are RMS norms with a gain. On GPT-2 its positions are part of e. A tied head has the embedding as it is.
//
// Start: matrices normal(0.02), the table, too; gm 1, and gl and go 0, so that at first the branches add nothing. Wb is
// 0 with laurel-form paper. A matrix that starts at 0 in front of a norm would have gradients a thousand times larger.
// The table learns at five times the rate and does not decay. With --embed-scale none and --laurel-rank 0 or
// --laurel-form paper it starts as LLaMA, bit for bit.
//
// Cost, with L the number of layers:
//   parameters      L (V W + W C + 2 W C + C) + W for the embeddings; L (2 R C + C) for the branch (paper: no C)
//   FLOPs a token   6 L W C and 4 L R C in the forward, twice that in the backward; the table is looked up
//   memory          about 3 W + R + 4 C a token and layer
//
// Gemma Team, "Gemma 3n", 2025, and transformers' code of gemma3n and gemma4; Menghani, Kumar and Kumar, "LAuReL:
// Learned Augmented Residual Layer", arXiv 2411.07501. Google's start is not public: gl and go at 0 are ours. Gemma's
// alternating updates of several streams (AltUp) are not here, and neither are its norm of values, attention without
// 1/sqrt(D), GELU in the feed-forward part, sparse activations and the cap of logits.
//
// Presets: those of train_llama.
//
// Options:
//   --hidden-size-per-layer-input W   256 (default); 0: no embeddings of layers.
//   --laurel-rank R                   64 (default); 0: no branch.
//   --laurel-form FORM                gemma (default) or paper.
//   --embed-scale NAME                sqrt (default) or none.
//
// models/gemma3n.cpp is the connection.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "gemma3n", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
