// Linear layers as nodes: what they do for the nodes beside them; and those that multiply in eight bits, against the
// same numbers rounded here and multiplied in double.
#include <cmath>
#include <optional>

#include "kernels/block/bias.h"
#include "kernels/block/matmul.h"
#include "kernels/block/ops.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t rows = 48, C = 64, widths[] = {64, 80};

// Writes and reads nothing: its output's memory is the test's, and its inputs' gradients.
struct Silent : Node {
  const char* op() const override { return "silent"; }
  void forward(const Step&, Stream) override {}
  void backward(const Step&, Stream) override {}
};
Value* silent(Tape& t, const std::string& name, const std::vector<Value*>& in, Shape shape) {
  auto node = std::make_unique<Silent>();
  node->name = name, node->in = in, node->out = {t.activation(name, shape)};
  return t.record(std::move(node));
}

// Two layers on one input, the first with a bias; or one layer, that adds its output to something.
struct Layers {
  std::unique_ptr<Device> device = make_device(gpu);
  ParameterTable params;
  Tape tape{Dtype::bf16};
  Value *x, *addend = nullptr;
  std::vector<Value*> outs;

  explicit Layers(bool eight_bits, bool accumulates = false) {
    params.add("source", Shape{1}, Init::constant(0), Role::bias);
    for (size_t i = 0; i < 2; ++i)
      params.add(str("w", i), Shape{widths[i], C}, Init::normal(0.3), Role::input_projection);
    params.add("bias", Shape{widths[0]}, Init::normal(1), Role::bias);
    params.allocate(*device, Dtype::f32, true);
    params.allocate_bf16_copy();
    params.initialise(7);
    refresh_bf16_copy(params);
    if (eight_bits) tape.use_eight_bits();
    Value* source = tape.parameter(params.at("source"));
    x = silent(tape, "x", {source}, Shape{rows, C});
    if (accumulates) addend = silent(tape, "addend", {source}, Shape{rows, widths[0]});
    std::vector<ops::Projection> list = {{"a", weight(0), Shape{rows, widths[0]}, tape.parameter(params.at("bias"))},
                                         {"b", weight(1), Shape{rows, widths[1]}}};
    if (accumulates) list = {{"a", weight(0), Shape{rows, widths[0]}}};
    outs = ops::linears(tape, "layers", x, list);
    Value* end = accumulates ? ops::add(tape, "sum", addend, outs[0]) : nullptr;
    silent(tape, "end", accumulates ? std::vector<Value*>{end} : outs, Shape{1});
    if (accumulates) outs = {end};
    ops::fuse_linears(tape);
    tape.differentiate();
    tape.plan(PlanMode::distinct);
    const Tensor gradients = params.gradients();
    tape.allocate(*device, &gradients);
  }
  Value* weight(size_t i) { return tape.parameter(params.at(str("w", i))); }

  void put(const Tensor& to, const std::vector<bf16>& numbers) {
    REQUIRE(numbers.size() == static_cast<size_t>(to.numel()));
    device->copy_in(to.data, numbers.data(), to.bytes());
  }
  template <class T>
  std::vector<T> get(const Tensor& from) {
    std::vector<T> host(static_cast<size_t>(from.numel()));
    device->copy_out(host.data(), from.as<T>(), from.bytes());
    return host;
  }
  void set_scales(const std::vector<float>& scales) {
    std::vector<float> inverses;
    for (const float scale : scales) inverses.push_back(1 / scale);
    REQUIRE(scales.size() == tape.quantized().size());
    device->copy_in(tape.scales().data, scales.data(), tape.scales().bytes());
    device->copy_in(tape.inverses().data, inverses.data(), tape.inverses().bytes());
    device->fill(tape.amaxes().data, 0, tape.amaxes().bytes());
  }
};

// What eight bits keep of the numbers at this scale.
template <class Stored, class From>
std::vector<double> kept(const std::vector<From>& x, float scale) {
  std::vector<double> list;
  for (const From v : x)
    list.push_back(static_cast<double>(static_cast<float>(Stored(static_cast<float>(v) * scale))) /
                   static_cast<double>(scale));
  return list;
}
template <class From>
float largest(const std::vector<From>& x) {
  float most = 0;
  for (const From v : x) most = std::max(most, std::abs(static_cast<float>(v)));
  return most;
}

}  // namespace

