#include "kernels/hyper.h"

#include <cstring>
#include <type_traits>

#include "kernels/cpu.h"

namespace crossply {
namespace {

using Vec16 = float __attribute__((vector_size(64)));
using Vec8 = float __attribute__((vector_size(32)));
using Vec4 = float __attribute__((vector_size(16)));

template <class Vec>
constexpr int64_t lanes = sizeof(Vec) / sizeof(float);

template <class Vec>
inline void load(Vec& v, const float* p) {
  std::memcpy(&v, p, sizeof(Vec));
}
template <class Vec>
inline void store(float* p, const Vec& v) {
  std::memcpy(p, &v, sizeof(Vec));
}

inline float sum_of_lanes(float sum) { return sum; }
inline float sum_of_lanes(const Vec16& sum) {
  const Vec8 half = __builtin_shufflevector(sum, sum, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15);
  const Vec4 quarter =
      __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// tanh to about 2 ulp, without branches. Near 0 a polynomial keeps the relative precision; NaN stays NaN.
inline float tanh_f32(float x) {
  const float u = x * x;
  float p = -6.09671416e-3f;
  p = p * u + 2.0997179e-2f;
  p = p * u - 5.38509096e-2f;
  p = p * u + 1.33327697e-1f;
  p = p * u - 3.33333289e-1f;
  const float near = x + x * u * p, far = 1.f - 2.f / (exp_f32(2.f * x) + 1.f);
  return u < 0.390625f ? near : far;
}

// Calls body(integral_constant<int, E>): the loops over the streams of a token are unrolled at compile time.
template <class F>
void with_streams(int64_t E, F&& body) {
  switch (E) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 5: return body(std::integral_constant<int, 5>{});
    case 6: return body(std::integral_constant<int, 6>{});
    case 7: return body(std::integral_constant<int, 7>{});
    default: return body(std::integral_constant<int, 8>{});
  }
}

int64_t grain(int64_t E, int64_t C) { return 32768 / (E * C); }

// -----------------------------------------------------------------------------------------------------------------
// Expand and sum.

void streams_expand_cpu(float* streams, const float* x, int64_t rows, int64_t E, int64_t C, bool acc) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t i = 0; i < E; ++i) {
        float* s = streams + (n * E + i) * C;
        if (acc) {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) s[c] += x[n * C + c];
        } else {
          std::copy_n(x + n * C, C, s);
        }
      }
    }
  });
}

template <class Vec, int E>
int64_t sum_columns(float* out, const float* x, int64_t c, int64_t C, bool acc) {
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
    Vec sum = {}, s;
    if (acc) load(sum, out + c);
    for (int i = 0; i < E; ++i) {
      load(s, x + i * C + c);
      sum += s;
    }
    store(out + c, sum);
  }
  return c;
}

template <int E>
void streams_sum_cpu(float* out, const float* streams, int64_t rows, int64_t C, bool acc) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t c = sum_columns<Vec16, E>(out + n * C, streams + n * E * C, 0, C, acc);
      sum_columns<float, E>(out + n * C, streams + n * E * C, c, C, acc);
    }
  });
}

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
ReadPlan<E> plan_read(const HyperPointers<float>& w, HyperNorm norm, int64_t C) {
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

// sums[i] += sum_c x_i[c]
template <class Vec, int E>
int64_t total_columns(float* sums, const float* x, int64_t c, int64_t C) {
  Vec sum[E] = {}, s;
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
    for (int i = 0; i < E; ++i) {
      load(s, x + i * C + c);
      sum[i] += s;
    }
  }
  for (int i = 0; i < E; ++i) sums[i] += sum_of_lanes(sum[i]);
  return c;
}

// For R streams, with d = x - mean: squares[r] += d.d and z[r*(E+2)+j] += d . projection_j
template <class Vec, int E, int R>
int64_t project_columns(float* z, float* squares, const float* x, const float* mean, const float* projection,
                        int64_t c, int64_t C) {
  Vec sum[R][E + 2] = {}, square[R] = {};
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
    Vec d[R], p;
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(x + (E + r) * C + c, 0, 2);  // the next token: this one is in the cache
      load(d[r], x + r * C + c);
      d[r] -= mean[r];
      square[r] += d[r] * d[r];
    }
    for (int j = 0; j < E + 2; ++j) {
      load(p, projection + j * C + c);
      for (int r = 0; r < R; ++r) sum[r][j] += d[r] * p;
    }
  }
  for (int r = 0; r < R; ++r) {
    squares[r] += sum_of_lanes(square[r]);
    for (int j = 0; j < E + 2; ++j) z[r * (E + 2) + j] += sum_of_lanes(sum[r][j]);
  }
  return c;
}

