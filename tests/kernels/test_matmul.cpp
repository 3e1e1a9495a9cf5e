#include "kernels/block/matmul.h"

#include <omp.h>

#include <cstring>
#include <optional>
#include <sstream>

#include "kernels/block/gelu.h"
#include "kernels/cpu/amx.h"
#include "kernels/cuda/arithmetic.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, C, O;
};

// A sum of K products makes K roundings, each at most half an ulp of a partial sum about as large as the result;
// independent, they grow like sqrt(K), and 5 deviations cover the largest of a million elements.
double tolerance(int64_t K) { return 5 * 0x1p-24 * std::sqrt(static_cast<double>(K)); }

// Of `count` weights on one input.
Op matmul(const Size& s, int64_t count = 1, double scale = 1, MatmulPrecision precision = MatmulPrecision::f32) {
  const int64_t rows = s.rows, C = s.C, O = s.O;
  std::vector<Operand> operands{input("inp", {rows, C}, scale)};
  for (int64_t i = 0; i < count; ++i) {
    Operand weight = input(str("weight", i), {O, C});
    weight.wide_gradient = true;
    operands.push_back(weight), operands.push_back(output(str("out", i), {rows, O}));
  }
  return {operands,
          [=](auto& t, Stream stream) {
            stream.precision = precision;
            const auto get = [&](const std::string& name) { return t[name]; };
            matmul_forward(several(count, "out", get), t["inp"], several(count, "weight", get), stream);
          },
          [=](auto& t, Stream stream) {
            stream.precision = precision;
            const auto get = [&](const std::string& name) { return t[name]; };
            matmul_backward_input(t.grad("inp"), several(count, "dout", get), several(count, "weight", get), stream);
            for (int64_t i = 0; i < count; ++i)
              matmul_backward_weight(t.grad(str("weight", i)), t[str("dout", i)], t["inp"], stream);
          },
          [=](auto& z) {
            for (int64_t i = 0; i < count; ++i)
              matmul_forward_ref(z[str("out", i)], z["inp"], z[str("weight", i)], rows, C, O);
          }};
}

void check_against_reference(const Op& op, const Size& s, Dtype dtype, bool add, Backend backend = Backend::cpu) {
  INFO(op.str());
  CAPTURES(backend, add);
  Trial got(op, dtype, add ? ~0u : 0), want = got.exact();
  got.run(backend), want.run(Backend::reference);
  const bool in_bf16 = dtype == Dtype::bf16;
  for (const auto& [name, type] : got.results()) {
    double allowed = in_bf16 ? 0x1p-8 : tolerance(name == "dinp" ? s.O : s.C);
    if (name.starts_with("dweight")) allowed = tolerance(s.rows);
    // Of several weights the CPU rounds to bf16 once, the GPU after each: sums that may be some times as large as the
    // result.
    if (name == "dinp" && in_bf16 && backend == Backend::cuda) allowed = 0x1p-6;
    check_close(name, got[name], want[name], allowed);
  }
}

std::vector<double> added_results(const Op& op) { return Trial(op, Dtype::f32, ~0u).run(Backend::cpu).all_results(); }

}  // namespace

TEST_CASE("matmul: reference backward is the derivative of the reference forward") {
  for (const double scale : {1e-3, 1.0, 1e3})
    for (const Size& size : std::vector<Size>{{1, 3, 1}, {3, 7, 5}, {4, 1, 6}}) {
      CAPTURE(scale);
      check_derivative(matmul(size, 1, scale), 1e-12);
    }
}

