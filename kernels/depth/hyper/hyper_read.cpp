// The read of the hyper-connections and its backward: the part with the norm, the projections and the tanhs.
#include "engine/node.h"
#include "kernels/depth/hyper/hyper.h"
#include "kernels/depth/hyper/hyper_token.h"
#include "kernels/depth/ops.h"

namespace crossply {

using namespace hyper;

namespace {

// -----------------------------------------------------------------------------------------------------------------
// Read.

// What every token needs of the parameters; the coefficients lie as in coef.
template <int E>
struct ReadPlan {
  float constant[E * (E + 2)];  // the static part
  float scale[E * (E + 2)];     // of the tanh
  float offset[E + 2];          // norm_bias . projection
  // The projections (E+2,C) with the norm's gain folded in. For LayerNorm their own means are removed: that changes no
  // product with a normalised stream, and saves the backward the mean of dNh. Null for static connections.
  float* projection = nullptr;
  bool centred;
  float eps = 0;
};

template <int E>
ReadPlan<E> plan_read(const HyperWeights<float*>& w, HyperNorm norm, int64_t C) {
  ReadPlan<E> plan{};
  for (int i = 0; i < E; ++i) {
    std::copy_n(w.static_alpha + i * (E + 1), E + 1, plan.constant + i * (E + 2));
    plan.constant[i * (E + 2) + E + 1] = w.static_beta[i];
  }
  if (w.alpha_proj == nullptr) return plan;
  plan.projection = scratch_f32(static_cast<size_t>((E + 2) * C));
  plan.centred = norm != HyperNorm::rmsnorm;
  for (int i = 0; i < E; ++i)
    for (int j = 0; j < E + 2; ++j) plan.scale[i * (E + 2) + j] = j <= E ? *w.alpha_scale : *w.beta_scale;
  for (int j = 0; j < E + 2; ++j) {
    float* p = plan.projection + j * C;
    float mean = 0;
    for (int64_t c = 0; c < C; ++c) {
      const float weight = hyper_projection(w, c, j, E);
      if (w.norm_bias != nullptr) plan.offset[j] += w.norm_bias[c] * weight;
      p[c] = w.norm_weight != nullptr ? w.norm_weight[c] * weight : weight;
      mean += p[c] / static_cast<float>(C);
    }
    for (int64_t c = 0; c < C && plan.centred; ++c) p[c] -= mean;
  }
  return plan;
}

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

// -----------------------------------------------------------------------------------------------------------------
// The read's backward.

// Sums over tokens of one block: dA and db, those times the tanhs, the gradients q of the tanhs' arguments, and after
// them, in memory, sum_i q[i,j] xh_i (E+2,C). All other gradients of the dynamic branch follow from these.
template <int E>
struct ReadSums {
  float d[E * (E + 2)], d_tanh[E * (E + 2)], q[E * (E + 2)];
};

// dots[i] += x_i . dout. The first pass over a token: it fetches the next one's x, and the dx that the last will write.
template <class Vec, int E, class S>
void dot_columns(float* dots, const S* x, const S* dout, const S* dx, int64_t c, int64_t C) {
  Vec sum[E] = {}, s, dy;
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    load(dy, dout + c);
    for (int i = 0; i < E; ++i) {
      if constexpr (lanes_of < Vec >> 1) {
        prefetch(x + (E + i) * C + c);
        prefetch_to_write(dx + i * C + c);
      }
      load(s, x + i * C + c);
      sum[i] += s * dy;
    }
  }
  add_sums_of_lanes(dots, sum);
  if (c < C) dot_columns<float, E>(dots, x, dout, dx, c, C);
}

// With d = x - mean and k = rstd q: g_i = sum_j k[i,j] projection_j, along[i] += g_i . d_i,
// dprojection_j += sum_i k[i,j] d_i
template <class Vec, int E, class S>
void project_back_columns(float* g, float* along, float* dprojection, const S* x, const float* mean,
                          const float* projection, const float* k, int64_t c, int64_t C) {
  Vec sum[E] = {};
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec d[E], gi[E] = {}, p, dp;
    unrolled<E>([&](auto i) {
      load(d[i], x + i * C + c);
      d[i] -= mean[i];
    });
    unrolled<E + 2>([&](auto j) {
      load(p, projection + j * C + c);
      load(dp, dprojection + j * C + c);
      unrolled<E>([&](auto i) {
        gi[i] += k[i * (E + 2) + j] * p;
        dp += k[i * (E + 2) + j] * d[i];
      });
      store(dprojection + j * C + c, dp);
    });
    unrolled<E>([&](auto i) {
      sum[i] += gi[i] * d[i];
      store(g + i * C + c, gi[i]);
    });
  }
  add_sums_of_lanes(along, sum);
  if (c < C) project_back_columns<float, E>(g, along, dprojection, x, mean, projection, k, c, C);
}