// Streams [i, i + R) and all after them, R at a time.
template <int E, int R>
void project(float* z, float* squares, const float* x, const float* mean, const float* projection, int64_t C, int i) {
  for (; i + R <= E; i += R) {
    float *zi = z + i * (E + 2), *square = squares + i;
    const int64_t c = project_columns<Vec16, E, R>(zi, square, x + i * C, mean + i, projection, 0, C);
    project_columns<float, E, R>(zi, square, x + i * C, mean + i, projection, c, C);
  }
  if constexpr (R > 1)
    if (i < E) project<E, 1>(z, squares, x, mean, projection, C, i);
}

// coef and stats of one token with streams x (E,C).
template <int E>
void dynamic_coefficients(float* coef, float* stats, const float* x, const ReadPlan<E>& plan, int64_t C) {
  constexpr int J = E + 2;
  float mean[E] = {}, squares[E] = {}, z[E * J] = {};
  if (plan.centred) {
    const int64_t c = total_columns<Vec16, E>(mean, x, 0, C);
    total_columns<float, E>(mean, x, c, C);
    for (int i = 0; i < E; ++i) mean[i] /= static_cast<float>(C);
  }
  project<E, E <= 3 ? E : 2>(z, squares, x, mean, plan.projection, C, 0);
  for (int i = 0; i < E; ++i) {
    const float rstd = 1.f / std::sqrt(squares[i] / static_cast<float>(C) + plan.eps);
    stats[i * (E + 4)] = mean[i];
    stats[i * (E + 4) + 1] = rstd;
    for (int j = 0; j < J; ++j) z[i * J + j] = z[i * J + j] * rstd + plan.offset[j];
  }
#pragma omp simd
  for (int e = 0; e < E * J; ++e) {
    z[e] = tanh_f32(z[e]);
    coef[e] = plan.constant[e] + plan.scale[e] * z[e];
  }
  for (int i = 0; i < E; ++i) std::copy_n(z + i * J, J, stats + i * (E + 4) + 2);
}

// out = sum_i A[i,0] x_i
template <class Vec, int E>
int64_t read_columns(float* out, const float* x, const float* coef, int64_t c, int64_t C) {
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
    Vec sum = {}, s;
    for (int i = 0; i < E; ++i) {
      load(s, x + i * C + c);
      sum += coef[i * (E + 2)] * s;
    }
    store(out + c, sum);
  }
  return c;
}

