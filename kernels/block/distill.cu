// Not yet run on hardware: only in the emulator.
#include "kernels/block/cross_entropy.cuh"
#include "kernels/block/cross_entropy.h"
#include "kernels/block/distill.h"
#include "kernels/block/matmul.cuh"

namespace crossply {
namespace {

// What the loss and dz are made of: 1 / tau, and what multiplies ce and kl, p and [v == target], and s - t.
struct DistillFactors {
  float cool, ce, kl, hard, soft;
};

// A block for each row of the logits z and u of student and teacher, (rows, V), rows `stride` apart: the losses, and z
// becomes dz. All passes but the first find the rows in the L2 cache. Targets as in kernels/block/cross_entropy.cu.
template <int width, class S, class Cap>
__global__ void distill_kernel(float* losses, float* ce, S* z, const S* u, const int32_t* targets,
                               DistillFactors factors, Cap cap, Cap teacher_cap, int64_t V, int64_t stride) {
  SHARED(p_parts, SoftmaxParts);
  SHARED(s_parts, SoftmaxParts);
  SHARED(t_parts, SoftmaxParts);
  const int64_t n = blockIdx.x;
  const int32_t target = targets[n];
  z += n * stride, u += n * stride;
  if (target < 0) {
    if (threadIdx.x == 0) losses[n] = ce[n] = target == -1 ? 0.f : nanf("");
    for (int64_t v = threadIdx.x * width; v < V; v += row_threads * width) store<width>(z + v, Floats<width>{});
    return;
  }
  const float at_target = target < V ? cap(to_float(z[target])) : nanf("");  // before anybody writes dz
  const float cool = factors.cool * per_ln_2;
  const OnlineSoftmax p = softmax_of_row<width>(z, V, per_ln_2, cap, p_parts),
                      t = softmax_of_row<width>(u, V, cool, teacher_cap, t_parts);
  const OnlineSoftmax s = factors.cool == 1 ? p : softmax_of_row<width>(z, V, cool, cap, s_parts);
  const float of_p = factors.hard / p.sum, of_s = factors.soft / s.sum, of_t = s.sum / t.sum;
  float kl = 0;
  for (int64_t v = threadIdx.x * width; v < V; v += row_threads * width) {
    Floats<width> x = capped<width>(load_logits<width>(z, v, V), v, V, cap);
    const Floats<width> y = capped<width>(load_logits<width>(u, v, V), v, V, teacher_cap);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float own = fmaf(cool, x[i], -s.largest), taught = fmaf(cool, y[i], -t.largest);  // exponents of 2
      const float e = exp2_fast(taught);
      if (v + i < V) kl += e * (taught - own);
      float dz = of_p * exp2_fast(fmaf(per_ln_2, x[i], -p.largest)) + of_s * (exp2_fast(own) - e * of_t);
      if (v + i == target) dz -= factors.hard;
      if constexpr (std::is_same_v<Cap, Capped>) dz *= v + i < V ? cap.slope(x[i]) : 0.f;
      x[i] = dz;
    }
    store<width>(z + v, x);
  }
  kl = block_sum<row_threads / warp_size>(kl);
  if (threadIdx.x > 0) return;
  ce[n] = ln_2 * (log2f(p.sum) - fmaf(per_ln_2, at_target, -p.largest));
  losses[n] = factors.ce * ce[n] + factors.kl * ln_2 * (kl / t.sum + log2f(of_t));
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void distill_forward_cuda(const Tensor& losses, const Tensor& ce, const Tensor& dinp, const Grad& dweight,
                          const Tensor& inp, const Tensor& weight, double softcap, const Tensor& targets,
                          const TeacherHead& teacher, const Distillation& how, double scale) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = targets.numel(), teacher_width = teacher.weight.dim(1);
  const DistillFactors factors{static_cast<float>(1 / how.tau), static_cast<float>(how.alpha),
                               static_cast<float>(how.kl_factor(V)), static_cast<float>(how.alpha * scale),
                               static_cast<float>(how.gradient_factor(V) * scale)};
  with_storage(inp.dtype, [&]<class S>(S) {
    constexpr int width = widest<S>;
    const auto [most, stride] = logit_chunk(rows, V, inp.dtype);
    S* logits = scratch<S>(2 * most * stride, cross_entropy_slot);
    S* taught = logits + most * stride;
    const Matrix z{logits, inp.dtype, stride}, u{taught, inp.dtype, stride};
    const Matrix w{weight.data, weight.dtype, C}, y{teacher.weight.data, weight.dtype, teacher_width};
    for (int64_t begin = 0; begin < rows; begin += most) {
      const int64_t count = std::min(most, rows - begin);
      const Matrix x{inp.as<S>() + begin * C, inp.dtype, C};
      const Matrix of_teacher{teacher.inp.as<S>() + begin * teacher_width, inp.dtype, teacher_width};
      multiply(z, x, transposed(w), {count, V, C}, nullptr);
      multiply(u, of_teacher, transposed(y), {count, V, teacher_width}, nullptr);
      const auto with = [&]<class Cap>(const Cap& cap, const Cap& teacher_cap) {
        launch({"distill", static_cast<uint32_t>(count), row_threads}, distill_kernel<width, S, Cap>,
               losses.as<float>() + begin, ce.as<float>() + begin, logits, taught, targets.as<int32_t>() + begin,
               factors, cap, teacher_cap, V, stride);
      };
      const bool uncapped = softcap == 0 && teacher.softcap == 0;
      uncapped ? with(Uncapped{}, Uncapped{}) : with(Capped(softcap), Capped(teacher.softcap));
      multiply({dweight.data, dweight.dtype, C}, transposed(z), x, {V, C, count},
               dweight.accumulate || begin > 0 ? dweight.data : nullptr);
      multiply({dinp.as<S>() + begin * C, dinp.dtype, C}, z, w, {count, C, V}, nullptr);
    }
  });
}

}  // namespace crossply
