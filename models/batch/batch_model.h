// A model recorded for batches of B sequences of T tokens, in the form that suits its size:
//
//   large  one tape for the whole batch; the threads share the work of every op.
//   small  batch-parallel replicas: several tapes for one or a few sequences each, where a sequence's activations and a
//          set of gradients fit into a core's own cache. A thread takes a replica's sequences through the whole model,
//          one after the other. At the end of the batch the replicas' gradients are added in order.
//
// The form, and which sequences a replica gets, depend on sizes alone, so results do not depend on the thread count.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "models/model.h"

namespace crossply {

// Copies one batch of the graph's (B, T) tokens and targets to the device.
void load_batch(Device& device, const Graph& graph, const int32_t* tokens, const int32_t* targets);
// The sum of the losses of the last forward, in double and in order. Waits for the device.
double sum_losses(Device& device, const Graph& graph);

struct Batch {
  int64_t B, T;
  Dtype dtype = Dtype::f32;
  bool training = true;
  PlanMode plan = PlanMode::reuse;
  Teacher* teacher = nullptr;  // that the model learns from; its parameters are allocated as the model's are
  double z_loss = 0;           // in training
  bool eight_bits = false;     // linear layers multiply so in training (kernels/block/linear.cpp)
  DocumentMark documents = {};
};

struct Layout {
  int64_t sequences;  // of one run of a tape
  int64_t replicas;   // 1: one tape
};
// A GPU has one large form only.
Layout choose_layout(ParameterTable& params, const Config& config, const Batch& batch, Backend backend);
// Records, differentiates and plans a tape for one run of this layout.
Graph record_batch(Tape& tape, ParameterTable& params, const Config& config, const Batch& batch, const Layout& layout);
// Bytes of all activations, and of the replicas' gradients.
size_t memory_of(const Layout& layout, const Tape& tape, const ParameterTable& params, bool training);

class BatchModel {
 public:
  // The parameters must have been allocated; for bf16, their bf16 copies too.
  BatchModel(Device& device, ParameterTable& params, const Config& config, const Batch& batch);

  // tokens, targets: (B, T). In training adds the gradients of step.grad_scale times the sum of the losses to the
  // table's. Adds the sum of each replica's losses to `losses`, (replicas) of f64 on the device; in training, where
  // has_second(), this may also be (2 replicas), the second half for the sums of Graph::second(). Does not wait until
  // the device is done. Rethrows what a kernel threw.
  void run(const int32_t* tokens, const int32_t* targets, const Step& step, const Tensor& losses);
  // The same, for take_losses: the sum of the losses of all such runs since the last call. Waits for the device.
  void run(const int32_t* tokens, const int32_t* targets, const Step& step) { run(tokens, targets, step, sums()); }
  double take_losses();
  // From now on ready(i) is called in every run with Step::last as soon as the backward of node nodes[i] of tape() is
  // done; with replicas, when all gradients are. nodes: descending.
  void when_final(const std::vector<size_t>& nodes, const std::function<void(size_t i)>& ready);
  Device& device() const { return device_; }
  const Batch& batch() const { return batch_; }
  const Layout& layout() const { return layout_; }
  const Tape& tape() const { return replicas_[0]->tape; }
  bool has_ce() const { return replicas_[0]->graph.ce != nullptr; }
  bool has_second() const { return replicas_[0]->graph.second() != nullptr; }
  size_t bytes() const { return memory_of(layout_, tape(), params_, batch_.training); }
  double training_flops() const;  // of a batch
  // From now on the tapes take the time of every node in training; costs() sums it up by op, over all replicas.
  void start_profile();
  std::vector<OpCost> costs() const;

 private:
  struct Replica {
    explicit Replica(Dtype dtype) : tape(dtype) {}
    Tape tape;
    Graph graph;
    Arena gradients;  // none if there is one replica only
    std::exception_ptr error;
  };
  Tensor sums() const { return Tensor{sums_.data(), Dtype::f64, Shape{layout_.replicas}}; }
  void run_replica(int64_t replica, const int32_t* tokens, const int32_t* targets, const Step& step,
                   const Tensor& losses);

  Device& device_;
  ParameterTable& params_;
  Batch batch_;
  Layout layout_;
  Arena sums_;  // of each replica's losses, f64
  std::vector<double> host_sums_;
  size_t waiting_ = 0;  // for final gradients, of replicas
  std::function<void(size_t)> ready_;
  std::vector<std::unique_ptr<Replica>> replicas_;
};

}  // namespace crossply
