#include "engine/tape.h"

#include <algorithm>
#include <chrono>
#include <unordered_set>
#include <utility>

#include "engine/buckets.h"

namespace crossply {

// -----------------------------------------------------------------------------------------------------------------
// Recording

Value* Tape::add_value(const std::string& name, Shape shape, Dtype dtype, bool persistent) {
  Buffer& buffer = buffers_.emplace_back();
  Value& value = values_.emplace_back();
  value.name = buffer.name = prefix_ + name;
  value.shape = shape;
  value.dtype = dtype;
  value.buffer = &buffer;
  buffer.bytes = value.bytes();
  buffer.persistent = persistent;
  buffer.values = {&value};
  return &value;
}

// A parameter's gradient lives in its table, so it has no buffer.
Value* Tape::add_gradient(const Value& of) {
  if (of.parameter == nullptr) return add_value("d:" + of.name, of.shape, of.dtype, false);
  Value& grad = values_.emplace_back();
  grad.name = "d:" + of.name;
  grad.shape = of.shape;
  grad.dtype = of.dtype;
  return &grad;
}

Value* Tape::input(const std::string& name, Shape shape, Dtype dtype) { return add_value(name, shape, dtype, true); }
Value* Tape::activation(const std::string& name, Shape shape) { return add_value(name, shape, real_, false); }
Value* Tape::statistic(const std::string& name, Shape shape) {
  return add_value(name, shape, accumulation_type(real_), false);
}
Value* Tape::result(const std::string& name, Shape shape) {
  return add_value(name, shape, accumulation_type(real_), true);
}

Value* Tape::constant(const std::string& name, Shape shape, std::vector<double> numbers) {
  CHECK_THAT(static_cast<int64_t>(numbers.size()) == shape.numel(), name, " ", shape.str(), " got ", numbers.size());
  Value* value = add_value(name, shape, accumulation_type(real_), true);
  constants_.emplace_back(value, std::move(numbers));
  return value;
}

Value* Tape::parameter(Parameter& row) {
  Value*& known = parameters_[&row];
  if (known != nullptr) return known;
  Value& value = values_.emplace_back();
  known = &value;
  value.name = of_parameters_ + row.name;
  value.shape = row.shape;
  value.dtype = accumulation_type(real_);
  value.parameter = &row;
  value.needs_grad = !frozen_;
  return &value;
}

// One more f32 at the end of a buffer that grows with each.
Value* Tape::add_scalar(const std::string& name, Buffer*& all) {
  if (all == nullptr) {
    all = &buffers_.emplace_back();
    all->name = "numbers of eight bits";
    all->persistent = true;
  }
  Value* value = add_value(name, Shape{1}, Dtype::f32, true);
  value->buffer->inside = all;
  value->buffer->offset = std::exchange(all->bytes, all->bytes + value->bytes());
  return value;
}

Tensor Tape::scalars_of(const Buffer* all) const {
  if (all == nullptr) return {};
  return {arena_.data() + all->place(), Dtype::f32, Shape{std::ssize(quantized_)}};
}

QuantizationScalars Tape::add_quantized(const std::string& name, float max) {
  quantized_.push_back({prefix_ + name, max});
  return {add_scalar(name + ".scale", scales_), add_scalar(name + ".inverse", inverses_),
          add_scalar(name + ".amax", amaxes_)};
}

Slab Tape::slab(const std::string& name, int64_t slices, Shape slice) {
  CHECK_THAT(slice.rank == 4, "a slice is (B, T, K, D), got ", slice.str());
  const Slab slab{add_value(name, Shape{slices, slice[0] * slice[1], slice[2], slice[3]}, real_, false)};
  slab.all->buffer->sliced = true;
  return slab;
}

void Tape::place(Value* value, const Slab& slab, int64_t i) {
  CHECK_THAT(value->parameter == nullptr && !value->buffer->persistent && value->buffer->inside == nullptr, value->name,
             " cannot move into the slab ", slab.all->name,
             ": it has a place already. Place a copy: ops::copy(tape, name, value)");
  Buffer& buffer = *value->buffer;
  CHECK_THAT(value->shape.numel() * slab.all->shape[0] == slab.all->shape.numel() && i < slab.all->shape[0],
             value->name, value->shape.str(), " as slice ", i, " of ", slab.all->shape.str());
  buffer.inside = slab.all->buffer;
  buffer.offset = static_cast<size_t>(i) * buffer.bytes;
}

void Tape::share(Value* value, const Value* with) {
  value->buffer = with->buffer;
  with->buffer->values.push_back(value);
}

namespace {

std::string described(const Node& node) { return str(node.name, " (", node.op(), ")"); }

}  // namespace

// Values that nobody may read any more or that nobody wrote, and gradients that would be written twice at once.
void Tape::check_readable(const Node& node) {
  for (const std::vector<Value*>* list : {&node.in, &node.reads, &node.backward_reads})
    for (const Value* value : *list)
      CHECK_THAT(value->taken_by == nullptr, described(node), " reads ", value->name, ", whose memory ",
                 described(*value->taken_by), " has taken. Give that op a copy instead: ops::copy(tape, name, value)");
  for (const Value* value : node.in)
    CHECK_THAT(value->written || value->parameter != nullptr || value->buffer->persistent, described(node), " reads ",
               value->name, ", which no op has written, so its gradient would be lost. Use what an op returned");
  if (node.may_repeat_inputs()) return;
  std::vector<const Value*> differentiated;
  for (const Value* value : node.in)
    if (value->needs_grad && value->parameter == nullptr) differentiated.push_back(value);
  std::sort(differentiated.begin(), differentiated.end());
  const auto twice = std::adjacent_find(differentiated.begin(), differentiated.end());
  CHECK_THAT(twice == differentiated.end(), described(node), " reads ", (*twice)->name,
             " twice. Give it a copy the second time: ops::copy(tape, name, value)");
}

// Is in[0]'s memory needed by nobody else?
void Tape::check_takeable(const Node& node) {
  const Value& value = *node.in[0];
  const char* how = node.in_place() ? " works in place on " : " takes over ";
  const char* remedy = ". Give it a copy instead: ops::copy(tape, name, value)";
  CHECK_THAT(value.parameter == nullptr && !value.buffer->persistent, described(node), how, value.name,
             ", which must stay as it is from step to step", remedy);
  CHECK_THAT(value.buffer->backward_reader == nullptr, described(node), how, value.name, ", which the backward of ",
             described(*value.buffer->backward_reader), " reads", remedy);
  CHECK_THAT(!node.in_place() || value.buffer->inside == nullptr, described(node), how, value.name,
             ", which lies in the slab ", value.buffer->inside->name, ", where other layers read it", remedy);
  for (const std::vector<Value*>* list : {&node.in, &node.reads, &node.backward_reads})
    for (size_t i = list == &node.in ? 1 : 0; i < list->size(); ++i)
      CHECK_THAT((*list)[i]->buffer != value.buffer, described(node), how, value.name, " and reads it besides", remedy);
}

// Remembers whose memory the node's backward reads.
static void mark_backward_reads(const Node& node) {
  for (const std::vector<Value*>* list : {&node.backward_reads, &node.saved})
    for (const Value* value : *list)
      if (value->buffer != nullptr) value->buffer->backward_reader = &node;
}

Value* Tape::record(std::unique_ptr<Node> node) {
  check_readable(*node);
  for (const std::vector<Value*>* list : {&node->out, &node->saved})
    for (const Value* value : *list)
      CHECK_THAT(!value->buffer->sliced, described(*node), " writes the whole slab ", value->name,
                 ", over what its slices hold. Write each slice as a value, and place() that");
  bool needs_grad = false;
  for (const Value* value : node->in) needs_grad |= value->needs_grad;
  for (Value* value : node->out) value->needs_grad = needs_grad && !value->buffer->persistent;
  CHECK_THAT(!frozen_ || !needs_grad, described(*node), " would train what frozen() must leave alone");
  node->frozen = frozen_;
  node->name = prefix_ + node->name;
  if (node->in_place() || node->donated_input()) {
    check_takeable(*node);
    for (Value* value : node->in[0]->buffer->values)
      if (value != node->out[0]) value->taken_by = node.get();
  }
  if (node->in_place()) share(node->out[0], node->in[0]);
  mark_backward_reads(*node);
  for (const std::vector<Value*>* list : {&node->out, &node->saved})
    for (Value* value : *list) value->written = true;
  nodes_.push_back(std::move(node));
  return nodes_.back()->out[0];
}

void Tape::frozen(const std::string& prefix, const std::function<void()>& body) {
  CHECK_THAT(!frozen_ && cache_length_ == 0, prefix, ": frozen() inside of itself, or on a tape for generation");
  const struct Thaw {  // also where body throws
    Tape& tape;
    ~Thaw() { tape.prefix_.clear(), tape.of_parameters_.clear(), tape.frozen_ = false; }
  } thaw{*this};
  prefix_ = of_parameters_ = prefix, frozen_ = true;
  body();
}

void Tape::named(const std::string& prefix, const std::function<void()>& body) {
  const struct Restored {
    std::string& prefix;
    std::string before;
    ~Restored() { prefix = before; }
  } restored{prefix_, prefix_};
  prefix_ += prefix;
  body();
}

std::unordered_set<const Value*> Tape::read_by_next() const {
  std::unordered_map<const Value*, size_t> next;  // the node after the writer
  std::unordered_set<const Value*> others;        // what another node reads
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const Node& node = *nodes_[n];
    for (const auto* list : {&node.in, &node.reads, &node.backward_reads, &node.backward_reads_grads})
      for (const Value* value : *list)
        if (!next.contains(value) || next[value] != n || node.frozen != nodes_[n - 1]->frozen) others.insert(value);
    for (const Value* value : node.out)
      if (!value->buffer->persistent && value->buffer->inside == nullptr) next[value] = n + 1;
  }
  std::unordered_set<const Value*> found;
  for (const auto& [value, reader] : next)
    if (!others.contains(value)) found.insert(value);
  return found;
}

