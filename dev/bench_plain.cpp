// bench gpu --only plain: what the fast CUDA kernels gain over the plain ones of the same families (X_plain.cu).
// Not yet run on hardware: only with tiny sizes, on a CPU.
#include <array>
#include <cmath>

#include "cli/format.h"
#include "dev/bench.h"
#include "kernels/attention/attention.h"
#include "kernels/block/cross_entropy.h"
#include "kernels/block/rmsnorm.h"
#include "kernels/depth/depth_mix.h"
#include "kernels/depth/route.h"
#include "kernels/devices.h"

namespace crossply {
namespace {

constexpr double min_seconds = 0.05;

// Of a model of a billion parameters. Only some rows are scored: the plain products of the loss take a second for
// these.
struct Sizes {
  int64_t B, T, C, H, K, D, L, V, scored;
};
constexpr Sizes gpu_sizes{4, 2048, 2048, 32, 8, 64, 16, 50304, 1024}, tiny_sizes{1, 32, 64, 2, 1, 32, 3, 99, 16};

// The same work by either.
struct Op {
  std::string name;
  std::function<void()> plain, fast;
};
using Ops = std::vector<Op>;

class Tensors {
 public:
  Tensors(const Sizes& sizes, Dtype real, Device& device) : z(sizes), real_(real), memory_(device) {}
  const Sizes z;
  const Stream stream{Backend::cuda};
  Tensor activation(Shape shape) { return make(shape, real_); }
  Tensor f32(Shape shape) { return make(shape, Dtype::f32); }
  Tensor tokens(Shape shape) {
    return memory_.fill<int32_t>(shape, [V = z.V](int64_t i) { return i * 37 % V; });
  }

 private:
  Tensor make(Shape shape, Dtype dtype) {
    return memory_.make(shape, dtype, [](int64_t i) { return 0.01f * static_cast<float>(i * 37 % 101 - 50); });
  }
  Dtype real_;
  DeviceTensors memory_;
};

void add_rmsnorm(Ops& ops, Tensors& m) {
  const int64_t C = m.z.C;
  const Tensor x = m.activation({m.z.B, m.z.T, C}), y = m.activation(x.shape), dx = m.activation(x.shape),
               rstd = m.f32({m.z.B, m.z.T}), w = m.f32({C}), dw = m.f32({C});
  const Grad to_x{dx, false};
  ops.push_back({"rmsnorm forward", [=] { rmsnorm_forward_plain(y, rstd, x, w, C, 1e-5); },
                 [=, s = m.stream] { rmsnorm_forward(y, rstd, x, w, 1e-5, s); }});
  ops.push_back({"rmsnorm backward", [=] { rmsnorm_backward_plain(to_x, dw, y, x, w, rstd, C); },
                 [=, s = m.stream] { rmsnorm_backward(to_x, dw, y, x, w, rstd, s); }});
}

void add_attention(Ops& ops, Tensors& m) {
  const AttentionSizes z{m.z.B, m.z.T, m.z.H, m.z.K, m.z.D, m.z.T, 0};
  const Shape queries{z.B, z.T, z.H, z.D}, keys{z.B, z.T, z.K, z.D};
  const Tensor q = m.activation(queries), out = m.activation(queries), dout = m.activation(queries),
               k = m.activation(keys), v = m.activation(keys), lse = m.f32({z.B, z.H, z.T});
  const Grad dq{m.activation(queries), false}, dk{m.activation(keys), false}, dv{m.activation(keys), false};
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(z.D)));
  ops.push_back({"attention forward", [=] { attention_forward_plain(out, lse, q, k, v, z, scale); },
                 [=, s = m.stream] { attention_forward(out, lse, q, k, v, scale, {}, s); }});
  ops.push_back({"attention backward", [=] { attention_backward_plain(dq, dk, dv, dout, out, q, k, v, lse, z, scale); },
                 [=, s = m.stream] { attention_backward(dq, dk, dv, dout, out, q, k, v, lse, scale, {}, s); }});
}

