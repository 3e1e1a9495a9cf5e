#include <algorithm>
#include <exception>
#include <unordered_set>

#include "kernels/cpu/cpu.h"
#include "kernels/reference/ops.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;  // numbers read

template <class T>
T* scratch(int64_t count, int slot) {
  return reinterpret_cast<T*>(scratch_f32(static_cast<size_t>(count) * sizeof(T) / sizeof(float), slot));
}

// `count` numbers of the tensor from `first` on: where they are, or converted into buffer.
template <class T>
const T* numbers(T* buffer, const Tensor& from, int64_t first, int64_t count) {
  if (from.dtype == DtypeOf<T>::value) return from.as<T>() + first;
  std::copy_n(from.as<bf16>() + first, count, buffer);
  return buffer;
}

template <class S, class T>
void write(S* to, const T* from, int64_t count, bool accumulate) {
  for (int64_t i = 0; i < count; ++i) to[i] = S(accumulate ? T(to[i]) + from[i] : from[i]);
}
template <class T>
void write(const Tensor& to, int64_t first, const T* from, int64_t count, bool accumulate) {
  if (to.dtype == DtypeOf<T>::value) return write(to.as<T>() + first, from, count, accumulate);
  if constexpr (std::is_same_v<T, float>) write(to.as<bf16>() + first, from, count, accumulate);
}

// What a thread needs of its own to call the loops, part after part.
template <class T>
struct Caller {
  const ReferenceNode& node;
  const T** in;
  T **din, *converted, *dins, *out;

  explicit Caller(const ReferenceNode& n) : node(n) {
    const int64_t count = static_cast<int64_t>(n.inputs.size());
    const int64_t out_size = n.out[0]->shape.numel() / n.parts;
    int64_t size = 0;
    for (const auto& input : n.inputs) size += input.size;
    T** lists = scratch<T*>(2 * count, 0);
    in = const_cast<const T**>(lists), din = lists + count;
    converted = scratch<T>(2 * size + out_size, 1), dins = converted + size, out = dins + size;
  }

  void read(int64_t part) {
    T* buffer = converted;
    for (size_t i = 0; i < node.inputs.size(); buffer += node.inputs[i++].size) {
      const auto [size, whole] = node.inputs[i];
      in[i] = numbers(buffer, node.in[i]->tensor, whole ? 0 : part * size, size);
    }
  }
  void forward(int64_t part) {
    const Tensor& to = node.out[0]->tensor;
    const int64_t size = to.numel() / node.parts;
    read(part);
    node.loops->forward(out, in);
    write(to, part * size, out, size, false);
  }
  // The gradients of whole inputs are added to `sums`, one input after the other.
  void backward(int64_t part, T* sums) {
    const Tensor& dout = node.out[0]->grad->tensor;
    const int64_t size = dout.numel() / node.parts;
    read(part);
    T* buffer = dins;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      T*& next = node.inputs[i].whole ? sums : buffer;
      din[i] = next, next += node.inputs[i].size;
    }
    std::fill(dins, buffer, T(0));
    node.loops->backward(din, numbers(out, dout, part * size, size), in);
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const auto [count, whole] = node.inputs[i];
      if (!whole && node.in[i]->grad != nullptr)
        write(node.in[i]->grad->tensor, part * count, din[i], count, node.grad_modes[i] != GradMode::overwrite);
    }
  }
};

