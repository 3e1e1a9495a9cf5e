// lime_by_hand: LIMe trained without an autodiff tape, in one file to read from top to bottom. Kernels, memory, layers,
// optimizer, random numbers and data are all here. Every pointer says its shape. Forward and backward go through the
// same numbered steps. The file includes only the standard library. Compile it from the root of the repository:
//
//   g++ -std=c++20 -O3 -march=native -ffast-math -fno-finite-math-only train/lime_by_hand.cpp -o lime_by_hand
//
// (-fno-finite-math-only keeps the check that the loss is finite.) In half a minute on one core it learns to simplify
// (7+5)/4=1/4=3, modulo 11. With --llama the layers have no routers, which leaves a LLaMA.
// tests/train/test_lime_by_hand.cpp compares loss, gradients and updates with those of the tape, in double.
//
//   x_0     = embed[token]                                              layers l = 0 .. L-1; weights are (out, in)
//   q, k, v = Wq h, Wk h, Wv h       with h = rmsnorm(x_l)              q and k are then rotated by position (RoPE)
//   k~[h]   = sum_{s <= l} sum_{h'} W_l[h, s K + h'] k_s[h']            LIMe: heads of all layers so far; v~ alike
//   mid     = x_l + Wo attention(q, k~, v~)
//   x_{l+1} = mid + Wdown (silu(Wgate h) * Wup h)                       with h = rmsnorm(mid)
//   loss    = mean over scored tokens of cross_entropy(embed rmsnorm(x_L), next token)
//
// Letters: B batch, T time, N = B T, C width, V vocabulary, L layers, H query heads, K key/value heads, D head width,
// F feed-forward width. dX is the gradient of the loss by X.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numbers>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace crossply::by_hand {

#ifdef LIME_BY_HAND_TEST  // the test includes this file
using real = double;
#else
using real = float;
#endif

constexpr double norm_eps = 1e-6, rope_theta = 10000;
constexpr double beta1 = 0.9, beta2 = 0.95, adam_eps = 1e-8, weight_decay = 0.01, clip = 1;

constexpr int operators = 2;  // of an expression

struct Config {
  int64_t B = 16, T = 2 * operators * (operators + 1) + 1;  // a solution has T + 1 tokens
  int64_t C = 32, V = 21, L = 4, H = 4, K = 4, D = 8, F = 128;
  bool routing = true;  // false: LLaMA
};

// -----------------------------------------------------------------------------------------------------------------
// Kernels: a forward and its backward, as plain loops. The shape of an array stands behind its name. Arrays are
// row-major: element (n, c) of an (N, C) array is [n * C + c]. A backward sets the gradients of activations, unless
// `accumulate` is true. It always adds to the gradients of weights.

// A token reads its row of the table; so the row's gradient is the sum over all places of that token:
//
//   out[n] = weight[tokens[n]]
//   dweight[tokens[n]] += dout[n]
void embedding_forward(real* out /*(N,C)*/, const real* weight /*(V,C)*/, const int32_t* tokens /*(N)*/, int64_t N,
                       int64_t C) {
  for (int64_t n = 0; n < N; ++n)
    for (int64_t c = 0; c < C; ++c) out[n * C + c] = weight[tokens[n] * C + c];
}

void embedding_backward(real* dweight /*(V,C)*/, const real* dout /*(N,C)*/, const int32_t* tokens /*(N)*/, int64_t N,
                        int64_t C) {
  for (int64_t n = 0; n < N; ++n)
    for (int64_t c = 0; c < C; ++c) dweight[tokens[n] * C + c] += dout[n * C + c];
}

// RMSNorm divides a row x by its root mean square, then multiplies by the gain g:
//
//   rstd  = (mean_c x_c^2 + eps)^(-1/2)            out_c = g_c x_c rstd
//   dg_c += dout_c x_c rstd                        summed over rows
//   dx_c  = rstd (dout_c g_c - x_c rstd^2 mean_j(dout_j g_j x_j))       since d rstd / d x_c = -rstd^3 x_c / C
void rmsnorm_forward(real* out /*(N,C)*/, real* rstd /*(N)*/, const real* inp /*(N,C)*/, const real* gain /*(C)*/,
                     int64_t N, int64_t C) {
  for (int64_t n = 0; n < N; ++n) {
    const real* x = inp + n * C;
    real squares = 0;
    for (int64_t c = 0; c < C; ++c) squares += x[c] * x[c];
    rstd[n] = 1 / std::sqrt(squares / static_cast<real>(C) + static_cast<real>(norm_eps));
    for (int64_t c = 0; c < C; ++c) out[n * C + c] = gain[c] * x[c] * rstd[n];
  }
}

void rmsnorm_backward(real* dinp /*(N,C)*/, real* dgain /*(C)*/, const real* dout /*(N,C)*/, const real* inp /*(N,C)*/,
                      const real* gain /*(C)*/, const real* rstd /*(N)*/, int64_t N, int64_t C, bool accumulate) {
  for (int64_t n = 0; n < N; ++n) {
    const real *x = inp + n * C, *dy = dout + n * C;
    real* dx = dinp + n * C;
    real dot = 0;
    for (int64_t c = 0; c < C; ++c) dot += dy[c] * gain[c] * x[c];
    const real shrink = rstd[n] * rstd[n] * dot / static_cast<real>(C);
    for (int64_t c = 0; c < C; ++c) {
      dgain[c] += dy[c] * x[c] * rstd[n];
      dx[c] = (accumulate ? dx[c] : 0) + rstd[n] * (dy[c] * gain[c] - x[c] * shrink);
    }
  }
}

