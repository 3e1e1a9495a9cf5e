// analyze --what sinks: where each head looks, by layer: at the first token, at the current one, how far back, and how
// widely.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "cli/format.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/analysis.h"
#include "eval/inside/heat_map.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"

namespace crossply {
namespace {

constexpr UsualWindows usual_sinks = {100, 64};
constexpr double sink_threshold = 0.3;  // epsilon of arXiv 2410.10781

// Of one head: means over the rows t >= 1 of all windows. Row 0 has one column only, the same in all heads.
struct HeadSight {
  double first = 0, own = 0;  // of the probability: on position 0, on t
  double distance = 0;        // sum_j P(t, j) (t - j), tokens
  double entropy = 0;         // -sum_j P(t, j) ln P(t, j), nats
  bool sink() const { return first > sink_threshold; }
};

struct SightOfModel : WindowedModel {
  using WindowedModel::WindowedModel;
  std::vector<std::vector<HeadSight>> layers = {};

  int64_t all_heads() const {
    int64_t count = 0;
    for (const auto& layer : layers) count += std::ssize(layer);
    return count;
  }
  int64_t sinks() const {
    int64_t count = 0;
    for (const auto& layer : layers) count += std::ranges::count_if(layer, &HeadSight::sink);
    return count;
  }
};

double mean_of(const std::vector<HeadSight>& layer, double HeadSight::*number) {
  double sum = 0;
  for (const HeadSight& head : layer) sum += head.*number;
  return sum / static_cast<double>(layer.size());
}

// Adds the rows 1 .. n-1 of a head's probabilities P (n, n).
void add_rows(HeadSight& head, const double* P, int64_t n) {
  for (int64_t t = 1; t < n; ++t) {
    const double* row = P + t * n;
    head.first += row[0], head.own += row[t];
    for (int64_t j = 0; j <= t; ++j) {
      head.distance += row[j] * static_cast<double>(t - j);
      if (row[j] > 0) head.entropy -= row[j] * std::log(row[j]);
    }
  }
}

// The model's forward, and of every head the products of queries and keys below the diagonal again.
double sinks_flops(const Probe& probe, double N, double T) {
  double flops = probe.forward_flops();
  for (const Probe::Attention& op : probe.attentions())
    flops += static_cast<double>(op.heads * probe.shape(str("attended.", op.layer))[3]) * T * T;
  return N * flops;
}

SightOfModel sight_of(Subject& subject, const std::vector<TokenWindow>& windows) {
  SightOfModel m(subject, windows);
  const auto T = static_cast<int64_t>(windows[0].tokens.size());
  Probe probe(subject.model, 1, T);
  if (probe.attentions().empty()) fail(Exit::usage, m.model, ": no layer of ", m.arch, " has attention over tokens");
  m.layers.resize(static_cast<size_t>(subject.layers()));
  for (const Probe::Attention& op : probe.attentions())
    m.layers.at(static_cast<size_t>(op.layer)).resize(static_cast<size_t>(op.end()));
  std::vector<std::vector<double>> matrices(static_cast<size_t>(omp_get_max_threads()));  // (T, T) of each thread
  for (auto& P : matrices) P.resize(static_cast<size_t>(T * T));
  say_cost("sinks", subject, windows, sinks_flops(probe, static_cast<double>(windows.size()), static_cast<double>(T)),
           probe.bytes() + 8 * static_cast<double>(std::ssize(matrices) * T * T));
  Ticker ticker(printable(subject.name), "window");
  double rows = 0;
  for (size_t w = 0; w < windows.size(); ++w) {
    const int64_t n = windows[w].length;
    rows += static_cast<double>(std::max<int64_t>(n - 1, 0));
    probe.watch_attention([&](size_t i, const AttentionInputs& inputs) {
      const Probe::Attention& op = probe.attentions()[i];
      HeadSight* heads = &m.layers[static_cast<size_t>(op.layer)][static_cast<size_t>(op.first)];
#pragma omp parallel for schedule(dynamic, 1)
      for (int64_t h = 0; h < op.heads; ++h) {
        double* P = matrices[static_cast<size_t>(omp_get_thread_num())].data();
        inputs.probabilities(0, h, n, P);
        add_rows(heads[h], P, n);
      }
    });
    probe.run(windows[w].tokens.data());
    ticker.tell(static_cast<int64_t>(w) + 1, std::ssize(windows));
  }
  if (rows == 0) fail(Exit::usage, "--what sinks needs windows of two tokens or more");
  for (auto& layer : m.layers)
    for (HeadSight& head : layer)
      for (double HeadSight::*number : {&HeadSight::first, &HeadSight::own, &HeadSight::distance, &HeadSight::entropy})
        head.*number /= rows;
  return m;
}

// -----------------------------------------------------------------------------------------------------------------
// Telling.

std::string sinks_table(const SightOfModel& m, uint64_t seed) {
  std::vector<std::vector<std::string>> rows = {
      {"layer", "first token", "own token", "distance", "entropy", "sink heads"}};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const auto& layer = m.layers[l];
    if (layer.empty()) rows.push_back({std::to_string(l), "-", "-", "-", "-", "no attention"});
    else
      rows.push_back({std::to_string(l), format_number("%.3f", mean_of(layer, &HeadSight::first)),
                      format_number("%.3f", mean_of(layer, &HeadSight::own)),
                      format_number("%.1f", mean_of(layer, &HeadSight::distance)),
                      format_number("%.2f", mean_of(layer, &HeadSight::entropy)),
                      str(std::ranges::count_if(layer, &HeadSight::sink), " of ", layer.size())});
  }
  const double share = static_cast<double>(m.sinks()) / static_cast<double>(m.all_heads());
  return str(m.title, "\n", m.lengths.text(), ", seed ", seed, "; means over heads and positions from the second\n\n",
             format_table(rows), "\nheads that put more than ", sink_threshold, " on the first token: ", m.sinks(),
             " of ", m.all_heads(), format_number(", %.1f%%\n", 100 * share));
}

nlohmann::json sinks_json(const SightOfModel& m) {
  nlohmann::json layers = nlohmann::json::array();
  for (const auto& layer : m.layers) {
    nlohmann::json heads = nlohmann::json::array();
    for (const HeadSight& head : layer)
      heads.push_back(
          {{"first", head.first}, {"own", head.own}, {"distance", head.distance}, {"entropy", head.entropy}});
    layers.push_back({{"heads", heads}, {"sink_heads", std::ranges::count_if(layer, &HeadSight::sink)}});
    if (layer.empty()) continue;
    layers.back()["first"] = mean_of(layer, &HeadSight::first);
    layers.back()["own"] = mean_of(layer, &HeadSight::own);
    layers.back()["distance"] = mean_of(layer, &HeadSight::distance);
    layers.back()["entropy"] = mean_of(layer, &HeadSight::entropy);
  }
  return m.json({{"layers", layers}, {"heads", m.all_heads()}, {"sink_heads", m.sinks()}});
}

HeatMap sight_map(const SightOfModel& m, const std::string& name, double HeadSight::*number) {
  HeatMap map{name, {}};
  for (const auto& layer : m.layers) {
    map.rows.emplace_back();
    for (const HeadSight& head : layer) map.rows.back().push_back(head.*number);
  }
  return map;
}

class AttentionSinks : public AnalysisOf<SightOfModel> {
 public:
  AttentionSinks() : AnalysisOf("sinks", "where every head looks: first token, current one, how far, how widely") {}
  void measure(Subject& subject, const AnalysisOptions& o) override {
    all_.push_back(sight_of(subject, windows_of(subject, o, usual_sinks)));
  }
  Finding finding(const AnalysisOptions& o) const override;
};

Finding AttentionSinks::finding(const AnalysisOptions& o) const {
  Finding found{"Attention sinks"};
  std::pair<HeatMapBand, double HeadSight::*> bands[] = {
      {{"attention on the first token, a share", {}, HeatScale::shares}, &HeadSight::first},
      {{"attention on the current token, a share", {}, HeatScale::shares}, &HeadSight::own},
      {{"mean distance of what is attended, tokens", {}, HeatScale::shares}, &HeadSight::distance},
      {{"entropy of a row of attention, nats", {}, HeatScale::shares}, &HeadSight::entropy}};
  found.csv = "model,layer,head,first,own,distance,entropy\n";
  for (const SightOfModel& m : all_) {
    found.add(sinks_table(m, o.seed), sinks_json(m));
    for (size_t l = 0; l < m.layers.size(); ++l)
      for (size_t h = 0; h < m.layers[l].size(); ++h) {
        const HeadSight& head = m.layers[l][h];
        found.csv += csv_row(m.model, l, h, head.first, head.own, head.distance, head.entropy);
      }
  }
  for (auto& [band, number] : bands)
    for (size_t i = 0; i < all_.size(); ++i) {
      band.maps.push_back(sight_map(all_[i], names()[i], number));
      add_mean_column(band.maps.back());
    }
  found.shown = numbers("Mean attention on the first token", "%.1f %%", [](const SightOfModel& m) {
    return 100 * mean_of_rows(sight_map(m, "", &HeadSight::first).rows);
  });
  const std::string windows = all_[0].lengths.text() + if_of_first();
  found.json.update(
      {{"sequences", all_[0].lengths.windows}, {"sink_threshold", sink_threshold}, {"same_windows", same_windows()}});
  found.svg = heat_map_svg(str("Where attention looks, ", windows), "layer", "head",
                           {bands[0].first, bands[1].first, bands[2].first, bands[3].first});
  found.measured = str(
      "Of each head, the mean over all positions but the first, in ", windows,
      ": the share of attention on the first token and on the current one, the mean distance in tokens of what is "
      "attended, and the entropy of the shares in nats, 0 where all is on one token. A head is called a sink where it "
      "puts more than ",
      sink_threshold, " on the first token, the threshold of Gu et al. (arXiv 2410.10781).");
  return found;
}

}  // namespace

std::unique_ptr<Analysis> sinks_analysis() { return std::make_unique<AttentionSinks>(); }

}  // namespace crossply
