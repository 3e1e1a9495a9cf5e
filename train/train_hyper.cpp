// train_hyper: hyper-connections. The residual stream becomes E streams. What a sublayer reads, how the streams are
// mixed meanwhile, and how much of its output each takes are learned numbers, which every token may bend a little.
//
// H_1 .. H_E (B, T, C) all start as the embedding. Each of the 2 L sublayers f (attention, feed-forward) has its own
// A (E, 1+E) and b (E) and computes, for every token,
//
//   y    = f(norm(sum_i A[i,0] H_i))                         what it reads: column 0
//   H_j <- b[j] y + sum_i A[i,j] H_i,  j = 1 .. E            in place of  x = x + f(norm(x))
//
//   A[i,j] = As[i,j] + sa tanh(n_i . Wa[:,j])                As (E, 1+E), bs (E), Wa (C, 1+E), wb (C), sa, sb: learned
//   b[i]   = bs[i]   + sb tanh(n_i . wb)                     n_i: H_i behind a norm
//
// and the sum of the streams goes to the final norm. The blocks themselves are LLaMA's.
//
// Start: As = [e_r | I] reads stream r and passes all streams on, bs = 1, Wa = wb = 0, sa = sb = 0.01. All streams are
// then equal, and their sum is E times the stream of a plain transformer; the final norm takes the E out again.
//
// Cost (with --dynamic false: parameters 2 L E (E+2), FLOPs half):
//   parameters      2 L (E (E+2) + C (E+2) + 2); 2 L C more with --norm rmsnorm, 4 L C with layernorm; 2 L C less where
//                   the sublayers' norms have no gains
//   FLOPs a token   2 L * 4 E C (E+2) more in the forward (2 per multiply-add), twice that in the backward
//   memory          the streams in front of every sublayer stay until the backward: 2 L E of them instead of 2 L
//
// Zhu et al., "Hyper-Connections", arXiv 2409.19606. Here it is a baseline of two papers, whose codes differ from its
// own paper and from each other. The defaults are the LIMe repository's (arXiv 2502.09245), and all its presets use
// them; the presets of SATFormer (arXiv 2605.03953) set what its text and code say together:
//
//   option                 LIMe's code (default)  SATFormer (130m .. 1.3b)  meaning
//   --rate E               4                      2 (its code: 4)           how many streams
//   --norm KIND            layernorm_no_affine    layernorm (code: rmsnorm) of n_i; those have gains (and a bias)
//   --dynamic-norm-eps E   0: 1e-5                0: 1e-5 (code: see below) of that norm; 0 with rmsnorm: 1e-6
//   --prenorm KIND         layernorm_no_affine    rmsnorm                   of the sublayers; the first has no gains
//   --layer-index KIND     layer                  sublayer                  r = its index, from 0, mod E
//   --output-init-scale    false                  true                      Wo and Wdown start divided by sqrt(E)
//   --dynamic              true                   true                      false: A = As and b = bs for all tokens
//
// SATFormer's configuration files are --rate 4 --norm rmsnorm on top of its presets, and that norm's epsilon is the
// machine epsilon of the type it computes in (for f32: --dynamic-norm-eps 1.1920929e-7); its text and its measured
// memory speak for 2 streams. The method's paper counts sublayers, takes E = 4, and scales Wo and Wdown without saying
// which way. As and bs do not decay, the dynamic parameters do (LIMe's code; SATFormer's decays all). None learns at
// --router-lr.
//
// Presets (--preset; train/settings/presets.cpp) with the parameters they add to train_llama's:
//
//   LIMe's         added     total               SATFormer's  added     total          with --rate 4 --norm rmsnorm
//   arith(-quick)  1,488     67,984              130m         101,596   128,505,692    118,844   128,522,940
//   150m           92,784    151,955,568         340m         221,544   335,019,624    258,984   335,057,064
//   1b             328,512   1,076,400,960       760m         350,588   766,790,908    409,564   766,849,884
//   1.2b           328,512   1,177,064,256       760m-thin    442,848   757,463,520    517,344   757,538,016
//   deep32         83,584    46,520,448          1.3b         590,304   1,299,355,104  689,376   1,299,454,176
//   deep64         167,168   80,174,848
//   deep128        334,336   147,483,648         (SATFormer compares at the sizes up to 760m)
//
// models/hyper.cpp is the connection; hyper.h reads and writes the streams, layernorm.h norms.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, "hyper", [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
