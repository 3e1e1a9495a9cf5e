// The block's and the optimizer's kernels at the sizes of training: a model of 1B parameters, C = 2048 and F = 8192,
// 8,192 tokens, heads of 64 to 128, contexts up to 2048, a vocabulary of 50,257.
#include <deque>
#include <numeric>

#include "kernels/attention/attention.h"
#include "kernels/block/add.h"
#include "kernels/block/bias.h"
#include "kernels/block/cross_entropy.h"
#include "kernels/block/embedding.h"
#include "kernels/block/gelu.h"
#include "kernels/block/layernorm.h"
#include "kernels/block/matmul.h"
#include "kernels/block/positions.h"
#include "kernels/block/rmsnorm.h"
#include "kernels/block/rope.h"
#include "kernels/block/softmax.h"
#include "kernels/block/swiglu.h"
#include "kernels/optim/adamw.h"
#include "kernels/optim/convert.h"
#include "kernels/optim/gradient_norm.h"
#include "kernels/optim/newton_schulz.h"
#include "tests/support/real_sizes.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t rows = sized(8192, 37), C = sized(2048, 24), F = sized(8192, 40), V = sized(50257, 101);
// A few products, sums and functions: some units of 2^-24 of the size of the terms.
constexpr double pointwise = 2e-6;

}  // namespace

TEST_CASE("real sizes: memory beside an array") {
  if (!available(Backend::cuda)) return;
  DeviceMemory memory(100, 256);
  CHECK(memory.kept_inside());
  const std::byte written{0};
  for (const int64_t beside : {-256, -1, 100, 355}) {
    DeviceMemory spoilt(100, 256);
    copy_to_device(static_cast<std::byte*>(spoilt.data()) + beside, &written, 1);
    CHECK(!spoilt.kept_inside());
  }
}

TEST_CASE("comparing at real sizes: a wrong element is found") {
  const std::vector<float> want{1, -2, 3, 4};
  auto got = want;
  CHECK(first_wrong(view(got), view(want), 1e-6) == -1);
  got[2] += 1e-4f;
  CHECK(first_wrong(view(got), view(want), 1e-6) == 2);
  got[1] = NAN;
  CHECK(first_wrong(view(got), view(want), 1) == 1);
  CHECK(first_wrong(view(want), view(got), 1) == 1);
  CHECK(relative_distance(view(convert<float>(want)), view(want)) == 0);
  CHECK(std::isnan(relative_distance(view(got), view(want))));
  const std::vector<bf16> bf16_row{1, 2, 3};
  auto next = bf16_row;
  next[1] = 2 + 0x1p-6f;
  CHECK(first_wrong(view(next), view(bf16_row), 1e-6) == -1);
  CHECK(first_wrong(view(next), view(bf16_row), exact) == 1);
  next[1] = 2 + 0x1p-5f;
  CHECK(first_wrong(view(next), view(bf16_row), 1e-6) == 1);
}

TEST_CASE("real sizes: add, gelu, swiglu and convert") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : storage_types)
    for (const bool accumulates : {false, true}) {
      CAPTURES(name_of(dtype), accumulates);
      RealSizes at;
      const Shape shape{rows / 2, F};
      const size_t a = at.input("a", dtype, shape, 4), b = at.input("b", dtype, shape);
      const size_t dout = at.input("dout", dtype, shape);
      const size_t sum = at.output("sum", dtype, shape, exact), gelu = at.output("gelu", dtype, shape, pointwise);
      const size_t by_tanh = at.output("by_tanh", dtype, shape, pointwise);
      const size_t out = at.output("out", dtype, shape, pointwise);
      const size_t copy = at.gradient("copy", dtype, shape, exact, accumulates);
      const size_t dinp = at.gradient("dinp", dtype, shape, pointwise, accumulates);
      const size_t dtanh = at.gradient("dtanh", dtype, shape, pointwise, accumulates);
      const size_t dgate = at.gradient("dgate", dtype, shape, pointwise, accumulates);
      const size_t dup = at.gradient("dup", dtype, shape, pointwise, !accumulates);
      const size_t original = at.input("original", Dtype::f32, shape, 1e3);
      const size_t bf16_copy = at.output("bf16 copy", Dtype::bf16, shape, exact);
      at.run([&](auto& t, Stream stream) {
        add_forward(t[sum], t[a], t[b], stream);
        accumulate({t[copy], accumulates}, t[dout], stream);
        gelu_forward(t[gelu], t[a], GeluKind::erf, stream);
        gelu_backward({t[dinp], accumulates}, t[dout], t[a], GeluKind::erf, stream);
        gelu_forward(t[by_tanh], t[a], GeluKind::tanh, stream);
        gelu_backward({t[dtanh], accumulates}, t[dout], t[a], GeluKind::tanh, stream);
        swiglu_forward(t[out], t[a], t[b], stream);
        swiglu_backward({t[dgate], accumulates}, {t[dup], !accumulates}, t[dout], t[a], t[b], stream);
        convert(t[bf16_copy], t[original], stream);
      });
    }
}