void Tape::rewrite(const std::function<void(std::deque<std::unique_ptr<Node>>& nodes)>& pass) {
  CHECK_THAT(!differentiated_ && !planned_, "rewrite() comes before differentiate() and plan()");
  pass(nodes_);
  std::erase(nodes_, nullptr);
  for (Buffer& buffer : buffers_) buffer.backward_reader = nullptr;
  for (const auto& node : nodes_) mark_backward_reads(*node);
}

// -----------------------------------------------------------------------------------------------------------------
// Differentiation. In reverse order the first writer of a gradient overwrites it and the later ones accumulate: decided
// here, once, for every edge, so no kernel and no model has to know who else reads a tensor. Gradients of parameters
// accumulate over the micro-steps of a step. In the first micro-step the first writer of one overwrites it if it can; a
// gradient that no node overwrites is zeroed before.

Tape::UsesOf Tape::find_uses() const {
  UsesOf uses;
  for (size_t n = 0; n < nodes_.size(); ++n) {
    for (const Value* value : nodes_[n]->out) uses[value].writer = static_cast<int64_t>(n);
    for (const Value* value : nodes_[n]->in) uses[value].readers.push_back(static_cast<int64_t>(n));
    for (const auto* list : {&nodes_[n]->backward_reads, &nodes_[n]->saved})
      for (const Value* value : *list) ++uses[value].kept;
    for (const Value* value : nodes_[n]->backward_reads_grads) uses[value].grad_read_late = true;
  }
  return uses;
}

