#include "kernels/depth/streams/gated_streams.h"

#include "kernels/block/ops.h"
#include "kernels/depth/ops.h"
#include "kernels/devices.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Ragged rows and columns; one part of the tokens or many; every number of streams.
const std::vector<StreamsSize> sizes{{1, 1, 1},    {3, 2, 20},  {5, 3, 17},   {300, 4, 33}, {9, 5, 16},
                                     {130, 6, 40}, {4, 7, 100}, {1000, 8, 8}, {40, 4, 768}};
const std::vector<StreamsSize> gpu_sizes{{1, 1, 1},  {3, 2, 16},   {5, 3, 17},   {70, 4, 32},
                                         {9, 8, 24}, {33, 4, 264}, {2, 5, 1032}, {2, 4, 40}};
const std::vector<StreamsSize> tiny{{1, 1, 1}, {3, 2, 4}, {2, 3, 5}};

Op norm(const StreamsSize& s) {
  return {
      {input("streams", {1, s.rows, s.E, s.C}), in_f32(saved("rstd", {s.rows, s.E})),
       output("normed", {1, s.rows, s.E * s.C}), parameter("gain", {s.E * s.C})},
      [](auto& t, Stream stream) { gated_norm_forward(t["normed"], t["rstd"], t["streams"], t["gain"], 1e-3, stream); },
      [](auto& t, Stream stream) {
        gated_norm_backward(t.grad("streams"), t["dgain"], t["dnormed"], t["streams"], t["gain"], t["rstd"], stream);
      },
      [=](auto& z) { gated_norm_forward_ref(z["normed"], z["rstd"], z["streams"], z["gain"], 1e-3, s); }};
}

Op silu(int64_t n, double spread = 1) {
  return {{never_added(input("inp", {n}, spread)), output("out", {n})},
          [](auto& t, Stream stream) { gated_silu_forward(t["out"], t["inp"], 0.25, stream); },
          [](auto& t, Stream stream) { gated_silu_backward(t["dinp"], t["dout"], t["inp"], 0.25, stream); },
          [=](auto& z) { gated_silu_forward_ref(z["out"], z["inp"], 0.25, n); }};
}

Op mean(const StreamsSize& s, double spread = 1) {
  return {{never_added(input("normed", {s.rows, s.E * s.C})), never_added(input("logits", {s.rows, s.E * s.C}, spread)),
           output("out", {s.rows, s.C})},
          [](auto& t, Stream stream) { gated_mean_forward(t["out"], t["normed"], t["logits"], stream); },
          [](auto& t, Stream stream) {
            gated_mean_backward(t["dnormed"], t["dlogits"], t["dout"], t["normed"], t["logits"], stream);
          },
          [=](auto& z) { gated_mean_forward_ref(z["out"], z["normed"], z["logits"], s); }};
}

Op inject(const StreamsSize& s, double spread = 1) {
  return {{input("streams", {1, s.rows, s.E, s.C}), never_added(input("logits", {1, s.rows, s.E}, spread)),
           input("y", {1, s.rows, s.C}), output("next", {1, s.rows, s.E, s.C})},
          [](auto& t, Stream stream) { gated_inject_forward(t["next"], t["streams"], t["logits"], t["y"], stream); },
          [](auto& t, Stream stream) {
            gated_inject_backward(t.grad("streams"), t["dlogits"], t.grad("y"), t["dnext"], t["logits"], t["y"],
                                  stream);
          },
          [=](auto& z) { gated_inject_forward_ref(z["next"], z["streams"], z["logits"], z["y"], s); }};
}

}  // namespace

TEST_CASE("gated_streams: reference backward is the derivative of the reference forward") {
  for (const StreamsSize& s : tiny) {
    check_derivative(norm(s), 1e-11);
    for (const double spread : {0.1, 1.0, 10.0}) {
      check_derivative(silu(s.rows * s.C, spread), 1e-11);
      check_derivative(mean(s, spread), 1e-11);
      check_derivative(inject(s, spread), 1e-11);
    }
  }
}

TEST_CASE("gated_streams: the fast backends equal the reference, set and added") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const StreamsSize& s) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      // Sums of C, of E, and, for the gain, of up to 1,000 terms; dstreams is a difference of terms of about 1.
      check_backend(norm(s), dtype, backend,
                    {{"rstd", 1e-6}, {"normed", 1e-6}, {"dstreams", {4e-6, 1e-6}}, {"dgain", 1e-5}});
      check_backend(silu(s.rows * s.C, 4), dtype, backend, {{"out", 1e-6}, {"dinp", 1e-6}});
      check_backend(mean(s, 3), dtype, backend, {{"out", 1e-6}, {"dnormed", 1e-6}, {"dlogits", 1e-6}});
      check_backend(inject(s, 3), dtype, backend,
                    {{"next", 1e-6}, {"dstreams", 1e-6}, {"dlogits", 4e-6}, {"dy", 2e-6}});
    }
  });
}

TEST_CASE("gated_streams: the threads, and where memory begins, do not matter") {
  const StreamsSize s{700, 4, 40};
  for (const Op& op : {norm(s), silu(40000), mean(s), inject(s)}) {
    check_threads(op), check_threads(op, Dtype::bf16);
  }
  const StreamsSize few{5, 4, 24};
  for (const Op& op : {norm(few), silu(96), mean(few), inject(few)})
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      check_any_address(op, dtype,
                        {{"rstd", 1e-6},
                         {"normed", 1e-6},
                         {"dstreams", 4e-6},
                         {"dgain", 4e-6},
                         {"out", 1e-6},
                         {"dinp", 1e-6},
                         {"dnormed", 1e-6},
                         {"dlogits", 4e-6},
                         {"next", 1e-6},
                         {"dy", 2e-6}});
}

