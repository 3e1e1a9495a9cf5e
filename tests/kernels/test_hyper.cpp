#include "kernels/depth/streams/hyper.h"

#include "tests/support/depth_cases.h"

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

// The eight parameters, or their gradients, in the order of HyperWeights; those that a kind does not have are empty.
template <class T>
using Fields = std::vector<std::vector<T>>;

std::vector<int64_t> field_sizes(const HyperVariant& kind, int64_t E, int64_t C) {
  const bool gain = kind.dynamic && kind.norm != HyperNorm::layernorm_no_affine;
  const bool bias = kind.dynamic && kind.norm == HyperNorm::layernorm;
  const int64_t d = kind.dynamic;
  return {E * (E + 1), E, d * C * (E + 1), d * C, d, d, gain * C, bias * C};
}

// Scales around 1 and projections of size 1/sqrt(C): the tanhs are neither flat nor linear.
Fields<double> random_fields(const HyperVariant& kind, int64_t E, int64_t C, uint64_t seed) {
  Fields<double> fields;
  const auto sizes = field_sizes(kind, E, C);
  for (size_t f = 0; f < sizes.size(); ++f)
    fields.push_back(random_vector<double>(sizes[f], seed + f, f == 2 || f == 3 ? 1.5 / std::sqrt(double(C)) : 1.0));
  for (size_t f : {4u, 5u})
    for (auto& x : fields[f]) x += 0.7;
  for (auto& x : fields[6]) x += 1;
  return fields;
}

template <class T, class From>
Fields<T> convert_fields(const Fields<From>& from) {
  Fields<T> to;
  convert_into(to, from);
  return to;
}

template <class T>
HyperWeights<T*> pointers(Fields<T>& f) {
  auto p = [&](size_t i) { return f[i].empty() ? nullptr : f[i].data(); };
  return {p(0), p(1), p(2), p(3), p(4), p(5), p(6), p(7)};
}

template <class T>
HyperWeights<Tensor> tensors(const Fields<T>& f, int64_t E, int64_t C) {
  auto t = [&](size_t i, Shape shape) { return tensor_of(f[i], shape); };
  return {t(0, {E, E + 1}), t(1, {E}), t(2, {C, E + 1}), t(3, {C}), t(4, {1}), t(5, {1}), t(6, {C}), t(7, {C})};
}

struct Size {
  int64_t B, T, E, C;
  int64_t rows() const { return B * T; }
  int64_t streams() const { return B * T * E * C; }
  int64_t coef() const { return B * T * E * (E + 2); }
  int64_t stats() const { return B * T * E * (E + 4); }
  int64_t x() const { return B * T * C; }
};

// All the data around one sublayer, forward and backward.
template <class T>
struct Wrapper {
  using P = AccumulationType<T>;
  Size s;
  HyperVariant kind;
  std::vector<T> streams, y, dnext, dout;            // given
  std::vector<T> out, next, dstreams, dwritten, dy;  // computed
  std::vector<P> coef, stats, dcoef;
  Fields<P> w, d;
  auto members() {
    return std::tie(streams, y, dnext, dout, out, next, dstreams, dwritten, dy, coef, stats, dcoef, w, d);
  }

  Wrapper(const Size& size, const HyperVariant& of_kind, double scale = 1)
      : s(size),
        kind(of_kind),
        streams(random_vector<T>(s.streams(), 1, scale)),
        y(random_vector<T>(s.x(), 2)),
        dnext(random_vector<T>(s.streams(), 3)),
        dout(random_vector<T>(s.x(), 4)),
        out(poisoned<T>(s.x())),
        next(poisoned<T>(s.streams())),
        dstreams(poisoned<T>(s.streams())),
        dwritten(poisoned<T>(s.streams())),
        dy(poisoned<T>(s.x())),
        coef(poisoned<P>(s.coef())),
        stats(poisoned<P>(s.stats() * kind.dynamic)),
        dcoef(poisoned<P>(s.coef())),
        w(convert_fields<P>(random_fields(kind, s.E, s.C, 10))),
        d(w) {
    for (auto& field : d) std::fill(field.begin(), field.end(), P(0));
  }