// dx_i = or += A[i,0] dout + g_i - along[i] (x_i - mean_i); the last two only if g is there.
template <class Vec, int E, class S>
void read_back_columns(S* dx, const S* dout, const float* coef, const float* g, const S* x, const float* mean,
                       const float* along, bool acc, int64_t c, int64_t C) {
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec dy, sum, gi, d;
    load(dy, dout + c);
    for (int i = 0; i < E; ++i) {
      sum = coef[i * (E + 2)] * dy;
      if (g != nullptr) {
        load(gi, g + i * C + c);
        load(d, x + i * C + c);
        sum += gi - along[i] * (d - mean[i]);
      }
      if (acc) {
        load(d, dx + i * C + c);
        sum += d;
      }
      store(dx + i * C + c, sum);
    }
  }
  if (c < C) read_back_columns<float, E>(dx, dout, coef, g, x, mean, along, acc, c, C);
}

// One token's pointers.
template <class S>
struct ReadToken {
  S* dx;               // (E,C)
  const S* dout;       // (C)
  const float* dcoef;  // (E,E+2)
  const S* x;          // (E,C)
  const float* coef;   // (E,E+2)
  const float* stats;  // (E,E+4), or null
};

// g: room for (E,C) in the dynamic case.
template <int E, class S>
void read_backward_token(const ReadToken<S>& t, ReadSums<E>& sums, float* dprojection, float* g,
                         const ReadPlan<E>& plan, int64_t C, bool acc) {
  constexpr int J = E + 2;
  float dots[E] = {}, da[E * J], mean[E] = {}, along[E] = {};
  dot_columns<Vec16, E>(dots, t.x, t.dout, t.dx, 0, C);
  std::copy_n(t.dcoef, E * J, da);
  for (int i = 0; i < E; ++i) da[i * J] += dots[i];
  for (int e = 0; e < E * J; ++e) sums.d[e] += da[e];
  if (plan.projection != nullptr) {
    float tanhs[E * J], rstd[E], k[E * J];
    for (int i = 0; i < E; ++i) {
      mean[i] = t.stats[i * (E + 4)];
      rstd[i] = t.stats[i * (E + 4) + 1];
      std::copy_n(t.stats + i * (E + 4) + 2, J, tanhs + i * J);
    }
    for (int e = 0; e < E * J; ++e) {
      const float q = plan.scale[e] * da[e] * (1.f - tanhs[e] * tanhs[e]);
      sums.d_tanh[e] += da[e] * tanhs[e];
      sums.q[e] += q;
      k[e] = q * rstd[e / J];
    }
    project_back_columns<Vec16, E>(g, along, dprojection, t.x, mean, plan.projection, k, 0, C);
    for (int i = 0; i < E; ++i) along[i] *= rstd[i] * rstd[i] / static_cast<float>(C);
  }
  read_back_columns<Vec16, E>(t.dx, t.dout, t.coef, g, t.x, mean, along, acc, 0, C);
}

// The parameters' gradients from the sums over all tokens.
template <int E>
void finish_read_gradients(const HyperWeights<float*>& d, const ReadSums<E>& sums, const float* dprojection,
                           const HyperWeights<float*>& w, int64_t C) {
  constexpr int J = E + 2;
  float q[J] = {};
  for (int i = 0; i < E; ++i) {
    for (int j = 0; j < J; ++j) {
      const int e = i * J + j;
      float* dconstant = j <= E ? d.static_alpha : d.static_beta;
      if (dconstant != nullptr) dconstant[j <= E ? i * (E + 1) + j : i] += sums.d[e];
      float* dscale = j <= E ? d.alpha_scale : d.beta_scale;
      if (dscale != nullptr) *dscale += sums.d_tanh[e];
      q[j] += sums.q[e];
    }
  }
  if (w.alpha_proj == nullptr) return;
  for (int64_t c = 0; c < C; ++c) {
    for (int j = 0; j < J; ++j) {
      float along_xh = dprojection[j * C + c];
      const float weight = hyper_projection(w, c, j, E);
      if (d.norm_weight != nullptr) d.norm_weight[c] += weight * along_xh;
      if (d.norm_bias != nullptr) d.norm_bias[c] += weight * q[j];
      if (w.norm_weight != nullptr) along_xh *= w.norm_weight[c];
      if (w.norm_bias != nullptr) along_xh += w.norm_bias[c] * q[j];
      if ((j <= E ? d.alpha_proj : d.beta_proj) != nullptr) hyper_projection(d, c, j, E) += along_xh;
    }
  }
}

