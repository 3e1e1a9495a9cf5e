#include "kernels/block/softcap.h"

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/block/softcap_cpu.h"
#include "kernels/dispatch.h"

namespace crossply {

void softcap_forward(const Tensor& out, const Tensor& inp, double cap, Stream stream) {
  CHECK_SHAPES(out.numel() == inp.numel() && out.dtype == inp.dtype, out, inp);
  CHECK_THAT(cap > 0, "a cap of ", cap);
  const int64_t n = out.numel();
  dispatch(
      stream, out.dtype, [&] { softcap_forward_cuda(out, inp, cap); },
      [&]<class S>(S) {
        S* y = out.as<S>();
        const S* x = inp.as<S>();
        parallel_for(n, 4096, [=](int64_t begin, int64_t end) { cap_row(y + begin, x + begin, end - begin, cap); });
      },
      [&]<class T>(T) {
        for (int64_t i = 0; i < n; ++i) out.as<T>()[i] = softcap_ref(inp.as<T>()[i], cap);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Softcap : Node {
  double cap = 0;
  const char* op() const override { return "softcap"; }
  std::string setting() const override { return str(cap); }
  void forward(const Step&, Stream stream) override { softcap_forward(output(), input(0), cap, stream); }
  void backward(const Step&, Stream) override { CHECK_THAT(false, "capped logits have no backward: ", name); }
  bool in_place() const override { return true; }
};

}  // namespace

Value* softcap(Tape& t, const std::string& name, Value* inp, double cap) {
  auto node = make_node<Softcap>(name, {inp}, {t.activation(name, inp->shape)});
  node->cap = cap;
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
