#include "kernels/block/cross_entropy.h"

#include "tests/support/loss.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("cross_entropy: bf16 is at most twice as far from the exact answer as the plain bf16 computation") {
  check_bf16({{64, 31, 3}, {200, 21, 32}, {70, 5003, 17}, {5000, 21, 7}, {300, 70001, 3}}, {{64, 31, 3}, {5, 5008, 17}},
             {Scored::all, Scored::some, Scored::none}, {});
  check_bf16({{64, 31, 3}, {200, 21, 32}, {70, 5003, 17}}, {{64, 31, 3}, {5, 5008, 17}}, {Scored::all, Scored::some},
             {}, 1.5, 0.1);
}

TEST_CASE("cross_entropy: reference backward is the derivative of the reference forward") {
  for (const double magnitude : {1e-3, 1.0, 30.0})
    for (const HeadSize& size : HeadSizes{{1, 2, 1, 1}, {5, 7, 3, 2}, {4, 31, 5, 8}}) {
      Loss loss(size, size.rows == 1 ? Scored::all : Scored::some);
      loss.magnitude = magnitude;
      CAPTURE(magnitude);
      // At magnitude 30 a softmax entry can round to exactly one, hence an absolute error of one ulp in dz.
      check_derivative(loss.op(), 1e-12);
      check_losses_alone(loss, Dtype::f64, Backend::reference);
    }
}

TEST_CASE("cross_entropy: reference backward is the derivative also with a cap and a z-loss") {
  for (const double magnitude : {1e-3, 1.0, 30.0})
    for (const auto& [softcap, z_loss] : {std::pair{2.0, 0.0}, {0.0, 0.3}, {0.7, 0.05}, {30.0, 1e-4}})
      for (const HeadSize& size : HeadSizes{{1, 2, 1, 1}, {5, 7, 3, 2}, {4, 31, 5, 8}}) {
        Loss loss(size, size.rows == 1 ? Scored::all : Scored::some);
        loss.magnitude = magnitude, loss.softcap = softcap, loss.z_loss = z_loss;
        INFO(loss.str());
        CAPTURE(magnitude);
        // Relative as above. Where the cap is reached, 1 - t^2 is small and has the rounding of t, some 1e-16.
        check_derivative(loss.op(), {1e-12, 1e-15});
        check_losses_alone(loss, Dtype::f64, Backend::reference);
      }
}

TEST_CASE("cross_entropy: the z-loss is what it says, by differences of the losses and squares") {
  // Independently of the complex step, and of what the test of it takes for L.
  Loss loss({6, 13, 4}, Scored::some);
  loss.softcap = 2, loss.z_loss = 0.4, loss.magnitude = 2;
  const Op op = loss.op();
  Trial trial(op, Dtype::f64);
  const std::vector<double> before = trial["dweight"];
  trial.backward(Backend::reference);
  const auto objective = [&](const std::string& name, size_t i, double step) {
    Trial moved(op, Dtype::f64);
    moved.x[name][i] += step;
    moved.forward(Backend::reference);
    double sum = 0;
    for (size_t n = 0; n < 6; ++n) sum += loss_scale * (moved["losses"][n] + 0.4 * moved["squares"][n]);
    return sum;
  };
  for (const std::string name : {"inp", "weight"})
    for (size_t i = 0; i < trial[name].size(); ++i) {
      constexpr double h = 1e-5;  // an error of h^2, and of rounding / h: 1e-10 of numbers of about 1
      const double want = (objective(name, i, h) - objective(name, i, -h)) / (2 * h);
      const double got = trial["d" + name][i] - (name == "weight" ? before[i] : 0);
      CHECK(std::abs(got - want) <= 1e-8);
    }
}

TEST_CASE("cross_entropy: a cap far above all logits changes nothing but roundings") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend)) {
      Loss loss({23, 37, 5}, Scored::some);
      loss.kernels = kernels;
      const Op plain = loss.op();
      loss.softcap = 1e5;
      const Op op = loss.op();
      Trial want(plain, Dtype::f32), got(op, Dtype::f32);
      want.backward(backend), got.backward(backend);
      // tanh x = x to the last digit where x is below 1e-4.
      for (const std::string name : {"losses", "dinp", "dweight"}) check_close(name, got[name], want[name], 2e-6);
    }
}

TEST_CASE("cross_entropy: no logit gets beyond the cap") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend)) {
      Loss loss({7, 2, 1}, Scored::all);
      loss.kernels = kernels, loss.softcap = 3, loss.magnitude = 1e6;
      const Op op = loss.op();
      Trial trial(op, Dtype::f32);
      trial.x["weight"] = {1, -1};
      trial.forward(backend);
      for (size_t n = 0; n < 7; ++n) {  // logits 3 and -3
        const bool likely = (trial["inp"][n] > 0) == (loss.targets[n] == 0);
        CHECK(trial["losses"][n] == doctest::Approx(std::log1p(std::exp(likely ? -6.0 : 6.0))).epsilon(1e-6));
      }
    }
}