// May the gradient of input i of node n, which passes its gradient on, live in the memory of the output's? The first
// input may, where it is the residual stream: others then add to that memory, so nobody may read the output's gradient
// afterwards. Another input may, a sublayer's output, if this node is its only reader and its writer has taken the
// gradient before anybody adds to it.
bool Tape::may_share_gradient(const UsesOf& uses, size_t n, size_t i) const {
  const Node& node = *nodes_[n];
  const Value &value = *node.in[i], &out = *node.out[0];
  const auto known = [&](const Value* v) { return uses.contains(v) ? uses.at(v) : Uses{}; };
  const Uses use = known(&value);
  if (value.parameter != nullptr || known(&out).grad_read_late || use.grad_read_late || use.writer < 0) return false;
  size_t first = 0;
  while (!node.grad_aliases_output(first)) ++first;
  if (i == first) return true;
  if (use.readers.size() != 1 || nodes_[static_cast<size_t>(use.writer)]->in_place()) return false;
  for (size_t j = 0; j < node.in.size(); ++j) {
    if (j == i || node.in[j]->grad == nullptr || node.in[j]->grad->buffer != out.grad->buffer) continue;
    if (j != first) return false;
    const Uses stream = known(node.in[first]);
    if (stream.writer >= use.writer) return false;
    for (const int64_t reader : stream.readers)
      if (reader != static_cast<int64_t>(n) && reader >= use.writer) return false;
  }
  return true;
}

