#include "kernels/block/exit_gate.h"

#include "engine/node.h"
#include "kernels/block/add.h"
#include "kernels/block/cross_entropy.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 256;  // some hundred exponentials

// Element n of each row, in T.
template <class T, class S>
std::array<T, max_exits> elements(const ExitRows<S>& rows, int64_t n, int64_t count) {
  std::array<T, max_exits> list{};
  for (int64_t t = 0; t < count; ++t) list[static_cast<size_t>(t)] = T(rows.row[t][n]);
  return list;
}

// T: what is computed in.
template <class T, class P, class S>
void exit_weights_rows(const ExitRows<P>& p, const ExitRows<S>& z, int64_t exits, int64_t N) {
  using std::exp;
  parallel_for(N, grain, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      std::array<T, max_exits> log_p{};
      exit_log_weights_ref(log_p.data(), elements<T>(z, n, exits - 1).data(), exits);
      for (int64_t t = 0; t < exits; ++t) p.row[t][n] = static_cast<P>(exp(log_p[static_cast<size_t>(t)]));
    }
  });
}

// want_dz: else dz has no rows.
template <class T, class P, class S>
void exit_loss_rows(P* losses, const ExitRows<S>& dz, const ExitRows<P>& ce, const ExitRows<S>& z,
                    const int32_t* targets, double beta, double scale, int64_t exits, int64_t N, bool want_dz) {
  parallel_for(N, grain, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      std::array<T, max_exits> d{};
      const bool scored = targets[n] != -1;
      const T loss = exit_loss_row_ref(d.data(), elements<T>(ce, n, exits).data(), elements<T>(z, n, exits - 1).data(),
                                       beta, exits);
      losses[n] = scored ? static_cast<P>(loss) : P(0);
      for (int64_t t = 0; want_dz && t + 1 < exits; ++t)
        dz.row[t][n] = S(scored ? static_cast<P>(T(scale) * d[static_cast<size_t>(t)]) : P(0));
    }
  });
}

