// bench gpu: what a GPU does: attention and products by shape, the ops that move data, training steps beside PyTorch's,
// and what each architecture costs.
#include <array>
#include <cstdio>
#include <memory>

#include "cli/format.h"
#include "dev/bench.h"
#include "engine/rng.h"
#include "kernels/attention/attention.h"
#include "kernels/block/matmul.h"
#include "kernels/cuda/cuda.h"
#include "kernels/devices.h"

namespace crossply {
namespace {

constexpr double least_seconds = 0.05;

// Normal numbers in bf16, or f32, in a device's memory: the same few thousand over and over.
class Operands {
 public:
  explicit Operands(Device& device) : tensors_(device) {
    for (size_t i = 0; i < normal_.size(); ++i) normal_[i] = static_cast<float>(random_normal(1, 0, i));
  }
  Tensor make(Shape shape, Dtype dtype = Dtype::bf16) {
    const auto number = [&](int64_t i) { return normal_[(next_ + static_cast<size_t>(i)) % normal_.size()]; };
    ++next_;  // or all would be the same
    return tensors_.make(shape, dtype, number);
  }

 private:
  DeviceTensors tensors_;
  std::array<float, 8192> normal_;
  size_t next_ = 0;
};

std::string teraflops(double flops, double seconds) { return format_number("%.0f", 1e-12 * flops / seconds); }

// So many sequences that there are 16,384 tokens, and 2,048 columns of heads. Two operations a multiply-add, half of
// the square, and 2.5 times as many backward, whatever the kernels really do.
void bench_attention(Device& device) {
  std::vector<std::vector<std::string>> table = {{"D x T", "forward", "backward"}};
  for (const int64_t D : {64, 96, 128}) {
    for (const int64_t T : {512, 1024, 2048, 4096, 8192}) {
      const int64_t B = 16384 / T, H = 2048 / D, K = H;
      Operands m(device);
      const Shape shape{B, T, H, D};
      const Tensor q = m.make(shape), k = m.make({B, T, K, D}), v = m.make(k.shape), out = m.make(shape),
                   dout = m.make(shape), dq = m.make(shape), dk = m.make(k.shape), dv = m.make(k.shape),
                   lse = m.make({B, H, T}, Dtype::f32);
      const double scale = 1 / std::sqrt(static_cast<double>(D));
      const double flops = 2.0 * static_cast<double>(B * H * T) * static_cast<double>(T * D);
      const Stream s = device.stream();
      const double forward =
          gpu_seconds_per_call(least_seconds, device, [&] { attention_forward(out, lse, q, k, v, scale, s); });
      const double backward = gpu_seconds_per_call(least_seconds, device, [&] {
        attention_backward({dq, false}, {dk, false}, {dv, false}, dout, out, q, k, v, lse, scale, s);
      });
      table.push_back({str(D, " x ", T), teraflops(flops, forward), teraflops(2.5 * flops, backward)});
    }
  }
  std::printf("\ncausal attention in bf16, 16,384 tokens, 2,048 columns: TFLOP/s\n");
  print_table("attention", table);
}

void bench_gpu_products(Device& device) {
  std::vector<std::vector<std::string>> table = {{"rows x in x out", "forward", "dinput", "dweight"}};
  for (const ProductShape& z :
       {ProductShape{32768, 768, 768}, ProductShape{32768, 768, 2048}, ProductShape{32768, 2048, 768},
        ProductShape{16384, 2048, 2048}, ProductShape{16384, 2048, 8192}, ProductShape{16384, 8192, 2048},
        ProductShape{16384, 2048, 50304}}) {
    Operands m(device);
    const Tensor inp = m.make({z.rows, z.in}), out = m.make({z.rows, z.out}), weight = m.make({z.out, z.in}),
                 dweight = m.make(weight.shape, Dtype::f32);
    const Stream s = device.stream();
    const auto rate = [&](const std::function<void()>& work) {
      return teraflops(z.flops(), gpu_seconds_per_call(least_seconds, device, work));
    };
    table.push_back({z.name(), rate([&] { matmul_forward({out}, inp, {weight}, s); }), rate([&] {
                       matmul_backward_input({inp, false}, {out}, {weight}, s);
                     }),
                     rate([&] { matmul_backward_weight(dweight, out, inp, s); })});
  }
  std::printf("\nproducts in bf16: TFLOP/s\n");
  print_table("products", table);
}

}  // namespace

double gpu_peak() {
  struct Peak {
    const char* name;
    double teraflops;
  };
  const std::string gpu = make_device("cuda")->describe();
  for (const Peak& known : {Peak{"A100", 312}, Peak{"H100 PCIe", 756}, Peak{"H100", 989}, Peak{"H200", 989},
                            Peak{"GH200", 989}, Peak{"B200", 2250}})
    if (gpu.find(known.name) != std::string::npos) return 1e12 * known.teraflops;
  return 0;
}

double gpu_seconds_per_call(double least, Device& gpu, const std::function<void()>& work) {
  constexpr int together = 10;  // so that waiting for the GPU does not count
  return seconds_per_call(least,
                          [&] {
                            for (int i = 0; i < together; ++i) work();
                            gpu.wait();
                          }) /
         together;
}

double copy_seconds(size_t bytes, Device& gpu) {
  const Arena from(gpu, "a copy's source", bytes / 2), to(gpu, "a copy's target", bytes / 2);
  return gpu_seconds_per_call(least_seconds, gpu, [&] { copy_on_device(to.data(), from.data(), bytes / 2); });
}

Ratios bench_gpu(const BenchFlags& f) {
  const std::unique_ptr<Device> device = make_device(f.device);
  constexpr size_t far = size_t{2} << 30;
  std::vector<std::vector<std::string>> machine = {
      {"GPU", device->describe()},
      {"copy of 1 GiB, GB/s read and written", format_number("%.0f", 1e-9 * far / copy_seconds(far, *device))},
      {"dense bf16 peak by the data sheet, TFLOP/s", format_number("%.0f", 1e-12 * gpu_peak())}};
  print_table("machine", machine);
  bench_attention(*device);
  bench_gpu_products(*device);
  BenchFlags flags = f;
  flags.models = "124m,1b";
  Ratios ratios = bench_ops(flags);
  for (const Ratio& ratio : bench_steps(flags)) ratios.push_back(ratio);
  ArchitectureFlags architectures;
  architectures.device = f.device, architectures.dtype = "bf16", architectures.rounds = f.rounds;
  architectures.size = {2048, 16, 32, 8, 8192, 50304, 2048, 4};
  bench_architectures(architectures);
  architectures.archs = "lime";  // dearer without grouped heads: K^2 mixtures for every source
  architectures.size.kv_heads = architectures.size.heads;
  bench_architectures(architectures);
  return ratios;
}

}  // namespace crossply
