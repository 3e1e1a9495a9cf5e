// bench: the machine's peaks, the matrix products as fractions of them, each op against a copy of as many bytes, and
// whole training steps, beside PyTorch's; then the ratios. With a subcommand one part of that.
// bench architectures: what a training step of each costs, relative to plain LLaMA.
#include "dev/bench.h"

#include <CLI/CLI.hpp>

#include "cli/format.h"
#include "cli/program.h"

using namespace crossply;

namespace {

void add_device(CLI::App& app, std::string& device) {
  add_choice(app, "--device", device, {"cpu", "cuda", "emulator"}, "cpu, cuda, or emulator, where it is built in");
}

void add_flags(CLI::App& app, BenchFlags& f, bool models, bool torch) {
  if (models)
    add_text(app, "--models", f.models, "LIST",
             "sizes of the training steps: i, ii, iii, 124m, 1b, tiny; gpt2-64, gpt2-256");
  add_integer(app, "--rounds", f.rounds, 1, max_size, "how often each is measured");
  if (torch) app.add_flag("--no-torch", f.no_torch, "without PyTorch");
  add_text(app, "--json", f.json, "FILE", "where to write each table, too, when it is known");
}

void add_flags(CLI::App& app, ArchitectureFlags& f) {
  add_text(app, "--arch", f.archs, "LIST", "besides llama: " + arch_list_help());
  add_choice(app, "--dtype", f.dtype, {"fp32", "bf16"}, "fp32 or bf16");
  add_device(app, f.device);
  add_flags(app, f.size);
  add_integer(app, "--rounds", f.rounds, 1, max_size, "steps of every model, besides a first one that does not count");
  add_text(app, "--json", f.json, "FILE", "where to write the table, too");
}

void add_flags(CLI::App& app, ServeFlags& f) {
  app.add_option("--dtype", f.dtype);
  app.add_option("--matmul", f.matmul);
  app.add_option("--device", f.device);
  app.add_flag("--gpt2", f.size.gpt2);
  add_flags(app, f.size);
}

// What the command line names.
struct Flags {
  BenchFlags bench, gpu;
  std::string part;
  ArchitectureFlags architectures;
  ServeFlags serve;
};

void add_commands(CLI::App& app, Flags& f) {
  app.require_subcommand(0, 1);
  add_flags(app, f.bench, true, true);
  CLI::App* products = app.add_subcommand("products", "the matrix products as fractions of the multiply-add peak");
  CLI::App* ops = app.add_subcommand("ops", "the other ops, against a copy of as many bytes");
  CLI::App* steps =
      app.add_subcommand("steps", "training steps of LLaMA or GPT-2, beside PyTorch's; with LLMC=DIR beside llm.c's");
  CLI::App* architectures =
      app.add_subcommand("architectures", "what a training step of each costs, relative to LLaMA");
  CLI::App* neighbours = app.add_subcommand("neighbours", "training steps while other programs are on the cores");
  CLI::App* gpu = app.add_subcommand("gpu", "what a GPU does, and all architectures on it, in about 8 minutes");
  CLI::App* part = app.add_subcommand("part")->group("");
  CLI::App* serve = app.add_subcommand("serve")->group("");
  for (CLI::App* command : {products, ops, steps}) add_flags(*command, f.bench, command == steps, command == steps);
  add_flags(*neighbours, f.bench, true, false);
  for (CLI::App* command : {ops, steps}) add_device(*command, f.bench.device);
  for (CLI::App* command : {gpu, part}) add_flags(*command, f.gpu, false, true), add_device(*command, f.gpu.device);
  add_text(
      *gpu, "--only", f.gpu.only, "PART[,PART]",
      "of machine, products, attention, steps, architectures, ops, plain (kernels), torch (the steps beside PyTorch)");
  part->add_option("name", f.part);
  for (CLI::App* command : {products, ops, steps, architectures, neighbours, gpu}) command->footer(exit_code_help());
  add_flags(*architectures, f.architectures);
  add_flags(*serve, f.serve);
}

// Each subcommand has its own flags; one in front of it would not reach all of them.
void refuse_in_front(const CLI::App& app, const std::string& command) {
  for (const CLI::Option* flag : app.get_options())
    if (flag->count() > 0)
      fail(Exit::usage, flag->get_name(), " has no effect in front of ", command, "; put it behind, if that has it");
}

void run(const Flags& f, const std::string& command) {
  if (command == "part") keep_tables_in(f.gpu.json, true);
  else keep_tables_in(command == "gpu" ? f.gpu.json : command == "architectures" ? f.architectures.json : f.bench.json);
  if (command == "serve") serve_steps(f.serve);
  if (command == "architectures") bench_architectures(f.architectures);
  if (command == "neighbours") bench_neighbours(f.bench);
  if (command == "gpu") bench_gpu(f.gpu);
  if (command == "part") bench_gpu_part(f.part, f.gpu);
  if (command.empty()) print_machine();
  Ratios ratios;
  const auto part = [&](const char* name, Ratios (*bench)(const BenchFlags&)) {
    if (!command.empty() && command != name) return;
    for (const Ratio& ratio : bench(f.bench)) ratios.push_back(ratio);
  };
  part("products", bench_products);
  part("ops", bench_ops);
  part("steps", bench_steps);
  print("ratios", ratios);
}

}  // namespace

void crossply::print(const std::string& name, const Ratios& ratios) {
  if (ratios.empty()) return;
  std::vector<std::vector<std::string>> table = {{name, ""}};
  for (const Ratio& ratio : ratios) table.push_back({ratio.what, format_number("%.3f", ratio.value)});
  print_text("\n");
  print_table(name, table);
}

int main(int argc, char** argv) {
  CLI::App app("Measures this machine and crossply on it.", "bench");
  Flags f;
  f.bench.program = f.gpu.program = argv[0];
  f.gpu.device = "cuda";
  return run_program(
      app, argc, argv, [&] { add_commands(app, f); },
      [&] {
        const auto commands = app.get_subcommands();
        if (!commands.empty()) refuse_in_front(app, commands[0]->get_name());
        run(f, commands.empty() ? "" : commands[0]->get_name());
        return exit_code();
      });
}
