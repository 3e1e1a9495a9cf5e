#include "kernels/attention/attention.h"

#include "kernels/attention/ops.h"
#include "kernels/cpu/amx.h"
#include "kernels/devices.h"
#include "tests/support/attention.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Size = AttentionCase;

// Without a matrix unit, and with those that this machine may have.
template <class F>
void on_every_unit(F&& body) {
  for (MatrixUnit unit : {MatrixUnit::none, MatrixUnit::avx512_bf16, MatrixUnit::amx}) {
    use_matrix_unit(unit);
    CAPTURE(static_cast<int>(matrix_unit()));
    body();
  }
}

// Heads narrower than a vector, odd, wider than the widest tile; one tile and several, full and ragged; cut pairs.
const std::vector<Size> sizes{{1, 2, 1, 1, 1},    {2, 5, 4, 4, 8},    {3, 43, 4, 4, 8},   {2, 64, 4, 2, 16},
                              {1, 67, 6, 2, 13},  {1, 130, 2, 1, 64}, {9, 130, 1, 1, 24}, {2, 192, 4, 4, 8},
                              {1, 200, 3, 3, 48}, {1, 67, 2, 1, 129}, {1, 33, 2, 2, 256}, {1, 300, 1, 1, 31},
                              {4, 17, 6, 3, 80},  {2, 85, 4, 2, 8},   {1, 340, 2, 1, 7},  {1, 530, 1, 1, 8}};
// For the emulator, which is slow: one block and several of 16 rows, tiles of 32 and stages of 64 columns likewise.
const std::vector<Size> small_sizes{
    {1, 1, 1, 1, 1}, {2, 5, 4, 2, 8}, {1, 43, 3, 1, 13}, {2, 33, 2, 2, 66}, {1, 67, 2, 1, 129}};
std::vector<Size> sizes_for(Backend backend) { return sizes_of(backend, sizes, small_sizes); }

}  // namespace

TEST_CASE("attention: reference backward is the derivative of the reference forward") {
  for (double logits : {1e-2, 1.0, 30.0})
    for (const Size& z : std::vector<Size>{{1, 1, 1, 1, 3}, {2, 5, 2, 2, 3}, {1, 6, 4, 2, 5}, {1, 7, 3, 1, 2}}) {
      CAPTURE(logits);
      check_derivative(attention(z, usual_scale(z), logits), 1e-11);
    }
}

TEST_CASE("attention: the reference forward on a case worked by hand") {
  // Two positions, D = 1: position 1 weighs v = 2 and v = 10 by exp(0) and exp(log 3).
  const Op op = attention({1, 2, 1, 1, 1}, 1);
  Trial c(op, Dtype::f64);
  c.x["q"] = {5, 1}, c.x["k"] = {0, std::log(3.0)}, c.x["v"] = {2, 10};
  c.forward(Backend::reference);
  check_close("out", c["out"], std::vector<double>{2, 8}, 1e-14);
  CHECK(std::abs(c["lse"][0]) < 1e-14);
  CHECK(c["lse"][1] == doctest::Approx(std::log(4.0)).epsilon(1e-14));
}

TEST_CASE("attention: the fast backends equal the reference") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (const Size& z : sizes_for(backend)) {
        CAPTURE(static_cast<int>(kernels));
        check_against_reference(attention(z, usual_scale(z), 1, kernels), backend, 1e-5);
      }
}

TEST_CASE("attention: narrow heads of every width, at the ends of vectors and blocks") {
  for (int64_t D = 1; D <= 17; ++D)
    for (int64_t T : {1, 2, 15, 16, 17, 31, 32, 33, 40, 48, 53, 64, 65, 85, 97, 200}) {
      const Size z{T < 20 ? 3 : 1, T, 6, (D + T) % 2 == 0 ? 6 : 2 + D % 2, D};
      // One position has gradients of nothing but rounding: seen from what they are added to, it is that small.
      const bool accumulate_q = T == 1 || (D + T) % 3 == 0, accumulate_k = T == 1 || D % 2 == 0,
                 accumulate_v = T % 2 == 0;
      check_against_reference(attention(z, usual_scale(z)), Backend::cpu, 1e-5,
                              accumulate_q + 2u * accumulate_k + 4u * accumulate_v);
    }
}

