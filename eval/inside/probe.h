// A look into a model while it computes: copies of what a forward makes on its way, by name, and a hand that changes
// one of them. It is the recorded model itself that runs (models/model.h), so there is nothing here that knows how an
// architecture computes.
//
//   Probe probe(model, 1, T);
//   probe.keep("hidden.2");
//   probe.change("gate.3", [](std::vector<double>& gates) { std::ranges::fill(gates, 0.0); });
//   probe.run(tokens, targets);
//   probe.at("hidden.2");  // (1, T, C)
//
// Names, layers i from 0: those of record_model, and what the layer's attention reads and puts out, whatever its
// connection has made of queries, keys and values (of a stack, in its last pass): query.i, key.i, value.i,
// (B, T, H or K, D), after norms, rotation and routing, and attended.i (B, T, H, D). Where a layer has several
// attentions, the second one's are query.i.2.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "eval/loaded_model.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/ops.h"
#include "models/model.h"

namespace crossply {

// The numbers of a tensor of floats, from the device, and back to it.
std::vector<double> copy_of(const Tensor& tensor, Device& device);
void put_back(const std::vector<double>& numbers, const Tensor& tensor, Device& device);
// Throws Exit::not_finite: says that this of the model is not finite, and what to do.
[[noreturn]] void fail_not_finite(const std::string& model, const std::string& what);

// What the queries of an attention op see. bounds: (B, T, 2), of documents, as find_bounds() has them; null: a sequence
// is one.
AttentionSizes sizes_of(const ops::AttentionNode& node, const int32_t* bounds = nullptr);

// What one attention op has just read, copied from the device.
class AttentionInputs {
 public:
  AttentionInputs(const ops::AttentionNode& node, Device& device, const AttentionSizes& sizes);
  int64_t T() const { return sizes_.T; }
  // Of all that the op computed from it.
  bool finite_output() const { return finite_output_; }
  // Of sequence b and query head h the first n rows and columns of its probabilities, (n, n): softmax of scale q k over
  // the columns that a row sees, 0 elsewhere; without the causal mask, which is not what the op computes, over all n.
  void probabilities(int64_t b, int64_t h, int64_t n, double* P, bool causal_mask = true) const;

 private:
  double scale_;
  AttentionSizes sizes_;
  bool finite_output_;
  std::vector<double> q_, k_;  // (B, T, H, D), (B, T, K, D)
};

// Names of values in few words, neighbouring layers as one: "hidden.0-6 gate.2,5-6 query.1-5.2".
std::string names_in_short(const std::vector<std::string>& names);

class Probe {
 public:
  // The parameters must have been allocated. name: of the model, for messages. documents: attention stays within them.
  Probe(Device& device, ParameterTable& params, const Config& config, int64_t B, int64_t T, const std::string& name,
        const DocumentMark& documents = {});
  Probe(LoadedModel& model, int64_t B, int64_t T)
      : Probe(*model.device, model.params, model.config, B, T, model.dir, model.documents) {}

  std::vector<std::string> names() const;  // in the order in which the forward makes the values
  bool has(const std::string& name) const { return places_.contains(name); }
  // These throw Exit::usage, with the names that there are, for one that there is not.
  Shape shape(const std::string& name) const { return place(name).value->shape; }
  // Are these two names of one and the same value?
  bool same_value(const std::string& a, const std::string& b) const { return place(a).value == place(b).value; }
  // From now on every run copies this value, for at().
  void keep(const std::string& name);
  // From now on every run calls by(numbers) right after the value was made, and what it leaves there is what the rest
  // of the forward reads; null: no longer. at() has the changed numbers.
  void change(const std::string& name, std::function<void(std::vector<double>&)> by);

  // One attention op of the model.
  struct Attention {
    size_t node;    // of the tape
    int layer;      // from 0
    int64_t heads;  // H
    int64_t first;  // of these among the heads of its layer
    int64_t end() const { return first + heads; }
  };
  const std::vector<Attention>& attentions() const { return attentions_; }  // in the order of the forward
  // What its queries see, in the documents of the run in progress, or of the last one.
  AttentionSizes sizes(const Attention& one) const;
  // From now on every run calls see(i, inputs) after the forward of attentions()[i].
  void watch_attention(std::function<void(size_t i, const AttentionInputs& inputs)> see) { see_ = std::move(see); }

  // Of one run: of the model's products and attention, and of its activations.
  double forward_flops() const { return tape_.forward_flops(); }
  double bytes() const { return static_cast<double>(tape_.arena_bytes()); }

  // A forward of tokens (B, T) with targets (B, T), -1 where nothing is scored; null: nowhere. Throws Exit::not_finite
  // where a value that is kept, what the last block puts out or a loss is not finite.
  void run(const int32_t* tokens, const int32_t* targets = nullptr);
  const std::vector<double>& at(const std::string& name) const;  // of the last run; the name must be kept
  const std::vector<double>& losses() const { return losses_; }  // of the last run, (B, T), 0 where nothing is scored

 private:
  struct Place {
    size_t node;  // that writes it
    Value* value;
  };
  const Place& place(const std::string& name) const;
  const ops::AttentionNode& node_of(const Attention& one) const;
  void add_places();
  void after(size_t n);

  Device& device_;
  std::string name_;
  Tape tape_;
  Graph graph_;
  std::vector<Attention> attentions_;
  std::map<std::string, Place> places_;
  std::map<std::string, std::vector<double>> kept_;
  std::map<std::string, std::function<void(std::vector<double>&)>> changes_;
  std::function<void(size_t, const AttentionInputs&)> see_;
  std::string last_;  // hidden.L
  std::vector<double> losses_;
};

}  // namespace crossply
