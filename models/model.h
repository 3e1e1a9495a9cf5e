// A whole model: embedding, blocks with their connection, final norm, head. One recording function serves training,
// evaluation and generation.
#pragma once

#include <string>

#include "models/connection.h"
#include "models/engram.h"

namespace crossply {

// All parameters of the model, in the order of the forward.
void declare_model(ParameterTable& params, const Config& config);
// Those of a configuration in which every run of a block is a block of its own (loop.h, applied()).
void declare_applications(ParameterTable& params, const Config& config);

// A trained model from whose logits another one learns (kernels/block/distill.h); its parameters have values only, on
// bf16 tapes also the bf16 copies.
struct Teacher {
  Config config;
  ParameterTable params;
  Distillation how;
};

struct Graph {
  Value* tokens = nullptr;                   // (B, T) i32, to be filled by the caller
  EngramInputs engrams;                      // and these, by their load()
  std::shared_ptr<DocumentInput> documents;  // likewise; null: a row is one
  Value* targets = nullptr;                  // (B, T) i32, -1 is not scored; not where the tape is to generate
  Value* losses = nullptr;                   // (B, T), 0 where not scored; likewise
  Value* ce = nullptr;       // (B, T), with a teacher or an exit gate: the cross entropy in the losses of training
  Value* squares = nullptr;  // (B, T), with a z-loss: of log sum exp of the logits, in training
  Value* logits = nullptr;   // (B, 1, V); generation tapes of one token only
  ops::LogitHead head;       // which makes the logits; where there are losses, valid after an evaluation

  // What training adds up beside the losses: ce, or squares, or null.
  Value* second() const { return ce != nullptr ? ce : squares; }
};

struct RecordOptions {
  Teacher* teacher = nullptr;
  double z_loss = 0;            // of training; not beside a teacher or an exit gate
  DocumentMark documents = {};  // tokens attend within theirs; learned positions and Engram's look-back begin with it
};

// Records the model on the tape for B sequences of T tokens. A tape with a cache length ends in logits where T is 1,
// and only fills the caches where T is larger; one without ends in losses. The parameters must be declared; they need
// no memory yet. With a teacher, of any other sizes and architecture but with the same vocabulary, the losses of
// training are the objective of distillation; those of evaluation are the cross entropy as ever, for which the teacher
// computes nothing. With an exit gate they are the objective of all exits, and those of evaluation the last exit's.
// z_loss: training takes the gradients of the losses and of z_loss times the squares; the losses have none of it.
// The values that those who look into a model find by name on its tape (Tape::marks), layers from 0:
//
//   hidden.0          (B, T, C)     the embeddings; hidden.i: what block i-1 has put out, as one stream; the last one
//                                   is what the final norm reads. Those between: on a tape that is looked at only
//   own_query.i, own_key.i, own_value.i   (B, T, H or K, D)     the layer's projections, before any norm or rotation
//   given_key.i       (B, T, K, D)  of a combination: what the choice of keys and values is given
//   and what a connection computes: gate.i (B, T, K), route.i, mixed.i, attn_mixing.i, mlp_mixing.i, and of both
//   sublayers attn_read.i, mlp_read.i, before the norm, attn_output.i, mlp_output.i (its file says)
Graph record_model(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T,
                   const RecordOptions& options = {});
// On a tape with a cache length: T tokens after those in the caches, as generation reads them, and the losses of their
// targets, as an evaluation computes them. For texts of which parts are known already.
Graph record_continuation(Tape& tape, ParameterTable& params, const Config& config, int64_t B, int64_t T);

// The final norm of x (B, T, C), what follows the last block, and the matrix that makes logits of it.
ops::LogitHead record_head(const Build& b, Value* x);

}  // namespace crossply
