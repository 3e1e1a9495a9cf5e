#include "train/run/plan.h"

#include <omp.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <numeric>

#include "cli/format.h"
#include "engine/io/printable.h"
#include "engine/memory.h"
#include "eval/answers.h"
#include "kernels/block/cross_entropy.h"
#include "kernels/block/distill.h"
#include "kernels/block/matmul.h"
#include "kernels/devices.h"
#include "train/run/inputs.h"
#include "train/run/planned_run.h"
#include "train/run/ranks.h"
#include "train/step/trainer.h"

namespace crossply {
namespace {

// Bytes that this process has resident now: the program, its libraries, generated data, recorded tapes.
double resident_memory() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  if (!(statm >> size >> resident)) return peak_memory();
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// The emulator has neither a library nor a driver.
bool is_emulated(const TrainPlan& plan) { return plan.device == "emulator"; }

// Of the kernels' scratch what weighs: logits, the blocks that products pack, a head's rows in attention, and the
// squares of Newton-Schulz.
double scratch_memory(const TrainPlan& plan, const Layout& layout, const ParameterTable& params) {
  const Config& c = plan.config;
  const int64_t T = plan.data.seq_len, threads = omp_get_max_threads();
  const int64_t widest = std::max({c.hidden_size, c.intermediate_size, c.vocab_size});
  const auto bytes = [](int64_t floats) { return 4.0 * static_cast<double>(floats); };
  const int64_t rows = layout.sequences * T, V = c.vocab_size, C = c.hidden_size;
  const double logits = static_cast<double>(
      plan.teacher.empty() ? cross_entropy_scratch(rows, V, C, storage_type(plan))
                           : distill_scratch(rows, V, C, plan.teacher_config->hidden_size, storage_type(plan)));
  const int64_t left_operand = widest > 384 ? 384 : 0;  // smaller ones are read where they are
  const double packed = bytes(std::min<int64_t>(256, widest) * (std::min<int64_t>(1024, widest) + left_operand));
  const double attention = bytes(4 * T * c.head_dim);
  const double replicas = static_cast<double>(std::min(threads, layout.replicas));
  std::vector<Shape> matrices;
  for (const Parameter* row : muon_matrices(params)) matrices.push_back(row->shape);
  const auto squares = static_cast<double>(newton_schulz_scratch(matrices, storage_type(plan), threads));
  return replicas * logits + squares + static_cast<double>(threads) * (packed + attention);
}

// Of Newton-Schulz, with as many matrices of each shape as a rank may own.
ScratchBytes muon_scratch_of_gpu(const TrainPlan& plan, const PlannedRun& planned) {
  std::vector<Shape> own;
  for (const Parameter* row : own_muon_matrices(planned.params, planned.buckets.rank(), planned.buckets.size()))
    own.push_back(row->shape);
  return own.empty() ? ScratchBytes{} : newton_schulz_scratch_cuda(own, storage_type(plan));
}

// The same on a GPU: what the nodes of the training tape say, and what a product needs beside its operands.
double gpu_scratch(const TrainPlan& plan, const PlannedRun& planned) {
  ScratchBytes most = muon_scratch_of_gpu(plan, planned);
  for (const auto& node : planned.tape.nodes()) {
    const ScratchBytes bytes = node->scratch();
    for (size_t slot = 0; slot < most.size(); ++slot) most[slot] = std::max(most[slot], bytes[slot]);
  }
  return static_cast<double>(std::accumulate(most.begin(), most.end(), is_emulated(plan) ? 0 : matmul_workspace));
}

// The cache and the activations of answering a task's prompts, as an evaluation does.
double answering_memory(const TrainPlan& plan, ParameterTable& params) {
  const bool task = plan.data.spec.starts_with("arith:") || plan.data.spec.starts_with("prosqa");
  if (!task || plan.answer_samples == 0) return 0;
  const int64_t rows = std::min(plan.answer_samples, answer_rows(plan));
  Tape tape(Dtype::f32, answer_length(plan.config, plan.data.seq_len));
  record_model(tape, params, plan.config, rows, 1);
  tape.plan(PlanMode::reuse);
  return static_cast<double>(tape.arena_bytes());
}

// Of a rank's parameters and what goes with them: values, copies, gradients, moments (train/step/trainer.cpp).
std::vector<MemoryPart> flat_parts(const TrainPlan& plan, const PlannedRun& planned) {
  const bool in_bf16 = storage_type(plan) == Dtype::bf16, many = planned.buckets.size() > 1;
  const int64_t flat = planned.params.flat_size(), values = in_bf16 && many ? planned.params.bf16_only_begin() : flat;
  const auto floats = [](int64_t n) { return 4.0 * static_cast<double>(n); };
  std::vector<MemoryPart> parts = {{"parameters", floats(values)}};
  if (in_bf16) parts.push_back({"their bf16 copy", floats(flat) / 2});
  if (values < flat) parts.push_back({"own masters of those in bf16", floats(flat - values) / planned.buckets.size()});
  parts.push_back({"gradients", floats(flat)});
  const double parked = floats(parked_copies(plan.sum, planned.micro_steps) * flat);
  const double staging = static_cast<double>(reduction_bytes(planned.buckets, plan.sum, planned.micro_steps)) - parked;
  if (parked > 0) parts.push_back({"parked gradients (--sum tree)", parked});
  if (staging > 0) parts.push_back({"gradients of other ranks", staging});
  const double matrices = floats(own_muon_range(planned.params, planned.buckets).size());
  const int rank = planned.buckets.rank(), ranks = planned.buckets.size();
  const double of_rows = plan.muon.normalize_rows ? floats(muon_row_moments(planned.params, rank, ranks)) : 0;
  parts.push_back({"moments", 2 * floats(planned.buckets.own_size()) - matrices + of_rows});
  const double directions = floats(muon_range(planned.params).size()) / 2;
  if (in_bf16 && directions > 0) parts.push_back({"Muon's directions", directions});
  if (planned.teacher != nullptr)
    parts.push_back({"teacher", floats(planned.teacher->params.flat_size()) * (in_bf16 ? 1.5 : 1)});
  return parts;
}

Layout record(Tape& tape, ParameterTable& params, Teacher* teacher, const TrainPlan& plan) {
  declare(params, plan);
  const Batch batch = batch_of(plan, plan.data.seq_len, teacher);
  const Layout layout = choose_layout(params, plan.config, batch, backend_of(plan.device));
  record_batch(tape, params, plan.config, batch, layout);
  return layout;
}

}  // namespace

PlannedRun::PlannedRun(const TrainPlan& plan, int ranks)
    : teacher(declare_teacher(plan)),
      tape(storage_type(plan)),
      layout(record(tape, params, teacher.get(), plan)),
      buckets(divide(params, plan, {0, ranks, 0, ranks})),
      micro_steps(plan.accumulate / ranks),
      forward_flops_per_token(tape.forward_flops() / static_cast<double>(layout.sequences * plan.data.seq_len)),
      training_flops_per_token(tape.training_flops() / static_cast<double>(layout.sequences * plan.data.seq_len)),
      training_bytes_per_token(tape.training_bytes() / static_cast<double>(layout.sequences * plan.data.seq_len)) {}

double total(const std::vector<MemoryPart>& parts) {
  double sum = 0;
  for (const MemoryPart& part : parts) sum += part.bytes;
  return sum;
}

std::vector<MemoryPart> memory_parts(const TrainPlan& plan, PlannedRun& planned) {
  const double replicas = static_cast<double>(planned.layout.replicas),
               activations = static_cast<double>(planned.tape.arena_bytes());
  std::vector<MemoryPart> parts = flat_parts(plan, planned);
  parts.push_back({"activations", replicas * activations});
  if (planned.layout.replicas > 1)
    parts.push_back({"gradients of the replicas", 4 * replicas * static_cast<double>(planned.params.flat_size())});
  const bool gpu = backend_of(plan.device) == Backend::cuda;
  parts.push_back({"scratch of the kernels, about",
                   gpu ? gpu_scratch(plan, planned) : scratch_memory(plan, planned.layout, planned.params)});
  const double answering = answering_memory(plan, planned.params);
  if (answering > 0) parts.push_back({"answering of prompts", answering});
  if (gpu) return parts;  // where neither tokens nor the program are
  const double tokens = static_cast<double>(plan.batch) * static_cast<double>(plan.data.seq_len);
  constexpr double program = 12 << 20;  // however small the model; planning does not touch all of it
  parts.push_back({"tokens of a step", 8 * tokens * static_cast<double>(planned.micro_steps + 1)});
  parts.push_back({"program and data, about", std::max(program, resident_memory())});
  return parts;
}

std::vector<MemoryPart> planned_parts(const TrainPlan& plan, PlannedRun& planned) {
  std::vector<MemoryPart> parts = memory_parts(plan, planned);
  if (backend_of(plan.device) == Backend::cuda && !is_emulated(plan))
    parts.push_back({"CUDA and its libraries, about", cuda_itself});
  return parts;
}

namespace {

void print_memory(const TrainPlan& plan, PlannedRun& planned) {
  const std::vector<MemoryPart> parts = planned_parts(plan, planned);
  std::printf("memory: %s in all%s\n", format_bytes(total(parts)).c_str(),
              backend_of(plan.device) == Backend::cuda ? ", on the GPU" : "");
  for (const MemoryPart& part : parts)
    std::printf("  %-36s %12s\n", part.name.c_str(), format_bytes(part.bytes).c_str());
  if (planned.layout.replicas > 1)
    std::printf("%lld replicas, each with its gradients and the activations of\n  %lld of %lld sequences at a time:\n",
                static_cast<long long>(planned.layout.replicas), static_cast<long long>(planned.layout.sequences),
                static_cast<long long>(plan.batch));
  std::printf("%s%s", planned.tape.memory_report().c_str(), planned.params.report().c_str());
}

// How many steps, and on what data.
std::string steps_lines(const TrainPlan& plan, const Dataset& dataset) {
  if (dataset.train == nullptr) return "steps: " + format_count(plan.steps) + "\n";
  std::string text = describe_data(plan, dataset);
  for (size_t at = 0; (at = text.find("; ", at)) != std::string::npos; ++at) text.replace(at, 2, "\n  ");
  std::string note = vocabulary_note(plan, dataset);
  if (const size_t at = note.find(": --vocab"); at != std::string::npos) note.replace(at, 2, "\n  ");
  return text + "\n" + (note.empty() ? "" : note + "\n");
}

}  // namespace

double peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return 1024.0 * static_cast<double>(usage.ru_maxrss);
}

