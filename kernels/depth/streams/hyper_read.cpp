// The read of the hyper-connections, with the norm, the projections and the tanhs, and its node.
#include "engine/node.h"
#include "kernels/depth/ops.h"
#include "kernels/depth/streams/hyper.h"
#include "kernels/depth/streams/hyper_read_plan.h"

namespace crossply {

using namespace hyper;

namespace {

// totals[i] += sum_c x_i[c]
template <class Vec, int E, class S>
void total_columns(float* totals, const S* x, int64_t c, int64_t C) {
  Vec sum[E] = {}, s;
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    for (int i = 0; i < E; ++i) {
      load(s, x + i * C + c);
      sum[i] += s;
    }
  }
  add_sums_of_lanes(totals, sum);
  if (c < C) total_columns<float, E>(totals, x, c, C);
}

// For R streams, with d = x - mean: products[r*(E+3)+j] += d . projection_j, and after these the square d . d
template <class Vec, int E, int R, class S>
void project_columns(float* products, const S* x, const float* mean, const float* projection, int64_t c, int64_t C) {
  Vec sum[R * (E + 3)] = {};
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec d[R], p;
    unrolled<R>([&](auto r) {
      prefetch(x + (E + r) * C + c);
      load(d[r], x + r * C + c);
      d[r] -= mean[r];
      sum[r * (E + 3) + E + 2] += d[r] * d[r];
    });
    unrolled<E + 2>([&](auto j) {
      load(p, projection + j * C + c);
      unrolled<R>([&](auto r) { sum[r * (E + 3) + j] += d[r] * p; });
    });
  }
  add_sums_of_lanes(products, sum);
  if (c < C) project_columns<float, E, R>(products, x, mean, projection, c, C);
}

// Streams [i, E), R at a time.
template <int E, int R, class S>
void project(float* products, const S* x, const float* mean, const float* projection, int64_t C, int i) {
  for (; i + R <= E; i += R)
    project_columns<Vec16, E, R>(products + i * (E + 3), x + i * C, mean + i, projection, 0, C);
  if constexpr (R > 1)
    if (i < E) project<E, 1>(products, x, mean, projection, C, i);
}

// coef and stats of one token with streams x (E,C).
template <int E, class S>
void dynamic_coefficients(float* coef, float* stats, const S* x, const ReadPlan<E>& plan, int64_t C) {
  constexpr int J = E + 2;
  float mean[E] = {}, products[E * (J + 1)] = {}, z[E * J];
  if (plan.centred) {
    total_columns<Vec16, E>(mean, x, 0, C);
    for (int i = 0; i < E; ++i) mean[i] /= static_cast<float>(C);
  }
  project < E, E<2 ? 1 : 2>(products, x, mean, plan.projection, C, 0);
  for (int i = 0; i < E; ++i) {
    const float rstd = 1.f / std::sqrt(products[i * (J + 1) + J] / static_cast<float>(C) + plan.eps);
    stats[i * (E + 4)] = mean[i];
    stats[i * (E + 4) + 1] = rstd;
    for (int j = 0; j < J; ++j) z[i * J + j] = products[i * (J + 1) + j] * rstd + plan.offset[j];
  }
#pragma omp simd
  for (int e = 0; e < E * J; ++e) {
    z[e] = tanh_f32(z[e]);
    coef[e] = plan.constant[e] + plan.scale[e] * z[e];
  }
  for (int i = 0; i < E; ++i) std::copy_n(z + i * J, J, stats + i * (E + 4) + 2);
}

