#include "kernels/block/distill.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/block/cross_entropy.h"
#include "kernels/block/cross_entropy_cpu.h"
#include "kernels/block/ops.h"
#include "kernels/block/softcap_cpu.h"
#include "kernels/cuda/cuda.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

// sum_v weight[v] * ((u[v] - u_largest) - (z[v] - z_largest)), in blocks as exponentials_of: exactly 0 where u is z.
template <class Z>
double weighted_difference(const float* weight, const Z* u, float u_largest, const Z* z, float z_largest, int64_t V) {
  double sum = 0;
  for (int64_t begin = 0; begin < V; begin += 2048) {
    Vec16 part{};
    for_vectors(begin, std::min(V, begin + 2048), [&](int64_t v, auto count) {
      Vec16 w, x, y;
      load(w, weight + v, count), load(x, u + v, count), load(y, z + v, count);
      part += w * ((x - u_largest) - (y - z_largest));
    });
    sum += static_cast<double>(sum_of_lanes(part));
  }
  return sum;
}

// One scored row: its losses and dz, from the logits z and u of student and teacher, (V). dz may be z.
template <class S, class Z, class Slope>
void distill_row(float* loss, float* ce, S* dz, const Z* z, const Z* u, int32_t target, const Distillation& how,
                 double scale, const Slope& slope, int64_t V) {
  const float largest = largest_of(z, V), u_largest = largest_of(u, V), shifted = z[target] - largest;
  const float cool = static_cast<float>(1 / how.tau);
  float* p = scratch_f32(3 * static_cast<size_t>(V), 0);
  float *s = how.tau == 1 ? p : p + V, *t = p + 2 * V;
  const double p_sum = exponentials_of(p, z, largest, V);
  const double s_sum = how.tau == 1 ? p_sum : exponentials_of(s, z, largest, V, cool);
  const double t_sum = exponentials_of(t, u, u_largest, V, cool);
  const double kl = weighted_difference(t, u, u_largest, z, largest, V) / (how.tau * t_sum) + std::log(s_sum / t_sum);
  *ce = static_cast<float>(std::log(p_sum)) - shifted;
  *loss = static_cast<float>(how.alpha * static_cast<double>(*ce) + how.kl_factor(V) * kl);

  const float hard = static_cast<float>(how.alpha * scale), of_p = hard / static_cast<float>(p_sum);
  const float of_s = static_cast<float>(how.gradient_factor(V) * scale / s_sum),
              of_t = static_cast<float>(s_sum / t_sum);
  const float at_target = ((p[target] * of_p - hard) + (s[target] - t[target] * of_t) * of_s) * slope.at(target);
  for_vectors(0, V, [=](int64_t v, auto count) {
    Vec16 x, y, w;
    load(x, p + v, count), load(y, s + v, count), load(w, t + v, count);
    x = x * of_p + (y - w * of_t) * of_s;
    slope.multiply(x, v, count);
    store(dz + v, x, count);
  });
  dz[target] = at_target;
}

// The same from logits as the products leave them, each with its model's cap; z becomes dz.
template <class S>
void distill_capped_row(float* loss, float* ce, S* z, const S* u, double softcap, double teacher_softcap,
                        int32_t target, const Distillation& how, double scale, int64_t V) {
  float* own = scratch_f32(2 * static_cast<size_t>(V), 1);
  cap_row(own, z, V, softcap);
  cap_row(own + V, u, V, teacher_softcap);
  distill_row(loss, ce, z, own, own + V, target, how, scale, CapSlope(own, softcap), V);
}

