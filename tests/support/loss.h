// The language-model head with its loss: the cross entropy, and the distillation from a teacher, which adds a term.
#pragma once

#include <optional>

#include "kernels/block/cross_entropy.h"
#include "kernels/block/distill.h"
#include "tests/support/op.h"

namespace crossply::test {

constexpr double loss_scale = 0.37;

struct HeadSize {
  int64_t rows, V, C, width = 1;  // width: the teacher's C
};

enum class Scored { all, none, some, tail };

// Pseudo-random targets; `some` leaves out scattered rows, `tail` a prompt at the start.
inline std::vector<int32_t> make_targets(const HeadSize& size, Scored scored) {
  const auto draw = random_vector<double>(size.rows, 77), keep = random_vector<double>(size.rows, 78);
  std::vector<int32_t> targets(static_cast<size_t>(size.rows));
  for (size_t n = 0; n < targets.size(); ++n) {
    const bool out = scored == Scored::none || (scored == Scored::some && keep[n] < 0) ||
                     (scored == Scored::tail && n < targets.size() / 3);
    targets[n] = out ? -1 : static_cast<int32_t>((draw[n] * 0.5 + 0.5) * static_cast<double>(size.V));
  }
  return targets;
}

struct Loss {
  HeadSize size;
  std::vector<int32_t> targets;
  std::optional<Distillation> how{};  // or the cross entropy
  Kernels kernels = Kernels::fast;
  double magnitude = 1;  // of the hidden states
  bool sets = false;     // the weight's gradient, or adds to it
  double softcap = 0, teacher_softcap = 0;
  double z_loss = 0;  // of the cross entropy: then there are squares, too