// Every width of tiles, whole and ragged, and one that is none; blocks of 128 or 64 queries and keys, parts of them.
const std::vector<Size> small_sizes_bf16{{1, 1, 1, 1, 8},     {2, 17, 4, 2, 16},  {1, 140, 2, 1, 40},
                                         {1, 150, 1, 1, 64},  {1, 43, 2, 1, 13},  {1, 65, 1, 1, 88},
                                         {1, 131, 1, 1, 128}, {1, 70, 1, 1, 200}, {1, 33, 2, 1, 104}};

TEST_CASE("attention: fast CPU in bf16 loses no more than bf16 must") {
  on_every_unit([] {
    for (const Size& z : sizes)
      for (bool accumulate : {false, true}) check_bf16(z, Backend::cpu, accumulate);
  });
}

TEST_CASE("attention: the GPU in bf16 loses no more than bf16 must") {
  if (!available(Backend::cuda)) return;
  for (const Kernels kernels : kernels_of(Backend::cuda))
    for (const Size& z : sizes_of(Backend::cuda, sizes, small_sizes_bf16))
      check_bf16(z, Backend::cuda, z.T % 2 == 0, kernels);
}

TEST_CASE("attention: the warpgroup products of sm_90 in bf16 lose no more than bf16 must") {
  if (!available(Backend::cuda)) return;
  const WithHopper use;
  const std::vector<Size> around_tiles{{1, 64, 1, 1, 64},  {1, 65, 1, 1, 128}, {1, 127, 2, 1, 64},  {2, 128, 1, 1, 128},
                                       {1, 129, 1, 1, 64}, {1, 191, 2, 2, 64}, {1, 193, 4, 1, 128}, {1, 193, 4, 2, 64},
                                       {1, 320, 1, 1, 64}, {1, 320, 2, 1, 128}};
  for (const Size& z : around_tiles)
    for (const bool accumulate : {false, true}) check_bf16(z, Backend::cuda, accumulate);
}

// Windows and documents that begin and end inside and at the ends of tiles, in whose middle queries begin to see
// keys; documents of one token.
const std::vector<Size> masked_sizes{{1, 9, 2, 1, 5, 1},
                                     {2, 70, 4, 2, 8, 5},
                                     {1, 200, 2, 1, 16, 64},
                                     {1, 200, 3, 1, 33, 65},
                                     {1, 200, 1, 1, 8, 130},
                                     {1, 200, 1, 1, 8, 17},
                                     {2, 40, 2, 2, 12, 0, {17}},
                                     {2, 200, 2, 1, 8, 0, {1, 2, 70, 199}},
                                     {3, 140, 4, 2, 24, 0, {66, 67, 131}},
                                     {1, 300, 2, 1, 64, 40, {63, 128, 130, 257}},
                                     {2, 130, 2, 1, 80, 129, {3, 65}}};
const std::vector<Size> small_masked_sizes{{1, 9, 2, 1, 5, 1},
                                           {1, 43, 2, 1, 13, 20},
                                           {2, 67, 2, 2, 8, 33},
                                           {2, 40, 2, 1, 12, 0, {7, 17}},
                                           {1, 67, 2, 1, 66, 30, {31, 32, 64}}};

TEST_CASE("attention: windows and documents in the reference are the derivative of its forward") {
  for (const Size& z : std::vector<Size>{{1, 6, 2, 1, 3, 2}, {2, 7, 2, 2, 2, 0, {3, 4}}, {1, 7, 2, 1, 3, 3, {5}}})
    check_derivative(attention(z, usual_scale(z)), 1e-11);
}

