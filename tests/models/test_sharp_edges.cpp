// What is easy to get wrong when a connection is written: values in memory that another op overwrites, and values used
// twice. Each is either refused while it is recorded, with a remedy, or its gradients are right.

#include "kernels/block/rope.h"
#include "models/llama.h"
#include "tests/support/backends.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t B = 1, T = 3, C = 4, K = 2, D = 2, V = 5;
const Shape stream{B, T, C}, heads{B, T, K, D};

// Some ops between an embedding and a loss.
struct Small {
  std::unique_ptr<Device> device;
  Tape tape;
  ParameterTable params;
  Graph graph;
  Value* table = nullptr;  // of rope

  Small(const std::function<Value*(Small&, Value*)>& ops, const std::string& device_name, Dtype real)
      : device(make_device(device_name)), tape(real) {
    graph.tokens = tape.input("tokens", Shape{B, T}, Dtype::i32);
    graph.targets = tape.input("targets", Shape{B, T}, Dtype::i32);
    Value* embed = weight("embed", Shape{V, C});
    table = ops::rope_positions(tape, T, std::vector<double>(D / 2, 0.3));
    Value* x = ops(*this, ops::embedding(tape, "x", graph.tokens, embed));
    graph.losses = ops::cross_entropy(tape, "loss", {x, embed}, graph.targets);
    tape.differentiate();
    tape.plan(PlanMode::poison);
    params.allocate(*device, accumulation_type(real), true);
    if (real == Dtype::bf16) params.allocate_bf16_copy();
    params.initialise(3);
    refresh_bf16_copy(params);
    tape.allocate(*device);
    const std::vector<int32_t> tokens{3, 1, 4}, targets{1, 4, 2};
    load_batch(*device, graph, tokens.data(), targets.data());
  }

  Value* weight(const std::string& name, Shape shape) {
    return tape.parameter(params.contains(name) ? params.at(name)
                                                : params.add(name, shape, Init::normal(0.7), Role::input_projection));
  }
  // What models do: project to heads, rotate them, project back.
  Value* to_heads(const std::string& name, Value* x) {
    return ops::linear(tape, name, x, weight("w." + name, {C, C}), heads);
  }
  Value* to_stream(const std::string& name, Value* x) {
    return ops::linear(tape, name, x, weight("w." + name, {C, C}), stream);
  }
  Value* rope(const std::string& name, Value* x) { return ops::rope(tape, name, x, table); }
  Value* copy(const std::string& name, Value* x) { return ops::copy(tape, name, x); }
  Value* gates(Value* x) { return ops::linear(tape, "gates", x, weight("w.gates", {K, C}), Shape{B, T, K}); }

  double loss() {
    tape.forward(Step{true, 1, 0});
    return sum_losses(*device, graph);
  }
  std::vector<double> gradients() {
    params.zero_gradients();
    loss();
    tape.backward(Step{true, 1, 0});
    std::vector<double> all;
    for (Parameter& row : params.rows())
      for (const float g : params.read(row.grad)) all.push_back(static_cast<double>(g));
    return all;
  }
  // The derivatives of the loss by every parameter, by differences: doubles only.
  std::vector<double> differences() {
    constexpr double h = 1e-4;  // as in test_models.cpp
    std::vector<double> all;
    for (Parameter& row : params.rows())
      for (int64_t i = 0; i < row.shape.numel(); ++i) {
        double& x = row.value.as<double>()[i];
        const double keep = x;
        const auto at = [&](double d) {
          x = keep + d;
          return loss();
        };
        all.push_back((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h));
        x = keep;
      }
    return all;
  }
};

using Ops = std::function<Value*(Small&, Value*)>;
struct Trap {
  std::string name;
  Ops ops;
  std::vector<std::string> says = {};  // the message: the op, the value
};

// The mixture of all layers so far, by fixed weights' parameters.
Value* route(Small& s, ops::DepthRouter& router, int layer, Value* own) {
  std::vector<int> sources(static_cast<size_t>(layer) + 1);
  std::iota(sources.begin(), sources.end(), 0);
  Value* weight = layer > 0 ? s.weight(str("router", layer), {K, (layer + 1) * K}) : nullptr;
  return router.route(str("routed", layer), layer, own, weight, sources);
}