// A linear layer without bias. Its weight is (O, C), one row per output:
//
//   out[n,o]      = sum_c inp[n,c] weight[o,c]             out = inp weight^T
//   dinp[n,c]     = sum_o dout[n,o] weight[o,c]            dinp = dout weight
//   dweight[o,c] += sum_n dout[n,o] inp[n,c]               dweight += dout^T inp
//
// In all three the innermost loop runs over c, where all memory is contiguous and compilers vectorise.
void matmul_forward(real* out /*(N,O)*/, const real* inp /*(N,C)*/, const real* weight /*(O,C)*/, int64_t N, int64_t C,
                    int64_t O) {
  for (int64_t n = 0; n < N; ++n)
    for (int64_t o = 0; o < O; ++o) {
      const real *x = inp + n * C, *w = weight + o * C;
      real sum = 0;
      for (int64_t c = 0; c < C; ++c) sum += x[c] * w[c];
      out[n * O + o] = sum;
    }
}

void matmul_backward_input(real* dinp /*(N,C)*/, const real* dout /*(N,O)*/, const real* weight /*(O,C)*/, int64_t N,
                           int64_t C, int64_t O, bool accumulate) {
  if (!accumulate) std::fill_n(dinp, N * C, real(0));
  for (int64_t n = 0; n < N; ++n)
    for (int64_t o = 0; o < O; ++o) {
      const real dy = dout[n * O + o];
      for (int64_t c = 0; c < C; ++c) dinp[n * C + c] += dy * weight[o * C + c];
    }
}

void matmul_backward_weight(real* dweight /*(O,C)*/, const real* dout /*(N,O)*/, const real* inp /*(N,C)*/, int64_t N,
                            int64_t C, int64_t O) {
  for (int64_t n = 0; n < N; ++n)
    for (int64_t o = 0; o < O; ++o) {
      const real dy = dout[n * O + o];
      for (int64_t c = 0; c < C; ++c) dweight[o * C + c] += dy * inp[n * C + c];
    }
}

// RoPE rotates the pairs (x, y) = (x_j, x_{j + D/2}) of every head by the angle t theta^(-2j/D), in place:
//
//   x' = x cos - y sin          y' = y cos + x sin
//   dx = dx' cos + dy' sin      dy = dy' cos - dx' sin              the rotation by the opposite angle
std::vector<real> rope_table(int64_t T, int64_t D) {
  std::vector<real> table(static_cast<size_t>(T * D));
  for (int64_t t = 0; t < T; ++t)
    for (int64_t j = 0; j < D / 2; ++j) {
      const double angle = static_cast<double>(t) * std::pow(rope_theta, -2.0 * j / D);
      table[t * D + j] = static_cast<real>(std::cos(angle));
      table[t * D + D / 2 + j] = static_cast<real>(std::sin(angle));
    }
  return table;
}

void rope_forward(real* heads /*(B,T,H,D)*/, const real* table /*(T,D)*/, int64_t B, int64_t T, int64_t H, int64_t D) {
  for (int64_t n = 0; n < B * T; ++n) {
    const real *cosine = table + n % T * D, *sine = cosine + D / 2;
    for (int64_t h = 0; h < H; ++h) {
      real *x = heads + (n * H + h) * D, *y = x + D / 2;
      for (int64_t j = 0; j < D / 2; ++j) {
        const real x_before = x[j], y_before = y[j];
        x[j] = x_before * cosine[j] - y_before * sine[j];
        y[j] = y_before * cosine[j] + x_before * sine[j];
      }
    }
  }
}

void rope_backward(real* dheads /*(B,T,H,D)*/, const real* table /*(T,D)*/, int64_t B, int64_t T, int64_t H,
                   int64_t D) {
  for (int64_t n = 0; n < B * T; ++n) {
    const real *cosine = table + n % T * D, *sine = cosine + D / 2;
    for (int64_t h = 0; h < H; ++h) {
      real *dx = dheads + (n * H + h) * D, *dy = dx + D / 2;
      for (int64_t j = 0; j < D / 2; ++j) {
        const real dx_after = dx[j], dy_after = dy[j];
        dx[j] = dx_after * cosine[j] + dy_after * sine[j];
        dy[j] = dy_after * cosine[j] - dx_after * sine[j];
      }
    }
  }
}

// LIMe's router mixes, for every token, the heads of all layers so far. Block s of the slab has the heads X_s of layer
// s. Keys and values are routed alike, so W stands for both and gets a gradient from both:
//
//   out_l[n,h]         = sum_{s <= l} sum_{h'} W_l[h, s K + h'] X_s[n,h']         each a vector of D numbers
//   dX_l[n,h']         = sum_{r >= l} sum_h W_r[h, l K + h'] dout_r[n,h]          layers r have read X_l
//   dW_r[h, l K + h'] += sum_n dot(dout_r[n,h], X_l[n,h'])                        for every r >= l
struct Router {
  const real* weight;  // (K, (l+1) K); null in layer 0, which reads its own heads only
  real* dweight;       // the same shape
};

void route_forward(real* out /*(N,K,D)*/, const real* slab /*(L,N,K,D)*/, const real* weight /*(K,(l+1)K)*/, int64_t l,
                   int64_t N, int64_t K, int64_t D) {
  std::fill_n(out, N * K * D, real(0));
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < K; ++h)
      for (int64_t s = 0; s <= l; ++s)
        for (int64_t from = 0; from < K; ++from) {
          const real w = weight[(h * (l + 1) + s) * K + from];
          const real* x = slab + ((s * N + n) * K + from) * D;
          for (int64_t d = 0; d < D; ++d) out[(n * K + h) * D + d] += w * x[d];
        }
}

