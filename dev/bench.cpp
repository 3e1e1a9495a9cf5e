// bench: the machine's peaks, the matrix products as fractions of them, each op against a copy of as many bytes, and
// whole training steps, beside PyTorch's; then the ratios. With a subcommand one part of that.
// bench architectures: what a training step of each costs, relative to plain LLaMA.
#include "dev/bench.h"
#include "cli/format.h"

#include "cli/program.h"

using namespace crossply;

namespace {

void add_flags(CLI::App& app, BenchFlags& f, bool models) {
  if (models) add_text(app, "--models", f.models, "LIST", "sizes of the training steps");
  add_integer(app, "--rounds", f.rounds, 1, most_size, "how often each is measured");
  app.add_flag("--no-torch", f.no_torch, "without PyTorch");
  add_text(app, "--json", f.json, "FILE", "where to write the tables, too");
}

void add_flags(CLI::App& app, ArchitectureFlags& f) {
  add_text(app, "--arch", f.archs, "LIST", "besides llama: " + arch_list_help());
  add_choice(app, "--dtype", f.dtype, {"fp32", "bf16"}, "fp32 or bf16");
  add_text(app, "--device", f.device, "NAME", "cpu or cuda");
  add_flags(app, f.size);
  add_integer(app, "--rounds", f.rounds, 1, most_size, "steps of every model, besides a first one that does not count");
}

void add_flags(CLI::App& app, ServeFlags& f) {
  app.add_option("--dtype", f.dtype);
  app.add_option("--matmul", f.matmul);
  app.add_option("--device", f.device);
  add_flags(app, f.size);
}

void print(const Ratios& ratios) {
  if (ratios.empty()) return;
  std::vector<std::vector<std::string>> table = {{"ratios", ""}};
  for (const Ratio& ratio : ratios) table.push_back({ratio.what, format_number("%.3f", ratio.value)});
  std::printf("\n");
  print_table("ratios", table);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Measures this machine and crossply on it.", "bench");
  BenchFlags f;
  ArchitectureFlags architecture_flags;
  ServeFlags serve_flags;
  f.program = argv[0];
  CLI::App *products = nullptr, *ops = nullptr, *steps = nullptr, *architectures = nullptr, *gpu = nullptr,
           *serve = nullptr;
  auto flags = [&] {
    app.require_subcommand(0, 1);
    add_flags(app, f, true);
    products = app.add_subcommand("products", "the matrix products as fractions of the multiply-add peak");
    ops = app.add_subcommand("ops", "the other ops, against a copy of as many bytes");
    steps = app.add_subcommand("steps", "training steps of LLaMA, beside PyTorch's");
    architectures = app.add_subcommand("architectures", "what a training step of each costs, relative to LLaMA");
    gpu = app.add_subcommand("gpu", "what a GPU does, and all architectures on it");
    serve = app.add_subcommand("serve")->group("");
    for (CLI::App* part : {products, ops, steps, gpu}) add_flags(*part, f, part == steps);
    for (CLI::App* part : {products, ops, steps, architectures, gpu}) part->footer(exit_code_help());
    add_flags(*architectures, architecture_flags);
    add_flags(*serve, serve_flags);
  };
  return run_program(app, argc, argv, flags, [&] {
    if (architectures->parsed()) bench_architectures(architecture_flags);
    else if (serve->parsed()) serve_steps(serve_flags);
    else {
      const bool all = app.get_subcommands().empty();
      Ratios ratios;
      auto part = [&](const CLI::App* command, Ratios (*bench)(const BenchFlags&)) {
        if (!all && !command->parsed()) return;
        for (const Ratio& ratio : bench(f)) ratios.push_back(ratio);
      };
      if (all) print_machine();
      if (gpu->parsed()) f.device = "cuda";
      part(products, bench_products);
      part(ops, bench_ops);
      part(steps, bench_steps);
      if (gpu->parsed()) ratios = bench_gpu(f);
      print(ratios);
      if (!f.json.empty()) write_tables(f.json);
    }
    return Exit::done;
  });
}
