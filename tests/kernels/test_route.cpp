#include "kernels/depth/route.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t L, N, K, D;
  int64_t block() const { return N * K * D; }
};

enum class Variant { full, last_two, first_and_own, mean, mixed };
const std::vector<Variant> variants{Variant::full, Variant::last_two, Variant::first_and_own, Variant::mean,
                                    Variant::mixed};
// Mixed has one layer of each of the others.
const std::vector<Variant> few_variants{Variant::full, Variant::mean, Variant::mixed};

std::vector<int> sources_of(Variant variant, int layer) {
  if (variant == Variant::mixed) variant = variants[static_cast<size_t>(layer) % 4];
  std::vector<int> sources;
  for (int s = 0; s <= layer; ++s) {
    const bool skipped =
        (variant == Variant::last_two && s < layer - 1) || (variant == Variant::first_and_own && s > 0 && s < layer);
    if (!skipped) sources.push_back(s);
  }
  return sources;
}

bool is_trained(Variant variant, int layer) {
  return layer > 0 && variant != Variant::mean && !(variant == Variant::mixed && layer % 4 == 3);
}

// All layers of one depth.
struct Depth {
  Size s;
  Variant variant;
  Kernels kernels = Kernels::fast;

  std::vector<Router> routers(const test::Tensors& t) const {
    std::vector<Router> list;
    for (int l = 0; l < s.L; ++l) list.push_back({t[str("weight", l)], sources_of(variant, l), t[str("dweight", l)]});
    return list;
  }
  void forward(const test::Tensors& t, const Tensor& out, const Tensor& slab, int l, Stream stream) const {
    const Router router = routers(t)[static_cast<size_t>(l)];
    if (is_plain(kernels, stream)) route_forward_plain(out, slab, router, s.N, s.K, s.D);
    else route_forward(out, slab, router, stream);
  }
  void backward(const test::Tensors& t, const Tensor& dslice, const Tensor& slab, const Tensor& dout, int l,
                Stream stream) const {
    if (is_plain(kernels, stream)) route_backward_plain(dslice, slab, dout, routers(t), l, s.N, s.K, s.D);
    else route_backward(dslice, slab, dout, routers(t), l, stream);
  }
  Tensor block_of(const Tensor& slab, int l) const {
    auto* const begin = static_cast<std::byte*>(slab.data);
    return {begin + static_cast<size_t>(l * s.block()) * size_of(slab.dtype), slab.dtype, {s.N, s.K, s.D}};
  }
  // The backward leaves in a layer's block of the slab what its dout was.
  Op op() const {
    const Depth depth = *this;
    std::vector<Operand> operands{never_added(input("slab", {s.L, s.N, s.K, s.D}))};
    for (int l = 0; l < s.L; ++l) {
      operands.push_back(output(str("out", l), {s.N, s.K, s.D}));
      if (is_trained(variant, l)) operands.push_back(parameter(str("weight", l), {s.K, (l + 1) * s.K}));
    }
    return {operands,
            [=](auto& t, Stream stream) {
              for (int l = 0; l < depth.s.L; ++l) depth.forward(t, t[str("out", l)], t["slab"], l, stream);
            },
            [=](auto& t, Stream stream) {
              for (int l = static_cast<int>(depth.s.L) - 1; l >= 0; --l)
                depth.backward(t, depth.block_of(t["dslab"], l), t["slab"], t[str("dout", l)], l, stream);
            },
            [=](auto& z) {
              const auto [L, N, K, D] = depth.s;
              for (int l = 0; l < L; ++l)
                route_forward_ref<Complex>(z[str("out", l)], z["slab"], z[str("weight", l)],
                                           sources_of(depth.variant, l), (l + 1) * K, N, K, D);
            }};
  }
};

std::vector<double> block_of(const std::vector<double>& slab, const Size& s, int l) {
  return {slab.begin() + l * s.block(), slab.begin() + (l + 1) * s.block()};
}
void fill_block(std::vector<double>& slab, const Size& s, int l, double value) {
  std::fill_n(slab.begin() + l * s.block(), s.block(), value);
}
std::vector<double> all_douts(const Trial& a, const Size& s) {
  std::vector<double> all;
  for (int l = 0; l < s.L; ++l) all = joined(all, a[str("dout", l)]);
  return all;
}

constexpr Dtype dtypes[] = {Dtype::f32, Dtype::bf16};
double or_rounding(Dtype dtype, double tolerance) { return dtype == Dtype::bf16 ? 0x1p-8 : tolerance; }

const std::vector<Size> sizes{{1, 1, 1, 1},    {3, 5, 1, 3},   {4, 37, 2, 8},  {3, 70, 3, 24},
                              {3, 300, 8, 64}, {2, 9, 6, 100}, {4, 33, 4, 16}, {2, 130, 16, 33}};
