// The vocabulary models are written in. Each function records one node and returns its output. Names are those of the
// dump: "L3.attn.q". Shapes are checked here, when the model is built.
//
// Ops marked IN PLACE reuse the memory of an input: use what they return, the input itself is gone. They refuse, when
// recorded, an input that others need, and so does what would read one that is gone. Give them a copy() then.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "kernels/block/distill.h"
#include "kernels/block/exit_gate.h"
#include "kernels/block/gelu.h"

namespace crossply::ops {

// weight (V, C), tokens (B, T) i32 -> (B, T, C), or another shape of as many numbers
Value* embedding(Tape& t, const std::string& name, Value* tokens, Value* weight, Shape shape = {});
// out (B, T, C) = inp + the rows of weight (P, C) for positions 0 .. T-1, on a generation tape for those after the
// cache. IN PLACE: takes inp.
Value* positions(Tape& t, const std::string& name, Value* inp, Value* weight);
// Several linear layers on one input, as one product: "L3.attn.q", the weight (out, in), the shape of its output, and a
// bias (out), or null.
struct Projection {
  std::string name;
  Value* weight;
  Shape shape;
  Value* bias = nullptr;
};
std::vector<Value*> linears(Tape& t, const std::string& name, Value* inp, const std::vector<Projection>& projections);
// inp (..., in), weight (out, in), bias (out) or null -> `shape`, whose size is rows * out
Value* linear(Tape& t, const std::string& name, Value* inp, Value* weight, Shape shape, Value* bias = nullptr);
// Between recording and differentiate(): a layer does the work of the add() after it, and in bf16 two layers do that of
// the GELU by tanh between them, where nobody else reads what goes in or comes out. Fewer nodes, less memory.
void fuse_linears(Tape& t);
// Over the last dimension: the model width, or the head width for q/k norms. weight null: without a gain.
Value* rmsnorm(Tape& t, const std::string& name, Value* inp, Value* weight, double eps);
// Rotates (B, T, H, D); the table is rope_positions'. IN PLACE: takes inp.
Value* rope(Tape& t, const std::string& name, Value* inp, Value* table);
// cos and sin, times factor, for positions 0 .. count-1 and D/2 frequencies: (count, D), a constant of the tape
Value* rope_positions(Tape& t, int64_t count, const std::vector<double>& frequencies, double factor = 1);
Value* swiglu(Tape& t, const std::string& name, Value* gate, Value* up);
// Of as many numbers each; the shape is a's.
Value* add(Tape& t, const std::string& name, Value* a, Value* b);
// Elementwise.
Value* multiply(Tape& t, const std::string& name, Value* a, Value* b);
// factor inp
Value* scaled(Tape& t, const std::string& name, Value* inp, double factor);
// a + factor b
Value* add_scaled(Tape& t, const std::string& name, Value* a, Value* b, double factor);
// The same numbers in memory of their own, for an op that works in place.
Value* copy(Tape& t, const std::string& name, Value* inp);
// kernels/block/gelu.h: by the normal distribution itself, or by tanh.
Value* gelu(Tape& t, const std::string& name, Value* inp, GeluKind kind = GeluKind::erf);
// (inp - mean) / deviation over the last dimension, times weight, plus bias; each may be null.
Value* layernorm(Tape& t, const std::string& name, Value* inp, Value* weight, Value* bias, double eps);
// Over the last dimension; entries outside the smallest set with a sum above top_p become 0, and the others are divided
// by their sum if renormalize (kernels/block/softmax.h).
Value* softmax(Tape& t, const std::string& name, Value* inp, double top_p = 1, bool renormalize = true);
// Over the last dimension: the k largest entries where they are positive, 0 for the others (kernels/block/top_k.h).
Value* top_k(Tape& t, const std::string& name, Value* inp, int64_t k);
// Each row's squared distance from the target, as `rows`, one number for each. A loss: a training step takes the
// gradients of grad_scale times their sum. The target gets none.
Value* squared_error(Tape& t, const std::string& name, Value* inp, Value* target, Shape rows);
// cap tanh(inp / cap), for logits that are read: it has no backward. IN PLACE: takes inp.
Value* softcap(Tape& t, const std::string& name, Value* inp, double cap);
// What logits are made of: a product, and a cap on it (kernels/block/softcap.h).
struct LogitHead {
  Value *inp = nullptr, *weight = nullptr;  // (B, T, C), (V, C)
  double softcap = 0;                       // 0: none
};
// The head and the loss in one node: targets (B, T) i32 -> losses (B, T), 0 where the target is -1. A training forward
// also writes the gradients of grad_scale * sum(losses).
Value* cross_entropy(Tape& t, const std::string& name, const LogitHead& head, Value* targets);
// The same with the gradients of grad_scale * sum(losses + z_loss * squares), where squares, (B, T), are those of
// log sum exp of the logits. Evaluation leaves them as they are.
struct LossAndSquares {
  Value *losses, *squares;
};
LossAndSquares cross_entropy_with_z(Tape& t, const std::string& name, const LogitHead& head, Value* targets,
                                    double z_loss);
// Several exits of a model by one head (kernels/block/exit_gate.h), with a gate behind each but the last. In training
// the losses are the objective, of which the gradients are taken at once; in evaluation, where a tape is not looked
// into, the last exit's cross entropy, and ce and weights keep what they were.
struct Exits {
  std::vector<Value*> states = {};  // R of (B, T, C): what the head reads
  Value* weight = nullptr;          // (V, C)
  std::vector<Value*> gates = {};   // R - 1 of (B, T, 1): logits
  double softcap = 0;               // of the head
  double beta = 0;                  // of the entropy of the weights
};
struct ExitLosses {
  Value* losses;                    // (B, T)
  std::vector<Value*> ce, weights;  // R of (B, T)
};
ExitLosses exit_loss(Tape& t, const std::string& name, const Exits& exits, Value* targets);
// The same for a student that also learns from the logits of a teacher, which gets no gradients and whose width may be
// another (kernels/block/distill.h). Training: the objective and its cross entropy, both (B, T), the second named
// NAME.ce. Evaluation: losses is the student's cross entropy, ce keeps what it was, and nobody reads the teacher.
struct Distilled {
  Value *losses, *ce;
};
Distilled distill(Tape& t, const std::string& name, const LogitHead& student, const LogitHead& teacher, Value* targets,
                  const Distillation& how);

}  // namespace crossply::ops
