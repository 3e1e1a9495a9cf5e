#include "kernels/block/distill.h"

#include "tests/support/loss.h"

using namespace crossply;
using namespace crossply::test;

namespace {

const std::vector<Distillation> ways = {{0.6, 1, false}, {0.6, 1, true}, {0, 1, false}, {1, 1, false},
                                        {0.3, 2, false}, {0, 0.5, true}, {1, 3, false}};

}  // namespace

TEST_CASE("distill: bf16 is at most twice as far from the exact answer as the plain bf16 computation") {
  for (const Distillation& how : {Distillation{0.6, 1, false}, Distillation{0.3, 2, false}})
    check_bf16({{64, 31, 3, 4}, {200, 21, 32, 8}, {40, 5003, 17, 3}}, {{64, 31, 3, 8}, {5, 5008, 16, 8}},
               {Scored::all, Scored::some}, how);
  check_bf16({{64, 31, 3, 4}, {200, 21, 32, 8}}, {{64, 31, 3, 8}}, {Scored::all, Scored::some},
             Distillation{0.3, 2, false}, 1.5);
}

TEST_CASE("distill: reference backward is the derivative of the reference forward") {
  for (const double magnitude : {1e-3, 1.0, 30.0})
    for (const HeadSize& size : HeadSizes{{1, 2, 1, 1}, {5, 7, 3, 2}, {4, 31, 5, 8}})
      for (const Distillation& how : ways) {
        Loss loss(size, size.rows == 1 ? Scored::all : Scored::some);
        loss.how = how, loss.magnitude = magnitude;
        INFO(loss.str());
        CAPTURE(magnitude);
        check_derivative(loss.op(), {1e-11, 1e-13});  // with tau = 1/2 logits of 30 are 60
      }
}

TEST_CASE("distill: reference backward is the derivative also with caps of student and teacher, or one of them") {
  for (const double magnitude : {1e-3, 1.0, 30.0})
    for (const auto& [own, taught] : {std::pair{2.0, 0.7}, {1.5, 0.0}, {0.0, 1.5}})
      for (const Distillation& how : ways) {
        Loss loss({5, 7, 3, 2}, Scored::some);
        loss.how = how, loss.magnitude = magnitude, loss.softcap = own, loss.teacher_softcap = taught;
        INFO(loss.str());
        CAPTURE(magnitude);
        check_derivative(loss.op(), {1e-11, 1e-13});
      }
}

TEST_CASE("distill: with caps the fast backends equal the reference") {
  const HeadSizes of_cpu{{1, 2, 1, 1}, {5, 31, 3, 7}, {200, 21, 32, 16}, {33, 5003, 17, 9}};
  const HeadSizes of_gpu{{1, 2, 1, 1}, {5, 31, 3, 7}, {20, 24, 8, 16}, {3, 5003, 7, 2}};
  for (const Backend backend : fast_backends())
    for (const HeadSize& size : sizes_for(backend, of_cpu, of_gpu, true))
      for (const auto& [own, taught] : {std::pair{2.0, 0.7}, {1.5, 0.0}, {0.0, 1.5}})
        for (const Distillation& how : ways) {
          Loss loss(size, size.rows == 1 ? Scored::all : Scored::some);
          loss.how = how, loss.softcap = own, loss.teacher_softcap = taught;
          check_f32(loss, backend);
        }
}

TEST_CASE("distill: the fast backends equal the reference, whatever the number of chunks and of rows not scored") {
  // The CPU's last two need several chunks.
  const HeadSizes of_cpu{{1, 2, 1, 1},      {5, 31, 3, 7},    {200, 21, 32, 16},
                         {33, 5003, 17, 9}, {5000, 21, 7, 5}, {140, 130001, 3, 2}};
  const HeadSizes of_gpu{{1, 2, 1, 1}, {5, 31, 3, 7}, {20, 24, 8, 16}, {3, 5003, 7, 2}};
  for (const Backend backend : fast_backends())
    for (const HeadSize& size : sizes_for(backend, of_cpu, of_gpu, true))
      for (const Distillation& how : ways)
        for (const bool some : {false, true}) {
          const bool large = size.V > 10000 || size.rows > 1000;
          if (large && (some != how.per_element || how.alpha == 1)) continue;
          Loss loss(size, some ? Scored::some : Scored::all);
          loss.how = how;
          CAPTURE(some);
          check_f32(loss, backend);
        }
}

TEST_CASE("distill: alpha 1 is the cross entropy, whatever the teacher") {
  for (const Backend backend : all_backends()) {
    CAPTURE(static_cast<int>(backend));
    const bool exact = backend == Backend::reference;
    const Dtype dtype = exact ? Dtype::f64 : Dtype::f32;
    Loss loss({23, 37, 5, 3}, Scored::some);
    const Op alone = loss.op();
    loss.how = Distillation{1, 1, false};
    const Op op = loss.op();
    Trial want(alone, dtype), got(op, dtype);
    want.backward(backend), got.backward(backend);
    check_close("losses", got["losses"], want["losses"], exact ? 1e-12 : 0);
    check_close("ce", got["ce"], want["losses"], exact ? 1e-12 : 0);
    for (const std::string gradient : {"dinp", "dweight"})
      check_close(gradient, got[gradient], want[gradient], exact ? 1e-12 : 1e-6);
  }
}

TEST_CASE("distill: of a teacher with its own logits a student learns nothing, exactly") {
  for (const Backend backend : all_backends())
    for (const double tau : {1.0, 2.5}) {
      CAPTURES(backend, tau);
      Loss loss({19, 45, 6, 6}, Scored::some);
      loss.how = Distillation{0, tau, false}, loss.magnitude = 3;
      const Op op = loss.op();
      Trial trial(op, backend == Backend::reference ? Dtype::f64 : Dtype::f32);
      trial.x["teacher"] = trial["inp"], trial.x["teacher_weight"] = trial["weight"];
      const auto before = trial["dweight"];
      trial.backward(backend);
      for (const std::string name : {"losses", "dinp"})
        for (const double x : trial[name]) CHECK(x == 0);
      CHECK(trial["dweight"] == before);
      for (size_t n = 0; n < loss.targets.size(); ++n) CHECK((trial["ce"][n] > 0) == (loss.targets[n] >= 0));
    }
}

TEST_CASE("distill: by element of a real vocabulary a new student's objective is alpha times its cross entropy") {
  // A student that knows nothing, and a teacher that is sure.
  const auto beside = [](bool per_element) {
    Loss loss({8, 50304, 4, 4}, Scored::all);
    loss.how = Distillation{0.6, 1, per_element};
    const Op op = loss.op();
    Trial trial(op, Dtype::f32);
    for (double& x : trial.x["inp"]) x *= 0.02;
    for (double& x : trial.x["teacher"]) x *= 5;
    trial.backward(Backend::cpu);
    for (size_t n = 0; n < 8; ++n) trial.x["losses"][n] -= 0.6 * trial["ce"][n];
    return trial["losses"];
  };
  for (const double x : beside(true)) CHECK(std::abs(x) < 1e-3);
  double by_token = 0;
  for (const double x : beside(false)) by_token += x / 8;
  CHECK(by_token > 0.5);
}
