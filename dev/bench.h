// What the parts of bench share: time, statistics, the machine's peaks, models by size, and competitors in processes
// of their own. Everything is measured in turns, so that a clock that drifts hits all alike.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/source.h"
#include "engine/check.h"
#include "engine/generate.h"
#include "train/settings/arch_list.h"
#include "train/settings/train_plan.h"

namespace crossply {

struct BenchFlags {
  std::string program;  // bench itself, as it was called
  std::string models = "i,ii,iii";
  int64_t rounds = 5;
  bool no_torch = false, need_torch = false;
  std::string device = "cpu", json;  // json: where to write the tables, too
  std::string only;                  // parts of bench gpu; "": all
};

// Prints all arguments, one behind the other.
template <class... Args>
void print_text(const Args&... args) {
  std::fputs(str(args...).c_str(), stdout);
  std::fflush(stdout);
}

// --- bench_tables.cpp: each table is written when it is known, so that it stays, whatever ends the program ---

// From here on every table also goes into that file, which is replaced each time. with_those_there: beside the tables
// that the file has; otherwise it begins anew. "": no file.
void keep_tables_in(const std::string& path, bool with_those_there = false);
void print_table(const std::string& name, const std::vector<std::vector<std::string>>& rows);

// A table for what takes long: each row is printed when it is known.
class GrowingTable {
 public:
  // first, least: how wide the first column and each of the others are at least.
  GrowingTable(std::string name, const std::vector<std::string>& titles, size_t first, size_t least = 8);
  void add(const std::vector<std::string>& row);

 private:
  std::string name_;
  std::vector<size_t> widths_;
  std::vector<std::vector<std::string>> rows_;
};

// Says it, and sees to it that exit_code() is the first failure's. All of a process are one table, "failures of `of`",
// or of the first.
void note_failure(const std::string& what, const std::string& why, Exit code, const std::string& of = "");
Exit exit_code();
// What `measure` returns; where it fails, "failed", and the failure is noted.
std::string attempt(const std::string& what, const std::function<std::string()>& measure);

// A line of the last table.
struct Ratio {
  std::string what;
  double value;
};
using Ratios = std::vector<Ratio>;

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of one call of body, repeated for at least `least` seconds after a call that does not count.
template <class F>
double seconds_per_call(double least, F&& body) {
  body();
  const double start = now();
  int64_t calls = 0;
  double taken = 0;
  for (; taken < least; taken = now() - start, ++calls) body();
  return taken / static_cast<double>(calls);
}

// Of the machine, or of its GPU: what a table says of it, and bytes of memory.
std::string name_of_machine(const std::string& device);
double memory_of_machine(const std::string& device);

// Tensors in a device's memory.
class DeviceTensors {
 public:
  explicit DeviceTensors(Device& device) : device_(device) {}
  // number(i): the i-th element, whoever asks.
  template <class T, class F>
  Tensor fill(Shape shape, F&& number) {
    memory_.emplace_back(device_, "a tensor", static_cast<size_t>(shape.numel()) * sizeof(T));
    generate<T>(device_, memory_.back().data(), shape.numel(), number);
    return Tensor{memory_.back().data(), DtypeOf<T>::value, shape};
  }

  // The same in f32, bf16, or eight bits.
  template <class F>
  Tensor make(Shape shape, Dtype dtype, F&& number) {
    return dtype == Dtype::bf16   ? fill<bf16>(shape, number)
           : dtype == Dtype::e4m3 ? fill<e4m3>(shape, number)
           : dtype == Dtype::e5m2 ? fill<e5m2>(shape, number)
                                  : fill<float>(shape, number);
  }

