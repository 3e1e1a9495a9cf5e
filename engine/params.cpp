#include "engine/params.h"

#include <cstdio>
#include <utility>

#include "engine/rng.h"
#include "kernels/convert.h"

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

// Elements a row takes in the flat arrays.
static int64_t padded(const Parameter& row) { return (row.shape.numel() + 63) / 64 * 64; }

Parameter& ParameterTable::add(const std::string& name, Shape shape, Init init, double lr_mul, double wd_mul) {
  CHECK_THAT(!index_.contains(name), "parameter '", name, "' declared twice");
  index_[name] = rows_.size();
  rows_.push_back(Parameter{name, shape, std::move(init), lr_mul, wd_mul, 0, {}, {}, {}});
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

int64_t ParameterTable::flat_size() const {
  int64_t size = 0;
  for (const Parameter& row : rows_) size += padded(row);
  return size;
}

int64_t ParameterTable::count() const {
  int64_t n = 0;
  for (const Parameter& row : rows_) n += row.shape.numel();
  return n;
}

void ParameterTable::allocate(Device& device, Dtype dtype, bool with_gradients) {
  device_ = &device;
  dtype_ = dtype;
  const size_t bytes = static_cast<size_t>(flat_size()) * size_of(dtype);
  values_ = Arena(device, "parameters", bytes);
  if (with_gradients) gradients_ = Arena(device, "gradients", bytes);
  int64_t next = 0;
  for (Parameter& row : rows_) {
    row.offset = std::exchange(next, next + padded(row));
    const size_t offset = static_cast<size_t>(row.offset) * size_of(dtype);
    row.value = Tensor{values_.data() + offset, dtype, row.shape};
    if (with_gradients) row.grad = Tensor{gradients_.data() + offset, dtype, row.shape};
  }
}

void ParameterTable::allocate_narrow() {
  narrow_ = Arena(*device_, "bf16 parameters", static_cast<size_t>(flat_size()) * size_of(Dtype::bf16));
  for (Parameter& row : rows_) {
    const size_t offset = static_cast<size_t>(row.offset) * size_of(Dtype::bf16);
    row.narrow = Tensor{narrow_.data() + offset, Dtype::bf16, row.shape};
  }
}

void ParameterTable::refresh_narrow() {
  if (narrow_.data() != nullptr) convert(narrow(), values(), device_->stream());
}

void ParameterTable::initialise(uint64_t seed) {
  std::vector<double> host;
  for (const Parameter& row : rows_) {
    host.resize(static_cast<size_t>(row.shape.numel()));
    const uint64_t stream = stream_of(row.name);
#pragma omp parallel for
    for (int64_t i = 0; i < row.shape.numel(); ++i) host[static_cast<size_t>(i)] = row.init.at(seed, stream, i);
    write(row, host.data());
  }
}

void ParameterTable::zero_gradients() { device_->fill(gradients_.data(), 0, gradients_.bytes()); }

void ParameterTable::write(const Parameter& row, const double* host) {
  const int64_t n = row.shape.numel();
  if (dtype_ == Dtype::f64) return device_->copy_in(row.value.data, host, row.value.bytes());
  const std::vector<float> narrow(host, host + n);
  device_->copy_in(row.value.data, narrow.data(), row.value.bytes());
}

std::vector<float> ParameterTable::read(const Parameter& row, const Tensor& flat) const {
  const size_t n = static_cast<size_t>(row.shape.numel()), offset = static_cast<size_t>(row.offset);
  const std::byte* from = static_cast<std::byte*>(flat.data) + offset * size_of(flat.dtype);
  std::vector<float> host(n);
  if (flat.dtype == Dtype::f32) {
    device_->copy_out(host.data(), from, n * sizeof(float));
    return host;
  }
  std::vector<double> wide(n);
  device_->copy_out(wide.data(), from, n * sizeof(double));
  return std::vector<float>(wide.begin(), wide.end());
}

std::string ParameterTable::report() const {
  std::string out =
      "parameter                                                shape              init             lr x  decay x\n";
  char line[256];
  for (const Parameter& row : rows_) {
    std::snprintf(line, sizeof line, "%-56s %-18s %-16s %4g %7g\n", row.name.c_str(), row.shape.str().c_str(),
                  row.init.rule.c_str(), row.lr_mul, row.wd_mul);
    out += line;
  }
  return out;
}

}  // namespace crossply
