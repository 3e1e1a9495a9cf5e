// analyze --what tsne: the values and hidden states at the words is, are, was and were, drawn in the plane, by layer.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>

#include "cli/format.h"
#include "cli/ticker.h"
#include "engine/at_once.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/occurrences.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"
#include "eval/inside/scatter.h"

namespace crossply {
namespace {

// The usual layers, of a model of 16 and counted from 1.
constexpr int shown_layers[] = {2, 4, 7, 12, 15, 16}, shown_of = 16;

constexpr VectorKind plane_kinds[] = {values_read, hidden_states};

struct PlanePanel {
  const VectorKind* kind;
  int layer;  // from 0
  TsneResult result = {};
};

struct PlaneModel : OccurrencesOfModel {
  std::vector<int> layers = {};
  std::vector<PlanePanel> panels = {};  // of a kind after those of the one before, each from early to late layers

  const PlanePanel* at(const VectorKind& kind, int layer) const {
    const auto same = [&](const PlanePanel& panel) { return panel.kind == &kind && panel.layer == layer; };
    const auto found = std::ranges::find_if(panels, same);
    return found == panels.end() ? nullptr : &*found;
  }
  double mean_divergence(const VectorKind& kind) const {
    std::vector<double> of_kind;
    for (const PlanePanel& panel : panels)
      if (panel.kind == &kind) of_kind.push_back(panel.result.divergence);
    return mean_of_finite(of_kind);
  }
};

// The same depths in a model of L layers, from the second one on.
std::vector<int> layers_like_shown(int L) {
  std::vector<int> layers;
  for (const int layer : shown_layers) {
    const int scaled = static_cast<int>(std::lround(static_cast<double>(layer * L) / shown_of));
    layers.push_back(std::clamp(scaled, std::min(2, L), L) - 1);
  }
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

std::string plane_table(const PlaneModel& m, const TsneOptions& o) {
  std::string out = str(m.title, "\n",
                        wrap(str(occurrences_text(m.plan), "; perplexity ", o.perplexity, ", ",
                                 format_count(o.iterations), " iterations"),
                             80, 0),
                        "\n\n");
  std::vector<std::vector<std::string>> table = {{"layer"}};
  for (const VectorKind& kind : plane_kinds) table[0].push_back(str("KL divergence, ", kind.column));
  for (const int layer : m.layers) {
    table.push_back({std::to_string(layer)});
    for (const VectorKind& kind : plane_kinds) {
      const PlanePanel* panel = m.at(kind, layer);
      table.back().push_back(panel == nullptr ? "-" : format_number("%.4f", panel->result.divergence));
    }
  }
  return out + format_table(table);
}

nlohmann::json plane_json(const PlaneModel& m) {
  nlohmann::json json = occurrences_json(m.plan), panels = nlohmann::json::array();
  for (const PlanePanel& panel : m.panels) {
    nlohmann::json x = nlohmann::json::array(), y = nlohmann::json::array();
    for (const PlanePoint& point : panel.result.points) x.push_back(point.x), y.push_back(point.y);
    panels.push_back({{"what", panel.kind->key},
                      {"layer", panel.layer},
                      {"value", panel.kind->name(panel.layer)},
                      {"kl_divergence", panel.result.divergence},
                      {"x", x},
                      {"y", y}});
  }
  json["model"] = utf8_or_escaped(m.model), json["arch"] = m.arch, json["panels"] = panels;
  return json;
}

std::string plane_csv(const std::vector<PlaneModel>& all) {
  std::string out = "model,layer,what,class,x,y\n";
  for (const PlaneModel& m : all)
    for (const PlanePanel& panel : m.panels)
      for (size_t n = 0; n < panel.result.points.size(); ++n)
        out += csv_row(m.model, panel.layer, panel.kind->key,
                       m.plan.classes.names[n / static_cast<size_t>(m.plan.per_class)], panel.result.points[n].x,
                       panel.result.points[n].y);
  return out;
}

ScatterRow plane_row(const PlaneModel& m, const VectorKind& kind, const std::string& name) {
  ScatterRow row{str(name, ": ", kind.caption), {}};
  for (const PlanePanel& panel : m.panels) {
    if (panel.kind != &kind) continue;
    const TsneResult& result = panel.result;
    ScatterPanel drawn{str("layer ", panel.layer, ", KL ", format_number("%.2f", result.divergence)), {}};
    for (auto at = result.points.begin(); at != result.points.end(); at += m.plan.per_class)
      drawn.classes.emplace_back(at, at + m.plan.per_class);
    row.panels.push_back(std::move(drawn));
  }
  return row;
}

class TsneAnalysis : public OccurrenceAnalysis<PlaneModel> {
 public:
  explicit TsneAnalysis(std::shared_ptr<OccurrenceOptions> shared)
      : OccurrenceAnalysis("tsne", "t-SNE of values and hidden states at four words, by layer", std::move(shared),
                           250) {}
  void add_flags(CLI::App& app) override {
    own(app, {add_counts(app, "--layers", layers_, "tsne: layers, from 0 (default: six, from early to late)"),
              add_integer(app, "--tsne-vectors", per_class_, 20, 5000,
                          "tsne: vectors of each class, the first in reading order of at most --sequences windows")});
  }
  void measure(Subject& subject, const AnalysisOptions& o) override;
  Finding finding(const AnalysisOptions& o) const override;

 private:
  std::vector<int> layers_of(const Subject& subject) const;
  std::vector<int64_t> layers_;  // not negative
  TsneOptions tsne_;
};

std::vector<int> TsneAnalysis::layers_of(const Subject& subject) const {
  std::vector<int> layers;
  for (const int64_t layer : layers_) {
    if (layer >= subject.layers())
      fail(Exit::usage, "--layers ", layer, ": the layers of ", subject.name, " are 0 to ", subject.layers() - 1);
    layers.push_back(static_cast<int>(layer));
  }
  return layers_.empty() ? layers_like_shown(subject.layers()) : layers;
}

void TsneAnalysis::measure(Subject& subject, const AnalysisOptions& o) {
  std::vector<int> layers = layers_of(subject);
  PlaneModel m{plan(subject, o), std::move(layers)};
  const Probe probe(subject.model, 1, 1);
  std::vector<std::string> names;
  for (const VectorKind& kind : plane_kinds)
    for (const int layer : m.layers)
      if (probe.has(kind.name(layer))) {  // a layer without attention over tokens has no values
        m.panels.push_back({&kind, layer});
        names.push_back(kind.name(layer));
      }
  const VectorsByName vectors =
      collect(subject, o, m.plan, names, [&](int64_t C) { return tsne_flops(m.plan.vectors(), C, tsne_); });
  Ticker ticker(printable(subject.name), "t-SNE's iteration");
  std::mutex telling;
  int64_t done = 0;
  const auto stepped = [&] {
    const std::lock_guard<std::mutex> one(telling);
    ticker.tell(++done, tsne_.iterations * std::ssize(names));
  };
  at_once(names.size(), [&](size_t i) {
    const Vectors& of_layer = vectors.at(names[i]);
    m.panels[i].result = tsne(of_layer.rows, of_layer.C, tsne_, stepped);
  });
  all_.push_back(std::move(m));
}

Finding TsneAnalysis::finding(const AnalysisOptions&) const {
  Finding found{"t-SNE of values and hidden states at words"};
  std::vector<ScatterRow> rows;
  std::vector<std::string> settings;
  for (const PlaneModel& m : all_) {
    settings.push_back(occurrences_text(m.plan));
    found.add(plane_table(m, tsne_), plane_json(m));
  }
  for (const VectorKind& kind : plane_kinds)
    for (size_t i = 0; i < all_.size(); ++i) rows.push_back(plane_row(all_[i], kind, names()[i]));
  std::erase_if(rows, [](const ScatterRow& row) { return row.panels.empty(); });
  found.json.update({{"perplexity", tsne_.perplexity},
                     {"angle", tsne_.angle},
                     {"early_exaggeration", tsne_.exaggeration},
                     {"exaggerated_iterations", tsne_.exaggerated},
                     {"iterations", tsne_.iterations},
                     {"same_places", all_same_places()}});
  found.csv = plane_csv(all_);
  found.svg = scatter_svg("Values and hidden states at words, by t-SNE", all_[0].plan.classes.names, rows);
  found.measured =
      str("Each point is one token's vector: the value as attention reads it, or the hidden state that the layer puts "
          "out. ",
          text_of_each(names(), settings),
          ". Barnes-Hut t-SNE (perplexity 30, angle 0.5, 1,000 iterations, start from two principal components, "
          "rows scaled to length 1) lays neighbours beside each other; distances between groups and directions "
          "mean nothing. KL is what the picture fails to tell, in nats: lower is truer.");
  for (const VectorKind& kind : plane_kinds) {
    const std::string what = str("Mean KL of ", kind.column, " over the layers shown, in nats");
    found.shown += (found.shown.empty() ? "" : " ") +
                   numbers(what, "%.2f", [&](const PlaneModel& m) { return m.mean_divergence(kind); });
  }
  found.paper =
      "LIMe (arXiv 2502.09245v2): in deep layers of a LLaMA the values at words as alike as is, are, was and were "
      "often fall into regions that overlap, with LIMe they do not; version 1 shows it in its figure 6. Hidden states "
      "overlap in late layers of both models (version 1, figure 15).";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> tsne_analysis(std::shared_ptr<OccurrenceOptions> shared) {
  return std::make_unique<TsneAnalysis>(std::move(shared));
}

}  // namespace crossply