TEST_CASE("linear: it does the sum after it only where nobody else reads what is added") {
  for (const std::string form : {"next", "y read twice", "y kept", "y placed", "not next", "y first", "y twice",
                                 "x is added", "two layers", "another op"}) {
    CAPTURE(form);
    Tape t(Dtype::f32);
    ParameterTable params;
    const Shape shape{1, 1, 1, 4};
    Value* weight = t.parameter(params.add("w", Shape{4, 4}, Init::constant(1), Role::input_projection));
    Value* stream = silent(t, "stream", {weight}, shape);
    Value* x = silent(t, "x", {stream}, shape);
    Value* y = form == "another op"   ? silent(t, "y", {x, weight}, shape)
               : form == "two layers" ? ops::linears(t, "y", x, {{"y", weight, shape}, {"other", weight, shape}})[0]
                                      : ops::linear(t, "y", x, weight, shape);
    if (form == "y placed") t.place(y, t.slab("slab", 2, shape), 1);
    if (form == "not next") silent(t, "other", {stream}, shape);
    Value* out = ops::add(t, "out",
                          form == "y first" || form == "y twice" ? y
                          : form == "x is added"                 ? x
                                                                 : stream,
                          form == "y first" ? stream : y);
    auto end = std::make_unique<Silent>();
    end->name = "end", end->in = {out}, end->out = {t.result("end", shape)};
    if (form == "y read twice") end->in.push_back(y);
    if (form == "y kept") end->backward_reads = {y};
    t.record(std::move(end));
    const size_t before = t.nodes().size();
    ops::fuse_linears(t);
    const bool fused = form == "next";
    REQUIRE(t.nodes().size() == before - fused);
    CHECK((y->fused_into == out) == fused);
    t.differentiate(), t.plan(PlanMode::reuse);
    CHECK((y->buffer->inside == nullptr && y->buffer->first < 0) == fused);  // it takes no memory
    if (!fused) continue;
    const Node& layer = *t.nodes()[2];
    CHECK((layer.in == std::vector<Value*>{x, weight, stream} && layer.out == std::vector<Value*>{out}));
    CHECK(stream->grad->buffer == out->grad->buffer);
  }
}

TEST_CASE("linear: two do the gelu between them only where nobody else reads what goes in or comes out") {
  for (const std::string form :
       {"between", "in read twice", "in kept", "out read twice", "out kept", "out placed", "something between",
        "by erf", "f32", "narrow before", "narrow after", "two layers", "no layer after"}) {
    CAPTURE(form);
    Tape t(form == "f32" ? Dtype::f32 : Dtype::bf16);
    ParameterTable params;
    const int64_t C = form == "narrow before" ? 12 : 16, F = 8, O = form == "narrow after" ? 12 : 16;
    const Shape narrow{1, 1, C}, wide{1, 1, 1, F}, last{1, 1, O};
    Value* in_weight = t.parameter(params.add("in", Shape{F, C}, Init::constant(1), Role::input_projection));
    Value* out_weight = t.parameter(params.add("out", Shape{O, F}, Init::constant(1), Role::input_projection));
    Value* x = silent(t, "x", {in_weight}, narrow);
    Value* u = form == "two layers" ? ops::linears(t, "u", x, {{"u", in_weight, wide}, {"v", in_weight, wide}})[0]
                                    : ops::linear(t, "u", x, in_weight, wide);
    if (form == "something between") silent(t, "other", {x}, narrow);
    Value* y = ops::gelu(t, "y", u, form == "by erf" ? GeluKind::erf : GeluKind::tanh);
    if (form == "out placed") t.place(y, t.slab("slab", 2, wide), 1);
    Value* z = form == "no layer after" ? silent(t, "z", {y}, last) : ops::linear(t, "z", y, out_weight, last);
    auto end = std::make_unique<Silent>();
    end->name = "end", end->in = {z}, end->out = {t.result("end", last)};
    if (form == "in read twice") end->in.push_back(u);
    if (form == "out read twice") end->in.push_back(y);
    if (form == "in kept") end->backward_reads = {u};
    if (form == "out kept") end->backward_reads = {y};
    t.record(std::move(end));
    const size_t before = t.nodes().size();
    ops::fuse_linears(t);
    const bool fused = form == "between";
    REQUIRE(t.nodes().size() == before - fused);
    t.differentiate();
    CHECK(u->grad != nullptr);
    CHECK((y->grad == nullptr) == fused);
    if (!fused) continue;
    CHECK((t.nodes()[1]->out == std::vector<Value*>{u, y}));
    const Node& after = *t.nodes()[2];
    CHECK((after.in == std::vector<Value*>{u, out_weight} && after.reads == std::vector<Value*>{y}));
  }
}