// The backward of layer l also adds the gradients of every higher layer's router: the columns of W_r that read layer l.
// So the gradient of W_l is complete only after layer 0. The call finds X_l in block l, and dout_r in the blocks of the
// layers above. It leaves dout_l in block l, where the layers below find it. dinp may be dout.
void route_backward(real* dinp /*(N,K,D)*/, real* slab /*(L,N,K,D)*/, const real* dout /*(N,K,D)*/,
                    const std::vector<Router>& routers /*(L)*/, int64_t l, int64_t N, int64_t K, int64_t D) {
  const auto L = static_cast<int64_t>(routers.size());
  std::vector<real> x(static_cast<size_t>(K * D));  // (K, D), a token's X_l
  for (int64_t n = 0; n < N; ++n) {
    real *block = slab + (l * N + n) * K * D, *dx = dinp + n * K * D;  // (K, D) both
    std::copy_n(block, K * D, x.data());
    std::copy_n(dout + n * K * D, K * D, block);
    for (int64_t i = 0; i < K * D; ++i) dx[i] = l == 0 ? block[i] : 0;  // layer 0 has no router: W_0 is the identity
    for (int64_t r = std::max<int64_t>(l, 1); r < L; ++r)
      for (int64_t h = 0; h < K; ++h)
        for (int64_t from = 0; from < K; ++from) {
          const int64_t at = (h * (r + 1) + l) * K + from;
          const real* dy = slab + ((r * N + n) * K + h) * D;
          const real w = routers[r].weight[at];
          real dw = 0;
          for (int64_t d = 0; d < D; ++d) {
            dx[from * D + d] += w * dy[d];
            dw += dy[d] * x[from * D + d];
          }
          routers[r].dweight[at] += dw;
        }
  }
}

// Causal attention. H/K query heads share a key/value head. For every query t of a head, over its positions j <= t:
//
//   s_j   = scale dot(q_t, k_j)             lse   = log sum_j exp(s_j)              scale = 1 / sqrt(D)
//   p_j   = exp(s_j - lse)                  out_t = sum_j p_j v_j
//   dp_j  = dot(dout_t, v_j)                dv_j += p_j dout_t
//   ds_j  = scale p_j (dp_j - dot(dout_t, out_t))         a softmax's derivative: p_j (dp_j - sum_i p_i dp_i)
//   dq_t += ds_j k_j                        dk_j += ds_j q_t
//
// The backward computes p again from the saved lse.
void attention_forward(real* out /*(B,T,H,D)*/, real* lse /*(B,H,T)*/, const real* q /*(B,T,H,D)*/,
                       const real* k /*(B,T,K,D)*/, const real* v /*(B,T,K,D)*/, int64_t B, int64_t T, int64_t H,
                       int64_t K, int64_t D) {
  const real scale = 1 / std::sqrt(static_cast<real>(D));
  std::vector<real> p(static_cast<size_t>(T));
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t query = ((b * T + t) * H + h) * D;  // where it begins in q and out
        real max = -INFINITY, sum = 0;
        for (int64_t j = 0; j <= t; ++j) {
          const int64_t key = ((b * T + j) * K + h / (H / K)) * D;  // where it begins in k and v
          real s = 0;
          for (int64_t d = 0; d < D; ++d) s += q[query + d] * k[key + d];
          p[j] = scale * s;
          max = std::max(max, p[j]);
        }
        for (int64_t j = 0; j <= t; ++j) sum += p[j] = std::exp(p[j] - max);  // without max it could overflow
        lse[(b * H + h) * T + t] = max + std::log(sum);
        for (int64_t d = 0; d < D; ++d) out[query + d] = 0;
        for (int64_t j = 0; j <= t; ++j) {
          const int64_t key = ((b * T + j) * K + h / (H / K)) * D;
          for (int64_t d = 0; d < D; ++d) out[query + d] += p[j] / sum * v[key + d];
        }
      }
}

void attention_backward(real* dq /*(B,T,H,D)*/, real* dk /*(B,T,K,D)*/, real* dv /*(B,T,K,D)*/,
                        const real* dout /*(B,T,H,D)*/, const real* out /*(B,T,H,D)*/, const real* q /*(B,T,H,D)*/,
                        const real* k /*(B,T,K,D)*/, const real* v /*(B,T,K,D)*/, const real* lse /*(B,H,T)*/,
                        int64_t B, int64_t T, int64_t H, int64_t K, int64_t D) {
  const real scale = 1 / std::sqrt(static_cast<real>(D));
  std::fill_n(dq, B * T * H * D, real(0));
  std::fill_n(dk, B * T * K * D, real(0));
  std::fill_n(dv, B * T * K * D, real(0));
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t query = ((b * T + t) * H + h) * D;
        real mean = 0;  // of dp, weighted by p
        for (int64_t d = 0; d < D; ++d) mean += dout[query + d] * out[query + d];
        for (int64_t j = 0; j <= t; ++j) {
          const int64_t key = ((b * T + j) * K + h / (H / K)) * D;
          real s = 0, dp = 0;
          for (int64_t d = 0; d < D; ++d) {
            s += q[query + d] * k[key + d];
            dp += dout[query + d] * v[key + d];
          }
          const real p = std::exp(scale * s - lse[(b * H + h) * T + t]);
          const real ds = scale * p * (dp - mean);
          for (int64_t d = 0; d < D; ++d) {
            dv[key + d] += p * dout[query + d];
            dq[query + d] += ds * k[key + d];
            dk[key + d] += ds * q[query + d];
          }
        }
      }
}