TEST_CASE("matmul: fast CPU equals the reference, set and added") {
  const std::vector<Size> sizes{
      {1, 1, 1},       {1, 7, 21},      {2, 33, 5},       {3, 32, 32},
      {5, 200, 67},                                                       // a few rows
      {16, 96, 130},   {17, 31, 33},    {29, 64, 32},     {63, 129, 7},   // around tiles of 14 x 32
      {18, 5, 1},      {43, 2100, 8},   {37, 1031, 5},    {20, 3, 2},     // few columns, whose sums come in blocks
      {700, 32, 21},   {4100, 32, 32},  {1500, 21, 96},   {9001, 7, 40},  // long and thin: split sums
      {64, 401, 300},  {130, 800, 64},  {70, 64, 801},    {300, 193, 161},
      {50, 770, 390},  {600, 90, 1100},  // more than one block each way
      {300, 400, 390}, {40, 513, 35},   {35, 257, 385},   {1000, 33, 190},
      {700, 200, 40},                                                       // deep, narrow, fetched ahead
      {43, 1024, 130}, {29, 200, 2048}, {370, 1024, 391}, {27, 1024, 129},  // rows a multiple of 4 KiB apart
  };
  for (const Size& size : sizes)
    for (const bool add : {false, true}) check_against_reference(matmul(size), size, Dtype::f32, add);
}

TEST_CASE("matmul: without rows only a gradient that is set is written") {
  float none = 0;
  const auto weight = random_vector<float>(20, 2), before = random_vector<float>(20, 5);
  const Tensor x = view(&none, {0, 5}), y = view(&none, {0, 4}), w = view(weight, {4, 5});
  for (const bool add : {false, true}) {
    auto dweight = before;
    matmul_forward({y}, x, {w}, Stream{});
    matmul_backward_input({x, add}, {y}, {w}, Stream{});
    matmul_backward_weight({view(dweight, {4, 5}), add}, y, x, Stream{});
    CHECK(dweight == (add ? before : std::vector<float>(20, 0.f)));
    CHECK(none == 0);
  }
}

TEST_CASE("matmul: CUDA equals the reference, set and added") {
  if (!available(Backend::cuda)) return;
  for (const Size& size : std::vector<Size>{{1, 1, 1}, {3, 32, 32}, {17, 31, 33}, {70, 64, 40}, {9, 257, 5}})
    for (const bool add : {false, true}) check_against_reference(matmul(size), size, Dtype::f32, add, Backend::cuda);
}

TEST_CASE("matmul: the forward adds to another tensor, which keeps its values") {
  const int64_t rows = 17, C = 31, O = 33;
  const auto x = random_vector<float>(rows * C, 1), w = random_vector<float>(O * C, 2),
             addend = random_vector<float>(rows * O, 6);
  const Tensor inp = view(x, {rows, C}), weight = view(w, {O, C});
  std::vector<double> want(addend.size());
  matmul_forward_ref(want.data(), convert<double>(x).data(), convert<double>(w).data(), rows, C, O);
  for (size_t i = 0; i < want.size(); ++i) want[i] += static_cast<double>(addend[i]);
  for (const Backend backend : all_backends()) {
    CAPTURES(backend);
    auto out = poisoned<float>(rows * O), plus = addend;
    const Tensor to = view(out, {rows, O}), from = view(plus, {rows, O});
    run_on(backend, {to, from, inp, weight},
           [&](auto& t, Stream stream) { matmul_forward({t[0]}, t[2], {t[3]}, stream, t[1]); });
    check_close("out", out, want, tolerance(C));
    CHECK(plus == addend);
    CHECK_THROWS_AS(matmul_forward({to}, inp, {weight}, Stream{backend}, inp), Error);
    CHECK_THROWS_AS(matmul_forward({to, to}, inp, {weight, weight}, Stream{backend}, from), Error);
  }
}

TEST_CASE("matmul: every height and width of an edge tile") {
  const auto check = [](const Size& size, bool add) { check_against_reference(matmul(size), size, Dtype::f32, add); };
  for (int64_t rows = 1; rows <= 30; ++rows) check({rows, 18, 35}, false);
  for (int64_t width = 1; width <= 70; ++width) check({20, width, width + 1}, true);
}

