#include "engine/tape.h"

#include <numeric>

#include "kernels/devices.h"

#include "kernels/block/ops.h"
#include "tests/support/tiny.h"
#include "train/settings/schedule.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// A node whose backward does nothing: for the rules of recording.
struct Nothing : Node {
  bool is_in_place = false, passes_gradients = false, overwrites = false, contiguous = false;
  const char* op() const override { return "nothing"; }
  void forward(const Step&, Stream) override {}
  void backward(const Step&, Stream) override {}
  bool in_place() const override { return is_in_place; }
  bool grad_aliases_output(size_t) const override { return passes_gradients; }
  bool grads_overwrite_inputs() const override { return overwrites; }
  bool contiguous_outputs() const override { return contiguous; }
};

std::unique_ptr<Nothing> nothing(std::vector<Value*> in, std::vector<Value*> out) {
  auto node = std::make_unique<Nothing>();
  node->name = "nothing";
  node->in = std::move(in);
  node->out = std::move(out);
  return node;
}

}  // namespace

TEST_CASE("tape: the first writer in reverse order sets a gradient, the others add; parameters always add") {
  ParameterTable params;
  Parameter& row = params.add("w", Shape{4}, Init::constant(1), Role::input_projection);
  Tape t(Dtype::f32);
  Value* w = t.parameter(row);
  CHECK(t.parameter(row) == w);
  Value* x = t.record(nothing({w}, {t.activation("x", Shape{4})}));
  Value* y = t.record(nothing({x}, {t.activation("y", Shape{4})}));
  Value* z = t.record(nothing({x, y, w}, {t.activation("z", Shape{4})}));
  t.record(nothing({z, x}, {t.result("loss", Shape{1})}));
  t.differentiate();
  const auto& nodes = t.nodes();
  constexpr GradMode overwrite = GradMode::overwrite, accumulate = GradMode::accumulate;
  CHECK(nodes[3]->grad_modes == std::vector{overwrite, overwrite});               // z and x: first writers
  CHECK(nodes[2]->grad_modes == std::vector{accumulate, overwrite, accumulate});  // x again, y first, w always
  CHECK(nodes[1]->grad_modes == std::vector{accumulate});
  CHECK(nodes[0]->grad_modes == std::vector{accumulate});
  CHECK_THROWS_AS(t.differentiate(), Error);
}

TEST_CASE("tape: the example of engine/tape.h") {
  const auto device = make_device("cpu");
  ParameterTable params;
  params.add("weight", Shape{5, 4}, Init::normal(1), Role::input_projection);
  params.allocate(*device, Dtype::f32, true);
  params.initialise(42);
  const int32_t text[4] = {2, 0, 4, 1};
  // These eight lines stand there.
  Tape tape(Dtype::f32);
  Value* tokens = tape.input("tokens", Shape{1, 3}, Dtype::i32);  // (B, T)
  Value* targets = tape.input("targets", Shape{1, 3}, Dtype::i32);
  Value* weight = tape.parameter(params.at("weight"));  // (V, C)
  Value* losses = ops::cross_entropy(tape, "loss", {ops::embedding(tape, "x", tokens, weight), weight}, targets);
  tape.differentiate(), tape.plan(PlanMode::reuse), tape.allocate(*device);
  device->copy_in(tokens->tensor.data, text, 12), device->copy_in(targets->tensor.data, text + 1, 12);
  tape.run(Step{true});  // losses->tensor has the losses, weight->grad->tensor the gradient of their sum
  const auto sum = [&] { return std::accumulate(losses->tensor.as<float>(), losses->tensor.as<float>() + 3, 0.0); };
  float* w = params.at("weight").value.as<float>();
  const double got = weight->grad->tensor.as<float>()[1], before = sum();
  CHECK(losses->tensor.as<float>()[2] > 0);
  w[1] += 1e-3f;
  tape.run(Step{});
  CHECK(sum() - before == doctest::Approx(1e-3 * got).epsilon(0.02));
}

TEST_CASE("tape: reading what was overwritten in place is refused") {
  Tape t(Dtype::f32);
  Value* x = t.input("x", Shape{4}, Dtype::f32);
  Value* y = t.record(nothing({x}, {t.activation("y", Shape{4})}));
  auto in_place = nothing({y}, {t.activation("z", Shape{4})});
  in_place->is_in_place = true;
  Value* z = t.record(std::move(in_place));
  CHECK(z->buffer == y->buffer);
  CHECK_THROWS_AS(t.record(nothing({y}, {t.activation("late", Shape{4})})), Error);
  auto keeper = nothing({z}, {t.activation("kept", Shape{4})});
  keeper->backward_reads = {y};
  CHECK_THROWS_AS(t.record(std::move(keeper)), Error);
}