TEST_CASE("attention: with windows and documents the fast backends equal the reference") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (const Size& z : sizes_of(backend, masked_sizes, small_masked_sizes))
        for (const unsigned accumulates : {0u, 7u}) {
          if (z.window == 1 && accumulates == 0) continue;  // gradients of nothing but rounding
          CAPTURE(static_cast<int>(kernels));
          check_against_reference(attention(z, usual_scale(z), 1, kernels), backend, 1e-5, accumulates);
        }
}

TEST_CASE("attention: with windows and documents bf16 loses no more than it must") {
  on_every_unit([] {
    for (const Size& z : masked_sizes) check_bf16(z, Backend::cpu, z.T % 3 == 0);
  });
}

TEST_CASE("attention: a document or window alone is a sequence of its own, and one that hides nothing changes no bit") {
  for (const Backend backend : fast_backends()) {
    const Size alone{1, 21, 2, 1, 8}, packed{1, 40, 2, 1, 8, 0, {12, 33}};
    const Op of_alone = attention(alone, 0.3), of_packed = attention(packed, 0.3);
    Trial one(of_alone, Dtype::f32), all(of_packed, Dtype::f32);
    for (const std::string name : {"q", "k", "v", "dout"}) {
      const int64_t row = std::ssize(one[name]) / alone.T;
      std::copy(one[name].begin(), one[name].end(), all.x[name].begin() + 12 * row);
    }
    one.run(backend), all.run(backend);
    for (const std::string name : {"out", "dq", "dk", "dv"}) {
      const int64_t row = std::ssize(one[name]) / alone.T;
      check_close(name, std::vector(all[name].begin() + 12 * row, all[name].begin() + 33 * row), one[name], 1e-6);
    }
    const Size plain{2, 70, 2, 1, 8}, window{2, 70, 2, 1, 8, 70}, document{2, 70, 2, 1, 8, 0, {0}};
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const Op ops[] = {attention(plain, 0.3), attention(window, 0.3), attention(document, 0.3)};
      const auto run = [&](const Op& op) { return Trial(op, dtype).run(backend).all_results(); };
      CHECK(run(ops[0]) == run(ops[1]));
      CHECK(run(ops[0]) == run(ops[2]));
    }
  }
}

TEST_CASE("attention: a NaN in a key that is hidden from a row does not reach it") {
  for (const Backend backend : fast_backends())
    for (const Size& z : std::vector<Size>{{1, 40, 1, 1, 8, 9}, {1, 40, 1, 1, 8, 0, {21}}}) {
      const Op op = attention(z, 0.3);
      Trial c(op, Dtype::f32);
      constexpr int64_t key = 18;
      c.x["k"][static_cast<size_t>(key * z.D)] = NAN;
      c.forward(backend);
      const std::vector<int32_t> documents = z.documents();
      const AttentionSizes sizes = z.sizes(documents.empty() ? nullptr : documents.data());
      int64_t wrong = 0;
      for (int64_t t = 0; t < z.T; ++t)
        wrong += std::isnan(c["lse"][static_cast<size_t>(t)]) != (t >= key && t <= sizes.upper(0, key));
      CHECK(wrong == 0);
    }
}

TEST_CASE("attention: large logits") {
  // Scores reach 30 * 30 / 3, whose float spacing is 3e-5: that is the relative error a weight may have.
  for (const Backend backend : fast_backends())
    for (const Size& z : std::vector<Size>{{1, 67, 2, 1, 8}, {2, 67, 4, 2, 8}, {1, 130, 2, 2, 33}}) {
      if (is_slow(backend) && z.H != 2) break;
      check_against_reference(attention(z, 30 * usual_scale(z), 30), backend, 1e-3);
    }
}

