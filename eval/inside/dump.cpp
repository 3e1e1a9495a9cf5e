#include "eval/inside/dump.h"

#include <algorithm>

#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/io/safetensors.h"
#include "engine/memory.h"
#include "eval/inside/probe.h"
#include "eval/own_tensors.h"

namespace crossply {
namespace {

constexpr UsualWindows usual_dump = {16, 256};

// Does the text match, where * stands for any part?
bool matches(const std::string& pattern, const std::string& text) {
  const size_t star = pattern.find('*');
  if (star == std::string::npos) return pattern == text;
  if (text.compare(0, star, pattern, 0, star) != 0) return false;
  for (size_t at = star; at <= text.size(); ++at)
    if (matches(pattern.substr(star + 1), text.substr(at))) return true;
  return false;
}

struct Dumped {
  std::vector<int64_t> shape;
  std::vector<float> numbers;
};

std::vector<int64_t> shape_of(const Shape& shape, int64_t N, bool per_token) {
  std::vector<int64_t> list;
  for (int i = 0; i < shape.rank; ++i) list.push_back(i == 0 && per_token ? N : shape[i]);
  return list;
}

int64_t numel_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

// Is the value one of windows, (1, T, ...), and not the same for all, as a route (K, l+1)?
bool per_window(const Shape& shape, int64_t T) { return shape.rank >= 3 && shape[0] == 1 && shape[1] == T; }

std::string attention_name(const Probe& probe, size_t i) {
  const int layer = probe.attentions()[i].layer;
  int count = 1;
  for (size_t j = 0; j < i; ++j) count += probe.attentions()[j].layer == layer;
  return str("attention.", layer, count > 1 ? str(".", count) : "");
}

}  // namespace

std::vector<std::string> matching_names(const std::vector<std::string>& patterns, const std::vector<std::string>& names,
                                        const std::string& model) {
  std::vector<std::string> chosen;
  for (const std::string& pattern : patterns) {
    const size_t before = chosen.size();
    for (const std::string& name : names)
      if (matches(pattern, name)) chosen.push_back(name);
    if (chosen.size() > before) continue;
    fail(Exit::usage, "--dump ", pattern, ": ", model, " has no such value; it has: ", names_in_short(names));
  }
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

void check_dump_path(const std::string& path) {
  if (!path_exists(path)) return;
  bool ours = false;
  try {
    ours = holds_tensors_of(path, "analyze");
  } catch (const Error&) {  // no such file
  }
  if (!ours) refuse_foreign_file(path);
}

std::string dump_values(Subject& subject, const std::vector<std::string>& patterns, const AnalysisOptions& o,
                        const std::string& path) {
  const Source& source = subject.data.source();
  const int64_t T = window_length(o.length, usual_dump.length, subject.name, subject.config(), o.data.spec, source);
  const int64_t N = o.sequences > 0 ? o.sequences : usual_dump.sequences;
  Probe probe(subject.model, 1, T);
  std::vector<std::string> names = probe.names();
  for (size_t i = 0; i < probe.attentions().size(); ++i) names.push_back(attention_name(probe, i));
  std::map<std::string, Dumped> dumped;
  double bytes = 0;
  for (const std::string& name : matching_names(patterns, names, subject.name)) {
    Dumped& one = dumped[name];
    if (probe.has(name)) {
      probe.keep(name);
      one.shape = shape_of(probe.shape(name), N, per_window(probe.shape(name), T));
    }
  }
  for (size_t i = 0; i < probe.attentions().size(); ++i)
    if (const auto found = dumped.find(attention_name(probe, i)); found != dumped.end())
      found->second.shape = {N, probe.attentions()[i].heads, T, T};
  for (const auto& [name, one] : dumped) {
    double size = 4;
    for (const int64_t n : one.shape) size *= static_cast<double>(n);
    bytes += size;
  }
  if (const auto room = static_cast<double>(available_memory()); bytes > room)
    fail(Exit::usage, "--dump: ", format_bytes(bytes), " of values are more than the free memory, ", format_bytes(room),
         "; give fewer --sequences, a shorter --length, or fewer values");
  const std::vector<TokenWindow> windows = random_windows(source, T, N, o.seed);
  say_cost("dump", subject, windows, static_cast<double>(N) * probe.forward_flops(), bytes);
  for (auto& [name, one] : dumped) one.numbers.reserve(static_cast<size_t>(numel_of(one.shape)));

  probe.watch_attention([&](size_t i, const AttentionInputs& inputs) {
    const auto found = dumped.find(attention_name(probe, i));
    if (found == dumped.end()) return;
    std::vector<double> P(static_cast<size_t>(T * T));
    for (int64_t h = 0; h < probe.attentions()[i].heads; ++h) {
      inputs.probabilities(0, h, T, P.data());
      found->second.numbers.insert(found->second.numbers.end(), P.begin(), P.end());
    }
  });
  std::vector<int64_t> tokens, targets, lengths;
  Ticker ticker(printable(subject.name), "window");
  for (const TokenWindow& window : windows) {
    probe.run(window.tokens.data(), window.targets.data());
    for (auto& [name, one] : dumped)
      if (probe.has(name) && std::ssize(one.numbers) < numel_of(one.shape))
        one.numbers.insert(one.numbers.end(), probe.at(name).begin(), probe.at(name).end());
    tokens.insert(tokens.end(), window.tokens.begin(), window.tokens.end());
    targets.insert(targets.end(), window.targets.begin(), window.targets.end());
    lengths.push_back(window.length);
    ticker.tell(std::ssize(lengths), N);
  }
  std::vector<TensorToWrite> tensors = {{"tokens", "I64", {N, T}, tokens.data()},
                                        {"targets", "I64", {N, T}, targets.data()},
                                        {"lengths", "I64", {N}, lengths.data()}};
  for (const auto& [name, one] : dumped) tensors.push_back({name, "F32", one.shape, one.numbers.data()});
  write_safetensors(path, tensors,
                    {{"crossply", "analyze"},
                     {"model", utf8_or_escaped(subject.name)},
                     {"windows", str(N)},
                     {"length", str(T)},
                     {"seed", str(o.seed)}});
  return str("wrote ", printable(path), ", ", tensors.size(), " tensors, ", format_bytes(bytes), "\n");
}

}  // namespace crossply