TEST_CASE("tape: a residual stream's gradient stays where it is, and a sublayer reads it there, if that is safe") {
  // x -> norm -> y, add(x, y) -> out, in four forms: as in a model; without the norm, so that y's writer would read and
  // write the same gradient; y with a second reader; and another reader of x after y was made, who adds to the stream's
  // gradient before y's writer has read it.
  for (const std::string form : {"residual", "no norm", "y read twice", "x read late"}) {
    CAPTURE(form);
    Tape t(Dtype::f32);
    ParameterTable params;
    Value* weight = t.parameter(params.add("w", Shape{4}, Init::constant(1), Role::input_projection));
    Value* x = t.record(nothing({weight}, {t.activation("x", Shape{4})}));
    Value* norm = form == "no norm" ? x : t.record(nothing({x}, {t.activation("norm", Shape{4})}));
    Value* y = t.record(nothing({norm}, {t.activation("y", Shape{4})}));
    Value* extra = nullptr;
    if (form == "y read twice") extra = t.record(nothing({y}, {t.activation("extra", Shape{4})}));
    if (form == "x read late") extra = t.record(nothing({x}, {t.activation("extra", Shape{4})}));
    auto add = nothing({x, y}, {t.activation("out", Shape{4})});
    add->passes_gradients = true;
    Value* out = t.record(std::move(add));
    t.record(nothing(extra != nullptr ? std::vector<Value*>{out, extra} : std::vector<Value*>{out},
                     {t.activation("end", Shape{4})}));
    t.differentiate();
    CHECK(x->grad->buffer == out->grad->buffer);
    CHECK((y->grad->buffer == out->grad->buffer) == (form == "residual"));
  }
}

TEST_CASE("tape: what the next node alone reads, and a pass that leaves its writer out") {
  for (const std::string form :
       {"next", "kept by next", "twice by next", "read later", "kept later", "kept by its writer",
        "gradient read later", "read besides", "not next", "placed", "a result", "frozen"}) {
    CAPTURE(form);
    Tape t(Dtype::f32);
    const Shape shape{1, 1, 1, 4};
    Value* x = t.input("x", shape, Dtype::f32);
    Value* y = form == "a result" ? t.result("y", shape) : t.activation("y", shape);
    auto writer = nothing({x}, {y});
    if (form == "kept by its writer") writer->backward_reads = {y};
    if (form == "frozen") t.frozen("teacher.", [&] { t.record(std::move(writer)); });
    else t.record(std::move(writer));
    if (form == "placed") t.place(y, t.slab("slab", 2, shape), 1);
    if (form == "not next") t.record(nothing({x}, {t.activation("other", shape)}));
    auto reader = nothing(form == "twice by next" ? std::vector<Value*>{y, y} : std::vector<Value*>{y},
                          {t.activation("z", shape)});
    if (form == "kept by next") reader->backward_reads = {y};
    Value* z = t.record(std::move(reader));
    auto end = nothing({z}, {t.result("end", shape)});
    if (form == "read later") end->in.push_back(y);
    if (form == "kept later") end->backward_reads = {y};
    if (form == "gradient read later") end->backward_reads_grads = {y};
    if (form == "read besides") end->reads = {y};
    t.record(std::move(end));
    CHECK(t.read_by_next().contains(y) == (form.ends_with("next") && form != "not next"));
    CHECK(t.read_by_next().contains(z));
    const size_t before = t.nodes().size();
    t.rewrite([](auto& nodes) {
      nodes.back()->in = nodes[0]->in;
      nodes[0] = nullptr;
    });
    CHECK(t.nodes().size() == before - 1);
    CHECK(t.nodes().back()->in[0] == x);
    t.differentiate();
    CHECK_THROWS_AS(t.rewrite([](auto&) {}), Error);
  }
}

