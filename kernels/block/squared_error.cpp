#include "kernels/block/squared_error.h"

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t squared_error_grain = 16384;

template <class S>
void squared_error_forward_cpu(float* losses, const S* inp, const S* target, int64_t rows, int64_t C) {
  parallel_for(rows, squared_error_grain / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      Vec16 sum{};
      for_vectors(n * C, (n + 1) * C, [&](int64_t i, auto part) {  // beyond the end both are 0
        Vec16 x, y;
        load(x, inp + i, part);
        load(y, target + i, part);
        sum += (x - y) * (x - y);
      });
      losses[n] = sum_of_lanes(sum);
    }
  });
}

template <bool accumulate, class S>
void squared_error_backward_cpu(S* dinp, const S* inp, const S* target, float twice, int64_t n) {
  for_elements(n, squared_error_grain, [=](int64_t i, auto part) {
    Vec16 x, y;
    load(x, inp + i, part);
    load(y, target + i, part);
    store_or_accumulate<accumulate>(dinp + i, twice * (x - y), part);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void squared_error_forward(const Tensor& losses, const Tensor& inp, const Tensor& target, Stream stream) {
  const int64_t rows = losses.numel(), C = rows > 0 ? inp.numel() / rows : 0;
  CHECK_SHAPES(rows > 0 && C > 0 && inp.numel() == rows * C && target.numel() == rows * C, losses, inp, target);
  dispatch(
      stream, inp.dtype, [&] { squared_error_forward_cuda(losses, inp, target); },
      [&]<class S>(S) { squared_error_forward_cpu(losses.as<float>(), inp.as<S>(), target.as<S>(), rows, C); },
      [&]<class T>(T) { squared_error_forward_ref(losses.as<T>(), inp.as<T>(), target.as<T>(), rows, C); });
}

void squared_error_backward(const Grad& dinp, const Tensor& inp, const Tensor& target, double scale, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_SHAPES(inp.numel() == n && target.numel() == n, dinp, inp, target);
  dispatch(
      stream, dinp.dtype, [&] { squared_error_backward_cuda(dinp, inp, target, scale); },
      [&]<class S>(S) {
        with_flag(dinp.accumulate, [&](auto accumulate) {
          squared_error_backward_cpu<accumulate>(dinp.as<S>(), inp.as<S>(), target.as<S>(),
                                                 static_cast<float>(2 * scale), n);
        });
      },
      [&]<class T>(T) {
        squared_error_backward_ref(dinp.as<T>(), inp.as<T>(), target.as<T>(), scale, n, dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct SquaredError : Node {
  const char* op() const override { return "squared_error"; }
  void forward(const Step&, Stream stream) override {
    squared_error_forward(output(), input(0), reads[0]->tensor, stream);
  }
  void backward(const Step& step, Stream stream) override {
    squared_error_backward(gradient(0), input(0), reads[0]->tensor, step.grad_scale, stream);
  }
  bool grad_optional() const override { return true; }  // a loss: its gradient is Step::grad_scale
};

}  // namespace

Value* squared_error(Tape& t, const std::string& name, Value* inp, Value* target, Shape rows) {
  CHECK_THAT(inp->shape.numel() == target->shape.numel() && inp->shape.numel() % rows.numel() == 0, name, ": inp ",
             inp->shape.str(), " target ", target->shape.str(), " losses ", rows.str());
  auto node = make_node<SquaredError>(name, {inp}, {t.result(name, rows)});
  node->reads = {target};
  node->backward_reads = {inp, target};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
