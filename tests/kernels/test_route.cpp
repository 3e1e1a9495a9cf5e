#include "kernels/depth/route.h"

#include "tests/support/depth_cases.h"

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

// All layers of one depth: slabs, cotangents, weights, one vector per layer.
template <class T>
struct Depth {
  Size size;
  Kernels kernels = Kernels::fast;
  std::vector<T> slab;
  std::vector<std::vector<T>> dout, dslice;
  std::vector<std::vector<AccumulationType<T>>> weight, dweight;
  std::vector<Router> routers;

  Depth(const Size& s, Variant variant) : size(s), slab(random_vector<T>(s.L * s.block(), 1)) {
    for (int l = 0; l < s.L; ++l) {
      const int64_t columns = (l + 1) * s.K, seed = 10 * (l + 1);
      const bool trained = is_trained(variant, l);
      weight.push_back(
          random_vector<AccumulationType<T>>(trained ? s.K * columns : 0, static_cast<uint64_t>(seed + 1)));
      dout.push_back(random_vector<T>(s.block(), static_cast<uint64_t>(seed + 2)));
      dweight.push_back(
          random_vector<AccumulationType<T>>(trained ? s.K * columns : 0, static_cast<uint64_t>(seed + 3)));
      dslice.push_back(poisoned<T>(s.block()));
      auto matrix = [&](const auto& of) { return trained ? view(of, {s.K, columns}) : Tensor{}; };
      routers.push_back({matrix(weight.back()), sources_of(variant, l), matrix(dweight.back())});
    }
  }
  Depth(const Depth&) = delete;  // the routers point into weight

  std::vector<T> forward(int l, Stream stream) {
    auto out = poisoned<T>(size.block());
    forward(rows(out), slab_view(), l, stream);
    return out;
  }
  void backward(Stream stream) {
    for (int l = static_cast<int>(size.L) - 1; l >= 0; --l) {
      const size_t i = static_cast<size_t>(l);
      backward(rows(dslice[i]), slab_view(), rows(dout[i]), l, stream);
    }
  }
  void forward(const Tensor& out, const Tensor& slab_tensor, int l, Stream stream) {
    Router router = routers[static_cast<size_t>(l)];
    run_on(stream.backend, {out, slab_tensor, router.weight}, [&](auto& t, Stream there) {
      router.weight = t[2];
      if (is_plain(kernels, there)) route_forward_plain(t[0], t[1], router, size.N, size.K, size.D);
      else route_forward(t[0], t[1], router, there);
    });
  }
  void backward(const Tensor& dslice_tensor, const Tensor& slab_tensor, const Tensor& dout_tensor, int l,
                Stream stream) {
    std::vector<Tensor> tensors{dslice_tensor, slab_tensor, dout_tensor};
    for (const Router& router : routers) tensors.insert(tensors.end(), {router.weight, router.dweight});
    run_on(stream.backend, tensors, [&](auto& t, Stream there) {
      auto readers = routers;
      for (size_t r = 0; r < readers.size(); ++r) readers[r].weight = t[3 + 2 * r], readers[r].dweight = t[4 + 2 * r];
      if (is_plain(kernels, there)) route_backward_plain(t[0], t[1], t[2], readers, l, size.N, size.K, size.D);
      else route_backward(t[0], t[1], t[2], readers, l, there);
    });
  }
  Tensor rows(const std::vector<T>& block) const { return view(block, {size.N, size.K, size.D}); }
  Tensor slab_view() const { return view(slab, {size.L, size.N, size.K, size.D}); }
};

// A random slab in which the blocks that layer l may not read are NaN: any use of them shows.
template <class T>
void poison_unread(Depth<T>& depth, int l) {
  const auto& sources = depth.routers[static_cast<size_t>(l)].sources;
  for (int s = 0; s < depth.size.L; ++s) {
    if (std::binary_search(sources.begin(), sources.end(), s)) continue;
    std::fill_n(depth.slab.begin() + s * depth.size.block(), depth.size.block(),
                T(std::numeric_limits<float>::quiet_NaN()));
  }
}

const std::vector<Size> sizes{{1, 1, 1, 1},    {3, 5, 1, 3},   {4, 37, 2, 8},  {3, 70, 3, 24},
                              {3, 300, 8, 64}, {2, 9, 6, 100}, {4, 33, 4, 16}, {2, 130, 16, 33}};