template <int E>
void hyper_read_forward_cpu(float* out, float* coef, float* stats, const float* streams,
                            const HyperPointers<float>& w, HyperNorm norm, int64_t rows, int64_t C, float eps) {
  ReadPlan<E> plan = plan_read<E>(w, norm, C);
  plan.eps = eps;
  parallel_for(rows, grain(E, C), [=, &plan](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* x = streams + n * E * C;
      float* a = coef + n * E * (E + 2);
      if (plan.projection != nullptr) dynamic_coefficients<E>(a, stats + n * E * (E + 4), x, plan, C);
      else std::copy_n(plan.constant, E * (E + 2), a);
      const int64_t c = read_columns<Vec16, E>(out + n * C, x, a, 0, C);
      read_columns<float, E>(out + n * C, x, a, c, C);
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

template <class Vec, int E>
int64_t dot_columns(float* dots, const float* x, const float* dout, int64_t c, int64_t C) {
  Vec sum[E] = {}, s, dy;
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
    load(dy, dout + c);
    for (int i = 0; i < E; ++i) {
      load(s, x + i * C + c);
      sum[i] += s * dy;
    }
  }
  for (int i = 0; i < E; ++i) dots[i] += sum_of_lanes(sum[i]);
  return c;
}

// With d = x - mean and k = rstd q: g_i = sum_j k[i,j] projection_j, along[i] += g_i . d_i,
// dprojection_j += sum_i k[i,j] d_i
template <class Vec, int E>
int64_t project_back_columns(float* g, float* along, float* dprojection, const float* x, const float* mean,
                             const float* projection, const float* k, int64_t c, int64_t C) {
  Vec sum[E] = {};
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
    Vec d[E], gi[E] = {}, p, dp;
    for (int i = 0; i < E; ++i) {
      load(d[i], x + i * C + c);
      d[i] -= mean[i];
    }
    for (int j = 0; j < E + 2; ++j) {
      load(p, projection + j * C + c);
      load(dp, dprojection + j * C + c);
      for (int i = 0; i < E; ++i) {
        gi[i] += k[i * (E + 2) + j] * p;
        dp += k[i * (E + 2) + j] * d[i];
      }
      store(dprojection + j * C + c, dp);
    }
    for (int i = 0; i < E; ++i) {
      sum[i] += gi[i] * d[i];
      store(g + i * C + c, gi[i]);
    }
  }
  for (int i = 0; i < E; ++i) along[i] += sum_of_lanes(sum[i]);
  return c;
}

// dx_i = or += A[i,0] dout + g_i - along[i] (x_i - mean_i); the last two only if g is there.
template <class Vec, int E>
int64_t read_back_columns(float* dx, const float* dout, const float* coef, const float* g, const float* x,
                          const float* mean, const float* along, bool acc, int64_t c, int64_t C) {
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
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
  return c;
}

// One token's pointers.
struct ReadToken {
  float* dx;           // (E,C)
  const float* dout;   // (C)
  const float* dcoef;  // (E,E+2)
  const float* x;      // (E,C)
  const float* coef;   // (E,E+2)
  const float* stats;  // (E,E+4), or null
};

// g: room for (E,C) in the dynamic case.
template <int E>
void read_backward_token(const ReadToken& t, ReadSums<E>& sums, float* dprojection, float* g,
                         const ReadPlan<E>& plan, int64_t C, bool acc) {
  constexpr int J = E + 2;
  float dots[E] = {}, da[E * J], mean[E] = {}, along[E] = {};
  int64_t c = dot_columns<Vec16, E>(dots, t.x, t.dout, 0, C);
  dot_columns<float, E>(dots, t.x, t.dout, c, C);
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
    c = project_back_columns<Vec16, E>(g, along, dprojection, t.x, mean, plan.projection, k, 0, C);
    project_back_columns<float, E>(g, along, dprojection, t.x, mean, plan.projection, k, c, C);
    for (int i = 0; i < E; ++i) along[i] *= rstd[i] * rstd[i] / static_cast<float>(C);
  }
  c = read_back_columns<Vec16, E>(t.dx, t.dout, t.coef, g, t.x, mean, along, acc, 0, C);
  read_back_columns<float, E>(t.dx, t.dout, t.coef, g, t.x, mean, along, acc, c, C);
}

// The parameters' gradients from the sums over all tokens.
template <int E>
void finish_read_gradients(const HyperPointers<float>& d, const ReadSums<E>& sums, const float* dprojection,
                           const HyperPointers<float>& w, int64_t C) {
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

template <int E>
void hyper_read_backward_cpu(float* dstreams, const HyperPointers<float>& d, const float* dout, const float* dcoef,
                             const float* streams, const float* coef, const float* stats,
                             const HyperPointers<float>& w, HyperNorm norm, int64_t rows, int64_t C, bool acc) {
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
        const ReadToken token{dstreams + n * E * C, dout + n * C,           dcoef + n * E * (E + 2),
                              streams + n * E * C,  coef + n * E * (E + 2), stats + n * E * (E + 4)};
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

// -----------------------------------------------------------------------------------------------------------------
// Write.

template <class Vec, int E>
int64_t write_columns(float* next, const float* x, const float* coef, const float* y, int64_t c, int64_t C) {
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
    Vec in, s[E], sum;
    load(in, y + c);
    for (int k = 0; k < E; ++k) load(s[k], x + k * C + c);
    for (int i = 0; i < E; ++i) {
      sum = coef[i * (E + 2) + E + 1] * in;
      for (int k = 0; k < E; ++k) sum += coef[k * (E + 2) + i + 1] * s[k];
      store(next + i * C + c, sum);
    }
  }
  return c;
}

template <int E>
void hyper_write_forward_cpu(float* next, const float* streams, const float* coef, const float* y, int64_t rows,
                             int64_t C) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float a[E * (E + 2)];  // a copy, which the stores to next cannot change
      std::copy_n(coef + n * E * (E + 2), E * (E + 2), a);
      const int64_t c = write_columns<Vec16, E>(next + n * E * C, streams + n * E * C, a, y + n * C, 0, C);
      write_columns<float, E>(next + n * E * C, streams + n * E * C, a, y + n * C, c, C);
    }
  });
}