// The residual connection, out = a + b. It has no backward: both da and db are dout.
void add_forward(real* out /*(n)*/, const real* a /*(n)*/, const real* b /*(n)*/, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

// SwiGLU, element by element, with s = sigmoid(gate) = 1 / (1 + exp(-gate)), so s' = s (1 - s):
//
//   out   = gate s up
//   dgate = dout up s (1 + gate (1 - s))          dup = dout gate s
void swiglu_forward(real* out /*(n)*/, const real* gate /*(n)*/, const real* up /*(n)*/, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
}

void swiglu_backward(real* dgate /*(n)*/, real* dup /*(n)*/, const real* dout /*(n)*/, const real* gate /*(n)*/,
                     const real* up /*(n)*/, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const real s = 1 / (1 + std::exp(-gate[i]));
    dgate[i] = dout[i] * up[i] * s * (1 + gate[i] * (1 - s));
    dup[i] = dout[i] * gate[i] * s;
  }
}

// The output head and the cross entropy, forward and backward at once, so only one row of logits exists at a time. The
// total loss is scale sum_n losses[n]. A target of -1 is not scored: its loss and its gradients are 0.
//
//   z_v       = sum_c inp[n,c] weight[v,c]                       losses[n] = log(sum_v exp(z_v)) - z_target
//   dz_v      = scale (softmax(z)_v - [v == target])
//   dinp[n,c] = sum_v dz_v weight[v,c]                           dweight[v,c] += dz_v inp[n,c]
void cross_entropy_forward_backward(real* losses /*(N)*/, real* dinp /*(N,C)*/, real* dweight /*(V,C)*/,
                                    const real* inp /*(N,C)*/, const real* weight /*(V,C)*/,
                                    const int32_t* targets /*(N)*/, double scale, int64_t N, int64_t V, int64_t C) {
  std::vector<real> z(static_cast<size_t>(V));  // logits, then their exponentials
  std::fill_n(dinp, N * C, real(0));
  for (int64_t n = 0; n < N; ++n) {
    losses[n] = 0;
    if (targets[n] < 0) continue;
    matmul_forward(z.data(), inp + n * C, weight, 1, C, V);
    const real max = *std::max_element(z.begin(), z.end()), target_logit = z[targets[n]] - max;
    real sum = 0;
    for (int64_t v = 0; v < V; ++v) sum += z[v] = std::exp(z[v] - max);
    losses[n] = std::log(sum) - target_logit;
    for (int64_t v = 0; v < V; ++v) {
      const real dz = static_cast<real>(scale) * (z[v] / sum - (v == targets[n]));
      for (int64_t c = 0; c < C; ++c) dinp[n * C + c] += dz * weight[v * C + c];
      for (int64_t c = 0; c < C; ++c) dweight[v * C + c] += dz * inp[n * C + c];
    }
  }
}