// One block and several, of mixture and correlation, and several rounds of a warp; both widths; heads in one group and
// in two.
const std::vector<Size> gpu_sizes{{1, 1, 1, 1},    {3, 5, 1, 3},   {4, 37, 2, 8},   {2, 70, 1, 33},
                                  {2, 260, 2, 40}, {2, 4, 6, 100}, {4, 9, 9, 16},  // on tensor cores in bf16:
                                  {4, 40, 8, 32},  {3, 9, 3, 64},  {2, 130, 1, 32}, {3, 3, 5, 96}};

}  // namespace

TEST_CASE("route: reference backward over a whole depth is the derivative of the reference forward") {
  const Size size{4, 3, 2, 3};
  for (Variant variant : variants) {
    CAPTURE(static_cast<int>(variant));
    Depth<double> depth(size, variant);
    // The loss sees every layer's out, hence the gradient of each block has parts from all layers that read it.
    auto loss = [&](const std::vector<Complex>& slab, const std::vector<std::vector<Complex>>& weight) {
      Complex sum = 0;
      for (size_t l = 0; l < depth.routers.size(); ++l) {
        std::vector<Complex> out(static_cast<size_t>(size.block()));
        route_forward_ref(out.data(), slab.data(), weight[l].empty() ? nullptr : weight[l].data(),
                          depth.routers[l].sources, static_cast<int64_t>(l + 1) * size.K, size.N, size.K, size.D);
        sum += dot(depth.dout[l], out);
      }
      return sum;
    };
    std::vector<std::vector<Complex>> weight;
    for (const auto& w : depth.weight) weight.push_back(convert<Complex>(w));
    const auto slab = convert<Complex>(depth.slab);
    const auto want_dslab = complex_step(depth.slab, [&](auto& x) { return loss(x, weight); });
    std::vector<std::vector<double>> want_dweight;
    for (size_t l = 0; l < weight.size(); ++l) {
      want_dweight.push_back(complex_step(depth.weight[l], [&](auto& w) {
        auto changed = weight;
        changed[l] = w;
        return loss(slab, changed);
      }));
      for (size_t i = 0; i < want_dweight[l].size(); ++i) want_dweight[l][i] += depth.dweight[l][i];  // it is added
    }

    depth.backward(reference);
    check_close("dslab", joined(depth.dslice), want_dslab, 1e-14);
    for (size_t l = 0; l < weight.size(); ++l) check_close("dweight", depth.dweight[l], want_dweight[l], 1e-14);
  }
}

TEST_CASE("route: the gather backward equals a scatter backward") {
  const Size size{4, 11, 2, 3};
  for (Variant variant : variants) {
    CAPTURE(static_cast<int>(variant));
    Depth<float> depth(size, variant);
    std::vector<double> want(depth.slab.size(), 0.0);
    for (int64_t l = 0; l < size.L; ++l) {
      const auto& sources = depth.routers[static_cast<size_t>(l)].sources;
      const auto& weight = depth.weight[static_cast<size_t>(l)];
      for (int s : sources)
        for (int64_t n = 0; n < size.N; ++n)
          for (int64_t h = 0; h < size.K; ++h)
            for (int64_t from = 0; from < size.K; ++from)
              for (int64_t d = 0; d < size.D; ++d) {
                const double mean = h == from ? 1.0 / static_cast<double>(sources.size()) : 0.0;
                const double w =
                    weight.empty()
                        ? mean
                        : static_cast<double>(weight[static_cast<size_t>(h * (l + 1) * size.K + s * size.K + from)]);
                const auto in = static_cast<size_t>((n * size.K + h) * size.D + d);
                want[static_cast<size_t>(s * size.block() + (n * size.K + from) * size.D + d)] +=
                    w * static_cast<double>(depth.dout[static_cast<size_t>(l)][in]);
              }
    }
    for (const Backend backend : fast_backends()) {
      Depth<float> gathered(size, variant);
      gathered.backward(Stream{backend});
      check_close("dslab", joined(gathered.dslice), want, 1e-6);
    }
  }
}