TEST_CASE("matmul: the result does not depend on the thread count") {
  const int threads = omp_get_max_threads();
  const std::vector<Size> sizes{{8, 300, 513},  {333, 200, 210},  {5000, 32, 33},
                                {900, 64, 700}, {1500, 140, 200}, {333, 2100, 7}};
  for (const Size& size : sizes) {
    CAPTURE(size.rows);
    const Op op = matmul(size);
    omp_set_num_threads(1);
    const std::vector<double> want = added_results(op);
    for (int n : {2, 3, 6}) {
      CAPTURE(n);
      omp_set_num_threads(n);
      CHECK(added_results(op) == want);
    }
    omp_set_num_threads(threads);
    std::vector<double> inside[2];  // and a caller that is itself one of several threads gets the same
#pragma omp parallel for num_threads(2)
    for (int i = 0; i < 2; ++i) inside[i] = added_results(op);
    for (const std::vector<double>& one : inside) CHECK(one == want);
  }
}

TEST_CASE("matmul: NaN reaches exactly the elements it belongs to") {
  for (const Size& size : std::vector<Size>{{3, 40, 37}, {50, 33, 45}, {4200, 20, 30}, {50, 2050, 5}}) {
    const auto n = static_cast<size_t>(size.rows - 2), C = static_cast<size_t>(size.C), c = C - 1;
    check_nans(matmul(size), Dtype::f32, Backend::cpu, {{"inp", {n * C + c}}},
               {{"out0", in_row(n, size.O)}, {"dweight0", [=](size_t i) { return i % C == c; }}});
  }
}

TEST_CASE("matmul: several weights on one input give the bits of one after the other, for any number of threads") {
  for (const int64_t rows : {5, 300, 1700}) {
    CAPTURE(rows);
    const int64_t C = 70, widths[] = {40, 3, 129};
    const auto inp = random_vector<float>(rows * C, 1);
    std::vector<std::vector<float>> weights, douts;
    for (const int64_t O : widths) {
      weights.push_back(random_vector<float>(O * C, static_cast<uint64_t>(O)));
      douts.push_back(random_vector<float>(rows * O, static_cast<uint64_t>(O + 1)));
    }
    auto compute = [&](bool together) {
      auto out = poisoned<float>(rows * (40 + 3 + 129)), dinp = poisoned<float>(rows * C);
      const Tensor x = view(inp, {rows, C}), dx = view(dinp, {rows, C});
      std::vector<Tensor> outs, w, d;
      int64_t at = 0;
      for (size_t i = 0; i < 3; ++i) {
        outs.push_back(view(out.data() + at, {rows, widths[i]}));
        w.push_back(view(weights[i], {widths[i], C}));
        d.push_back(view(douts[i], {rows, widths[i]}));
        at += rows * widths[i];
      }
      if (together) {
        matmul_forward(outs, x, w, Stream{});
        matmul_backward_input({dx, false}, d, w, Stream{});
      }
      for (size_t i = 0; i < 3 && !together; ++i) {
        matmul_forward({outs[i]}, x, {w[i]}, Stream{});
        matmul_backward_input({dx, i > 0}, {d[i]}, {w[i]}, Stream{});
      }
      return joined(out, dinp);
    };
    const std::vector<float> one = compute(false);
    CHECK(compute(true) == one);
    CHECK(std::none_of(one.begin(), one.end(), [](float v) { return std::isnan(v); }));
    check_same_bits_on_any_threads<float>([&] { return compute(true); });
  }
}

