// The static tape. A model's forward is written once, as calls that append nodes; each node calls one kernel forward
// and one backward. differentiate() visits the nodes once in reverse and decides for each edge whether a gradient is
// overwritten or accumulated. plan() gives every buffer an offset in one arena from its lifetime. A step then runs a
// fixed list of nodes in memory that is there already, and takes no decision:
//
//   Tape tape(Dtype::f32);
//   Value* tokens = tape.input("tokens", Shape{1, 3}, Dtype::i32);  // (B, T)
//   Value* targets = tape.input("targets", Shape{1, 3}, Dtype::i32);
//   Value* weight = tape.parameter(params.at("weight"));  // (V, C)
//   Value* losses = ops::cross_entropy(tape, "loss", {ops::embedding(tape, "x", tokens, weight), weight}, targets);
//   tape.differentiate(), tape.plan(PlanMode::reuse), tape.allocate(*device);
//   device->copy_in(tokens->tensor.data, text, 12), device->copy_in(targets->tensor.data, text + 1, 12);
//   tape.run(Step{true});  // losses->tensor has the losses, weight->grad->tensor the gradient of their sum
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/device.h"
#include "engine/params.h"

namespace crossply {

// What changes from run to run of a tape; kernels get it when they run, never when they are recorded.
struct Step {
  bool training = false;  // false: forward only (evaluation, generation); the loss head then leaves gradients alone
  double grad_scale = 1;  // gradients are those of this times the sum of the losses
  int64_t position = 0;   // generation: tokens already in the key/value cache
  // Training:
  bool overwrite = false;    // the parameters' gradients may hold anything: they are overwritten, not accumulated
  bool last = false;         // the last micro-step: gradients are final, so the reduction may start
  bool new_weights = false;  // the parameters may have changed since the step before: they are quantized again
  bool measures = false;     // nothing is quantized: only the amax of each tensor is found, for its first scale
  // The same as run i = 0, 1, ... of several that add up in the same gradients: the first alone may overwrite them.
  Step nth(int64_t i) const {
    Step step = *this;
    step.overwrite = overwrite && i == 0;
    return step;
  }
  bool operator==(const Step&) const = default;
};

struct Node;
struct Value;

// Memory with one lifetime, in time indices: the forward of node i is at time i, its backward at 2n-1-i.
struct Buffer {
  std::string name;  // of the value it was made for
  size_t bytes = 0;
  size_t offset = 0;           // in the arena; within `inside` if that is set
  std::vector<Value*> values;  // who lives here
  int first = -1, last = -1;   // time of the first and last use; -1: never used

  bool persistent = false;                // inputs, results, caches, constants: alive throughout
  bool sliced = false;                    // a slab, which is written slice by slice
  Buffer* inside = nullptr;               // part of a slab, or beside others in one buffer
  const Node* backward_reader = nullptr;  // a node whose backward reads it

  size_t place() const { return offset + (inside != nullptr ? inside->offset : 0); }  // in the arena
  bool placed() const { return inside == nullptr && (persistent || first >= 0); }     // has it a place of its own?
};

// The type of statistics, coefficients, losses and parameters: f32 where activations are bf16.
inline Dtype accumulation_type(Dtype real) { return real == Dtype::bf16 ? Dtype::f32 : real; }

// A tensor of the tape. The Tensor is valid after allocate().
struct Value {
  std::string name;
  Shape shape;
  Dtype dtype = Dtype::f32;
  Tensor tensor;
  Value* grad = nullptr;           // same shape, named "d:" and this name; made by differentiate()
  Parameter* parameter = nullptr;  // the row it is; then it has no buffer, because its table has its memory
  Buffer* buffer = nullptr;

  bool needs_grad = false;
  bool written = false;               // by a node
  const Node* taken_by = nullptr;     // the node that took the memory over: no later node may read the value
  const Value* fused_into = nullptr;  // an op computes it on the way to this one: it is never in memory by itself

  size_t bytes() const { return static_cast<size_t>(shape.numel()) * size_of(dtype); }
};

// What a backward does to the gradient of an input. The first node that writes a parameter's gradient has
// overwrite_or_accumulate: it overwrites with Step::overwrite, else it accumulates.
enum class GradMode : char { overwrite, accumulate, overwrite_or_accumulate };

// One op of the step: lists say what it reads and writes, two functions compute. The functions of kernels/*/ops.h fill
// the lists; the tape reads them to differentiate, to plan and to print. What only some ops need is a function with a
// default.
struct Node {
  std::string name;
  std::vector<Value*> in;     // what the forward reads and the backward differentiates
  std::vector<Value*> reads;  // what the forward reads besides, without a gradient from this node
  std::vector<Value*> out;    // what the forward writes
  std::vector<Value*> saved;  // what it writes for the backward only
  // What the backward reads besides `saved` and the gradients of `out`: values (or slabs), also of later nodes, and the
  // gradients of values of later nodes.
  std::vector<Value*> backward_reads, backward_reads_grads;
  // Scratch memory for this node's forward alone, and for its backward alone. No other node reads it.
  std::vector<Value*> forward_work, backward_work;

