#include "kernels/depth/depth_attention.h"

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/depth/mix_row.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

int64_t grain_of(const DepthAttentionSize& z) { return 16384 / (z.D * (z.G + 2 * z.S)); }
float scale_of(const DepthAttentionSize& z) { return 1.f / std::sqrt(static_cast<float>(z.D)); }

// out = (accumulate ? out : 0) + factor * x
template <class Out, class S>
void write_scaled(Out* out, const S* x, float factor, int64_t D, bool accumulate) {
  mix_row<false, Out, S>(out, nullptr, nullptr, &x, &factor, 1, 0, D, accumulate);
}

// The mean of the G queries from q on, in memory of the thread.
template <class S>
const float* mean_query(const S* q, const DepthAttentionSize& z) {
  float* mean = scratch_f32(static_cast<size_t>(z.D), 1);
  for (int64_t g = 0; g < z.G; ++g) write_scaled(mean, q + g * z.D, 1.f / static_cast<float>(z.G), z.D, g > 0);
  return mean;
}

template <class S>
void depth_attention_forward_cpu(S* out, float* weights, const S* q, const std::vector<const S*>& keys,
                                 const std::vector<const S*>& values, const DepthAttentionSize& z) {
  parallel_for(z.N, grain_of(z), [=, &keys, &values, &z](int64_t begin, int64_t end) {
    const float scale = scale_of(z);
    for (int64_t n = begin; n < end; ++n) {
      const float* mean = mean_query(q + n * z.G * z.D, z);
      float* w = weights + n * z.S;
      for (int64_t s = 0; s < z.S; ++s) w[s] = dot_row(keys[static_cast<size_t>(s)] + n * z.D, mean, z.D) * scale;
      softmax_over_sources(w, w, z.S);
      mix_row<false, S, S>(out + n * z.D, nullptr, nullptr, values.data(), w, z.S, n * z.D, z.D, false);
    }
  });
}

// Row n of all gradients.
template <class S>
struct RowBackward {
  const Grad& dq;
  const std::vector<Grad>&dkeys, &dvalues;
  const S* dout;
  const float* weights;
  const S* q;
  const std::vector<const S*>&keys, &values;
  const DepthAttentionSize& z;

  // dz of row n, in memory of the thread.
  const float* logit_gradients(int64_t n) const {
    const float* w = weights + n * z.S;
    float *dz = scratch_f32(static_cast<size_t>(z.S), 3), total = 0;
    for (int64_t s = 0; s < z.S; ++s) {
      dz[s] = dot_row(values[static_cast<size_t>(s)] + n * z.D, dout + n * z.D, z.D);
      total += w[s] * dz[s];
    }
    for (int64_t s = 0; s < z.S; ++s) dz[s] = w[s] * (dz[s] - total) * scale_of(z);
    return dz;
  }
  void row(int64_t n) const {
    const int64_t at = n * z.D, queries = n * z.G * z.D;
    const float *mean = mean_query(q + queries, z), *dz = logit_gradients(n);
    for (int64_t s = 0; s < z.S; ++s) {
      const auto i = static_cast<size_t>(s);
      write_scaled(dvalues[i].template as<S>() + at, dout + at, weights[n * z.S + s], z.D, dvalues[i].accumulate);
      write_scaled(dkeys[i].template as<S>() + at, mean, dz[s], z.D, dkeys[i].accumulate);
    }
    float* dmean = scratch_f32(static_cast<size_t>(z.D), 4);
    mix_row<false, float, S>(dmean, nullptr, nullptr, keys.data(), dz, z.S, at, z.D, false);
    for (int64_t g = 0; g < z.G; ++g)
      write_scaled(dq.as<S>() + queries + g * z.D, dmean, 1.f / static_cast<float>(z.G), z.D, dq.accumulate);
  }
};

