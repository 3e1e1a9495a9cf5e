#include "kernels/attention/depth_merge.h"

#include "kernels/cpu/cpu.h"
#include "kernels/depth/mix_row.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

int64_t grain_of(const DepthMergeSizes& z) { return 16384 / (z.D * z.group * (1 + 2 * z.S)); }

// out = (accumulate ? out : 0) + sum_i w[i] * (x[i] + at)
template <class Out, class S>
void mix(Out* out, const S* const* x, const float* w, int64_t inputs, int64_t at, int64_t D, bool accumulate) {
  mix_row<false, Out, S>(out, nullptr, nullptr, x, w, inputs, at, D, accumulate);
}

// One head of one token.
template <class S>
void merge_head(S* out, float& lse, const S* q, const std::vector<const S*>& keys, const std::vector<const S*>& values,
                int64_t slot, const DepthMergeSizes& z, float scale) {
  float *y = scratch_f32(static_cast<size_t>(z.D + z.S), 3), *w = y + z.D, max = lse;
  for (int64_t j = 0; j < z.S; ++j) {
    w[j] = scale * dot_row(q, keys[static_cast<size_t>(j)] + slot, z.D);
    max = w[j] > max || std::isnan(w[j]) ? w[j] : max;
  }
  const float of_sequence = exp_f32(lse - max);
  float sum = of_sequence;
  for (int64_t j = 0; j < z.S; ++j) sum += w[j] = exp_f32(w[j] - max);
  for (int64_t j = 0; j < z.S; ++j) w[j] /= sum;
  const float share = of_sequence / sum;
  const S* own = out;
  mix(y, &own, &share, 1, 0, z.D, false);
  mix(y, values.data(), w, z.S, slot, z.D, true);
  copy_row(out, y, z.D);
  lse = max + std::log(sum);
}

template <class S>
struct MergeBackward {
  S* dq;
  const std::vector<Grad>&dkeys, &dvalues;
  const S *dout, *out;
  const float* lse;
  const S* q;
  const std::vector<const S*>&keys, &values;
  const DepthMergeSizes& z;
  float scale;

  void row(int64_t n) const {
    const int64_t slot = n * z.D, queries = n * z.group * z.D, G = z.group;
    float *ds = scratch_f32(static_cast<size_t>(2 * G * z.S + z.S), 3), *p = ds + G * z.S, *of_head = p + G * z.S;
    const std::vector<const S*>& heads_q = heads<0>(q + queries);
    for (int64_t g = 0; g < G; ++g) {
      const S *x = q + queries + g * z.D, *dy = dout + queries + g * z.D;
      const float delta = dot_row(dy, out + queries + g * z.D, z.D), l = lse[z.lse_of(n, g)];
      for (int64_t j = 0; j < z.S; ++j) {
        const auto i = static_cast<size_t>(j);
        const float weight = exp_f32(scale * dot_row(x, keys[i] + slot, z.D) - l);
        of_head[j] = scale * weight * (dot_row(dy, values[i] + slot, z.D) - delta);
        p[j * G + g] = weight, ds[j * G + g] = of_head[j];
      }
      mix(dq + queries + g * z.D, keys.data(), of_head, z.S, slot, z.D, true);
    }
    const std::vector<const S*>& heads_dout = heads<1>(dout + queries);
    for (int64_t j = 0; j < z.S; ++j) {
      const Grad &dkey = dkeys[static_cast<size_t>(j)], &dvalue = dvalues[static_cast<size_t>(j)];
      mix(dkey.as<S>() + slot, heads_q.data(), ds + j * G, G, 0, z.D, dkey.accumulate);
      mix(dvalue.as<S>() + slot, heads_dout.data(), p + j * G, G, 0, z.D, dvalue.accumulate);
    }
  }
  // The group's rows from `first` on. The list is the thread's own.
  template <int which>
  const std::vector<const S*>& heads(const S* first) const {
    static thread_local std::vector<const S*> list;
    list.clear();
    for (int64_t g = 0; g < z.group; ++g) list.push_back(first + g * z.D);
    return list;
  }
};

