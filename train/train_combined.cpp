// train_combined: several connections in one model, as --arch mhc+lime.
//
// The backbone asks its connection at four places (models/connection.h), and each place can have one owner:
//
//   stream     what flows between sublayers: hyper, mhc, gated_streams, vertical, denseformer, attnres, gemma3n,
//              mudd and shortcuts
//   project    a layer's own queries, keys and values: resformer, satformer, relay, lime_static, lime_dynamic,
//              kv_share, mudd and shortcuts
//   kv         which keys and values a layer reads: lime, sla, ala and kv_share
//   attend     attention: depth_attention and moda
//
// A layer then computes, with each part's own equations (each has a trainer with a page):
//
//   x = read(stream);  q, k, v = project(x);  norms and rotation;  k, v = kv(k, v);  y = attend(q, k, v);  write(y)
//
// So values are changed first, and shared or routed then. depth_attention mixes values over depth before kv sees them.
// A part that changes nothing at a place leaves it to the others; options decide that, too: shortcuts with --resid
// false --x0 false --backout false owns project alone. Two parts that change the same thing are refused, and so are
//
//   - parts with a tensor of one name: lime and lime_static
//   - lime_static and lime_dynamic beside several streams or none: they make keys and values of one stream
//   - moda beside lime, sla, ala or kv_share: it reads each layer's own keys and values, and nobody would read others
//   - depth_attention beside kv_share: some layers have no keys and values of their own
//   - loops
//
// What a part keeps for later layers is what it has put out itself: resformer's first values are those before lime
// routes them. Where lime would write over them, they are copied: K D numbers a token for each such layer.
//
// Parameters, FLOPs and memory are the sum of what the parts add (--dry-run). The options are those of the parts; where
// two parts have one of the same name, the part stands in front: lime+lime_dynamic has --lime-kv-init.
//
// Presets (--preset; train/settings/presets.cpp). They have the structure of a block, of two layers or more, and not
// the model:
//
//   v4_block     mhc+kv_share, with --reads previous and an Engram: DeepSeek-V4.1
//   gemma_like   gemma3n+kv_share, of whose layers 3/7 share: Gemma 3n
//   mhc_values   mhc+shortcuts, of which only the value embeddings: mHC beside what speed runs have
//
// --init DIR takes the weights of a plain LLaMA or GPT-2, or of one of the parts. What they do not have starts as the
// plain backbone.
// models/combined.cpp puts the parts together, and finds out what each owns.
#include "train/run/run.h"

using namespace crossply;

int main(int argc, char** argv) {
  return train_program(argc, argv, combined_program, [](const TrainPlan& plan, const Dataset& data, const RunDir& dir) {
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