  Tensor streams_of(const std::vector<T>& v) const { return view(v, {s.B, s.T, s.E, s.C}); }
  Tensor coef_of(const std::vector<P>& v) const { return view(v, {s.B, s.T, s.E, s.E + 2}); }
  Tensor x_of(const std::vector<T>& v) const { return view(v, {s.B, s.T, s.C}); }
  Tensor stats_tensor() const { return tensor_of(stats, {s.B, s.T, s.E, s.E + 4}); }

  void forward(Backend backend) {
    run_on(backend,
           with({x_of(out), coef_of(coef), stats_tensor(), streams_of(streams), streams_of(next), x_of(y)},
                {tensors(w, s.E, s.C)}),
           [&](auto& t, Stream stream) {
             hyper_read_forward(t[0], t[1], t[2], t[3], taken(t, 6), kind.norm, kind.eps, stream);
             hyper_write_forward({t[4], {}, {}}, t[3], t[1], t[5], stream);
           });
  }
  // The write's gradient of the streams goes to `dwritten`, the read's to `dstreams`, so that each is seen alone.
  void backward(Backend backend, bool accumulate, bool accumulate_y) {
    run_on(backend,
           with({streams_of(dwritten), coef_of(dcoef), x_of(dy), streams_of(dnext), streams_of(streams), coef_of(coef),
                 x_of(y), streams_of(dstreams), x_of(dout), stats_tensor()},
                {tensors(d, s.E, s.C), tensors(w, s.E, s.C)}),
           [&](auto& t, Stream stream) {
             hyper_write_backward({t[0], accumulate}, t[1], {t[2], accumulate_y}, {{}, t[3], {}}, t[4], t[5], t[6],
                                  stream);
             hyper_read_backward({t[7], accumulate}, taken(t, 10), t[8], t[1], t[4], t[5], t[9], taken(t, 18),
                                 kind.norm, stream);
           });
  }

  // For run_on: the weights behind the others, and back.
  static std::vector<Tensor> with(std::vector<Tensor> list, const std::vector<HyperWeights<Tensor>>& weights) {
    for (const auto& each : weights)
      for (const Tensor& tensor : each.list()) list.push_back(tensor);
    return list;
  }
  static HyperWeights<Tensor> taken(const std::vector<Tensor>& t, size_t i) {
    return {t[i], t[i + 1], t[i + 2], t[i + 3], t[i + 4], t[i + 5], t[i + 6], t[i + 7]};
  }
};

// The sum of |dA tanh|, or of |db tanh|: of the terms of a scale's gradient. After the backward.
double size_of_scale_terms(const Wrapper<double>& a, bool beta) {
  const int64_t E = a.s.E, C = a.s.C;
  double sum = 0;
  for (int64_t row = 0; row < a.s.rows() * E; ++row)
    for (int64_t j = beta ? E + 1 : 0; j < (beta ? E + 2 : E + 1); ++j) {
      double gradient = a.dcoef[static_cast<size_t>(row * (E + 2) + j)];
      for (int64_t c = 0; c < (j == 0 ? C : 0); ++c)
        gradient += a.streams[static_cast<size_t>(row * C + c)] * a.dout[static_cast<size_t>(row / E * C + c)];
      sum += std::abs(gradient * a.stats[static_cast<size_t>(row * (E + 4) + 2 + j)]);
    }
  return sum;
}

template <class T>
std::vector<T> column_of(const std::vector<T>& x, int64_t column, int64_t columns) {
  std::vector<T> result;
  for (auto at = static_cast<size_t>(column); at < x.size(); at += static_cast<size_t>(columns))
    result.push_back(x[at]);
  return result;
}

const char* field_names[] = {"dstatic_alpha", "dstatic_beta", "dalpha_proj",  "dbeta_proj",
                             "dalpha_scale",  "dbeta_scale",  "dnorm_weight", "dnorm_bias"};

}  // namespace