  // Decided by record():
  bool frozen = false;  // by Tape::frozen(): it has no backward, nothing is kept for one, and evaluation passes over it

  // Decided by differentiate():
  std::vector<GradMode> grad_modes;  // per input; empty on a tape that only goes forward
  std::vector<Value*> zeroed;        // gradients that the tape zeroes before the backward: no node overwrites them

  virtual ~Node() = default;
  virtual const char* op() const = 0;
  virtual void forward(const Step& step, Stream stream) = 0;
  virtual void backward(const Step& step, Stream stream) = 0;
  virtual std::string setting() const { return ""; }  // numbers by which nodes of equal lists differ: an epsilon
  virtual void prepare() {}  // called once, when all tensors have their addresses: lists of them are made here

  // Costs:
  // Of the forward, two per multiply-add: matrix products, attention, mixtures.
  virtual double flops() const { return 0; }
  virtual double training_flops() const { return (frozen ? 1 : 3) * flops(); }  // of both; a backward is two forwards
  virtual ScratchBytes scratch() const { return {}; }  // on a GPU, where it is more than a few elements for each row
  virtual bool reads_bf16_copy(size_t /*i*/) const { return false; }  // of parameter in[i], nothing but the bf16 copy

  // Gradients:
  // Can it overwrite the gradient of in[i], a parameter, or only accumulate?
  virtual bool can_overwrite(size_t /*i*/) const { return false; }
  // Can it only accumulate the gradient of in[i]? The tape zeroes it first, unless another node overwrites it.
  virtual bool only_accumulates(size_t /*i*/) const { return false; }
  virtual bool grad_in_forward() const { return false; }    // the loss head writes its input's in the training forward
  virtual bool grad_optional() const { return false; }      // out[0]'s stays null, not zero, if no node writes it
  virtual bool may_repeat_inputs() const { return false; }  // it accumulates one gradient after the other
  // Parameters of later nodes whose gradients this backward also accumulates.
  virtual std::vector<Value*> later_parameters() const { return {}; }

  // Memory:
  virtual bool in_place() const { return false; }  // out[0] takes in[0]'s memory; their gradients share memory, too
  virtual bool donated_input() const { return false; }  // in[0]'s memory is this node's from now on, to write there
  // in[i]'s gradient is that of out[0]: the tape lets them share memory where no other node reads it, and backward()
  // leaves such a gradient alone. The first such input is the residual stream.
  virtual bool grad_aliases_output(size_t /*i*/) const { return false; }
  // The backward may write an input's gradient over the input: done where no other node needs the input.
  virtual bool grads_overwrite_inputs() const { return false; }
  // Outputs of one size, as of layers that share their input, lie one behind the other where they live about as long,
  // and so do their gradients: a GPU then computes them as one matrix product.
  virtual bool contiguous_outputs() const { return false; }

 protected:
  const Tensor& input(size_t i) const { return in[i]->tensor; }
  const Tensor& output() const { return out[0]->tensor; }
  const Tensor& doutput() const { return out[0]->grad->tensor; }
  const Tensor& dinput(size_t i) const { return in[i]->grad->tensor; }
  Grad gradient(size_t i) const { return {in[i]->grad->tensor, grad_modes[i] != GradMode::overwrite}; }
  Grad gradient(size_t i, const Step& step) const {
    return {in[i]->grad->tensor, grad_modes[i] == GradMode::accumulate ||
                                     (grad_modes[i] == GradMode::overwrite_or_accumulate && !step.overwrite)};
  }
  // For a backward that can only overwrite in[i]'s gradient.
  void check_only_reader(size_t i) const {
    CHECK_THAT(grad_modes[i] == GradMode::overwrite, name, " must be the only reader of ", in[i]->name);
  }
};

// A tensor whose slices are written by different layers: "all layers so far" is then one block of memory, not a copy.
struct Slab {
  Value* all = nullptr;  // (slices, ...)
};

// A tensor that is quantized to eight bits (kernels/block/quantize.h) has three scalars on the device, in f32.
struct QuantizationScalars {
  Value *scale, *inverse;  // the factor before rounding, and 1 / scale: the trainer sets both
  Value* amax;             // the largest |x| of all runs since the trainer set it to 0
};
struct QuantizedTensor {
  std::string name;
  float max;  // that the eight bits hold
};

// The cost of all calls of one op, forward or backward.
struct OpCost {
  std::string op;
  int64_t calls = 0;
  double seconds = 0;
  double flops = 0;  // two per multiply-add of matrix products, attention and mixtures
  double bytes = 0;  // of all tensors it names, read and written once: a floor for what must move
  OpCost& operator+=(const OpCost& o);
};
// Adds to the cost of the same op, if the list has one.
void add_cost(std::vector<OpCost>& list, const OpCost& cost);

// reuse: memory is shared by buffers that are never alive together. distinct: every buffer has its own memory (to look
// at intermediates). poison: distinct, and a buffer is filled with NaN when it dies. All three give the same bits.
enum class PlanMode { reuse, distinct, poison };
inline const std::vector<std::string> plan_modes =  // in this order
    {"reuse", "distinct", "poison"};
PlanMode plan_mode(const std::string& name);  // throws Exit::usage for an unknown name

class Tape {
 public:
  // real: what activations are stored in; a bf16 tape multiplies with the bf16 copies of its parameters.
  // cache_length > 0 records a tape for generation: attention then appends to key/value caches of that length.
  explicit Tape(Dtype real, int64_t cache_length = 0) : real_(real), cache_length_(cache_length) {}

