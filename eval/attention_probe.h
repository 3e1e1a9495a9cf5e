// The attention probabilities that a model really uses, whatever its connection makes of queries, keys and values: from
// the inputs of the attention ops of a recorded tape, right after each op's forward.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention/ops.h"
#include "models/model.h"

namespace crossply {

// What one attention op has just read, copied from the device.
class AttentionInputs {
 public:
  AttentionInputs(const ops::AttentionNode& node, Device& device);
  int64_t T() const { return T_; }
  // Of all that the op computed from it.
  bool finite_output() const { return finite_output_; }
  // Of sequence b and query head h the first n rows and columns of its probabilities, (n, n): softmax of scale q k over
  // the columns up to a row's own, 0 beyond.
  void probabilities(int64_t b, int64_t h, int64_t n, double* P) const;

 private:
  double scale_;
  bool finite_output_;
  int64_t T_, H_, K_, D_;
  std::vector<double> q_, k_;  // (B, T, H, D), (B, T, K, D)
};

// A model recorded for one sequence of T tokens at a time.
class AttentionProbe {
 public:
  // The parameters must have been allocated.
  AttentionProbe(Device& device, ParameterTable& params, const Config& config, int64_t T);

  struct Op {
    size_t node;    // of the tape
    int layer;      // from 0
    int64_t heads;  // H
  };
  const std::vector<Op>& ops() const { return ops_; }  // in the order of the forward; a layer may have any number
  // Takes tokens (T) through the model and calls see(i, inputs) after the forward of ops()[i].
  void run(const int32_t* tokens, const std::function<void(size_t i, const AttentionInputs& inputs)>& see);

 private:
  Device& device_;
  Tape tape_;
  Graph graph_;
  std::vector<Op> ops_;
};

}  // namespace crossply