TEST_CASE("tape: outputs of one size lie one behind the other where they live about as long") {
  for (const PlanMode mode : {PlanMode::reuse, PlanMode::distinct, PlanMode::poison}) {
    CAPTURE(static_cast<int>(mode));
    Tape t(Dtype::f32);
    ParameterTable params;
    const Shape shape{1, 1, 1, 100};
    Value* x = t.record(nothing({t.parameter(params.add("w", shape, Init::constant(1), Role::input_projection))},
                                {t.activation("x", shape)}));
    auto products = nothing({x}, {t.activation("a", shape), t.activation("b", shape), t.activation("wide", Shape{101}),
                                  t.activation("c", shape), t.activation("placed", shape), t.activation("d", shape),
                                  t.activation("e", shape), t.activation("late", shape)});
    products->contiguous = true;
    const std::vector<Value*> out = products->out;
    t.record(std::move(products));
    t.place(out[4], t.slab("slab", 1, shape), 0);
    Value* sum = t.record(nothing(std::vector<Value*>(out.begin(), out.end() - 1), {t.activation("sum", shape)}));
    for (int i = 0; i < 20; ++i) sum = t.record(nothing({sum}, {t.activation(str("then ", i), shape)}));
    t.record(nothing({sum, out[7]}, {t.activation("end", shape)}));
    t.differentiate();
    t.plan(mode);
    const auto distance = [&](int i, bool gradient) {  // to the next one, where both are in one buffer
      const Buffer &a = *(gradient ? out[i]->grad : out[i])->buffer,
                   &b = *(gradient ? out[i + 1]->grad : out[i + 1])->buffer;
      return a.inside != nullptr && a.inside == b.inside ? b.place() - a.place() : 0;
    };
    for (const bool gradient : {false, true}) {
      CAPTURE(gradient);
      const size_t place = 512;  // 400 bytes
      const std::vector<size_t> want = gradient ? std::vector<size_t>{place, 0, 0, place, place, place, 0}
                                                : std::vector<size_t>{place, 0, 0, 0, 0, place, 0};
      for (int i = 0; i < 7; ++i) {
        CAPTURE(i);
        CHECK(distance(i, gradient) == want[static_cast<size_t>(i)]);
      }
    }
  }
}

TEST_CASE("tape: a gradient goes over its input only where nobody else needs the input") {
  for (const std::string form : {"alone", "read twice", "kept by another"}) {
    CAPTURE(form);
    Tape t(Dtype::f32);
    ParameterTable params;
    Value* weight = t.parameter(params.add("w", Shape{4}, Init::constant(1), Role::input_projection));
    Value* x = t.record(nothing({weight}, {t.activation("x", Shape{4})}));
    auto gate = nothing({x}, {t.activation("y", Shape{4})});
    gate->backward_reads = {x};
    gate->overwrites = true;
    Value* y = t.record(std::move(gate));
    auto end = nothing(form == "read twice" ? std::vector<Value*>{y, x} : std::vector<Value*>{y},
                       {t.activation("end", Shape{4})});
    if (form == "kept by another") end->backward_reads = {x};
    t.record(std::move(end));
    t.differentiate();
    CHECK((x->grad->buffer == x->buffer) == (form == "alone"));
  }
}

TEST_CASE("tape: the plan overlaps only buffers that are never alive together") {
  Tape t(Dtype::f32);
  Value* x = t.input("x", Shape{64}, Dtype::f32);
  std::vector<Value*> chain{x};
  for (int i = 0; i < 6; ++i)
    chain.push_back(t.record(nothing({chain.back()}, {t.activation("a" + std::to_string(i), Shape{64 * (i + 1)})})));
  t.plan(PlanMode::reuse);
  CHECK_THROWS_AS(t.differentiate(), Error);
  const size_t reuse = t.arena_bytes();
  for (size_t i = 0; i < chain.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Buffer &a = *chain[i]->buffer, &b = *chain[j]->buffer;
      const bool together = b.persistent || j + 1 == i;
      const bool apart = a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset;
      if (together) CHECK(apart);
    }
  }
  t.plan(PlanMode::distinct);
  CHECK(reuse < t.arena_bytes());
  CHECK(t.dump().find("nothing") != std::string::npos);
  CHECK(t.memory_report().find("activations") != std::string::npos);
}

TEST_CASE("tape: a slab's slices are the outputs themselves") {
  auto device = make_device("cpu");
  Tape t(Dtype::f32);
  Value* x = t.input("x", Shape{1}, Dtype::f32);
  const Slab slab = t.slab("slab", 3, Shape{1, 2, 2, 4});
  std::vector<Value*> slices;
  for (int i = 0; i < 3; ++i) {
    slices.push_back(t.record(nothing({x}, {t.activation("s" + std::to_string(i), Shape{1, 2, 2, 4})})));
    t.place(slices.back(), slab, i);
  }
  auto reader = nothing({x}, {t.result("r", Shape{1})});
  reader->reads = {slab.all};
  t.record(std::move(reader));
  CHECK_THROWS_AS(t.place(slices[0], slab, 1), Error);
  t.plan(PlanMode::reuse);
  t.allocate(*device);
  for (int i = 0; i < 3; ++i)
    CHECK(slices[static_cast<size_t>(i)]->tensor.data == slab.all->tensor.as<float>() + 16 * i);
}