TEST_CASE("matmul: any rank flattens, wrong shapes are refused, the reference backend serves f64") {
  const auto inp = random_vector<double>(24, 1), weight = random_vector<double>(10, 2);
  auto out = poisoned<double>(60), want = poisoned<double>(60);
  matmul_forward({view(out, {2, 2, 3, 5})}, view(inp, {2, 2, 6}), {view(weight, {5, 2})}, Stream{Backend::reference});
  matmul_forward_ref(want.data(), inp.data(), weight.data(), 12, 2, 5);
  check_close("out", out, want, 1e-15);  // the same loops, perhaps compiled to other roundings
  const Tensor w = view(weight, {5, 2});
  CHECK_THROWS_AS(matmul_forward({view(out, {12, 5})}, view(inp, {12, 2}), {w}, Stream{Backend::cpu}),
                  Error);  // f64 has no fast path
  std::vector<float> x32(24), y32(60), w32(10);
  const Tensor x = view(x32, {12, 2}), y = view(y32, {12, 5}), wrong = view(w32, {3, 2});
  for (Backend backend : {Backend::reference, Backend::cpu}) {
    CHECK_THROWS_AS(matmul_forward({y}, x, {wrong}, Stream{backend}), Error);
    CHECK_THROWS_AS(matmul_backward_input({x, false}, {y}, {wrong}, Stream{backend}), Error);
    CHECK_THROWS_AS(matmul_backward_weight({wrong, true}, y, x, Stream{backend}), Error);
    CHECK_THROWS_AS(matmul_forward({y}, x, {view(w32, {10})}, Stream{backend}), Error);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// bf16, and f32 in three products of bf16. The products themselves are tested in test_gemm_bf16.cpp.

TEST_CASE("matmul: bf16 tensors, with dweight in f32, equal the reference on the same numbers") {
  for (const auto& [backend, size] : std::vector<std::pair<Backend, Size>>{{Backend::cpu, {1, 7, 21}},
                                                                           {Backend::cpu, {5, 200, 67}},
                                                                           {Backend::cpu, {63, 129, 7}},
                                                                           {Backend::cpu, {1500, 21, 96}},
                                                                           {Backend::cpu, {300, 193, 161}},
                                                                           {Backend::cuda, {1, 7, 21}},
                                                                           {Backend::cuda, {5, 200, 67}},
                                                                           {Backend::cuda, {63, 129, 7}}}) {
    if (!available(backend)) continue;
    for (const bool add : {false, true}) check_against_reference(matmul(size, 2), size, Dtype::bf16, add, backend);
  }
}

// Three layers on one input, as a planner lays their outputs, and weights that lie as far apart as a table's: one
// product on a GPU, unless something is elsewhere, when the numbers are the same.
TEST_CASE_TEMPLATE("matmul: on a GPU layers whose outputs are neighbours are one product", T, float, bf16) {
  if (!available(Backend::cuda)) return;
  const int64_t rows = 9, C = 16, O = 24, count = 3, unit = static_cast<int64_t>(place_unit / sizeof(T));
  const int64_t place = (rows * O + unit - 1) / unit * unit, from_weight = O * C + 64, from_bias = O + 8;
  const auto inp = random_vector<T>(rows * C, 1), weights = random_vector<T>(count * from_weight, 2),
             douts = random_vector<T>(count * place, 3), biases = random_vector<T>(count * from_bias, 4);
  const auto before = random_vector<float>(count * from_weight, 5);
  struct Form {
    const char* name;
    int64_t forward, backward;  // most products in one
  };
  for (const Form& form : std::vector<Form>{{"all", 3, 3},
                                            {"an output elsewhere", 2, 2},
                                            {"no bias for one", 2, 3},
                                            {"weights not as far apart", 2, 2},
                                            {"no biases", 3, 3},
                                            {"biases not at 16 bytes", 1, 3},
                                            {"not told so", 3, 3}}) {
    for (const bool add : {false, true}) {
      const std::string name = form.name;
      const bool contiguous = name != "not told so";
      CAPTURES(form.name, add);
      const OnDevice<T> x(inp), w(joined(weights, weights)), dy(joined(douts, douts)), b(biases),
          y(poisoned<T>(2 * count * place));
      const OnDevice<float> dw(joined(before, before));
      std::vector<Tensor> outs, d, ws, dws, bs;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = i * place + (name == "an output elsewhere" && i == 2 ? unit : 0);
        const int64_t of = i * from_weight + (name == "weights not as far apart" && i == 2 ? 64 : 0);
        outs.push_back(view(y.data + at, {rows, O})), d.push_back(view(dy.data + at, {rows, O}));
        ws.push_back(view(w.data + of, {O, C})), dws.push_back(view(dw.data + of, {O, C}));
        const int64_t of_bias = i * from_bias + (name == "biases not at 16 bytes" ? i : 0);
        bs.push_back(name == "no bias for one" && i == 2 ? Tensor{} : view(b.data + of_bias, {O}));
      }
      if (name == "no biases") bs.clear();
      const auto max_at_once = [](auto&& work) {
        forget_choices();
        work();
        int64_t most = 0;
        for (const auto& [kind, choice] : choices_as_text()) {
          std::istringstream numbers(kind);
          int64_t M = 0, N = 0, K = 0, batch = 0;
          numbers >> M >> N >> K >> batch;
          REQUIRE(batch > 0);
          most = std::max(most, batch);
        }
        return most;
      };
      const Stream stream{Backend::cuda};
      CHECK(max_at_once([&] {
              matmul_forward(outs, view(x.data, {rows, C}), ws, stream, {}, bs, {}, contiguous);
            }) == (contiguous ? form.forward : 1));
      CHECK(max_at_once([&] {
              matmul_backward_weights(dws, add, d, view(x.data, {rows, C}), stream, contiguous);
            }) == (contiguous ? form.backward : 1));
      const auto host_w = w.host(), host_d = dy.host(), got = y.host();
      const auto got_dw = dw.host();
      const auto place_of = [](const auto& tensor, const auto& memory) {
        return static_cast<size_t>(static_cast<decltype(memory.data)>(tensor.data) - memory.data);
      };
      for (size_t i = 0; i < count; ++i) {
        std::vector<double> want, want_dw;
        for (int64_t n = 0; n < rows; ++n)
          for (int64_t o = 0; o < O; ++o) {
            double sum = bs.empty() || bs[i].data == nullptr
                             ? 0
                             : static_cast<double>(biases[place_of(bs[i], b) + static_cast<size_t>(o)]);
            for (int64_t c = 0; c < C; ++c)
              sum += static_cast<double>(inp[static_cast<size_t>(n * C + c)]) *
                     static_cast<double>(host_w[place_of(ws[i], w) + static_cast<size_t>(o * C + c)]);
            want.push_back(sum);
          }
        for (int64_t o = 0; o < O; ++o)
          for (int64_t c = 0; c < C; ++c) {
            const size_t at = place_of(dws[i], dw) + static_cast<size_t>(o * C + c);
            double sum = add ? static_cast<double>(joined(before, before)[at]) : 0;
            for (int64_t n = 0; n < rows; ++n)
              sum += static_cast<double>(inp[static_cast<size_t>(n * C + c)]) *
                     static_cast<double>(host_d[place_of(d[i], dy) + static_cast<size_t>(n * O + o)]);
            want_dw.push_back(sum);
          }
        const auto part = [](const auto& list, size_t from, size_t n) {
          return std::vector(list.begin() + static_cast<std::ptrdiff_t>(from),
                             list.begin() + static_cast<std::ptrdiff_t>(from + n));
        };
        check_close("out", part(got, place_of(outs[i], y), want.size()), want,
                    std::is_same_v<T, bf16> ? 0x1p-8 : tolerance(C));
        check_close("dweight", part(got_dw, place_of(dws[i], dw), want_dw.size()), want_dw, tolerance(rows));
      }
    }
  }
}

// On a CPU and on older GPUs a pass of its own over what was rounded, from sm_90 on within the product.
TEST_CASE("matmul: the gelu of an output, and the gradient of what went into one") {
  const int64_t rows = 9, C = 16, O = 24;
  const auto inp = random_vector<bf16>(rows * C, 1), weight = random_vector<bf16>(O * C, 2),
             dout = random_vector<bf16>(rows * O, 3), before = random_vector<bf16>(rows * C, 4);
  const auto bias = random_vector<bf16>(O, 5);
  const auto wide_bias = convert<float>(bias);
  std::vector<double> x, y, dx;
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t o = 0; o < O; ++o) {
      double sum = static_cast<double>(bias[static_cast<size_t>(o)]), f;
      for (int64_t c = 0; c < C; ++c)
        sum += static_cast<double>(inp[static_cast<size_t>(n * C + c)]) *
               static_cast<double>(weight[static_cast<size_t>(o * C + c)]);
      gelu_forward_ref(&f, &sum, 1, GeluKind::tanh);
      x.push_back(sum), y.push_back(f);
    }
    for (int64_t c = 0; c < C; ++c) {
      double sum = 0, of = static_cast<double>(before[static_cast<size_t>(n * C + c)]), d;
      for (int64_t o = 0; o < O; ++o)
        sum += static_cast<double>(dout[static_cast<size_t>(n * O + o)]) *
               static_cast<double>(weight[static_cast<size_t>(o * C + c)]);
      gelu_backward_ref(&d, &sum, &of, 1, GeluKind::tanh, false);
      dx.push_back(d);
    }
  }
  for (const std::string form : {"cpu", "gpu", "hopper"}) {
    CAPTURE(form);
    const Backend backend = form == "cpu" ? Backend::cpu : Backend::cuda;
    if (!available(backend) || (form == "hopper" && !emulated)) continue;
    std::optional<WithHopper> hopper;
    if (form == "hopper") hopper.emplace();
    auto out = poisoned<bf16>(rows * O), activated = poisoned<bf16>(rows * O), dinp = poisoned<bf16>(rows * C);
    run_on(Stream{backend},
           {view(out, {rows, O}), view(activated, {rows, O}), view(dinp, {rows, C}), view(inp, {rows, C}),
            view(weight, {O, C}), view(dout, {rows, O}), view(before, {rows, C}),
            backend == Backend::cpu ? view(wide_bias, {O}) : view(bias, {O})},
           [&](auto& t) {
             matmul_forward({t[0]}, t[3], {t[4]}, Stream{backend}, {}, {t[7]}, t[1]);
             matmul_backward_input({t[2], false}, {t[5]}, {t[4]}, Stream{backend}, t[6]);
             CHECK_THROWS_AS(matmul_backward_input({t[2], true}, {t[5]}, {t[4]}, Stream{backend}, t[6]), Error);
             CHECK_THROWS_AS(matmul_forward({t[0]}, t[3], {t[4]}, Stream{backend}, t[1], {}, t[1]), Error);
           });
    // A rounding of 2^-9 of the largest; the CPU's before the bias, and one before gelu, come on top.
    const bool once = form == "hopper";
    check_close("out", out, x, (backend == Backend::cpu ? 2 : 1) * 0x1p-8);
    check_close("activated", activated, y, (once ? 1 : backend == Backend::cpu ? 3 : 2) * 0x1p-8);
    check_close("dinp", dinp, dx, (once ? 1 : 2) * 0x1p-8);
    if (backend == Backend::cpu) continue;
    // It is this that tells the two ways apart: gelu of what was rounded, or rounded once. Which of them a GPU takes
    // depends on its generation and its cuBLASLt.
    if (!emulated) continue;
    auto of_rounded = poisoned<bf16>(rows * O);
    run_on(backend, {view(of_rounded, {rows, O}), view(out, {rows, O})},
           [](auto& t, Stream stream) { gelu_forward(t[0], t[1], GeluKind::tanh, stream); });
    const bool same = std::memcmp(of_rounded.data(), activated.data(), activated.size() * sizeof(bf16)) == 0;
    CHECK(same == (form == "gpu"));
  }
}