namespace {

template <class T>
void check_against_reference(const Size& size, Variant variant, Stream stream, Kernels kernels) {
  const double tolerance = tolerance_or_rounding<T>(1e-6);
  for (int l = 0; l < size.L; ++l) {
    CAPTURE(l);
    Depth<T> depth(size, variant);
    depth.kernels = kernels;
    poison_unread(depth, l);
    const auto slab64 = convert<double>(depth.slab);
    const auto weight64 = convert<double>(depth.weight[static_cast<size_t>(l)]);
    auto out64 = poisoned<double>(size.block());
    route_forward_ref(out64.data(), slab64.data(), weight64.empty() ? nullptr : weight64.data(),
                      depth.routers[static_cast<size_t>(l)].sources, (l + 1) * size.K, size.N, size.K, size.D);
    check_close("out", depth.forward(l, stream), out64, tolerance);
  }
  Depth<T> depth(size, variant);
  depth.kernels = kernels;
  Depth<double> depth64(size, variant);
  const auto copy = [](const auto& from, auto& to) {  // in place: the routers point there
    for (size_t l = 0; l < from.size(); ++l) std::copy(from[l].begin(), from[l].end(), to[l].begin());
  };
  copy(depth.weight, depth64.weight), copy(depth.dweight, depth64.dweight), copy(depth.dout, depth64.dout);
  depth64.slab = convert<double>(depth.slab);
  depth.backward(stream);
  depth64.backward(reference);
  for (size_t l = 0; l < depth.weight.size(); ++l) {
    CAPTURE(l);
    check_close("dslice", depth.dslice[l], depth64.dslice[l], tolerance);
    check_close("dweight", depth.dweight[l], depth64.dweight[l], 2e-6);
  }
  check_close("slab", depth.slab, depth64.slab, 0.0);  // every block is its layer's dout now
  CHECK(depth.slab == joined(depth.dout));
}

}  // namespace

TEST_CASE_TEMPLATE("route: the fast backends equal the reference and read nothing but the sources", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend))
      for (Variant variant : is_slow(backend) ? few_variants : variants) {
        CAPTURES(size.K, size.D, variant, kernels);
        check_against_reference<T>(size, variant, Stream{backend}, kernels);
      }
  });
}

TEST_CASE_TEMPLATE("route: memory that begins between two multiples of 16 bytes", T, float, bf16) {
  const Size size{3, 9, 2, 32};
  for (const Backend backend : fast_backends()) {
    Depth<T> depth(size, Variant::full), want(size, Variant::full);
    for (int l = 2; l >= 0; --l) {
      const size_t i = static_cast<size_t>(l);
      auto out = poisoned<T>(size.block() + 1), slab = one_later(depth.slab);
      auto dout = one_later(depth.dout[i]), dslice = poisoned<T>(size.block() + 1);
      Router router = depth.routers[i];
      const Shape block{size.N, size.K, size.D}, blocks{size.L, size.N, size.K, size.D};
      run_on(backend, {tensor_of(out), tensor_of(slab), router.weight}, [&](auto& t, Stream stream) {
        router.weight = t[2];
        route_forward(from_second<T>(t[0], block), from_second<T>(t[1], blocks), router, stream);
      });
      check_close("out", one_earlier(out), convert<double>(depth.forward(l, Stream{backend})),
                  tolerance_or_rounding<T>(1e-6));
      std::vector<Tensor> tensors{tensor_of(dslice), tensor_of(slab), tensor_of(dout)};
      for (const Router& r : depth.routers) tensors.insert(tensors.end(), {r.weight, r.dweight});
      run_on(backend, tensors, [&](auto& t, Stream stream) {
        auto readers = depth.routers;
        for (size_t r = 0; r < readers.size(); ++r) readers[r].weight = t[3 + 2 * r], readers[r].dweight = t[4 + 2 * r];
        route_backward(from_second<T>(t[0], block), from_second<T>(t[1], blocks), from_second<T>(t[2], block), readers,
                       l, stream);
      });
      std::copy(slab.begin() + 1, slab.end(), depth.slab.begin());
      want.backward(want.rows(want.dslice[i]), want.slab_view(), want.rows(want.dout[i]), l, Stream{backend});
      check_close("dslice", one_earlier(dslice), convert<double>(want.dslice[i]), tolerance_or_rounding<T>(1e-6));
      CHECK(depth.slab == want.slab);
      check_close("dweight", depth.dweight[i], convert<double>(want.dweight[i]), 1e-6);  // sums in another order
    }
  }
}

TEST_CASE("route: backward reads only its block and its readers', and keeps the columns of other layers") {
  const Size size{5, 50, 4, 8};
  const int l = 2;
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend)) {
      CAPTURES(backend, kernels);
      Depth<float> depth(size, Variant::last_two);  // layers 2 and 3 read layer 2, layer 4 does not
      depth.kernels = kernels;
      for (const int unread : {0, 1, 4})
        std::fill_n(depth.slab.begin() + unread * size.block(), size.block(), std::numeric_limits<float>::quiet_NaN());
      const auto before = depth.dweight;
      depth.backward(depth.rows(depth.dslice[l]), depth.slab_view(), depth.rows(depth.dout[l]), l, Stream{backend});
      for (float g : depth.dslice[l]) CHECK(std::isfinite(g));
      for (size_t r = 0; r < before.size(); ++r)
        for (size_t i = 0; i < before[r].size(); ++i) {
          const size_t source = i % ((r + 1) * 4) / 4;
          CHECK((depth.dweight[r][i] != before[r][i]) == (source == 2 && (r == 2 || r == 3)));
          CHECK(std::isfinite(depth.dweight[r][i]));
        }
    }
}