 private:
  Device& device_;
  std::deque<Arena> memory_;
};

// Of a product.
struct ProductShape {
  int64_t rows, in, out;
  double flops() const { return 2.0 * static_cast<double>(rows) * static_cast<double>(in) * static_cast<double>(out); }
  std::string name() const { return str(rows, " x ", in, " x ", out); }
};

double median(const std::vector<double>& values);
double geometric_mean(const std::vector<double>& values);

// --- bench_machine.cpp ---

// FLOP/s of independent multiply-adds in registers, all threads: of f32 vectors, and of bf16 matrix units (0: none).
double multiply_add_peak();
double matrix_unit_peak();
// Seconds for all threads, or the GPU, to copy bytes/2 bytes, so that `bytes` are read and written.
double copy_seconds(size_t bytes);
double copy_seconds(size_t bytes, Device& gpu);
// Seconds of one call of work that a GPU does after it returns: many in a row without a wait, each launched anew, after
// as much time that does not count, in which the clocks go up.
double gpu_seconds_per_call(double least, Device& gpu, const std::function<void()>& work);
void print_machine();

// --- bench_products.cpp, bench_ops.cpp, bench_steps.cpp: each prints its part ---

Ratios bench_products(const BenchFlags& flags);
Ratios bench_ops(const BenchFlags& flags);
Ratios bench_steps(const BenchFlags& flags);

// --- bench_plain.cpp: the plain CUDA kernels beside the fast ones ---

Ratios bench_plain(const BenchFlags& flags);

// --- bench_gpu.cpp: attention and products by shape, ops, training steps and architectures on a GPU ---

// Each part in a process of its own, so that one that fails, or hangs, does not end the others.
void bench_gpu(const BenchFlags& flags);
// One of them, in its process.
void bench_gpu_part(const std::string& name, const BenchFlags& flags);
void print(const std::string& name, const Ratios& ratios);

// --- bench_model.cpp ---

struct ModelSize {
  int64_t width = 256, layers = 12, heads = 8, kv_heads = 4, ffn = 768, vocab = 256, seq = 512, batch = 4;
  bool gpt2 = false;  // with biases, 1024 learned positions and a tied head, as OpenAI's; otherwise a LLaMA
  ArchChoice plain() const { return gpt2 ? ArchChoice{"gpt2", "gpt2", {}} : ArchChoice{"llama", "llama", {}}; }
};
// Options of a training run on random tokens; dtype, matmul: as of the trainers' flags.
TrainPlan train_options(const ArchChoice& choice, const ModelSize& size, const std::string& dtype,
                        const std::string& matmul, const std::string& device = "cpu");
// Sizes by the names of --models: bench_steps.cpp has them.
struct NamedSize {
  std::string name;
  ModelSize size;
};
std::vector<NamedSize> named_sizes(const std::string& list);
void add_flags(CLI::App& app, ModelSize& size);
// The same as arguments of a command line.
std::vector<std::string> arguments(const ModelSize& size);

class RandomTokens : public Source {
 public:
  explicit RandomTokens(const ModelSize& size) : T_(size.seq), vocabulary_(size.vocab) {}
  int64_t size() const override { return 1 << 20; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return vocabulary_; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override;
  uint64_t digest() const override { return 0; }  // nobody resumes on it

 private:
  int64_t T_, vocabulary_;
};

// Our side of a training step in a process of its own: prints `ready`, then for each number n that it reads runs n
// steps and prints their seconds and the peak resident memory in MiB, like bench_torch.py.
struct ServeFlags {
  ModelSize size;
  std::string dtype = "fp32", matmul = "fp32", device = "cpu";
};
void serve_steps(const ServeFlags& flags);

// --- bench_architectures.cpp ---

struct ArchitectureFlags {
  std::string archs = "all", dtype = "fp32", device = "cpu", json;
  ModelSize size;
  int64_t rounds = 7;
};
void bench_architectures(const ArchitectureFlags& flags);

// --- bench_neighbours.cpp ---

void bench_neighbours(const BenchFlags& flags);

// --- bench_process.cpp ---

// A program that answers on its standard output what it is asked on its standard input, line by line. It ends when its
// input does, so that nothing stays behind when bench is stopped.
class Process {
 public:
  // command: the program, looked up in PATH, and its arguments. environment: NAME=VALUE, or NAME for none; the rest is
  // inherited. A program that is not there is one that has ended.
  Process(const std::vector<std::string>& command, const std::vector<std::string>& environment, bool quiet = false);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void ask(const std::string& line);
  std::optional<std::string> answer();  // waits; nothing if the program has ended
  int end();                            // waits until it has ended: its exit code, or minus the signal that ended it

 private:
  int pid_ = -1, input_ = -1, output_ = -1;
  std::string received_;
};

// Of a script of dev/: BENCH_SCRIPTS is dev/ of the repository, or, in a package, its place relative to this program.
std::string script_path(const std::string& script);

// For a program that another one started by Process: it, and all that it starts, ends when its standard input does, and
// at the latest after so many seconds.
void end_with_input(double seconds);

// PyTorch, where Python has it: in python3, or what PYTHON names.
class Torch {
 public:
  // Says in a line which PyTorch there is, or that there is none.
  explicit Torch(const BenchFlags& flags);
  bool available() const { return !version_.empty(); }
  // A script of dev/ with the settings at which PyTorch is fastest.
  std::vector<std::string> command(const std::string& script, const std::vector<std::string>& flags) const;
  // The script as a process that answers; none if it does not.
  std::unique_ptr<Process> start(const std::string& script, const std::vector<std::string>& flags = {}) const;
  static const std::vector<std::string>& environment();

 private:
  std::string python_, version_;
};

// Between competitors: some OpenMP libraries let their threads spin for 0.2 s after the work is done.
void rest();

}  // namespace crossply