TEST_CASE("gated_streams: written over what they may be written over") {
  const StreamsSize s{30, 4, 40};
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      check_in_place(silu(100), dtype, backend, {}, {{"dinp", "dout"}});
      check_in_place(mean(s), dtype, backend, {}, {{"dlogits", "logits"}});
      check_in_place(inject(s), dtype, backend, {}, {{"dstreams", "dnext"}});
    }
}

TEST_CASE("gated_streams: logits of any size leave finite numbers") {
  const StreamsSize s{6, 4, 24};
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const Op& op : {silu(96, 1e4), mean(s, 1e4), inject(s, 1e4)})
        for (const double x : Trial(op, dtype).run(backend).all_results()) CHECK(std::isfinite(x));
}

TEST_CASE("gated_streams: a NaN stays in its token, and wrong shapes are errors") {
  const StreamsSize s{4, 3, 6};
  const auto token = [](size_t n, size_t width) { return [=](size_t i) { return i / width == n; }; };
  for (const Backend backend : all_backends()) {
    check_nans(norm(s), Dtype::f32, backend, {{"streams", {2 * 18 + 7}}},  // the second of token 2's streams
               {{"rstd", at({2 * 3 + 1})},
                {"normed", [](size_t i) { return i / 6 == 2 * 3 + 1; }},
                {"dstreams", [](size_t i) { return i / 6 == 2 * 3 + 1; }},
                {"dgain", [](size_t i) { return i / 6 == 1; }}});
    check_nans(mean(s), Dtype::f32, backend, {{"logits", {18 + 7}}},
               {{"out", at({6 + 1})}, {"dnormed", at({18 + 7})}, {"dlogits", at({18 + 7})}});
    check_nans(inject(s), Dtype::f32, backend, {{"y", {6 + 1}}},
               {{"next", [](size_t i) { return i / 18 == 1 && i % 6 == 1; }}, {"dlogits", token(1, 3)}});
  }
  const std::vector<float> x(72);
  const Tensor streams = view(x.data(), {1, 4, 3, 6}), rows = view(x.data(), {1, 4, 6}), few = view(x.data(), {4, 3}),
               gain = view(x.data(), {18});
  CHECK_THROWS_AS(gated_norm_forward(streams, rows, streams, gain, 1, fast), Error);
  CHECK_THROWS_AS(gated_norm_forward(streams, few, streams, few, 1, fast), Error);
  CHECK_THROWS_AS(gated_silu_forward(few, rows, 1, fast), Error);
  CHECK_THROWS_AS(gated_mean_forward(rows, few, few, fast), Error);
  CHECK_THROWS_AS(gated_inject_forward(streams, streams, rows, rows, fast), Error);
  CHECK_THROWS_AS(gated_inject_backward({streams, true}, few, {rows, false}, streams, few, rows, fast), Error);
}

namespace {

// A model of one read and one write that look at one token at a time: what is lost, and all gradients.
struct OneRead {
  std::vector<float> losses, gradients;
  OneRead(const std::string& device_name, Dtype real, const std::vector<int32_t>& tokens) {
    constexpr int64_t E = 8, C = 512, R = 5, V = 11;
    const auto device = make_device(device_name);
    const int64_t T = std::ssize(tokens);
    ParameterTable params;
    for (const auto& [name, shape] : {std::pair{"table", Shape{V, C}},
                                      {"norm", Shape{E * C}},
                                      {"down", Shape{R, E * C}},
                                      {"up", Shape{E * C, R}},
                                      {"inject", Shape{E, E * C}}})
      params.add(name, shape, Init::normal(0.05), Role::input_projection);
    params.allocate(*device, real, true);
    params.initialise(3);
    Tape tape(real);
    const auto parameter = [&](const char* name) { return tape.parameter(params.at(name)); };
    Value* in = tape.input("tokens", Shape{1, T}, Dtype::i32);
    Value* targets = tape.input("targets", Shape{1, T}, Dtype::i32);
    Value* x = ops::streams_expand(tape, "streams", ops::embedding(tape, "x", in, parameter("table")), E);
    const ops::GatedReadOutputs read = ops::gated_read(
        tape, "read", x, {parameter("norm"), parameter("down"), parameter("up"), parameter("inject")}, 1e-4);
    x = ops::streams_sum(tape, "sum", ops::gated_inject(tape, "write", x, read.inject, read.x));
    Value* loss = ops::cross_entropy(tape, "loss", {x, parameter("table")}, targets);
    tape.differentiate(), tape.plan(PlanMode::poison), tape.allocate(*device);
    const size_t bytes = tokens.size() * sizeof(int32_t);
    device->copy_in(in->tensor.data, tokens.data(), bytes), device->copy_in(targets->tensor.data, tokens.data(), bytes);
    tape.run(Step{true});
    losses = params.read(loss->tensor), gradients = params.read(params.gradients());
  }
};

}  // namespace

// More tokens than are computed at a time, against the first and the last ones alone: no token sees another.
TEST_CASE("gated_streams: a read of many tokens is the reads of few") {
  std::vector<int32_t> tokens(300);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i % 11);
  for (const std::string device : {"cpu", "reference"}) {
    const Dtype real = device == "cpu" ? Dtype::f32 : Dtype::f64;
    const OneRead all(device, real, tokens), first(device, real, {tokens.begin(), tokens.begin() + 77}),
        last(device, real, {tokens.begin() + 77, tokens.end()});
    check_close("losses", all.losses, joined(first.losses, last.losses), 1e-6);
    std::vector<float> sum = first.gradients;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += last.gradients[i];
    check_close("gradients", all.gradients, sum, 2e-5);  // sums over the tokens, in another order
  }
}