TEST_CASE_TEMPLATE("route: so many heads that a GPU keeps few layers' weights at a time", T, float, bf16) {
  if (!available(Backend::cuda)) return;
  // 256 terms in a sum in f32, one after the other.
  const double tolerance = tolerance_or_rounding<T>(4e-6);
  Depth<T> depth({4, 2, 64, 8}, Variant::full), want({4, 2, 64, 8}, Variant::full);
  for (Depth<T>* d : {&depth, &want})
    for (Router& router : d->routers) router.dweight = Tensor{};
  check_close("out", depth.forward(3, Stream{Backend::cuda}), convert<double>(want.forward(3, fast)), tolerance);
  depth.backward(Stream{Backend::cuda}), want.backward(fast);
  check_close("dslice", depth.dslice[0], convert<double>(want.dslice[0]), tolerance);
}

TEST_CASE_TEMPLATE("route: the identity is exact, forward and backward", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend)) {
      CAPTURES(size.K, size.D, kernels);
      Depth<T> depth(size, Variant::full);
      depth.kernels = kernels;
      for (int64_t l = 1; l < size.L; ++l) {
        auto& weight = depth.weight[static_cast<size_t>(l)];
        for (int64_t h = 0; h < size.K; ++h)
          for (int64_t c = 0; c < (l + 1) * size.K; ++c)
            weight[static_cast<size_t>(h * (l + 1) * size.K + c)] = c == l * size.K + h ? 1.f : 0.f;
      }
      for (int l = 0; l < size.L; ++l) {
        const auto out = depth.forward(l, Stream{backend});
        CHECK(std::equal(out.begin(), out.end(), depth.slab.begin() + l * size.block()));
      }
      depth.backward(Stream{backend});
      CHECK(depth.dslice == depth.dout);
    }
  });
}

TEST_CASE_TEMPLATE("route: other shapes of the same memory, and dslice in place of dout", T, float, bf16) {
  for (const Size& size : std::vector<Size>{{3, 6, 2, 8}, {3, 10, 12, 16}, {3, 10, 8, 64}}) {
    for (const Backend backend : fast_backends())
      for (const Kernels kernels : kernels_of(backend)) {
        CAPTURES(backend, kernels);
        const Stream stream{backend};
        const Shape split{2, size.N / 2, size.K, size.D}, flat{3, size.N, size.K * size.D};
        Depth<T> depth(size, Variant::full);
        depth.kernels = kernels;
        auto out = poisoned<T>(size.block());
        depth.forward(view(out, split), view(depth.slab.data(), flat), 2, stream);
        CHECK(out == depth.forward(2, stream));

        Depth<T> in_place(size, Variant::full);
        in_place.kernels = kernels;
        depth.backward(stream);
        for (int l = 2; l >= 0; --l) {
          const size_t i = static_cast<size_t>(l);
          const Tensor d = view(in_place.dout[i].data(), split);
          in_place.routers[i].dweight = Tensor{};
          in_place.backward(d, view(in_place.slab.data(), flat), d, l, stream);
          CHECK(in_place.dout[i] == depth.dslice[i]);
        }
      }
  }
}

TEST_CASE_TEMPLATE("route: NaN in a source shows, in forward and in dweight", T, float, bf16) {
  for (const Backend backend : fast_backends()) {
    for (const size_t D : {8, 64}) {
      for (Variant variant : {Variant::full, Variant::mean}) {
        CAPTURES(backend, D);
        Depth<T> depth({3, 40, 4, static_cast<int64_t>(D)}, variant);
        const float nan = std::numeric_limits<float>::quiet_NaN();
        depth.slab[(7 * 4 + 1) * D + 5] = nan;  // layer 0, token 7, head 1, column 5
        const auto out = depth.forward(2, Stream{backend});
        for (size_t i = 0; i < out.size(); ++i) {
          const size_t head = i / D % 4;
          CHECK(is_nan(out[i]) == (i / (4 * D) == 7 && i % D == 5 && (variant == Variant::full || head == 1)));
        }
        depth.backward(Stream{backend});
        for (size_t i = 0; i < depth.dweight[2].size(); ++i) CHECK(is_nan(depth.dweight[2][i]) == (i % 12 == 1));
        for (const T& x : depth.dslice[0]) CHECK(!is_nan(x));
      }
    }
  }
}

