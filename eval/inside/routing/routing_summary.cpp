#include "eval/inside/routing/routing_summary.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "eval/inside/routing/routing.h"

namespace crossply {
namespace {

// Six digits, so that lines stay short. JSON has no NaN.
nlohmann::json short_number(double x) {
  constexpr double smallest = 1e-30;  // less is 0, far above what JSON cannot say
  if (!std::isfinite(x)) return {};
  return std::abs(x) < smallest ? 0.0 : std::strtod(format_number("%.6g", x).c_str(), nullptr);
}

nlohmann::json short_numbers(const std::vector<double>& numbers, size_t count) {
  nlohmann::json list = nlohmann::json::array();
  for (size_t i = 0; i < count; ++i) list.push_back(short_number(numbers[i]));
  return list;
}

// Up to the last source that it reads.
size_t sources_read(const std::vector<double>& row) {
  size_t count = row.size();
  while (count > 0 && !std::isfinite(row[count - 1])) --count;
  return count;
}

std::vector<TokenWindow> few_windows(const Source& source) {
  const int64_t T = source.seq_len();
  const SpreadSamples few(source, std::max<int64_t>(1, routing_summary_tokens / T));
  std::vector<TokenWindow> windows;
  std::vector<int32_t> tokens(static_cast<size_t>(T)), targets(tokens.size());
  for (int64_t i = 0; i < few.size(); ++i) {
    few.read(i, tokens.data(), targets.data());
    windows.push_back({tokens, targets, scored_length(targets), i});
  }
  return windows;
}

}  // namespace

bool has_learned_routing(const Config& config) {
  const Routings routings = find_routings(config);
  return !routings.parts.empty() && !routings.fixed();
}

nlohmann::json routing_summary(Device& device, ParameterTable& params, const Config& config, const Source& source,
                               const DocumentMark& documents) {
  const Routings routings = find_routings(config);
  const std::vector<TokenWindow> windows = routings.reads_data() ? few_windows(source) : std::vector<TokenWindow>();
  const std::string name = "the model in training";
  Probe probe(device, params, config, 1, routings.reads_data() ? source.seq_len() : routing_tokens, name, documents);
  const RoutingFound found = routings.look({probe, params, config, name, windows});
  nlohmann::json out = nlohmann::json::object();
  for (const auto& [key, value] : found.facts) out["numbers"][key] = short_number(value);
  for (const RoutingCurve& curve : found.curves)
    if (!curve.reference) out["curves"][curve.name] = short_numbers(curve.y, curve.y.size());
  if (found.bands.empty()) return out;
  for (const RoutingBand& band : found.bands)
    for (const RoutingMap& map : band.maps)
      if (&band == &found.bands[0] || routings.parts.size() > 1)
        for (const auto& row : map.rows) out["maps"][map.name].push_back(short_numbers(row, sources_read(row)));
  return out;
}

}  // namespace crossply
