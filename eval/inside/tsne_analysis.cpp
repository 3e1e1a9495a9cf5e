// analyze --what tsne: the values at the words is, are, was and were, drawn in the plane, by layer.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>

#include "cli/format.h"
#include "cli/ticker.h"
#include "engine/at_once.h"
#include "engine/json.h"
#include "engine/printable.h"
#include "eval/inside/occurrences.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"
#include "eval/inside/scatter.h"

namespace crossply {
namespace {

// The usual layers, of a model of 16 and counted from 1.
constexpr int shown_layers[] = {2, 4, 7, 12, 15, 16}, shown_of = 16;

struct PlaneModel {
  std::string model, arch, title;
  OccurrencePlan plan;
  std::vector<int> layers = {};  // from 0
  std::vector<TsneResult> results = {};
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
                        wrap(str("values as attention reads them; ", occurrences_text(m.plan), "; perplexity ",
                                 o.perplexity, ", ", format_count(o.iterations), " iterations"),
                             80, 0),
                        "\n\n");
  std::vector<std::vector<std::string>> table = {{"layer", "KL divergence"}};
  for (size_t i = 0; i < m.layers.size(); ++i)
    table.push_back({std::to_string(m.layers[i]), format_number("%.4f", m.results[i].divergence)});
  return out + format_table(table);
}

nlohmann::json plane_json(const PlaneModel& m) {
  nlohmann::json json = occurrences_json(m.plan), panels = nlohmann::json::array();
  for (size_t i = 0; i < m.layers.size(); ++i) {
    nlohmann::json x = nlohmann::json::array(), y = nlohmann::json::array();
    for (const PlanePoint& point : m.results[i].points) x.push_back(point.x), y.push_back(point.y);
    panels.push_back({{"layer", m.layers[i]}, {"kl_divergence", m.results[i].divergence}, {"x", x}, {"y", y}});
  }
  json["model"] = utf8_or_escaped(m.model), json["arch"] = m.arch, json["panels"] = panels;
  return json;
}

std::string plane_csv(const std::vector<PlaneModel>& all) {
  std::string out = "model,layer,class,x,y\n";
  for (const PlaneModel& m : all)
    for (size_t i = 0; i < m.layers.size(); ++i)
      for (size_t n = 0; n < m.results[i].points.size(); ++n)
        out += str(csv_field(printable(m.model)), ",", m.layers[i], ",",
                   csv_field(printable(m.plan.classes.names[n / static_cast<size_t>(m.plan.per_class)])), ",",
                   csv_cell(m.results[i].points[n].x), ",", csv_cell(m.results[i].points[n].y), "\n");
  return out;
}

ScatterRow plane_row(const PlaneModel& m, const std::string& name) {
  ScatterRow row{name, {}};
  for (size_t i = 0; i < m.layers.size(); ++i) {
    ScatterPanel panel{str("layer ", m.layers[i], ", KL ", format_number("%.2f", m.results[i].divergence)), {}};
    for (auto at = m.results[i].points.begin(); at != m.results[i].points.end(); at += m.plan.per_class)
      panel.classes.emplace_back(at, at + m.plan.per_class);
    row.panels.push_back(std::move(panel));
  }
  return row;
}

class TsneAnalysis : public Analysis {
 public:
  explicit TsneAnalysis(std::shared_ptr<OccurrenceOptions> shared) : shared_(std::move(shared)) {}
  std::string name() const override { return "tsne"; }
  std::string about() const override { return "t-SNE of the values at four words, by layer"; }
  void add_flags(CLI::App& app) override {
    own(app, {add_counts(app, "--layers", layers_, "tsne: layers, from 0 (default: six, from early to late)"),
              add_integer(app, "--tsne-vectors", per_class_, 20, 5000,
                          "tsne: vectors of each class, the first in reading order of at most --sequences windows")});
  }
  std::string refuses(const Subject& subject) const override { return refuses_classes(subject, *shared_); }
  std::vector<std::string> more_files(const AnalysisOptions& o) const override {
    return shared_->keep_vectors ? model_files(name(), o) : std::vector<std::string>();
  }
  void measure(Subject& subject, const AnalysisOptions& o) override;
  Finding finding(const AnalysisOptions& o) const override;