// Threads take whole blocks; the shapes alone decide about the blocks. Rethrows what the loops threw.
template <class F>
void for_blocks(const ReferenceNode& node, int64_t blocks, F&& body) {
  int64_t work = node.out[0]->shape.numel();
  for (const auto& input : node.inputs) work += node.parts * input.size;
  std::exception_ptr error;
  parallel_for(blocks, work <= grain ? blocks : 1, [&](int64_t begin, int64_t end) {
    try {
      body(begin, end);
    } catch (...) {  // no exception may leave a parallel region
#pragma omp critical(reference_loops)
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

template <class T>
void forward_of(const ReferenceNode& node) {
  for_blocks(node, node.parts, [&](int64_t begin, int64_t end) {
    Caller<T> caller(node);
    for (int64_t part = begin; part < end; ++part) caller.forward(part);
  });
}

// The gradients of whole inputs are sums over the parts: a partial sum for each block of parts, then the sum of these.
template <class T>
void backward_of(const ReferenceNode& node) {
  int64_t size = 0;
  for (const auto& input : node.inputs) size += input.whole ? input.size : 0;
  const int64_t parts = node.parts, blocks = std::min<int64_t>(parts, 32);
  T* sums = scratch<T>(blocks * size, 2);
  std::fill_n(sums, blocks * size, T(0));
  for_blocks(node, blocks, [&](int64_t begin, int64_t end) {
    Caller<T> caller(node);
    for (int64_t b = begin; b < end; ++b)
      for (int64_t part = parts * b / blocks; part < parts * (b + 1) / blocks; ++part)
        caller.backward(part, sums + b * size);
  });
  for (int64_t b = 1; b < blocks; ++b)
    for (int64_t i = 0; i < size; ++i) sums[i] += sums[b * size + i];
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!node.inputs[i].whole) continue;
    if (node.in[i]->grad != nullptr)
      write(node.in[i]->grad->tensor, 0, sums, node.inputs[i].size, node.grad_modes[i] != GradMode::overwrite);
    sums += node.inputs[i].size;
  }
}

// Does the value depend on the tokens, or on parameters and constants only?
bool is_of_tokens(const Tape& tape, const Value* value) {
  std::unordered_set<const Value*> wanted = {value};
  for (size_t n = tape.nodes().size(); n-- > 0;) {
    const Node& node = *tape.nodes()[n];
    const bool makes = std::any_of(node.out.begin(), node.out.end(), [&](Value* v) { return wanted.contains(v); });
    if (!makes) continue;
    wanted.insert(node.in.begin(), node.in.end());
    wanted.insert(node.reads.begin(), node.reads.end());
  }
  return std::any_of(wanted.begin(), wanted.end(), [](const Value* v) { return v->dtype == Dtype::i32; });
}

void refuse_gpu(const ReferenceNode& node, Stream stream) {
  if (stream.backend == Backend::cuda)
    fail(Exit::device, node.name, ": ", node.op(), " has only its plain loops so far, no CUDA kernel. Use --device cpu",
         ", or write its family (docs/add-a-connection.md)");
}

}  // namespace

void ReferenceNode::forward(const Step&, Stream stream) {
  refuse_gpu(*this, stream);
  if (output().dtype == Dtype::f64) forward_of<double>(*this);
  else forward_of<float>(*this);
}

void ReferenceNode::backward(const Step&, Stream stream) {
  refuse_gpu(*this, stream);
  if (output().dtype == Dtype::f64) backward_of<double>(*this);
  else backward_of<float>(*this);
}

Value* ops::record_loops(Tape& t, const std::string& name, const std::vector<Value*>& in, Shape shape,
                         std::unique_ptr<ReferenceLoops> loops) {
  CHECK_THAT(shape.rank >= 2 && !in.empty(), name, ": ", loops->name(), " makes (B, T, ...) of one input or more, not ",
             shape.str(), " of ", in.size());
  if (t.cache_length() > 0 && loops->per_sequence())
    fail(Exit::usage, name, ": ", loops->name(), " computes whole sequences, and generation has one token at a time");
  auto node = make_node<ReferenceNode>(name, in, {t.activation(name, shape)});
  node->parts = loops->per_sequence() ? shape[0] : shape[0] * shape[1];
  for (const Value* value : in) {
    CHECK_THAT(value->dtype != Dtype::i32, name, " reads ", value->name, ", which is no real number");
    const bool whole = !is_of_tokens(t, value);
    CHECK_THAT(whole || (value->shape.rank >= 2 && value->shape[0] == shape[0] && value->shape[1] == shape[1]), name,
               " makes ", shape.str(), " and reads ", value->name, value->shape.str(), ", which has other tokens");
    node->inputs.push_back({value->shape.numel() / (whole ? 1 : node->parts), whole});
  }
  node->loops = std::move(loops);
  node->backward_reads = in;
  return t.record(std::move(node));
}

}  // namespace crossply
