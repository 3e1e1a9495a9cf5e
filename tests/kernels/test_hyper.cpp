#include "kernels/depth/streams/hyper.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct HyperVariant {
  std::string name;
  bool dynamic;
  HyperNorm norm;
  double eps;
};
const std::vector<HyperVariant> kinds = {{"static", false, HyperNorm::layernorm_no_affine, 1e-5},
                                         {"layernorm_no_affine", true, HyperNorm::layernorm_no_affine, 1e-5},
                                         {"layernorm", true, HyperNorm::layernorm, 1e-5},
                                         {"rmsnorm", true, HyperNorm::rmsnorm, 1e-6}};

const HyperWeights<const char*> names{"static_alpha", "static_beta", "alpha_proj",  "beta_proj",
                                      "alpha_scale",  "beta_scale",  "norm_weight", "norm_bias"};

struct Size {
  int64_t B, T, E, C;
  int64_t rows() const { return B * T; }
  int64_t streams() const { return B * T * E * C; }
  int64_t x() const { return B * T * C; }
};

// Those of `names` that the kind has. Scales around 1 and projections of size 1/sqrt(C): the tanhs are neither flat nor
// linear.
std::vector<Operand> parameters(const HyperVariant& kind, int64_t E, int64_t C) {
  const auto around = [](double middle, Operand operand) {
    for (const double x : random_vector<double>(operand.shape.numel(), 10)) operand.given.push_back(x + middle);
    return operand;
  };
  const double spread = 1.5 / std::sqrt(static_cast<double>(C));
  std::vector<Operand> list{parameter("static_alpha", {E, E + 1}), parameter("static_beta", {E})};
  if (!kind.dynamic) return list;
  for (const Operand& one : {parameter("alpha_proj", {C, E + 1}, spread), parameter("beta_proj", {C}, spread),
                             around(0.7, parameter("alpha_scale", {1})), around(0.7, parameter("beta_scale", {1}))})
    list.push_back(one);
  if (kind.norm != HyperNorm::layernorm_no_affine) list.push_back(around(1, parameter("norm_weight", {C})));
  if (kind.norm == HyperNorm::layernorm) list.push_back(parameter("norm_bias", {C}));
  return list;
}

// scale, mean: of the streams.
Op read(const Size& s, const HyperVariant& kind, double scale = 1, double mean = 0) {
  const int64_t B = s.B, T = s.T, E = s.E, C = s.C;
  Operand streams = input("streams", {B, T, E, C});
  for (const double x : random_vector<double>(s.streams(), 1, scale)) streams.given.push_back(x + mean);
  std::vector<Operand> operands{streams, output("out", {B, T, C}), in_f32(output("coef", {B, T, E, E + 2}))};
  if (kind.dynamic) operands.push_back(saved("stats", {B, T, E, E + 4}));
  const auto weights = [](const auto& t) { return mapped(names, [&](const char* name) { return t[name]; }); };
  return {joined(operands, parameters(kind, E, C)),
          [=](auto& t, Stream stream) {
            hyper_read_forward(t["out"], t["coef"], t["stats"], t["streams"], weights(t), kind.norm, kind.eps, stream);
          },
          [=](auto& t, Stream stream) {
            const auto d = mapped(names, [&](const char* name) { return t[std::string("d") + name]; });
            hyper_read_backward(t.grad("streams"), d, t["dout"], t["dcoef"], t["streams"], t["coef"], t["stats"],
                                weights(t), kind.norm, stream);
          },
          [=](auto& z) {
            hyper_read_forward_ref(z["out"], z["coef"], z["stats"], z["streams"], weights(z), kind.norm, s.rows(), E, C,
                                   kind.eps);
          }};
}