const std::vector<Trap> refused = {
    {"a value is read after it was rotated",
     [](Small& s, Value* x) {
       Value* q = s.to_heads("q", x);
       return s.to_stream("out", ops::add(s.tape, "sum", s.rope("turned", q), q));
     },
     {"sum (add)", "reads q", "turned (rope)"}},
    {"queries are the keys",
     [](Small& s, Value* x) {
       Value* q = s.to_heads("q", x);
       return s.to_stream("out", ops::attention(s.tape, "a", s.rope("q_rope", q), s.rope("k_rope", q), q));
     },
     {"k_rope (rope)", "reads q", "q_rope (rope)"}},
    {"a value is rotated that the backward of an earlier op reads",
     [](Small& s, Value* x) {
       Value *q = s.to_heads("q", x), *early = s.to_stream("early", q);
       return ops::add(s.tape, "sum", early, s.to_stream("late", s.rope("turned", q)));
     },
     {"turned (rope) works in place on q", "early (linear)"}},
    {"the output of attention is rotated",
     [](Small& s, Value* x) {
       Value* q = s.to_heads("q", x);
       Value* a = ops::attention(s.tape, "a", q, s.to_heads("k", x), s.to_heads("v", x));
       return s.to_stream("out", s.rope("turned", a));
     },
     {"turned (rope)", "a, ", "a (attention)"}},
    {"a slice of a slab is rotated, which later layers read",
     [](Small& s, Value* x) {
       ops::DepthRouter router(s.tape, "slab", 2, heads);
       Value* first = s.rope("turned", route(s, router, 0, s.to_heads("q0", x)));
       return s.to_stream("out", ops::add(s.tape, "sum", first, route(s, router, 1, s.to_heads("q1", x))));
     },
     {"turned (rope)", "routed0", "slab"}},
    {"what moved into a slab is read on",
     [](Small& s, Value* x) {
       ops::DepthRouter router(s.tape, "slab", 1, heads);
       Value* q = s.to_heads("q", x);
       return s.to_stream("out", ops::add(s.tape, "sum", route(s, router, 0, q), q));
     },
     {"sum (add)", "reads q", "routed0 (route)"}},
    {"what moves into a slab, where gradients replace it, was kept for a backward that comes later",
     [](Small& s, Value* x) {
       ops::DepthRouter router(s.tape, "slab", 1, heads);
       Value* q = s.to_heads("q", x);
       Value* norm = ops::rmsnorm(s.tape, "norm", q, nullptr, 1e-6);
       return s.to_stream("out", ops::add(s.tape, "sum", norm, route(s, router, 0, q)));
     },
     {"routed0 (route)", "q", "norm (rmsnorm)"}},
    {"the same value goes into two slabs",
     [](Small& s, Value* x) {
       ops::DepthRouter keys(s.tape, "keys", 1, heads), values(s.tape, "values", 1, heads);
       Value* q = s.to_heads("q", x);
       return s.to_stream("out", ops::add(s.tape, "sum", route(s, keys, 0, q), route(s, values, 0, q)));
     },
     {"q cannot move into the slab"}},
    {"a constant is rotated, once a step",
     [](Small& s, Value* x) {
       Value* fixed = s.rope("turned", s.tape.constant("fixed", heads, std::vector<double>(T * C, 1)));
       return s.to_stream("out", ops::add(s.tape, "sum", s.to_heads("q", x), fixed));
     },
     {"turned (rope)", "fixed"}},
    {"a parameter is rotated",
     [](Small& s, Value* x) {
       Value* turned = s.rope("turned", s.weight("w", heads));
       return s.to_stream("out", ops::add(s.tape, "sum", s.to_heads("q", x), turned));
     },
     {"turned (rope)", "w"}},
    {"a value is relayed to itself",
     [](Small& s, Value* x) {
       Value* v = s.to_heads("v", x);
       return s.to_stream("out", ops::gated_mix(s.tape, "mix", v, v, s.gates(x)));
     },
     {"mix (gated_mix)", "v"}},
    {"the stream that became a source is read on",
     [](Small& s, Value* x) {
       ops::DepthHistory history(s.tape, /*by_norm=*/false);
       history.add("h0", x);
       return ops::add(s.tape, "sum", x, history.mix("mix", {0}, s.weight("one", {1})));
     },
     {"sum (add)", "reads x", "h0 (depth_source)"}},
    {"values that share memory",
     [](Small& s, Value* x) {
       Value *q = s.to_heads("q", x), *other = s.tape.activation("other", heads);
       s.tape.share(other, q);
       return s.to_stream("out", ops::add(s.tape, "sum", s.rope("turned", q), other));
     },
     {"sum (add)", "reads other", "turned (rope)"}},
    {"a value that shared memory before it moved into a slab",
     [](Small& s, Value* x) {
       ops::DepthRouter router(s.tape, "slab", 1, heads);
       Value *q = s.to_heads("q", x), *other = s.tape.activation("other", heads);
       s.tape.share(other, q);
       return s.to_stream("out", ops::add(s.tape, "sum", route(s, router, 0, q), other));
     },
     {"sum (add)", "reads other", "routed0 (route)"}},
    {"a whole slab is read, through which no gradient reaches its slices",
     [](Small& s, Value* x) {
       const Slab slab = s.tape.slab("slab", 1, heads);
       s.tape.place(s.to_heads("q", x), slab, 0);
       return s.to_stream("out", slab.all);
     },
     {"out (linear) reads slab", "no op has written", "Use what an op returned"}},
    {"keys are values",
     [](Small& s, Value* x) {
       Value* k = s.to_heads("k", x);
       return s.to_stream("out", ops::attention(s.tape, "a", s.to_heads("q", x), k, k));
     },
     {"a (attention)", "k twice"}},
    {"a gate is gated by itself",
     [](Small& s, Value* x) {
       Value* g = s.to_stream("g", x);
       return ops::swiglu(s.tape, "square", g, g);
     },
     {"square (swiglu)", "g twice"}},
};

