// Ops that have only their plain loops (kernels/reference/ops.h): every one that a registered architecture uses is
// checked by complex step. Three architectures of this file's own, drafts that exist in the tests only, take these ops,
// the attend hook and numbers for each head through all tests of whole models.
#include "kernels/reference/ops.h"

#include <numeric>

#include "kernels/devices.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// The listing of docs/add-a-connection.md.
// --- listing ---
// The values of all S layers so far, weighted for each token and head by a softmax over the layers:
//   p_s = softmax_s <w[k], v_s[k]>      out[k] = sum_s p_s v_s[k]      in: w (K, D), then v_s (K, D) for every s
struct DepthSoftmax {
  static constexpr const char* name = "depth_softmax";
  int64_t S, K, D;

  template <class T>
  std::vector<T> weights(const T* const* in, int64_t k) const {
    std::vector<T> p(static_cast<size_t>(S));
    T sum = 0;
    for (int64_t s = 0; s < S; ++s) {
      using std::exp;
      p[s] = exp(std::inner_product(in[0] + k * D, in[0] + (k + 1) * D, in[1 + s] + k * D, T(0)));
      sum += p[s];
    }
    for (T& x : p) x /= sum;
    return p;
  }

  template <class T>
  void forward(T* out, const T* const* in) const {
    std::fill_n(out, K * D, T(0));
    for (int64_t k = 0; k < K; ++k) {
      const std::vector<T> p = weights(in, k);
      for (int64_t s = 0; s < S; ++s)
        for (int64_t i = k * D; i < (k + 1) * D; ++i) out[i] += p[s] * in[1 + s][i];
    }
  }

  // With dp_s = <dout[k], v_s[k]> the gradient of the s-th score is p_s (dp_s - sum_r p_r dp_r).
  template <class T>
  void backward(T* const* din, const T* dout, const T* const* in) const {
    for (int64_t k = 0; k < K; ++k) {
      const std::vector<T> p = weights(in, k);
      std::vector<T> dp(p.size());
      for (int64_t s = 0; s < S; ++s)
        dp[s] = std::inner_product(dout + k * D, dout + (k + 1) * D, in[1 + s] + k * D, T(0));
      const T mean = std::inner_product(p.begin(), p.end(), dp.begin(), T(0));
      for (int64_t s = 0; s < S; ++s)
        for (int64_t i = k * D; i < (k + 1) * D; ++i) {
          din[0][i] += p[s] * (dp[s] - mean) * in[1 + s][i];
          din[1 + s][i] += p[s] * dout[i] + p[s] * (dp[s] - mean) * in[0][i];
        }
    }
  }
};
// --- end of the listing ---

class DepthSoftmaxValues : public Connection {
 public:
  void declare(ParameterTable& params, const Config& c) const override {
    for (int n = 1; n < c.num_hidden_layers; ++n)
      params.add(query(n), Shape{c.num_key_value_heads, c.head_dim}, Init::normal(0.5), Role::width_router,
                 {.wd_mul = 0});
  }
  KeyValue kv(int layer, KeyValue own) override {
    values_.push_back(own.v);
    if (layer == 0) return own;
    std::vector<Value*> in = {build_->parameter(query(layer))};
    in.insert(in.end(), values_.begin(), values_.end());
    const Shape shape = own.v->shape;
    own.v = ops::from_reference(build_->tape, str("L", layer, ".values"), in, shape,
                                DepthSoftmax{layer + 1, shape[2], shape[3]});
    return own;
  }

 private:
  static std::string query(int n) { return layer_name(n, "self_attn.depth_query.weight"); }
  std::vector<Value*> values_;
};

// Along time: y_t = f y_{t-1} + (1 - f) x_t with f = sigmoid(in[1]), one number for each channel.
struct Smooth {
  static constexpr const char* name = "smooth";
  static constexpr bool per_sequence = true;
  int64_t T_, C;
  double flops() const { return 4 * static_cast<double>(T_ * C); }

  template <class T>
  T keep(const T* const* in, int64_t c) const {
    using std::exp;
    return T(1) / (T(1) + exp(-in[1][c]));
  }
  template <class T>
  void forward(T* out, const T* const* in) const {
    for (int64_t i = 0; i < T_ * C; ++i) {
      const T f = keep(in, i % C);
      out[i] = f * (i < C ? T(0) : out[i - C]) + (T(1) - f) * in[0][i];
    }
  }
  template <class T>
  void backward(T* const* din, const T* dout, const T* const* in) const {
    std::vector<T> out(static_cast<size_t>(T_ * C)), dy(dout, dout + T_ * C);
    forward(out.data(), in);
    for (int64_t i = T_ * C; i-- > 0;) {
      const T f = keep(in, i % C), before = i < C ? T(0) : out[i - C];
      if (i >= C) dy[i - C] += f * dy[i];
      din[0][i] += (T(1) - f) * dy[i];
      din[1][i % C] += f * (T(1) - f) * (before - in[0][i]) * dy[i];
    }
  }
};