// AdamW for parameters of one learning rate and one weight decay. g is the gradient times `factor`, which clips it.
//
//   m   = beta1 m + (1 - beta1) g            v   = beta2 v + (1 - beta2) g^2
//   m^  = m / (1 - beta1^step)               v^  = v / (1 - beta2^step)             step counts from 1
//   w  -= lr (m^ / (sqrt(v^) + eps) + decay w)
void adamw(real* w /*(n)*/, real* m /*(n)*/, real* v /*(n)*/, const real* dw /*(n)*/, int64_t n, int64_t step,
           double lr, double decay, double factor) {
  const double steps = static_cast<double>(step);
  const auto unbias_m = static_cast<real>(1 / (1 - std::pow(beta1, steps)));
  const auto unbias_v = static_cast<real>(1 / (1 - std::pow(beta2, steps)));
  for (int64_t i = 0; i < n; ++i) {
    const real g = static_cast<real>(factor) * dw[i];
    m[i] = real(beta1) * m[i] + real(1 - beta1) * g;
    v[i] = real(beta2) * v[i] + real(1 - beta2) * g * g;
    const real direction = m[i] * unbias_m / (std::sqrt(v[i] * unbias_v) + real(adam_eps));
    w[i] -= real(lr) * direction + real(lr * decay) * w[i];
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Memory: one allocation each for parameters, gradients, both moments, and activations. lay_out runs twice. With null
// it only counts, then it sets the pointers.

struct Cursor {
  real* memory;  // or null
  int64_t used = 0;
  // The next pointers, each to `count` numbers.
  void take(int64_t count, std::initializer_list<real**> pointers) {
    for (real** pointer : pointers) {
      *pointer = memory == nullptr ? nullptr : memory + used;
      used += count;
    }
  }
};

struct LayerWeights {
  real* norm1;                // (C)
  real *wq, *wk, *wv;         // (H D, C), (K D, C), (K D, C)
  real* wo;                   // (C, H D)
  real* router;               // (K, (l+1) K), column s K + h' for head h' of layer s; layer 0, and a LLaMA, have none
  real* norm2;                // (C)
  real *wgate, *wup, *wdown;  // (F, C), (F, C), (C, F)
};
struct Weights {
  real* embed;  // (V, C), which is the output head, too
  std::vector<LayerWeights> layers;
  real* norm;  // (C)
};

enum class Kind { embed, gain, matrix, kv_matrix, router };  // decides initial values, learning rate and decay
struct Row {
  std::string name;  // Hugging Face's
  Kind kind;
  int64_t begin, count;  // where it lies
};

std::vector<Row> lay_out(Weights& w, const Config& c, real* memory) {
  std::vector<Row> table;
  Cursor cursor{memory};
  auto take = [&](real*& pointer, const std::string& name, Kind kind, int64_t count) {
    table.push_back({name + ".weight", kind, cursor.used, count});
    cursor.take(count, {&pointer});
  };
  take(w.embed, "model.embed_tokens", Kind::embed, c.V * c.C);
  w.layers.assign(static_cast<size_t>(c.L), {});
  for (int64_t l = 0; l < c.L; ++l) {
    LayerWeights& layer = w.layers[l];
    const std::string at = "model.layers." + std::to_string(l) + ".";
    take(layer.norm1, at + "input_layernorm", Kind::gain, c.C);
    take(layer.wq, at + "self_attn.q_proj", Kind::matrix, c.H * c.D * c.C);
    take(layer.wk, at + "self_attn.k_proj", Kind::kv_matrix, c.K * c.D * c.C);
    take(layer.wv, at + "self_attn.v_proj", Kind::kv_matrix, c.K * c.D * c.C);
    take(layer.wo, at + "self_attn.o_proj", Kind::matrix, c.C * c.H * c.D);
    if (c.routing && l > 0) take(layer.router, at + "self_attn.lime_router", Kind::router, c.K * (l + 1) * c.K);
    take(layer.norm2, at + "post_attention_layernorm", Kind::gain, c.C);
    take(layer.wgate, at + "mlp.gate_proj", Kind::matrix, c.F * c.C);
    take(layer.wup, at + "mlp.up_proj", Kind::matrix, c.F * c.C);
    take(layer.wdown, at + "mlp.down_proj", Kind::matrix, c.C * c.F);
  }
  take(w.norm, "model.norm", Kind::gain, c.C);
  return table;
}

// What the backward needs of the forward. The keys of all layers are one slab (L, B, T, K, D), and so are the values:
//
//   forward of layer 2     keys  [  k_0  |  k_1  |  k_2  |   .   ]
//                                 \_____________________/
//                                  writes k_2, then reads the prefix, without a copy: k~_2 = W_2 (k_0, k_1, k_2)
//
//   backward of layer 2    keys  [  k_0  |  k_1  | dk~_2 | dk~_3 ]
//                                                 \_____________/
//                                  k_2 is read for the last time and makes room for dk~_2; then the suffix is read,
//                                  dk_2 = what every reader of k_2 passes back (kernels/depth/route.md)
struct LayerActivations {
  real *norm1, *rstd1;       // (B, T, C), (B, T)
  real* q;                   // (B, T, H, D), rotated
  real *own_k, *own_v;       // (B, T, K, D), this layer's blocks of the slabs; keys rotated
  real *k, *v;               // (B, T, K, D), what its attention reads: a mixture, or where there is no router its own
  real *heads, *lse;         // (B, T, H, D), (B, H, T): the output of attention, and its log-sum-exp
  real* mid;                 // (B, T, C), the residual stream between attention and feed-forward
  real *norm2, *rstd2;       // (B, T, C), (B, T)
  real *gate, *up, *hidden;  // (B, T, F)
};
// Gradients of activations. All layers use the same memory in turn.
struct ActivationGradients {
  real *dx, *dnorm;             // (B, T, C)
  real *dq, *dheads, *dk, *dv;  // (B, T, H, D) twice, (B, T, K, D) twice
  real *dgate, *dup, *dhidden;  // (B, T, F)
};
struct Activations {
  real *keys, *values;   // (L, B, T, K, D)
  std::vector<real*> x;  // (B, T, C), the residual stream into layer 0 .. L-1, and x[L] out of the last
  std::vector<LayerActivations> layers;
  real *norm, *rstd, *losses;  // (B, T, C), (B, T), (B, T)
  ActivationGradients d;
};

// Returns how many numbers that is.
int64_t lay_out(Activations& a, const Config& c, real* memory) {
  const int64_t N = c.B * c.T;
  Cursor cursor{memory};
  a.x.assign(static_cast<size_t>(c.L + 1), nullptr);
  a.layers.assign(static_cast<size_t>(c.L), {});
  for (real*& x : a.x) cursor.take(N * c.C, {&x});
  for (LayerActivations& layer : a.layers) cursor.take(N * c.K * c.D, {&layer.own_k});  // contiguous: a slab
  for (LayerActivations& layer : a.layers) cursor.take(N * c.K * c.D, {&layer.own_v});
  a.keys = a.layers[0].own_k, a.values = a.layers[0].own_v;
  for (LayerActivations& layer : a.layers) {
    layer.k = layer.own_k, layer.v = layer.own_v;
    if (c.routing && &layer != &a.layers[0]) cursor.take(N * c.K * c.D, {&layer.k, &layer.v});
    cursor.take(N * c.C, {&layer.norm1, &layer.mid, &layer.norm2});
    cursor.take(N * c.H * c.D, {&layer.q, &layer.heads});
    cursor.take(N * c.F, {&layer.gate, &layer.up, &layer.hidden});
    cursor.take(N, {&layer.rstd1, &layer.rstd2});
    cursor.take(N * c.H, {&layer.lse});
  }
  cursor.take(N * c.C, {&a.norm, &a.d.dx, &a.d.dnorm});
  cursor.take(N, {&a.rstd, &a.losses});
  cursor.take(N * c.H * c.D, {&a.d.dq, &a.d.dheads});
  cursor.take(N * c.K * c.D, {&a.d.dk, &a.d.dv});
  cursor.take(N * c.F, {&a.d.dgate, &a.d.dup, &a.d.dhidden});
  return cursor.used;
}

struct Model {
  Config c;
  Weights w, dw;           // pointers into parameters and into gradients
  Activations a;           // pointers into activations
  std::vector<Row> table;  // of parameters; gradients and moments lie alike
  std::vector<real> parameters, gradients, moment1, moment2, activations;
  std::vector<real> rope;       // (T, D), cosines and sines
  std::vector<Router> routers;  // of all layers, because the backward of a layer needs those above
  int64_t step = 0;             // updates done

  explicit Model(const Config& config) : c(config), table(lay_out(w, c, nullptr)), rope(rope_table(c.T, c.D)) {
    const auto total = static_cast<size_t>(table.back().begin + table.back().count);
    for (auto* flat : {&parameters, &gradients, &moment1, &moment2}) flat->assign(total, 0);
    activations.assign(static_cast<size_t>(lay_out(a, c, nullptr)), 0);
    lay_out(w, c, parameters.data());
    lay_out(dw, c, gradients.data());
    lay_out(a, c, activations.data());
    for (int64_t l = 0; l < c.L; ++l) routers.push_back({w.layers[l].router, dw.layers[l].router});
  }
  Model(const Model&) = delete;  // the pointers would stay behind
};

// -----------------------------------------------------------------------------------------------------------------
// Random numbers without state: each is a hash of (seed, stream, index), so it does not matter what is drawn first.

// The finalizer of SplitMix64. Every bit of x changes every bit of the result with probability one half.
uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio
  return mix_bits(mix_bits(mix_bits(seed + golden) ^ (stream + 2 * golden)) + (index + 1) * golden);
}

// Uniform in [0, 1).
double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return 0x1p-53 * static_cast<double>(random_bits(seed, stream, index) >> 11);
}

