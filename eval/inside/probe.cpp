#include "eval/inside/probe.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "engine/numbers.h"
#include "models/batch/batch_model.h"

namespace crossply {
std::vector<double> copy_of(const Tensor& tensor, Device& device) {
  std::vector<double> numbers;
  with_real(tensor.dtype, [&](auto real) {
    std::vector<decltype(real)> host(static_cast<size_t>(tensor.numel()));
    device.copy_out(host.data(), tensor.data, tensor.bytes());
    numbers.assign(host.begin(), host.end());
  });
  return numbers;
}

void put_back(const std::vector<double>& numbers, const Tensor& tensor, Device& device) {
  with_real(tensor.dtype, [&](auto real) {
    std::vector<decltype(real)> host(numbers.size());
    std::transform(numbers.begin(), numbers.end(), host.begin(), [](double x) { return decltype(real)(x); });
    device.copy_in(tensor.data, host.data(), tensor.bytes());
  });
}

namespace {

bool all_finite(const std::vector<double>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x); });
}

// The layer of a node: names begin with "L3.".
int layer_of(const Node& node) {
  const auto layer = node.name[0] == 'L' ? parse_integer(node.name.substr(1, node.name.find('.') - 1)) : std::nullopt;
  CHECK_THAT(layer, node.op(), " ", node.name, " does not say by its name, like L3.attn, which layer it belongs to");
  return static_cast<int>(*layer);
}

}  // namespace

void fail_not_finite(const std::string& model, const std::string& what) {
  fail(Exit::not_finite, model, ": ", what,
       " is not finite; the weights are too large, so give an earlier checkpoint, or train again at a lower rate");
}

std::string names_in_short(const std::vector<std::string>& names) {
  struct Runs {
    std::string text;
    int64_t first, last;  // layers, of the run that is not yet in the text
    void end() { text += str(text.ends_with('.') ? "" : ",", first, last > first ? str("-", last) : ""); }
  };
  std::vector<std::pair<std::string, std::string>> order;  // what stands before and after the layer
  std::map<std::pair<std::string, std::string>, Runs> all;
  for (const std::string& name : names) {
    const size_t dot = name.find('.'), after = std::min(name.find('.', dot + 1), name.size());
    const std::string before = name.substr(0, dot + 1), rest = name.substr(after);
    const int64_t layer = parse_integer(name.substr(dot + 1, after - dot - 1)).value_or(0);
    const auto [found, is_new] = all.try_emplace({before, rest}, Runs{before, layer, layer});
    if (is_new) order.emplace_back(before, rest);
    else if (layer != found->second.last + 1) found->second.end(), found->second.first = layer;
    found->second.last = layer;
  }
  std::string out;
  for (const auto& key : order) {
    all.at(key).end();
    out += (out.empty() ? "" : " ") + all.at(key).text + key.second;
  }
  return out;
}

AttentionSizes sizes_of(const ops::AttentionNode& node, const int32_t* bounds) {
  const Shape &q = node.in[0]->shape, &k = node.in[1]->shape;
  AttentionSizes z{q[0], q[1], q[2], k[2], q[3], q[1], 0};
  if (node.window > 0) z.window = node.window;
  z.documents = bounds;
  return z;
}

AttentionInputs::AttentionInputs(const ops::AttentionNode& node, Device& device, const AttentionSizes& sizes)
    : scale_(node.scale),
      sizes_(sizes),
      finite_output_(all_finite(copy_of(node.out[0]->tensor, device))),
      q_(copy_of(node.in[0]->tensor, device)),
      k_(copy_of(node.in[1]->tensor, device)) {}

void AttentionInputs::probabilities(int64_t b, int64_t h, int64_t n, double* P, bool causal_mask) const {
  std::fill_n(P, n * n, 0.0);
  const AttentionSizes& z = sizes_;
  for (int64_t t = 0; t < n; ++t) {
    const double* q = &q_[static_cast<size_t>(z.query_head(b, h) + t * z.query_stride)];
    double *row = P + t * n, max = -INFINITY, sum = 0;
    const int64_t first = causal_mask ? z.lower(b, t) : 0, last = causal_mask ? t : n - 1;
    for (int64_t j = first; j <= last; ++j) {
      const double* k = &k_[static_cast<size_t>(z.key_head(b, h / z.group) + j * z.key_stride)];
      double dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < z.D; ++d) dot += q[d] * k[d];
      row[j] = scale_ * dot;
      max = std::max(max, row[j]);
    }
    for (int64_t j = first; j <= last; ++j) sum += row[j] = std::exp(row[j] - max);
    for (int64_t j = first; j <= last; ++j) row[j] /= sum;
  }
}

