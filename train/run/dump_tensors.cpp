#include "train/run/dump_tensors.h"

#include <algorithm>
#include <map>

#include "engine/io/safetensors.h"
#include "eval/own_tensors.h"
#include "models/batch/batch_model.h"

namespace crossply {
namespace {

// A value or a gradient, and when the tape has just made it: after the forward of node n at n, after its backward at
// 2N-1-n.
struct Tap {
  const Value* value = nullptr;
  size_t time = 0;
  bool zero = false;    // a gradient that nobody set: the tape zeroes it only later
  std::string missing;  // why it is never in memory by itself, and what to ask for instead
  std::vector<std::byte> copy;
};
using Taps = std::map<std::string, Tap>;

// Everything with a name. A value that no node writes (inputs, constants, slabs, parameters) is there by the end of the
// forward. A gradient is whole when the backward of its value's writer is about to read it, a parameter's at the end.
Taps all_taps(const Tape& tape) {
  const size_t N = tape.nodes().size();
  Taps taps;
  const auto add = [&](const Value& value, size_t time) {
    if (value.buffer != nullptr && !value.buffer->persistent && value.buffer->inside == nullptr &&
        value.buffer->first < 0)
      return;  // nobody uses it: it has no memory
    Tap& tap = taps[value.name];
    CHECK_THAT(tap.value == nullptr || tap.value == &value, "two tensors are named ", value.name);
    tap.value = &value, tap.time = time;
  };
  for (const Value& value : tape.values()) add(value, N - 1);
  for (const Value& value : tape.values())
    if (value.grad != nullptr) add(*value.grad, 2 * N - 1);
  for (size_t n = 0; n < N; ++n) {
    const Node& node = *tape.nodes()[n];
    for (const auto* list : {&node.out, &node.saved})
      for (const Value* value : *list)
        if (taps.contains(value->name)) taps[value->name].time = n;
    for (const Value* value : node.out) {
      if (value->grad == nullptr || !taps.contains(value->grad->name)) continue;
      Tap& tap = taps[value->grad->name];
      tap.time = 2 * N - 2 - n;
      tap.zero = std::count(node.zeroed.begin(), node.zeroed.end(), value->grad) > 0;
      if (!node.in.empty() && value->buffer == node.in[0]->buffer &&
          (node.donated_input() || !node.backward_reads_grads.empty()))
        tap.missing = str(node.op(), " ", node.name,
                          " adds what its readers pass on in its own backward; ask for d:", node.in[0]->name,
                          ", the gradient of the same numbers");
    }
  }
  for (const Value& value : tape.values())
    if (value.fused_into != nullptr)
      taps[value.name].missing = str("an op computes it on the way to ", value.fused_into->name, "; ask for that");
  return taps;
}

// Does the pattern, in which * stands for any letters, match the whole name?
bool matches(const char* pattern, const char* name) {
  if (*pattern == '*') return matches(pattern + 1, name) || (*name != '\0' && matches(pattern, name + 1));
  return *pattern == *name && (*name == '\0' || matches(pattern + 1, name + 1));
}

// Up to eight names of what is in memory that share most with this one: their common beginning and end.
std::string near_names(const Taps& taps, const std::string& name) {
  std::vector<std::pair<size_t, std::string>> scored;
  for (const auto& [known, tap] : taps) {
    if (!tap.missing.empty()) continue;
    const auto front = std::mismatch(name.begin(), name.end(), known.begin(), known.end()).first - name.begin();
    const auto back = std::mismatch(name.rbegin(), name.rend(), known.rbegin(), known.rend()).first - name.rbegin();
    scored.emplace_back(static_cast<size_t>(front + back), known);
  }
  std::stable_sort(scored.begin(), scored.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string text;
  for (size_t i = 0; i < std::min<size_t>(8, scored.size()); ++i) text += " " + scored[i].second;
  return text;
}

// Those that are asked for. A pattern passes over what is nowhere by itself.
Taps chosen_taps(const Taps& all, const std::vector<std::string>& names) {
  Taps chosen;
  for (const std::string& name : names) {
    size_t found = 0;
    const Tap* missing = nullptr;
    for (const auto& [known, tap] : all) {
      if (!matches(name.c_str(), known.c_str())) continue;
      if (tap.missing.empty()) ++found, chosen[known] = tap;
      else missing = &tap;
    }
    if (found == 0 && missing != nullptr)
      fail(Exit::usage, "--dump-tensors: ", name, " is never in memory by itself: ", missing->missing);
    if (found == 0 && name.starts_with("d:") && all.contains(name.substr(2)))
      fail(Exit::usage, "--dump-tensors: no op writes the gradient of ", name.substr(2), " by itself; near it are",
           near_names(all, name));
    if (found == 0)
      fail(Exit::usage, "--dump-tensors: no value or gradient is named ", name, "; near it are", near_names(all, name),
           "; --dump-tape lists them all");
  }
  return chosen;
}

const char* file_type(Dtype dtype) {
  return dtype == Dtype::f64 ? "F64" : dtype == Dtype::i32 ? "I32" : dtype == Dtype::bf16 ? "BF16" : "F32";
}

void write(const std::string& path, const Taps& taps) {
  std::vector<TensorToWrite> tensors;
  for (const auto& [name, tap] : taps) {
    const Shape& shape = tap.value->shape;
    tensors.push_back(
        {name, file_type(tap.value->dtype), {shape.dim.begin(), shape.dim.begin() + shape.rank}, tap.copy.data()});
  }
  write_safetensors(path, tensors, kind_of_tensors(dumped_kind));
}

}  // namespace

Dumped dump_tensors(const std::vector<std::string>& names, const std::string& path, ParameterTable& params,
                    const Config& config, const Batch& batch, const int32_t* tokens, const int32_t* targets) {
  Device& device = params.device();
  Tape tape(batch.dtype);
  const Graph graph = record_batch(tape, params, config, batch, {batch.B, 1});
  Taps taps = chosen_taps(all_taps(tape), names);
  tape.allocate(device);
  tape.watch([&](size_t n, bool backward) {
    const size_t time = backward ? 2 * tape.nodes().size() - 1 - n : n;
    for (auto& [name, tap] : taps) {
      if (tap.time != time) continue;
      tap.copy.resize(tap.value->bytes());  // zeros
      if (!tap.zero) device.copy_out(tap.copy.data(), tap.value->tensor.data, tap.copy.size());
    }
  });
  load_batch(device, graph, tokens, targets);
  params.zero_gradients();
  const auto scored = std::count_if(targets, targets + batch.B * batch.T, [](int32_t t) { return t >= 0; });
  const double count = static_cast<double>(std::max<int64_t>(scored, 1));
  tape.run(Step{true, 1 / count, 0});
  const double loss = sum_losses(device, graph) / count;
  write(path, taps);
  return {loss, taps.size()};
}

}  // namespace crossply