TEST_CASE("hyper: reference backward of read and write is the derivative of their reference forward") {
  for (const HyperVariant& kind : kinds) {
    for (int64_t E : {1, 2, 3, 4}) {
      for (double scale : {1e-2, 1.0, 1e2}) {
        const Size s{1, 3, E, 5};
        CAPTURES(kind.name, E, scale);
        Wrapper<double> a(s, kind, scale);
        // The sublayer is y = y0 + out^2: the read's output reaches the loss through the write as well.
        auto loss = [&](const std::vector<Complex>& streams, Fields<Complex> w, std::vector<Complex> y) {
          std::vector<Complex> out(y.size()), coef(a.coef.size()), stats(a.stats.size()), next(streams.size());
          hyper_read_forward_ref(out.data(), coef.data(), stats.data(), streams.data(), pointers(w), kind.norm,
                                 s.rows(), E, s.C, kind.eps);
          for (size_t i = 0; i < y.size(); ++i) y[i] += out[i] * out[i];
          hyper_write_forward_ref<Complex>({next.data(), nullptr, nullptr}, streams.data(), coef.data(), y.data(),
                                           s.rows(), E, s.C);
          return dot(a.dnext, next);
        };
        const auto y0 = a.y;
        const auto x = convert<Complex>(a.streams), y = convert<Complex>(y0);
        const auto w = convert_fields<Complex>(a.w);
        const auto want_dstreams = complex_step(a.streams, [&](auto& z) { return loss(z, w, y); });
        const auto want_dy = complex_step(y0, [&](auto& z) { return loss(x, w, z); });

        a.forward(Backend::reference);
        for (size_t i = 0; i < y0.size(); ++i) a.y[i] = y0[i] + a.out[i] * a.out[i];
        const Tensor dx = a.streams_of(a.dstreams), coef = a.coef_of(a.coef), dcoef = a.coef_of(a.dcoef);
        hyper_write_backward({dx, false}, dcoef, {a.x_of(a.dy), false}, {{}, a.streams_of(a.dnext), {}},
                             a.streams_of(a.streams), coef, a.x_of(a.y), reference);
        for (size_t i = 0; i < y0.size(); ++i) a.dout[i] = 2 * a.out[i] * a.dy[i];
        hyper_read_backward({dx, true}, tensors(a.d, E, s.C), a.x_of(a.dout), dcoef, a.streams_of(a.streams), coef,
                            a.stats_tensor(), tensors(a.w, E, s.C), kind.norm, reference);
        check_close("dstreams", a.dstreams, want_dstreams, 1e-10);
        check_close("dy", a.dy, want_dy, 1e-10);
        for (size_t f = 0; f < a.w.size(); ++f) {
          const auto want = complex_step(a.w[f], [&](auto& z) {
            auto changed = w;
            changed[f] = z;
            return loss(x, changed, y);
          });
          check_close(field_names[f], a.d[f], want, 1e-10);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("hyper: the fast backends equal the reference, set and added", S, float, bf16) {
  // Activations in bf16 are rounded once; all else are sums of C terms and a tanh, some ulps (6e-8) each. One channel
  // alone has variance 0 and an xh of 0.
  const double exact = 3e-6, rounding = std::is_same_v<S, bf16> ? 0x1p-8 : 0;
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
      for (bool accumulate : {false, true}) {
        CAPTURES(kind.name, s.E, s.C, accumulate);
        Wrapper<S> a(s, kind);
        Wrapper<double> b(s, kind);
        if (accumulate) {
          a.dstreams = random_vector<S>(s.streams(), 5), a.dwritten = random_vector<S>(s.streams(), 6);
        } else {
          a.dy = random_vector<S>(s.x(), 7);  // the write's two gradients are independent: here always opposite
        }
        a.d = convert_fields<float>(random_fields(kind, s.E, s.C, 30));  // parameter gradients are always added to
        convert_members(b, a);
        a.forward(backend);
        b.forward(Backend::reference);
        check_close("out", a.out, b.out, std::max(exact, rounding));
        check_close("coef", a.coef, b.coef, exact);
        check_close("stats", a.stats, b.stats, exact);
        check_close("next", a.next, b.next, std::max(exact, rounding));
        a.backward(backend, accumulate, !accumulate);
        b.backward(Backend::reference, accumulate, !accumulate);
        check_close("dcoef", a.dcoef, b.dcoef, exact);
        check_close("dy", a.dy, b.dy, std::max(exact, rounding));
        check_close("dwritten", a.dwritten, b.dwritten, std::max(exact, rounding));
        check_close("dstreams", a.dstreams, b.dstreams, std::max(1e-5, rounding));
        // The scales' gradients are single sums of terms of both signs, which may cancel. Each term is good to 4 units
        // of 2^-24; on a GPU, where rsqrtf and tanhf are off by up to 5 each and tanh makes no error larger, to 14.
        const bool on_gpu = backend == Backend::cuda;
        for (size_t f = 0; f < a.d.size(); ++f) {
          const bool scale = on_gpu && (f == 4 || f == 5) && !a.d[f].empty();
          const double terms = scale ? size_of_scale_terms(b, f == 5) : 0;
          check_close(field_names[f], a.d[f], b.d[f], on_gpu ? 2.5e-5 : 1e-5, 14 * 0x1p-24 * terms);
        }
      }
    });
  }
}

TEST_CASE_TEMPLATE("hyper: on a GPU a block reads several tokens, each while it computes with the one before", S, float,
                   bf16) {
  if (!available(Backend::cuda)) return;
  const Size s{3, 1433, 2, 16};  // 4,299 tokens for 2,112 blocks, or in bf16 four at a time for 264 with four buffers
  Wrapper<S> a(s, kinds.back());
  Wrapper<double> b(s, a.kind);
  convert_members(b, a);
  a.forward(Backend::cuda);
  b.forward(Backend::reference);
  check_close("out", a.out, b.out, std::is_same_v<S, bf16> ? 0x1p-8 : 3e-6);
  check_close("coef", a.coef, b.coef, 3e-6);
  check_close("stats", a.stats, b.stats, 3e-6);
}

TEST_CASE_TEMPLATE("hyper: LayerNorm is as exact where the mean is large against the deviation", S, float, bf16) {
  // On a GPU in bf16 the last one is beyond what tensor cores do.
  const std::vector<Size> sizes{{1, 1, 4, 8},    {1, 3, 4, 24},   {2, 5, 2, 136},  {1, 3, 4, 264}, {1, 1, 2, 768},
                                {1, 3, 4, 1032}, {1, 2, 4, 1600}, {1, 3, 4, 2048}, {1, 1, 4, 2056}};
  for_sizes(sizes, sizes, [&](Backend backend, const Size& s) {
    for (const double mean : {0., -0.02, 30.}) {
      CAPTURES(s.E, s.C, mean);
      Wrapper<S> a(s, kinds[2]);
      Wrapper<double> b(s, a.kind);
      for (S& x : a.streams) x = S(static_cast<double>(x) + mean);
      convert_members(b, a);
      a.forward(backend);
      b.forward(Backend::reference);
      check_close("out", a.out, b.out, std::is_same_v<S, bf16> ? 0x1p-8 : 3e-6, 3e-6 * mean);
      check_close("coef", a.coef, b.coef, 3e-6);
      for (int64_t column = mean == 30 ? 0 : 1; column < s.E + 4; ++column)
        check_close("stats " + std::to_string(column), column_of(a.stats, column, s.E + 4),
                    column_of(b.stats, column, s.E + 4), 3e-6);
      a.backward(backend, false, false);
      b.backward(Backend::reference, false, false);
      check_close("dstreams", a.dstreams, b.dstreams, std::max(1e-5, std::is_same_v<S, bf16> ? 0x1p-8 : 0));
      // Sums of k x less those of k mean cancel there: to 2^-22 of their terms, where x has lost 2^-9 already.
      const double exact = std::is_same_v<S, bf16> && mean == 30 ? 1e-4 : 2.5e-5;
      for (size_t f = 0; f < a.d.size(); ++f) check_close(field_names[f], a.d[f], b.d[f], exact);
    }
  });
}

TEST_CASE_TEMPLATE("hyper: streams are copied and summed, with one rounding", T, float, bf16) {
  for (const Size& s : std::vector<Size>{{1, 1, 1, 1}, {2, 3, 2, 33}, {1, 70, 4, 128}, {2, 3, 7, 50}, {1, 2, 8, 16}}) {
    const auto x = random_vector<T>(s.x(), 1), streams = random_vector<T>(s.streams(), 2);
    const Shape rows{s.B, s.T, s.C}, all{s.B, s.T, s.E, s.C};
    for (const Backend backend : backends_of<T>()) {
      for (bool accumulate : {false, true}) {
        CAPTURES(s.E, accumulate);
        auto expanded = accumulate ? streams : poisoned<T>(s.streams()), sum = accumulate ? x : poisoned<T>(s.x());
        auto want_expanded = std::vector<double>(streams.size()), want_sum = std::vector<double>(x.size());
        if (accumulate) want_expanded = convert<double>(streams), want_sum = convert<double>(x);
        for (size_t at = 0; at < streams.size(); ++at) {
          const size_t C = static_cast<size_t>(s.C), row = at / C / static_cast<size_t>(s.E) * C + at % C;
          want_expanded[at] += static_cast<double>(x[row]);
          want_sum[row] += static_cast<double>(streams[at]);
        }
        run_on(backend, {view(expanded, all), view(sum, rows), view(x, rows), view(streams, all)},
               [&](auto& t, Stream stream) {
                 streams_expand({t[0], accumulate}, t[2], stream);
                 streams_sum({t[1], accumulate}, t[3], stream);
               });
        if (!accumulate) CHECK(expanded == convert<T>(want_expanded));
        check_close("expanded", expanded, want_expanded, tolerance_or_rounding<T>(1e-6));
        check_close("sum", sum, want_sum, tolerance_or_rounding<T>(1e-6));
      }
    }
  }
}

TEST_CASE("hyper: at the initial values the read picks one stream and the write adds y to all, exactly") {
  for (const HyperVariant& kind : kinds) {
    for (const Backend backend : all_backends()) {
      for (int64_t E : {1, 2, 3, 4, 8}) {
        const Size s{2, 3, E, 37};
        const int64_t chosen = 5 % E;
        CAPTURES(kind.name, E);
        Wrapper<float> a(s, kind);
        for (size_t f : {0u, 2u, 3u}) std::fill(a.w[f].begin(), a.w[f].end(), 0.f);
        std::fill(a.w[1].begin(), a.w[1].end(), 1.f);
        for (int64_t i = 0; i < E; ++i) a.w[0][static_cast<size_t>(i * (E + 1) + i + 1)] = 1;
        a.w[0][static_cast<size_t>(chosen * (E + 1))] = 1;
        a.forward(backend);
        for (int64_t n = 0; n < s.rows(); ++n)
          for (int64_t i = 0; i < E; ++i)
            for (int64_t c = 0; c < s.C; ++c) {
              const size_t at = static_cast<size_t>((n * E + i) * s.C + c), row = static_cast<size_t>(n * s.C + c);
              CHECK(a.next[at] == a.streams[at] + a.y[row]);
              if (i == chosen) CHECK(a.out[row] == a.streams[at]);
            }
      }
    }
  }
}

TEST_CASE("hyper: large and tiny projections have the right tanh, and NaN stays NaN") {
  // One stream of one channel, RMSNorm: Nh = x / sqrt(x^2 + eps) is 1 for x = 1 and a small eps.
  for (float z : {0.f, 1e-30f, -1e-6f, 1e-3f, -0.3f, 0.6249f, 0.6251f, -0.6251f, 0.9f, -2.f, 5.f, 9.1f, -40.f, 1e4f,
                  -3e38f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    CAPTURE(z);
    for (const Backend backend : fast_backends()) {
      Wrapper<float> a({1, 1, 1, 1}, {"rmsnorm", true, HyperNorm::rmsnorm, 1e-20});
      a.streams = {1.f};
      a.w[2] = {z, z}, a.w[3] = {z}, a.w[6] = {1.f};
      a.forward(backend);
      // On a GPU, in units of 2^-24: 4 of rsqrtf(1), 1 of the product, and 5 of tanhf, which makes no error larger.
      const double tolerance = backend == Backend::cuda ? 6e-7 : 2.5e-7;
      for (size_t j = 2; j < 5; ++j) {
        if (std::isnan(z)) CHECK(std::isnan(a.stats[j]));
        else CHECK(std::abs(a.stats[j] - std::tanh(double(z))) <= tolerance * std::abs(std::tanh(double(z))));
      }
    }
  }
}

TEST_CASE("hyper: NaN stays in its token and reaches every sum over tokens; the threads do not matter") {
  for_sizes(kinds, kinds, [](Backend backend, const HyperVariant& kind) {
    CAPTURE(kind.name);
    const bool on_cpu = backend == Backend::cpu;
    const Size s = on_cpu ? Size{2, 150, 4, 35} : Size{1, 9, 4, 24};
    Wrapper<float> a(s, kind);
    auto run = [&a, backend] {
      a.forward(backend);
      a.backward(backend, false, false);
      const auto all = flat(a.out, a.dy, a.next, a.dstreams, a.dwritten, a.d);
      for (auto& field : a.d) std::fill(field.begin(), field.end(), 0.f);
      return all;
    };
    if (on_cpu) check_same_bits_on_any_threads<float>(run);
    const auto clean = run();
    a.streams[static_cast<size_t>((7 * s.E + 2) * s.C + 5)] = std::numeric_limits<float>::quiet_NaN();
    const auto spoilt = run();
    const size_t params = static_cast<size_t>(2 * s.x() + 3 * s.streams());
    int64_t nans = 0;
    for (size_t i = 0; i < params; ++i) {
      const int64_t x = static_cast<int64_t>(i), two = 2 * s.x();
      const int64_t row = x < two ? x / s.C % s.rows() : (x - two) / (s.E * s.C) % s.rows();
      nans += std::isnan(spoilt[i]);
      if (row != 7 && spoilt[i] != clean[i]) FAIL_CHECK("element " << i << " changed");
    }
    // Dynamic: out, dy, next and the stream itself in both gradients. Static: only its column in out and next.
    CHECK(nans == (kind.dynamic ? (4 + s.E) * s.C : 1 + s.E));
    // All sums of the dynamic branch, and the static part of the row of that stream.
    const size_t row = params + static_cast<size_t>(2 * (s.E + 1));
    for (size_t i = row; i < row + static_cast<size_t>(s.E + 1); ++i) CHECK(std::isnan(spoilt[i]));
    for (size_t i = params + static_cast<size_t>(s.E * (s.E + 2)); i < spoilt.size(); ++i) CHECK(std::isnan(spoilt[i]));
  });
}

TEST_CASE("hyper: gradients that nobody wants are skipped, the others do not notice") {
  for (const HyperVariant& kind : kinds) {
    for (const Backend backend : all_backends()) {
      if (is_slow(backend) && kind.norm != HyperNorm::layernorm) continue;  // the one with all of them
      CAPTURE(kind.name);
      const Size s{1, is_slow(backend) ? 1 : 70, 3, 20};
      Wrapper<float> all(s, kind);
      all.forward(backend);
      all.backward(backend, false, false);
      for (size_t f = 0; f < all.d.size(); ++f) {
        Wrapper<float> some(s, kind);
        some.d[f].clear();
        some.forward(backend);
        some.backward(backend, false, false);
        // Not the same bits: without a gradient the compiler may contract the others differently.
        for (size_t other = 0; other < all.d.size(); ++other)
          if (other != f) check_close(field_names[other], some.d[other], all.d[other], 1e-6);
        check_close("dstreams", some.dstreams, all.dstreams, 1e-6);
      }
    }
  }
}

TEST_CASE("hyper: wrong shapes and missing parameters are refused") {
  const HyperVariant kind = kinds[2];
  Wrapper<float> good({1, 2, 2, 4}, kind);
  CHECK_NOTHROW(good.forward(Backend::cpu));
  for (size_t f = 0; f < good.w.size(); ++f) {
    if (f == 2) continue;  // without alpha_proj it is static, with too many parameters
    Wrapper<float> bad = good;
    bad.w[f].clear();
    CHECK_THROWS_AS(bad.forward(Backend::cpu), Error);
  }
  Wrapper<float> bad = good;
  bad.stats.clear();
  CHECK_THROWS_AS(bad.forward(Backend::cpu), Error);
  Wrapper<float> wide({1, 2, 9, 4}, kinds[0]);
  CHECK_THROWS_AS(wide.forward(Backend::cpu), Error);
}
