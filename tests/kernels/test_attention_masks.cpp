// Attention's windows and documents in each kernel: bits, NaN, tiles that are skipped, and bf16 on a GPU. For what they
// mean, and f32, see test_attention.cpp.
#include "tests/support/attention.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Size = AttentionCase;

void check_same_bits(const Size& z, Dtype dtype, Backend backend) {
  CAPTURES(backend, z.T, z.D);
  const auto run = [&](int64_t window, const std::vector<int64_t>& begins) {
    const Op op = attention({z.B, z.T, z.H, z.K, z.D, window, begins}, 0.3);
    return Trial(op, dtype).run(backend).all_results();
  };
  const auto causal = run(0, {});
  CHECK(run(z.T, {}) == causal);
  CHECK(run(0, {0}) == causal);
  CHECK(run(z.T, {0}) == causal);
}

// One head in which the middle hides the ends from each other. A NaN in the first value, or in the last cotangent,
// would stay one beside weights of 0.
void check_skipped(const Size& z, Dtype dtype, Backend backend) {
  CAPTURES(backend, z.T, z.D, z.window);
  const Op op = attention(z, 0.3);
  const auto elements = [&](int64_t row) { return static_cast<size_t>(row * z.D); };
  Trial in_value(op, dtype), in_cotangent = in_value;
  in_value.x["v"][0] = NAN, in_cotangent.x["dout"][elements(z.T - 1)] = NAN;
  in_value.run(backend), in_cotangent.run(backend);
  const int64_t half = z.T / 2;
  for (size_t i = elements(half); i < elements(z.T); ++i)
    REQUIRE((!std::isnan(in_value["out"][i]) && !std::isnan(in_value["dq"][i])));
  for (size_t i = 0; i < elements(half); ++i)
    REQUIRE((!std::isnan(in_cotangent["dk"][i]) && !std::isnan(in_cotangent["dv"][i])));
}

void check_hidden_nan(const Size& z, int64_t key, Dtype dtype, Backend backend) {
  CAPTURES(backend, z.T, z.D, z.window, key);
  const Op op = attention(z, 0.3);
  Trial c(op, dtype);
  c.x["k"][static_cast<size_t>(key * z.D)] = NAN;
  c.forward(backend);
  const std::vector<int32_t> documents = z.documents();
  const AttentionSizes sizes = z.sizes(documents.empty() ? nullptr : documents.data());
  int64_t wrong = 0;
  for (int64_t t = 0; t < z.T; ++t) {
    const bool sees = t >= key && t <= sizes.upper(0, key);
    wrong += std::isnan(c["lse"][static_cast<size_t>(t)]) != sees;
    for (int64_t d = 0; d < z.D; ++d) wrong += std::isnan(c["out"][static_cast<size_t>(t * z.D + d)]) != sees;
  }
  CHECK(wrong == 0);
}

}  // namespace

// Blocks of 128 queries or 64, of 128 keys or 64, and tiles of 16 to 64: each width of them.
TEST_CASE("attention_masks: with windows and documents the GPU in bf16 loses no more than it must") {
  if (!available(Backend::cuda)) return;
  const std::vector<Size> sizes{{1, 300, 1, 1, 8, 40},
                                {2, 150, 2, 1, 40, 0, {64, 65, 130}},
                                {1, 262, 1, 1, 64, 100, {63, 128, 130}},
                                {1, 140, 2, 1, 88, 0, {7, 48, 132}},
                                {1, 131, 1, 1, 96, 50},
                                {1, 150, 1, 1, 128, 33},
                                {1, 262, 1, 1, 128, 0, {1, 127, 129, 256}},
                                {1, 100, 1, 1, 200, 16, {50}},
                                {1, 60, 2, 1, 128, 20, {5, 33}}};
  for (const Kernels kernels : kernels_of(Backend::cuda))
    for (const Size& z : sizes)
      for (const bool accumulate : {false, true}) check_bf16(z, Backend::cuda, accumulate, kernels);
}

// Among them warpgroups without a key in tiles that others of their block need, at the beginning and at the end, and
// tiles of which one key or one query alone is hidden.
TEST_CASE("attention_masks: with windows and documents the products of sm_90 in bf16 lose no more than bf16 must") {
  if (!available(Backend::cuda)) return;
  const WithHopper use;
  for (const Size& z : std::vector<Size>{{1, 320, 1, 1, 64, 10},
                                         {1, 400, 1, 1, 64, 255},
                                         {1, 450, 2, 1, 64, 129, {384}},
                                         {1, 384, 1, 1, 64, 0, {256, 320}},
                                         {2, 193, 2, 2, 64, 0, {1, 64, 65, 128, 191}},
                                         {1, 330, 1, 1, 64, 66, {127}},
                                         {1, 200, 1, 1, 128, 2},
                                         {1, 320, 1, 1, 128, 64},
                                         {1, 400, 1, 1, 128, 255},
                                         {1, 256, 1, 1, 128, 0, {192}},
                                         {1, 262, 2, 1, 128, 100, {63, 128, 130, 257}}})
    for (const bool accumulate : {false, true}) check_bf16(z, Backend::cuda, accumulate);
}

TEST_CASE("attention_masks: a window or document that hides nothing changes no bit") {
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) check_same_bits({2, 70, 2, 1, 8}, dtype, backend);
  if (!available(Backend::cuda)) return;
  for (const Size& z : std::vector<Size>{{1, 130, 2, 1, 24},
                                         {1, 150, 1, 1, 64},
                                         {1, 130, 1, 1, 96},
                                         {1, 140, 1, 1, 128},
                                         {1, 64, 1, 1, 128},
                                         {1, 80, 1, 1, 200}})
    check_same_bits(z, Dtype::bf16, Backend::cuda);
  const WithHopper use;
  for (const Size& z : std::vector<Size>{{1, 330, 1, 1, 64}, {1, 200, 2, 1, 128}})
    check_same_bits(z, Dtype::bf16, Backend::cuda);
}

TEST_CASE("attention_masks: tiles that are hidden are skipped") {
  for (const Backend backend : fast_backends()) {
    for (const Size& z : std::vector<Size>{{1, 256, 1, 1, 8, 20}, {1, 256, 1, 1, 8, 0, {128}}})
      check_skipped(z, Dtype::f32, backend);
    for (const Size& z : std::vector<Size>{{1, 512, 1, 1, 16, 20}, {1, 512, 1, 1, 16, 0, {256}}})
      check_skipped(z, Dtype::bf16, backend);
  }
  if (!available(Backend::cuda)) return;
  const WithHopper use;
  for (const Size& z : std::vector<Size>{{1, 768, 1, 1, 64, 20},
                                         {1, 768, 1, 1, 64, 0, {384}},
                                         {1, 512, 1, 1, 128, 20},
                                         {1, 512, 1, 1, 128, 0, {256}}})
    check_skipped(z, Dtype::bf16, Backend::cuda);
}

TEST_CASE("attention_masks: a NaN in a key that is hidden from a row does not reach it") {
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const Size& z : std::vector<Size>{{1, 40, 1, 1, 8, 9}, {1, 40, 1, 1, 8, 0, {21}}})
        check_hidden_nan(z, 18, dtype, backend);
  if (!available(Backend::cuda)) return;
  const WithHopper use;
  for (const Size& z : std::vector<Size>{{1, 200, 1, 1, 64, 90}, {1, 200, 1, 1, 64, 0, {140}}})
    check_hidden_nan(z, 130, Dtype::bf16, Backend::cuda);
}