// In the write's backward y is to b what stream k is to A[k,1..E]: one more row.
template <int E>
struct WriteRow {
  const float* x;  // (C)
  float* dx;       // (C)
  float coef[E];
  float dcoef[E];
  bool acc;
};

// For R rows: dcoef[i] += x . dnext_i, dx = or += sum_i coef[i] dnext_i
template <class Vec, int E, int R>
int64_t write_back_columns(WriteRow<E>* rows, const float* dnext, int64_t c, int64_t C) {
  Vec dots[R][E] = {};
  for (; c + lanes<Vec> <= C; c += lanes<Vec>) {
    Vec g[E], x;
    for (int i = 0; i < E; ++i) load(g[i], dnext + i * C + c);
    for (int r = 0; r < R; ++r) {
      Vec sum = {};
      if (rows[r].acc) load(sum, rows[r].dx + c);
      load(x, rows[r].x + c);
      for (int i = 0; i < E; ++i) {
        dots[r][i] += x * g[i];
        sum += rows[r].coef[i] * g[i];
      }
      store(rows[r].dx + c, sum);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < E; ++i) rows[r].dcoef[i] += sum_of_lanes(dots[r][i]);
  return c;
}

// Rows [r, E], R at a time.
template <int E, int R>
void write_back(WriteRow<E>* rows, const float* dnext, int64_t C, int r) {
  for (; r + R <= E + 1; r += R) {
    const int64_t c = write_back_columns<Vec16, E, R>(rows + r, dnext, 0, C);
    write_back_columns<float, E, R>(rows + r, dnext, c, C);
  }
  if constexpr (R > 1)
    if (r < E + 1) write_back<E, 1>(rows, dnext, C, r);
}

template <int E>
void hyper_write_backward_cpu(float* dstreams, float* dcoef, float* dy, const float* dnext, const float* streams,
                              const float* coef, const float* y, int64_t tokens, int64_t C, bool acc_streams,
                              bool acc_y) {
  constexpr int J = E + 2;
  parallel_for(tokens, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* a = coef + n * E * J;
      float* da = dcoef + n * E * J;
      WriteRow<E> rows[E + 1];
      for (int k = 0; k < E; ++k) {
        rows[k] = {streams + (n * E + k) * C, dstreams + (n * E + k) * C, {}, {}, acc_streams};
        for (int i = 0; i < E; ++i) rows[k].coef[i] = a[k * J + i + 1];
      }
      rows[E] = {y + n * C, dy + n * C, {}, {}, acc_y};
      for (int i = 0; i < E; ++i) rows[E].coef[i] = a[i * J + E + 1];
      write_back<E, E <= 4 ? E + 1 : E <= 6 ? 3 : 2>(rows, dnext + n * E * C, C, 0);  // so many fit in registers
      for (int k = 0; k < E; ++k) {
        da[k * J] = 0;
        std::copy_n(rows[k].dcoef, E, da + k * J + 1);
        da[k * J + E + 1] = rows[E].dcoef[k];
      }
    }
  });
}

// -----------------------------------------------------------------------------------------------------------------
// Checks.

void check_streams(const char* name, const Tensor& streams, const Tensor& x) {
  const int64_t E = streams.dim(2), C = streams.dim(3);
  CHECK_THAT(streams.shape.rank == 4 && E >= 1 && E <= max_streams, name, ": streams ", streams.str());
  CHECK_THAT(x.numel() * E == streams.numel() && x.dim(x.shape.rank - 1) == C, name, ": streams ", streams.str(),
             " x ", x.str());
}

void check_coef(const char* name, const Tensor& coef, const Tensor& streams) {
  const int64_t E = streams.dim(2);
  CHECK_THAT(coef.shape == Shape({streams.dim(0), streams.dim(1), E, E + 2}), name, ": streams ", streams.str(),
             " coef ", coef.str());
}

// Every field has data exactly if it is wanted, or, for gradients, if it may have; and then the right size.
void check_weights(const char* name, const HyperWeights& w, const Tensor& streams, HyperNorm norm, bool dynamic,
                   bool gradients) {
  const int64_t E = streams.dim(2), C = streams.dim(3);
  auto check = [&](const char* field, const Tensor& t, bool wanted, int64_t numel) {
    CHECK_THAT((t.data != nullptr) == wanted || (gradients && t.data == nullptr), name, ": ", field,
               wanted ? " is missing" : " has data, but no place");
    CHECK_THAT(t.data == nullptr || t.numel() == numel, name, ": ", field, " ", t.str(), " streams ", streams.str());
  };
  check("static_alpha", w.static_alpha, true, E * (E + 1));
  check("static_beta", w.static_beta, true, E);
  check("alpha_proj", w.alpha_proj, dynamic, C * (E + 1));
  check("beta_proj", w.beta_proj, dynamic, C);
  check("alpha_scale", w.alpha_scale, dynamic, 1);
  check("beta_scale", w.beta_scale, dynamic, 1);
  check("norm_weight", w.norm_weight, dynamic && norm != HyperNorm::layernorm_no_affine, C);
  check("norm_bias", w.norm_bias, dynamic && norm == HyperNorm::layernorm, C);
}