void check_lists(const std::vector<Tensor>& all, const std::vector<Tensor>& gates, int64_t N) {
  CHECK_THAT(std::ssize(all) >= 2 && std::ssize(all) <= max_exits && gates.size() + 1 == all.size(), all.size(),
             " exits with ", gates.size(), " gates");
  for (const auto* list : {&all, &gates})
    for (const Tensor& tensor : *list) CHECK_THAT(tensor.numel() == N, tensor.str(), " for ", N, " tokens");
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void exit_weights(const std::vector<Tensor>& p, const std::vector<Tensor>& z, Stream stream) {
  const int64_t N = p.at(0).numel(), exits = std::ssize(p);
  check_lists(p, z, N);
  dispatch(
      stream, z[0].dtype, [&] { exit_weights_cuda(p, z); },
      [&]<class S>(S) { exit_weights_rows<double>(rows_of_exits<float>(p), rows_of_exits<S>(z), exits, N); },
      [&]<class T>(T) { exit_weights_rows<T>(rows_of_exits<T>(p), rows_of_exits<T>(z), exits, N); });
}

void exit_loss(const Tensor& losses, const std::vector<Tensor>& dz, const std::vector<Tensor>& ce,
               const std::vector<Tensor>& z, const Tensor& targets, double beta, double scale, Stream stream) {
  const int64_t N = losses.numel(), exits = std::ssize(ce);
  check_lists(ce, z, N);
  if (!dz.empty()) check_lists(ce, dz, N);
  CHECK_SHAPES(targets.numel() == N, losses, targets);
  const auto* target = targets.as<int32_t>();
  dispatch(
      stream, z[0].dtype, [&] { exit_loss_cuda(losses, dz, ce, z, targets, beta, scale); },
      [&]<class S>(S) {
        exit_loss_rows<double>(losses.as<float>(), rows_of_exits<S>(dz), rows_of_exits<float>(ce), rows_of_exits<S>(z),
                               target, beta, scale, exits, N, !dz.empty());
      },
      [&]<class T>(T) {
        exit_loss_rows<T>(losses.as<T>(), rows_of_exits<T>(dz), rows_of_exits<T>(ce), rows_of_exits<T>(z), target, beta,
                          scale, exits, N, !dz.empty());
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

// in: the states before the head, the head, the gates' logits; out: the losses, the exits' cross entropies, their
// weights. Evaluation computes the last exit's alone, unless somebody looks into the model.
struct ExitLoss : Node {
  double beta = 0, softcap = 0;
  bool probed = false;
  size_t exits = 0;
  std::vector<Tensor> z, dz, ce, p;

  const char* op() const override { return "exit_loss"; }
  void prepare() override {
    const auto part = [](const std::vector<Value*>& list, size_t begin, size_t count) {
      const auto from = list.begin() + static_cast<std::ptrdiff_t>(begin);
      return std::vector<Value*>(from, from + static_cast<std::ptrdiff_t>(count));
    };
    z = tensors_of(part(in, exits + 1, exits - 1)), dz = grads_of(part(in, exits + 1, exits - 1));
    ce = tensors_of(part(out, 1, exits)), p = tensors_of(part(out, 1 + exits, exits));
  }
  Tensor head() const { return matmul_weight(in[exits], in[0]->dtype); }
  const Tensor& targets() const { return reads[0]->tensor; }
  void forward(const Step& step, Stream stream) override {
    if (!step.training && !probed)
      return cross_entropy_forward(output(), {}, {}, input(exits - 1), head(), targets(), 1, stream,
                                   {.softcap = softcap});
    exit_weights(p, z, stream);
    for (size_t t = 0; t < exits; ++t) {
      if (step.training) check_only_reader(t);
      const Grad dhead = step.training ? gradient(exits, step) : Grad{};
      cross_entropy_forward(ce[t], step.training ? dinput(t) : Tensor{},
                            step.training ? Grad{dhead, dhead.accumulate || t > 0} : Grad{}, input(t), head(),
                            targets(), step.grad_scale, stream, {.row_weights = p[t], .softcap = softcap});
    }
    if (step.training) return exit_loss(output(), dz, ce, z, targets(), beta, step.grad_scale, stream);
    accumulate({output(), false}, ce.back(), stream);
  }
  bool can_overwrite(size_t i) const override { return i == exits; }
  bool reads_bf16_copy(size_t i) const override { return i == exits && in[0]->dtype == Dtype::bf16; }
  bool grad_in_forward() const override { return true; }
  void backward(const Step&, Stream) override {}  // done in the forward, while the logits were in cache
  double flops() const override {
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(in[exits]->shape[0]);
  }
  double training_flops() const override { return 3 * static_cast<double>(exits) * flops(); }
  ScratchBytes scratch() const override {
    const LogitChunk chunk = logit_chunk(reads[0]->shape.numel(), in[exits]->shape[0], in[0]->dtype);
    ScratchBytes bytes{};
    bytes[cross_entropy_slot] = static_cast<size_t>(chunk.rows * chunk.stride) * size_of(in[0]->dtype);
    return bytes;
  }
};

}  // namespace

ExitLosses exit_loss(Tape& t, const std::string& name, const Exits& exits, Value* targets) {
  const Shape& rows = targets->shape;
  const size_t R = exits.states.size();
  CHECK_THAT(R >= 2 && R <= static_cast<size_t>(max_exits) && exits.gates.size() + 1 == R, name, ": ", R, " exits");
  for (const Value* state : exits.states)
    CHECK_THAT(state->shape == (Shape{rows[0], rows[1], exits.weight->shape[1]}), name, ": state ", state->shape.str(),
               " head ", exits.weight->shape.str(), " targets ", rows.str());
  ExitLosses all{t.result(name, rows), {}, {}};
  for (size_t i = 0; i < R; ++i) all.ce.push_back(t.result(str(name, ".ce.", i), rows));
  for (size_t i = 0; i < R; ++i) all.weights.push_back(t.result(str(name, ".weight.", i), rows));
  auto node = make_node<ExitLoss>(name, joined(joined(exits.states, {exits.weight}), exits.gates),
                                  joined(joined({all.losses}, all.ce), all.weights));
  node->reads = {targets};
  node->beta = exits.beta, node->softcap = exits.softcap, node->exits = R, node->probed = t.probed();
  t.record(std::move(node));
  return all;
}

}  // namespace ops
}  // namespace crossply
