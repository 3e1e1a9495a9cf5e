#include "kernels/depth/channel_gate.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Ragged rows and columns; one part of the tokens or many; all channels read, or few.
const std::vector<ChannelGateSize> sizes{
    {1, 1, 1, 1}, {3, 20, 2, 12}, {300, 33, 4, 7}, {5000, 16, 3, 16}, {70, 768, 12, 12}};
const std::vector<ChannelGateSize> gpu_sizes{{1, 1, 1, 1}, {3, 20, 2, 12}, {200, 9, 4, 7}, {70, 64, 12, 12}};

Op channel_gate(const ChannelGateSize& s, double scale = 1, double factor = 3) {
  return {{input("inp", {1, s.N, s.C}), in_f32(output("out", {1, s.N, s.K})), parameter("weight", {s.K, s.G}, scale)},
          [=](auto& t, Stream stream) { channel_gate_forward(t["out"], t["inp"], t["weight"], factor, stream); },
          [=](auto& t, Stream stream) {
            channel_gate_backward(t.grad("inp"), t["dweight"], t["dout"], t["out"], t["inp"], t["weight"], factor,
                                  stream);
          },
          [=](auto& z) { channel_gate_forward_ref(z["out"], z["inp"], z["weight"], factor, s); }};
}

}  // namespace

TEST_CASE("channel_gate: reference backward is the derivative of the reference forward") {
  for (const ChannelGateSize& size : std::vector<ChannelGateSize>{{1, 1, 1, 1}, {4, 5, 3, 2}, {3, 4, 2, 4}})
    for (const double factor : {0.5, 3.0})
      for (const double scale : {1e-3, 1.0, 10.0}) check_derivative(channel_gate(size, scale, factor), 1e-11);
}

TEST_CASE("channel_gate: the fast backends equal the reference, set and added") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const ChannelGateSize& size) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})  // sums of G, K and of up to 5,000 terms
      check_backend(channel_gate(size), dtype, backend, {{"out", 2e-6}, {"dinp", 4e-6}, {"dweight", 2e-5}});
  });
}

TEST_CASE("channel_gate: the threads do not matter") { check_threads(channel_gate({700, 40, 4, 12})); }

TEST_CASE("channel_gate: a NaN stays in its token, and wrong shapes are errors") {
  const ChannelGateSize s{4, 6, 3, 2};
  for (const Backend backend : all_backends())
    check_nans(channel_gate(s), Dtype::f32, backend, {{"inp", {2 * 6 + 1}}},
               {{"out", [](size_t i) { return i / 3 == 2; }},
                {"dinp", [](size_t i) { return i / 6 == 2 && i % 6 < 2; }},
                {"dweight", [](size_t) { return true; }}});
  const std::vector<float> x(24);
  const Tensor inp = view(x.data(), {4, 6}), out = view(x.data(), {4, 3}), wide = view(x.data(), {3, 7});
  CHECK_THROWS_AS(channel_gate_forward(out, inp, wide, 1, fast), Error);
  CHECK_THROWS_AS(channel_gate_forward(inp, inp, view(x.data(), {3, 2}), 1, fast), Error);
}