TEST_CASE("cross_entropy: the loss of equal logits is log V") {
  Loss loss({3, 11, 2}, Scored::all);
  loss.magnitude = 0;
  const Op op = loss.op();
  const Trial trial = Trial(op, Dtype::f32).forward(Backend::cpu);
  for (const double x : trial["losses"]) CHECK(std::abs(x - std::log(11.0)) < 1e-6);
}

TEST_CASE("cross_entropy: the fast backends equal the reference, whatever the number of chunks and of ignored rows") {
  // The CPU's last two need several chunks: of 4096 rows at most, and of 64 MB; a GPU's last is more than stays in
  // shared memory.
  for_sizes<HeadSize>({{1, 2, 1}, {5, 31, 3}, {200, 21, 32}, {33, 5003, 17}, {10000, 21, 7}, {260, 70001, 3}},
                      {{1, 2, 1}, {5, 31, 3}, {20, 24, 8}, {3, 5003, 7}, {2, 30011, 3}},
                      [](Backend backend, const HeadSize& size) {
                        for (const Kernels kernels : kernels_of(backend))
                          for (const Scored scored : {Scored::all, Scored::none, Scored::some, Scored::tail}) {
                            Loss loss(size, scored);
                            loss.kernels = kernels;
                            CAPTURE(static_cast<int>(scored));
                            check_f32(loss, backend);
                            check_losses_alone(loss, Dtype::f32, backend);
                          }
                      });
}

TEST_CASE("cross_entropy: with a cap and a z-loss the fast backends equal the reference") {
  for_sizes<HeadSize>({{1, 2, 1}, {5, 31, 3}, {200, 21, 32}, {33, 5003, 17}, {260, 70001, 3}},
                      {{1, 2, 1}, {5, 31, 3}, {20, 24, 8}, {3, 5003, 7}, {2, 30011, 3}},
                      [](Backend backend, const HeadSize& size) {
                        for (const Kernels kernels : kernels_of(backend))
                          for (const auto& [softcap, z_loss] : {std::pair{1.5, 0.0}, {0.0, 0.1}, {5.0, 0.03}}) {
                            Loss loss(size, size.rows == 1 ? Scored::all : Scored::some);
                            loss.kernels = kernels, loss.softcap = softcap, loss.z_loss = z_loss;
                            check_f32(loss, backend);
                            check_losses_alone(loss, Dtype::f32, backend);
                          }
                      });
}

TEST_CASE("cross_entropy: a weight's gradient that is set may hold anything before, also where no row is scored") {
  for_sizes<HeadSize>({{9, 31, 3}, {300, 70001, 3}}, {{9, 31, 3}},
                      [](Backend backend, const HeadSize& size) {  // two chunks
                        for (const Kernels kernels : kernels_of(backend))
                          for (const Scored scored : {Scored::all, Scored::some, Scored::none}) {
                            Loss loss(size, scored);
                            loss.kernels = kernels, loss.sets = true;
                            check_f32(loss, backend);
                          }
                      });
}

TEST_CASE("cross_entropy: rows with weights of their own have their losses, and gradients as often") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (const auto& [rows, V, C, width] : HeadSizes{{6, 31, 3}, {70, 21, 32}}) {
        CAPTURES(backend, kernels, rows);
        const auto numbers = [](int64_t n, uint64_t seed) { return random_vector<float>(n, seed); };
        const std::vector<float> inp = numbers(rows * C, 1), weight = numbers(V * C, 2), counts = numbers(rows, 3);
        const std::vector<int32_t> targets = make_targets({rows, V, C}, Scored::some);
        std::vector<float> losses(static_cast<size_t>(rows), NAN), squares(losses), dinp(inp.size(), NAN),
            dweight(weight.size(), 1);
        run_on(backend,
               {view(losses), view(dinp), view(dweight), view(inp), view(weight), view(targets), view(counts),
                view(squares)},
               [&](const std::vector<Tensor>& t, Stream stream) {
                 const CrossEntropyOptions options{t[6], t[7], 2.5, 0.2};
                 const auto at = [&](size_t i, Shape shape) { return Tensor{t[i].data, t[i].dtype, shape}; };
                 const Tensor head = at(4, {V, C});
                 const Grad dhead{at(2, {V, C}), true};
                 if (is_plain(kernels, stream))
                   cross_entropy_forward_plain(t[0], t[1], dhead, t[3], head, t[5], 0.5, options);
                 else cross_entropy_forward(t[0], t[1], dhead, t[3], head, t[5], 0.5, stream, options);
               });
        const auto exact = [](const std::vector<float>& x) { return convert<double>(x); };
        std::vector<double> want(losses.size()), want_squares(want), want_dinp(dinp.size()),
            want_dweight(dweight.size(), 1);
        const std::vector<double> x = exact(inp), w = exact(weight), c = exact(counts);
        cross_entropy_ref(want.data(), want_dinp.data(), want_dweight.data(), x.data(), w.data(), targets.data(), 0.5,
                          rows, V, C, {c.data(), want_squares.data(), 2.5, 0.2});
        check_close("losses", losses, want, 1e-5);
        check_close("squares", squares, want_squares, 1e-5);
        check_close("dinp", dinp, want_dinp, 1e-5);
        check_close("dweight", dweight, want_dweight, 1e-5);
      }
}