// One block and several, of mixture and correlation, and several rounds of a warp; both widths; heads in one group and
// in two.
const std::vector<Size> gpu_sizes{{1, 1, 1, 1},    {3, 5, 1, 3},   {4, 37, 2, 8},   {2, 70, 1, 33},
                                  {2, 260, 2, 40}, {2, 4, 6, 100}, {4, 9, 9, 16},  // on tensor cores in bf16:
                                  {4, 40, 8, 32},  {3, 9, 3, 64},  {2, 130, 1, 32}, {3, 3, 5, 96}};

}  // namespace

TEST_CASE("route: reference backward over a whole depth is the derivative of the reference forward") {
  // The loss sees every layer's out, hence the gradient of each block has parts from all layers that read it.
  for (const Variant variant : variants) {
    CAPTURE(static_cast<int>(variant));
    check_derivative(Depth{{4, 3, 2, 3}, variant}.op(), 1e-14);
  }
}

TEST_CASE("route: the gather backward equals a scatter backward") {
  const Size size{4, 11, 2, 3};
  for (const Variant variant : variants) {
    CAPTURE(static_cast<int>(variant));
    const Op op = Depth{size, variant}.op();
    Trial a(op, Dtype::f32);
    std::vector<double> want(a["slab"].size(), 0.0);
    for (int l = 0; l < size.L; ++l) {
      const std::vector<int> sources = sources_of(variant, l);
      const auto weight = a.x.find(str("weight", l));
      const std::vector<double>& dout = a[str("dout", l)];
      for (const int s : sources)
        for (int64_t n = 0; n < size.N; ++n)
          for (int64_t h = 0; h < size.K; ++h)
            for (int64_t from = 0; from < size.K; ++from)
              for (int64_t d = 0; d < size.D; ++d) {
                const double mean = h == from ? 1.0 / static_cast<double>(sources.size()) : 0.0;
                const auto at = static_cast<size_t>(h * (l + 1) * size.K + s * size.K + from);
                const double w = weight == a.x.end() ? mean : weight->second[at];
                want[static_cast<size_t>(s * size.block() + (n * size.K + from) * size.D + d)] +=
                    w * dout[static_cast<size_t>((n * size.K + h) * size.D + d)];
              }
    }
    for (const Backend backend : fast_backends()) {
      Trial gathered = a;
      check_close("dslab", gathered.run(backend)["dslab"], want, 1e-6);
    }
  }
}

TEST_CASE("route: the fast backends equal the reference and read nothing but the sources") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend))
      for (const Variant variant : is_slow(backend) ? few_variants : variants)
        for (const Dtype dtype : dtypes) {
          CAPTURES(size.K, size.D, variant, kernels, name_of(dtype));
          const double tolerance = or_rounding(dtype, 1e-6);
          const Op op = Depth{size, variant, kernels}.op();
          Trial got(op, dtype), want = got.exact();
          const Trial before = got;
          got.run(backend), want.run(Backend::reference);
          for (int l = 0; l < size.L; ++l) {
            CAPTURE(l);
            Trial poisoned = before;
            const std::vector<int> sources = sources_of(variant, l);
            for (int s = 0; s < size.L; ++s)
              if (!std::binary_search(sources.begin(), sources.end(), s)) fill_block(poisoned.x["slab"], size, s, NAN);
            const std::string out = str("out", l), dweight = str("dweight", l);
            check_close(out, poisoned.forward(backend)[out], want[out], tolerance);
            check_close("dslice", block_of(got["dslab"], size, l), block_of(want["dslab"], size, l), tolerance);
            if (is_trained(variant, l)) check_close(dweight, got[dweight], want[dweight], 2e-6);
          }
          CHECK(got["slab"] == all_douts(got, size));
          CHECK(want["slab"] == got["slab"]);
        }
  });
}

TEST_CASE("route: memory that begins between two multiples of 16 bytes") {
  const Op op = Depth{{3, 9, 2, 32}, Variant::full}.op();
  Tolerances tolerances{{"dslab", 1e-6}};
  std::set<std::string> in_place;
  for (int l = 0; l < 3; ++l) {
    tolerances.insert({{str("out", l), 1e-6}, {str("dweight", l), 1e-6}});  // sums in another order
    in_place.insert({str("weight", l), str("dweight", l)});
  }
  for (const Dtype dtype : dtypes) check_any_address(op, dtype, tolerances, in_place);
}