// Beyond 2^31 elements: numbers that repeat every 1,000,003, which no power of two is a multiple of, so that an index
// that wraps around meets others. Two ops with 16 bytes a thread, two with an element, because their count is odd.
TEST_CASE("more elements than an int counts: add, copy, gelu and swiglu") {
  if (!available(Backend::cuda)) return;
  const int64_t most = sized((int64_t{1} << 31) + 100'008, int64_t{5008}), period = sized(1'000'003, 1003);
  const size_t bytes = static_cast<size_t>(most) * 2;
  Numbers a(Dtype::bf16, {period}), b(Dtype::bf16, {period}), want(Dtype::bf16, {period});
  a.fill_randomly(1, 4), b.fill_randomly(2, 1);
  const auto repeated = [&](const Numbers& numbers) {
    DeviceMemory memory(bytes);
    auto* to = static_cast<std::byte*>(memory.data());
    size_t done = numbers.tensor().bytes();
    copy_to_device(to, numbers.tensor().data, done);
    for (; done < bytes; done += std::min(done, bytes - done))
      copy_on_device(to + done, to, std::min(done, bytes - done));
    return memory;
  };
  const DeviceMemory x = repeated(a), y = repeated(b), out(bytes);
  using Call = std::function<void(const Tensor&, const Tensor&, const Tensor&, Stream)>;
  struct Op {
    std::string name;
    int64_t n;
    Call call;
  };
  const auto copy = [](auto& to, auto&, auto& from, Stream stream) { accumulate({to, false}, from, stream); };
  const auto gelu = [](auto& to, auto& from, auto&, Stream stream) { gelu_forward(to, from, GeluKind::erf, stream); };
  const Numbers host(Dtype::bf16, {most});
  for (const Op& op : std::vector<Op>{{"add", most - 5, add_forward},
                                      {"copy", most, copy},
                                      {"gelu", most - 5, gelu},
                                      {"swiglu", most, swiglu_forward}}) {
    CAPTURE(op.name);
    const auto first = [&](void* data) { return Tensor{data, Dtype::bf16, {op.n}}; };
    fill_device_memory(out.data(), 0xFF, bytes);
    op.call(first(out.data()), first(x.data()), first(y.data()), Stream{Backend::cuda});
    op.call(want.tensor(), a.tensor(), b.tensor(), Stream{Backend::cpu});
    const Tensor got = first(host.tensor().data);
    copy_from_device(got.data, out.data(), got.bytes());
    CHECK(first_wrong(got, want.tensor(), pointwise) == -1);
    for (const DeviceMemory* memory : {&x, &y, &out}) CHECK(memory->kept_inside());
  }
}

TEST_CASE("real sizes: norms and softmax over a row") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : storage_types)
    for (const bool accumulates : {false, true}) {
      CAPTURES(name_of(dtype), accumulates);
      RealSizes at;
      const Shape shape{rows, C};
      const size_t inp = at.input("inp", dtype, shape), dout = at.input("dout", dtype, shape);
      const size_t weight = at.input("weight", Dtype::f32, {C});
      const size_t rms = at.output("rms", dtype, shape, of_sum(C)), layer = at.output("layer", dtype, shape, of_sum(C));
      const size_t affine = at.output("affine", dtype, shape, of_sum(C));
      const size_t bias = at.input("bias", Dtype::f32, {C});
      const size_t rrms = at.output("rrms", Dtype::f32, {rows}, of_sum(C));
      const size_t rstd = at.output("rstd", Dtype::f32, {rows}, of_sum(C));
      const size_t mean = at.output("mean", Dtype::f32, {rows}, of_sum(C));
      const size_t soft = at.output("soft", Dtype::f32, shape, of_sum(C));
      at.run([&](auto& t, Stream stream) {
        rmsnorm_forward(t[rms], t[rrms], t[inp], t[weight], 1e-6, stream);
        layernorm_forward(t[layer], t[mean], t[rstd], t[inp], {}, {}, 1e-5, stream);
        layernorm_forward(t[affine], t[mean], t[rstd], t[inp], t[weight], t[bias], 1e-5, stream);
        softmax_forward(t[soft], t[inp], Pruning{}, stream);
      });
      const size_t drms = at.gradient("drms", dtype, shape, of_sum(C), accumulates);
      const size_t dlayer = at.gradient("dlayer", dtype, shape, of_sum(C), accumulates);
      const size_t daffine = at.gradient("daffine", dtype, shape, of_sum(C), accumulates);
      const size_t dgain = at.sum("dgain", Dtype::f32, {C}, of_sum(rows));
      const size_t dbias = at.sum("dbias", Dtype::f32, {C}, of_sum(rows));
      const size_t dalpha = at.input("dalpha", Dtype::f32, shape);
      const size_t dsoft = at.gradient("dsoft", dtype, shape, of_sum(C), accumulates);
      const size_t dweight = at.sum("dweight", Dtype::f32, {C}, of_sum(rows));
      at.run([&](auto& t, Stream stream) {
        rmsnorm_backward({t[drms], accumulates}, t[dweight], t[dout], t[inp], t[weight], t[rrms], stream);
        layernorm_backward({t[dlayer], accumulates}, {}, {}, t[dout], t[inp], {}, t[mean], t[rstd], stream);
        layernorm_backward({t[daffine], accumulates}, t[dgain], t[dbias], t[dout], t[inp], t[weight], t[mean], t[rstd],
                           stream);
        softmax_backward({t[dsoft], accumulates}, t[dalpha], t[inp], Pruning{}, stream);
      });
    }
}

