// bench gpu: what a GPU does: products and attention by shape, training steps, what each architecture costs, the ops
// that move data, plain kernels beside the fast ones, and training steps beside PyTorch's. With another device than
// cuda everything is tiny: for trying.
// Not yet run on hardware: only with tiny sizes, on a CPU.
#include <algorithm>
#include <array>
#include <sstream>

#include "cli/format.h"
#include "cli/version.h"
#include "dev/bench.h"
#include "engine/rng.h"
#include "kernels/attention/attention.h"
#include "kernels/block/matmul.h"
#include "kernels/block/quantize.h"
#include "kernels/cuda/cuda.h"
#include "kernels/devices.h"
#include "train/settings/gpus.h"

namespace crossply {
namespace {

constexpr double min_seconds = 0.05;

bool tiny(const BenchFlags& f) { return f.device != "cuda"; }

// Normal numbers in a device's memory, a million of them over and over: rows differ, and the bits of neighbours, which
// is what a GPU's power, and with it its clock, depends on.
class Operands {
 public:
  explicit Operands(Device& device) : tensors_(device) {}
  Tensor make(Shape shape, Dtype dtype = Dtype::bf16) {
    const size_t first = static_cast<size_t>(++made_) * 7919;  // or all tensors would be the same
    const std::vector<float>& numbers = normal();
    return tensors_.make(shape, dtype,
                         [&](int64_t i) { return numbers[(first + static_cast<size_t>(i)) % numbers.size()]; });
  }

