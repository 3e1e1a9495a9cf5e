// bench products: GFLOP/s of the matrix products by shape, as fractions of the peak and beside PyTorch's.
#include <omp.h>

#include <array>
#include <cstdlib>
#include <memory>

#include "cli/format.h"
#include "dev/bench.h"
#include "kernels/block/matmul.h"

namespace crossply {
namespace {

constexpr double min_seconds = 0.05;
constexpr std::array form_names = {"forward", "dinput", "dweight"};

struct Kind {
  const char* name;
  Dtype dtype;
  MatmulPrecision precision;
  const char* torch;        // what PyTorch's side calls its nearest
  double products_of_peak;  // on matrix units, for each one counted
};
constexpr std::array kinds = {Kind{"fp32", Dtype::f32, MatmulPrecision::f32, "fp32", 0},
                              Kind{"bf16x3", Dtype::f32, MatmulPrecision::bf16x3, "fp32", 3},
                              Kind{"bf16", Dtype::bf16, MatmulPrecision::f32, "bf16", 1}};

// What was measured of one form: in each round.
struct Rates {
  std::vector<double> rate, of_peak, of_torch;
};
using Measured = std::array<std::array<Rates, form_names.size()>, kinds.size()>;

// One shape's operands in one type; the numbers do not matter, as long as they are not all equal.
class Operands {
 public:
  Operands(const ProductShape& s, Dtype dtype)
      : inp(make({s.rows, s.in}, dtype)),
        out(make({s.rows, s.out}, dtype)),
        dinp(make({s.rows, s.in}, dtype)),
        weight(make({s.out, s.in}, dtype)),
        dweight(make({s.out, s.in}, Dtype::f32)) {}
  void run(size_t form, Stream stream) const {
    if (form == 0) matmul_forward({out}, inp, {weight}, stream);
    if (form == 1) matmul_backward_input({dinp, false}, {out}, {weight}, stream);
    if (form == 2) matmul_backward_weight({dweight, true}, out, inp, stream);
  }

 private:
  Tensor make(Shape shape, Dtype dtype) {
    auto memory = std::make_unique<std::vector<float>>(static_cast<size_t>(shape.numel()));
    Tensor t{memory->data(), dtype, shape};
    for (int64_t i = 0; i < t.numel(); ++i) {
      const float value = 0.01f * static_cast<float>(i % 101 - 50);
      if (dtype == Dtype::f32) t.as<float>()[i] = value;
      else t.as<bf16>()[i] = value;
    }
    memory_.push_back(std::move(memory));
    return t;
  }
  std::vector<std::unique_ptr<std::vector<float>>> memory_;
  Tensor inp, out, dinp, weight, dweight;
};

// Seconds of PyTorch's product; 0 if there is none.
double torch_seconds(Process* torch, const char* dtype, size_t form, const ProductShape& s) {
  if (torch == nullptr) return 0;
  torch->ask(str(dtype, ' ', form_names[form], ' ', s.rows, ' ', s.in, ' ', s.out, ' ', min_seconds));
  return std::atof(torch->answer().value_or("0").c_str());
}

void measure_round(Measured& measured, const ProductShape& s, const std::vector<Operands>& operands, Process* torch) {
  const double vectors = multiply_add_peak(), tiles = matrix_unit_peak();
  std::array<std::array<double, form_names.size()>, kinds.size()> seconds{};
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    const Stream stream{Backend::cpu, kinds[kind].precision};
    const double peak = tiles > 0 && kinds[kind].products_of_peak > 0 ? tiles / kinds[kind].products_of_peak : vectors;
    for (size_t form = 0; form < form_names.size(); ++form) {
      Rates& rates = measured[kind][form];
      seconds[kind][form] = seconds_per_call(min_seconds, [&] { operands[kind].run(form, stream); });
      rates.rate.push_back(s.flops() / seconds[kind][form]);
      rates.of_peak.push_back(rates.rate.back() / peak);
    }
  }
  if (torch == nullptr) return;
  rest();
  for (size_t form = 0; form < form_names.size(); ++form) {
    const double fp32 = torch_seconds(torch, "fp32", form, s), bf16 = torch_seconds(torch, "bf16", form, s);
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      const double theirs = kinds[kind].torch == std::string("fp32") ? fp32 : bf16;
      if (theirs > 0) measured[kind][form].of_torch.push_back(theirs / seconds[kind][form]);
    }
  }
  rest();
}

std::string cell(const Rates& r) {
  const std::string own =
      format_number("%.0f", 1e-9 * median(r.rate)) + format_number(" %3.0f%%", 100 * median(r.of_peak));
  return r.of_torch.empty() ? own : own + format_number(" %.2fx", median(r.of_torch));
}

}  // namespace

Ratios bench_products(const BenchFlags& f) {
  const Torch pytorch(f);
  const std::unique_ptr<Process> torch = pytorch.start("bench_torch_products.py");
  print_text("\nmatrix products, ", omp_get_max_threads(), " threads; medians of ", f.rounds,
             " rounds: GFLOP/s, the fraction of the round's peak (bf16x3: of a third of the matrix units')",
             torch ? ", and over torch.mm" : "", "\n");
  GrowingTable table("products", {"rows x in x out", "", "forward", "dinput", "dweight"}, 18, 14);
  std::array<std::array<std::vector<double>, form_names.size()>, kinds.size()> of_peak, of_torch;
  for (const ProductShape& s :
       {ProductShape{2048, 768, 768}, ProductShape{2048, 768, 2048}, ProductShape{2048, 2048, 768},
        ProductShape{2048, 768, 3072}, ProductShape{2048, 3072, 768}, ProductShape{2048, 1024, 1024},
        ProductShape{2048, 1024, 4096}, ProductShape{2048, 512, 512}, ProductShape{2048, 192, 192},
        ProductShape{4096, 32, 32}, ProductShape{4096, 32, 128}, ProductShape{4096, 128, 32}}) {
    std::vector<Operands> operands;
    for (const Kind& kind : kinds) operands.emplace_back(s, kind.dtype);
    Measured measured;
    for (int64_t round = 0; round < f.rounds; ++round) measure_round(measured, s, operands, torch.get());
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      std::vector<std::string> row = {s.name(), kinds[kind].name};
      for (size_t form = 0; form < form_names.size(); ++form) {
        const Rates& rates = measured[kind][form];
        row.push_back(cell(rates));
        if (s.in != 768 && s.out != 768) continue;
        of_peak[kind][form].push_back(median(rates.of_peak));
        if (!rates.of_torch.empty()) of_torch[kind][form].push_back(median(rates.of_torch));
      }
      table.add(row);
    }
  }
  Ratios ratios;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    for (size_t form = 0; form < form_names.size(); ++form) {
      const std::string what = str("products of width 768, ", kinds[kind].name, ", ", form_names[form]);
      if (of_peak[kind][form].empty()) continue;
      ratios.push_back({what + ": of the peak", geometric_mean(of_peak[kind][form])});
      if (!of_torch[kind][form].empty())
        ratios.push_back({what + ": over PyTorch " + kinds[kind].torch, geometric_mean(of_torch[kind][form])});
    }
  }
  return ratios;
}

}  // namespace crossply