TEST_CASE("real sizes: bias and positions") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : storage_types)
    for (const int64_t width : {C, F}) {
      CAPTURES(name_of(dtype), width);
      const int64_t T = sized(1024, 9), B = rows / T;
      RealSizes at;
      const Shape shape{B, T, width};
      const size_t inp = at.input("inp", dtype, shape), dout = at.input("dout", dtype, shape);
      const size_t weight = at.input("weight", Dtype::f32, {T + 3, width});
      const size_t placed = at.output("placed", dtype, shape, exact);
      const size_t dweight = at.sum("dweight", Dtype::f32, {T + 3, width}, exact);
      const size_t dbias = at.sum("dbias", Dtype::f32, {width}, of_sum(B * T));
      at.run([&](auto& t, Stream stream) {
        positions_forward(t[placed], t[inp], t[weight], 3, stream);
        positions_backward(t[dweight], t[dout], stream);
        bias_backward(t[dbias], t[dout], stream);
      });
    }
}

TEST_CASE("real sizes: rope, and the norm of every head") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : storage_types)
    for (const int64_t D : {64, 96, 128}) {
      CAPTURES(name_of(dtype), D);
      const int64_t T = sized(2048, 9), B = sized(4, 2), H = sized(16, 3);
      RealSizes at;
      const Shape shape{B, T, H, D};
      const size_t inp = at.input("inp", dtype, shape), dout = at.input("dout", dtype, shape);
      const size_t table = at.input("table", Dtype::f32, {T, D}), weight = at.input("weight", Dtype::f32, {D});
      const size_t out = at.output("out", dtype, shape, pointwise), dinp = at.sum("dinp", dtype, shape, pointwise);
      const size_t norm = at.output("norm", dtype, shape, of_sum(D));
      const size_t rstd = at.output("rstd", Dtype::f32, {B, T, H}, of_sum(D));
      at.run([&](auto& t, Stream stream) {
        rope_forward(t[out], t[inp], t[table], 0, stream);
        rope_backward({t[dinp], true}, t[dout], t[table], 0, stream);
        rmsnorm_forward(t[norm], t[rstd], t[inp], t[weight], 1e-6, stream);
      });
      const size_t dnorm = at.output("dnorm", dtype, shape, of_sum(D));
      const size_t dweight = at.sum("dweight", Dtype::f32, {D}, of_sum(B * T * H));
      at.run([&](auto& t, Stream stream) {
        rmsnorm_backward({t[dnorm], false}, t[dweight], t[dout], t[inp], t[weight], t[rstd], stream);
      });
    }
}