TEST_CASE("attention: scores that are all far below zero, or far above") {
  for (const Backend backend : fast_backends())
    for (double sign : {-1.0, 1.0})
      for (const Size& z : std::vector<Size>{{1, 40, 1, 1, 33}, {1, 53, 2, 1, 8}, {1, 40, 2, 2, 16}}) {
        if (is_slow(backend) && z.D < 33) break;
        CAPTURE(sign);
        // Scores of some 350, whose spacing is 3e-5.
        check_against_reference(attention(z, usual_scale(z)), backend, 1e-3, 0, [&](Trial& trial) {
          auto &q = trial.x["q"], &k = trial.x["k"];
          for (size_t i = 0; i < q.size(); i += static_cast<size_t>(z.D)) q[i] = sign * 1000;
          for (size_t i = 0; i < k.size(); i += static_cast<size_t>(z.D)) k[i] = 1;
        });
      }
}

TEST_CASE_TEMPLATE("attention: later keys do not change a bit, and numbers below the normal ones stay", S, float,
                   bf16) {
  for (const Backend backend : fast_backends()) {
    const Size z{1, 100, 2, 1, 8};
    const Op op = attention(z, 1, 10);
    Trial c(op, DtypeOf<S>::value), changed = c;
    constexpr int64_t from = 43;
    auto &k = changed.x["k"], &v = changed.x["v"];
    for (auto i = static_cast<size_t>(from * z.D); i < k.size(); ++i) k[i] *= 100, v[i] = 7;
    c.forward(backend), changed.forward(backend);
    const auto& out = c["out"];
    const auto rows = [](const std::vector<double>& x) { return std::vector(x.begin(), x.begin() + from * 16); };
    CHECK(rows(out) == rows(changed["out"]));
    CHECK(rows(out) != std::vector(out.end() - from * 16, out.end()));
  }
  volatile float smallest = std::numeric_limits<float>::min();
  CHECK(smallest / 2 > 0);
}

TEST_CASE("attention: gradients are set, or added where asked") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (const Size& z : std::vector<Size>{{1, 10, 4, 2, 9}, {1, 67, 4, 2, 8}, {5, 20, 4, 2, 17}})
        for (unsigned accumulates = 0; accumulates < 8; ++accumulates) {
          if (is_slow(backend) && z.T > 10) continue;
          CAPTURE(static_cast<int>(kernels));
          check_against_reference(attention(z, 0.3, 1, kernels), backend, 1e-5, accumulates);
        }
}

TEST_CASE_TEMPLATE("attention: the gradients do not depend on the number of threads", S, float, bf16) {
  for (const Size& z : std::vector<Size>{{1, 200, 4, 1, 16}, {1, 200, 3, 3, 8}, {4, 70, 4, 2, 8}, {1, 600, 2, 1, 8}})
    check_threads(attention(z, 0.3), DtypeOf<S>::value);
}

TEST_CASE_TEMPLATE("attention: a NaN in one key reaches the rows that see it, and only those", S, float, bf16) {
  for (const Backend backend : fast_backends())
    for (int64_t key : {int64_t{37}, int64_t{149}, int64_t{0}, int64_t{64}}) {
      const Size z{1, 150, backend == Backend::cuda ? 1 : 2, 1, 8};
      if (backend == Backend::cuda && key % 64 == 0) continue;
      CAPTURES(backend, key);
      const Op op = attention(z, 0.3);
      Trial c(op, DtypeOf<S>::value);
      c.x["k"][static_cast<size_t>(key * z.D + 3)] = NAN;
      c.run(backend);
      int64_t wrong = 0;
      for (int64_t t = 0; t < z.T; ++t)
        for (int64_t i = 0; i < z.H * z.D; ++i) {
          const auto at = static_cast<size_t>(t * z.H * z.D + i);
          wrong += std::isnan(c["out"][at]) != (t >= key);
          wrong += t >= key && !std::isnan(c["dq"][at]);
        }
      for (int64_t t = 0; t < z.T; ++t)
        for (int64_t h = 0; h < z.H; ++h) wrong += std::isnan(c["lse"][static_cast<size_t>(h * z.T + t)]) != (t >= key);
      // A row with a NaN sends it back to every key it saw, so to all up to the last row.
      for (const double g : joined(c["dk"], c["dv"])) wrong += !std::isnan(g);
      CHECK(wrong == 0);
    }
}