DepthAttentionSize check_sizes(const Tensor& out, const Tensor& weights, const Tensor& q,
                               const std::vector<Tensor>& keys, const std::vector<Tensor>& values) {
  CHECK_THAT(!keys.empty() && keys.size() == values.size(), keys.size(), " keys, ", values.size(), " values");
  const auto [N, D] = rows_of(out);
  const int64_t S = static_cast<int64_t>(keys.size()), G = q.numel() / out.numel();
  CHECK_SHAPES(rows_of(q).width == D && q.numel() == N * G * D && G > 0 && weights.numel() == N * S, out, weights, q);
  for (const Tensor& key : keys) CHECK_SHAPES(key.numel() == out.numel(), out, key);
  for (const Tensor& value : values) CHECK_SHAPES(value.numel() == out.numel(), out, value);
  return {N, G, D, S};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void depth_attention_forward(const Tensor& out, const Tensor& weights, const Tensor& q, const std::vector<Tensor>& keys,
                             const std::vector<Tensor>& values, Stream stream) {
  const DepthAttentionSize z = check_sizes(out, weights, q, keys, values);
  dispatch(
      stream, out.dtype, [&] { depth_attention_forward_cuda(out, weights, q, keys, values, z); },
      [&]<class S>(S) {
        depth_attention_forward_cpu(out.as<S>(), weights.as<float>(), q.as<S>(), data_of<const S>(keys),
                                    data_of<const S, 1>(values), z);
      },
      [&]<class T>(T) {
        depth_attention_forward_ref(out.as<T>(), weights.as<T>(), q.as<T>(), data_of<const T>(keys),
                                    data_of<const T, 1>(values), z);
      });
}

void depth_attention_backward(const Grad& dq, const std::vector<Grad>& dkeys, const std::vector<Grad>& dvalues,
                              const Tensor& dout, const Tensor& weights, const Tensor& q,
                              const std::vector<Tensor>& keys, const std::vector<Tensor>& values, Stream stream) {
  const DepthAttentionSize z = check_sizes(dout, weights, q, keys, values);
  CHECK_THAT(dkeys.size() == keys.size() && dvalues.size() == values.size(), dkeys.size(), " gradients of keys, ",
             dvalues.size(), " of values, ", keys.size(), " slots");
  CHECK_SHAPES(dq.numel() == q.numel(), dq, q);
  for (const auto* gradients : {&dkeys, &dvalues})
    for (const Grad& gradient : *gradients) CHECK_SHAPES(gradient.numel() == dout.numel(), gradient, dout);
  dispatch(
      stream, dout.dtype, [&] { depth_attention_backward_cuda(dq, dkeys, dvalues, dout, weights, q, keys, values, z); },
      [&]<class S>(S) {
        const RowBackward<S> backward{dq,
                                      dkeys,
                                      dvalues,
                                      dout.as<S>(),
                                      weights.as<float>(),
                                      q.as<S>(),
                                      data_of<const S>(keys),
                                      data_of<const S, 1>(values),
                                      z};
        parallel_for(z.N, grain_of(z) / 2, [&](int64_t begin, int64_t end) {
          for (int64_t n = begin; n < end; ++n) backward.row(n);
        });
      },
      [&]<class T>(T) {
        depth_attention_backward_ref(dq, dkeys, dvalues, dout.as<T>(), weights.as<T>(), q.as<T>(),
                                     data_of<const T>(keys), data_of<const T, 1>(values), z);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct DepthAttention : Node {  // in: q, S keys, S values; saved: weights
  std::vector<Tensor> keys, values;
  std::vector<Grad> dkeys, dvalues;

  const char* op() const override { return "depth_attention"; }
  size_t slots() const { return in.size() / 2; }
  void prepare() override {
    keys.clear(), values.clear(), dkeys.clear(), dvalues.clear();
    for (size_t s = 0; s < slots(); ++s) {
      keys.push_back(input(1 + s)), values.push_back(input(1 + slots() + s));
      if (grad_modes.empty()) continue;  // a tape that only goes forward
      dkeys.push_back(gradient(1 + s)), dvalues.push_back(gradient(1 + slots() + s));
    }
  }
  void forward(const Step&, Stream stream) override {
    depth_attention_forward(output(), saved[0]->tensor, input(0), keys, values, stream);
  }
  void backward(const Step&, Stream stream) override {
    depth_attention_backward(gradient(0), dkeys, dvalues, doutput(), saved[0]->tensor, input(0), keys, values, stream);
  }
  // The logits and the sum: a key and a value are read and multiplied.
  double flops() const override {
    return 4.0 * static_cast<double>(out[0]->shape.numel()) * static_cast<double>(slots());
  }
};

}  // namespace

Value* depth_attention(Tape& t, const std::string& name, Value* q, const std::vector<Value*>& keys,
                       const std::vector<Value*>& values) {
  CHECK_THAT(!keys.empty() && keys.size() == values.size(), name, ": ", keys.size(), " keys, ", values.size(),
             " values");
  const Shape &own = values.back()->shape, &queries = q->shape;
  CHECK_THAT(own.rank == 4 && queries.rank == 4 && queries[2] % own[2] == 0 && queries[3] == own[3], name, ": queries ",
             queries.str(), ", values ", own.str());
  auto node = make_node<DepthAttention>(name, joined(joined({q}, keys), values), {t.activation(name, own)});
  const int64_t slots = static_cast<int64_t>(keys.size());
  node->saved = {t.statistic(name + ".weights", Shape{own[0], own[1], own[2], slots})};
  node->backward_reads = node->in;
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
