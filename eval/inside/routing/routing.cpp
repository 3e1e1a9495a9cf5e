#include "eval/inside/routing/routing.h"

#include <algorithm>
#include <cmath>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/look.h"
#include "cli/svg.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/analysis.h"
#include "eval/inside/representation.h"
#include "models/combined.h"

namespace crossply {

// -----------------------------------------------------------------------------------------------------------------
// What all kinds use.

const RoutingKind* find_routing(const std::string& arch) {
  static const std::vector<RoutingKind> kinds = [] {
    std::vector<RoutingKind> all;
    for (const auto& list :
         {routing_of_lime(), routing_of_lime_v1(), routing_of_vertical(), routing_of_streams(), routing_of_mixtures(),
          routing_of_values(), routing_of_attnres(), routing_of_depth_attention(), routing_of_moda()})
      all.insert(all.end(), list.begin(), list.end());
    return all;
  }();
  const auto found = std::ranges::find(kinds, arch, &RoutingKind::arch);
  return found == kinds.end() ? nullptr : &*found;
}

Routings find_routings(const Config& config) {
  const bool by_loop = has_anchor(config) && (config.loop.norm != "none" || config.loop.alpha != 0);
  const bool changed = by_loop || config.block_norm == "sum" || has_engram(config);
  Routings all;
  for (const std::string& arch : parts_of(config.arch)) {
    const RoutingKind* kind = find_routing(arch);
    const Config part = part_config(config, arch);
    if (kind != nullptr && !is_idle(config, arch) &&
        !(changed && find_architecture(arch).make(applied(part))->streams() > 1))
      all.parts.push_back({kind, part});
  }
  return all;
}

bool Routings::reads_data() const {
  return std::ranges::any_of(parts, [](const RoutingPart& part) { return part.kind->reads_data; });
}
bool Routings::fixed() const {
  return std::ranges::all_of(parts, [](const RoutingPart& part) { return part.kind->fixed; });
}
std::string Routings::texts(const char* RoutingKind::*caption) const {
  std::string all;
  for (const RoutingPart& part : parts) all += (all.empty() ? "" : " ") + std::string(part.kind->*caption);
  return all;
}

RoutingFound Routings::look(const RoutingInput& in) const {
  RoutingFound all;
  const std::vector<TokenWindow> none;
  for (const RoutingPart& part : parts) {
    const std::vector<TokenWindow>& windows = part.kind->reads_data ? in.windows : none;
    RoutingFound one = part.kind->look({in.probe, in.params, part.config, in.name, windows, in.tell});
    add_summary(one);
    if (parts.size() == 1) return one;
    const std::string front = part.config.arch + ".";
    for (RoutingBand& band : one.bands) {
      for (RoutingMap& map : band.maps) map.name = front + map.name;
      all.bands.push_back(band);
    }
    for (RoutingCurve& curve : one.curves) curve.name = front + curve.name, all.curves.push_back(curve);
    for (const auto& [name, value] : one.facts) all.facts.emplace_back(front + name, value);
    all.notes += (all.notes.empty() ? "" : "\n") + part.config.arch + "\n\n" + format_table(one.table) + one.notes;
  }
  return all;
}

std::vector<double> RoutingInput::parameter(const std::string& name_of) const {
  const std::vector<float> numbers = params.read(params.at(RowNames(config).of(name_of)).value);
  return {numbers.begin(), numbers.end()};
}

void RoutingInput::run_any(const std::vector<std::string>& names) const {
  for (const std::string& one : names) probe.keep(one);
  std::vector<int32_t> tokens;  // as many as another part of a combination reads
  const int64_t T = probe.shape("hidden.0")[1];
  for (int64_t t = 0; t < T; ++t) tokens.push_back(static_cast<int32_t>(t * config.vocab_size / T));
  probe.run(tokens.data());
}

void RoutingInput::run_all(const std::vector<std::string>& names, const std::function<void(int64_t)>& see) const {
  for (const std::string& one : names) probe.keep(one);
  for (size_t i = 0; i < windows.size(); ++i) {
    probe.run(windows[i].tokens.data());
    see(windows[i].length);
    tell(static_cast<int64_t>(i) + 1);
  }
}

RoutingRows routing_rows(size_t rows, size_t columns) { return RoutingRows(rows, std::vector<double>(columns, NAN)); }

double map_entropy(const std::vector<double>& row) {
  double entropy = 0;
  for (const double x : row)
    if (x > 0) entropy -= x * std::log(x);
  return entropy;
}
std::string routing_number(double x) { return number_or_dash(x); }

namespace {

template <class Measure>
std::string routing_extreme(const std::vector<double>& row, size_t but, const Measure& measure) {
  size_t best = row.size();
  for (size_t i = 0; i < row.size(); ++i)
    if (i != but && std::isfinite(row[i]) && (best == row.size() || measure(row[i]) > measure(row[best]))) best = i;
  return best == row.size() ? "-" : str(routing_number(row[best]), " of ", best);
}

}  // namespace

std::string largest_of(const std::vector<double>& row, size_t but) {
  return routing_extreme(row, but, [](double x) { return x; });
}
std::string smallest_of(const std::vector<double>& row, size_t but) {
  return routing_extreme(row, but, [](double x) { return -x; });
}
std::string strongest_of(const std::vector<double>& row) {
  return routing_extreme(row, row.size(), [](double x) { return std::abs(x); });
}

namespace {

// Of magnitudes; NaN where there is nothing to read.
std::vector<double> shares_of(std::vector<double> row) {
  double sum = 0;
  for (const double x : row) sum += std::isfinite(x) ? std::abs(x) : 0;
  for (double& x : row) x = sum > 0 ? std::abs(x) / sum : NAN;
  return row;
}

void add_map_facts(const RoutingMap& map, RoutingFound& found) {
  std::vector<double> entropy, newest, first;
  for (size_t r = 0; r < map.rows.size(); ++r) {
    const std::vector<double> shares = shares_of(map.rows[r]);
    const auto sources = std::ranges::count_if(shares, [](double x) { return std::isfinite(x); });
    if (sources > 0) entropy.push_back(map_entropy(shares));
    if (sources > 1) newest.push_back(shares.at(r)), first.push_back(shares[0]);
  }
  const std::pair<const char*, double> facts[] = {{"entropy.", mean_of_finite(entropy)},
                                                  {"newest_share.", mean_of_finite(newest)},
                                                  {"first_share.", mean_of_finite(first)}};
  for (const auto& [what, value] : facts)
    if (const auto there = [&](const auto& fact) { return fact.first == what + map.name; };
        std::ranges::none_of(found.facts, there))
      found.facts.emplace_back(what + map.name, value);
}

}  // namespace

void add_summary(RoutingFound& found) {
  if (!found.bands.empty())
    for (const RoutingMap& map : found.bands[0].maps) add_map_facts(map, found);
  else
    for (const RoutingCurve& curve : found.curves)
      if (!curve.reference) found.facts.emplace_back("mean." + curve.name, mean_of_finite(curve.y));
}

namespace {

// -----------------------------------------------------------------------------------------------------------------
// Telling.

constexpr UsualWindows usual_routing = {100, 256};

struct RoutedModel : AnalysedModel {
  using AnalysedModel::AnalysedModel;
  std::vector<TokenWindow> windows = {};
  RoutingFound found = {};
  std::string measured = "", paper = "";  // captions
};

std::string table_of_routing(const RoutedModel& m, uint64_t seed) {
  const std::string from = m.windows.empty() ? "of its weights alone"
                                             : str(format_count(std::ssize(m.windows)), " windows of ",
                                                   m.windows[0].tokens.size(), " tokens, seed ", seed);
  return str(m.title, "\n", from, "\n\n", format_table(m.found.table), m.found.notes);
}

nlohmann::json routing_json(const RoutedModel& m) {
  nlohmann::json maps = nlohmann::json::object(), curves = maps, facts = maps;
  for (const RoutingBand& band : m.found.bands)
    for (const RoutingMap& map : band.maps)
      maps[map.name] = {{"what", band.caption}, {"rows", numbers_or_nulls(map.rows)}};
  for (const RoutingCurve& curve : m.found.curves)
    if (!curve.reference) curves[curve.name] = {{"what", curve.panel}, {"y", numbers_or_nulls(curve.y)}};
  for (const auto& [name, value] : m.found.facts) facts[name] = number_or_null(value);
  return m.json({{"windows", std::ssize(m.windows)}, {"maps", maps}, {"curves", curves}, {"numbers", facts}});
}

std::string csv_of_routing(const std::vector<RoutedModel>& all) {
  std::string out = "model,what,row,column,value\n";
  for (const RoutedModel& m : all) {
    const auto add = [&](const std::string& what, const std::string& row, const std::string& column, double value) {
      if (std::isfinite(value)) out += csv_row(m.model, what, row, column, value);
    };
    for (const RoutingBand& band : m.found.bands)
      for (const RoutingMap& map : band.maps)
        for (size_t r = 0; r < map.rows.size(); ++r)
          for (size_t c = 0; c < map.rows[r].size(); ++c) add(map.name, str(r), str(c), map.rows[r][c]);
    for (const RoutingCurve& curve : m.found.curves)
      for (size_t i = 0; i < curve.y.size() && !curve.reference; ++i) add(curve.name, str(i), "", curve.y[i]);
    for (const auto& [name, value] : m.found.facts) add(name, "", "", value);
  }
  return out;
}

// What curves of all models have in common stands in one panel.
std::vector<Panel> routing_panels(const std::vector<RoutedModel>& all, const AnalysisOptions& o) {
  std::vector<Panel> panels;
  const std::vector<std::string> names = short_names_of(all);
  for (size_t i = 0; i < all.size(); ++i)
    for (const RoutingCurve& curve : all[i].found.curves) {
      auto panel = std::ranges::find(panels, curve.panel, &Panel::caption);
      if (panel == panels.end()) {
        panel = panels.insert(panels.end(), Panel{curve.panel, "", {}});
        panel->whole = true, panel->shares = curve.shares;
      }
      std::string name = curve.name;
      std::ranges::replace_if(
          name, [](char c) { return c == '_' || c == '.'; }, ' ');
      Curve line{curve.reference || all.size() == 1 ? name : names[i] + " " + name, {}, curve.y};
      const int lines = static_cast<int>(std::ranges::count_if(
          panel->curves, [&](const Curve& c) { return !c.reference && c.name.starts_with(names[i] + " "); }));
      if (all.size() > 1) line.look = same_colour(model_look(o, all[i].model), lines);
      line.low = curve.low, line.high = curve.high, line.reference = curve.reference;
      for (size_t x = 0; x < curve.y.size(); ++x) line.x.push_back(static_cast<double>(x));
      const bool there = std::ranges::any_of(panel->curves, [&](const Curve& c) { return c.name == line.name; });
      if (!(curve.reference && there)) panel->curves.push_back(line);
    }
  return panels;
}

RoutingRows rows_by_largest(RoutingRows rows) {
  for (auto& row : rows) {
    double largest = 0;
    for (const double x : row) largest = std::max(largest, std::isfinite(x) ? std::abs(x) : 0);
    for (double& x : row) x = largest > 0 ? x / largest : x;
  }
  return rows;
}

// Every band with cells of its own size.
std::string svg_of_routing(const std::vector<RoutedModel>& all, const AnalysisOptions& o) {
  std::vector<std::string> parts;
  const std::vector<std::string> names = short_names_of(all);
  for (size_t i = 0; i < all.size(); ++i)
    for (const RoutingBand& band : all[i].found.bands) {
      HeatMapBand drawn{band.caption, {}, band.scale};
      if (band.by_row) drawn.caption += "; each row divided by its largest magnitude";
      for (const RoutingMap& map : band.maps)
        drawn.maps.push_back({map.caption, band.by_row ? rows_by_largest(map.rows) : map.rows});
      parts.push_back(heat_map_svg(str(all[i].arch, ": ", names[i]), "reader, from 0", band.column, {drawn}));
    }
  const std::string title = "Routing across depth";
  if (const auto panels = routing_panels(all, o); !panels.empty())
    parts.push_back(curve_svg(title, "layer, or stream, from 0", panels));
  return parts.size() == 1 ? parts[0] : svg::below_each_other(title, parts);
}

class Routing : public AnalysisOf<RoutedModel> {
 public:
  Routing() : AnalysisOf("routing", "which earlier layers each layer reads, and how much") {}
  std::string refuses(const Subject& subject) const override {
    const Config& config = subject.config();
    if (!find_routings(config).parts.empty()) return "";
    const std::string why =
        std::ranges::any_of(parts_of(config.arch), [](auto& arch) { return find_routing(arch) != nullptr; })
            ? " whose streams a loop or --block-norm sum changes reads no sums of outputs"
        : config.arch == config.backbone ? " reads the layer below alone, so nothing is routed"
                                         : " has no maps that are known here";
    return str(with_article(config.arch), why, "; try --what attention");
  }
  void measure(Subject& subject, const AnalysisOptions& o) override {
    const Config& config = subject.config();
    const Routings routings = find_routings(config);
    const bool reads_data = routings.reads_data();
    RoutedModel m(subject);
    m.measured = routings.texts(&RoutingKind::measured), m.paper = routings.texts(&RoutingKind::paper);
    if (reads_data) m.windows = windows_of(subject, o, usual_routing);
    const int64_t T = reads_data ? std::ssize(m.windows[0].tokens) : routing_tokens;
    Probe probe(subject.model, 1, T);
    if (reads_data)
      say_cost("routing", subject, m.windows, static_cast<double>(m.windows.size()) * probe.forward_flops(),
               probe.bytes());
    Ticker ticker(printable(subject.name), "window");
    const int64_t N = std::ssize(m.windows);
    m.found = routings.look(
        {probe, subject.model.params, config, subject.name, m.windows, [&](int64_t done) { ticker.tell(done, N); }});
    all_.push_back(std::move(m));
  }
  Finding finding(const AnalysisOptions& o) const override;
};

// Where the first map of a model has its largest number, of the rows that read several sources: the first layer reads
// only itself.
std::string largest_in(const RoutedModel& m, const std::string& name) {
  if (m.found.bands.empty() || m.found.bands[0].maps.empty()) return "";
  const RoutingMap& map = m.found.bands[0].maps[0];
  double largest = NAN;
  size_t row = 0, column = 0;
  const auto is_number = [](double x) { return std::isfinite(x); };
  for (size_t r = 0; r < map.rows.size(); ++r)
    for (size_t c = 0; c < map.rows[r].size() && std::ranges::count_if(map.rows[r], is_number) > 1; ++c)
      if (const double x = map.rows[r][c]; std::isfinite(x) && !(std::abs(x) <= std::abs(largest)))
        largest = x, row = r, column = c;
  if (!std::isfinite(largest)) return "";
  return str("The largest number of ", name, ", ", map.caption, ", is ", format_number("%.2f", largest), ", at reader ",
             row, " and column ", column, ".");
}

Finding Routing::finding(const AnalysisOptions& o) const {
  Finding found{"Routing across depth"};
  const auto add = [](std::string& text, const std::string& more) {
    if (text.find(more) == std::string::npos) text += (text.empty() ? "" : " ") + more;
  };
  for (size_t i = 0; i < all_.size(); ++i) {
    const RoutedModel& m = all_[i];
    found.add(table_of_routing(m, o.seed), routing_json(m));
    add(found.shown, largest_in(m, names()[i]));
    add(found.measured, m.measured);
    add(found.paper, m.paper);
  }
  found.json["same_windows"] = same_windows();
  found.csv = csv_of_routing(all_);
  found.svg = svg_of_routing(all_, o);
  return found;
}

}  // namespace

std::unique_ptr<Analysis> routing_analysis() { return std::make_unique<Routing>(); }

}  // namespace crossply