const std::vector<Trap> right = {
    {"an op that keeps nothing reads a value before it is rotated",
     [](Small& s, Value* x) {
       Value *q = s.to_heads("q", x), *sum = ops::add(s.tape, "sum", q, s.to_heads("k", x));
       return s.to_stream("out", ops::add(s.tape, "both", sum, s.rope("turned", q)));
     }},
    {"a copy is rotated, and the value read before and after",
     [](Small& s, Value* x) {
       Value *q = s.to_heads("q", x), *early = s.to_stream("early", q);
       Value* turned = s.rope("turned", s.copy("copy", q));
       Value* sum = ops::add(s.tape, "sum", turned, q);
       return ops::add(s.tape, "both", early, s.to_stream("late", sum));
     }},
    {"a copy of a copy, and one that nobody changes",
     [](Small& s, Value* x) {
       Value *a = s.copy("a", x), *b = s.copy("b", a);
       return s.copy("end", ops::add(s.tape, "sum", ops::add(s.tape, "ab", a, b), x));
     }},
    {"a copy of a slice of a slab is rotated, and later layers read the slice",
     [](Small& s, Value* x) {
       ops::DepthRouter router(s.tape, "slab", 2, heads);
       Value* first = s.rope("turned", s.copy("copy", route(s, router, 0, s.to_heads("q0", x))));
       Value* second = s.rope("turned1", route(s, router, 1, s.to_heads("q1", x)));
       return s.to_stream("out", ops::add(s.tape, "sum", first, second));
     }},
    {"a copy moves into a slab, and the value was kept",
     [](Small& s, Value* x) {
       ops::DepthRouter router(s.tape, "slab", 1, heads);
       Value* q = s.to_heads("q", x);
       Value* norm = ops::rmsnorm(s.tape, "norm", q, nullptr, 1e-6);
       return s.to_stream("out", ops::add(s.tape, "sum", norm, route(s, router, 0, s.copy("copy", q))));
     }},
    {"the same value in two slabs, once as a copy",
     [](Small& s, Value* x) {
       ops::DepthRouter keys(s.tape, "keys", 1, heads), values(s.tape, "values", 1, heads);
       Value *q = s.to_heads("q", x), *other = s.copy("copy", q);
       return s.to_stream("out", ops::add(s.tape, "sum", route(s, keys, 0, q), route(s, values, 0, other)));
     }},
    {"a copy of a source of mixtures is read",
     [](Small& s, Value* x) {
       ops::DepthHistory history(s.tape, /*by_norm=*/false);
       Value* other = s.copy("copy", x);
       history.add("h0", x);
       history.add("h1", s.to_stream("y", other));
       return ops::add(s.tape, "sum", other, history.mix("mix", {0, 1}, s.weight("two", {2})));
     }},
    {"a mixture of sources becomes a source, and the stream goes on from it",
     [](Small& s, Value* x) {
       ops::DepthHistory history(s.tape, /*by_norm=*/false);
       Value* h = history.add("h0", x);
       h = ops::add(s.tape, "sum0", h, s.to_stream("y0", h));
       history.add("h1", h);
       h = history.add("h2", history.mix("mix", {0, 1}, s.weight("two", {2})));
       h = ops::add(s.tape, "sum1", h, s.to_stream("y1", ops::rmsnorm(s.tape, "norm", h, nullptr, 1e-6)));
       return ops::add(s.tape, "end", h, history.mix("last", {0, 1, 2}, s.weight("three", {3})));
     }},
    {"what the first layer has in a slab is used by all of them",
     [](Small& s, Value* x) {
       ops::DepthRouter router(s.tape, "slab", 2, heads);
       Value* first = route(s, router, 0, s.to_heads("v0", x));
       Value* y = s.to_stream("y", ops::attention(s.tape, "a0", s.to_heads("q0", x), s.to_heads("k0", x), first));
       Value* second = route(s, router, 1, s.to_heads("v1", y));
       Value* a = ops::attention(s.tape, "a1", s.to_heads("q1", y), second, first);
       return ops::add(s.tape, "sum", y, s.to_stream("out", a));
     }},
    {"keys are values, once as a copy",
     [](Small& s, Value* x) {
       Value* k = s.to_heads("k", x);
       return s.to_stream("out", ops::attention(s.tape, "a", s.to_heads("q", x), k, s.copy("v", k)));
     }},
    {"a sum of a value with itself",
     [](Small& s, Value* x) {
       return ops::add(s.tape, "twice", s.to_stream("y", x), ops::add(s.tape, "double", x, x));
     }},
    {"one weight projects twice",
     [](Small& s, Value* x) {
       Value* w = s.weight("w", {C, C});
       const auto both = ops::linears(s.tape, "both", x, {{"one", w, stream}, {"two", w, stream}});
       return ops::swiglu(s.tape, "square", both[0], both[1]);
     }},
    {"of three projections two have a bias, and it is the same",
     [](Small& s, Value* x) {
       Value* bias = s.weight("bias", {C});
       const auto three = ops::linears(s.tape, "three", x,
                                       {{"one", s.weight("w1", {C, C}), stream, bias},
                                        {"two", s.weight("w2", {C, C}), stream},
                                        {"three", s.weight("w3", {C, C}), stream, bias}});
       return ops::add(s.tape, "sum", ops::swiglu(s.tape, "product", three[0], three[1]), three[2]);
     }},
    {"a product with a bias is added to the stream",
     [](Small& s, Value* x) {
       Value* y = ops::rmsnorm(s.tape, "norm", x, nullptr, 1e-6);
       Value* out = ops::linear(s.tape, "out", y, s.weight("w", {C, C}), stream, s.weight("bias", {C}));
       return ops::add(s.tape, "sum", x, out);
     }},
    {"positions are added in place, and a norm has a gain and a bias",
     [](Small& s, Value* x) {
       Value* h = ops::positions(s.tape, "placed", x, s.weight("table", {T + 2, C}));
       Value* y = ops::layernorm(s.tape, "norm", h, s.weight("gain", {C}), s.weight("shift", {C}), 1e-5);
       return ops::add(s.tape, "sum", h, ops::gelu(s.tape, "gelu", y, GeluKind::tanh));
     }},
};

