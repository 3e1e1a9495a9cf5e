// The nodes whose work a linear layer beside them can do as well (fuse_linears() in kernels/block/linear.cpp).
#pragma once

#include "engine/tape.h"
#include "kernels/block/gelu.h"

namespace crossply::ops {

struct Add : Node {
  const char* op() const override { return "add"; }
  void forward(const Step& step, Stream stream) override;
  void backward(const Step& step, Stream stream) override;
  bool may_repeat_inputs() const override { return true; }
  bool grad_aliases_output(size_t) const override { return in[0] != in[1]; }
};

struct Gelu : Node {
  GeluKind kind = GeluKind::erf;
  const char* op() const override { return "gelu"; }
  void forward(const Step& step, Stream stream) override;
  void backward(const Step& step, Stream stream) override;
};

}  // namespace crossply::ops