// The sum of |dA tanh|, or of |db tanh|: of the terms of a scale's gradient. After the backward.
double size_of_scale_terms(const Trial& a, const Size& s, bool beta) {
  const int64_t E = s.E, C = s.C;
  double sum = 0;
  for (int64_t row = 0; row < s.rows() * E; ++row)
    for (int64_t j = beta ? E + 1 : 0; j < (beta ? E + 2 : E + 1); ++j) {
      double gradient = a["dcoef"][static_cast<size_t>(row * (E + 2) + j)];
      for (int64_t c = 0; c < (j == 0 ? C : 0); ++c)
        gradient += a["streams"][static_cast<size_t>(row * C + c)] * a["dout"][static_cast<size_t>(row / E * C + c)];
      sum += std::abs(gradient * a["stats"][static_cast<size_t>(row * (E + 4) + 2 + j)]);
    }
  return sum;
}

std::vector<double> column_of(const std::vector<double>& x, int64_t column, int64_t columns) {
  std::vector<double> result;
  for (auto at = static_cast<size_t>(column); at < x.size(); at += static_cast<size_t>(columns))
    result.push_back(x[at]);
  return result;
}

constexpr Dtype dtypes[] = {Dtype::f32, Dtype::bf16};
double or_rounding(Dtype dtype, double tolerance) { return dtype == Dtype::bf16 ? 0x1p-8 : tolerance; }

// Activations in bf16 are rounded once; all else are sums of C terms and a tanh, some ulps (6e-8) each. One channel
// alone has variance 0 and an xh of 0.
constexpr double exact = 3e-6;

}  // namespace

TEST_CASE("hyper: reference backward of the read is the derivative of its reference forward") {
  for (const HyperVariant& kind : kinds)
    for (const int64_t E : {1, 2, 3, 4})
      for (const double scale : {1e-2, 1.0, 1e2}) {
        CAPTURES(kind.name, scale);
        check_derivative(read({1, 3, E, 5}, kind, scale), 1e-10);
      }
}

TEST_CASE("hyper: the fast backends equal the reference, set and added") {
  for (const HyperVariant& kind : kinds) {
    const std::vector<Size> of_cpu{{1, 1, 1, 1},  {1, 3, 1, 33},   {2, 5, 2, 16},   {2, 100, 2, 129},
                                   {1, 7, 3, 40}, {3, 100, 4, 67}, {1, 200, 4, 64}, {1, 5, 5, 21},
                                   {1, 9, 6, 32}, {2, 65, 7, 18},  {1, 4, 8, 259}};
    std::vector<Size> of_gpu{{1, 3, 3, 40}, {1, 5, 4, 24}};
    // Several blocks and turns of each, ragged; several passes; sums beyond 48 KiB, and beyond what is shared.
    const std::vector<Size> larger{{1, 2, 2, 33},   {1, 3, 1, 72},   {1, 33, 4, 24}, {1, 2, 6, 32},
                                   {1, 1, 7, 259},  {1, 1, 2, 4104}, {1, 9, 8, 32},  {1, 2, 4, 2048},
                                   {1, 19, 2, 136}, {3, 7, 4, 1032}, {1, 1, 4, 2056}};
    if (kind.norm == HyperNorm::layernorm) of_gpu.insert(of_gpu.end(), larger.begin(), larger.end());
    for_sizes(of_cpu, of_gpu, [&](Backend backend, const Size& s) {
      for (const Dtype dtype : dtypes)
        for (const bool add : {false, true}) {
          CAPTURES(kind.name, s.E, s.C, name_of(dtype), add);
          const Op op = read(s, kind);
          Trial a(op, dtype, add), b = a.exact();
          a.run(backend), b.run(Backend::reference);
          check_close("out", a["out"], b["out"], or_rounding(dtype, exact));
          check_close("coef", a["coef"], b["coef"], exact);
          if (kind.dynamic) check_close("stats", a["stats"], b["stats"], exact);
          check_close("dstreams", a["dstreams"], b["dstreams"], or_rounding(dtype, 1e-5));
          // The scales' gradients are single sums of terms of both signs, which may cancel. Each term is good to 4
          // units of 2^-24; on a GPU, where rsqrtf and tanhf are off by up to 5 each and tanh makes no error larger,
          // to 14.
          const bool on_gpu = backend == Backend::cuda;
          for (const Operand& one : parameters(kind, s.E, s.C)) {
            const double terms = one.name.ends_with("_scale") ? size_of_scale_terms(b, s, one.name == "beta_scale") : 0;
            const std::string d = "d" + one.name;
            check_close(d, a[d], b[d], on_gpu ? 2.5e-5 : 1e-5, (on_gpu ? 14 : 4) * 0x1p-24 * terms);
          }
        }
    });
  }
}