// The last layer reads all, and the first is read by all.
void add_route(Ops& ops, Tensors& m) {
  const int64_t N = m.z.B * m.z.T, K = m.z.K, D = m.z.D, L = m.z.L;
  const Tensor slab = m.activation({L, N, K, D}), out = m.activation({N, K, D}), dout = m.activation({N, K, D});
  std::vector<Router> routers;
  for (int64_t l = 0; l < L; ++l) {
    Router r{m.f32({K, (l + 1) * K}), {}, m.f32({K, (l + 1) * K})};
    for (int64_t below = 0; below <= l; ++below) r.sources.push_back(static_cast<int>(below));
    routers.push_back(r);
  }
  ops.push_back({"route forward, all sources", [=] { route_forward_plain(out, slab, routers.back(), N, K, D); },
                 [=, s = m.stream] { route_forward(out, slab, routers.back(), s); }});
  ops.push_back({"route backward, all readers", [=] { route_backward_plain(out, slab, dout, routers, 0, N, K, D); },
                 [=, s = m.stream] { route_backward(out, slab, dout, routers, 0, s); }});
}

void add_depth_mix(Ops& ops, Tensors& m) {
  std::vector<Tensor> sources;
  for (int64_t l = 0; l < m.z.L; ++l) sources.push_back(m.activation({m.z.B, m.z.T, m.z.C}));
  const Tensor out = m.activation(sources[0].shape), weights = m.f32({m.z.L}), dweights = m.f32({m.z.L});
  std::vector<DepthReader> readers;
  for (int64_t r = 1; r < m.z.L; ++r) readers.push_back({sources[static_cast<size_t>(r)], weights, dweights, r, {}});
  const Grad dinp{out, false};
  ops.push_back({"depth_mix forward, all sources", [=] { depth_mix_forward_plain(out, sources, weights); },
                 [=, s = m.stream] { depth_mix_forward(out, sources, weights, s); }});
  ops.push_back({"depth_mix backward, all readers", [=] { depth_mix_backward_plain(dinp, sources[0], readers); },
                 [=, s = m.stream] { depth_mix_backward(dinp, sources[0], readers, s); }});
}

void add_cross_entropy(Ops& ops, Tensors& m) {
  const int64_t rows = m.z.scored, C = m.z.C, V = m.z.V;
  const Tensor x = m.activation({rows, C}), dx = m.activation({rows, C}), w = m.activation({V, C}),
               losses = m.f32({rows}), targets = m.tokens({rows});
  const Grad dw{m.f32({V, C}), true};
  const double scale = 1 / static_cast<double>(rows);
  ops.push_back({"cross_entropy, both directions",
                 [=] { cross_entropy_forward_plain(losses, dx, dw, x, w, targets, scale, {}); },
                 [=, s = m.stream] { cross_entropy_forward(losses, dx, dw, x, w, targets, scale, s); }});
}

constexpr std::array families = {add_rmsnorm, add_attention, add_route, add_depth_mix, add_cross_entropy};

}  // namespace

Ratios bench_plain(const BenchFlags& f) {
  const std::unique_ptr<Device> device = make_device(f.device);
  if (device->stream().backend != Backend::cuda) {
    print_text("\nonly a GPU, and its emulator, have plain kernels beside the fast ones\n");
    return {};
  }
  const Sizes z = f.device == "cuda" ? gpu_sizes : tiny_sizes;
  print_text("\nplain kernels beside the fast ones, ", z.B, " x ", z.T, " tokens, C=", z.C, ", ", z.scored,
             " of them scored; milliseconds\n");
  GrowingTable table("plain kernels", {"", "type", "plain", "fast", "plain / fast"}, 32);
  for (const auto add_family : families)
    for (const Dtype real : {Dtype::f32, Dtype::bf16})
      attempt("a family of plain kernels", [&] {
        Tensors memory(z, real, *device);
        Ops ops;
        add_family(ops, memory);
        for (const Op& op : ops) {
          const double plain = gpu_seconds_per_call(min_seconds, *device, op.plain);
          const double fast = gpu_seconds_per_call(min_seconds, *device, op.fast);
          table.add({op.name, name_of(real), format_number("%.3g", 1e3 * plain), format_number("%.3g", 1e3 * fast),
                     format_number("%.1f", plain / fast)});
        }
        return "";
      });
  return {};
}

}  // namespace crossply
