// train_gpt2: GPT-2, the second backbone, as OpenAI published it and as the Inheritune paper trains it.
//
// The stream starts as x = E[token] + P[position], both tables learned. Each block is two sublayers on it (B, T, C):
//
//   x = x + Wo attention(Wq n, Wk n, Wv n)      n = layernorm(x); causal, H heads, no rotation: P has the positions
//   x = x + Wdown gelu(Wup m)                   m = layernorm(x); F = 4 C
//
// and the head is E itself, behind a last layernorm. Every product and norm has a bias, unless --bias false.
// Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; Sanyal et al., "Inheritune", arXiv
// 2404.08634.
//
// Options:
//   --bias false                no biases anywhere, norms with a gain only, as in Inheritune's code
//   --scale-attn-by-layer true  attention logits of layer i (from 0) divided by i + 1, too, as in its larger models
//   --activation KIND           gelu_new (default), the form by tanh; gelu, the exact one
//   --positions P               rows of the table of positions (0: as many as T)
//
// Presets (--preset; train/settings/presets.cpp), the Inheritune paper's: V = 50,304, P = T = 1024, no biases, logits
// divided by the layer's number but in gpt2-small, 100,000 steps; --layers has the depths between:
//
//   name                  C     L   H   tokens/step  rates            parameters
//   gpt2-small            768   12  12  393,216      6e-4 to 3e-5     124,373,760
//   gpt2-medium           1024  24  16  393,216      3e-4 to 1e-5     354,599,936
//   gpt2-large            1280  36  20  131,072      2e-4 to 1e-5     773,582,080
//   gpt2-xl               1600  48  25  131,072      1.5e-4 to 1e-5   1,556,840,000
//   gpt2-medium-fineweb   1024  24  16  61,440       2e-4 to 1e-5     354,599,936
//   gpt2-large-fineweb    1280  32  20  61,440       2e-4 to 1e-5     694,928,640
//   gpt2-medium-kd        1024  16  16  393,216      3e-4 to 3e-5     253,920,256 (50,000 steps, with --teacher)
//   gpt2-medium-50k       1024  24  16  49,152       3e-4 to 1e-5     354,599,936
//
// docs/inheritune.md has a command for each row of that paper's tables.
//
// The same block is under every other architecture with --backbone gpt2: models/gpt2.cpp has it.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "gpt2", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