TEST_CASE("linear: in eight bits it is the product of the rounded numbers, and finds the largest ones") {
  if (!available(Backend::cuda)) return;
  Layers layers(true);
  REQUIRE(layers.tape.quantized().size() == 5);
  CHECK(layers.tape.quantized()[0].name == "layers.in");
  CHECK((layers.tape.quantized()[1].max == 448 && layers.tape.quantized()[2].max == 57344));
  const auto x = random_vector<bf16>(rows * C, 1, 2.0);
  // In the order of the list: x, and of each layer its weight and its output's gradient.
  const std::vector<float> scales = {64, 256, 1024, 128, 4096};
  layers.set_scales(scales);
  layers.put(layers.x->tensor, x);
  layers.device->fill(layers.params.gradients().data, 0xFF, layers.params.gradients().bytes());  // NaN
  std::vector<std::vector<bf16>> dy, w;
  for (size_t i = 0; i < 2; ++i) {
    dy.push_back(random_vector<bf16>(rows * widths[i], 5 + i, 0.01));
    layers.put(layers.outs[i]->grad->tensor, dy[i]);
    w.push_back(layers.get<bf16>(layers.params.at(str("w", i)).bf16_copy));
  }
  const auto bias = layers.get<bf16>(layers.params.at("bias").bf16_copy);
  Step step{true, 1, 0};
  step.overwrite = step.new_weights = true;
  layers.tape.run(step);

  const auto x8 = kept<e4m3>(x, scales[0]);
  std::vector<double> want_dx(static_cast<size_t>(rows * C), 0.0);
  for (size_t i = 0; i < 2; ++i) {
    CAPTURE(i);
    const int64_t O = widths[i];
    const auto w8 = kept<e4m3>(w[i], scales[1 + 2 * i]), dy8 = kept<e5m2>(dy[i], scales[2 + 2 * i]);
    std::vector<double> want(static_cast<size_t>(rows * O)), want_dw(static_cast<size_t>(O * C), 0.0);
    matmul_forward_ref(want.data(), x8.data(), w8.data(), rows, C, O);
    if (i == 0) bias_forward_ref(want.data(), convert<double>(bias).data(), rows, O);
    matmul_backward_input_ref(want_dx.data(), dy8.data(), w8.data(), rows, C, O, true);
    matmul_backward_weight_ref(want_dw.data(), dy8.data(), x8.data(), rows, C, O);
    check_close("out", layers.get<bf16>(layers.outs[i]->tensor), want, 0x1p-8);
    check_close("dweight", layers.get<float>(layers.params.at(str("w", i)).grad), want_dw, 1e-6);
  }
  check_close("dx", layers.get<bf16>(layers.x->grad->tensor), want_dx, 0x1p-7);  // rounded after each layer
  const auto amaxes = layers.get<float>(layers.tape.amaxes());
  CHECK(amaxes == std::vector<float>{largest(x), largest(w[0]), largest(dy[0]), largest(w[1]), largest(dy[1])});
}

TEST_CASE(
    "linear: in eight bits weights are rounded in a first micro-step only; evaluation and measuring are in bf16") {
  if (!available(Backend::cuda)) return;
  Layers layers(true), plain(false);
  CHECK(plain.tape.quantized().empty());
  const auto x = random_vector<bf16>(rows * C, 1);
  for (Layers* each : {&layers, &plain}) each->put(each->x->tensor, x);
  const auto out = [&](Layers& of, const Step& step) {
    for (const Value* value : of.outs) {
      of.device->fill(value->tensor.data, 0xFF, value->tensor.bytes());
      if (step.training) of.put(value->grad->tensor, random_vector<bf16>(value->shape.numel(), 3));
    }
    of.tape.run(step);
    std::vector<bf16> all;
    for (const Value* value : of.outs) all = joined(all, of.get<bf16>(value->tensor));
    return convert<float>(all);
  };
  Step first{true, 1, 0}, later = first, measuring = first;
  first.overwrite = first.new_weights = measuring.overwrite = measuring.new_weights = measuring.measures = true;
  layers.set_scales({64, 64, 64, 64, 64});
  const std::vector<float> in_bf16 = out(plain, Step{});
  CHECK(out(layers, Step{}) == in_bf16);
  CHECK(layers.get<float>(layers.tape.amaxes()) == std::vector<float>(5, 0.f));
  CHECK(out(layers, measuring) == in_bf16);
  CHECK(largest(layers.get<float>(layers.tape.amaxes())) > 0);
  for (const float amax : layers.get<float>(layers.tape.amaxes())) CHECK(amax > 0);
  const std::vector<float> rounded = out(layers, first);
  CHECK(rounded != in_bf16);
  CHECK(out(layers, later) == rounded);
  for (Parameter& row : layers.params.rows())  // no weight is what it was
    layers.params.write(row, std::vector<double>(static_cast<size_t>(row.shape.numel()), 0.25).data());
  refresh_bf16_copy(layers.params);
  layers.device->copy_in(layers.params.at("bias").bf16_copy.data,
                         plain.get<bf16>(plain.params.at("bias").bf16_copy).data(),
                         layers.params.at("bias").bf16_copy.bytes());
  CHECK(out(layers, later) == rounded);
  CHECK(out(layers, first) != rounded);
}