// May node n's backward write the gradient of input i over it? Nobody else reads it then, or adds to its gradient.
bool Tape::may_overwrite(const UsesOf& uses, size_t n, size_t i) const {
  const Value& value = *nodes_[n]->in[i];
  const Uses& use = uses.at(&value);
  return value.parameter == nullptr && value.taken_by == nullptr && !value.buffer->persistent &&
         value.buffer->inside == nullptr && value.buffer->values.size() == 1 && use.readers.size() == 1 &&
         use.kept == 1 && !use.grad_read_late;
}

void Tape::differentiate() {
  CHECK_THAT(!differentiated_ && !planned_, "differentiate() comes once, before plan()");
  differentiated_ = true;
  const UsesOf uses = find_uses();
  for (size_t n = nodes_.size(); n-- > 0;) {
    Node& node = *nodes_[n];
    if (node.frozen) continue;
    node.grad_modes.assign(node.in.size(), GradMode::overwrite);
    for (Value* value : node.out) {
      if (!value->needs_grad || value->grad != nullptr || node.grad_optional()) continue;
      value->grad = add_gradient(*value);
      node.zeroed.push_back(value->grad);
    }
    for (size_t i = 0; i < node.in.size(); ++i) {
      Value& value = *node.in[i];
      if (!value.needs_grad) continue;
      if (value.parameter != nullptr || value.grad != nullptr) node.grad_modes[i] = GradMode::accumulate;
      if (value.grad == nullptr) {
        value.grad = add_gradient(value);
        if (node.grad_aliases_output(i) && node.out[0]->grad != nullptr && may_share_gradient(uses, n, i))
          share(value.grad, node.out[0]->grad);
        if (node.grads_overwrite_inputs() && may_overwrite(uses, n, i)) share(value.grad, &value);
        if (value.parameter == nullptr && node.only_accumulates(i)) node.zeroed.push_back(value.grad);
      }
      if (node.in_place() && i == 0) {
        CHECK_THAT(node.grad_modes[0] == GradMode::overwrite, node.name, " works in place on ", value.name,
                   ", which has another reader");
        if (node.out[0]->grad != nullptr) share(value.grad, node.out[0]->grad);
      }
    }
  }
  find_first_writers();
}

// In the order in which gradients are written: which node writes a parameter's first, and can it overwrite?
void Tape::find_first_writers() {
  std::unordered_set<const Value*> written;
  const auto visit = [&](Node& node) {
    for (size_t i = 0; i < node.grad_modes.size(); ++i) {
      const Value* value = node.in[i];
      if (value->parameter == nullptr || value->grad == nullptr) continue;
      if (written.insert(value).second && node.can_overwrite(i)) node.grad_modes[i] = GradMode::overwrite_or_accumulate;
    }
    const std::vector<Value*> later = node.later_parameters();
    written.insert(later.begin(), later.end());
  };
  for (const auto& node : nodes_)
    if (node->grad_in_forward()) visit(*node);
  for (size_t n = nodes_.size(); n-- > 0;)
    if (!nodes_[n]->grad_in_forward()) visit(*nodes_[n]);
}

double Tape::forward_flops() const {
  double sum = 0;
  for (const auto& node : nodes_) sum += node->frozen ? 0 : node->flops();
  return sum;
}

double Tape::training_flops() const {
  double sum = 0;
  for (const auto& node : nodes_) sum += node->training_flops();
  return sum;
}

double Tape::training_bytes() const {
  double sum = 0;
  for (const auto& node : nodes_) sum += bytes_of(*node, false) + (node->frozen ? 0 : bytes_of(*node, true));
  return sum;
}