struct WholeSlab : Node {
  const char* op() const override { return "whole"; }
  void forward(const Step&, Stream) override {}
  void backward(const Step&, Stream) override {}
};

}  // namespace

TEST_CASE("sharp edges: what would compute with overwritten memory is refused, with op, value and remedy") {
  for (const Trap& trap : refused) {
    CAPTURE(trap.name);
    const std::string message = error_of([&] { Small(trap.ops, "reference", Dtype::f64); }).what();
    CAPTURE(message);
    for (const std::string& part : trap.says) CHECK(has(message, part));
    const bool copy = has(message, "ops::copy(tape, name, value)");
    CHECK((copy || has(message, "Use what an op returned")));
  }
}

TEST_CASE("sharp edges: no op writes a slab as a whole, before or after its slices") {
  for (const bool before : {true, false}) {
    const auto ops = [before](Small& s, Value* x) {
      const Slab slab = s.tape.slab("slab", 1, heads);
      Value* q = s.to_heads("q", x);
      if (!before) s.tape.place(q, slab, 0);
      auto node = std::make_unique<WholeSlab>();
      node->name = "whole", node->in = {x}, node->out = {slab.all};
      return s.to_stream("out", s.rope("turned", s.tape.record(std::move(node))));
    };
    CHECK_THROWS_WITH(Small(ops, "reference", Dtype::f64),
                      doctest::Contains("whole (whole) writes the whole slab slab"));
  }
}