TEST_CASE("real sizes: embedding, where every other token is the same") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : storage_types) {
    CAPTURES(name_of(dtype));
    RealSizes at;
    const Shape shape{sized(4, 1), sized(2048, 37), C};
    const size_t tokens = at.tokens("tokens", {shape[0], shape[1]}, V);
    const size_t weight = at.input("weight", Dtype::f32, {V, C}), dout = at.input("dout", dtype, shape);
    const size_t out = at.output("out", dtype, shape, exact);
    // All are judged by the root mean square, which the frequent token's sum exceeds sqrt(half) times.
    const int64_t half = shape[0] * shape[1] / 2;
    const double tolerance = of_sum(half) * std::sqrt(static_cast<double>(half));
    const size_t dweight = at.sum("dweight", Dtype::f32, {V, C}, tolerance);
    at.run([&](auto& t, Stream stream) {
      embedding_forward(t[out], t[weight], t[tokens], stream);
      embedding_backward(t[dweight], t[dout], t[tokens], stream);
    });
  }
}

// Chunks of logits: of 1 GiB on the GPU, so three and the last not whole.
TEST_CASE("real sizes: cross_entropy in several chunks of logits") {
  if (!available(Backend::cuda)) return;
  const int64_t width = sized(256, 8);
  for (const Dtype dtype : storage_types) {
    CAPTURES(name_of(dtype));
    const bool in_bf16 = dtype == Dtype::bf16;
    const int64_t n = in_bf16 ? sized(24 * 1024, 33) : sized(12 * 1024, 33);
    RealSizes at;
    const size_t inp = at.input("inp", dtype, {n, width}), weight = at.input("weight", dtype, {V, width}, 0.3);
    const size_t targets = at.tokens("targets", {n}, V);
    const double rounded = in_bf16 ? of_bf16 : 0;
    const size_t losses = at.output("losses", Dtype::f32, {n}, of_products(dtype, width) + rounded);
    const size_t dinp = at.output("dinp", dtype, {n, width}, of_products(dtype, V) + rounded);
    const size_t dweight = at.sum("dweight", Dtype::f32, {V, width}, of_products(dtype, n) + rounded);
    for (int64_t i = 0; i < n; i += 5) at.numbers(targets).as<int32_t>()[i] = -1;
    at.run([&](auto& t, Stream stream) {
      cross_entropy_forward(t[losses], t[dinp], {t[dweight], true}, t[inp], t[weight], t[targets], 1.0, stream);
    });
  }
}

TEST_CASE("real sizes: matmul") {
  if (!available(Backend::cuda)) return;
  const int64_t few = sized(4096, 33);
  for (const Dtype dtype : storage_types)
    for (const auto& [n, from, to] : std::vector<std::array<int64_t, 3>>{{few, C, F}, {few, F, C}, {few + 13, C, C}}) {
      CAPTURES(name_of(dtype), n, from, to);
      RealSizes at;
      const size_t inp = at.input("inp", dtype, {n, from}), dout = at.input("dout", dtype, {n, to});
      const size_t weight = at.input("weight", dtype, {to, from});
      const size_t out = at.output("out", dtype, {n, to}, of_products(dtype, from));
      const size_t set = at.output("set", dtype, {n, from}, of_products(dtype, to));
      const size_t added = at.sum("added", dtype, {n, from}, of_products(dtype, to));
      const size_t dweight = at.sum("dweight", Dtype::f32, {to, from}, of_products(dtype, n));
      at.run([&](auto& t, Stream stream) {
        matmul_forward({t[out]}, t[inp], {t[weight]}, stream);
        matmul_backward_input({t[set], false}, {t[dout]}, {t[weight]}, stream);
        matmul_backward_input({t[added], true}, {t[dout]}, {t[weight]}, stream);
        matmul_backward_weight({t[dweight], true}, t[dout], t[inp], stream);
      });
    }
}