TEST_CASE("hyper: on a GPU a block reads several tokens, each while it computes with the one before") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : dtypes) {
    // 4,299 tokens for 2,112 blocks, or in bf16 four at a time for 264 with four buffers
    const Op op = read({3, 1433, 2, 16}, kinds.back());
    Trial a(op, dtype), b = a.exact();
    a.forward(Backend::cuda), b.forward(Backend::reference);
    check_close("out", a["out"], b["out"], or_rounding(dtype, exact));
    check_close("coef", a["coef"], b["coef"], exact);
    check_close("stats", a["stats"], b["stats"], exact);
  }
}

TEST_CASE("hyper: LayerNorm is as exact where the mean is large against the deviation") {
  // On a GPU in bf16 the last one is beyond what tensor cores do.
  const std::vector<Size> sizes{{1, 1, 4, 8},    {1, 3, 4, 24},   {2, 5, 2, 136},  {1, 3, 4, 264}, {1, 1, 2, 768},
                                {1, 3, 4, 1032}, {1, 2, 4, 1600}, {1, 3, 4, 2048}, {1, 1, 4, 2056}};
  for_sizes(sizes, sizes, [&](Backend backend, const Size& s) {
    for (const Dtype dtype : dtypes)
      for (const double mean : {0., -0.02, 30.}) {
        CAPTURES(s.E, s.C, name_of(dtype), mean);
        const Op op = read(s, kinds[2], 1, mean);
        Trial a(op, dtype);
        for (double& x : a.x["dcoef"])  // as large as a write makes it
          x = static_cast<float>(x * (1 + std::abs(mean)) * std::sqrt(static_cast<double>(s.C)));
        Trial b = a.exact();
        a.run(backend), b.run(Backend::reference);
        check_close("out", a["out"], b["out"], or_rounding(dtype, exact), exact * mean);
        check_close("coef", a["coef"], b["coef"], exact);
        for (int64_t column = mean == 30 ? 0 : 1; column < s.E + 4; ++column)
          check_close(str("stats ", column), column_of(a["stats"], column, s.E + 4),
                      column_of(b["stats"], column, s.E + 4), exact);
        check_close("dstreams", a["dstreams"], b["dstreams"], or_rounding(dtype, 1e-5));
        // Sums of k x less those of k mean cancel there: to 2^-22 of their terms, where x has lost 2^-9 already.
        const double sums = dtype == Dtype::bf16 && mean == 30 ? 1e-4 : 2.5e-5;
        for (const Operand& one : parameters(kinds[2], s.E, s.C)) {
          const std::string d = "d" + one.name;
          check_close(d, a[d], b[d], sums);
        }
      }
  });
}