TEST_CASE_TEMPLATE("route: NaN in a gradient shows in what was read with it", T, float, bf16) {
  for (const Backend backend : fast_backends()) {
    for (const size_t D : {8, 64}) {
      for (Variant variant : {Variant::full, Variant::mean}) {
        Depth<T> depth({3, 40, 4, static_cast<int64_t>(D)}, variant);
        depth.dout[2][(7 * 4 + 1) * D + 5] = std::numeric_limits<float>::quiet_NaN();  // token 7, head 1, column 5
        depth.backward(Stream{backend});
        for (const auto& dslice : depth.dslice)
          for (size_t i = 0; i < dslice.size(); ++i) {
            const bool head = variant == Variant::full || i / D % 4 == 1;
            CHECK(is_nan(dslice[i]) == (i / (4 * D) == 7 && i % D == 5 && head));
          }
        for (size_t i = 0; i < depth.dweight[2].size(); ++i) CHECK(is_nan(depth.dweight[2][i]) == (i / 12 == 1));
      }
    }
  }
}

TEST_CASE("route: weights have more digits than bf16 on tensor cores, too") {
  if (!available(Backend::cuda)) return;
  const float w = 1 + 0x1p-10f;  // what is left of it after subtracting 1 is lost if it is rounded before
  Depth<bf16> depth({2, 3, 1, 32}, Variant::full);
  depth.weight[1] = {w, -1.f};
  std::fill(depth.slab.begin(), depth.slab.end(), 1.f);
  std::fill(depth.dout[0].begin(), depth.dout[0].end(), -1.f);
  std::fill(depth.dout[1].begin(), depth.dout[1].end(), 1.f);
  // Exactly, although tensor cores cut sums off: all terms are multiples of 2^-10 of at most 1.
  for (const bf16 x : depth.forward(1, Stream{Backend::cuda})) CHECK(static_cast<float>(x) == 0x1p-10f);
  depth.backward(Stream{Backend::cuda});
  for (const bf16 x : depth.dslice[0]) CHECK(static_cast<float>(x) == 0x1p-10f);
}

TEST_CASE("route: infinite weights on tensor cores, whose rounding leaves nothing") {
  if (!available(Backend::cuda)) return;
  const Size size{2, 3, 2, 32};
  Depth<bf16> depth(size, Variant::full);
  depth.weight[1] = {std::numeric_limits<float>::infinity(), 1.f, 0.5f, 0.25f, 1.f, 2.f, 3.f, 4.f};
  std::fill(depth.slab.begin(), depth.slab.end(), 1.f);
  const auto out = depth.forward(1, Stream{Backend::cuda});
  for (size_t i = 0; i < out.size(); ++i)
    CHECK(static_cast<float>(out[i]) == (i / 32 % 2 == 0 ? std::numeric_limits<float>::infinity() : 10.f));
}

TEST_CASE_TEMPLATE("route: the thread count does not change a bit", T, float, bf16) {
  check_same_bits_on_any_threads<float>([] {
    Depth<T> depth({3, 1000, 4, 8}, Variant::full);
    const auto out = depth.forward(2, fast);
    depth.backward(fast);
    return flat(out, depth.dslice, depth.dweight);
  });
}

TEST_CASE("route: wrong routers are errors") {
  const Size size{3, 4, 2, 3};
  for (const std::vector<int>& sources : std::vector<std::vector<int>>{{}, {1, 0}, {1, 1}, {-1, 2}, {0, 3}}) {
    Depth<float> depth(size, Variant::full);
    depth.routers[2].sources = sources;
    CHECK_THROWS_AS(depth.forward(2, fast), Error);
    CHECK_THROWS_AS(depth.backward(fast), Error);
  }
  Depth<float> depth(size, Variant::full);
  depth.routers[2].weight.shape = Shape{2, 5};
  CHECK_THROWS_AS(depth.forward(2, fast), Error);
  CHECK_THROWS_AS(depth.backward(fast), Error);
  Depth<bf16> half(size, Variant::full);
  CHECK_THROWS_AS(half.forward(2, reference), Error);
  half.routers[2].weight.dtype = Dtype::bf16;
  CHECK_THROWS_AS(half.forward(2, fast), Error);
  CHECK_THROWS_AS(half.backward(fast), Error);
}
