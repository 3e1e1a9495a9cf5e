// The planner: lifetimes from the recorded list, offsets from the lifetimes. Nothing aliases but what a node declared.
#include <algorithm>
#include <cstdio>

#include "engine/tape.h"

namespace crossply {
namespace {

constexpr size_t alignment = 256;
size_t aligned(size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

void touch(Buffer* buffer, int tick) {
  if (buffer == nullptr) return;  // a parameter
  if (buffer->inside != nullptr) buffer = buffer->inside;
  buffer->first = buffer->first < 0 ? tick : std::min(buffer->first, tick);
  buffer->last = std::max(buffer->last, tick);
}

bool together(const Buffer& a, const Buffer& b) {
  return a.persistent || b.persistent || (a.first <= b.last && b.first <= a.last);
}

}  // namespace

PlanMode plan_mode(const std::string& name) {
  if (name == "reuse") return PlanMode::reuse;
  if (name == "distinct") return PlanMode::distinct;
  if (name == "poison") return PlanMode::poison;
  fail(Exit::usage, "unknown memory plan '", name, "'; known: reuse, distinct, poison");
}

// What only the next node reads, and that to add it to something, need not be in memory by itself, unless its place was
// chosen.
void Tape::find_sums() {
  std::unordered_map<const Value*, int> readers;
  for (const auto& node : nodes_)
    for (const auto* list : {&node->in, &node->reads, &node->keep, &node->saved})
      for (const Value* value : *list) ++readers[value];
  for (size_t n = 1; n < nodes_.size(); ++n) {
    Node &sum = *nodes_[n], &from = *nodes_[n - 1];
    if (!sum.is_sum || !from.can_add || sum.in[1] != from.out[0] || readers[sum.in[1]] > 1) continue;
    if (const Buffer& own = *from.out[0]->buffer; own.inside != nullptr || own.persistent) continue;
    from.addend = sum.in[0];
    sum.done = true;
    share(from.out[0], sum.out[0]);
  }
}

void Tape::find_lifetimes() {
  const int n = static_cast<int>(nodes_.size());
  for (Buffer& buffer : buffers_) buffer.first = buffer.last = -1;
  auto touch_all = [](const std::vector<Value*>& values, int tick, bool gradients) {
    for (const Value* value : values) {
      const Value* v = gradients ? value->grad : value;
      if (v != nullptr) touch(v->buffer, tick);
    }
  };
  for (int i = 0; i < n; ++i) {
    const Node& node = *nodes_[static_cast<size_t>(i)];
    const int forward = i, backward = 2 * n - 1 - i;
    for (const auto* list : {&node.in, &node.reads, &node.out, &node.saved}) touch_all(*list, forward, false);
    if (!differentiated_) continue;
    for (const auto* list : {&node.saved, &node.keep}) touch_all(*list, backward, false);
    for (const auto* list : {&node.in, &node.out, &node.keep_grads}) touch_all(*list, backward, true);
    if (node.grad_in_forward) touch_all(node.in, forward, true);
  }
}

// Largest first, each at the lowest offset where no buffer that is alive at the same time has been placed.
void Tape::plan(PlanMode mode) {
  mode_ = mode;
  planned_ = true;
  find_sums();
  find_lifetimes();
  std::vector<Buffer*> order;
  for (Buffer& buffer : buffers_)
    if (buffer.inside == nullptr && (buffer.persistent || buffer.first >= 0)) order.push_back(&buffer);
  std::stable_sort(order.begin(), order.end(), [](const Buffer* a, const Buffer* b) { return a->bytes > b->bytes; });
  std::vector<Buffer*> placed;  // sorted by offset
  arena_bytes_ = 0;
  for (Buffer* buffer : order) {
    size_t offset = mode == PlanMode::reuse ? 0 : arena_bytes_;
    if (mode == PlanMode::reuse) {
      for (const Buffer* other : placed) {
        if (!together(*buffer, *other)) continue;
        if (offset + aligned(buffer->bytes) <= other->offset) break;
        offset = std::max(offset, other->offset + aligned(other->bytes));
      }
    }
    buffer->offset = offset;
    arena_bytes_ = std::max(arena_bytes_, offset + aligned(buffer->bytes));
    if (arena_bytes_ > size_t{1} << 60)  // far from where sizes overflow: each buffer is smaller
      fail(Exit::usage, "the activations are larger than any memory; use a smaller --batch, --seq or model");
    placed.insert(std::upper_bound(placed.begin(), placed.end(), buffer,
                                   [](const Buffer* a, const Buffer* b) { return a->offset < b->offset; }),
                  buffer);
  }
}

std::string Tape::memory_report() const {
  const int ticks = static_cast<int>(nodes_.size()) * (differentiated_ ? 2 : 1);
  auto alive = [](const Buffer& b, int tick) {
    return b.inside == nullptr && (b.persistent || (b.first >= 0 && b.first <= tick && tick <= b.last));
  };
  size_t peak = 0, total = 0;
  int when = 0;
  for (int tick = 0; tick < ticks; ++tick) {
    size_t sum = 0;
    for (const Buffer& buffer : buffers_)
      if (alive(buffer, tick)) sum += aligned(buffer.bytes);
    if (sum > peak) peak = sum, when = tick;
  }
  std::vector<const Buffer*> residents;
  for (const Buffer& buffer : buffers_) {
    if (buffer.inside == nullptr && (buffer.persistent || buffer.first >= 0)) total += aligned(buffer.bytes);
    if (alive(buffer, when)) residents.push_back(&buffer);
  }
  std::sort(residents.begin(), residents.end(), [](const Buffer* a, const Buffer* b) { return a->bytes > b->bytes; });
  const size_t n = nodes_.size();
  const size_t node = static_cast<size_t>(when) < n ? static_cast<size_t>(when) : 2 * n - 1 - static_cast<size_t>(when);
  std::string out = str("activations: ", format_bytes(static_cast<double>(arena_bytes_)), " planned, ",
                        format_bytes(static_cast<double>(peak)), " alive at the peak (",
                        static_cast<size_t>(when) < n ? "forward" : "backward", " of ", nodes_[node]->name, "), ",
                        format_bytes(static_cast<double>(total)), " without reuse\n");
  char line[160];
  for (size_t i = 0; i < std::min<size_t>(residents.size(), 10); ++i) {
    std::snprintf(line, sizeof line, "  %-36s %12s\n", residents[i]->name.c_str(),
                  format_bytes(static_cast<double>(residents[i]->bytes)).c_str());
    out += line;
  }
  if (residents.size() > 10) out += str("  and ", residents.size() - 10, " smaller ones\n");
  return out;
}

}  // namespace crossply