TEST_CASE_TEMPLATE("hyper: streams are copied and summed, with one rounding", T, float, bf16) {
  for (const Size& s : std::vector<Size>{{1, 1, 1, 1}, {2, 3, 2, 33}, {1, 70, 4, 128}, {2, 3, 7, 50}, {1, 2, 8, 16}}) {
    const auto x = random_vector<T>(s.x(), 1), streams = random_vector<T>(s.streams(), 2);
    const Shape rows{s.B, s.T, s.C}, all{s.B, s.T, s.E, s.C};
    for (const Backend backend : backends_of<T>()) {
      for (bool add : {false, true}) {
        CAPTURES(s.E, add);
        auto expanded = add ? streams : poisoned<T>(s.streams()), sum = add ? x : poisoned<T>(s.x());
        auto want_expanded = std::vector<double>(streams.size()), want_sum = std::vector<double>(x.size());
        if (add) want_expanded = convert<double>(streams), want_sum = convert<double>(x);
        for (size_t at = 0; at < streams.size(); ++at) {
          const size_t C = static_cast<size_t>(s.C), row = at / C / static_cast<size_t>(s.E) * C + at % C;
          want_expanded[at] += static_cast<double>(x[row]);
          want_sum[row] += static_cast<double>(streams[at]);
        }
        run_on(backend, {view(expanded, all), view(sum, rows), view(x, rows), view(streams, all)},
               [&](auto& t, Stream stream) {
                 streams_expand({t[0], add}, t[2], stream);
                 streams_sum({t[1], add}, t[3], stream);
               });
        if (!add) CHECK(expanded == convert<T>(want_expanded));
        check_close("expanded", expanded, want_expanded, tolerance_or_rounding<T>(1e-6));
        check_close("sum", sum, want_sum, tolerance_or_rounding<T>(1e-6));
      }
    }
  }
}

TEST_CASE("hyper: at the initial values the read picks one stream, exactly, and the coefficients are those of a sum") {
  for (const HyperVariant& kind : kinds)
    for (const Backend backend : all_backends())
      for (const int64_t E : {1, 2, 3, 4, 8}) {
        const Size s{2, 3, E, 37};
        const int64_t chosen = 5 % E;
        CAPTURES(kind.name, E);
        const Op op = read(s, kind);
        Trial a(op, Dtype::f32);
        for (const char* name : {"static_alpha", "alpha_proj", "beta_proj"})
          if (a.x.contains(name)) a.x[name].assign(a[name].size(), 0);
        a.x["static_beta"].assign(a["static_beta"].size(), 1);
        for (int64_t i = 0; i < E; ++i) a.x["static_alpha"][static_cast<size_t>(i * (E + 1) + i + 1)] = 1;
        a.x["static_alpha"][static_cast<size_t>(chosen * (E + 1))] = 1;
        a.forward(backend);
        for (size_t at = 0; at < a["coef"].size(); ++at) {
          const auto i = static_cast<int64_t>(at) / (E + 2) % E, column = static_cast<int64_t>(at) % (E + 2);
          CHECK(a["coef"][at] == (column == 0 ? i == chosen : column == i + 1 || column == E + 1));
        }
        for (int64_t n = 0; n < s.rows(); ++n)
          for (int64_t c = 0; c < s.C; ++c)
            CHECK(a["out"][static_cast<size_t>(n * s.C + c)] ==
                  a["streams"][static_cast<size_t>((n * E + chosen) * s.C + c)]);
      }
}