size_t Tape::last_to_add(const Parameter& row) const {
  const auto is_row = [&](const Value* value) { return value->parameter == &row; };
  for (size_t n = 0; n < nodes_.size(); ++n)
    if (std::ranges::any_of(nodes_[n]->in, is_row) || std::ranges::any_of(nodes_[n]->later_parameters(), is_row))
      return n;
  return nodes_.size();
}

void Tape::mark_bf16_only() const {
  for (const auto& [row, value] : parameters_) value->parameter->bf16_only = true;
  for (const auto& node : nodes_) {
    for (const Value* value : node->reads)
      if (value->parameter != nullptr) value->parameter->bf16_only = false;
    for (size_t i = 0; i < node->in.size(); ++i)
      if (Parameter* row = node->in[i]->parameter; row != nullptr) row->bf16_only &= node->reads_bf16_copy(i);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Replay

void Tape::allocate(Device& device, const Tensor* gradients) {
  CHECK_THAT(planned_ && device_ == nullptr, "allocate() comes once, after plan()");
  device_ = &device;
  arena_ = Arena(device, "activations", arena_bytes_);
  for (Value& value : values_) {
    if (value.parameter != nullptr) {
      const Parameter& row = *value.parameter;
      value.tensor = row.value;
      if (value.grad == nullptr) continue;
      value.grad->tensor = row.grad;
      if (gradients != nullptr)
        value.grad->tensor.data =
            static_cast<std::byte*>(gradients->data) + static_cast<size_t>(row.offset) * size_of(gradients->dtype);
    } else if (value.buffer != nullptr) {
      value.tensor = Tensor{arena_.data() + value.buffer->place(), value.dtype, value.shape};
    }
  }
  for (const auto& [value, numbers] : constants_) {
    const std::vector<float> in_f32(numbers.begin(), numbers.end());
    const void* host = real_ == Dtype::f64 ? static_cast<const void*>(numbers.data()) : in_f32.data();
    device.copy_in(value->tensor.data, host, value->tensor.bytes());
  }
  if (gradients != nullptr) find_zeroed(*gradients);
  for (const auto& node : nodes_) node->prepare();
}

// All of the flat array but the rows that a node overwrites: other rows, and the gaps between rows. The gaps must stay
// zero, though ranks may leave anything there when they exchange gradients.
void Tape::find_zeroed(const Tensor& gradients) {
  can_overwrite_ = true;
  std::vector<Range> overwritten;
  for (const auto& node : nodes_)
    for (size_t i = 0; i < node->grad_modes.size(); ++i)
      if (const Parameter* row = node->in[i]->parameter; node->grad_modes[i] == GradMode::overwrite_or_accumulate)
        overwritten.push_back({row->offset, row->offset + row->shape.numel()});
  std::sort(overwritten.begin(), overwritten.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  overwritten.push_back({gradients.numel(), gradients.numel()});
  int64_t end = 0;
  for (const Range& row : overwritten) {
    if (row.begin > end) zeroed_.push_back(part_of(gradients, {end, row.begin}));
    end = row.end;
  }
}

namespace {

// Calls body; takes its time if somebody wants it.
template <class Seconds, class F>
void timed(std::vector<Seconds>& seconds, Device& device, size_t time, F&& body) {
  if (seconds.empty()) return body();
  const auto start = std::chrono::steady_clock::now();
  body();
  device.wait();
  seconds[time].sum += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ++seconds[time].calls;
}

}  // namespace

void Tape::run(const Step& step) {
  const auto work = [&] {
    forward(step);
    if (step.training) backward(step);
  };
  if (!seconds_.empty() || after_ || step.measures) return work();  // somebody looks on, or it comes once
  Recorded& known = recorded_[step.training ? 1 + step.overwrite + 2 * step.last + 4 * step.new_weights : 0];
  if (!(known.step == step)) known = {step, {}};
  device_->replay(known.recording, work);
}

void Tape::forward(const Step& step) {
  if (mode_ == PlanMode::poison && step.training) poison(-1);
  CHECK_THAT(can_overwrite_ || !step.overwrite,
             "a tape that does not know the array of all gradients cannot overwrite it");
  if (step.training && step.overwrite)
    timed(seconds_, *device_, 2 * nodes_.size(), [&] {
      for (const Tensor& rows : zeroed_) device_->fill(rows.data, 0, rows.bytes());
    });
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const auto work = [&] { nodes_[n]->forward(step, device_->stream()); };
    const bool left_out = nodes_[n]->frozen && !step.training;
    if (!left_out && step.training) timed(seconds_, *device_, n, work);  // the profile is of training
    else if (!left_out) work();
    if (after_) after_(n, false);
    if (mode_ == PlanMode::poison && step.training) poison(static_cast<int>(n));
  }
}

void Tape::backward(const Step& step) {
  CHECK_THAT(differentiated_ && step.training, "backward without differentiate(), or of a forward-only step");
  for (size_t n = nodes_.size(); n-- > 0;) {
    const auto pass = [&] {
      for (const Value* grad : nodes_[n]->zeroed) device_->fill(grad->tensor.data, 0, grad->tensor.bytes());
      nodes_[n]->backward(step, device_->stream());
    };
    if (!nodes_[n]->frozen) timed(seconds_, *device_, 2 * nodes_.size() - 1 - n, pass);
    for (auto [work, end] = final_.equal_range(n); step.last && work != end; ++work) work->second();
    if (after_) after_(n, true);
    if (mode_ == PlanMode::poison) poison(static_cast<int>(2 * nodes_.size() - 1 - n));
  }
}

// Fills every buffer whose last use was at this time with NaN; before the first time (-1), all that are not persistent.
// Buffers that were never used (their value shares another's) have no place in the arena.
void Tape::poison(int time) {
  for (const Buffer& buffer : buffers_)
    if (!buffer.persistent && buffer.placed() && (time == -1 || buffer.last == time))
      device_->fill(arena_.data() + buffer.offset, 0xFF, buffer.bytes);
}

// -----------------------------------------------------------------------------------------------------------------
// Costs

OpCost& OpCost::operator+=(const OpCost& o) {
  calls += o.calls, seconds += o.seconds, flops += o.flops, bytes += o.bytes;
  return *this;
}

double Tape::bytes_of(const Node& node, bool backward) const {
  double sum = 0;
  const auto count = [&](const Value* value, double times) {
    if (value != nullptr) sum += times * static_cast<double>(value->bytes());
  };
  for (const Value* value : node.saved) count(value, 1);
  for (const Value* value : backward ? node.backward_work : node.forward_work) count(value, 2);
  if (!backward) {
    for (const auto* list : {&node.in, &node.reads, &node.out})
      for (const Value* value : *list) count(value, 1);
    return sum;
  }
  for (const Value* value : node.backward_reads) count(value, 1);
  for (const auto* list : {&node.out, &node.backward_reads_grads})
    for (const Value* value : *list) count(value->grad, 1);
  for (size_t i = 0; i < node.grad_modes.size(); ++i)
    count(node.in[i]->grad, node.grad_modes[i] == GradMode::overwrite ? 1 : 2);
  return sum;
}

void add_cost(std::vector<OpCost>& list, const OpCost& cost) {
  const auto same = std::find_if(list.begin(), list.end(), [&](const OpCost& c) { return c.op == cost.op; });
  if (same == list.end()) list.push_back(cost);
  else *same += cost;
}

std::vector<OpCost> Tape::costs() const {
  std::vector<OpCost> list;
  if (seconds_.empty()) return list;
  const Seconds& zeroing = seconds_.back();
  double zeros = 0;
  for (const Tensor& rows : zeroed_) zeros += static_cast<double>(rows.bytes());
  list.push_back({"zero gradients", zeroing.calls, zeroing.sum, 0, static_cast<double>(zeroing.calls) * zeros});
  for (size_t time = 0; time < 2 * nodes_.size(); ++time) {
    const bool backward = time >= nodes_.size();
    const Node& node = *nodes_[backward ? 2 * nodes_.size() - 1 - time : time];
    if (backward && node.frozen) continue;
    const double calls = static_cast<double>(seconds_[time].calls);
    const double both = node.training_flops();
    const double flops = node.grad_in_forward() ? (backward ? 0 : both) : backward ? both - node.flops() : node.flops();
    const OpCost cost{std::string(node.op()) + (backward ? " backward" : ""), seconds_[time].calls, seconds_[time].sum,
                      calls * flops, calls * bytes_of(node, backward)};
    add_cost(list, cost);
  }
  return list;
}

}  // namespace crossply
