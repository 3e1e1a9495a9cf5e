#include "train/step/delayed_scales.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

namespace crossply {

using nlohmann::json;

DelayedScales::DelayedScales(const std::vector<QuantizedTensor>& tensors)
    : tensors_(tensors), histories_(tensors.size()) {
  std::set<std::string> names;  // by which checkpoints know them
  for (const QuantizedTensor& tensor : tensors)
    CHECK_THAT(names.insert(tensor.name).second, "two tensors named ", tensor.name);
}

std::string DelayedScales::add(const std::vector<float>& amaxes) {
  const size_t n = tensors_.size();
  CHECK_THAT(n > 0 && !amaxes.empty() && amaxes.size() % n == 0, amaxes.size(), " numbers of ", n, " tensors");
  std::string overflown;
  for (size_t i = 0; i < n; ++i) {
    float most = 0;
    for (size_t at = i; at < amaxes.size(); at += n) {
      if (std::isfinite(amaxes[at])) most = std::max(most, amaxes[at]);
      else if (overflown.empty()) overflown = tensors_[i].name;
    }
    histories_[i].push_back(most);
    if (histories_[i].size() > remembered) histories_[i].erase(histories_[i].begin());
  }
  return overflown;
}

int DelayedScales::exponent(size_t i) const {
  const std::vector<float>& history = histories_[i];
  const float most = history.empty() ? 0 : *std::max_element(history.begin(), history.end());
  if (most == 0) return 0;
  constexpr int farthest = 126;  // 2^k and 2^-k are floats with all their digits
  return std::clamp(std::ilogb(static_cast<double>(tensors_[i].max) / static_cast<double>(most)), -farthest, farthest);
}

std::vector<float> DelayedScales::scales() const {
  std::vector<float> list;
  for (size_t i = 0; i < tensors_.size(); ++i) list.push_back(std::ldexp(1.f, exponent(i)));
  return list;
}
std::vector<float> DelayedScales::inverses() const {
  std::vector<float> list;
  for (size_t i = 0; i < tensors_.size(); ++i) list.push_back(std::ldexp(1.f, -exponent(i)));
  return list;
}

json DelayedScales::to_json() const {
  json object = json::object();
  for (size_t i = 0; i < tensors_.size(); ++i) object[tensors_[i].name] = histories_[i];
  return object;
}

void DelayedScales::read(const json& object, const std::string& where) {
  const auto is_amax = [](const json& x) {
    return x.is_number() && x.get<float>() >= 0 && std::isfinite(x.get<float>());
  };
  std::vector<std::vector<float>> histories;
  for (const QuantizedTensor& tensor : tensors_) {
    const json list = object.is_object() ? object.value(tensor.name, json()) : json();
    if (!list.is_array() || list.size() > remembered || !std::all_of(list.begin(), list.end(), is_amax))
      fail(Exit::bad_data, where, ": \"eight_bits\" has no list of up to ", remembered, " largest numbers of ",
           tensor.name, "; resume from another checkpoint");
    histories.push_back(list.get<std::vector<float>>());
  }
  histories_ = histories;
}

}  // namespace crossply