TEST_CASE("hyper: large and tiny projections have the right tanh, and NaN stays NaN") {
  // One stream of one channel, RMSNorm: Nh = x / sqrt(x^2 + eps) is 1 for x = 1 and a small eps.
  const Op op = read({1, 1, 1, 1}, {"rmsnorm", true, HyperNorm::rmsnorm, 1e-20});
  for (float z : {0.f, 1e-30f, -1e-6f, 1e-3f, -0.3f, 0.6249f, 0.6251f, -0.6251f, 0.9f, -2.f, 5.f, 9.1f, -40.f, 1e4f,
                  -3e38f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    CAPTURE(z);
    for (const Backend backend : fast_backends()) {
      Trial a(op, Dtype::f32);
      a.x["streams"] = {1}, a.x["alpha_proj"] = {z, z}, a.x["beta_proj"] = {z}, a.x["norm_weight"] = {1};
      a.forward(backend);
      // On a GPU, in units of 2^-24: 4 of rsqrtf(1), 1 of the product, and 5 of tanhf, which makes no error larger.
      const double tolerance = backend == Backend::cuda ? 6e-7 : 2.5e-7;
      for (size_t j = 2; j < 5; ++j) {
        if (std::isnan(z)) CHECK(std::isnan(a["stats"][j]));
        else CHECK(std::abs(a["stats"][j] - std::tanh(double(z))) <= tolerance * std::abs(std::tanh(double(z))));
      }
    }
  }
}

TEST_CASE("hyper: NaN stays in its token and reaches every sum over tokens; the threads do not matter") {
  for_sizes(kinds, kinds, [](Backend backend, const HyperVariant& kind) {
    CAPTURE(kind.name);
    const bool on_cpu = backend == Backend::cpu;
    const Size s = on_cpu ? Size{2, 150, 4, 35} : Size{1, 9, 4, 24};
    const Op op = read(s, kind);
    if (on_cpu) check_threads(op);
    const auto C = static_cast<size_t>(s.C), E = static_cast<size_t>(s.E), stream = 7 * E + 2;
    std::map<std::string, Where> want{{"out", at({7 * C + 5})}, {"dstatic_alpha", at({2 * (E + 1)})}};
    const bool has_mean = kind.norm != HyperNorm::rmsnorm;
    if (kind.dynamic) {
      want = {{"out", in_row(7, s.C)},
              {"coef", in_row(stream, s.E + 2)},
              {"stats", [=](size_t i) { return i / (E + 4) == stream && (i % (E + 4) > 0 || has_mean); }},
              {"dstreams", in_row(stream, s.C)},
              {"dstatic_alpha", at({2 * (E + 1)})}};
      for (const Operand& one : parameters(kind, s.E, s.C))
        if (!one.name.starts_with("static")) want["d" + one.name] = everywhere;
    }
    const Trial clean = Trial(op, Dtype::f32).run(backend);
    const Trial spoilt = check_nans(op, Dtype::f32, backend, {{"streams", {stream * C + 5}}}, want);
    for (const char* name : {"out", "coef", "dstreams"})
      for (size_t i = 0; i < clean[name].size(); ++i)
        if (!std::isnan(spoilt[name][i]) && spoilt[name][i] != clean[name][i])
          FAIL_CHECK(name << " " << i << " changed");
  });
}

TEST_CASE("hyper: gradients that nobody wants are skipped, the others do not notice") {
  for (const HyperVariant& kind : kinds)
    for (const Backend backend : all_backends()) {
      if (is_slow(backend) && kind.norm != HyperNorm::layernorm) continue;  // the one with all of them
      CAPTURE(kind.name);
      const Size s{1, is_slow(backend) ? 1 : 70, 3, 20};
      const Op op = read(s, kind);
      const Trial all = Trial(op, Dtype::f32).run(backend);
      for (const Operand& unwanted : parameters(kind, s.E, s.C)) {
        Trial some(op, Dtype::f32);
        some.x["d" + unwanted.name].clear();
        some.run(backend);
        // Not the same bits: without a gradient the compiler may contract the others differently.
        for (const auto& [name, type] : all.results())
          if (name != "d" + unwanted.name) check_close(name, some[name], all[name], 1e-6);
      }
    }
}

TEST_CASE("hyper: wrong shapes and missing parameters are refused") {
  const HyperVariant kind = kinds[2];
  const Op op = read({1, 2, 2, 4}, kind), wide = read({1, 2, 9, 4}, kinds[0]);
  CHECK_NOTHROW(Trial(op, Dtype::f32).forward(Backend::cpu));
  std::vector<std::string> needed{"stats"};
  for (const Operand& one : parameters(kind, 2, 4)) needed.push_back(one.name);
  for (const std::string& name : needed) {
    if (name == "alpha_proj") continue;  // without it it is static, with too many parameters
    Trial bad(op, Dtype::f32);
    bad.x[name].clear();
    CHECK_THROWS_AS(bad.forward(Backend::cpu), Error);
  }
  CHECK_THROWS_AS(Trial(wide, Dtype::f32).forward(Backend::cpu), Error);
}