DepthMergeSizes sizes_of(const Tensor& q, const Tensor& lse, const std::vector<Tensor>& keys,
                         const std::vector<Tensor>& values) {
  CHECK_THAT(!keys.empty() && keys.size() == values.size(), keys.size(), " keys, ", values.size(), " values");
  const Tensor& first = keys[0];
  CHECK_SHAPES(q.shape.rank == 4 && first.shape == Shape({q.dim(0), q.dim(1), first.dim(2), q.dim(3)}) &&
                   first.dim(2) > 0 && q.dim(2) % first.dim(2) == 0 &&
                   lse.shape == Shape({q.dim(0), q.dim(2), q.dim(1)}),
               q, lse, first);
  for (const auto* list : {&keys, &values})
    for (const Tensor& slot : *list) CHECK_SHAPES(slot.shape == first.shape, slot, first);
  return {q.dim(0), q.dim(1), q.dim(2), first.dim(2), q.dim(3), static_cast<int64_t>(keys.size())};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void depth_merge_forward(const Tensor& out, const Tensor& lse, const Tensor& q, const std::vector<Tensor>& keys,
                         const std::vector<Tensor>& values, double scale, Stream stream) {
  const DepthMergeSizes z = sizes_of(q, lse, keys, values);
  CHECK_SHAPES(out.shape == q.shape, out, q);
  const auto scale_f32 = static_cast<float>(scale);
  dispatch(
      stream, out.dtype, [&] { depth_merge_forward_cuda(out, lse, q, keys, values, z, scale_f32); },
      [&]<class S>(S) {
        const auto &k = data_of<const S>(keys), &v = data_of<const S, 1>(values);
        parallel_for(z.rows, grain_of(z), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin * z.group; i < end * z.group; ++i)
            merge_head(out.as<S>() + i * z.D, lse.as<float>()[z.lse_of(i / z.group, i % z.group)], q.as<S>() + i * z.D,
                       k, v, i / z.group * z.D, z, scale_f32);
        });
      },
      [&]<class T>(T) {
        depth_merge_forward_ref(out.as<T>(), lse.as<T>(), q.as<T>(), data_of<const T>(keys),
                                data_of<const T, 1>(values), z, scale);
      });
}

void depth_merge_backward(const Tensor& dq, const std::vector<Grad>& dkeys, const std::vector<Grad>& dvalues,
                          const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& q,
                          const std::vector<Tensor>& keys, const std::vector<Tensor>& values, double scale,
                          Stream stream) {
  const DepthMergeSizes z = sizes_of(q, lse, keys, values);
  CHECK_SHAPES(dq.shape == q.shape && dout.shape == q.shape && out.shape == q.shape, dq, dout, out, q);
  CHECK_THAT(dkeys.size() == keys.size() && dvalues.size() == values.size(), dkeys.size(), " gradients of keys, ",
             dvalues.size(), " of values, ", keys.size(), " slots");
  for (const auto* gradients : {&dkeys, &dvalues})
    for (const Grad& gradient : *gradients) CHECK_SHAPES(gradient.shape == keys[0].shape, gradient, keys[0]);
  const auto scale_f32 = static_cast<float>(scale);
  dispatch(
      stream, dq.dtype,
      [&] { depth_merge_backward_cuda(dq, dkeys, dvalues, dout, out, lse, q, keys, values, z, scale_f32); },
      [&]<class S>(S) {
        const MergeBackward<S> backward{dq.as<S>(),
                                        dkeys,
                                        dvalues,
                                        dout.as<S>(),
                                        out.as<S>(),
                                        lse.as<float>(),
                                        q.as<S>(),
                                        data_of<const S>(keys),
                                        data_of<const S, 1>(values),
                                        z,
                                        scale_f32};
        parallel_for(z.rows, grain_of(z) / 2, [&](int64_t begin, int64_t end) {
          for (int64_t n = begin; n < end; ++n) backward.row(n);
        });
      },
      [&]<class T>(T) {
        depth_merge_backward_ref(dq.as<T>(), dkeys, dvalues, dout.as<T>(), out.as<T>(), lse.as<T>(), q.as<T>(),
                                 data_of<const T>(keys), data_of<const T, 1>(values), z, scale);
      });
}

}  // namespace crossply
