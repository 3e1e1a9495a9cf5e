#include "kernels/block/add.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/block/fused.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

template <class S>
void add_forward_cpu(S* out, const S* a, const S* b, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x, y;
    load(x, a + i, part);
    load(y, b + i, part);
    store(out + i, x + y, part);
  });
}

template <class S>
void accumulate_cpu(S* dinp, const S* dout, int64_t n, bool accumulate) {
  if (accumulate) return add_forward_cpu(dinp, dinp, dout, n);
  parallel_for(n, grain, [=](int64_t begin, int64_t end) { std::copy(dout + begin, dout + end, dinp + begin); });
}

template <class S>
void add_scaled_forward_cpu(S* out, const S* a, const S* b, float factor, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 x, y;
    load(x, a + i, part);
    load(y, b + i, part);
    store(out + i, x + factor * y, part);
  });
}

template <bool accumulate, class S>
void accumulate_scaled_cpu(S* dinp, const S* dout, float factor, int64_t n) {
  for_elements(n, grain, [=](int64_t i, auto part) {
    Vec16 dy;
    load(dy, dout + i, part);
    store_or_accumulate<accumulate>(dinp + i, factor * dy, part);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void add_forward(const Tensor& out, const Tensor& a, const Tensor& b, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(a.numel() == n && b.numel() == n, out, a, b);
  dispatch(
      stream, out.dtype, [&] { add_forward_cuda(out, a, b); },
      [&]<class S>(S) { add_forward_cpu(out.as<S>(), a.as<S>(), b.as<S>(), n); },
      [&]<class T>(T) { add_forward_ref(out.as<T>(), a.as<T>(), b.as<T>(), n); });
}

void accumulate(const Grad& dinp, const Tensor& dout, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_SHAPES(dout.numel() == n, dinp, dout);
  dispatch(
      stream, dinp.dtype, [&] { accumulate_cuda(dinp, dout); },
      [&]<class S>(S) { accumulate_cpu(dinp.as<S>(), dout.as<S>(), n, dinp.accumulate); },
      [&]<class T>(T) { accumulate_ref(dinp.as<T>(), dout.as<T>(), n, dinp.accumulate); });
}

void add_scaled_forward(const Tensor& out, const Tensor& a, const Tensor& b, double factor, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(a.numel() == n && b.numel() == n, out, a, b);
  dispatch(
      stream, out.dtype, [&] { add_scaled_forward_cuda(out, a, b, factor); },
      [&]<class S>(S) { add_scaled_forward_cpu(out.as<S>(), a.as<S>(), b.as<S>(), static_cast<float>(factor), n); },
      [&]<class T>(T) { add_scaled_forward_ref(out.as<T>(), a.as<T>(), b.as<T>(), factor, n); });
}

void accumulate_scaled(const Grad& dinp, const Tensor& dout, double factor, Stream stream) {
  const int64_t n = dinp.numel();
  CHECK_SHAPES(dout.numel() == n, dinp, dout);
  dispatch(
      stream, dinp.dtype, [&] { accumulate_scaled_cuda(dinp, dout, factor); },
      [&]<class S>(S) {
        with_flag(dinp.accumulate, [&](auto accumulate) {
          accumulate_scaled_cpu<accumulate>(dinp.as<S>(), dout.as<S>(), static_cast<float>(factor), n);
        });
      },
      [&]<class T>(T) { accumulate_scaled_ref(dinp.as<T>(), dout.as<T>(), factor, n, dinp.accumulate); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Copy : Node {
  const char* op() const override { return "copy"; }
  void forward(const Step&, Stream stream) override { accumulate({output(), false}, input(0), stream); }
  void backward(const Step&, Stream stream) override {
    if (dinput(0).data != doutput().data) accumulate(gradient(0), doutput(), stream);
  }
  bool grad_aliases_output(size_t) const override { return true; }
};

struct Scaled : Node {
  double factor = 1;
  const char* op() const override { return "scaled"; }
  void forward(const Step&, Stream stream) override { accumulate_scaled({output(), false}, input(0), factor, stream); }
  void backward(const Step&, Stream stream) override { accumulate_scaled(gradient(0), doutput(), factor, stream); }
};

struct AddScaled : Node {
  double factor = 1;  // of in[1]
  const char* op() const override { return "add_scaled"; }
  void forward(const Step&, Stream stream) override {
    add_scaled_forward(output(), input(0), input(1), factor, stream);
  }
  void backward(const Step&, Stream stream) override {
    if (in[0]->grad != nullptr) accumulate(gradient(0), doutput(), stream);
    if (in[1]->grad != nullptr) accumulate_scaled(gradient(1), doutput(), factor, stream);
  }
};

}  // namespace

void Add::forward(const Step&, Stream stream) { add_forward(output(), input(0), input(1), stream); }
void Add::backward(const Step&, Stream stream) {
  for (size_t i = 0; i < 2; ++i)  // an input of the tape has no gradient
    if (in[i]->grad != nullptr && dinput(i).data != doutput().data) accumulate(gradient(i), doutput(), stream);
}

Value* add(Tape& t, const std::string& name, Value* a, Value* b) {
  CHECK_THAT(a->shape.numel() == b->shape.numel(), name, ": ", a->shape.str(), " and ", b->shape.str());
  return t.record(make_node<Add>(name, {a, b}, {t.activation(name, a->shape)}));
}

Value* scaled(Tape& t, const std::string& name, Value* inp, double factor) {
  auto node = make_node<Scaled>(name, {inp}, {t.activation(name, inp->shape)});
  node->factor = factor;
  return t.record(std::move(node));
}

Value* add_scaled(Tape& t, const std::string& name, Value* a, Value* b, double factor) {
  CHECK_THAT(a->shape == b->shape, name, ": ", a->shape.str(), " and ", b->shape.str());
  auto node = make_node<AddScaled>(name, {a, b}, {t.activation(name, a->shape)});
  node->factor = factor;
  return t.record(std::move(node));
}

Value* copy(Tape& t, const std::string& name, Value* inp) {
  CHECK_THAT(inp->dtype == t.dtype(), name, ": ", inp->name, " is not stored as activations are");
  return t.record(make_node<Copy>(name, {inp}, {t.activation(name, inp->shape)}));
}

}  // namespace ops
}  // namespace crossply