class SmoothRead : public Connection {
 public:
  void declare(ParameterTable& params, const Config& c) const override {
    params.add("model.smooth.weight", Shape{c.hidden_size}, Init::constant(-2), Role::scalar, {.wd_mul = 0});
  }
  Value* read(const Sublayer& site) override {
    Value* x = Connection::read(site);
    if (site.mlp) return x;
    return ops::from_reference(build_->tape, site.name() + ".smooth", {x, build_->parameter("model.smooth.weight")},
                               x->shape, Smooth{x->shape[1], x->shape[2]});
  }
};

// Two attentions in a layer, to its own keys and values and to those of the layer below: a - f b / 2, with a trained f
// for each head.
class TwoAttentions : public Connection {
 public:
  void declare(ParameterTable& params, const Config& c) const override {
    for (int n = 1; n < c.num_hidden_layers; ++n)
      params.add(factor(n), Shape{c.num_attention_heads}, Init::constant(0.3), Role::scalar, {.wd_mul = 0});
  }
  Value* attend(int layer, QueryKeyValue own) override {
    Value* a = Connection::attend(layer, own);
    const QueryKeyValue below = std::exchange(below_, own);
    if (layer == 0) return a;
    Tape& t = build_->tape;
    const std::string name = str("L", layer, ".below");
    Value* minus_half = t.constant(name + ".half", factor_shape(), std::vector<double>(4, -0.5));
    Value* b = ops::attention(t, name, own.q, below.k, below.v, attended(*build_, layer));
    b = ops::head_scale(t, name + ".halved", b, minus_half);
    return ops::add(t, name + ".sum", a, ops::head_scale(t, name + ".scaled", b, build_->parameter(factor(layer))));
  }

 private:
  static std::string factor(int n) { return layer_name(n, "self_attn.below.weight"); }
  Shape factor_shape() const { return Shape{build_->config.num_attention_heads}; }
  QueryKeyValue below_{};
};

template <class C>
Architecture draft(const std::string& name) {
  return {name, "of the tests", {}, [](const Config&) { return std::make_unique<C>(); }, /*draft=*/true};
}
const bool registered = [] {
  architectures().push_back(draft<DepthSoftmaxValues>("draft_depth_softmax"));
  architectures().push_back(draft<SmoothRead>("draft_smooth"));
  architectures().push_back(draft<TwoAttentions>("draft_two_attentions"));
  return true;
}();

using Numbers = std::vector<std::vector<double>>;
template <class T>
std::vector<T*> pointers_to(std::vector<std::vector<T>>& lists) {
  std::vector<T*> all;
  for (auto& list : lists) all.push_back(list.data());
  return all;
}

// For each input the largest difference between what the backward says and the derivative of the forward along a random
// cotangent, relative to the root mean square of that derivative. NaN where there is one.
std::vector<double> worst_errors(const ReferenceLoops& loops, Numbers in, size_t out_size) {
  const auto dout = random_vector<double>(static_cast<int64_t>(out_size), 7);
  Numbers din;
  std::vector<std::vector<Complex>> z;
  for (const auto& x : in) din.emplace_back(x.size(), 0.0), z.emplace_back(x.begin(), x.end());
  loops.backward(pointers_to(din).data(), dout.data(), pointers_to(in).data());
  std::vector<double> errors;
  for (size_t i = 0; i < in.size(); ++i) {
    const auto want = complex_step(in[i], [&](const std::vector<Complex>& x) {
      const auto before = std::exchange(z[i], x);
      std::vector<Complex> out(out_size, Complex(NAN, NAN));
      loops.forward(out.data(), pointers_to(z).data());
      z[i] = before;
      return dot(dout, out);
    });
    const double rms = size_of(want) / std::sqrt(static_cast<double>(want.size()));
    double worst = 0;
    for (size_t j = 0; j < want.size() && !std::isnan(worst); ++j) {
      const double error = std::abs(din[i][j] - want[j]) / std::max(rms, 1e-12);
      worst = error <= worst ? worst : error;
    }
    errors.push_back(worst);
  }
  return errors;
}

// The node's inputs at its last part, where a step has left them.
Numbers inputs_of(const ReferenceNode& node) {
  Numbers in;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const auto [size, whole] = node.inputs[i];
    const double* x = node.in[i]->tensor.as<double>() + (whole ? 0 : (node.parts - 1) * size);
    in.emplace_back(x, x + size);
  }
  return in;
}

// A wrong factor, and one input forgotten.
struct Wrong {
  static constexpr const char* name = "wrong";
  double factor = 1;
  bool forgets = false;
  template <class T>
  void forward(T* out, const T* const* in) const {
    out[0] = in[0][0] * in[1][0];
  }
  template <class T>
  void backward(T* const* din, const T* dout, const T* const* in) const {
    din[0][0] += T(factor) * dout[0] * in[1][0];
    if (!forgets) din[1][0] += dout[0] * in[0][0];
  }
};

