// bench ops: what moves data more than it computes, as GB/s of the bytes that its contract must read and write, against
// a copy that moves as many bytes.
#include <array>
#include <memory>

#include "cli/format.h"
#include "dev/bench.h"
#include "engine/rng.h"
#include "kernels/block/add.h"
#include "kernels/block/embedding.h"
#include "kernels/block/rmsnorm.h"
#include "kernels/block/rope.h"
#include "kernels/block/swiglu.h"
#include "kernels/depth/depth_mix.h"
#include "kernels/depth/multiway_mix.h"
#include "kernels/depth/route.h"
#include "kernels/depth/streams/hyper.h"
#include "kernels/depth/value_mix.h"
#include "kernels/devices.h"
#include "kernels/optim/adamw.h"

namespace crossply {
namespace {

// The second model of bench steps; on a GPU one of a billion parameters.
struct Sizes {
  int64_t B = 4, T = 512, C = 768, F = 2048, H = 12, K = 4, D = 64, L = 12, V = 32000;
};
constexpr Sizes gpu_sizes{8, 2048, 2048, 8192, 32, 8, 64, 16, 50304}, tiny_sizes{1, 32, 64, 128, 2, 1, 32, 3, 99};
constexpr size_t l2 = 60'000'000;  // bytes, of an H200; an A100 has 40
constexpr double min_seconds = 0.02;

struct Op {
  std::string name;
  std::vector<Tensor> reads, writes;  // each as often as it must be touched
  std::function<void()> run;

  size_t bytes() const {
    size_t sum = 0;
    for (const std::vector<Tensor>* tensors : {&reads, &writes})
      for (const Tensor& t : *tensors) sum += t.bytes();
    return sum;
  }
};

// Tensors in a device's memory. real: what activations are stored in.
class Tensors {
 public:
  Tensors(const Sizes& sizes, Dtype real, Device& device) : z(sizes), real_(real), device_(device), memory_(device) {}
  const Sizes z;
  Stream stream() const { return device_.stream(); }
  Tensor activation(Shape shape) { return make(shape, real_); }
  Tensor f32(Shape shape) { return make(shape, Dtype::f32); }  // parameters, statistics
  std::vector<Tensor> activations(int64_t count, Shape shape) {
    std::vector<Tensor> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(activation(shape));
    return out;
  }
  Tensor ones(int64_t n) {
    return memory_.fill<double>({n}, [](int64_t) { return 1.0; });
  }
  Tensor tokens(Shape shape, int64_t below) {
    return memory_.fill<int32_t>(shape, [=](int64_t i) {
      return static_cast<int64_t>(random_bits(5, 0, static_cast<uint64_t>(i)) % static_cast<uint64_t>(below));
    });
  }

