// RoPE's frequencies and factor, also for sequences longer than those that a model was first trained on.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "models/config.h"

namespace crossply {
namespace {

// The share of each frequency that stays as it is, channel by channel (D/2).
std::vector<double> yarn_shares(const RopeScaling& s, double theta, int64_t D) {
  const auto length = static_cast<double>(s.original_max_position_embeddings), width = static_cast<double>(D);
  // The channel, not a whole one, whose pair turns so many times in the original length.
  const auto channel = [&](double turns) {
    return width * std::log(length / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = channel(s.beta_fast), high = channel(s.beta_slow);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, width - 1);
  if (low == high) high += 0.001;
  std::vector<double> shares;
  for (int64_t j = 0; j < D / 2; ++j)
    shares.push_back(1 - std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0));
  return shares;
}

std::vector<double> llama3_shares(const RopeScaling& s, const std::vector<double>& frequencies) {
  std::vector<double> shares;
  for (const double w : frequencies) {
    const double turns = static_cast<double>(s.original_max_position_embeddings) * w / (2 * std::numbers::pi);
    shares.push_back(std::clamp((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0));
  }
  return shares;
}

}  // namespace

std::vector<double> Config::rope_frequencies() const {
  std::vector<double> frequencies, shares;
  for (int64_t j = 0; j < head_dim / 2; ++j)
    frequencies.push_back(std::pow(rope_theta, -2.0 * static_cast<double>(j) / static_cast<double>(head_dim)));
  if (!rope_scaling) return frequencies;
  const RopeScaling& s = *rope_scaling;
  if (s.rope_type == "linear") shares.assign(frequencies.size(), 0);
  else shares = s.rope_type == "yarn" ? yarn_shares(s, rope_theta, head_dim) : llama3_shares(s, frequencies);
  for (size_t j = 0; j < frequencies.size(); ++j)
    frequencies[j] = (1 - shares[j]) * frequencies[j] / s.factor + shares[j] * frequencies[j];
  return frequencies;
}

double Config::rope_factor() const {
  if (!rope_scaling || rope_scaling->rope_type != "yarn") return 1;
  const RopeScaling& s = *rope_scaling;
  if (s.attention_factor) return *s.attention_factor;
  const auto factor = [&](double scale) { return s.factor <= 1 ? 1 : 0.1 * scale * std::log(s.factor) + 1; };
  const double own = s.mscale.value_or(0), all = s.mscale_all_dim.value_or(0);
  return own != 0 && all != 0 ? factor(own) / factor(all) : factor(1);
}

}  // namespace crossply
