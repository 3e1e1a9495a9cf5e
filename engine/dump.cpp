// The tape as a table: what each op of the forward writes and reads, what each op of the backward does to whose
// gradient, and where all of it lies.
#include <algorithm>
#include <cstdio>
#include <unordered_set>

#include "engine/tape.h"

namespace crossply {
namespace {

constexpr size_t screen = 120, indent = 20;

// Lines that begin with a word for the list and go on with its names, as many as fit.
std::string list(const std::string& title, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string out, line = std::string(indent, ' ') + title;
  for (const std::string& name : names) {
    if (line.size() + 1 + name.size() > screen) {
      out += line + "\n";
      line = std::string(indent + title.size(), ' ');
    }
    line += " " + name;
  }
  return out + line + "\n";
}

// Whose memory it is, where that is not its own.
std::string host_of(const Value& value) {
  if (value.buffer == nullptr) return "";
  const Buffer& buffer = *value.buffer;
  if (buffer.inside != nullptr && buffer.inside->sliced)
    return str("slice ", buffer.offset / buffer.bytes, " of ", buffer.inside->name);
  return buffer.name != value.name ? "in " + buffer.name : "";
}

// A line for what an op writes. head: number and op, for its first one; mark: set or add, or a blank. Long names of
// parameters take the place of the offset.
std::string row(const std::string& head, char mark, const Value& value, const std::string& gigaflops,
                const std::string& note) {
  char line[300], what[200];
  std::snprintf(what, sizeof what, "%-24s %s", value.name.c_str(), value.shape.str().c_str());
  const int width = value.buffer != nullptr ? 42 : 52;
  const std::string offset = value.buffer != nullptr ? str(value.buffer->place()) : "";
  std::snprintf(line, sizeof line, "%-20s%c %-*s %*s %10s %7s  ", head.c_str(), mark, width, what, 52 - width,
                offset.c_str(), format_bytes(static_cast<double>(value.bytes())).c_str(), gigaflops.c_str());
  std::string text = line + note;
  text.erase(text.find_last_not_of(' ') + 1);
  return text + "\n";
}

std::string head_of(size_t n, const Node& node) {
  char head[40];
  std::snprintf(head, sizeof head, "%4zu  %-13s", n, node.op());
  return head;
}

// Adds names, and not twice.
void add_name(std::vector<std::string>& names, const Value* value) {
  if (value != nullptr && std::find(names.begin(), names.end(), value->name) == names.end())
    names.push_back(value->name);
}

std::string forward_of(size_t n, const Node& node) {
  std::string out, head = head_of(n, node);
  char gigaflops[32] = "";
  if (node.flops() > 0) std::snprintf(gigaflops, sizeof gigaflops, "%.3g", node.flops() * 1e-9);
  for (const auto* values : {&node.out, &node.saved, &node.forward_work})
    for (const Value* value : *values) {
      std::string note = host_of(*value);
      if (values == &node.saved) note = "saved";
      if (values == &node.forward_work) note = "work";
      out += row(head, ' ', *value, gigaflops, note);
      head.clear(), gigaflops[0] = '\0';
    }
  std::vector<std::string> names;
  for (const auto* values : {&node.in, &node.reads})
    for (const Value* value : *values) add_name(names, value);
  return out + list("<-", names);
}

std::string backward_of(size_t n, const Node& node) {
  std::string out, head = head_of(n, node);
  const auto add = [&](char mark, const Value& value, const std::string& note) {
    out += row(head, mark, value, "", note);
    head.clear();
  };
  for (const Value* grad : node.zeroed) add('0', *grad, host_of(*grad));
  for (const Value* value : node.backward_work) add(' ', *value, "work");
  for (size_t i = 0; i < node.in.size(); ++i) {
    const Value* grad = node.in[i]->grad;
    if (grad == nullptr) continue;
    add(node.grad_modes[i] == GradMode::overwrite ? '=' : '+', *grad,
        node.grad_in_forward() ? "in the forward" : host_of(*grad));
  }
  if (out.empty()) out = head + "  -\n";
  std::vector<std::string> names;
  for (const auto* values : {&node.out, &node.backward_reads_grads})
    for (const Value* value : *values) add_name(names, value->grad);
  for (const auto* values : {&node.saved, &node.backward_reads})
    for (const Value* value : *values) add_name(names, value);
  return out + list("<-", names);
}

}  // namespace

std::string Tape::dump(const std::multimap<size_t, std::string>& notes) const {
  const std::string columns = "   #  op              name                     shape                 offset      bytes";
  std::string out = str("The step as ", nodes_.size(),
                        " ops: one line for each tensor that an op writes, then <- and what it reads.\n",
                        "L0.x is a value, d:L0.x its gradient; offset: where it lies in their arena. ",
                        "Parameters have none.\n\n", "FORWARD, in the order in which it runs\n", columns, "   GFLOP\n");
  for (size_t n = 0; n < nodes_.size(); ++n) out += forward_of(n, *nodes_[n]);
  if (differentiated_) {
    out += "\nBACKWARD, in the order in which it runs: gradients are set (=), added to (+), or zeroed before (0)\n" +
           columns + "\n";
    for (size_t n = nodes_.size(); n-- > 0;) {
      if (!nodes_[n]->frozen) out += backward_of(n, *nodes_[n]);
      for (auto [note, end] = notes.equal_range(n); note != end; ++note)
        out += std::string(indent, ' ') + note->second + "\n";
    }
  }
  return out + "\n" + totals();
}

// Ops, FLOPs, and the memory of each kind as if nothing shared any; then what is shared, and the peak.
std::string Tape::totals() const {
  struct Kind {
    const char* name;
    size_t count = 0;
    double bytes = 0;
  };
  Kind kinds[] = {{"activations"}, {"slabs"}, {"saved for the backward"}, {"gradients"}, {"inputs and results"}};
  std::unordered_set<const Buffer*> saved, gradients;
  for (const auto& node : nodes_)
    for (const Value* value : node->saved) saved.insert(value->buffer);
  for (const Value& value : values_)
    if (const Value* grad = value.grad; grad != nullptr && grad->buffer != nullptr)
      gradients.insert(grad->buffer->inside != nullptr ? grad->buffer->inside : grad->buffer);
  for (const Buffer& buffer : buffers_) {
    if (!buffer.placed()) continue;
    const bool gradient = gradients.contains(&buffer) && buffer.name.starts_with("d:");
    Kind& kind = kinds[buffer.persistent ? 4 : gradient ? 3 : saved.contains(&buffer) ? 2 : buffer.sliced ? 1 : 0];
    ++kind.count, kind.bytes += static_cast<double>(buffer.bytes);
  }
  char line[120];
  std::snprintf(line, sizeof line, "TOTALS\n%zu ops; forward %.4f GFLOP\n", nodes_.size(), forward_flops() * 1e-9);
  std::string out = line;
  for (const Kind& kind : kinds) {
    std::snprintf(line, sizeof line, "  %-24s %5zu buffers %12s\n", kind.name, kind.count,
                  format_bytes(kind.bytes).c_str());
    out += line;
  }
  return out + memory_report();
}

}  // namespace crossply