 private:
  std::vector<int> layers_of(const Subject& subject, const Probe& probe) const;
  std::shared_ptr<OccurrenceOptions> shared_;
  std::vector<int64_t> layers_;  // not negative
  int64_t per_class_ = 250, limit_ = 0;
  TsneOptions tsne_;
  std::vector<PlaneModel> all_;
};

std::vector<int> TsneAnalysis::layers_of(const Subject& subject, const Probe& probe) const {
  std::vector<int> layers;
  for (const int64_t layer : layers_) {
    if (layer >= subject.layers())
      fail(Exit::usage, "--layers ", layer, ": the layers of ", subject.name, " are 0 to ", subject.layers() - 1);
    layers.push_back(static_cast<int>(layer));
  }
  if (layers_.empty()) layers = layers_like_shown(subject.layers());
  for (const int layer : layers_.empty() ? std::vector<int>() : layers)
    if (!probe.has(str("value.", layer)))
      fail(Exit::usage, "--layers ", layer, ": this layer of ", subject.name, " has no attention over tokens");
  std::erase_if(layers, [&](int layer) { return !probe.has(str("value.", layer)); });
  if (layers.empty()) fail(Exit::usage, subject.name, ": its layers have no attention over tokens, so no values");
  return layers;
}

void TsneAnalysis::measure(Subject& subject, const AnalysisOptions& o) {
  std::vector<int> layers = layers_of(subject, Probe(subject.model, 1, 1));
  PlaneModel m{subject.name, subject.config().arch, subject.title(),
               plan_occurrences(subject, o, *shared_, per_class_, &limit_), std::move(layers)};
  note_fewer(m.plan, per_class_, subject);
  if (!all_.empty()) require_same_classes(all_[0].plan, all_[0].model, m.plan, m.model);
  std::vector<std::string> names;
  for (const int layer : m.layers) names.push_back(str("value.", layer));
  const VectorsByName vectors = collect_vectors(name(), subject, m.plan, names,
                                                [&](int64_t C) { return tsne_flops(m.plan.vectors(), C, tsne_); });
  if (shared_->keep_vectors && !o.out.empty())
    std::printf("%s", write_vectors(name(), o, m.model, m.plan, vectors).c_str());
  m.results.resize(names.size());
  Ticker ticker(printable(subject.name), "t-SNE's iteration");
  std::mutex telling;
  int64_t done = 0;
  const auto stepped = [&] {
    const std::lock_guard<std::mutex> one(telling);
    ticker.tell(++done, tsne_.iterations * std::ssize(names));
  };
  at_once(names.size(), [&](size_t i) {
    const Vectors& of_layer = vectors.at(names[i]);
    m.results[i] = tsne(of_layer.rows, of_layer.C, tsne_, stepped);
  });
  all_.push_back(std::move(m));
}

Finding TsneAnalysis::finding(const AnalysisOptions&) const {
  Finding found;
  found.title = "t-SNE of values at words";
  std::vector<ScatterRow> rows;
  const std::vector<std::string> names = short_names_of(all_);
  std::vector<std::string> settings;
  for (const PlaneModel& m : all_) settings.push_back(occurrences_text(m.plan));
  for (const PlaneModel& m : all_) {
    found.add(plane_table(m, tsne_), plane_json(m));
    rows.push_back(plane_row(m, names[rows.size()]));
  }
  found.json.update(
      {{"perplexity", tsne_.perplexity},
       {"angle", tsne_.angle},
       {"early_exaggeration", tsne_.exaggeration},
       {"exaggerated_iterations", tsne_.exaggerated},
       {"iterations", tsne_.iterations},
       {"same_places", std::ranges::all_of(all_, [&](const auto& m) { return same_places(m.plan, all_[0].plan); })}});
  found.csv = plane_csv(all_);
  found.svg = scatter_svg("Values as attention reads them, by t-SNE", all_[0].plan.classes.names, rows);
  found.measured =
      str("Each point is the value vector, as attention reads it, of one token: ", text_of_each(names, settings),
          ". Barnes-Hut t-SNE (perplexity 30, angle 0.5, 1,000 iterations, start from two principal components, "
          "rows scaled to length 1) lays neighbours beside each other; distances between groups and directions "
          "mean nothing. KL is what the picture fails to tell, in nats: lower is truer.");
  std::vector<double> means;
  for (const PlaneModel& m : all_) {
    std::vector<double> layers;
    for (const TsneResult& result : m.results) layers.push_back(result.divergence);
    means.push_back(mean_of_rows({layers}));
  }
  found.shown = numbers_of_models("Mean KL over the layers shown, in nats", names, means, "%.2f");
  found.paper =
      "LIMe (arXiv 2502.09245v2): in deep layers of a LLaMA the values at words as alike as is, are, was and were "
      "often fall into regions that overlap, with LIMe they do not; version 1 shows it in its figure 6.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> tsne_analysis(std::shared_ptr<OccurrenceOptions> shared) {
  return std::make_unique<TsneAnalysis>(std::move(shared));
}

}  // namespace crossply