template <class S>
void distill_forward_cpu(float* losses, float* ce, S* dinp, const Grad& dweight, const S* inp, const S* weight,
                         double softcap, const int32_t* targets, const TeacherHead& teacher, const Distillation& how,
                         double scale, int64_t rows, int64_t V, int64_t C, Stream stream) {
  const int64_t width = teacher.weight.dim(1);
  const std::vector<int64_t>& scored = scored_rows(losses, dinp, targets, rows, C);
  for (int64_t n = 0; n < rows; ++n)
    if (targets[n] < 0) ce[n] = 0;
  const int64_t most = std::min<int64_t>(std::ssize(scored), chunk_rows<S>(V));
  S* u = head_scratch<S>(most * (V + width), 7);  // the teacher's logits, which products leave alone
  S* gathered = u + most * V;
  for_logits(scored, dinp, dweight, inp, weight, V, C, stream, [&](const int64_t* row, int64_t count, S* z) {
    const bool in_place = row[count - 1] - row[0] == count - 1;
    const S* x = in_place ? teacher.inp.as<S>() + row[0] * width : gathered;
    if (!in_place)
      copy_rows(
          gathered, teacher.inp.as<S>(), count, width, [](int64_t i) { return i; }, [=](int64_t i) { return row[i]; });
    matmul_forward({view(u, {count, V})}, view(x, {count, width}), {teacher.weight}, stream);
    parallel_for(count, 16384 / V, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t n = row[i];
        S* dz = z + i * V;
        if (softcap == 0 && teacher.softcap == 0)
          distill_row(losses + n, ce + n, dz, dz, u + i * V, targets[n], how, scale, NoSlope{}, V);
        else distill_capped_row(losses + n, ce + n, dz, u + i * V, softcap, teacher.softcap, targets[n], how, scale, V);
      }
    });
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

int64_t distill_scratch(int64_t rows, int64_t V, int64_t C, int64_t width, Dtype dtype) {
  const int64_t own = cross_entropy_scratch(rows, V, C, dtype), each = V + 2 * C;
  return own + own / each * (V + width);  // as many rows of the teacher
}

void distill_forward(const Tensor& losses, const Tensor& ce, const Tensor& dinp, const Grad& dweight, const Tensor& inp,
                     const Tensor& weight, double softcap, const Tensor& targets, const TeacherHead& teacher,
                     const Distillation& how, double scale, Stream stream) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = targets.numel(), width = teacher.weight.dim(1);
  CHECK_SHAPES(weight.shape.rank == 2 && inp.numel() == rows * C && losses.numel() == rows, losses, inp, weight,
               targets);
  CHECK_SHAPES(dinp.numel() == rows * C && dweight.shape == weight.shape && ce.numel() == rows, dinp, dweight, ce, inp);
  CHECK_SHAPES(teacher.weight.dim(0) == V && teacher.inp.numel() == rows * width, teacher.inp, teacher.weight, inp,
               weight);
  const int32_t* target = targets.as<int32_t>();
  for (int64_t n = 0; stream.backend != Backend::cuda && n < rows; ++n)
    CHECK_THAT(target[n] >= -1 && target[n] < V, "target ", target[n], " of row ", n, " with V = ", V);
  dispatch(
      stream, inp.dtype,
      [&] { distill_forward_cuda(losses, ce, dinp, dweight, inp, weight, softcap, targets, teacher, how, scale); },
      [&]<class S>(S) {
        distill_forward_cpu(losses.as<float>(), ce.as<float>(), dinp.as<S>(), dweight, inp.as<S>(), weight.as<S>(),
                            softcap, target, teacher, how, scale, rows, V, C, stream);
      },
      [&]<class T>(T) {
        if (!dweight.accumulate) std::fill_n(dweight.as<T>(), V * C, T(0));
        distill_ref(losses.as<T>(), ce.as<T>(), dinp.as<T>(), dweight.as<T>(), inp.as<T>(), weight.as<T>(), softcap,
                    target, teacher.inp.as<T>(), teacher.weight.as<T>(), teacher.softcap, how, scale, rows, V, C,
                    width);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

// in: the student's hidden states and head; reads: targets, and the teacher's hidden states and head.
struct Distill : Node {
  Distillation how;
  double softcap = 0, teacher_softcap = 0;

  const char* op() const override { return "distill"; }
  void forward(const Step& step, Stream stream) override {
    const Tensor weight = matmul_weight(in[1], in[0]->dtype);
    const Tensor& targets = reads[0]->tensor;
    if (!step.training)
      return cross_entropy_forward(output(), {}, {}, input(0), weight, targets, 1, stream, {.softcap = softcap});
    check_only_reader(0);
    distill_forward(output(), out[1]->tensor, dinput(0), gradient(1, step), input(0), weight, softcap, targets,
                    {reads[1]->tensor, matmul_weight(reads[2], in[0]->dtype), teacher_softcap}, how, step.grad_scale,
                    stream);
  }
  bool can_overwrite(size_t i) const override { return i == 1; }
  bool reads_bf16_copy(size_t i) const override { return i == 1 && in[0]->dtype == Dtype::bf16; }
  bool grad_in_forward() const override { return true; }
  void backward(const Step&, Stream) override {}  // done in the forward, while the logits were in cache
  double flops_of(const Value* inp) const {
    return 2.0 * static_cast<double>(inp->shape.numel()) * static_cast<double>(in[1]->shape[0]);
  }
  double flops() const override { return flops_of(in[0]); }
  double training_flops() const override { return 3 * flops() + flops_of(reads[1]); }
  ScratchBytes scratch() const override {
    ScratchBytes bytes{};
    const LogitChunk chunk = logit_chunk(reads[0]->shape.numel(), in[1]->shape[0], in[0]->dtype);
    bytes[cross_entropy_slot] = 2 * static_cast<size_t>(chunk.rows * chunk.stride) * size_of(in[0]->dtype);
    return bytes;
  }
};

}  // namespace

Distilled distill(Tape& t, const std::string& name, const LogitHead& student, const LogitHead& teacher, Value* targets,
                  const Distillation& how) {
  const Shape &inp = student.inp->shape, &taught = teacher.inp->shape, &rows = targets->shape;
  CHECK_THAT(inp[0] == rows[0] && inp[1] == rows[1] && inp[2] == student.weight->shape[1], name, ": inp ", inp.str(),
             " weight ", student.weight->shape.str(), " targets ", rows.str());
  CHECK_THAT(taught[0] == rows[0] && taught[1] == rows[1] && taught[2] == teacher.weight->shape[1] &&
                 teacher.weight->shape[0] == student.weight->shape[0],
             name, ": the teacher's inp ", taught.str(), " weight ", teacher.weight->shape.str(), ", the student's ",
             student.weight->shape.str());
  auto node =
      make_node<Distill>(name, {student.inp, student.weight}, {t.result(name, rows), t.result(name + ".ce", rows)});
  node->reads = {targets, teacher.inp, teacher.weight};
  node->how = how, node->softcap = student.softcap, node->teacher_softcap = teacher.softcap;
  const Distilled out{node->out[0], node->out[1]};
  t.record(std::move(node));
  return out;
}

}  // namespace ops
}  // namespace crossply