// Standard normal, by the transform of Box and Muller. The logarithm's argument is in (0, 1].
double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const double radius = std::sqrt(-2 * std::log(1 - random_uniform(seed, stream, 2 * index)));
  return radius * std::cos(2 * std::numbers::pi * random_uniform(seed, stream, 2 * index + 1));
}

// A stream's number from its name (FNV-1a).
uint64_t stream_of(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001B3u;
  return hash;
}

// Numbers drawn one after the other.
struct Random {
  uint64_t seed, stream, index = 0;
  // Uniform in 0 .. n-1: the upper half of a product of 128 bits.
  int64_t below(int64_t n) {
    const auto bits = static_cast<unsigned __int128>(random_bits(seed, stream, index++));
    return static_cast<int64_t>(bits * static_cast<uint64_t>(n) >> 64);
  }
};

// Matrices start small and normal, gains at 1; LIMe's key and value projections uniform, its routers as
// [ random | identity ], so that every layer first sees its own heads, and something of all others.
void initialise(Model& model, uint64_t seed) {
  const Config& c = model.c;
  for (const Row& row : model.table) {
    const int64_t columns = row.count / c.K;  // of a router
    for (int64_t i = 0; i < row.count; ++i) {
      const uint64_t stream = stream_of(row.name), index = static_cast<uint64_t>(i);
      const double uniform = 2 * random_uniform(seed, stream, index) - 1;
      double start = 0.02 * random_normal(seed, stream, index);
      if (row.kind == Kind::gain) start = 1;
      // Uniform in +-1/sqrt(C): torch's start of a linear layer. In +-sqrt(3/n): the n numbers of variance 1/n.
      if (row.kind == Kind::kv_matrix && c.routing) start = uniform / std::sqrt(c.C);
      if (row.kind == Kind::router) {
        const int64_t own = i % columns - (columns - c.K);  // which of the own heads, if one of them
        start = own < 0 ? uniform * std::sqrt(3.0 / static_cast<double>(columns)) : own == i / columns;
      }
      model.parameters[static_cast<size_t>(row.begin + i)] = static_cast<real>(start);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// A layer. Its backward is its forward from the last line to the first, with the same numbers. It finds in dx the
// gradient of x_{l+1}, the residual stream that the layer wrote. It leaves in dx the gradient of x_l, which the layer
// read. A call that ends in true adds to a gradient that another reader of the same array has set. A call that ends in
// false sets it.

void layer_forward(Model& model, int64_t l) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  const int64_t N = B * T;
  const LayerWeights& w = model.w.layers[l];
  const Activations& all = model.a;
  const LayerActivations& a = all.layers[l];

  /* 1*/ rmsnorm_forward(a.norm1, a.rstd1, all.x[l], w.norm1, N, C);
  /* 2*/ matmul_forward(a.q, a.norm1, w.wq, N, C, H * D);
  /* 2*/ matmul_forward(a.own_k, a.norm1, w.wk, N, C, K * D);
  /* 2*/ matmul_forward(a.own_v, a.norm1, w.wv, N, C, K * D);
  /* 3*/ rope_forward(a.q, model.rope.data(), B, T, H, D);
  /* 3*/ rope_forward(a.own_k, model.rope.data(), B, T, K, D);
  if (w.router) {
    /* 4*/ route_forward(a.k, all.keys, w.router, l, N, K, D);
    /* 4*/ route_forward(a.v, all.values, w.router, l, N, K, D);
  }
  /* 5*/ attention_forward(a.heads, a.lse, a.q, a.k, a.v, B, T, H, K, D);
  /* 6*/ matmul_forward(a.mid, a.heads, w.wo, N, H * D, C);
  /* 7*/ add_forward(a.mid, a.mid, all.x[l], N * C);

  /* 8*/ rmsnorm_forward(a.norm2, a.rstd2, a.mid, w.norm2, N, C);
  /* 9*/ matmul_forward(a.gate, a.norm2, w.wgate, N, C, F);
  /* 9*/ matmul_forward(a.up, a.norm2, w.wup, N, C, F);
  /*10*/ swiglu_forward(a.hidden, a.gate, a.up, N * F);
  /*11*/ matmul_forward(all.x[l + 1], a.hidden, w.wdown, N, F, C);
  /*12*/ add_forward(all.x[l + 1], all.x[l + 1], a.mid, N * C);
}

void layer_backward(Model& model, int64_t l) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  const int64_t N = B * T;
  const LayerWeights &w = model.w.layers[l], &dw = model.dw.layers[l];
  const Activations& all = model.a;
  const LayerActivations& a = all.layers[l];
  const auto [dx, dnorm, dq, dheads, dk, dv, dgate, dup, dhidden] = all.d;

  // 12: a sum passes its gradient on to both terms, so dx already is that of mid, but for what 8 adds.
  /*11*/ matmul_backward_weight(dw.wdown, dx, a.hidden, N, F, C);      // dWdown += dx^T hidden
  /*11*/ matmul_backward_input(dhidden, dx, w.wdown, N, F, C, false);  // dhidden = dx Wdown
  /*10*/ swiglu_backward(dgate, dup, dhidden, a.gate, a.up, N * F);
  /* 9*/ matmul_backward_weight(dw.wgate, dgate, a.norm2, N, C, F);
  /* 9*/ matmul_backward_weight(dw.wup, dup, a.norm2, N, C, F);
  /* 9*/ matmul_backward_input(dnorm, dgate, w.wgate, N, C, F, false);  // dnorm2 = dgate Wgate
  /* 9*/ matmul_backward_input(dnorm, dup, w.wup, N, C, F, true);       //        + dup Wup
  /* 8*/ rmsnorm_backward(dx, dw.norm2, dnorm, a.mid, w.norm2, a.rstd2, N, C, true);

  // 7: likewise, dx already is the gradient of x_l, but for what 1 adds.
  /* 6*/ matmul_backward_weight(dw.wo, dx, a.heads, N, H * D, C);
  /* 6*/ matmul_backward_input(dheads, dx, w.wo, N, H * D, C, false);
  /* 5*/ attention_backward(dq, dk, dv, dheads, a.heads, a.q, a.k, a.v, a.lse, B, T, H, K, D);
  // 4: so far dk is that of the mixture k~_l. What 3 needs is that of k_l, which this layer and all above have read.
  // Those above have left the gradients of their mixtures in the slab, so one sum over them has everything.
  if (routing) {
    /* 4*/ route_backward(dk, all.keys, dk, model.routers, l, N, K, D);
    /* 4*/ route_backward(dv, all.values, dv, model.routers, l, N, K, D);
  }
  /* 3*/ rope_backward(dq, model.rope.data(), B, T, H, D);
  /* 3*/ rope_backward(dk, model.rope.data(), B, T, K, D);
  /* 2*/ matmul_backward_weight(dw.wq, dq, a.norm1, N, C, H * D);
  /* 2*/ matmul_backward_weight(dw.wk, dk, a.norm1, N, C, K * D);
  /* 2*/ matmul_backward_weight(dw.wv, dv, a.norm1, N, C, K * D);
  /* 2*/ matmul_backward_input(dnorm, dq, w.wq, N, C, H * D, false);  // dnorm1 = dq Wq
  /* 2*/ matmul_backward_input(dnorm, dk, w.wk, N, C, K * D, true);   //        + dk Wk
  /* 2*/ matmul_backward_input(dnorm, dv, w.wv, N, C, K * D, true);   //        + dv Wv
  /* 1*/ rmsnorm_backward(dx, dw.norm1, dnorm, all.x[l], w.norm1, a.rstd1, N, C, true);
}

// -----------------------------------------------------------------------------------------------------------------
// The whole model. tokens, targets: (B, T); a target of -1 is not scored.

// Up to the final norm; the logits are norm embed^T.
void forward(Model& model, const int32_t* tokens) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  const Activations& a = model.a;
  embedding_forward(a.x[0], model.w.embed, tokens, B * T, C);
  for (int64_t l = 0; l < L; ++l) layer_forward(model, l);
  rmsnorm_forward(a.norm, a.rstd, a.x[L], model.w.norm, B * T, C);
}

