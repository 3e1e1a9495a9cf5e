// Attention as the tests of its kernels describe it: its sizes with a window and documents, its calls, what is checked.
#pragma once

#include <array>

#include "kernels/attention/attention.h"
#include "tests/support/op.h"

namespace crossply::test {

struct AttentionCase {
  int64_t B, T, H, K, D;
  int64_t window = 0;
  std::vector<int64_t> begins = {};  // of documents in the first row; each row's begin one position earlier
  int64_t queries() const { return B * T * H * D; }
  int64_t keys() const { return B * T * K * D; }
  AttentionSizes sizes(const int32_t* documents = nullptr) const {
    return {B, T, H, K, D, T, 0, window > 0 ? window : T, documents};
  }
  // (B, T, 2); empty where a row is one document.
  std::vector<int32_t> documents() const {
    std::vector<int32_t> all;
    for (int64_t b = 0; b < B && !begins.empty(); ++b)
      for (int64_t t = 0; t < T; ++t) {
        int64_t start = 0, end = T;
        for (const int64_t begin : begins) {
          if (begin - b <= t) start = std::max(start, begin - b);
          else end = std::min(end, begin - b);
        }
        all.push_back(static_cast<int32_t>(start)), all.push_back(static_cast<int32_t>(end));
      }
    return all;
  }
};

inline Op attention(const AttentionCase& z, double scale, double logits = 1, Kernels kernels = Kernels::fast) {
  const Shape queries{z.B, z.T, z.H, z.D}, keys{z.B, z.T, z.K, z.D};
  std::vector<Operand> values{input("q", queries, logits), input("k", keys), input("v", keys), output("out", queries),
                              saved("lse", {z.B, z.H, z.T})};
  const std::vector<int32_t> documents = z.documents();
  if (!documents.empty()) values.push_back(integers("documents", {z.B, z.T, 2}, documents));
  const auto sizes = [=](auto& t) {
    return z.sizes(documents.empty() ? nullptr : t["documents"].template as<int32_t>());
  };
  return {values,
          [=](auto& t, Stream stream) {
            if (is_plain(kernels, stream))
              attention_forward_plain(t["out"], t["lse"], t["q"], t["k"], t["v"], sizes(t), static_cast<float>(scale));
            else
              attention_forward(t["out"], t["lse"], t["q"], t["k"], t["v"], scale, {z.window, t["documents"]}, stream);
          },
          [=](auto& t, Stream stream) {
            if (is_plain(kernels, stream))
              attention_backward_plain(t.grad("q"), t.grad("k"), t.grad("v"), t["dout"], t["out"], t["q"], t["k"],
                                       t["v"], t["lse"], sizes(t), static_cast<float>(scale));
            else
              attention_backward(t.grad("q"), t.grad("k"), t.grad("v"), t["dout"], t["out"], t["q"], t["k"], t["v"],
                                 t["lse"], scale, {z.window, t["documents"]}, stream);
          },
          [=](auto& x) {
            attention_forward_ref(x["out"], x["lse"], x["q"], x["k"], x["v"],
                                  z.sizes(documents.empty() ? nullptr : documents.data()), scale);
          }};
}

inline double usual_scale(const AttentionCase& z) { return 1 / std::sqrt(static_cast<double>(z.D)); }

// What rounding to bf16 must cost: exact, but that the weights of a tile, the gradients of its scores and the results
// are rounded. The weights sum to one before they are rounded.
inline Trial plain_bf16(const AttentionCase& z, const Trial& before, double scale) {
  const auto rounded = [](double x) { return static_cast<double>(bf16(static_cast<float>(x))); };
  const int64_t B = z.B, T = z.T, H = z.H, K = z.K, D = z.D;
  const std::vector<int32_t> documents = z.documents();
  const AttentionSizes masked = z.sizes(documents.empty() ? nullptr : documents.data());
  Trial plain = before.exact();
  const double *q = plain["q"].data(), *k = plain["k"].data(), *v = plain["v"].data(), *dout = plain["dout"].data();
  for (const std::string gradient : {"dq", "dk", "dv"})
    if (!plain.added.contains(gradient)) plain.x[gradient].assign(plain[gradient].size(), 0);
  double *dq = plain.x["dq"].data(), *dk = plain.x["dk"].data(), *dv = plain.x["dv"].data();
  double *out = plain.x["out"].data(), *lse = plain.x["lse"].data();
  std::vector<double> p(T);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = ((b * T + t) * H + h) * D, key = (b * T * K + h / (H / K)) * D, stride = K * D,
                      first = masked.lower(b, t);
        double max = -INFINITY, sum = 0, delta = 0;
        for (int64_t j = first; j <= t; ++j) {
          p[j] = 0;
          for (int64_t d = 0; d < D; ++d) p[j] += scale * q[row + d] * k[key + j * stride + d];
          max = std::max(max, p[j]);
        }
        for (int64_t j = first; j <= t; ++j) sum += p[j] = std::exp(p[j] - max);
        lse[(b * H + h) * T + t] = max + std::log(sum);
        for (int64_t d = 0; d < D; ++d) {
          double all = 0;
          for (int64_t j = first; j <= t; ++j) all += rounded(p[j]) * v[key + j * stride + d];
          out[row + d] = rounded(all / sum);
          delta += dout[row + d] * out[row + d];
        }
        for (int64_t j = first; j <= t; ++j) {
          const int64_t at = key + j * stride;
          double dp = 0;
          for (int64_t d = 0; d < D; ++d) dp += dout[row + d] * v[at + d];
          const double ds_rounded = rounded(p[j] / sum * (dp - delta)), p_rounded = rounded(p[j] / sum);
          for (int64_t d = 0; d < D; ++d) {
            dq[row + d] += scale * ds_rounded * k[at + d];
            dk[at + d] += scale * ds_rounded * q[row + d];
            dv[at + d] += p_rounded * dout[row + d];
          }
        }
      }
  for (const std::string gradient : {"dq", "dk", "dv"})
    for (double& x : plain.x[gradient]) x = rounded(x);
  return plain;
}

