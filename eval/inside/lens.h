// The logit lens: what a stream in the middle of a model says about the next token, read by the model's own final norm
// and head. It is those ops that run, recorded on a tape of their own, so that nothing is computed a second way.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "eval/inside/probe.h"
#include "eval/inside/windows.h"

namespace crossply {

class LogitLens {
 public:
  // The parameters must have been allocated. T: rows of a stream.
  LogitLens(Device& device, ParameterTable& params, const Config& config, int64_t T);
  // The cross entropy of every row of the stream (T, C) with its token; 0 where that is -1.
  std::vector<double> losses(const std::vector<double>& stream, const int32_t* tokens);
  // The most likely token of every row, the first one of equals. Memory for some rows' logits at a time.
  std::vector<int32_t> predictions(const std::vector<double>& stream);
  // Of losses(), and of predictions().
  double flops() const { return scores_.tape.forward_flops(); }
  double bytes() const { return static_cast<double>(scores_.tape.arena_bytes() + logits_.tape.arena_bytes()); }

 private:
  struct Head {
    explicit Head(Dtype real) : tape(real) {}
    Tape tape;
    Value *stream = nullptr, *tokens = nullptr, *out = nullptr;
  };
  void load(const Head& head, const double* stream);

  Device& device_;
  int64_t T_, C_, V_, rows_;
  Head scores_, logits_;  // T rows that end in losses; rows_ rows that end in logits
};

// What one stream says, means over the scored positions.
struct LensReading {
  std::string value;  // hidden.3: what block 2 has put out; mixed.3: what block 3 reads
  int layer;
  double loss = 0;            // cross entropy of the true next token, nats
  double p_final = 0;         // probability of the token that the last layer finds most likely
  double p_truth = 0;         // probability of the true next token
  double perplexity() const;  // exp(loss)
};

struct LensStudy {
  int64_t scored = 0;
  std::vector<LensReading> hidden = {}, mixed = {};  // hidden: from the embeddings to what the head reads
};

// The streams of a model that the lens reads: hidden.0 to hidden.L, and mixed.i where its connection makes something
// else of hidden.i.
LensStudy lens_streams(const Probe& probe, int layers);
// Throws Exit::not_finite where a number is none, Exit::usage where nothing is scored.
LensStudy study_streams(Probe& probe, LogitLens& lens, int layers, const std::string& model,
                        const std::vector<TokenWindow>& windows,
                        const std::function<void(int64_t done, int64_t all)>& told);

}  // namespace crossply
