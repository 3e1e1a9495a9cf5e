// The backward of the read of the hyper-connections; its forward and its node are in hyper_read.cpp.
#include "kernels/depth/streams/hyper_read_plan.h"

namespace crossply {

using namespace hyper;

namespace {

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
                       const float* along, bool accumulate, int64_t c, int64_t C) {
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
      if (accumulate) {
        load(d, dx + i * C + c);
        sum += d;
      }
      store(dx + i * C + c, sum);
    }
  }
  if (c < C) read_back_columns<float, E>(dx, dout, coef, g, x, mean, along, accumulate, c, C);
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
                         const ReadPlan<E>& plan, int64_t C, bool accumulate) {
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
  read_back_columns<Vec16, E>(t.dx, t.dout, t.coef, g, t.x, mean, along, accumulate, 0, C);
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
                             HyperNorm norm, int64_t rows, int64_t C, bool accumulate) {
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
        read_backward_token<E>(token, *reinterpret_cast<ReadSums<E>*>(block), block + head, g, plan, C, accumulate);
      }
    }
  });
  for (int64_t b = 1; b < blocks; ++b) {
#pragma omp simd
    for (int64_t e = 0; e < size; ++e) partial[e] += partial[b * size + e];
  }
  finish_read_gradients<E>(d, *reinterpret_cast<const ReadSums<E>*>(partial), partial + head, w, C);
}

}  // namespace

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
                                         dstreams.accumulate);
        });
      },
      [&]<class T>(T) {
        hyper_read_backward_ref(dstreams.as<T>(), mapped(d, data_or_null<T>), dout.as<T>(), dcoef.as<T>(),
                                streams.as<T>(), coef.as<T>(), data_or_null<T>(stats), mapped(w, data_or_null<T>), norm,
                                rows, E, C, dstreams.accumulate);
      });
}

}  // namespace crossply
