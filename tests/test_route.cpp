#include "kernels/route.h"

#include <omp.h>

#include "tests/check.h"

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

std::vector<int> sources_of(Variant variant, int layer) {
  if (variant == Variant::mixed) variant = variants[static_cast<size_t>(layer) % 4];
  std::vector<int> sources;
  for (int s = 0; s <= layer; ++s) {
    const bool skipped = (variant == Variant::last_two && s < layer - 1) ||
                         (variant == Variant::first_and_own && s > 0 && s < layer);
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
  std::vector<T> slab;
  std::vector<std::vector<T>> dout, dslice;
  std::vector<std::vector<Wide<T>>> weight, dweight;
  std::vector<Router> routers;

  Depth(const Size& s, Variant variant) : size(s), slab(random_vector<T>(s.L * s.block(), 1)) {
    for (int l = 0; l < s.L; ++l) {
      const int64_t columns = (l + 1) * s.K, seed = 10 * (l + 1);
      const bool trained = is_trained(variant, l);
      weight.push_back(random_vector<Wide<T>>(trained ? s.K * columns : 0, static_cast<uint64_t>(seed + 1)));
      dout.push_back(random_vector<T>(s.block(), static_cast<uint64_t>(seed + 2)));
      dweight.push_back(random_vector<Wide<T>>(trained ? s.K * columns : 0, static_cast<uint64_t>(seed + 3)));
      dslice.push_back(poisoned<T>(s.block()));
      auto matrix = [&](const auto& of) { return trained ? view(of.data(), {s.K, columns}) : Tensor{}; };
      routers.push_back({matrix(weight.back()), sources_of(variant, l), matrix(dweight.back())});
    }
  }
  Depth(const Depth&) = delete;  // the routers point into weight

  std::vector<T> forward(int l, Stream stream) {
    auto out = poisoned<T>(size.block());
    route_forward(view(out.data(), {size.N, size.K, size.D}), slab_view(), routers[static_cast<size_t>(l)], stream);
    return out;
  }
  void backward(Stream stream) {
    for (int l = static_cast<int>(size.L) - 1; l >= 0; --l) {
      const size_t i = static_cast<size_t>(l);
      route_backward(view(dslice[i].data(), {size.N, size.K, size.D}), slab_view(),
                     view(dout[i].data(), {size.N, size.K, size.D}), routers, l, stream);
    }
  }
  Tensor slab_view() { return view(slab.data(), {size.L, size.N, size.K, size.D}); }
};

const Stream fast{Backend::cpu}, reference{Backend::reference};

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

const std::vector<Size> sizes{{1, 1, 1, 1}, {3, 5, 1, 3},   {4, 37, 2, 8},  {3, 70, 3, 24}, {3, 300, 8, 64},
                              {2, 9, 6, 100}, {4, 33, 4, 16}, {2, 130, 16, 33}};

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
    std::vector<double> dslab;
    for (const auto& d : depth.dslice) dslab.insert(dslab.end(), d.begin(), d.end());
    check_close("dslab", dslab, want_dslab, 1e-14);
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
                const double w = weight.empty() ? mean
                                                : static_cast<double>(weight[static_cast<size_t>(
                                                      h * (l + 1) * size.K + s * size.K + from)]);
                const auto in = static_cast<size_t>((n * size.K + h) * size.D + d);
                want[static_cast<size_t>(s * size.block() + (n * size.K + from) * size.D + d)] +=
                    w * static_cast<double>(depth.dout[static_cast<size_t>(l)][in]);
              }
    }
    depth.backward(fast);
    std::vector<float> dslab;
    for (const auto& d : depth.dslice) dslab.insert(dslab.end(), d.begin(), d.end());
    check_close("dslab", dslab, want, 1e-6);
  }
}

TEST_CASE_TEMPLATE("route: fast CPU equals the reference and reads nothing but the sources", T, float, bf16) {
  const double tolerance = tolerance_or_rounding<T>(1e-6);
  for (const Size& size : sizes) {
    for (Variant variant : variants) {
      CAPTURE(size.K);
      CAPTURE(size.D);
      CAPTURE(static_cast<int>(variant));
      for (int l = 0; l < size.L; ++l) {
        CAPTURE(l);
        Depth<T> depth(size, variant);
        poison_unread(depth, l);
        const auto slab64 = convert<double>(depth.slab);
        const auto weight64 = convert<double>(depth.weight[static_cast<size_t>(l)]);
        auto out64 = poisoned<double>(size.block());
        route_forward_ref(out64.data(), slab64.data(), weight64.empty() ? nullptr : weight64.data(),
                          depth.routers[static_cast<size_t>(l)].sources, (l + 1) * size.K, size.N, size.K, size.D);
        check_close("out", depth.forward(l, fast), out64, tolerance);
      }
      Depth<T> depth(size, variant);
      Depth<double> depth64(size, variant);
      for (size_t l = 0; l < depth.weight.size(); ++l) {
        std::copy(depth.weight[l].begin(), depth.weight[l].end(), depth64.weight[l].begin());
        std::copy(depth.dweight[l].begin(), depth.dweight[l].end(), depth64.dweight[l].begin());
        std::copy(depth.dout[l].begin(), depth.dout[l].end(), depth64.dout[l].begin());
      }
      std::copy(depth.slab.begin(), depth.slab.end(), depth64.slab.begin());
      depth.backward(fast);
      depth64.backward(reference);
      for (size_t l = 0; l < depth.weight.size(); ++l) {
        CAPTURE(l);
        check_close("dslice", depth.dslice[l], depth64.dslice[l], tolerance);
        check_close("dweight", depth.dweight[l], depth64.dweight[l], 2e-6);
      }
      check_close("slab", depth.slab, depth64.slab, 0.0);  // every block is its layer's dout now
      for (size_t l = 0; l < depth.dout.size(); ++l)
        CHECK(std::equal(depth.dout[l].begin(), depth.dout[l].end(), &depth.slab[l * depth.dout[l].size()]));
    }
  }
}