TrainResult plan_training(const TrainPlan& plan, int ranks) {
  PlannedRun planned(plan, ranks);
  TrainResult result;
  result.accounting = account(plan, planned.params, planned.training_flops_per_token);
  result.bytes_per_token = planned.training_bytes_per_token;
  result.memory = memory_of(planned.layout, planned.tape, planned.params, true);
  for (const MemoryPart& part : flat_parts(plan, planned)) result.memory += static_cast<size_t>(part.bytes);
  result.planned_memory = total(planned_parts(plan, planned));
  return result;
}

void refuse_idle_router_lr(const std::vector<TrainPlan>& runs, const std::string& what) {
  for (TrainPlan plan : runs) {
    plan.router_lr = 0;
    ParameterTable params;
    declare(params, plan);
    if (std::ranges::any_of(params.rows(), [](const Parameter& row) { return row.follows_router_lr(); })) return;
  }
  fail(Exit::usage, "--router-lr has no effect: no router in ", what, " has a learning rate of its own");
}

void refuse_idle_freeze(const TrainPlan& plan, const std::string& what) {
  ParameterTable params;
  declare(params, plan);
  if (std::ranges::none_of(params.rows(), [](const Parameter& row) { return row.weighs(); }))
    fail(Exit::usage, what, " has no routers and no scalars: there is nothing to freeze");
}