TEST_CASE("real sizes: attention") {
  if (!available(Backend::cuda)) return;
  struct Size {
    int64_t B, T, H, K, D;
  };
  std::vector<Size> sizes{{1, 70, 2, 1, 64}, {1, 33, 2, 2, 96}};
  if (!emulated)
    sizes = {{4, 512, 12, 12, 64}, {2, 2048, 16, 4, 64},  {2, 2048, 8, 8, 96},   {2, 2048, 16, 2, 128},
             {1, 1999, 6, 3, 64},  {3, 513, 8, 2, 128},   {1, 777, 5, 5, 96},    {1, 8192, 2, 1, 128},
             {1, 1000, 4, 2, 80},  {100, 64, 16, 16, 64}, {5000, 3, 16, 16, 64}, {1, 600, 3, 1, 200}};
  for (const Dtype dtype : storage_types)
    for (const Size& z : sizes)
      for (const bool accumulates : {false, true}) {
        CAPTURES(name_of(dtype), z.B, z.T, z.H, z.K, z.D, accumulates);
        const Shape of_q{z.B, z.T, z.H, z.D}, of_k{z.B, z.T, z.K, z.D}, of_lse{z.B, z.H, z.T};
        const double scale = 1 / std::sqrt(static_cast<double>(z.D)), rounded = dtype == Dtype::bf16 ? of_bf16 : 0;
        // Scores reach 5, so their sums carry that many more units, which exp makes relative.
        const double scored = 8 * of_sum(z.D) + rounded;
        const int64_t readers = z.T * (z.H / z.K);
        RealSizes at;
        const size_t q = at.input("q", dtype, of_q, 3), k = at.input("k", dtype, of_k);
        const size_t v = at.input("v", dtype, of_k), dout = at.input("dout", dtype, of_q);
        const size_t out = at.output("out", dtype, of_q, of_products(dtype, z.T) + scored);
        const size_t lse = at.output("lse", Dtype::f32, of_lse, of_products(dtype, z.T) + 8 * of_sum(z.D));
        at.run([&](auto& t, Stream stream) { attention_forward(t[out], t[lse], t[q], t[k], t[v], scale, {}, stream); });
        const size_t dq = at.gradient("dq", dtype, of_q, of_products(dtype, z.T) + scored, accumulates);
        const size_t dk = at.gradient("dk", dtype, of_k, of_products(dtype, readers) + scored, !accumulates);
        const size_t dv = at.gradient("dv", dtype, of_k, of_products(dtype, readers) + scored, accumulates);
        at.run([&](auto& t, Stream stream) {
          attention_backward({t[dq], accumulates}, {t[dk], !accumulates}, {t[dv], accumulates}, t[dout], t[out], t[q],
                             t[k], t[v], t[lse], scale, {}, stream);
        });
      }
}