void check_stats(const char* name, const Tensor& stats, const Tensor& streams, bool dynamic) {
  const int64_t E = streams.dim(2);
  CHECK_THAT(!dynamic || (stats.data != nullptr &&
                          stats.shape == Shape({streams.dim(0), streams.dim(1), E, E + 4})),
             name, ": streams ", streams.str(), " stats ", stats.str());
}

template <class T>
T* data_or_null(const Tensor& t) {
  return t.data == nullptr ? nullptr : t.as<T>();
}

template <class T>
HyperPointers<T> pointers_of(const HyperWeights& w) {
  return {data_or_null<T>(w.static_alpha), data_or_null<T>(w.static_beta), data_or_null<T>(w.alpha_proj),
          data_or_null<T>(w.beta_proj),    data_or_null<T>(w.alpha_scale), data_or_null<T>(w.beta_scale),
          data_or_null<T>(w.norm_weight),  data_or_null<T>(w.norm_bias)};
}

void streams_expand(const char* name, const Tensor& streams, const Tensor& x, bool acc, Stream stream) {
  check_streams(name, streams, x);
  const int64_t E = streams.dim(2), C = streams.dim(3), rows = streams.dim(0) * streams.dim(1);
  if (stream.backend == Backend::cpu)
    return streams_expand_cpu(streams.as<float>(), x.as<float>(), rows, E, C, acc);
  with_real(x.dtype, [&](auto real) {
    using T = decltype(real);
    streams_expand_ref(streams.as<T>(), x.as<T>(), rows, E, C, acc);
  });
}