template <int E, class S>
void hyper_read_forward_cpu(S* out, float* coef, float* stats, const S* streams, const HyperWeights<float*>& w,
                            HyperNorm norm, int64_t rows, int64_t C, float eps) {
  ReadPlan<E> plan = plan_read<E>(w, norm, C);
  plan.eps = eps;
  parallel_for(rows, grain(E, C), [=, &plan](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const S* x = streams + n * E * C;
      float* a = coef + n * E * (E + 2);
      if (plan.projection != nullptr) {
        dynamic_coefficients<E>(a, stats + n * E * (E + 4), x, plan, C);
        read_columns<Vec16, E, false>(out + n * C, x, a, E + 2, 0, C);
      } else {
        std::copy_n(plan.constant, E * (E + 2), a);
        read_columns<Vec16, E, true>(out + n * C, x, a, E + 2, 0, C);
      }
    }
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points. The backward is in hyper_read_backward.cpp.

void hyper_read_forward(const Tensor& out, const Tensor& coef, const Tensor& stats, const Tensor& streams,
                        const HyperWeights<Tensor>& w, HyperNorm norm, double eps, Stream stream) {
  const bool dynamic = w.alpha_proj.data != nullptr;
  const StreamsSize z = check_streams(streams, out);
  const auto [rows, E, C] = z;
  check_coef(coef, streams);
  if (dynamic) check_stats(stats, streams);
  check_weights(w, z, norm, dynamic, false);
  dispatch(
      stream, out.dtype, [&] { hyper_read_forward_cuda(out, coef, stats, streams, w, norm, eps, rows, E, C); },
      [&]<class S>(S) {
        with_streams(E, [&](auto count) {
          hyper_read_forward_cpu<count>(out.as<S>(), coef.as<float>(), data_or_null<float>(stats), streams.as<S>(),
                                        mapped(w, data_or_null<float>), norm, rows, C, static_cast<float>(eps));
        });
      },
      [&]<class T>(T) {
        hyper_read_forward_ref(out.as<T>(), coef.as<T>(), data_or_null<T>(stats), streams.as<T>(),
                               mapped(w, data_or_null<T>), norm, rows, E, C, eps);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct HyperReadNode : Node {  // in[0]: the streams; out: what the sublayer reads, the coefficients
  HyperParameters parameters{};
  HyperWeights<Tensor> weights, gradients;
  HyperNorm norm = HyperNorm::layernorm_no_affine;
  double eps = 0;
  const char* op() const override { return "hyper_read"; }
  Tensor stats() const { return saved.empty() ? Tensor{} : saved[0]->tensor; }
  void prepare() override { weights = mapped(parameters, tensor_of), gradients = mapped(parameters, grad_of); }
  void forward(const Step&, Stream stream) override {
    hyper_read_forward(output(), out[1]->tensor, stats(), input(0), weights, norm, eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    hyper_read_backward(gradient(0), gradients, doutput(), out[1]->grad->tensor, input(0), out[1]->tensor, stats(),
                        weights, norm, stream);
  }
  double flops() const override {
    const double E = static_cast<double>(in[0]->shape[2]), projected = saved.empty() ? 0 : E + 2;
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * (1 + projected);
  }
  ScratchBytes scratch() const override {  // the sums, the projections with the norm's gain folded in, the sums' sum
    const Shape& s = in[0]->shape;
    const bool dynamic = parameters.alpha_proj != nullptr;
    const auto [blocks, row] = read_sums(s[0] * s[1], s[2], s[3], dynamic);
    const auto bytes = [](int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); };
    return {bytes(blocks * row), dynamic ? bytes((s[2] + 2) * (s[3] + 1)) : 0, bytes(row)};
  }
};

}  // namespace

HyperRead hyper_read(Tape& t, const std::string& name, Value* streams, const HyperParameters& p,
                     const std::string& norm, double eps) {
  const Shape& s = streams->shape;
  const int64_t E = s[2];
  Value* x = t.activation(name, Shape{s[0], s[1], s[3]});
  Value* coef = t.statistic(name + ".coef", Shape{s[0], s[1], E, E + 2});
  const auto parameters = p.list();
  std::vector<Value*> in{streams};
  in.insert(in.end(), parameters.begin(), parameters.end());
  auto node = make_node<HyperReadNode>(name, present(in), {x, coef});
  node->parameters = p;
  node->norm = norm == "rmsnorm"     ? HyperNorm::rmsnorm
               : norm == "layernorm" ? HyperNorm::layernorm
                                     : HyperNorm::layernorm_no_affine;
  node->eps = eps;
  if (p.alpha_proj != nullptr) node->saved = {t.statistic(name + ".stats", Shape{s[0], s[1], E, E + 4})};
  node->backward_reads = {streams, coef};
  t.record(std::move(node));
  return {x, coef};
}

}  // namespace ops
}  // namespace crossply