// The largest and the root mean square difference; NaN where there is one.
inline std::array<double, 2> errors(const std::vector<double>& got, const std::vector<double>& want) {
  double largest = 0, square = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(got[i] - want[i]);
    largest = error <= largest ? largest : error;
    square += error * error;
  }
  return {largest, std::sqrt(square / static_cast<double>(want.size()))};
}

// No worse than twice the errors of the plain computation, and float's own where that one has none.
inline void check_rounding(const std::string& what, const std::vector<double>& got, const std::vector<double>& plain,
                           const std::vector<double>& want) {
  CAPTURE(what);
  const auto mine = errors(got, want), allowed = errors(plain, want);
  for (int i = 0; i < 2; ++i) CHECK(mine[i] <= 2 * allowed[i] + 1e-6);
}

// Bit i of accumulates: whether the gradient of q, k or v is added to.
inline void check_against_reference(const Op& op, Backend backend, double tolerance, unsigned accumulates = 0,
                                    const std::function<void(Trial&)>& prepare = {}) {
  INFO(op.str());
  CAPTURES(backend, accumulates);
  Trial got(op, Dtype::f32, accumulates);
  if (prepare) prepare(got);
  Trial want = got.exact();
  got.run(backend), want.run(Backend::reference);
  for (const auto& [name, type] : got.results()) check_close(name, got[name], want[name], tolerance);
}

inline void check_bf16(const AttentionCase& z, Backend backend, bool accumulate, Kernels kernels = Kernels::fast) {
  const Op op = attention(z, usual_scale(z), 3, kernels);
  INFO(op.str());
  CAPTURES(backend, accumulate, kernels);
  Trial got(op, Dtype::bf16, accumulate ? ~0u : 0u), want = got.exact();
  const Trial plain = plain_bf16(z, got, usual_scale(z));
  got.run(backend), want.run(Backend::reference);
  check_close("lse", got["lse"], want["lse"], 1e-5);
  for (const std::string name : {"out", "dq", "dk", "dv"}) check_rounding(name, got[name], plain[name], want[name]);
}

}  // namespace crossply::test