// out and lse when the positions of c come in chunks of `step`; what the caches hold beyond them must stay NaN.
template <class S>
Numbers in_chunks(const Size& z, const Trial& c, int64_t step, Backend backend) {
  const auto all_q = convert<S>(c["q"]), all_k = convert<S>(c["k"]), all_v = convert<S>(c["v"]);
  const int64_t rows = z.T + 3, row = z.K * z.D, wide = z.H * z.D;
  auto k_cache = poisoned<S>(z.B * rows * row), v_cache = k_cache, out = poisoned<S>(z.queries());
  auto lse = poisoned<double>(z.B * z.H * z.T);
  for (int64_t pos = 0; pos < z.T; pos += step) {
    const int64_t n = std::min(step, z.T - pos);
    std::vector<S> q, k, v;
    for (int64_t b = 0; b < z.B; ++b) {
      const int64_t at = b * z.T + pos;
      q.insert(q.end(), all_q.begin() + at * wide, all_q.begin() + (at + n) * wide);
      k.insert(k.end(), all_k.begin() + at * row, all_k.begin() + (at + n) * row);
      v.insert(v.end(), all_v.begin() + at * row, all_v.begin() + (at + n) * row);
    }
    auto part = poisoned<S>(z.B * n * wide);
    auto part_lse = poisoned<float>(z.B * z.H * n);
    run_on(backend,
           {view(part, {z.B, n, z.H, z.D}), view(k_cache, {z.B, rows, z.K, z.D}), view(v_cache, {z.B, rows, z.K, z.D}),
            view(q, {z.B, n, z.H, z.D}), view(k, {z.B, n, z.K, z.D}), view(v, {z.B, n, z.K, z.D}),
            view(part_lse, {z.B, z.H, n})},
           [&](auto& t, Stream stream) {
             attention_cached(t[0], t[6], t[1], t[2], t[3], t[4], t[5], pos, 0.3, z.window, stream);
           });
    for (int64_t b = 0; b < z.B; ++b)
      std::copy_n(part.begin() + b * n * wide, n * wide, out.begin() + (b * z.T + pos) * wide);
    for (int64_t head = 0; head < z.B * z.H; ++head)
      std::copy_n(part_lse.begin() + head * n, n, lse.begin() + head * z.T + pos);
  }
  for (int64_t b = 0; b < z.B; ++b)
    for (auto i = static_cast<size_t>((b * rows + z.T) * row); i < static_cast<size_t>((b + 1) * rows * row); ++i)
      CHECK((is_nan(k_cache[i]) && is_nan(v_cache[i])));
  return {{"out", convert<double>(out)}, {"lse", lse}};
}

TEST_CASE("attention: cached steps and chunks equal the whole sequence") {
  for (const Size& z : std::vector<Size>{
           {2, 7, 4, 2, 5}, {1, 150, 2, 1, 8}, {2, 130, 3, 3, 33}, {2, 7, 2, 1, 5, 3}, {1, 150, 2, 1, 8, 66}})
    for (const Backend backend : all_backends())
      for (int64_t step : {int64_t{1}, int64_t{3}, int64_t{29}, int64_t{70}, z.T}) {
        if (is_slow(backend) && z.T > 7 && (step != 70 || z.D > 8)) continue;
        const Op op = attention(z, 0.3);
        INFO(op.str());
        CAPTURES(step, backend);
        const Trial c(op, Dtype::f32), want = c.exact().forward(Backend::reference);
        for (const auto& [name, got] : in_chunks<float>(z, c, step, backend)) check_close(name, got, want[name], 1e-5);
      }
}