void refuse_too_large(const TrainPlan& plan, const Device& device, int ranks) {
  const auto has = static_cast<double>(device.memory().bytes);
  const bool eight_bits = plan.matmul == "fp8";
  if (has == 0 && !eight_bits) return;
  PlannedRun planned(plan, ranks);
  if (eight_bits && planned.tape.quantized().empty())
    fail(Exit::usage,
         "--matmul fp8: no linear layer of this model suits it, which needs widths of 64 or more, and widths and ",
         "tokens of a micro-step (", plan.batch, " x ", plan.data.seq_len, ") that are multiples of 16");
  if (has == 0) return;
  const std::vector<MemoryPart> parts = memory_parts(plan, planned);
  if (total(parts) <= has) return;
  std::string list;
  for (const MemoryPart& part : parts) list += (list.empty() ? "" : "; ") + part.name + ": " + format_bytes(part.bytes);
  fail(Exit::device, "the GPU has ", format_bytes(has), " of memory and ", plan.config.arch, " needs ",
       format_bytes(total(parts)), " (", list,
       "). Use a smaller --batch with --accumulate, a shorter --seq, or a smaller model");
}

double seconds_of_run(const TrainPlan& plan, const Dataset& data) {
  if (data.train == nullptr) fail(Exit::usage, "--time needs --data: ", data_specs);
  const bool cpu = backend_of(plan.device) != Backend::cuda;
  if (cpu && plan_training(plan).planned_memory > static_cast<double>(available_memory())) return NAN;
  data.train->check_when_read(plan.config.vocab_size);
  Trainer trainer(plan, *data.train);
  constexpr int64_t steps = 3;
  trainer.step();  // takes memory for the first time, and does not count
  const double first = trainer.seconds;
  while (trainer.steps_done() < std::min(steps, plan.steps)) trainer.step();
  const int64_t counted = trainer.steps_done() - 1;
  return (counted > 0 ? (trainer.seconds - first) / static_cast<double>(counted) : first) *
         static_cast<double>(plan.steps);
}