  Loss(const HeadSize& s, Scored scored) : size(s), targets(make_targets(s, scored)) {}
  std::string str() const {
    const Distillation d = how.value_or(Distillation{});
    return listed(size.rows, size.V, kernels, how.has_value(), d.alpha, d.tau, d.per_element, softcap, teacher_softcap,
                  z_loss);
  }
  // Distillation always takes the gradients, too: its forward is part of the backward.
  Op op() const;
};

inline Op Loss::op() const {
  const auto call = [loss = *this](const Tensors& t, Stream stream) {
    const TeacherHead teacher{t["teacher"], t["teacher_weight"], loss.teacher_softcap};
    const CrossEntropyOptions options{.squares = t["squares"], .softcap = loss.softcap, .z_loss = loss.z_loss};
    const Grad dweight{t["dweight"], !loss.sets};
    run_on(stream, {view(loss.targets)}, [&](const std::vector<Tensor>& list) {
      if (loss.how)
        distill_forward(t["losses"], t["ce"], t["dinp"], dweight, t["inp"], t["weight"], loss.softcap, list[0], teacher,
                        *loss.how, loss_scale, stream);
      else if (is_plain(loss.kernels, stream))
        cross_entropy_forward_plain(t["losses"], t["dinp"], dweight, t["inp"], t["weight"], list[0], loss_scale,
                                    options);
      else
        cross_entropy_forward(t["losses"], t["dinp"], dweight, t["inp"], t["weight"], list[0], loss_scale, stream,
                              options);
    });
  };
  Operand head = weight("weight", {size.V, size.C}), losses = in_f32(output("losses", {size.rows}));
  if (sets) head.role = OperandRole::input, head.overwrites_only = true;
  losses.cotangent = loss_scale;
  Op op{{never_added(input("inp", {size.rows, size.C}, magnitude)), head, losses}, call, call, [loss = *this](auto& z) {
          const auto [rows, V, C, width] = loss.size;
          if (loss.how)
            distill_ref<Complex>(z["losses"], z["ce"], nullptr, nullptr, z["inp"], z["weight"], loss.softcap,
                                 loss.targets.data(), z["teacher"], z["teacher_weight"], loss.teacher_softcap,
                                 *loss.how, 1, rows, V, C, width);
          else
            cross_entropy_ref<Complex>(z["losses"], nullptr, nullptr, z["inp"], z["weight"], loss.targets.data(), 1,
                                       rows, V, C, {.squares = z["squares"], .softcap = loss.softcap});
        }};
  if (!how && z_loss > 0) {
    op.values.push_back(in_f32(output("squares", {size.rows})));
    op.values.back().cotangent = loss_scale * z_loss;
  }
  if (!how) return op;
  op.forward = [](auto&, Stream) {};
  op.values.push_back(unchanged("teacher", {size.rows, size.width}, magnitude));
  op.values.push_back(unchanged("teacher_weight", {size.V, size.width}));
  op.values.push_back(saved("ce", {size.rows}));
  return op;
}

// Calls body(backend, loss) for the cross entropy by each family of kernels, and for distillations, on each backend.
template <class F>
void for_losses(Loss loss, const std::vector<Distillation>& distillations, F&& body) {
  for (const Backend backend : fast_backends()) {
    loss.how.reset();
    for (const Kernels kernels : kernels_of(backend)) {
      loss.kernels = kernels;
      INFO(loss.str());
      body(backend, loss);
    }
    for (const Distillation& how : distillations) {
      loss.how = how;
      INFO(loss.str());
      body(backend, loss);
    }
  }
}

// The losses have the same bits without gradients.
inline void check_losses_alone(const Loss& loss, Dtype dtype, Backend backend) {
  const Op op = loss.op();
  Trial alone(op, dtype), both = alone;
  CHECK(alone.forward(backend)["losses"] == both.backward(backend)["losses"]);
  if (loss.z_loss > 0) CHECK(alone["squares"] == both["squares"]);
}

// Those of the CPU and of the emulator; a GPU gets both for the cross entropy.
using HeadSizes = std::vector<HeadSize>;
inline HeadSizes sizes_for(Backend backend, const HeadSizes& of_cpu, const HeadSizes& of_gpu, bool distills) {
  if (!distills) return sizes_of(backend, of_cpu, of_gpu);
  return backend == Backend::cpu ? of_cpu : of_gpu;
}

// dinp is a float sum over V and dweight one over rows: their rounding grows with the number of terms.
inline void check_f32(const Loss& loss, Backend backend, const std::function<void(Trial&)>& prepare = {}) {
  INFO(loss.str());
  const double dinp = loss.size.V > 10000 ? 5e-5 : 1e-5;
  // A float sum of V logits' differences, beside a cross entropy of about log V: an error of some 1e-6 of that.
  const Tolerance losses = loss.how ? Tolerance{1e-5, 1e-6} : Tolerance{1e-6};
  check_backend(
      loss.op(), Dtype::f32, backend,
      {{"losses", losses}, {"squares", 1e-6}, {"ce", 1e-6}, {"dinp", {dinp, loss.how ? 1e-8 : 0}}, {"dweight", 1e-5}},
      prepare);
}

inline double round_to_bf16(double x) { return static_cast<double>(static_cast<float>(bf16(static_cast<float>(x)))); }

// What the plain bf16 computation gives, which rounds logits, before the cap, dz and dinp once each.
inline Trial plain_bf16(const Loss& loss, const Trial& before) {
  const auto [rows, V, C, width] = loss.size;
  const Distillation how = loss.how.value_or(Distillation{1, 1, false});
  Trial plain = before.exact();
  auto &dinp = plain.x["dinp"], &dweight = plain.x["dweight"], &losses = plain.x["losses"];
  dinp.assign(dinp.size(), 0), losses.assign(losses.size(), 0);
  const auto logits = [V](const double* x, const double* weight, int64_t wide, double cap) {
    std::vector<double> z(static_cast<size_t>(V));
    logits_row_ref(z.data(), x, weight, 0, V, wide);
    for (double& logit : z) logit = softcap_ref(round_to_bf16(logit), cap);
    return z;
  };
  const auto log_softmax = [V](const std::vector<double>& z, double tau) {
    std::vector<double> l(z);
    log_softmax_row_ref(l.data(), z.data(), tau, V);
    return l;
  };
  const double* head = plain["weight"].data();
  for (int64_t n = 0; n < rows; ++n) {
    const int32_t target = loss.targets[static_cast<size_t>(n)];
    if (target < 0) continue;
    const double* x = plain["inp"].data() + n * C;
    const auto z = logits(x, head, C, loss.softcap), p = log_softmax(z, 1), s = log_softmax(z, how.tau);
    const auto t = loss.how ? log_softmax(logits(plain["teacher"].data() + n * width, plain["teacher_weight"].data(),
                                                 width, loss.teacher_softcap),
                                          how.tau)
                            : s;
    std::vector<double> dz(p.size());
    double ce = 0;
    losses[static_cast<size_t>(n)] = distill_row_ref(dz.data(), &ce, p.data(), s.data(), t.data(), target, how, V);
    const double lse = z[0] - p[0];
    for (int64_t v = 0; v < V; ++v)
      for (int64_t c = 0; c < C; ++c) {
        const size_t i = static_cast<size_t>(v);
        const double of_z_loss = 2 * loss.z_loss * lse * std::exp(p[i]);
        const double d = round_to_bf16(loss_scale * (dz[i] + of_z_loss) * softcap_slope_ref(z[i], loss.softcap));
        dinp[static_cast<size_t>(n * C + c)] += d * head[v * C + c];
        dweight[static_cast<size_t>(v * C + c)] += d * x[c];
      }
  }
  for (double& x : dinp) x = round_to_bf16(x);
  return plain;
}

inline void check_bf16(const HeadSizes& of_cpu, const HeadSizes& of_gpu, const std::vector<Scored>& list,
                       const std::optional<Distillation>& how, double softcap = 0, double z_loss = 0) {
  for (const Backend backend : fast_backends())
    for (const HeadSize& size : sizes_for(backend, of_cpu, of_gpu, how.has_value()))
      for (const Kernels kernels : how ? std::vector<Kernels>{Kernels::fast} : kernels_of(backend))
        for (const Scored scored : list) {
          if (size.V > 10000 && scored != Scored::all) continue;
          Loss loss(size, scored);
          loss.how = how, loss.kernels = kernels, loss.magnitude = 2;
          loss.softcap = softcap, loss.teacher_softcap = softcap / 2, loss.z_loss = z_loss;
          INFO(loss.str());
          CAPTURES(backend, scored);
          const Op op = loss.op();
          Trial got(op, Dtype::bf16), exact = got.exact();
          const Trial plain = plain_bf16(loss, got);
          got.backward(backend), exact.backward(Backend::reference);
          for (const std::string name : {"losses", "dinp", "dweight"}) {
            CAPTURE(name);  // 1e-6: where nothing is scored nothing is rounded either
            CHECK(distance(got[name], exact[name]) <= 2 * distance(plain[name], exact[name]) + 1e-6);
          }
          if (!how) check_losses_alone(loss, Dtype::bf16, backend);
        }
}

}  // namespace crossply::test