 private:
  // Numbers between 0.1 and 0.2: no sum over them becomes tiny, which some CPUs are slow at, or overflows.
  Tensor make(Shape shape, Dtype dtype) {
    return memory_.make(shape, dtype, [](int64_t i) { return 0.1f + 0.001f * static_cast<float>(i * 37 % 101); });
  }
  Dtype real_;
  Device& device_;
  DeviceTensors memory_;
};

std::vector<Tensor> operator+(std::vector<Tensor> a, const std::vector<Tensor>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

using Ops = std::vector<Op>;

void add_norm_and_rope(Ops& ops, Tensors& m) {
  const Stream s = m.stream();
  const int64_t B = m.z.B, T = m.z.T, C = m.z.C, H = m.z.H, D = m.z.D;
  const Tensor x = m.activation({B, T, C}), y = m.activation(x.shape), dx = m.activation(x.shape), rstd = m.f32({B, T}),
               w = m.f32({C}), dw = m.f32({C});
  ops.push_back({"rmsnorm forward", {x, w}, {y, rstd}, [=] { rmsnorm_forward(y, rstd, x, w, 1e-5, s); }});
  ops.push_back({"rmsnorm backward", {y, x, w, rstd, dw}, {dx, dw}, [=] {
                   rmsnorm_backward({dx, false}, dw, y, x, w, rstd, s);
                 }});
  const Tensor q = m.activation({B, T, H, D}), p = m.activation(q.shape), table = m.f32({T, D});
  ops.push_back({"rope forward", {q, table}, {p}, [=] { rope_forward(p, q, table, 0, s); }});
  ops.push_back({"rope backward", {p, table}, {q}, [=] { rope_backward({q, false}, p, table, 0, s); }});
}

void add_elementwise(Ops& ops, Tensors& m) {
  const Stream s = m.stream();
  const int64_t B = m.z.B, T = m.z.T, C = m.z.C, F = m.z.F;
  const Tensor gate = m.activation({B, T, F}), up = m.activation(gate.shape), out = m.activation(gate.shape),
               dgate = m.activation(gate.shape), dup = m.activation(gate.shape);
  ops.push_back({"swiglu forward", {gate, up}, {out}, [=] { swiglu_forward(out, gate, up, s); }});
  ops.push_back({"swiglu backward", {out, gate, up}, {dgate, dup}, [=] {
                   swiglu_backward({dgate, false}, {dup, false}, out, gate, up, s);
                 }});
  const Tensor a = m.activation({B, T, C}), b = m.activation(a.shape), sum = m.activation(a.shape);
  ops.push_back({"add forward", {a, b}, {sum}, [=] { add_forward(sum, a, b, s); }});
  ops.push_back({"add backward, accumulating", {sum, a}, {a}, [=] { accumulate({a, true}, sum, s); }});
}

// Of the embedding's rows those that the tokens name, of their gradients too.
void add_parameter_ops(Ops& ops, Tensors& m) {
  const Stream s = m.stream();
  const int64_t B = m.z.B, T = m.z.T, C = m.z.C, V = m.z.V;
  const Tensor out = m.activation({B, T, C}), weight = m.f32({V, C}), dweight = m.f32({V, C}),
               tokens = m.tokens({B, T}, V), rows = m.f32({B, T, C});
  ops.push_back({"embedding forward", {tokens, rows}, {out}, [=] { embedding_forward(out, weight, tokens, s); }});
  ops.push_back(
      {"embedding backward", {tokens, out, rows}, {rows}, [=] { embedding_backward(dweight, out, tokens, s); }});
  const Shape flat{int64_t{8} << 20};
  const Tensor params = m.f32(flat), moment = m.f32(flat), square = m.f32(flat), grads = m.f32(flat),
               numbers = m.ones(4);
  ops.push_back({"adamw, 8 Mi parameters", {params, moment, square, grads}, {params, moment, square}, [=] {
                   const AdamwRow row{0, flat[0], 1e-6, 0.1};
                   adamw_update(params, moment, square, {}, grads, numbers, {row}, {0.9, 0.999, 1e-8}, s);
                 }});
}

// Of layer `layer`, with all L layers reading all below them: forward the last one reads, backward the first is read.
void add_route(Ops& ops, Tensors& m) {
  const Stream s = m.stream();
  const int64_t B = m.z.B, T = m.z.T, K = m.z.K, D = m.z.D, L = m.z.L;
  const Tensor slab = m.activation({L, B * T, K, D}), out = m.activation({B, T, K, D}), dout = m.activation(out.shape);
  std::vector<Router> routers;
  for (int64_t l = 0; l < L; ++l) {
    Router r{m.f32({K, (l + 1) * K}), {}, m.f32({K, (l + 1) * K})};
    for (int64_t below = 0; below <= l; ++below) r.sources.push_back(static_cast<int>(below));
    routers.push_back(r);
  }
  ops.push_back({"route forward, all sources", {slab}, {out}, [=] { route_forward(out, slab, routers[L - 1], s); }});
  ops.push_back({"route backward, all readers",
                 {slab, dout},
                 {out, out},  // dslice, and dout's place in the slab
                 [=] { route_backward(out, slab, dout, routers, 0, s); }});
}

void add_depth_mix(Ops& ops, Tensors& m) {
  const Stream s = m.stream();
  const int64_t B = m.z.B, T = m.z.T, C = m.z.C, L = m.z.L;
  const std::vector<Tensor> sources = m.activations(L, {B, T, C});
  const Tensor out = m.activation({B, T, C}), weights = m.f32({L}), dweights = m.f32({L});
  std::vector<DepthReader> readers;
  for (int64_t reader = 1; reader < L; ++reader)
    readers.push_back({sources[static_cast<size_t>(reader)], weights, dweights, reader, {}});
  ops.push_back(
      {"depth_mix forward, all sources", sources, {out}, [=] { depth_mix_forward(out, sources, weights, s); }});
  ops.push_back({"depth_mix backward, all readers", sources, {out}, [=] {
                   depth_mix_backward({out, false}, sources[0], readers, s);
                 }});
}

void add_value_mixes(Ops& ops, Tensors& m) {
  const Stream s = m.stream();
  const int64_t B = m.z.B, T = m.z.T, K = m.z.K, D = m.z.D;
  const Tensor v = m.activation({B, T, K, D}), v1 = m.activation(v.shape), out = m.activation(v.shape),
               dv = m.activation(v.shape), dv1 = m.activation(v.shape), alpha = m.f32({B, T, K}),
               dalpha = m.f32({B, T, K}), numbers = m.f32({2}), dnumbers = m.f32({2});
  ops.push_back({"value_mix forward", {v, v1}, {out}, [=] {
                   value_mix_forward(out, v, v1, {numbers, 0}, {numbers, 1}, s);
                 }});
  ops.push_back({"value_mix backward", {out, v, v1}, {dv, dv1}, [=] {
                   value_mix_backward({dv, false}, {dv1, false}, {dnumbers, 0}, {dnumbers, 1}, out, v, v1, {numbers, 0},
                                      {numbers, 1}, s);
                 }});
  ops.push_back({"gated_mix forward", {v, v1, alpha}, {out}, [=] { gated_mix_forward(out, v, v1, alpha, s); }});
  ops.push_back({"gated_mix backward", {out, v1, alpha}, {dv1, dalpha}, [=] {
                   gated_mix_backward({dv1, false}, {dalpha, false}, out, v1, alpha, s);
                 }});
}

HyperWeights<Tensor> hyper_weights(Tensors& m, int64_t E) {
  const int64_t C = m.z.C;
  return {m.f32({E, E + 1}), m.f32({E}), m.f32({C, E + 1}), m.f32({C}), m.f32({1}), m.f32({1}), m.f32({C}), {}};
}

void add_hyper(Ops& ops, Tensors& m) {
  const Stream s = m.stream();
  const int64_t B = m.z.B, T = m.z.T, C = m.z.C;
  constexpr int64_t E = 4;
  const Tensor streams = m.activation({B, T, E, C}), next = m.activation(streams.shape), y = m.activation({B, T, C}),
               dy = m.activation(y.shape), coef = m.f32({B, T, E, E + 2}), dcoef = m.f32(coef.shape),
               stats = m.f32({B, T, E, E + 4});
  const HyperWeights<Tensor> w = hyper_weights(m, E), d = hyper_weights(m, E);
  const HyperNorm norm = HyperNorm::rmsnorm;
  ops.push_back({"hyper read forward, 4 streams", {streams}, {y, coef, stats}, [=] {
                   hyper_read_forward(y, coef, stats, streams, w, norm, 1e-5, s);
                 }});
  ops.push_back({"hyper read backward", {y, dcoef, streams, coef, stats}, {next}, [=] {
                   hyper_read_backward({next, false}, d, y, dcoef, streams, coef, stats, w, norm, s);
                 }});
  ops.push_back({"hyper write forward", {streams, coef, y}, {next}, [=] {
                   hyper_write_forward({next, {}, {}}, streams, coef, y, s);
                 }});
  const Tensor dstreams = m.activation(streams.shape);
  ops.push_back(
      {"hyper write backward", {next, streams, coef, y}, {dstreams, dcoef, dy}, [=] {
         hyper_write_backward({dstreams, false}, {dcoef, false}, {dy, false}, {{}, next, {}}, streams, coef, y, s);
       }});
}

void add_multiway_mix(Ops& ops, Tensors& m) {
  const Stream s = m.stream();
  const int64_t B = m.z.B, T = m.z.T, C = m.z.C;
  constexpr int64_t W = 4, S = 7;
  auto plain = [&] {
    return MultiwayMix<Tensor>{m.activations(S, {B, T, C}), {}, {}, m.activation({B, T, W * S}), m.f32({W, S}), {}};
  };
  const MultiwayMix<Tensor> mix = plain(), d = plain();
  MultiwayMix<Grad, Tensor> gradient{{}, {}, {}, {d.weight, false}, d.base, {}};
  for (const Tensor& source : d.sources) gradient.sources.emplace_back(source, false);
  const std::vector<Tensor> outs = m.activations(W, {B, T, C});
  ops.push_back({"multiway_mix forward, 4 ways of 7 sources", mix.sources + std::vector{mix.weight}, outs,
                 [=] { multiway_mix_forward(outs, {}, mix, 1e-6, s); }});
  ops.push_back({"multiway_mix backward", mix.sources + outs + std::vector{mix.weight},
                 d.sources + std::vector{d.weight}, [=] { multiway_mix_backward(gradient, outs, {}, mix, s); }});
}

// What was measured in one type.
struct Rates {
  std::vector<double> gigabytes, of_copy;
};

Rates measure(const Op& op, int64_t rounds, Device& device) {
  const bool gpu = device.stream().backend == Backend::cuda;
  Rates rates;
  for (int64_t round = 0; round < rounds; ++round) {
    const double seconds =
        gpu ? gpu_seconds_per_call(min_seconds, device, op.run) : seconds_per_call(min_seconds, op.run);
    rates.gigabytes.push_back(1e-9 * static_cast<double>(op.bytes()) / seconds);
    rates.of_copy.push_back((gpu ? copy_seconds(op.bytes(), device) : copy_seconds(op.bytes())) / seconds);
  }
  return rates;
}

using Rows = std::vector<std::vector<std::string>>;

// Adds to each op's row what was measured in one type.
void measure_family(Rows& rows, std::vector<double>& of_copy, const Ops& ops, bool in_bf16, int64_t rounds,
                    Device& device) {
  const bool gpu = device.stream().backend == Backend::cuda;
  rows.resize(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    std::vector<std::string>& row = rows[i];
    if (row.empty()) row.push_back(ops[i].name);
    row.resize(in_bf16 ? 4 : 1, "failed");
    const std::string cached = gpu && ops[i].bytes() < 2 * l2 ? "*" : "";
    row.push_back(format_number("%.1f", static_cast<double>(ops[i].bytes()) / (1 << 20)) + cached);
    attempt(ops[i].name, [&] {
      const Rates rates = measure(ops[i], rounds, device);
      row.push_back(format_number("%.1f", median(rates.gigabytes)));
      row.push_back(format_number("%.2f", median(rates.of_copy)));
      of_copy.push_back(median(rates.of_copy));
      return "";
    });
    row.resize(in_bf16 ? 7 : 4, "failed");
  }
}

// One family's tensors at a time.
constexpr std::array families = {add_norm_and_rope, add_elementwise, add_parameter_ops, add_route,
                                 add_depth_mix,     add_value_mixes, add_hyper,         add_multiway_mix};

}  // namespace

Ratios bench_ops(const BenchFlags& f) {
  const std::unique_ptr<Device> device = make_device(f.device);
  const bool gpu = device->stream().backend == Backend::cuda;
  const Sizes z = f.device == "emulator" ? tiny_sizes : gpu ? gpu_sizes : Sizes{};
  print_text(
      "\nops, ", device->describe(), ", ", z.B, " x ", z.T, " tokens, C=", z.C, "; medians of ", f.rounds,
      " rounds:\nGB/s of what must be read and written, and over a copy of as many bytes\n",
      gpu ? "*: less than twice the 60 MB of an H200's L2, so partly not from memory; so the copy beside it\n" : "");
  GrowingTable table("ops", {"", "fp32 MiB", "GB/s", "of copy", "bf16 MiB", "GB/s", "of copy"}, 42);
  std::array<std::vector<double>, 2> of_copy;
  for (const auto add_family : families) {
    Rows rows;
    for (const bool in_bf16 : {false, true}) {
      attempt("a family of ops", [&] {
        Tensors memory(z, in_bf16 ? Dtype::bf16 : Dtype::f32, *device);
        Ops ops;
        add_family(ops, memory);
        measure_family(rows, of_copy[in_bf16], ops, in_bf16, f.rounds, *device);
        return "";
      });
    }
    for (const std::vector<std::string>& row : rows) table.add(row);
  }
  Ratios ratios;
  for (const bool in_bf16 : {false, true})
    if (!of_copy[in_bf16].empty())
      ratios.push_back(
          {str("ops, ", in_bf16 ? "bf16" : "fp32", ": of a copy, geometric mean"), geometric_mean(of_copy[in_bf16])});
  return ratios;
}

}  // namespace crossply