TEST_CASE("sharp edges: what is recorded has the right gradients") {
  for (const Trap& edge : right) {
    CAPTURE(edge.name);
    Small exact(edge.ops, "reference", Dtype::f64);
    const auto want = exact.differences();
    check_close("f64", exact.gradients(), want, 1e-6);
    for (const std::string& device : fast_devices()) {
      check_close(device, Small(edge.ops, device, Dtype::f32).gradients(), want, 1e-4);  // ulps of f32, cancellation
      // Some dozen roundings to 2^-9, which cancellation makes larger, but hardly in all gradients together.
      CHECK(distance(Small(edge.ops, device, Dtype::bf16).gradients(), want) < 0.03 * size_of(want));
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// A whole connection: the queries of every layer are mixed from those of all layers so far.

namespace {

class RoutedQueries : public Connection {
 public:
  explicit RoutedQueries(bool copies) : copies_(copies) {}

  QueryKeyValue project(int layer, Value* x) override {
    QueryKeyValue own = Connection::project(layer, x);
    if (layer == 0) router_.emplace(build_->tape, "queries", build_->config.num_hidden_layers, own.q->shape);
    std::vector<int> sources(static_cast<size_t>(layer) + 1);
    std::iota(sources.begin(), sources.end(), 0);
    Value* weight = layer > 0 ? build_->parameter(str("router", layer)) : nullptr;
    own.q = router_->route(str("L", layer, ".queries"), layer, own.q, weight, sources);
    if (copies_) own.q = ops::copy(build_->tape, str("L", layer, ".copy"), own.q);
    return own;
  }

 private:
  bool copies_;
  std::optional<ops::DepthRouter> router_;
};

Value* routed_blocks(Small& s, Value* x, bool copies) {
  Config config;
  config.vocab_size = V, config.hidden_size = C, config.intermediate_size = 6, config.num_hidden_layers = 2;
  config.num_attention_heads = K;
  config.initializer_range = 0.7;
  config.check(Exit::usage, "test");
  for (int layer = 0; layer < 2; ++layer) declare_llama_block(s.params, config, layer);
  s.weight("router1", {K, 2 * K});
  Build build{s.tape, s.params, config, B, T};
  build.rope = s.table;
  RoutedQueries connection(copies);
  connection.begin(build, x);
  for (int layer = 0; layer < 2; ++layer) record_llama_block(build, connection, layer);
  return connection.finish();
}

}  // namespace

TEST_CASE("sharp edges: queries from a slab cannot be rotated there, but a copy of them can") {
  CHECK_THROWS_WITH(Small([](Small& s, Value* x) { return routed_blocks(s, x, false); }, "reference", Dtype::f64),
                    doctest::Contains("L0.attn.q_rope (rope) works in place on L0.queries, which lies in the slab"));
  Small exact([](Small& s, Value* x) { return routed_blocks(s, x, true); }, "reference", Dtype::f64);
  check_close("gradients", exact.gradients(), exact.differences(), 1e-6);
}