Probe::Probe(Device& device, ParameterTable& params, const Config& config, int64_t B, int64_t T,
             const std::string& name, const DocumentMark& documents)
    : device_(device), name_(name), tape_(params.dtype()), last_(str("hidden.", applications_of(config).count())) {
  tape_.enable_probes();
  graph_ = record_model(tape_, params, config, B, T, {.documents = documents});
  std::map<int, int64_t> heads;  // of each layer so far
  for (size_t n = 0; n < tape_.nodes().size(); ++n)
    if (const auto* node = dynamic_cast<const ops::AttentionNode*>(tape_.nodes()[n].get())) {
      if (node->name.starts_with("pass.")) continue;  // of a stack, which is looked at in its last pass
      const int layer = layer_of(*node);
      attentions_.push_back({n, layer, node->in[0]->shape[2], heads[layer]});
      heads[layer] = attentions_.back().end();
    }
  add_places();
  tape_.plan(PlanMode::reuse);  // a value is copied right after the op that made it, so it is still there
  tape_.allocate(device_);
  tape_.watch([this](size_t n, bool) { after(n); });
}

// Which node makes which value.
void Probe::add_places() {
  std::unordered_map<const Value*, size_t> writers;
  for (size_t n = 0; n < tape_.nodes().size(); ++n)
    for (const Value* value : tape_.nodes()[n]->out) writers.emplace(value, n);
  for (const auto& [mark, marked] : tape_.marks()) {
    if (!writers.contains(marked)) continue;  // a parameter
    const Node& writer = *tape_.nodes()[writers.at(marked)];
    Value* const value =
        std::string_view(writer.op()).ends_with("_source") ? writer.in[0] : marked;  // it hands that on
    places_.emplace(mark, Place{writers.at(value), value});
  }
  std::map<int, int> seen;  // attentions of a layer
  for (const Attention& attention : attentions_) {
    const Node& node = *tape_.nodes()[attention.node];
    const int count = ++seen[attention.layer];
    const std::string at = str(".", attention.layer, count > 1 ? str(".", count) : "");
    const std::pair<const char*, Value*> values[] = {
        {"query", node.in[0]}, {"key", node.in[1]}, {"value", node.in[2]}, {"attended", node.out[0]}};
    for (const auto& [what, value] : values) places_.emplace(what + at, Place{writers.at(value), value});
  }
}

const Probe::Place& Probe::place(const std::string& name) const {
  if (const auto found = places_.find(name); found != places_.end()) return found->second;
  fail(Exit::usage, name_, ": there is no value ", name, " in this model; there are: ", names_in_short(names()));
}

std::vector<std::string> Probe::names() const {
  std::vector<std::string> list;
  for (const auto& [name, place] : places_) list.push_back(name);
  std::stable_sort(list.begin(), list.end(), [this](const std::string& a, const std::string& b) {
    return places_.at(a).node < places_.at(b).node;
  });
  return list;
}

void Probe::keep(const std::string& name) {
  place(name);
  kept_[name];
}

void Probe::change(const std::string& name, std::function<void(std::vector<double>&)> by) {
  place(name);
  if (by) changes_[name] = std::move(by);
  else changes_.erase(name);
}

void Probe::after(size_t n) {
  for (const auto& [name, by] : changes_) {
    const Place& made = places_.at(name);
    if (made.node != n) continue;
    std::vector<double> numbers = copy_of(made.value->tensor, device_);
    by(numbers);
    put_back(numbers, made.value->tensor, device_);
  }
  for (auto& [name, numbers] : kept_) {
    const Place& made = places_.at(name);
    if (made.node != n) continue;
    numbers = copy_of(made.value->tensor, device_);
    if (!all_finite(numbers)) fail_not_finite(name_, name);
  }
  for (size_t i = 0; see_ && i < attentions_.size(); ++i)
    if (attentions_[i].node == n) see_(i, AttentionInputs(node_of(attentions_[i]), device_, sizes(attentions_[i])));
  if (const Place& made = places_.at(last_); made.node == n && !all_finite(copy_of(made.value->tensor, device_)))
    fail_not_finite(name_, last_);
}

const ops::AttentionNode& Probe::node_of(const Attention& one) const {
  return dynamic_cast<const ops::AttentionNode&>(*tape_.nodes()[one.node]);
}

AttentionSizes Probe::sizes(const Attention& one) const {
  return sizes_of(node_of(one), graph_.documents != nullptr ? graph_.documents->host_bounds.data() : nullptr);
}

void Probe::run(const int32_t* tokens, const int32_t* targets) {
  const std::vector<int32_t> none(static_cast<size_t>(graph_.tokens->shape.numel()), -1);
  load_batch(device_, graph_, tokens, targets != nullptr ? targets : none.data());
  tape_.forward(Step{});
  losses_ = copy_of(graph_.losses->tensor, device_);
  if (!all_finite(losses_)) fail_not_finite(name_, "the loss");
}

const std::vector<double>& Probe::at(const std::string& name) const {
  const auto found = kept_.find(name);
  CHECK_THAT(found != kept_.end() && !found->second.empty(), name, " is not kept, or there was no run");
  return found->second;
}

}  // namespace crossply