TEST_CASE_TEMPLATE("matmul: biases, of all weights or some, and beside an addend", T, float, bf16) {
  const int64_t rows = 9, C = 31, O = 12;
  const auto inp = random_vector<T>(rows * C, 1), weight = random_vector<T>(2 * O * C, 2),
             addend = random_vector<T>(rows * O, 3);
  const auto bias = random_vector<T>(2 * O, 4);
  const auto wide_bias = convert<AccumulationType<T>>(bias);  // on a CPU
  for (const Backend backend : fast_backends()) {
    for (const bool added : {false, true}) {  // one weight with an addend, or two of which the second has a bias
      CAPTURES(backend, added);
      auto out = poisoned<T>(2 * rows * O);
      const Tensor row = backend == Backend::cpu ? view(wide_bias, {2, O}) : view(bias, {2, O});
      run_on(
          Stream{backend},
          {view(out, {2, rows, O}), view(inp, {rows, C}), view(weight, {2, O, C}), view(addend, {rows, O}), row},
          [&](auto& t) {
            const auto part = [&](const Tensor& of, int64_t i, Shape shape) {
              return Tensor{static_cast<std::byte*>(of.data) + i * shape.numel() * size_of(of.dtype), of.dtype, shape};
            };
            const auto of = [&](int i) { return part(t[2], i, {O, C}); };
            const auto to = [&](int i) { return part(t[0], i, {rows, O}); };
            const Tensor last = part(t[4], 1, {O});
            if (added) matmul_forward({to(1)}, t[1], {of(1)}, Stream{backend}, t[3], {last});
            else matmul_forward({to(0), to(1)}, t[1], {of(0), of(1)}, Stream{backend}, {}, {Tensor{}, last});
          });
      for (int64_t i = added; i < 2; ++i) {
        std::vector<double> want;
        for (int64_t n = 0; n < rows; ++n)
          for (int64_t o = 0; o < O; ++o) {
            double sum = i == 1 ? static_cast<double>(bias[static_cast<size_t>(O + o)]) : 0;
            if (added) sum += static_cast<double>(addend[static_cast<size_t>(n * O + o)]);
            for (int64_t c = 0; c < C; ++c)
              sum += static_cast<double>(inp[static_cast<size_t>(n * C + c)]) *
                     static_cast<double>(weight[static_cast<size_t>((i * O + o) * C + c)]);
            want.push_back(sum);
          }
        const std::vector<T> got(out.begin() + i * rows * O, out.begin() + (i + 1) * rows * O);
        // A CPU rounds a product to bf16 before each of the two is added.
        check_close("out", got, want, std::is_same_v<T, bf16> ? (backend == Backend::cpu ? 3 : 1) * 0x1p-8 : 1e-6);
      }
    }
  }
}