 private:
  static const std::vector<float>& normal() {
    static const std::vector<float> numbers = [] {
      std::vector<float> out(1'000'003);  // a prime: no width divides it
      for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(random_normal(1, 0, i));
      return out;
    }();
    return numbers;
  }
  DeviceTensors tensors_;
  int64_t made_ = 0;
};

// Adds the row that `measure` returns; where it fails, one that says so.
void add_row(GrowingTable& table, const std::string& what, const std::string& name,
             const std::function<std::vector<std::string>()>& measure) {
  const std::string said = attempt(what + name, [&] { return table.add(measure()), ""; });
  if (!said.empty()) table.add({name, said});
}

// What a script of dev/ measures of PyTorch on a GPU; none where there is none.
std::unique_ptr<Process> torch_on_gpu(const BenchFlags& f, const std::string& script) {
  return Torch(f).start(script, tiny(f) ? std::vector<std::string>{} : std::vector<std::string>{"--gpu"});
}

std::string teraflops(double flops, double seconds) { return format_number("%.3g", 1e-12 * flops / seconds); }

std::string times(double theirs, double ours) { return theirs > 0 ? format_number("%.2fx", theirs / ours) : ""; }

Ratios bench_gpu_machine(const BenchFlags& f) {
  const std::unique_ptr<Device> device = make_device(f.device);
  const double peak = peak_flops(device->describe(), Dtype::bf16);
  const auto copy = [&](size_t bytes) {
    return attempt("a copy", [&] {
      return format_number("%.0f", 1e-9 * static_cast<double>(bytes) / copy_seconds(bytes, *device));
    });
  };
  const size_t far = tiny(f) ? size_t{1} << 20 : size_t{4} << 30, near = far / 256;
  print_table("machine",
              {{"crossply", commit()},
               {"GPU", device->describe()},
               {"copy of " + format_bytes(static_cast<double>(far / 2)) + ", GB/s read and written", copy(far)},
               {"copy of " + format_bytes(static_cast<double>(near / 2)) + ", within the L2", copy(near)},
               {"dense bf16 peak by the data sheet, TFLOP/s",
                peak > 0 ? format_number("%.0f", 1e-12 * peak) : "not known: no MFU is printed"}});
  return {};
}

// So many sequences that there are 16,384 tokens, and 2,048 columns of heads. Two operations a multiply-add, half of
// the square, and 2.5 times as many backward, whatever the kernels really do.
std::vector<std::string> attention_row(int64_t D, int64_t T, Device& device, Process* torch, bool small) {
  const int64_t B = small ? 1 : 16384 / T, H = small ? 2 : 2048 / D;
  Operands m(device);
  const Shape shape{B, T, H, D};
  const Tensor q = m.make(shape), k = m.make(shape), v = m.make(shape), out = m.make(shape), dout = m.make(shape),
               dq = m.make(shape), dk = m.make(shape), dv = m.make(shape), lse = m.make({B, H, T}, Dtype::f32);
  const double scale = 1 / std::sqrt(static_cast<double>(D));
  const double flops = 2.0 * static_cast<double>(B * H * T) * static_cast<double>(T * D);
  const Stream s = device.stream();
  const double forward =
      gpu_seconds_per_call(min_seconds, device, [&] { attention_forward(out, lse, q, k, v, scale, {}, s); });
  const double backward = gpu_seconds_per_call(min_seconds, device, [&] {
    attention_backward({dq, false}, {dk, false}, {dv, false}, dout, out, q, k, v, lse, scale, {}, s);
  });
  std::vector<std::string> row = {str(D, " x ", T), teraflops(flops, forward), teraflops(2.5 * flops, backward)};
  if (torch == nullptr) return row;
  torch->ask(str(B, ' ', T, ' ', H, ' ', H, ' ', D, ' ', min_seconds));
  std::istringstream answer(torch->answer().value_or("0 0 failed"));
  double their_forward = 0, their_backward = 0;
  std::string kernel;
  answer >> their_forward >> their_backward >> kernel;
  row.insert(row.end(), {times(their_forward, forward), times(their_backward, backward), kernel});
  return row;
}

Ratios bench_gpu_attention(const BenchFlags& f) {
  const std::unique_ptr<Device> device = make_device(f.device);
  const auto torch = torch_on_gpu(f, "bench_torch_attention.py");
  print_text("\ncausal attention in bf16, ", tiny(f) ? "one sequence, two heads" : "16,384 tokens, 2,048 columns",
             ": TFLOP/s, the masked half not counted, backward 2.5 times the forward",
             torch ? ";\nspeed over PyTorch's cuDNN or flash, the faster of them in forward and backward together" : "",
             "\n");
  std::vector<std::string> titles = {"D x T", "forward", "backward"};
  if (torch) titles.insert(titles.end(), {"over PyTorch", "backward", "its kernel"});
  GrowingTable table("attention", titles, 12);
  for (const int64_t D : tiny(f) ? std::vector<int64_t>{64} : std::vector<int64_t>{64, 96, 128})
    for (const int64_t T : tiny(f) ? std::vector<int64_t>{64} : std::vector<int64_t>{512, 1024, 2048, 4096, 8192})
      add_row(table, "attention ", str(D, " x ", T),
              [&] { return attention_row(D, T, *device, torch.get(), tiny(f)); });
  return {};
}

std::vector<ProductShape> product_shapes(const BenchFlags& f) {
  if (tiny(f)) return {{32, 64, 128}};
  return {{32768, 768, 768},   {32768, 768, 2048},  {32768, 2048, 768},  {16384, 2048, 2048},
          {16384, 2048, 8192}, {16384, 8192, 2048}, {16384, 2048, 50304}};
}

// The same products of eight bits, and what rounds their factors: GB/s of an output's gradient, read once and written
// as it lies and transposed.
void bench_eight_bits(const BenchFlags& f, Device& device) {
  print_text("\nthe same in eight bits (--matmul fp8): TFLOP/s, and GB/s of rounding\n");
  GrowingTable table("products of eight bits", {"rows x in x out", "forward", "dinput", "dweight", "rounding"}, 20, 12);
  for (const ProductShape& z : product_shapes(f))
    add_row(table, "products of eight bits ", z.name(), [&] {
      Operands m(device);
      const Stream s = device.stream();
      const Tensor one = m.make({1}, Dtype::f32), amax = m.make({1}, Dtype::f32);
      const float unit = 1;
      device.copy_in(one.data, &unit, sizeof unit);
      const auto rounded = [&](Shape shape, Dtype dtype) { return Quantized{m.make(shape, dtype), one}; };
      const Quantized x = rounded({z.rows, z.in}, Dtype::e4m3), w = rounded({z.out, z.in}, Dtype::e4m3),
                      wt = rounded({z.in, z.out}, Dtype::e4m3), dy = rounded({z.rows, z.out}, Dtype::e5m2),
                      xt = rounded({z.in, z.rows}, Dtype::e4m3), dyt = rounded({z.out, z.rows}, Dtype::e5m2);
      const Tensor inp = m.make({z.rows, z.in}), out = m.make({z.rows, z.out}), dw = m.make({z.out, z.in}, Dtype::f32);
      const auto seconds = [&](const std::function<void()>& work) {
        return gpu_seconds_per_call(min_seconds, device, work);
      };
      const auto rate = [&](const Grad& to, const Quantized& a, const Quantized& b, bool fast) {
        return teraflops(z.flops(), seconds([&] { matmul_quantized(to, a, b, fast, s); }));
      };
      const double rounding = seconds([&] { quantize(dy.numbers, dyt.numbers, amax, out, one, s); });
      return std::vector{z.name(), rate({out, false}, x, w, true), rate({inp, false}, dy, wt, false),
                         rate({dw, true}, dyt, xt, false),
                         format_number("%.0f", 4e-9 * static_cast<double>(out.numel()) / rounding)};
    });
}

Ratios bench_gpu_products(const BenchFlags& f) {
  const std::unique_ptr<Device> device = make_device(f.device);
  const auto torch = torch_on_gpu(f, "bench_torch_products.py");
  print_text("\nproducts of random normal numbers in bf16, dweight added in fp32: TFLOP/s",
             torch ? ", and speed over torch.mm, whose dweight is bf16 and not added" : "", "\n");
  GrowingTable table("products", {"rows x in x out", "forward", "dinput", "dweight"}, 20, 12);
  for (const ProductShape& z : product_shapes(f))
    add_row(table, "products ", z.name(), [&] {
      Operands m(*device);
      const Tensor inp = m.make({z.rows, z.in}), out = m.make({z.rows, z.out}), weight = m.make({z.out, z.in}),
                   dweight = m.make(weight.shape, Dtype::f32);
      const Stream s = device->stream();
      const auto rate = [&](const char* form, const std::function<void()>& work) {
        const double seconds = gpu_seconds_per_call(min_seconds, *device, work);
        if (!torch) return teraflops(z.flops(), seconds);
        torch->ask(str("bf16 ", form, ' ', z.rows, ' ', z.in, ' ', z.out, ' ', min_seconds));
        return teraflops(z.flops(), seconds) + " " + times(std::atof(torch->answer().value_or("0").c_str()), seconds);
      };
      const auto dinput = [&] { matmul_backward_input({inp, false}, {out}, {weight}, s); };
      const auto dw = [&] { matmul_backward_weight({dweight, true}, out, inp, s); };
      return std::vector{z.name(), rate("forward", [&] { matmul_forward({out}, inp, {weight}, s); }),
                         rate("dinput", dinput), rate("dweight", dw)};
    });
  if (device->stream().backend == Backend::cuda) bench_eight_bits(f, *device);
  return {};
}

Ratios bench_gpu_steps(const BenchFlags& f, bool torch) {
  BenchFlags flags = f;
  flags.models = tiny(f) ? "tiny" : "124m,1b", flags.no_torch = !torch, flags.need_torch = torch;
  return bench_steps(flags);
}

Ratios bench_own_steps(const BenchFlags& f) { return bench_gpu_steps(f, false); }

Ratios bench_beside_torch(const BenchFlags& f) { return bench_gpu_steps(f, true); }

// 6 of the 16 layers of the model of a billion parameters, so that many architectures fit into the memory side by side.
Ratios bench_gpu_architectures(const BenchFlags& f) {
  ArchitectureFlags flags;
  flags.device = f.device, flags.dtype = "bf16", flags.rounds = 4 * f.rounds;  // of one step each
  flags.size = {2048, 6, 32, 8, 8192, 50304, 2048, 4};
  if (tiny(f)) flags.size = {64, 2, 2, 1, 128, 99, 32, 2};
  bench_architectures(flags);
  flags.archs = "lime";  // dearer without grouped heads: K^2 mixtures for every source
  flags.size.kv_heads = flags.size.heads;
  bench_architectures(flags);
  return {};
}

// What is worth most comes first. seconds: about what it takes on an H200 with 16 cores.
struct Part {
  const char* name;
  double seconds;
  Ratios (*run)(const BenchFlags&);
};
constexpr std::array parts = {Part{"machine", 5, bench_gpu_machine},
                              Part{"products", 25, bench_gpu_products},
                              Part{"attention", 35, bench_gpu_attention},
                              Part{"steps", 45, bench_own_steps},
                              Part{"architectures", 60, bench_gpu_architectures},
                              Part{"ops", 40, bench_ops},
                              Part{"plain", 40, bench_plain},
                              Part{"torch", 250, bench_beside_torch}};

std::vector<Part> parts_of(const std::string& only) {
  if (only.empty()) return {parts.begin(), parts.end()};
  std::string names;
  for (const Part& part : parts) names += str(names.empty() ? "" : ", ", part.name);
  std::vector<std::string> wanted;
  std::istringstream list(only);
  for (std::string name; std::getline(list, name, ',');) {
    if (std::none_of(parts.begin(), parts.end(), [&](const Part& part) { return part.name == name; }))
      fail(Exit::usage, "--only: '", name, "' is none of ", names);
    wanted.push_back(name);
  }
  std::vector<Part> out;
  for (const Part& part : parts)
    if (std::find(wanted.begin(), wanted.end(), part.name) != wanted.end()) out.push_back(part);
  return out;
}

double max_seconds(const Part& part) { return 60 + 3 * part.seconds; }

}  // namespace

double gpu_seconds_per_call(double least, Device& gpu, const std::function<void()>& work) {
  const auto seconds = [&](int64_t calls) {
    const double start = now();
    for (int64_t i = 0; i < calls; ++i) work();
    gpu.wait();
    return now() - start;
  };
  seconds(1);  // finds plans and scratch memory
  int64_t together = 1;
  for (double warm = 0, taken; warm < least; warm += taken)
    if ((taken = seconds(together)) < least / 4) together *= 2;
  int64_t calls = 0;
  double taken = 0;
  for (; taken < least; calls += together) taken += seconds(together);
  return taken / static_cast<double>(calls);
}

double copy_seconds(size_t bytes, Device& gpu) {
  if (gpu.stream().backend != Backend::cuda) return copy_seconds(bytes);
  const Arena from(gpu, "a copy's source", bytes / 2), to(gpu, "a copy's target", bytes / 2);
  return gpu_seconds_per_call(min_seconds, gpu, [&] { copy_on_device(to.data(), from.data(), bytes / 2); });
}

void bench_gpu(const BenchFlags& f) {
  std::vector<Part> chosen = parts_of(f.only);
  make_device(f.device);  // where there is none, one error is enough
  const double start = now();
  double estimated = 0;
  if (f.no_torch) std::erase_if(chosen, [](const Part& part) { return part.run == bench_beside_torch; });
  for (const Part& part : chosen) estimated += part.seconds;
  print_text(chosen.size(), " parts, about ", std::lrint(estimated), " s on an H200 with 16 cores\n");
  for (const Part& part : chosen) {
    print_text("\n--- ", part.name, "\n");
    const double begin = now();
    std::vector<std::string> command = {f.program, "part", part.name, "--device", f.device};
    command.insert(command.end(), {"--rounds", std::to_string(f.rounds)});
    if (!f.json.empty()) command.insert(command.end(), {"--json", f.json});
    if (f.no_torch) command.push_back("--no-torch");
    Process process(command, {});
    while (const std::optional<std::string> line = process.answer()) print_text(*line, "\n");
    const int code = process.end();
    const double taken = now() - begin;
    if (code < 0)
      note_failure(part.name, str("ended by signal ", -code, taken >= max_seconds(part) ? ", after its time" : ""),
                   Exit::device, "parts");
    else if (code > 0) note_failure(part.name, str("ended with exit code ", code), static_cast<Exit>(code), "parts");
    print_text("--- ", part.name, ": ", std::lrint(taken), " s, about ", std::lrint(part.seconds), " expected; ",
               std::lrint(now() - start), " s in all\n");
  }
}

void bench_gpu_part(const std::string& name, const BenchFlags& f) {
  const Part part = parts_of(name).front();
  end_with_input(max_seconds(part));
  attempt(name, [&] { return print("ratios of " + name, part.run(f)), ""; });
}

}  // namespace crossply