// Returns the mean loss over the scored tokens; its gradients are added to model.gradients.
double forward_backward(Model& model, const int32_t* tokens, const int32_t* targets) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  const Activations& a = model.a;
  const int64_t N = B * T;
  const double scale = 1.0 / static_cast<double>(N - std::count(targets, targets + N, -1));
  forward(model, tokens);
  // The first step back is taken with the loss itself: dnorm = scale (softmax(logits) - onehot(target)) embed.
  cross_entropy_forward_backward(a.losses, a.d.dnorm, model.dw.embed, a.norm, model.w.embed, targets, scale, N, V, C);
  rmsnorm_backward(a.d.dx, model.dw.norm, a.d.dnorm, a.x[L], model.w.norm, a.rstd, N, C, false);
  for (int64_t l = L - 1; l >= 0; --l) layer_backward(model, l);
  embedding_backward(model.dw.embed, a.d.dx, tokens, N, C);  // beside what the output head has added
  return scale * std::accumulate(a.losses, a.losses + N, 0.0);
}

// One step of AdamW with the gradients, clipped to a global norm of 1, which are then zero again.
void update(Model& model, double lr) {
  double squares = 0;
  for (real g : model.gradients) squares += static_cast<double>(g) * static_cast<double>(g);
  const double factor = std::min(1.0, clip / (std::sqrt(squares) + 1e-6));
  ++model.step;
  for (const Row& row : model.table) {
    const bool decays = row.kind == Kind::matrix || row.kind == Kind::kv_matrix;
    const double lr_of_row = row.kind == Kind::router ? 10 * lr : lr;  // routers learn ten times as fast
    adamw(&model.parameters[row.begin], &model.moment1[row.begin], &model.moment2[row.begin],
          &model.gradients[row.begin], row.count, model.step, lr_of_row, decays ? weight_decay : 0, factor);
  }
  std::fill(model.gradients.begin(), model.gradients.end(), real(0));
}