TEST_CASE("cross_entropy: logits of size 1e4 neither overflow nor lose the gradient") {
  Loss large({40, 50, 6, 4}, Scored::some);
  large.magnitude = 1e4;
  for_losses(large, {Distillation{}}, [](Backend backend, const Loss& loss) {
    // A logit of 1e4 is a float to about 1e-3, and softmax turns absolute errors into relative ones.
    check_backend(loss.op(), Dtype::f32, backend, {{"losses", 1e-5}, {"ce", 1e-5}, {"dinp", 1e-2}, {"dweight", 1e-2}});
  });
}

TEST_CASE("cross_entropy: NaN shows beneath a cap, too, and in the squares") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend)) {
      Loss loss({70, 37, 5}, Scored::all);
      loss.kernels = kernels, loss.softcap = 3, loss.z_loss = 0.1;
      check_nans(loss.op(), Dtype::f32, backend, {{"inp", {30 * 5 + 2}}},
                 {{"losses", at({30})}, {"squares", at({30})}, {"dinp", in_row(30, 5)}, {"dweight", everywhere}});
    }
}

TEST_CASE("cross_entropy: NaN in a scored row shows in its loss and gradients, in an ignored row nowhere") {
  const HeadSize size{70, 37, 5, 5};
  const Loss some(size, Scored::some);
  std::set<size_t> ignored;
  for (size_t n = 0; n < some.targets.size(); ++n)
    if (some.targets[n] == -1) ignored.insert(n);
  size_t row = 30;
  while (ignored.contains(row)) ++row;
  for_losses(some, {Distillation{}}, [&](Backend backend, const Loss& loss) {
    for (const std::string name : {"inp", "teacher"}) {
      const bool of_teacher = name == "teacher";
      if (of_teacher && !loss.how) continue;
      // A GPU's products of NaN and 0 are NaN.
      const auto spoil_ignored = [&](Trial& trial) {
        for (const size_t n : ignored)
          if (backend == Backend::cpu) trial.x[name][n * 5] = NAN;
      };
      check_f32(loss, backend, spoil_ignored);
      const Trial trial = check_nans(loss.op(), Dtype::f32, backend, {{name, {row * 5 + 2}}},
                                     {{"losses", at({row})},
                                      {"ce", of_teacher ? at({}) : at({row})},
                                      {"dinp", in_row(row, 5)},
                                      {"dweight", everywhere}},
                                     spoil_ignored);
      for (const size_t n : ignored) {
        CHECK((trial["losses"][n] == 0 && (!loss.how || trial["ce"][n] == 0)));
        for (size_t c = 0; c < 5; ++c) CHECK(trial["dinp"][n * 5 + c] == 0);
      }
    }
  });
}

TEST_CASE("cross_entropy: NaN in one row of the weight shows in every loss") {
  check_nans(Loss({9, 40, 5}, Scored::all).op(), Dtype::f32, Backend::cpu, {{"weight", {39 * 5}}},
             {{"losses", everywhere}, {"dinp", everywhere}, {"dweight", everywhere}});
}

TEST_CASE("cross_entropy: a target outside the vocabulary is an error, on a GPU its row's loss is NaN") {
  for (const int32_t wrong : {-2, 11, 1 << 30}) {
    Loss bad({3, 11, 2, 2}, Scored::all);
    bad.targets[1] = wrong, bad.targets[2] = -1;
    for_losses(bad, {Distillation{}}, [](Backend backend, const Loss& loss) {
      const Op op = loss.op();
      Trial trial(op, Dtype::f32);
      if (backend == Backend::cpu) {
        if (!loss.how) CHECK_THROWS_AS(trial.forward(backend), Error);
        CHECK_THROWS_AS(trial.backward(backend), Error);
        return;
      }
      loss.how ? trial.backward(backend) : trial.forward(backend);
      for (size_t n = 0; n < 3; ++n) {
        CHECK(std::isnan(trial["losses"][n]) == (n == 1));
        if (loss.how) CHECK(std::isnan(trial["ce"][n]) == (n == 1));
      }
      CHECK(trial["losses"][2] == 0);
    });
  }
}

TEST_CASE("cross_entropy: the thread count does not change a bit") {
  Loss loss({5000, 29, 8, 3}, Scored::some);
  check_threads(loss.op());
  loss.softcap = 2, loss.z_loss = 0.1;
  check_threads(loss.op());
  loss.how = Distillation{0.6, 2, false};
  check_threads(loss.op());
}
