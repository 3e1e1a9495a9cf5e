// The planner: lifetimes from the recorded list, offsets from the lifetimes. Nothing aliases but what a node declared.
#include <algorithm>
#include <cstdio>

#include "engine/out_of_memory.h"
#include "engine/packing.h"
#include "engine/tape.h"

namespace crossply {
namespace {

size_t aligned(size_t bytes) { return (bytes + place_unit - 1) / place_unit * place_unit; }

void touch(Buffer* buffer, int time) {
  if (buffer == nullptr) return;  // a parameter
  if (buffer->inside != nullptr) buffer = buffer->inside;
  buffer->first = buffer->first < 0 ? time : std::min(buffer->first, time);
  buffer->last = std::max(buffer->last, time);
}

}  // namespace

PlanMode plan_mode(const std::string& name) {
  const auto at = std::ranges::find(plan_modes, name);
  if (at == plan_modes.end()) fail(Exit::usage, "unknown memory plan '", name, "'; known: reuse, distinct, poison");
  return static_cast<PlanMode>(at - plan_modes.begin());
}

void Tape::find_lifetimes() {
  const int n = static_cast<int>(nodes_.size());
  for (Buffer& buffer : buffers_) buffer.first = buffer.last = -1;
  auto touch_all = [](const std::vector<Value*>& values, int time, bool gradients) {
    for (const Value* value : values) {
      const Value* v = gradients ? value->grad : value;
      if (v != nullptr) touch(v->buffer, time);
    }
  };
  for (int i = 0; i < n; ++i) {
    const Node& node = *nodes_[static_cast<size_t>(i)];
    const int forward = i, backward = 2 * n - 1 - i;
    for (const auto* list : {&node.in, &node.reads, &node.out, &node.saved, &node.forward_work})
      touch_all(*list, forward, false);
    if (!differentiated_ || node.frozen) continue;
    for (const auto* list : {&node.saved, &node.backward_reads, &node.backward_work}) touch_all(*list, backward, false);
    for (const auto* list : {&node.in, &node.out, &node.backward_reads_grads}) touch_all(*list, backward, true);
    if (node.grad_in_forward()) touch_all(node.in, forward, true);
  }
}

// Buffers that come to be at about the same time, are of one size and die at about the same time, into one.
void Tape::put_contiguous(const std::string& name, const std::vector<Buffer*>& list) {
  constexpr int about = 8;  // time indices: less than a transformer block, so that no memory is held for long
  const auto like = [&](const Buffer& a, const Buffer& b) {
    return a.bytes == b.bytes && std::abs(a.first - b.first) <= about && std::abs(a.last - b.last) <= about;
  };
  const auto is_free = [](const Buffer& b) { return b.placed() && !b.persistent && !b.sliced; };
  for (size_t begin = 0, end; begin < list.size(); begin = end) {
    const Buffer& one = *list[begin];
    const auto joins = [&](const Buffer* b) {
      return is_free(one) && is_free(*b) && like(one, *b) && std::count(&list[begin], &list[end], b) == 0;
    };
    for (end = begin + 1; end < list.size() && joins(list[end]);) ++end;
    if (end - begin < 2) continue;
    Buffer& all = buffers_.emplace_back();
    all.name = name;
    all.bytes = (end - begin) * aligned(one.bytes);
    for (size_t i = begin; i < end; ++i) {
      list[i]->inside = &all;
      list[i]->offset = (i - begin) * aligned(one.bytes);
      touch(&all, list[i]->first), touch(&all, list[i]->last);
    }
  }
}

void Tape::find_contiguous() {
  for (const auto& node : nodes_) {
    if (!node->contiguous_outputs()) continue;
    std::vector<Buffer*> outs, gradients;
    for (const Value* value : node->out) {
      outs.push_back(value->buffer);
      if (value->grad != nullptr) gradients.push_back(value->grad->buffer);
    }
    put_contiguous(node->name, outs);
    put_contiguous("d:" + node->name, gradients);
  }
}

// Largest first, each at the lowest offset where no buffer that is alive at the same time has been placed.
void Tape::plan(PlanMode mode) {
  mode_ = mode;
  planned_ = true;
  find_lifetimes();
  find_contiguous();
  std::vector<Buffer*> order;
  for (Buffer& buffer : buffers_)
    if (buffer.placed()) order.push_back(&buffer);
  std::stable_sort(order.begin(), order.end(), [](const Buffer* a, const Buffer* b) { return a->bytes > b->bytes; });
  const int times = std::max(1, 2 * static_cast<int>(nodes_.size()));
  std::vector<MemoryBlock> blocks;
  size_t total = 0;
  for (const Buffer* buffer : order) {
    total += aligned(buffer->bytes);
    if (total > size_t{1} << 60)  // far from where sizes overflow: each buffer is smaller
      throw OutOfMemory(Exit::usage, "the activations are larger than any memory");
    const bool always = buffer->persistent || mode != PlanMode::reuse;
    blocks.push_back({aligned(buffer->bytes), always ? 0 : buffer->first, always ? times - 1 : buffer->last});
  }
  arena_bytes_ = pack(blocks, times);
  for (size_t i = 0; i < order.size(); ++i) order[i]->offset = blocks[i].offset;
}

std::string Tape::memory_report() const {
  const size_t n = nodes_.size(), times = std::max<size_t>(1, n * (differentiated_ ? 2 : 1));
  std::vector<size_t> born(times + 1, 0), died(times + 1, 0);  // bytes, by the first time with and without them
  const auto first_of = [](const Buffer& b) { return b.persistent ? 0 : static_cast<size_t>(b.first); };
  const auto end_of = [&](const Buffer& b) { return b.persistent ? times : static_cast<size_t>(b.last) + 1; };
  size_t total = 0, alive = 0, peak = 0, when = 0;
  for (const Buffer& buffer : buffers_) {
    if (!buffer.placed()) continue;
    born[first_of(buffer)] += aligned(buffer.bytes);
    died[end_of(buffer)] += aligned(buffer.bytes);
    total += aligned(buffer.bytes);
  }
  for (size_t time = 0; time < times; ++time) {
    alive = alive + born[time] - died[time];
    if (alive > peak) peak = alive, when = time;
  }
  std::vector<const Buffer*> residents;
  for (const Buffer& buffer : buffers_)
    if (buffer.placed() && first_of(buffer) <= when && when < end_of(buffer)) residents.push_back(&buffer);
  std::sort(residents.begin(), residents.end(), [](const Buffer* a, const Buffer* b) { return a->bytes > b->bytes; });
  const size_t node = when < n ? when : 2 * n - 1 - when;
  std::string out =
      str("activations: ", format_bytes(static_cast<double>(arena_bytes_)), " planned, ",
          format_bytes(static_cast<double>(peak)), " alive at the peak\n  (", when < n ? "forward" : "backward", " of ",
          nodes_[node]->name, "), ", format_bytes(static_cast<double>(total)), " without reuse\n");
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
