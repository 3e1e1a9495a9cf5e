#include "train/lab/routing_curves.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/format.h"
#include "cli/look.h"
#include "cli/svg.h"
#include "eval/inside/heat_map.h"
#include "train/run/metrics.h"
#include "train/run/run_curves.h"

namespace crossply {
namespace {

using nlohmann::json;

constexpr size_t max_maps = 8;

double number_in(const json& value) { return value.is_number() ? value.get<double>() : NAN; }

std::vector<double> numbers_in(const json& list) {
  std::vector<double> numbers;
  for (const json& value : list) numbers.push_back(number_in(value));
  return numbers;
}

// All as long as the longest one.
RoutingRows rows_in(const json& list) {
  RoutingRows rows;
  size_t columns = 0;
  for (const json& row : list) rows.push_back(numbers_in(row)), columns = std::max(columns, rows.back().size());
  for (auto& row : rows) row.resize(columns, NAN);
  return rows;
}

json part_of_line(const json& routing, const char* part) {
  const json found = routing.value(part, json::object());
  return found.is_object() ? found : json::object();
}

// "entropy" of "entropy.alpha".
std::string kind_of(const std::string& number) { return number.substr(0, number.find('.')); }

std::string caption_of(const std::string& kind) {
  if (kind == "entropy") return "entropy over the sources, in nats: mean over readers";
  if (kind == "newest_share") return "share of the newest source: mean over readers";
  if (kind == "first_share") return "share of source 0: mean over readers";
  return kind == "mean" ? "mean over layers" : kind;
}

bool never_changes(const std::vector<double>& y) {
  return std::ranges::all_of(y, [&](double one) { return one == y[0]; });
}

SteppedCurve curve_of(const std::vector<RoutingPoint>& run, const std::string& number) {
  SteppedCurve curve;
  for (const RoutingPoint& point : run) {
    const auto found = point.numbers.find(number);
    if (found == point.numbers.end()) continue;
    curve.step.push_back(point.step), curve.x.push_back(point.x), curve.y.push_back(found->second);
  }
  return curve;
}

HeatScale scale_of(const std::vector<HeatMap>& maps) {
  for (const HeatMap& map : maps)
    for (const auto& row : map.rows)
      if (std::ranges::any_of(row, [](double x) { return x < 0; })) return HeatScale::signs;
  return HeatScale::shares;
}

std::string step_text(double step) { return format_count(static_cast<int64_t>(step)); }

std::string maps_of(const std::string& name, const std::vector<RoutingPoint>& run) {
  std::vector<HeatMapBand> bands;
  const size_t shown = std::min(run.size(), max_maps);
  for (const auto& [map, rows] : run.back().maps) {
    HeatMapBand& band = bands.emplace_back(HeatMapBand{map, {}});
    for (size_t i = 0; i < shown; ++i) {
      const RoutingPoint& point = run[shown == 1 ? 0 : i * (run.size() - 1) / (shown - 1)];
      if (const auto found = point.maps.find(map); found != point.maps.end())
        band.maps.push_back({"step " + step_text(point.step), found->second});
    }
    band.scale = scale_of(band.maps);
  }
  return bands.empty() ? "" : heat_map_svg(name, "reader, from 0", "source, from 0", bands);
}

std::string layers_of(const std::string& name, const std::vector<RoutingPoint>& run) {
  std::vector<HeatMapBand> bands;
  for (const auto& [curve, last] : run.back().curves) {
    HeatMap map{"", RoutingRows(last.size())};
    for (const RoutingPoint& point : run) {
      const auto found = point.curves.find(curve);
      map.column_names.push_back(step_text(point.step));
      for (size_t l = 0; l < last.size(); ++l)
        map.rows[l].push_back(found != point.curves.end() && l < found->second.size() ? found->second[l] : NAN);
    }
    bands.push_back({curve, {map}, scale_of({map})});
  }
  return bands.empty() ? "" : heat_map_svg(name, "layer, or stream, from 0", "step", bands);
}

}  // namespace

std::vector<RoutingPoint> read_routing(const std::string& path, const std::string& axis, double factor) {
  std::vector<RoutingPoint> points;
  each_line(path, [&](const std::string& text, bool) {
    if (text.find("\"routing\"") == std::string::npos) return;
    const json line = parse_line(text);
    const json routing = line.is_object() ? line.value("routing", json()) : json();
    if (!routing.is_object()) return;
    RoutingPoint point{number_in(line.value("step", json())), factor * number_in(line.value(axis, json()))};
    if (!std::isfinite(point.step) || !std::isfinite(point.x)) return;
    const json numbers = part_of_line(routing, "numbers"), curves = part_of_line(routing, "curves"),
               maps = part_of_line(routing, "maps");
    for (const auto& [name, value] : numbers.items())
      if (value.is_number()) point.numbers[name] = value.get<double>();
    for (const auto& [name, value] : curves.items()) point.curves[name] = numbers_in(value);
    for (const auto& [name, value] : maps.items()) point.maps[name] = rows_in(value);
    points.push_back(std::move(point));
  });
  return points;
}

std::vector<RoutedNumber> routed_numbers(const std::vector<RoutedRuns>& all) {
  std::set<std::string> names;
  for (const RoutedRuns& runs : all)
    for (const auto& run : runs.runs)
      for (const auto& [name, value] : run.back().numbers) names.insert(name);
  std::vector<RoutedNumber> numbers;
  for (const std::string& name : names)
    for (size_t i = 0; i < all.size(); ++i) {
      std::vector<SteppedCurve> curves;
      for (const auto& run : all[i].runs) curves.push_back(curve_of(run, name));
      const Curve mean = mean_of(curves).curve;
      if (!mean.x.empty()) numbers.push_back({name, i, mean});
    }
  return numbers;
}

std::string routing_table(const std::vector<RoutedNumber>& numbers, const std::vector<RoutedRuns>& all) {
  std::vector<std::vector<std::string>> rows = {{"number", "run", "first", "last"}};
  for (const RoutedNumber& one : numbers)
    rows.push_back(
        {one.number, all[one.runs].name, routing_number(one.curve.y.front()), routing_number(one.curve.y.back())});
  return format_table(rows);
}

std::vector<Panel> routing_panels(const std::vector<RoutedNumber>& numbers, const std::vector<RoutedRuns>& all) {
  std::vector<Panel> panels;
  std::map<std::string, std::vector<int>> lines;  // of each kind, the curves of each run so far
  for (const RoutedNumber& one : numbers) {
    const bool bound = one.number == "entropy.most";
    if (never_changes(one.curve.y) && !bound) continue;
    const std::string kind = kind_of(one.number), caption = caption_of(kind);
    auto panel = std::ranges::find(panels, caption, &Panel::caption);
    if (panel == panels.end()) {
      panel = panels.insert(panels.end(), Panel{caption, "", {}});
      panel->whole = true, panel->smooth = 1;
    }
    std::vector<int>& drawn = lines[kind];
    drawn.resize(all.size());
    const RoutedRuns& runs = all[one.runs];
    const std::string rest = kind == one.number ? "" : one.number.substr(kind.size() + 1);
    Curve& curve = panel->curves.emplace_back(one.curve);
    curve.name = all.size() > 1 ? runs.name + (rest.empty() ? "" : " " + rest) : rest.empty() ? kind : rest;
    curve.reference = bound;
    if (runs.look >= 0 && !bound) curve.look = same_colour(runs.look, std::min(drawn[one.runs]++, 3));
  }
  return panels;
}

std::string routing_maps_svg(const std::string& title, const std::vector<RoutedRuns>& all) {
  std::vector<std::string> parts;
  for (const RoutedRuns& runs : all)
    for (const std::string& part : {maps_of(runs.name, runs.runs[0]), layers_of(runs.name, runs.runs[0])})
      if (!part.empty()) parts.push_back(part);
  return parts.size() == 1 ? parts[0] : svg::below_each_other(title, parts);
}

}  // namespace crossply
