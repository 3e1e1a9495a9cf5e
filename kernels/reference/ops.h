// New mathematics in a connection's own file, before it has kernels: an op of which only the plain loops exist.
//
//   struct Squares {  // out[i] = x[i]^2 for a token's C numbers
//     static constexpr const char* name = "squares";
//     int64_t C;
//     template <class T>
//     void forward(T* out, const T* const* in) const {
//       for (int64_t i = 0; i < C; ++i) out[i] = in[0][i] * in[0][i];
//     }
//     template <class T>
//     void backward(T* const* din, const T* dout, const T* const* in) const {
//       for (int64_t i = 0; i < C; ++i) din[0][i] += T(2) * in[0][i] * dout[i];
//     }
//   };
//   Value* y = ops::from_reference(tape, "L3.squares", {x}, x->shape, Squares{C});
//
// The loops see one token: of an input (B, T, ...) that token's numbers, of a parameter, a constant or what is computed
// from these alone all of them. Where an op says `static constexpr bool per_sequence = true` they see a whole sequence
// (T, ...) instead, for mathematics along time; such an op cannot generate token by token. forward sets all of out;
// backward adds to every din, which begins at zero. Both know nothing of storage, threads and who else adds.
//
// T is float (activations in bf16 are converted), double on the reference device, std::complex<double> in the check: so
// write T(2), `using std::exp; exp(x)`, and compare real parts, std::real(x) < 0. tests/kernels/test_reference.cpp
// compares the backward of every such op in a registered architecture with the complex-step derivative of its forward.
//
// Several threads call the loops, each with scratch memory for its inputs and their gradients; those of parameters are
// summed in up to 32 blocks, which costs 32 times their size. What the loops throw ends the run with its message.
//
// `double flops() const`, if there, is for the profile: those of one forward call, two per multiply-add. A GPU refuses
// the op (Exit::device) until it has a family of its own, kernels/.
#pragma once

#include <complex>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/node.h"

namespace crossply {

// The loops of one op, behind one face.
class ReferenceLoops {
 public:
  virtual ~ReferenceLoops() = default;
  virtual const char* name() const = 0;
  virtual bool per_sequence() const = 0;
  virtual double flops() const = 0;
  virtual void forward(float* out, const float* const* in) const = 0;
  virtual void forward(double* out, const double* const* in) const = 0;
  virtual void forward(std::complex<double>* out, const std::complex<double>* const* in) const = 0;
  virtual void backward(float* const* din, const float* dout, const float* const* in) const = 0;
  virtual void backward(double* const* din, const double* dout, const double* const* in) const = 0;
};

template <class Op>
class LoopsOf final : public ReferenceLoops {
 public:
  explicit LoopsOf(Op op) : op_(std::move(op)) {}
  const char* name() const override { return Op::name; }
  bool per_sequence() const override {
    if constexpr (requires { Op::per_sequence; }) return Op::per_sequence;
    return false;
  }
  double flops() const override {
    if constexpr (requires { op_.flops(); }) return op_.flops();
    return 0;
  }
  void forward(float* out, const float* const* in) const override { op_.forward(out, in); }
  void forward(double* out, const double* const* in) const override { op_.forward(out, in); }
  void forward(std::complex<double>* out, const std::complex<double>* const* in) const override {
    op_.forward(out, in);
  }
  void backward(float* const* din, const float* dout, const float* const* in) const override {
    op_.backward(din, dout, in);
  }
  void backward(double* const* din, const double* dout, const double* const* in) const override {
    op_.backward(din, dout, in);
  }

 private:
  Op op_;
};

// The values cut into parts, one token or one sequence each.
struct ReferenceNode : Node {
  struct Input {
    int64_t size;  // of a part
    bool whole;    // the same numbers for all parts
  };
  std::unique_ptr<ReferenceLoops> loops;
  std::vector<Input> inputs;
  int64_t parts = 0;

  const char* op() const override { return loops->name(); }
  void forward(const Step&, Stream stream) override;
  void backward(const Step&, Stream stream) override;
  double flops() const override { return static_cast<double>(parts) * loops->flops(); }
};

namespace ops {

Value* record_loops(Tape& t, const std::string& name, const std::vector<Value*>& in, Shape shape,
                    std::unique_ptr<ReferenceLoops> loops);

// in -> `shape` (B, T, ...), by the loops of `op`.
template <class Op>
Value* from_reference(Tape& t, const std::string& name, const std::vector<Value*>& in, Shape shape, Op op) {
  return record_loops(t, name, in, shape, std::make_unique<LoopsOf<Op>>(std::move(op)));
}

}  // namespace ops
}  // namespace crossply