TEST_CASE("route: backward reads only its block and its readers', and keeps the columns of other layers") {
  const Size size{5, 50, 4, 8};
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend)) {
      CAPTURES(backend, kernels);
      const Depth depth{size, Variant::last_two, kernels};  // layers 2 and 3 read layer 2, layer 4 does not
      Op op = depth.op();
      op.backward = [=](auto& t, Stream stream) {
        depth.backward(t, depth.block_of(t["dslab"], 2), t["slab"], t["dout2"], 2, stream);
      };
      Trial a(op, Dtype::f32);
      for (const int unread : {0, 1, 4}) fill_block(a.x["slab"], size, unread, NAN);
      const Trial before = a;
      a.backward(backend);
      for (const double g : block_of(a["dslab"], size, 2)) CHECK(std::isfinite(g));
      for (size_t r = 1; r < 5; ++r) {
        const std::vector<double>&got = a[str("dweight", r)], &old = before[str("dweight", r)];
        for (size_t i = 0; i < got.size(); ++i) {
          const size_t source = i % ((r + 1) * 4) / 4;
          CHECK((got[i] != old[i]) == (source == 2 && (r == 2 || r == 3)));
          CHECK(std::isfinite(got[i]));
        }
      }
    }
}

TEST_CASE("route: so many heads that a GPU keeps few layers' weights at a time") {
  if (!available(Backend::cuda)) return;
  const Size size{4, 2, 64, 8};
  const Op op = Depth{size, Variant::full}.op();
  for (const Dtype dtype : dtypes) {
    Trial a(op, dtype);
    for (int l = 1; l < 4; ++l) a.x[str("dweight", l)].clear();
    Trial want = a;
    a.run(Backend::cuda), want.run(Backend::cpu);
    // 256 terms in a sum in f32, one after the other.
    const double tolerance = or_rounding(dtype, 4e-6);
    check_close("out", a["out3"], want["out3"], tolerance);
    check_close("dslice", block_of(a["dslab"], size, 0), block_of(want["dslab"], size, 0), tolerance);
  }
}

TEST_CASE("route: the identity is exact, forward and backward") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend))
      for (const Dtype dtype : dtypes) {
        CAPTURES(size.K, size.D, kernels, name_of(dtype));
        const Op op = Depth{size, Variant::full, kernels}.op();
        Trial a(op, dtype);
        for (int64_t l = 1; l < size.L; ++l)
          for (int64_t h = 0; h < size.K; ++h)
            for (int64_t c = 0; c < (l + 1) * size.K; ++c)
              a.x[str("weight", l)][static_cast<size_t>(h * (l + 1) * size.K + c)] = c == l * size.K + h;
        a.forward(backend);
        for (int l = 0; l < size.L; ++l) CHECK(a[str("out", l)] == block_of(a["slab"], size, l));
        CHECK(a.backward(backend)["dslab"] == all_douts(a, size));
      }
  });
}

TEST_CASE("route: other shapes of the same memory, and dslice in place of dout") {
  for (const Size& size : std::vector<Size>{{3, 6, 2, 8}, {3, 10, 12, 16}, {3, 10, 8, 64}})
    for (const Backend backend : fast_backends())
      for (const Kernels kernels : kernels_of(backend))
        for (const Dtype dtype : dtypes) {
          CAPTURES(backend, kernels, name_of(dtype));
          const Depth depth{size, Variant::full, kernels};
          const auto shaped = [](Tensor t, Shape shape) { return t.shape = shape, t; };
          const Shape split{2, size.N / 2, size.K, size.D}, flat{3, size.N, size.K * size.D};
          const Op op = depth.op();
          Op other = op;
          other.forward = [=](auto& t, Stream stream) {
            depth.forward(t, shaped(t["out2"], split), shaped(t["slab"], flat), 2, stream);
          };
          other.backward = [=](auto& t, Stream stream) {
            for (int l = 2; l >= 0; --l) {
              const Tensor d = shaped(t[str("dout", l)], split);
              depth.backward(t, d, shaped(t["slab"], flat), d, l, stream);
            }
          };
          Trial a(op, dtype), in_place(other, dtype);
          for (Trial* one : {&a, &in_place})
            for (int l = 1; l < 3; ++l) one->x[str("dweight", l)].clear();
          a.run(backend), in_place.run(backend);
          CHECK(in_place["out2"] == a["out2"]);
          for (int l = 0; l < 3; ++l) CHECK(in_place[str("dout", l)] == block_of(a["dslab"], size, l));
        }
}