TEST_CASE("route: backward reads only its block and its readers', and keeps the columns of other layers") {
  const Size size{5, 50, 4, 8};
  const int l = 2;
  Depth<float> depth(size, Variant::last_two);  // layers 2 and 3 read layer 2, layer 4 does not
  for (const int unread : {0, 1, 4})
    std::fill_n(depth.slab.begin() + unread * size.block(), size.block(), std::numeric_limits<float>::quiet_NaN());
  const auto before = depth.dweight;
  route_backward(view(depth.dslice[l].data(), {size.N, size.K, size.D}), depth.slab_view(),
                 view(depth.dout[l].data(), {size.N, size.K, size.D}), depth.routers, l, fast);
  for (float g : depth.dslice[l]) CHECK(std::isfinite(g));
  for (size_t r = 0; r < before.size(); ++r)
    for (size_t i = 0; i < before[r].size(); ++i) {
      const size_t source = i % ((r + 1) * 4) / 4;
      CHECK((depth.dweight[r][i] != before[r][i]) == (source == 2 && (r == 2 || r == 3)));
      CHECK(std::isfinite(depth.dweight[r][i]));
    }
}

TEST_CASE_TEMPLATE("route: the identity is exact, forward and backward", T, float, bf16) {
  for (const Size& size : sizes) {
    CAPTURE(size.K);
    CAPTURE(size.D);
    Depth<T> depth(size, Variant::full);
    for (int64_t l = 1; l < size.L; ++l) {
      auto& weight = depth.weight[static_cast<size_t>(l)];
      for (int64_t h = 0; h < size.K; ++h)
        for (int64_t c = 0; c < (l + 1) * size.K; ++c)
          weight[static_cast<size_t>(h * (l + 1) * size.K + c)] = c == l * size.K + h ? 1.f : 0.f;
    }
    for (int l = 0; l < size.L; ++l) {
      const auto out = depth.forward(l, fast);
      CHECK(std::equal(out.begin(), out.end(), depth.slab.begin() + l * size.block()));
    }
    depth.backward(fast);
    CHECK(depth.dslice == depth.dout);
  }
}

TEST_CASE_TEMPLATE("route: other shapes of the same memory, and dslice in place of dout", T, float, bf16) {
  const Size size{3, 6, 2, 8};
  Depth<T> depth(size, Variant::full);
  auto out = poisoned<T>(size.block());
  route_forward(view(out.data(), {2, 3, 2, 8}), view(depth.slab.data(), {3, 6, 16}), depth.routers[2], fast);
  CHECK(out == depth.forward(2, fast));

  Depth<T> in_place(size, Variant::full);
  depth.backward(fast);
  for (int l = 2; l >= 0; --l) {
    const size_t i = static_cast<size_t>(l);
    const Tensor d = view(in_place.dout[i].data(), {2, 3, 2, 8});
    in_place.routers[i].dweight = Tensor{};
    route_backward(d, view(in_place.slab.data(), {3, 6, 16}), d, in_place.routers, l, fast);
    CHECK(in_place.dout[i] == depth.dslice[i]);
  }
}

TEST_CASE_TEMPLATE("route: NaN in a source shows, in forward and in dweight", T, float, bf16) {
  const Size size{3, 40, 4, 8};
  for (Variant variant : {Variant::full, Variant::mean}) {
    Depth<T> depth(size, variant);
    depth.slab[(7 * 4 + 1) * 8 + 5] = std::numeric_limits<float>::quiet_NaN();  // layer 0, token 7, head 1, column 5
    const auto out = depth.forward(2, fast);
    for (size_t h = 0; h < 4; ++h) CHECK(is_nan(out[(7 * 4 + h) * 8 + 5]) == (variant == Variant::full || h == 1));
    depth.backward(fast);
    for (size_t i = 0; i < depth.dweight[2].size(); ++i) CHECK(is_nan(depth.dweight[2][i]) == (i % 12 == 1));
  }
}

TEST_CASE_TEMPLATE("route: the thread count does not change a bit", T, float, bf16) {
  const Size size{3, 1000, 4, 8};
  const int threads = omp_get_max_threads();
  Depth<T> one(size, Variant::full), three(size, Variant::full);
  omp_set_num_threads(1);
  const auto out = one.forward(2, fast);
  one.backward(fast);
  omp_set_num_threads(3);
  CHECK(three.forward(2, fast) == out);
  three.backward(fast);
  omp_set_num_threads(threads);
  CHECK(one.dslice == three.dslice);
  CHECK(one.dweight == three.dweight);
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