TEST_CASE("schedule: the multipliers of the specifications") {
  const Schedule lime{ScheduleKind::cosine, 200, 20000, 1e-6};
  CHECK(lime.at(0) == 0);
  CHECK(lime.at(100) == doctest::Approx(0.5));
  CHECK(lime.at(200) == doctest::Approx(1.0));
  CHECK(lime.at(10100) == doctest::Approx(0.5));
  CHECK(lime.at(20000) == doctest::Approx(1e-6));
  const Schedule other{ScheduleKind::cosine_to_floor, 10, 110, 0.1};
  CHECK(other.at(0) == doctest::Approx(0.1));
  CHECK(other.at(9) == doctest::Approx(1.0));
  CHECK(other.at(60) == doctest::Approx(0.55));
  CHECK(other.at(110) == doctest::Approx(0.1));
  const Schedule linear{ScheduleKind::linear, 5, 105, 0};
  CHECK(linear.at(0) == doctest::Approx(0.2));
  CHECK(linear.at(55) == doctest::Approx(0.5));
  CHECK(linear.at(105) == doctest::Approx(0));
  CHECK(Schedule{ScheduleKind::constant, 0, 10, 0}.at(7) == 1);
  const Schedule inheritune{schedule_kind("cosine_from_zero"), 2000, 100000, 0.05};
  CHECK(inheritune.at(0) == 0);
  CHECK(inheritune.at(500) == 0.25);
  CHECK(inheritune.at(1999) == doctest::Approx(0.9995));
  CHECK(inheritune.at(2000) == doctest::Approx(1.0));
  CHECK(inheritune.at(51000) == doctest::Approx(0.525));
  CHECK(inheritune.at(26500) == doctest::Approx(0.05 + 0.95 * (1 + std::sqrt(0.5)) / 2));
  CHECK(inheritune.at(100000) == doctest::Approx(0.05));
  // A cool-down of 4 of 20 steps: its first one has rate 1, its last one a quarter of the way left.
  const Schedule wsd{ScheduleKind::wsd_linear, 5, 20, 0.2, 4}, root{ScheduleKind::wsd_sqrt, 0, 20, 0, 4};
  CHECK((wsd.at(0) == 0.2 && wsd.at(4) == 1 && wsd.at(5) == 1 && wsd.at(15) == 1 && wsd.at(16) == 1));
  CHECK(wsd.at(17) == doctest::Approx(0.2 + 0.8 * 0.75));
  CHECK(wsd.at(19) == doctest::Approx(0.2 + 0.8 * 0.25));
  CHECK((root.at(0) == 1 && root.at(16) == 1 && root.at(17) == 0.5));
  CHECK(root.at(19) == doctest::Approx(1 - std::sqrt(0.75)));
  CHECK_THROWS_AS(schedule_kind("step"), Error);
}

TEST_CASE("optimizer: rows learn and decay at their own rates, and the clip scales the whole gradient") {
  auto device = make_device("cpu");
  ParameterTable params;
  params.add("slow", Shape{3}, Init::constant(1), Role::input_projection);
  params.add("fast", Shape{3}, Init::constant(1), Role::source_router, {.lr_mul = 10, .wd_mul = 0});
  params.allocate(*device, Dtype::f32, true);
  params.initialise(1);
  Optimizer optimizer(params, Buckets(params), AdamwOptions{0.9, 0.95, 1e-8, 0.1, 1.0});
  for (Parameter& row : params.rows())
    for (int i = 0; i < 3; ++i) row.grad.as<float>()[i] = 100;
  const double norm = gradient_norm(params);
  CHECK(norm == doctest::Approx(100 * std::sqrt(6.0)));
  update(optimizer, *device, 0.01, norm, 1.0);
  // The first Adam step moves by the learning rate whatever the gradient's size; only "slow" decays.
  CHECK(params.at("slow").value.as<float>()[1] == doctest::Approx(1 - 0.01 * 0.1 - 0.01).epsilon(1e-5));
  CHECK(params.at("fast").value.as<float>()[2] == doctest::Approx(1 - 0.1).epsilon(1e-5));
  const float clipped = optimizer.m().as<float>()[0];
  CHECK(clipped == doctest::Approx(0.1 * 100 / norm).epsilon(1e-4));
  // The gradients times 1/1000 are not clipped.
  update(optimizer, *device, 0.01, norm / 1000, 1.0, 1e-3);
  CHECK(optimizer.m().as<float>()[0] == doctest::Approx(0.9f * clipped + 0.1 * 0.1).epsilon(1e-4));
}

TEST_CASE("params: initialisation depends on seed, name and element only") {
  auto device = make_device("cpu");
  auto values = [&](uint64_t seed, bool extra) {
    ParameterTable params;
    if (extra) params.add("first", Shape{70}, Init::constant(0), Role::input_projection);
    params.add("w", Shape{300, 40}, Init::normal(0.02), Role::input_projection);
    params.allocate(*device, Dtype::f32, false);
    params.initialise(seed);
    return params.read(params.at("w").value);
  };
  const std::vector<float> w = values(1, false);
  CHECK(w == values(1, true));
  CHECK(w != values(2, false));
  double square = 0;
  for (float x : w) square += static_cast<double>(x * x);
  CHECK(std::sqrt(square / 12000) == doctest::Approx(0.02).epsilon(0.03));
}
