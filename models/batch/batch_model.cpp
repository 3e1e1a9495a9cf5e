#include "models/batch/batch_model.h"

#include <omp.h>

#include <algorithm>
#include <numeric>

#include "engine/buckets.h"
#include "kernels/block/add.h"
#include "kernels/optim/gradient_norm.h"

namespace crossply {
namespace {

// A core's own cache is 1 to 2 MiB; beyond about twice that, whole sequences on a thread are no faster than whole ops.
constexpr size_t max_gradients = size_t{1} << 20, max_activations = size_t{4} << 20;
// Sequences go through together while they take no more than this: longer loops, fewer calls.
constexpr size_t roomy = size_t{1} << 20;
constexpr int64_t max_replicas = 16;  // so many threads can work; each costs a set of activations and gradients

Tensor flat_gradients(const Arena& arena, const ParameterTable& params) {
  return Tensor{arena.data(), params.dtype(), Shape{params.flat_size()}};
}

}  // namespace

void load_batch(Device& device, const Graph& graph, const int32_t* tokens, const int32_t* targets) {
  device.copy_in(graph.tokens->tensor.data, tokens, graph.tokens->tensor.bytes());
  if (graph.documents != nullptr) graph.documents->load(device, tokens);
  const int32_t* documents = graph.documents != nullptr ? graph.documents->host_bounds.data() : nullptr;
  for (const auto& engram : graph.engrams) engram->load(device, tokens, graph.tokens->shape[1], 0, documents);
  device.copy_in(graph.targets->tensor.data, targets, graph.targets->tensor.bytes());
}

double sum_losses(Device& device, const Graph& graph) {
  const Tensor& losses = graph.losses->tensor;
  double sum = 0;
  with_real(losses.dtype, [&](auto real) {
    std::vector<decltype(real)> host(static_cast<size_t>(losses.numel()));
    device.copy_out(host.data(), losses.data, losses.bytes());
    for (const auto loss : host) sum += static_cast<double>(loss);
  });
  return sum;
}

Layout choose_layout(ParameterTable& params, const Config& config, const Batch& batch, Backend backend) {
  const Layout whole{batch.B, 1};
  const size_t gradients = static_cast<size_t>(params.rows_size()) * size_of(Dtype::f32);
  if (backend == Backend::cuda || gradients > max_gradients || batch.B < 2) return whole;
  const auto arena_of = [&](int64_t sequences) {
    Tape tape(batch.dtype);
    Batch same = batch;
    same.plan = PlanMode::reuse;  // the other plans must give the same bits
    same.training = true;         // and so must evaluation
    record_batch(tape, params, config, same, {sequences, 1});
    return tape.arena_bytes();
  };
  const size_t one = arena_of(1);
  if (one > max_activations) return whole;
  int64_t sequences = 1;
  for (int64_t n = 2; n * 2 <= batch.B && static_cast<size_t>(n) * one <= roomy; ++n)
    if (batch.B % n == 0 && batch.B / n >= std::min(max_replicas, batch.B / 2)) sequences = n;
  return {sequences, std::min(max_replicas, batch.B / sequences)};
}

Graph record_batch(Tape& tape, ParameterTable& params, const Config& config, const Batch& batch, const Layout& layout) {
  if (batch.eight_bits) tape.use_eight_bits();
  const Graph graph =
      record_model(tape, params, config, layout.sequences, batch.T, {batch.teacher, batch.z_loss, batch.documents});
  if (batch.training) tape.differentiate();
  tape.plan(batch.plan);
  return graph;
}

size_t memory_of(const Layout& layout, const Tape& tape, const ParameterTable& params, bool training) {
  const size_t gradients =
      layout.replicas > 1 && training ? static_cast<size_t>(params.flat_size()) * size_of(params.dtype()) : 0;
  return static_cast<size_t>(layout.replicas) * (tape.arena_bytes() + gradients);
}

BatchModel::BatchModel(Device& device, ParameterTable& params, const Config& config, const Batch& batch)
    : device_(device),
      params_(params),
      batch_(batch),
      layout_(choose_layout(params, config, batch, device.stream().backend)),
      sums_(device, "sums of losses", static_cast<size_t>(layout_.replicas) * sizeof(double)),
      host_sums_(static_cast<size_t>(layout_.replicas)) {
  for (int64_t i = 0; i < layout_.replicas; ++i) {
    Replica& replica = *replicas_.emplace_back(std::make_unique<Replica>(batch.dtype));
    replica.graph = record_batch(replica.tape, params, config, batch, layout_);
    if (layout_.replicas > 1 && batch.training)
      replica.gradients = Arena(device, "gradients of a replica", params.gradients().bytes());
    const Tensor own = flat_gradients(replica.gradients, params);
    const Tensor gradients = own.data != nullptr ? own : params.gradients();
    replica.tape.allocate(device, batch.training ? &gradients : nullptr);
  }
}

void BatchModel::run_replica(int64_t replica, const int32_t* tokens, const int32_t* targets, const Step& step,
                             const Tensor& losses) {
  Replica& own = *replicas_[static_cast<size_t>(replica)];
  Step of_replica = step;
  if (own.gradients.data() != nullptr) of_replica.overwrite = step.training;  // they are of this batch alone
  const int64_t runs = batch_.B / layout_.sequences, width = layout_.sequences * batch_.T;
  const int64_t begin = runs * replica / layout_.replicas;
  for (int64_t r = begin; r < runs * (replica + 1) / layout_.replicas; ++r) {
    load_batch(device_, own.graph, tokens + r * width, targets + r * width);
    own.tape.run(of_replica.nth(r - begin));
    add_sum(part_of(losses, {replica, replica + 1}), own.graph.losses->tensor, device_.stream());
    if (const int64_t at = layout_.replicas + replica; at < losses.numel())
      add_sum(part_of(losses, {at, at + 1}), own.graph.second()->tensor, device_.stream());
  }
}

void BatchModel::run(const int32_t* tokens, const int32_t* targets, const Step& step, const Tensor& losses) {
  const bool with_second = step.training && has_second() && losses.numel() == 2 * layout_.replicas;
  CHECK_THAT(with_second || losses.numel() == layout_.replicas, losses.str(), " for the losses of ", layout_.replicas,
             " replicas");
  if (step.training) params_.lend_values(true);
  if (layout_.replicas == 1) return run_replica(0, tokens, targets, step, losses);
#pragma omp parallel for schedule(static, 1)
  for (int64_t i = 0; i < layout_.replicas; ++i) {
    Replica& replica = *replicas_[static_cast<size_t>(i)];
    try {
      run_replica(i, tokens, targets, step, losses);
    } catch (...) {  // no exception may leave a parallel region
      replica.error = std::current_exception();
    }
  }
  for (const auto& replica : replicas_)
    if (replica->error) std::rethrow_exception(std::exchange(replica->error, nullptr));
  for (int64_t i = 0; step.training && i < layout_.replicas; ++i)
    accumulate({params_.gradients(), !step.nth(i).overwrite},
               flat_gradients(replicas_[static_cast<size_t>(i)]->gradients, params_), device_.stream());
  for (size_t i = 0; step.last && i < waiting_; ++i) ready_(i);
}

double BatchModel::take_losses() {
  device_.copy_out(host_sums_.data(), sums_.data(), sums_.bytes());
  device_.fill(sums_.data(), 0, sums_.bytes());
  return std::accumulate(host_sums_.begin(), host_sums_.end(), 0.0);
}

void BatchModel::when_final(const std::vector<size_t>& nodes, const std::function<void(size_t i)>& ready) {
  ready_ = ready, waiting_ = nodes.size();
  if (layout_.replicas > 1) return;
  for (size_t i = 0; i < nodes.size(); ++i) replicas_[0]->tape.after_backward(nodes[i], [this, i] { ready_(i); });
}

double BatchModel::training_flops() const {
  return tape().training_flops() * static_cast<double>(batch_.B) / static_cast<double>(layout_.sequences);
}

void BatchModel::start_profile() {
  for (const auto& replica : replicas_) replica->tape.start_profile();
}

std::vector<OpCost> BatchModel::costs() const {
  std::vector<OpCost> sums;
  for (const auto& replica : replicas_)
    for (const OpCost& cost : replica->tape.costs()) add_cost(sums, cost);
  return sums;
}

}  // namespace crossply