TEST_CASE("route: NaN in a source shows, in forward and in dweight") {
  for (const Backend backend : fast_backends())
    for (const size_t D : {8, 64})
      for (const Variant variant : {Variant::full, Variant::mean})
        for (const Dtype dtype : dtypes) {
          CAPTURES(backend, D, name_of(dtype));
          const Size size{3, 40, 4, static_cast<int64_t>(D)};
          const Op op = Depth{size, variant}.op();
          Trial a(op, dtype);
          a.x["slab"][(7 * 4 + 1) * D + 5] = NAN;  // layer 0, token 7, head 1, column 5
          a.run(backend);
          for (size_t i = 0; i < a["out2"].size(); ++i) {
            const size_t head = i / D % 4;
            CHECK(std::isnan(a["out2"][i]) ==
                  (i / (4 * D) == 7 && i % D == 5 && (variant == Variant::full || head == 1)));
          }
          for (const double x : block_of(a["dslab"], size, 0)) CHECK(!std::isnan(x));
          if (variant == Variant::mean) continue;  // no weights
          for (size_t i = 0; i < a["dweight2"].size(); ++i) CHECK(std::isnan(a["dweight2"][i]) == (i % 12 == 1));
        }
}

TEST_CASE("route: NaN in a gradient shows in what was read with it") {
  for (const Backend backend : fast_backends())
    for (const size_t D : {8, 64})
      for (const Variant variant : {Variant::full, Variant::mean})
        for (const Dtype dtype : dtypes) {
          const Op op = Depth{{3, 40, 4, static_cast<int64_t>(D)}, variant}.op();
          Trial a(op, dtype);
          a.x["dout2"][(7 * 4 + 1) * D + 5] = NAN;  // token 7, head 1, column 5
          a.run(backend);
          for (size_t i = 0; i < a["dslab"].size(); ++i) {
            const bool head = variant == Variant::full || i / D % 4 == 1;
            CHECK(std::isnan(a["dslab"][i]) == (i / (4 * D) % 40 == 7 && i % D == 5 && head));
          }
          if (variant == Variant::mean) continue;
          for (size_t i = 0; i < a["dweight2"].size(); ++i) CHECK(std::isnan(a["dweight2"][i]) == (i / 12 == 1));
        }
}

TEST_CASE("route: weights have more digits than bf16 on tensor cores, too") {
  if (!available(Backend::cuda)) return;
  const Size size{2, 3, 1, 32};
  const Op op = Depth{size, Variant::full}.op();
  Trial a(op, Dtype::bf16);
  a.x["weight1"] = {1 + 0x1p-10, -1};  // what is left of it after subtracting 1 is lost if it is rounded before
  a.x["slab"].assign(192, 1), a.x["dout0"].assign(96, -1), a.x["dout1"].assign(96, 1);
  a.run(Backend::cuda);
  // Exactly, although tensor cores cut sums off: all terms are multiples of 2^-10 of at most 1.
  for (const double x : a["out1"]) CHECK(x == 0x1p-10);
  for (const double x : block_of(a["dslab"], size, 0)) CHECK(x == 0x1p-10);
}

TEST_CASE("route: infinite weights on tensor cores, whose rounding leaves nothing") {
  if (!available(Backend::cuda)) return;
  const Op op = Depth{{2, 3, 2, 32}, Variant::full}.op();
  Trial a(op, Dtype::bf16);
  a.x["weight1"] = {INFINITY, 1, 0.5, 0.25, 1, 2, 3, 4};
  a.x["slab"].assign(a["slab"].size(), 1);
  a.forward(Backend::cuda);
  for (size_t i = 0; i < a["out1"].size(); ++i) CHECK(a["out1"][i] == (i / 32 % 2 == 0 ? INFINITY : 10));
}

TEST_CASE("route: the thread count does not change a bit") {
  for (const Dtype dtype : dtypes) check_threads(Depth{{3, 1000, 4, 8}, Variant::full}.op(), dtype);
}

TEST_CASE("route: wrong routers are errors") {
  const std::vector<float> memory(72);
  const std::vector<bf16> half(72);
  const float* const x = memory.data();
  const Shape block{4, 2, 3}, slab{3, 4, 2, 3};
  const std::vector<Router> good{
      {{}, {0}, {}}, {view(x, {2, 4}), {0, 1}, view(x, {2, 4})}, {view(x, {2, 6}), {0, 1, 2}, view(x, {2, 6})}};
  const auto refused = [&](const auto* of, const std::vector<Router>& routers) {
    CHECK_THROWS_AS(route_forward(view(of, block), view(of, slab), routers[2], fast), Error);
    CHECK_THROWS_AS(route_backward(view(of, block), view(of, slab), view(of, block), routers, 2, fast), Error);
  };
  for (const std::vector<int>& sources : std::vector<std::vector<int>>{{}, {1, 0}, {1, 1}, {-1, 2}, {0, 3}}) {
    std::vector<Router> bad = good;
    bad[2].sources = sources;
    refused(x, bad);
  }
  std::vector<Router> bad = good;
  bad[2].weight.shape = Shape{2, 5};
  refused(x, bad);
  CHECK_THROWS_AS(route_forward(view(half.data(), block), view(half.data(), slab), good[2], reference), Error);
  bad = good;
  bad[2].weight.dtype = Dtype::bf16;
  refused(half.data(), bad);
}