  // --- recording ---
  Value* input(const std::string& name, Shape shape, Dtype dtype);
  Value* constant(const std::string& name, Shape shape, std::vector<double> numbers);
  Value* parameter(Parameter& row);
  Value* activation(const std::string& name, Shape shape);
  Value* statistic(const std::string& name, Shape shape);  // never bf16: what a backward or a mixture needs exactly
  Value* result(const std::string& name, Shape shape);     // persistent: the caller reads it after the run
  // Scratch memory of an op, of any dtype. It persists across runs, or lives as long as forward_work or backward_work.
  Value* memory(const std::string& name, Shape shape, Dtype dtype, bool persistent) {
    return add_value(name, shape, dtype, persistent);
  }
  Slab slab(const std::string& name, int64_t slices, Shape slice);
  // From now on `value`, which some node has written, lives in slice i of the slab. No copy.
  void place(Value* value, const Slab& slab, int64_t i);
  // Two values in the same memory. An in-place node on one takes both.
  void share(Value* value, const Value* with);
  // Returns the node's first output. Refuses, naming op, value and remedy, what would compute with overwritten memory
  // or lose a gradient: to read a value that an earlier node took or none wrote, to take one that is still needed, and
  // to write a slab as a whole.
  Value* record(std::unique_ptr<Node> node);
  // Calls body. What it records is there for the training loss alone and learns nothing, as a teacher in distillation.
  // Its parameters need no gradients, evaluation leaves it out, and all its names begin with `prefix`.
  void frozen(const std::string& prefix, const std::function<void()>& body);
  // Calls body. The names of what it records begin with `prefix`, but those of parameters do not: of a model that runs
  // several times.
  void named(const std::string& prefix, const std::function<void()>& body);
  int64_t cache_length() const { return cache_length_; }
  Dtype dtype() const { return real_; }
  // Gives a value a name by which probes find it in every model: "hidden.3". Costs a step nothing.
  void mark(const std::string& name, Value* value) { marks_.emplace_back(prefix_ + name, value); }
  const std::vector<std::pair<std::string, Value*>>& marks() const { return marks_; }  // in the order of the calls
  // Called before a model is recorded whose linear layers are to multiply in eight bits when it is trained.
  void use_eight_bits() { eight_bits_ = true; }
  bool eight_bits() const { return eight_bits_ && !frozen_; }
  // Registers one more tensor that is quantized to eight bits.
  QuantizationScalars add_quantized(const std::string& name, float max);
  const std::vector<QuantizedTensor>& quantized() const { return quantized_; }
  // The scalars of all rounded tensors, in the order of the calls: flat, f32. After allocate().
  Tensor scales() const { return scalars_of(scales_); }
  Tensor inverses() const { return scalars_of(inverses_); }
  Tensor amaxes() const { return scalars_of(amaxes_); }
  // Called before a model is recorded that somebody will look into: nodes that compute only what is looked at come too.
  void enable_probes() { probed_ = true; }
  bool probed() const { return probed_; }

  // --- between recording and differentiate(): fusion (kernels/block/linear.cpp) ---
  // The outputs that the next node alone reads, forward and backward, and that no call placed: an op that does the
  // work of both nodes may leave them out.
  std::unordered_set<const Value*> read_by_next() const;
  // To be changed by a pass. Nodes it sets to null are then left out.
  void rewrite(const std::function<void(std::deque<std::unique_ptr<Node>>& nodes)>& pass);