struct Throws {
  static constexpr const char* name = "throws";
  template <class T>
  void forward(T*, const T* const*) const {
    fail(Exit::usage, "this cannot be");
  }
  template <class T>
  void backward(T* const*, const T*, const T* const*) const {}
};

}  // namespace

TEST_CASE("reference: every op of an architecture that has plain loops only is differentiated rightly") {
  std::map<std::string, int> seen;
  for (const Case& c : cases()) {
    if (!has_loops(c.config)) continue;
    CAPTURE(c.name);
    TinyModel model(c.config, "reference", PlanMode::distinct, Dtype::f64);
    model.step();
    for (const auto& node : model.tape.nodes()) {
      const auto* op = dynamic_cast<const ReferenceNode*>(node.get());
      if (op == nullptr) continue;
      const size_t out_size = static_cast<size_t>(op->out[0]->shape.numel() / op->parts);
      const auto errors = worst_errors(*op->loops, inputs_of(*op), out_size);
      for (size_t i = 0; i < errors.size(); ++i)
        CHECK_MESSAGE(errors[i] < 1e-9, "the backward of " << std::string(op->op()) << ", recorded as " << op->name
                                                           << ": the gradient of input " << i << ", " << op->in[i]->name
                                                           << ", is off by " << errors[i]);
      ++seen[op->op()];
    }
  }
  CHECK(seen["depth_softmax"] > 0);
  CHECK(seen["smooth"] > 0);
}

TEST_CASE("reference: a wrong backward is found") {
  const Numbers in = {{0.7}, {-1.3}};
  for (const double error : worst_errors(LoopsOf<Wrong>({}), in, 1)) CHECK(error < 1e-12);
  CHECK(worst_errors(LoopsOf<Wrong>({1.001, false}), in, 1)[0] > 5e-4);
  CHECK(worst_errors(LoopsOf<Wrong>({1, true}), in, 1)[1] > 0.5);
  CHECK(std::isnan(worst_errors(LoopsOf<Wrong>({NAN, false}), in, 1)[0]));
}

TEST_CASE("reference: the threads do not matter") {
  for (const std::string arch : {"draft_depth_softmax", "draft_smooth"})
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      check_same_bits_on_any_threads<float>([&] {
        Config config = tiny_config(arch);
        config.head_dim = 600;  // enough work for threads
        TinyModel model(config, "cpu", PlanMode::reuse, dtype);
        model.step();
        return model.values<float>(model.params.gradients());
      });
}

TEST_CASE("reference: what loops cannot do is refused with a reason") {
  const auto message_of = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return str(static_cast<int>(error.code), " ", error.what());
    }
    return std::string();
  };
  ParameterTable params;
  const Config config = tiny_config("draft_smooth");
  declare_model(params, config);
  Tape tape(Dtype::f32, /*cache_length=*/5);
  std::string message = message_of([&] { record_model(tape, params, config, 1, 1); });
  CHECK_MESSAGE(message.find("64 L0.attn.smooth: smooth computes whole sequences") == 0, message);
  if (!available(Backend::cuda)) return;
  TinyModel model(config, gpu);
  message = message_of([&] { model.step(); });
  CHECK_MESSAGE(message.find("71 L0.attn.smooth: smooth has only its plain loops") == 0, message);
}

TEST_CASE("reference: what does not depend on the tokens is seen whole, whatever its shape") {
  ParameterTable params;
  Tape tape(Dtype::f64);
  const Shape shape{2, 5};  // of B and T, and of the parameter
  Value* tokens = tape.input("tokens", shape, Dtype::i32);
  Value* x = ops::embedding(tape, "x", tokens,
                            tape.parameter(params.add("table", Shape{7, 5}, Init::constant(1), Role::embedding)));
  Value* p = ops::softmax(tape, "p", tape.parameter(params.add("scores", shape, Init::constant(1), Role::norm)));
  ops::from_reference(tape, "y", {x, p}, Shape{2, 5, 1}, Wrong{});
  const auto& node = dynamic_cast<const ReferenceNode&>(*tape.nodes().back());
  CHECK((node.inputs[0].size == 5 && !node.inputs[0].whole));
  CHECK((node.inputs[1].size == 10 && node.inputs[1].whole));
}

TEST_CASE("reference: what the loops throw reaches the caller") {
  const auto device = make_device("cpu");  // outlives what it holds
  ParameterTable params;
  Tape tape(Dtype::f32);
  Value* tokens = tape.input("tokens", Shape{64, 512}, Dtype::i32);
  Value* x = ops::embedding(tape, "x", tokens,
                            tape.parameter(params.add("table", Shape{7, 5}, Init::constant(1), Role::embedding)));
  ops::from_reference(tape, "y", {x}, x->shape, Throws{});
  params.allocate(*device, Dtype::f32, false);
  tape.plan(PlanMode::reuse);
  tape.allocate(*device);
  CHECK_THROWS_AS(tape.forward(Step{}), Error);
}