TEST_CASE("linear: in eight bits it adds its output to the sum that comes next") {
  if (!available(Backend::cuda)) return;
  Layers layers(true, true);
  REQUIRE(layers.tape.nodes()[2]->in.back() == layers.addend);
  const auto x = random_vector<bf16>(rows * C, 1), addend = random_vector<bf16>(rows * widths[0], 2);
  layers.set_scales({64, 256, 1024});
  layers.put(layers.x->tensor, x), layers.put(layers.addend->tensor, addend);
  Step step{true, 1, 0};
  step.overwrite = step.new_weights = true;
  layers.put(layers.outs[0]->grad->tensor, random_vector<bf16>(rows * widths[0], 3));
  layers.tape.run(step);
  const auto x8 = kept<e4m3>(x, 64), w8 = kept<e4m3>(layers.get<bf16>(layers.params.at("w0").bf16_copy), 256);
  std::vector<double> want(addend.size());
  matmul_forward_ref(want.data(), x8.data(), w8.data(), rows, C, widths[0]);
  for (size_t at = 0; at < want.size(); ++at) want[at] += static_cast<double>(addend[at]);
  check_close("out", layers.get<bf16>(layers.outs[0]->tensor), want, 0x1p-8);
}

TEST_CASE("linear: what suits eight bits, and what is refused") {
  if (!available(Backend::cuda)) return;
  const auto device = make_device(gpu);
  for (const auto& [n, in, out, suits] :
       std::vector<std::tuple<int64_t, int64_t, int64_t, bool>>{{16, 64, 64, true},
                                                                {24, 64, 64, false},
                                                                {16, 72, 64, false},
                                                                {16, 64, 72, false},
                                                                {16, 48, 64, false},
                                                                {16, 64, 12, false}}) {
    CAPTURES(n, in, out);
    Tape t(Dtype::bf16);
    t.use_eight_bits();
    ParameterTable params;
    Value* x = silent(t, "x", {t.parameter(params.add("s", Shape{1}, Init::constant(0), Role::bias))}, Shape{n, in});
    ops::linear(t, "y", x, t.parameter(params.add("w", Shape{out, in}, Init::constant(0), Role::input_projection)),
                Shape{n, out});
    CHECK(t.quantized().empty() == !suits);
  }
  Tape t(Dtype::bf16);  // a teacher, which is not trained
  t.use_eight_bits();
  ParameterTable params;
  t.frozen("teacher.", [&] {
    Value* x = t.input("x", Shape{16, 64}, Dtype::bf16);
    ops::linear(t, "y", x, t.parameter(params.add("w", Shape{64, 64}, Init::constant(0), Role::input_projection)),
                Shape{16, 64});
  });
  CHECK(t.quantized().empty());
  std::vector<e4m3> a(256), b(256);
  std::vector<float> c(256), one{1};
  const Quantized left{view(a, {16, 16}), view(one, {1})}, right{view(b, {16, 16}), view(one, {1})};
  CHECK_THROWS_AS(matmul_quantized({view(c, {16, 16}), false}, left, right, true, Stream{}), Error);
  CHECK_THROWS_AS(
      matmul_quantized({view(c, {8, 32}), true}, left, right, true, Stream{Backend::cuda}, view(c, {16, 16})), Error);
  const Quantized narrow{view(a, {16, 8}), view(one, {1})};
  CHECK_THROWS_AS(matmul_quantized({view(c, {16, 16}), false}, narrow, narrow, true, Stream{Backend::cuda}), Error);
}