// -----------------------------------------------------------------------------------------------------------------
// The task: simplify an expression over the integers modulo 11, one operator at a time, as in (7+5)/4=1/4=3; where X is
// ten and the semicolon ends the solution. The prompt goes to the first =, and only what follows it is scored.

const std::string letters = "_?;+-*/()=0123456789X";  // a token is a place in it; the ids are those of data/arith.h
const std::string digits = letters.substr(10);

// Replaces one number x of the state by (a op b) of the same value: op and b are drawn, a is solved for.
std::string expand(const std::string& state, Random& random) {
  constexpr int inverse[11] = {0, 1, 6, 4, 3, 9, 2, 8, 7, 5, 10};  // b inverse[b] = 1, modulo 11
  std::vector<size_t> numbers;                                     // where they stand
  for (size_t i = 0; i < state.size(); ++i)
    if (digits.find(state[i]) != std::string::npos) numbers.push_back(i);
  const size_t at = numbers[random.below(static_cast<int64_t>(numbers.size()))];
  const auto x = static_cast<int>(digits.find(state[at]));
  const char op = "+-*/"[random.below(4)];
  const int least = op == '*' || op == '/';  // nothing divided by 0 is x, and a 0 is 0 whatever a is
  const int b = least + static_cast<int>(random.below(11 - least));
  const int a = op == '+' ? x - b + 11 : op == '-' ? x + b : op == '*' ? x * inverse[b] : x * b;
  std::string text = {digits[a % 11], op, digits[b]};
  if (state.size() > 1) text = "(" + text + ")";
  return state.substr(0, at) + text + state.substr(at + 1);
}

// A solution of T + 1 tokens. One prompt in eight is held out, drawn for tests only, the others for training only.
std::string draw_solution(Random& random, bool held_out) {
  while (true) {
    std::string state(1, digits[random.below(11)]), solution = state + ";";
    for (int i = 0; i < operators; ++i) {
      state = expand(state, random);
      solution = state + "=" + solution;
    }
    if ((stream_of(state) % 8 == 0) == held_out) return solution;
  }
}

// tokens, targets: (B, T), each target the token that follows, or -1 in the prompt.
void draw_batch(const Config& c, Random& random, bool held_out, int32_t* tokens, int32_t* targets) {
  for (int64_t b = 0; b < c.B; ++b) {
    const std::string text = draw_solution(random, held_out);
    for (int64_t t = 0; t < c.T; ++t) {
      tokens[b * c.T + t] = static_cast<int32_t>(letters.find(text[t]));
      targets[b * c.T + t] =
          t < static_cast<int64_t>(text.find('=')) ? -1 : static_cast<int32_t>(letters.find(text[t + 1]));
    }
  }
}

// The fraction of held-out samples whose every scored token is the most likely one: where greedy generation would write
// the whole solution, step for step.
double solved(Model& model, int batches) {
  const auto [B, T, C, V, L, H, K, D, F, routing] = model.c;
  std::vector<int32_t> tokens(static_cast<size_t>(B * T)), targets(tokens.size());
  std::vector<real> logits(static_cast<size_t>(B * T * V));
  Random random{1, stream_of("test")};  // always the same samples
  int64_t right = 0;
  for (int batch = 0; batch < batches; ++batch) {
    draw_batch(model.c, random, true, tokens.data(), targets.data());
    forward(model, tokens.data());
    matmul_forward(logits.data(), model.a.norm, model.w.embed, B * T, C, V);
    for (int64_t b = 0; b < B; ++b) {
      bool all = true;
      for (int64_t n = b * T; n < (b + 1) * T; ++n)
        all &= targets[n] < 0 || std::max_element(&logits[n * V], &logits[n * V] + V) - &logits[n * V] == targets[n];
      right += all;
    }
  }
  return static_cast<double>(right) / static_cast<double>(batches * B);
}

}  // namespace crossply::by_hand

#ifndef LIME_BY_HAND_TEST
int main(int argc, char** argv) {
  using namespace crossply::by_hand;
  const bool llama = argc == 2 && std::string(argv[1]) == "--llama";
  if (argc > 1 && !llama) return std::fprintf(stderr, "usage: lime_by_hand [--llama]\n"), 64;
  constexpr long steps = 3000, warmup = 100, every = 250;
  constexpr double peak_lr = 3e-3;
  Config c;
  c.routing = !llama;
  Model model(c);
  initialise(model, 42);
  std::printf("%s: %zu parameters, %.1f MB of activations\n", llama ? "LLaMA" : "LIMe", model.parameters.size(),
              1e-6 * static_cast<double>(model.activations.size() * sizeof(real)));

  std::vector<int32_t> tokens(static_cast<size_t>(c.B * c.T)), targets(tokens.size());
  Random random{42, stream_of("train")};
  const auto start = std::chrono::steady_clock::now();
  double loss = 0;  // mean of the steps since the line before
  for (long step = 1; step <= steps; ++step) {
    draw_batch(c, random, false, tokens.data(), targets.data());
    loss += forward_backward(model, tokens.data(), targets.data()) / every;
    if (!std::isfinite(loss))
      return std::fprintf(stderr, "lime_by_hand: the loss of step %ld is not finite\n", step), 77;
    // The learning rate rises linearly during the warm-up, then falls linearly to 0.
    update(model, peak_lr * std::min(static_cast<double>(step) / warmup,
                                     static_cast<double>(steps + 1 - step) / (steps + 1 - warmup)));
    if (step % every != 0) continue;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("step %4ld  loss %.4f  held-out samples solved %5.1f %%  %6.0f tokens/s\n", step, loss,
                100 * solved(model, 32), static_cast<double>(step * c.B * c.T) / seconds.count());
    std::fflush(stdout);
    loss = 0;
  }
}
#endif