  // --- after recording: differentiate (training only), plan, allocate, in this order ---
  void differentiate();
  void plan(PlanMode mode);
  // The planned arena; parameters must have been allocated before. gradients: the parameters' go there, into their
  // table's flat array or one like it. Without it they go into the table's too, but then there is no Step::overwrite.
  void allocate(Device& device, const Tensor* gradients = nullptr);
  size_t arena_bytes() const { return arena_bytes_; }
  double forward_flops() const;   // of an evaluation
  double training_flops() const;  // forward and backward
  double training_bytes() const;  // the same, as OpCost has them
  // The last node whose backward adds to the gradient of this parameter; nodes().size() if there is none.
  size_t last_to_add(const Parameter& row) const;
  // Marks the parameters of which all nodes read nothing but the bf16 copy.
  void mark_bf16_only() const;

  // --- run ---
  void forward(const Step& step);
  void backward(const Step& step);
  // Both, the backward in training only; on a device that records, the same step comes from its recording.
  void run(const Step& step);

  // Called after the backward of this node in every run with Step::last, on a device that records as part of it.
  void after_backward(size_t node, std::function<void()> work) { final_.emplace(node, std::move(work)); }
  // From now on called after every node n's forward and backward: to look at intermediates, or to change them.
  void watch(std::function<void(size_t n, bool backward)> after) { after_ = std::move(after); }
  // From now on every node's time in training is taken.
  void start_profile() { seconds_.assign(2 * nodes_.size() + 1, {}); }
  std::vector<OpCost> costs() const;  // in the order in which ops first run

  // The step, forward and backward, as a table a person can read (dump.cpp). notes: lines after the backward of nodes.
  std::string dump(const std::multimap<size_t, std::string>& notes = {}) const;
  std::string memory_report() const;  // the peak and who is alive at it
  const std::deque<std::unique_ptr<Node>>& nodes() const { return nodes_; }
  const std::deque<Value>& values() const { return values_; }  // gradients too

 private:
  Value* add_gradient(const Value& of);
  Value* add_scalar(const std::string& name, Buffer*& all);
  Tensor scalars_of(const Buffer* all) const;
  static void check_readable(const Node& node);
  static void check_takeable(const Node& node);
  struct Uses {
    int64_t writer = -1;           // the node that made the value
    std::vector<int64_t> readers;  // whose backward adds to its gradient
    int64_t kept = 0;              // by so many backwards
    bool grad_read_late = false;   // in somebody's backward_reads_grads
  };
  using UsesOf = std::unordered_map<const Value*, Uses>;
  UsesOf find_uses() const;
  bool may_share_gradient(const UsesOf& uses, size_t n, size_t i) const;
  bool may_overwrite(const UsesOf& uses, size_t n, size_t i) const;
  Value* add_value(const std::string& name, Shape shape, Dtype dtype, bool persistent);
  void find_first_writers();
  void find_zeroed(const Tensor& gradients);
  void find_lifetimes();
  void find_contiguous();
  void put_contiguous(const std::string& name, const std::vector<Buffer*>& list);
  void poison(int time);
  std::string totals() const;
  double bytes_of(const Node& node, bool backward) const;

  struct Seconds {
    int64_t calls = 0;
    double sum = 0;
  };

  Dtype real_;
  int64_t cache_length_;
  std::string prefix_, of_parameters_;  // of names, while frozen() or named() records
  bool frozen_ = false;
  bool differentiated_ = false, planned_ = false, probed_ = false, eight_bits_ = false;
  PlanMode mode_ = PlanMode::reuse;
  std::deque<Value> values_;
  std::deque<Buffer> buffers_;
  std::unordered_map<const Parameter*, Value*> parameters_;
  std::deque<std::unique_ptr<Node>> nodes_;
  std::vector<std::pair<Value*, std::vector<double>>> constants_;
  std::vector<std::pair<std::string, Value*>> marks_;
  std::vector<QuantizedTensor> quantized_;
  Buffer *scales_ = nullptr, *inverses_ = nullptr, *amaxes_ = nullptr;  // a number for each of these
  std::function<void(size_t, bool)> after_;
  std::multimap<size_t, std::function<void()>> final_;  // of one node in the order in which they came
  bool can_overwrite_ = false;                          // the flat array of gradients is known
  std::vector<Tensor> zeroed_;    // its parts that no node overwrites: zeroed with Step::overwrite
  std::vector<Seconds> seconds_;  // by time (forward n, backward 2N-1-n), then of that; empty without a profile
  size_t arena_bytes_ = 0;
  Arena arena_;
  Device* device_ = nullptr;
  struct Recorded {
    Step step;
    Recording recording;
  } recorded_[9];  // of evaluation, and of training by overwrite, last and new_weights
};

}  // namespace crossply
