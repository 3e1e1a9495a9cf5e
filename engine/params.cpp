#include "engine/params.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/generate.h"
#include "engine/rng.h"

namespace crossply {

Init Init::constant(double value) {
  return {value == 0   ? "zeros"
          : value == 1 ? "ones"
                       : str(value),
          [value](uint64_t, uint64_t, int64_t) { return value; }};
}

Init Init::normal(double std) {
  return {str("normal(", std, ")"), [std](uint64_t seed, uint64_t stream, int64_t i) {
            return std * random_normal(seed, stream, static_cast<uint64_t>(i));
          }};
}

Init Init::uniform(double bound) {
  return {str("uniform(", bound, ")"), [bound](uint64_t seed, uint64_t stream, int64_t i) {
            return bound * (2 * random_uniform(seed, stream, static_cast<uint64_t>(i)) - 1);
          }};
}

Init Init::times(double factor) const {
  if (factor == 1) return *this;
  char text[32];
  std::snprintf(text, sizeof text, "%.3g x ", factor);
  return {text + rule,
          [factor, own = at](uint64_t seed, uint64_t stream, int64_t i) { return factor * own(seed, stream, i); }};
}

// A name with {i} for every number that stands between dots.
static std::string kind_of(const std::string& name) {
  std::string kind;
  for (size_t at = 0; at <= name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    const std::string part = name.substr(at, end - at);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    kind += (at > 0 ? "." : "") + (number ? std::string("{i}") : part);
    at = end + 1;
  }
  return kind;
}

// Times the weight decay; nothing where rows of one role differ.
static std::optional<double> decay_of(Role role) {
  switch (role) {
    case Role::head:
    case Role::input_projection:
    case Role::output_projection: return 1;
    case Role::embedding:
    case Role::norm:
    case Role::final_norm:
    case Role::bias: return 0;
    default: return {};
  }
}

Parameter& ParameterTable::add(const std::string& name, Shape shape, Init init, Role role, const Learning& learning) {
  const std::optional<double> decay = decay_of(role);
  CHECK_THAT(decay.has_value() != learning.wd_mul.has_value(), "parameter '", name, "': its role ",
             decay ? "says how it decays, leave out" : "does not say how it decays, give", " wd_mul");
  const double wd_mul = decay ? *decay : *learning.wd_mul;
  const bool projection = role == Role::input_projection || role == Role::output_projection;
  return add(Parameter{name, shape, std::move(init), role, learning.lr_mul, wd_mul, projection || learning.matrix});
}

Parameter& ParameterTable::add(Parameter row) {
  CHECK_THAT(!index_.contains(row.name), "parameter '", row.name, "' declared twice");
  index_[row.name] = rows_.size();
  rows_.push_back(std::move(row));
  return rows_.back();
}

Parameter& ParameterTable::at(const std::string& name) {
  CHECK_THAT(index_.contains(name), "no parameter '", name, "'");
  return rows_[index_[name]];
}

void ParameterTable::remove(const std::string& name) {
  at(name);
  const size_t gone = index_[name];
  index_.erase(name);
  rows_.erase(rows_.begin() + static_cast<std::ptrdiff_t>(gone));
  for (auto& entry : index_) entry.second -= entry.second > gone;
}

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <class Table, class F>
int64_t ParameterTable::walk(Table& table, bool bf16_only, int64_t begin, F&& visit) {
  int64_t next = begin;
  for (const bool muon : {bf16_only, !bf16_only})
    for (auto& row : table.rows_) {
      if (row.bf16_only != bf16_only || row.muon != muon) continue;
      const int64_t unit = row.norm_mul == 1 ? 64 : leaf;
      const int64_t offset = round_up(next, unit);
      visit(row, offset);
      next = round_up(offset + row.shape.numel(), unit);
      if (next - begin > int64_t{1} << 50)  // each row is smaller, so nothing overflowed
        fail(Exit::usage, "the model has more parameters than any memory holds: ", next - begin);
    }
  return next;
}

int64_t ParameterTable::size_of_rows(bool bf16_only) const {
  const int64_t begin = bf16_only ? bf16_only_begin() : 0;
  return walk(*this, bf16_only, begin, [](const Parameter&, int64_t) {}) - begin;
}

void ParameterTable::lay_out(int64_t unit, int64_t end_unit) {
  CHECK_THAT(unit % 64 == 0 && end_unit % 64 == 0 && values_.data() == nullptr, "units of ", unit, " and ", end_unit);
  unit_ = unit, end_unit_ = end_unit;
  place_rows();
}

void ParameterTable::place_rows() {
  const auto place = [](Parameter& row, int64_t offset) { row.offset = offset; };
  walk(*this, false, 0, place), walk(*this, true, bf16_only_begin(), place);
}

int64_t ParameterTable::bf16_only_begin() const { return round_up(size_of_rows(false), unit_); }
int64_t ParameterTable::flat_size() const {
  const int64_t bf16_only = size_of_rows(true),
                size = bf16_only > 0 ? bf16_only_begin() + bf16_only : size_of_rows(false);
  return round_up(size, end_unit_);
}
int64_t ParameterTable::rows_size() const { return size_of_rows(false) + size_of_rows(true); }

int64_t ParameterTable::count() const {
  int64_t n = 0;
  for (const Parameter& row : rows_) n += row.shape.numel();
  return n;
}

void ParameterTable::allocate(Device& device, Dtype dtype, bool with_gradients, bool lend) {
  CHECK_THAT(with_gradients || !lend, "there are no gradients whose memory could be lent");
  device_ = &device;
  dtype_ = dtype;
  const auto bytes = [&](int64_t elements) { return static_cast<size_t>(elements) * size_of(dtype); };
  values_size_ = lend ? bf16_only_begin() : flat_size();
  values_ = Arena(device, "parameters", bytes(values_size_));
  if (with_gradients) gradients_ = Arena(device, "gradients", bytes(flat_size()));
  place_rows();
  for (Parameter& row : rows_) {
    if (with_gradients) row.grad = Tensor{gradients_.data() + bytes(row.offset), dtype, row.shape};
    row.value = lend && row.bf16_only ? row.grad : Tensor{values_.data() + bytes(row.offset), dtype, row.shape};
  }
}

namespace {

void check_there(const Tensor& value) {
  CHECK_THAT(value.data != nullptr, "these f32 values are not in memory: since a step began their memory holds ",
             "gradients. They are there after lend_values(false), and true once all ranks' have been gathered");
}

}  // namespace

void ParameterTable::lend_values(bool lent) {
  if (!lends()) return;
  lent_ = lent;
  for (Parameter& row : rows_)
    if (row.bf16_only) row.value.data = lent ? nullptr : row.grad.data;
}

Tensor ParameterTable::lent_values() const {
  const size_t begin = static_cast<size_t>(values_size_) * size_of(dtype_);
  const Tensor values{lent_ ? nullptr : gradients_.data() + begin, dtype_, Shape{flat_size() - values_size_}};
  check_there(values);
  return values;
}

void ParameterTable::allocate_bf16_copy() {
  bf16_copy_ = Arena(*device_, "bf16 parameters", static_cast<size_t>(flat_size()) * size_of(Dtype::bf16));
  for (Parameter& row : rows_) {
    const size_t offset = static_cast<size_t>(row.offset) * size_of(Dtype::bf16);
    row.bf16_copy = Tensor{bf16_copy_.data() + offset, Dtype::bf16, row.shape};
  }
}

void ParameterTable::initialise(uint64_t seed) {
  for (const Parameter& row : rows_) {
    check_there(row.value);
    const auto number = [&row, seed, stream = stream_of(row.name)](int64_t i) { return row.init.at(seed, stream, i); };
    if (dtype_ == Dtype::f64) generate<double>(*device_, row.value.data, row.shape.numel(), number);
    else generate<float>(*device_, row.value.data, row.shape.numel(), number);
  }
}

void ParameterTable::zero_gradients() { device_->fill(gradients_.data(), 0, gradients_.bytes()); }

void ParameterTable::write(const Parameter& row, const double* host) {
  check_there(row.value);
  if (dtype_ == Dtype::f64) return device_->copy_in(row.value.data, host, row.value.bytes());
  generate<float>(*device_, row.value.data, row.shape.numel(), [host](int64_t i) { return host[i]; });
}

std::vector<float> ParameterTable::read(const Tensor& tensor) const {
  check_there(tensor);
  const auto n = static_cast<size_t>(tensor.numel());
  std::vector<float> host(n);
  if (tensor.dtype == Dtype::f32) {
    device_->copy_out(host.data(), tensor.data, tensor.bytes());
    return host;
  }
  std::vector<double> numbers(n);
  device_->copy_out(numbers.data(), tensor.data, tensor.bytes());
  return std::vector<float>(numbers.begin(), numbers.end());
}

std::string ParameterTable::report() const {
  // Rows that only numbers in their names tell apart are of one kind.
  struct Kind {
    std::string name;
    const Parameter *first, *last;
    int64_t count;
  };
  std::vector<Kind> kinds;
  for (const Parameter& row : rows_) {
    const std::string name = kind_of(row.name);
    const auto same = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& kind) {
      return kind.name == name && kind.first->lr_mul == row.lr_mul && kind.first->wd_mul == row.wd_mul &&
             kind.first->eps_mul == row.eps_mul;
    });
    if (same == kinds.end()) kinds.push_back({name, &row, &row, 1});
    else same->last = &row, ++same->count;
  }
  std::string out = "parameter      count shape                    init                   lr x  decay\n";
  char line[256];
  for (const Kind& kind : kinds) {
    const bool long_name = kind.name.size() > 14;
    if (long_name) out += kind.name + "\n";
    const std::string first = kind.first->shape.str(), last = kind.last->shape.str(), own = kind.first->init.rule;
    const std::string shape = first == last ? first : first + " to " + last;
    const std::string rule = own + (own == kind.last->init.rule ? "" : " ...");
    char tail[128];
    std::snprintf(tail, sizeof tail, "%-21s %5.4g %6.4g", rule.c_str(), kind.first->lr_mul, kind.first->wd_mul);
    const auto beyond = std::max(0, static_cast<int>(std::strlen(tail)) - 34);  // takes what a short shape leaves
    std::snprintf(line, sizeof line, "%-14s %5lld %-*s %s\n", long_name ? "" : kind.name.c_str(),
                  static_cast<long long>(kind.count), std::max(0, 24 - beyond), shape.c_str(), tail);
    out += line;
    if (const auto& [eps, norm] = std::pair{kind.first->eps_mul, kind.first->norm_mul}; eps != 1 || norm != 1) {
      std::snprintf(line, sizeof line, "%20s epsilon x %.4g, in the norm x %.4g\n", "", eps, norm);
      out += line;
    }
  }
  return out;
}

}  // namespace crossply