TEST_CASE("attention: cached steps and chunks in bf16 lose no more than bf16 must") {
  for (const Backend backend : fast_backends())
    for (const auto& numbers :
         std::vector<std::array<int64_t, 3>>{{1, 5, 0}, {17, 60, 0}, {60, 135, 0}, {60, 135, 50}}) {
      const int64_t step = numbers[0];
      const Size z{2, numbers[1], 2, 1, 24, numbers[2]};  // few queries, and blocks that begin anywhere
      CAPTURES(step, backend);
      const Op op = attention(z, 0.3, 3);
      const Trial c(op, Dtype::bf16), want = c.exact().forward(Backend::reference), plain = plain_bf16(z, c, 0.3);
      const Numbers got = in_chunks<bf16>(z, c, step, backend);
      check_rounding("out", got.at("out"), plain["out"], want["out"]);
      check_close("lse", got.at("lse"), want["lse"], 1e-5);
    }
}

TEST_CASE("attention: recorded with a divisor, the logits are q k / (sqrt(D) divisor), cached or not") {
  const Size z{1, 5, 4, 2, 9};
  const Op op = attention(z, 1 / (3 * 2.5), 5);
  const Trial c(op, Dtype::f32), want = c.exact().forward(Backend::reference);
  for (const std::string& name : joined(fast_devices(), std::vector<std::string>{"reference"}))
    for (const int64_t cache : {int64_t{0}, z.T}) {
      CAPTURES(name, cache);
      const auto device = make_device(name);
      Tape tape(Dtype::f32, cache);
      Value* q = tape.input("q", Shape{z.B, z.T, z.H, z.D}, Dtype::f32);
      Value* k = tape.input("k", Shape{z.B, z.T, z.K, z.D}, Dtype::f32);
      Value* v = tape.input("v", k->shape, Dtype::f32);
      const Value* out = ops::attention(tape, "a", q, k, v, {.divisor = 2.5});
      tape.plan(PlanMode::reuse);
      tape.allocate(*device);
      for (const Value* x : {q, k, v}) device->copy_in(x->tensor.data, convert<float>(c[x->name]).data(), x->bytes());
      tape.forward(Step{});
      std::vector<float> got(c["q"].size());
      device->copy_out(got.data(), out->tensor.data, out->bytes());
      check_close("out", got, want["out"], 1e-5);
    }
}

// 2 bytes behind a boundary of 16, where tensor cores cannot read.
TEST_CASE("attention: bf16 at any address") {
  if (!available(Backend::cuda)) return;
  const Size z{1, 20, 2, 1, 16};
  const Op op = attention(z, 0.3, 3);
  Trial got(op, Dtype::bf16);
  const Trial want = got.exact().forward(Backend::reference), plain = plain_bf16(z, got, 0.3);
  got.shifted = true, got.in_place = {"lse"};
  got.forward(Backend::cuda);
  check_rounding("out", got["out"], plain["out"], want["out"]);
}

TEST_CASE("attention: on the GPU, who comes first does not matter") {
  if (!available(Backend::cuda)) return;
  const Op op = attention({1, 40, 2, 1, 40}, 0.3, 3);
  const auto run = [&] { return Trial(op, Dtype::bf16).run(Backend::cuda).all_results(); };
  CHECK(run() == run());  // the emulator draws another order each time
}

TEST_CASE("attention: shapes that do not fit are refused") {
  const std::vector<float> x(24);
  const Tensor lse = view(x.data(), {1, 3, 4}), q = view(x, {1, 4, 3, 2}), k = q, out = q;
  const Tensor two = view(x.data(), {1, 4, 2, 2});  // 3 query heads cannot share 2 key heads
  CHECK_THROWS_AS(attention_forward(out, lse, q, two, two, 1, {}, Stream{}), Error);
  CHECK_THROWS_AS(attention_cached(out, {}, k, k, q, k, k, 1, 1, 0, Stream{}), Error);  // 4 rows do not fit behind one
}