void streams_sum(const char* name, const Tensor& out, const Tensor& streams, bool acc, Stream stream) {
  check_streams(name, streams, out);
  const int64_t E = streams.dim(2), C = streams.dim(3), rows = streams.dim(0) * streams.dim(1);
  if (stream.backend == Backend::cpu)
    return with_streams(E, [&](auto count) {
      streams_sum_cpu<decltype(count)::value>(out.as<float>(), streams.as<float>(), rows, C, acc);
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    streams_sum_ref(out.as<T>(), streams.as<T>(), rows, E, C, acc);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void streams_expand_forward(const Tensor& streams, const Tensor& x, Stream stream) {
  streams_expand("streams_expand_forward", streams, x, false, stream);
}

void streams_expand_backward(const Tensor& dx, const Tensor& dstreams, bool acc, Stream stream) {
  streams_sum("streams_expand_backward", dx, dstreams, acc, stream);
}

void streams_sum_forward(const Tensor& out, const Tensor& streams, Stream stream) {
  streams_sum("streams_sum_forward", out, streams, false, stream);
}

void streams_sum_backward(const Tensor& dstreams, const Tensor& dout, bool acc, Stream stream) {
  streams_expand("streams_sum_backward", dstreams, dout, acc, stream);
}

void hyper_read_forward(const Tensor& out, const Tensor& coef, const Tensor& stats, const Tensor& streams,
                        const HyperWeights& w, HyperNorm norm, double eps, Stream stream) {
  constexpr const char* name = "hyper_read_forward";
  const bool dynamic = w.alpha_proj.data != nullptr;
  check_streams(name, streams, out);
  check_coef(name, coef, streams);
  check_stats(name, stats, streams, dynamic);
  check_weights(name, w, streams, norm, dynamic, false);
  const int64_t E = streams.dim(2), C = streams.dim(3), rows = streams.dim(0) * streams.dim(1);
  if (stream.backend == Backend::cpu)
    return with_streams(E, [&](auto count) {
      hyper_read_forward_cpu<decltype(count)::value>(out.as<float>(), coef.as<float>(), data_or_null<float>(stats),
                                                     streams.as<float>(), pointers_of<float>(w), norm, rows, C,
                                                     static_cast<float>(eps));
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    hyper_read_forward_ref(out.as<T>(), coef.as<T>(), data_or_null<T>(stats), streams.as<T>(), pointers_of<T>(w), norm,
                           rows, E, C, eps);
  });
}

void hyper_read_backward(const Tensor& dstreams, const HyperWeights& d, const Tensor& dout, const Tensor& dcoef,
                         const Tensor& streams, const Tensor& coef, const Tensor& stats, const HyperWeights& w,
                         HyperNorm norm, bool acc, Stream stream) {
  constexpr const char* name = "hyper_read_backward";
  const bool dynamic = w.alpha_proj.data != nullptr;
  check_streams(name, streams, dout);
  CHECK_THAT(dstreams.shape == streams.shape, name, ": dstreams ", dstreams.str(), " streams ", streams.str());
  check_coef(name, coef, streams);
  check_coef(name, dcoef, streams);
  check_stats(name, stats, streams, dynamic);
  check_weights(name, w, streams, norm, dynamic, false);
  check_weights(name, d, streams, norm, dynamic, true);
  const int64_t E = streams.dim(2), C = streams.dim(3), rows = streams.dim(0) * streams.dim(1);
  if (stream.backend == Backend::cpu)
    return with_streams(E, [&](auto count) {
      hyper_read_backward_cpu<decltype(count)::value>(
          dstreams.as<float>(), pointers_of<float>(d), dout.as<float>(), dcoef.as<float>(), streams.as<float>(),
          coef.as<float>(), data_or_null<float>(stats), pointers_of<float>(w), norm, rows, C, acc);
    });
  with_real(dstreams.dtype, [&](auto real) {
    using T = decltype(real);
    hyper_read_backward_ref(dstreams.as<T>(), pointers_of<T>(d), dout.as<T>(), dcoef.as<T>(), streams.as<T>(),
                            coef.as<T>(), data_or_null<T>(stats), pointers_of<T>(w), norm, rows, E, C, acc);
  });
}

void hyper_write_forward(const Tensor& next, const Tensor& streams, const Tensor& coef, const Tensor& y,
                         Stream stream) {
  constexpr const char* name = "hyper_write_forward";
  check_streams(name, streams, y);
  CHECK_THAT(next.shape == streams.shape, name, ": next ", next.str(), " streams ", streams.str());
  check_coef(name, coef, streams);
  const int64_t E = streams.dim(2), C = streams.dim(3), rows = streams.dim(0) * streams.dim(1);
  if (stream.backend == Backend::cpu)
    return with_streams(E, [&](auto count) {
      hyper_write_forward_cpu<decltype(count)::value>(next.as<float>(), streams.as<float>(), coef.as<float>(),
                                                      y.as<float>(), rows, C);
    });
  with_real(next.dtype, [&](auto real) {
    using T = decltype(real);
    hyper_write_forward_ref(next.as<T>(), streams.as<T>(), coef.as<T>(), y.as<T>(), rows, E, C);
  });
}

void hyper_write_backward(const Tensor& dstreams, const Tensor& dcoef, const Tensor& dy, const Tensor& dnext,
                          const Tensor& streams, const Tensor& coef, const Tensor& y, bool acc_streams, bool acc_y,
                          Stream stream) {
  constexpr const char* name = "hyper_write_backward";
  check_streams(name, streams, y);
  check_streams(name, dstreams, dy);
  CHECK_THAT(dstreams.shape == streams.shape && dnext.shape == streams.shape, name, ": dstreams ", dstreams.str(),
             " dnext ", dnext.str(), " streams ", streams.str());
  check_coef(name, coef, streams);
  check_coef(name, dcoef, streams);
  const int64_t E = streams.dim(2), C = streams.dim(3), rows = streams.dim(0) * streams.dim(1);
  if (stream.backend == Backend::cpu)
    return with_streams(E, [&](auto count) {
      hyper_write_backward_cpu<decltype(count)::value>(dstreams.as<float>(), dcoef.as<float>(), dy.as<float>(),
                                                       dnext.as<float>(), streams.as<float>(), coef.as<float>(),
                                                       y.as<float>(), rows, C, acc_streams, acc_y);
    });
  with_real(dstreams.dtype, [&](auto real) {
    using T = decltype(real);
    hyper_write_backward_ref(dstreams.as<T>(), dcoef.as<T>(), dy.as<T>(), dnext.as<T>(), streams.as<T>(),
                             coef.as<T>(), y.as<T>(), rows, E, C, acc_streams, acc_y);
  });
}

}  // namespace crossply