TEST_CASE("matmul: f32 by bf16x3 is what the stream asks for, and close to f32") {
  for (const Size& size : std::vector<Size>{{5, 200, 67}, {700, 32, 21}, {300, 193, 161}}) {
    const Op split = matmul(size, 1, 1, MatmulPrecision::bf16x3), whole = matmul(size);
    const Trial got = Trial(split, Dtype::f32, ~0u).run(Backend::cpu);
    const Trial want = Trial(whole, Dtype::f32, ~0u).run(Backend::cpu);
    for (const char* name : {"out0", "dinp", "dweight0"})
      check_close(name, got[name], want[name], 4e-5);  // as in test_gemm_bf16.cpp
    if (matrix_unit() == MatrixUnit::amx) CHECK(got.all_results() != want.all_results());
    const MatrixUnit unit = matrix_unit();
    use_matrix_unit(MatrixUnit::none);
    CHECK(added_results(split) == want.all_results());
    use_matrix_unit(unit);
  }
}

TEST_CASE(
    "matmul: on a GPU, narrow bf16 rows beside wide ones are multiplied in whole accesses, with the same results") {
  if (!available(Backend::cuda)) return;
  constexpr int64_t bf16_type = static_cast<int64_t>(Dtype::bf16);
  struct Narrow {
    Size size;
    bool padded;
  };
  for (const Narrow& n : std::vector<Narrow>{{{9, 64, 3}, true},    // gates of 3 heads
                                             {{17, 96, 12}, true},  // and of 12
                                             {{5, 256, 13}, true},
                                             {{2, 32, 1}, true},
                                             {{6, 56, 12}, false},  // not small beside the input
                                             {{4, 67, 3}, false},   // whose rows are no better
                                             {{5, 64, 16}, false}}) {
    CAPTURES(n.size.rows, n.size.C, n.size.O);
    forget_choices();
    for (const bool add : {false, true})
      check_against_reference(matmul(n.size, 2), n.size, Dtype::bf16, add, Backend::cuda);
    bool few_columns = false;
    for (const auto& [product, choice] : choices_as_text()) {
      std::vector<int64_t> kind;
      for (const std::string& number : split_words(product)) kind.push_back(std::stoll(number));
      REQUIRE(kind.size() == ProductKind().size());
      for (const size_t matrix : {5, 9, 13}) few_columns |= kind[matrix] / 2 == bf16_type && kind[matrix + 1] % 8 != 0;
      for (const size_t size : {0, 1, 2}) few_columns |= kind[size] == n.size.O && n.size.O % 8 != 0;
    }
    CHECK(few_columns == (!n.padded && n.size.O != 16));
  }
}