void print_seconds(double seconds, const std::string& run, const std::string& which_steps) {
  if (std::isnan(seconds)) std::printf("time: not measured, %s needs more memory than is free\n", run.c_str());
  else std::printf("time: %s for the steps%s come on top\n", format_seconds(seconds).c_str(), which_steps.c_str());
}

void print_plan(const TrainPlan& plan, const Dataset& data) {
  const bool world = plan.world.ranks > 0;
  if (world) check_ranks(plan, plan.world.ranks);
  PlannedRun planned(plan, world ? static_cast<int>(plan.world.ranks) : 1);
  if (plan.dump_tape) {
    std::printf("%s", planned.tape.dump(world ? bucket_notes(planned) : std::multimap<size_t, std::string>()).c_str());
    return;
  }
  std::printf("a step: B = %s sequences of T = %s tokens%s\n", format_count(plan.batch).c_str(),
              format_count(plan.data.seq_len).c_str(),
              plan.accumulate > 1 ? str(", ", format_count(plan.accumulate), " times").c_str() : "");
  std::printf("%s", printable(steps_lines(plan, data)).c_str());
  const double tokens = static_cast<double>(plan.batch * plan.accumulate * plan.data.seq_len);
  const Accounting accounting = account(plan, planned.params, planned.training_flops_per_token);
  std::printf("%s", describe(accounting, tokens * static_cast<double>(plan.steps)).c_str());
  for (const std::string& line : describe_optimizer(plan, accounting, tokens)) std::printf("%s\n", line.c_str());
  if (planned.teacher != nullptr)
    std::printf("teacher: %s parameters; training includes its forward of %.4g FLOPs per token\n",
                format_count(planned.teacher->params.count()).c_str(),
                planned.training_flops_per_token - 3 * planned.forward_flops_per_token);
  if (world) std::printf("%s", describe_world(plan, planned).c_str());
  else print_memory(plan, planned);
  if (!plan.time) return;
  print_seconds(seconds_of_run(plan, data), "the run", ", by three of them; evaluations and checkpoints");
}

}  // namespace crossply