template <int E, class S>
void hyper_read_backward_cpu(S* dstreams, const HyperWeights<float*>& d, const S* dout, const float* dcoef,
                             const S* streams, const float* coef, const float* stats, const HyperWeights<float*>& w,
                             HyperNorm norm, int64_t rows, int64_t C, bool acc) {
  const ReadPlan<E> plan = plan_read<E>(w, norm, C);
  const bool dynamic = plan.projection != nullptr;
  // One set of sums per block of tokens; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(rows / 64, 1, 64);
  const int64_t head = (static_cast<int64_t>(sizeof(ReadSums<E>) / sizeof(float)) + 15) / 16 * 16;
  const int64_t size = (head + (dynamic ? (E + 2) * C : 0) + 15) / 16 * 16;
  float* partial = scratch_f32(static_cast<size_t>(blocks * size), 1);
  parallel_for(blocks, rows * E * C <= 32768 ? blocks : 1, [=, &plan](int64_t begin, int64_t end) {
    float* g = dynamic ? scratch_f32(static_cast<size_t>(E * C), 2) : nullptr;
    for (int64_t b = begin; b < end; ++b) {
      float* block = partial + b * size;
      std::fill_n(block, size, 0.f);
      for (int64_t n = rows * b / blocks; n < rows * (b + 1) / blocks; ++n) {
        const ReadToken<S> token{dstreams + n * E * C,    dout + n * C,
                                 dcoef + n * E * (E + 2), streams + n * E * C,
                                 coef + n * E * (E + 2),  dynamic ? stats + n * E * (E + 4) : nullptr};
        read_backward_token<E>(token, *reinterpret_cast<ReadSums<E>*>(block), block + head, g, plan, C, acc);
      }
    }
  });
  for (int64_t b = 1; b < blocks; ++b) {
#pragma omp simd
    for (int64_t e = 0; e < size; ++e) partial[e] += partial[b * size + e];
  }
  finish_read_gradients<E>(d, *reinterpret_cast<const ReadSums<E>*>(partial), partial + head, w, C);
}

// Every member has data exactly if it is wanted, or, for gradients, if it may have; and then the right size.
void check_weights(const HyperWeights<Tensor>& w, const StreamsSize& z, HyperNorm norm, bool dynamic, bool gradients) {
  const int64_t E = z.E, C = z.C;
  const int64_t affine = dynamic && norm != HyperNorm::layernorm_no_affine ? C : 0;
  const HyperWeights<int64_t> wanted{E * (E + 1),
                                     E,
                                     dynamic ? C * (E + 1) : 0,
                                     dynamic ? C : 0,
                                     dynamic,
                                     dynamic,
                                     affine,
                                     norm == HyperNorm::layernorm ? affine : 0};
  const std::array<const char*, 8> names{"static_alpha", "static_beta", "alpha_proj",  "beta_proj",
                                         "alpha_scale",  "beta_scale",  "norm_weight", "norm_bias"};
  for (size_t i = 0; i < names.size(); ++i) {
    const Tensor t = w.list()[i];
    const int64_t size = wanted.list()[i];
    CHECK_THAT((t.data != nullptr) == (size > 0) || (gradients && t.data == nullptr), names[i],
               size > 0 ? " is missing" : " has data, but no place");
    CHECK_THAT(t.data == nullptr || t.numel() == size, names[i], " ", t.str(), " for ", E, " streams of ", C);
  }
}

void check_stats(const Tensor& stats, const Tensor& streams) {
  const int64_t E = streams.dim(2);
  CHECK_SHAPES(stats.data != nullptr && stats.shape == Shape({streams.dim(0), streams.dim(1), E, E + 4}), stats,
               streams);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

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

void hyper_read_backward(const Grad& dstreams, const HyperWeights<Tensor>& d, const Tensor& dout, const Tensor& dcoef,
                         const Tensor& streams, const Tensor& coef, const Tensor& stats, const HyperWeights<Tensor>& w,
                         HyperNorm norm, Stream stream) {
  const bool dynamic = w.alpha_proj.data != nullptr;
  const StreamsSize z = check_streams(streams, dout);
  const auto [rows, E, C] = z;
  CHECK_SHAPES(dstreams.shape == streams.shape, dstreams, streams);
  check_coef(coef, streams), check_coef(dcoef, streams);
  if (dynamic) check_stats(stats, streams);
  check_weights(w, z, norm, dynamic, false), check_weights(d, z, norm, dynamic, true);
  dispatch(
      stream, dstreams.dtype,
      [&] { hyper_read_backward_cuda(dstreams, d, dout, dcoef, streams, coef, stats, w, norm, rows, E, C); },
      [&]<class S>(S) {
        with_streams(E, [&](auto count) {
          hyper_read_backward_cpu<count>(dstreams.as<S>(), mapped(d, data_or_null<float>), dout.as<S>(),
                                         dcoef.as<float>(), streams.as<S>(), coef.as<float>(),
                                         data_or_null<float>(stats), mapped(w, data_or_null<float>), norm, rows, C,
                                         dstreams.add);
        });
      },
      [&]<class T>(T) {
        hyper_read_backward_ref(dstreams.as<T>(), mapped(d, data_or_null<T>), dout.as<T>(), dcoef.as<T>(),
                                streams.as<T>(), coef.as<T>(), data_or_null<T>(stats), mapped(w, data_or_null<T>), norm,
                                rows, E, C, dstreams.add);
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
  node->keep = {streams, coef};
  t.record(std::move(node));
  return {x, coef};
}

}  // namespace ops
}  // namespace crossply