TEST_CASE("real sizes: adamw with many rates, the norm of all gradients, sums of losses") {
  if (!available(Backend::cuda)) return;
  // 217 rows, as of 24 layers, and a large one.
  std::vector<AdamwRow> of_model;
  const int64_t each = sized(199'936, 192), count = 217, n = count * each + sized(V * C, int64_t{64});
  for (int64_t i = 0; i < count; ++i) {
    const double lr = 1e-3 * static_cast<double>(1 + i % 11), decay = i % 3 == 0 ? 0 : 0.1;
    of_model.push_back({i * each, i * each + (i % 5 == 0 ? 64 : each), lr, decay});
  }
  of_model.push_back({count * each, n, 2e-3, 0.1});
  RealSizes at;
  const size_t grads = at.input("grads", Dtype::f32, {n});
  const size_t params = at.sum("params", Dtype::f32, {n}, pointwise), m = at.sum("m", Dtype::f32, {n}, pointwise);
  const size_t v = at.sum("v", Dtype::f32, {n}, pointwise),
               bf16_copy = at.sum("bf16 copy", Dtype::bf16, {n}, pointwise);
  float* squares = at.numbers(v).as<float>();
  for (int64_t i = 0; i < n; ++i) squares[i] *= squares[i];
  std::vector<double> norms[2];
  at.run([&](auto& t, Stream stream) {
    const AdamwConstants constants{0.9, 0.95, 1e-8};
    const bool gpu = stream.backend == Backend::cuda;
    const AdamwNumbers of_step = adamw_numbers(constants, 7, 1, 0.5);
    std::vector<double> numbers{of_step.factor, of_step.lr, of_step.unbias_m, of_step.unbias_v, of_step.decay};
    const OnDevice<double> there(numbers);
    const Tensor by{gpu ? there.data : numbers.data(), Dtype::f64, Shape{5}};
    adamw_update(t[params], t[m], t[v], t[bf16_copy], t[grads], by, of_model, constants, stream);
    norms[gpu].resize(static_cast<size_t>(leaves_of(n)));
    const OnDevice<double> sums(norms[gpu]);
    leaf_squares({gpu ? sums.data : norms[0].data(), Dtype::f64, {leaves_of(n)}}, t[grads], stream);
    if (gpu) norms[1] = sums.host();
  });
  const auto all = [](const std::vector<double>& leaves) { return std::accumulate(leaves.begin(), leaves.end(), 0.0); };
  for (size_t l = 0; l < norms[0].size(); ++l) REQUIRE(norms[1][l] == doctest::Approx(norms[0][l]).epsilon(1e-6));
  CHECK(all(norms[0]) == doctest::Approx(static_cast<double>(n) / 3).epsilon(sized(1e-3, 0.1)));
}

// cuBLASLt chooses an algorithm for one matrix and takes it for all: whoever owns how many gets the same bits.
TEST_CASE("real sizes: Newton-Schulz of three matrices at once has the bits of each alone") {
  if (!available(Backend::cuda)) return;
  const NewtonSchulz iteration = newton_schulz_of("jordan", 0);
  const Stream stream{Backend::cuda};
  for (const Dtype dtype : storage_types)
    for (const auto& [m, n] : std::vector<std::array<int64_t, 2>>{{C, F}, {F, C}, {C, C}, {C / 4, C}}) {
      CAPTURES(name_of(dtype), m, n);
      std::vector<Numbers> start;
      std::deque<DeviceMemory> together, alone;
      std::vector<Tensor> all;
      for (uint64_t i = 0; i < 3; ++i) {
        start.emplace_back(dtype, Shape{m, n}).fill_randomly(i, 1);
        const Tensor& numbers = start.back().tensor();
        for (auto* list : {&together, &alone}) {
          list->emplace_back(numbers.bytes());
          copy_to_device(list->back().data(), numbers.data, numbers.bytes());
        }
        all.push_back({together.back().data(), dtype, Shape{m, n}});
      }
      newton_schulz(all, iteration, stream);
      for (size_t i = 0; i < 3; ++i) {
        newton_schulz({Tensor{alone[i].data(), dtype, Shape{m, n}}}, iteration, stream);
        std::vector<std::byte> bits[2] = {std::vector<std::byte>(all[i].bytes()),
                                          std::vector<std::byte>(all[i].bytes())};
        copy_from_device(bits[0].data(), together[i].data(), all[i].bytes());
        copy_from_device(bits[1].data(), alone[i].data(), all[i].bytes());
        CHECK(bits[0] == bits[1]);
        CHECK((together[i].kept_inside() && alone[i].kept_inside()));
      }
    }
}

// In f32, against the CPU. What the products round, by of_sum(n) of their largest terms, the iteration multiplies with
// its slope at 0 where a singular value is small: 485 in the worst case, and of random matrices some 20.
TEST_CASE("real sizes: Newton-Schulz beside the CPU") {
  if (!available(Backend::cuda)) return;
  for (const auto& [m, n] : std::vector<std::array<int64_t, 2>>{{C / 4, C}, {C, C / 4}}) {
    CAPTURES(m, n);
    RealSizes at;
    const size_t x = at.sum("x", Dtype::f32, {m, n}, 20 * of_sum(C));
    at.run([&](auto& t, Stream stream) { newton_schulz({t[x]}, newton_schulz_of("jordan", 0), stream); });
  }
}
