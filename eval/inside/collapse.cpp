// analyze --what attention: how far each head's attention has collapsed, by layer and group of layers.
#include <algorithm>
#include <cmath>
#include <exception>

#include "cli/format.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/split.h"
#include "eval/inside/analysis.h"
#include "eval/inside/attention_rank.h"
#include "eval/inside/heat_map.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"

namespace crossply {
namespace {

constexpr UsualWindows usual = {100, 100};  // the paper's

struct CollapseOptions {
  double tau = 0.9, eta = 0.9;     // of ranks and of masses
  std::vector<LayerGroup> groups;  // whose AvgRank is asked for, beside the halves
};

struct Measured : WindowedModel {
  using WindowedModel::WindowedModel;
  std::vector<LayerCollapse> layers = {};

  int64_t collapsed() const {
    int64_t count = 0;
    for (const LayerCollapse& layer : layers) count += layer.collapsed();
    return count;
  }
  int64_t all_heads() const {
    int64_t count = 0;
    for (const LayerCollapse& layer : layers) count += static_cast<int64_t>(layer.heads.size());
    return count;
  }
  std::vector<LayerGroup> halves() const {
    const size_t L = layers.size();
    return L < 2 ? std::vector<LayerGroup>{{0, L}} : std::vector<LayerGroup>{{0, L / 2}, {L / 2, L}};
  }
};

// -----------------------------------------------------------------------------------------------------------------
// Measuring.

// Adds the ranks and masses of one op's heads for one sequence of n tokens. The threads share the heads.
void add_heads(HeadCollapse* heads, const std::string& model, const Probe::Attention& op, const AttentionInputs& inputs,
               int64_t n, const CollapseOptions& o) {
  std::exception_ptr error;
#pragma omp parallel
  {
    std::vector<double> P;
#pragma omp for schedule(dynamic, 1)
    for (int64_t h = 0; h < op.heads; ++h) {
      try {
        P.resize(static_cast<size_t>(n * n));
        inputs.probabilities(0, h, n, P.data());
        if (!std::all_of(P.begin(), P.end(), [](double p) { return std::isfinite(p); }))
          fail_not_finite(model, str("the attention of layer ", op.layer, ", head ", h));
        const RankMass found = rank_and_mass(P.data(), n, o.tau, o.eta);
        heads[h].ranks += found.rank, heads[h].masses += found.mass;
      } catch (...) {  // no exception may leave a parallel region
#pragma omp critical
        error = std::current_exception();
      }
    }
  }
  if (error) std::rethrow_exception(error);
  if (!inputs.finite_output()) fail_not_finite(model, str("what the attention of layer ", op.layer, " puts out"));
}

// The model's forward, and of every head the spectrum of a window's matrix: about 4/3 T^3 multiply-adds.
double flops_of(const Probe& probe, double N, double T) {
  double heads = 0;
  for (const Probe::Attention& op : probe.attentions()) heads += static_cast<double>(op.heads);
  return N * (probe.forward_flops() + heads * 8 / 3 * T * T * T);
}

Measured measured_of(Subject& subject, const std::vector<TokenWindow>& windows, const CollapseOptions& o) {
  Measured m(subject, windows);
  const auto T = static_cast<int64_t>(windows[0].tokens.size());
  Probe probe(subject.model, 1, T);
  say_cost("attention", subject, windows, flops_of(probe, static_cast<double>(windows.size()), static_cast<double>(T)),
           probe.bytes());
  m.layers.resize(static_cast<size_t>(subject.layers()), LayerCollapse{std::ssize(windows), {}});
  for (const Probe::Attention& op : probe.attentions())
    m.layers.at(static_cast<size_t>(op.layer)).heads.resize(static_cast<size_t>(op.end()));
  Ticker ticker(printable(subject.name), "window");
  for (size_t i = 0; i < windows.size(); ++i) {
    probe.watch_attention([&](size_t at, const AttentionInputs& inputs) {
      const Probe::Attention& op = probe.attentions()[at];
      HeadCollapse* heads = &m.layers[static_cast<size_t>(op.layer)].heads[static_cast<size_t>(op.first)];
      add_heads(heads, subject.name, op, inputs, windows[i].length, o);
    });
    probe.run(windows[i].tokens.data());
    ticker.tell(static_cast<int64_t>(i) + 1, std::ssize(windows));
  }
  return m;
}

// -----------------------------------------------------------------------------------------------------------------
// Telling.

// "layers 3 to 5", numbered from 0.
std::string range_text(const LayerGroup& group) {
  return group.begin + 1 == group.end ? str("layer ", group.begin) : str("layers ", group.begin, " to ", group.end - 1);
}

// To two digits, or to so many that it stands on the same side of the boundary that judges it as the number does.
std::string rank_text(double rank, double boundary) {
  for (int digits = 2;; ++digits) {
    const std::string text = format_number(str("%.", digits, "f").c_str(), rank);
    const double told = std::stod(text);
    if (digits == 17 || !std::isfinite(rank) ||
        ((told < boundary) == (rank < boundary) && (told > boundary) == (rank > boundary)))
      return text;
  }
}

std::string groups_text(const Measured& m, const std::vector<LayerGroup>& groups) {
  std::string out;
  for (const LayerGroup& group : groups)
    out +=
        str("  ", range_text(group), ": AvgRank ", rank_text(average_rank(m.layers, group.begin, group.end), 2), "\n");
  return out;
}

std::string table_of(const Measured& m, const CollapseOptions& o, uint64_t seed) {
  std::string out = str(m.title, "\n", m.lengths.text(), ", seed ", seed, ", tau ", o.tau, ", eta ", o.eta, "\n\n");
  std::vector<std::vector<std::string>> table = {
      {"layer", "MaxRank", "mean rank", "AvgMass", "collapsed heads", "lazy"}};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const LayerCollapse& layer = m.layers[l];
    if (layer.heads.empty()) table.push_back({std::to_string(l), "-", "-", "-", "no attention", "-"});
    else
      table.push_back({std::to_string(l), rank_text(layer.max_rank(), 1), format_number("%.2f", layer.mean_rank()),
                       format_number("%.2f", layer.mean_mass()), str(layer.collapsed(), " of ", layer.heads.size()),
                       layer.lazy() ? "yes" : "no"});
  }
  const std::vector<LayerGroup> lazy = lazy_groups(m.layers);
  const int64_t lazy_layers =
      std::count_if(m.layers.begin(), m.layers.end(), [](const LayerCollapse& layer) { return layer.lazy(); });
  return out + str(format_table(table), "\nhalves:\n", groups_text(m, m.halves()), o.groups.empty() ? "" : "groups:\n",
                   groups_text(m, o.groups), "lazy groups, of AvgRank below 2:", lazy.empty() ? " none" : "", "\n",
                   groups_text(m, lazy), "lazy layers: ", lazy_layers, " of ", m.layers.size(),
                   "\ncollapsed heads, of rank below 1.5: ", m.collapsed(), " of ", m.all_heads(),
                   format_number(", %.1f%%\n",
                                 100 * static_cast<double>(m.collapsed()) / static_cast<double>(m.all_heads())));
}

nlohmann::json groups_json(const Measured& m, const std::vector<LayerGroup>& groups) {
  nlohmann::json list = nlohmann::json::array();
  for (const LayerGroup& group : groups)
    list.push_back({{"first_layer", group.begin},
                    {"last_layer", group.end - 1},
                    {"avg_rank", average_rank(m.layers, group.begin, group.end)}});
  return list;
}

nlohmann::json to_json(const Measured& m, const CollapseOptions& o) {
  nlohmann::json layers = nlohmann::json::array();
  for (const LayerCollapse& layer : m.layers) {
    nlohmann::json heads = nlohmann::json::array();
    for (size_t h = 0; h < layer.heads.size(); ++h) heads.push_back({{"rank", layer.rank(h)}, {"mass", layer.mass(h)}});
    layers.push_back({{"max_rank", layer.max_rank()},
                      {"mean_rank", layer.mean_rank()},
                      {"avg_mass", layer.mean_mass()},
                      {"lazy", layer.lazy()},
                      {"collapsed_heads", layer.collapsed()},
                      {"heads", heads}});
  }
  return m.json({{"layers", layers},
                 {"halves", groups_json(m, m.halves())},
                 {"groups", groups_json(m, o.groups)},
                 {"lazy_groups", groups_json(m, lazy_groups(m.layers))},
                 {"heads", m.all_heads()},
                 {"collapsed_heads", m.collapsed()}});
}

std::string csv_of(const std::vector<Measured>& all) {
  std::string out = "model,layer,head,rank,mass\n";
  for (const Measured& m : all)
    for (size_t l = 0; l < m.layers.size(); ++l)
      for (size_t h = 0; h < m.layers[l].heads.size(); ++h)
        out += csv_row(m.model, l, h, m.layers[l].rank(h), m.layers[l].mass(h));
  return out;
}

// A row for each group, and a column for each model.
HeatMapBand groups_band(const std::vector<Measured>& all, const std::vector<std::string>& names,
                        const std::vector<LayerGroup>& groups) {
  HeatMap map{"", {}, {}, names};
  for (const LayerGroup& group : groups) {
    map.row_names.push_back(str(group.begin, group.begin + 1 == group.end ? "" : str("-", group.end - 1)));
    map.rows.emplace_back();
    for (const Measured& m : all) map.rows.back().push_back(average_rank(m.layers, group.begin, group.end));
  }
  HeatMapBand band{"AvgRank of groups of layers", {map}};
  band.column = "model";
  return band;
}

// "0-3", or "5" for a single layer.
LayerGroup read_group(const std::string& text) {
  const size_t dash = text.find('-');
  const auto layer = [](const std::string& number) {
    return static_cast<size_t>(read_integer("--groups", number, 0, max_size));
  };
  const LayerGroup group{layer(text.substr(0, dash)),
                         layer(dash == std::string::npos ? text : text.substr(dash + 1)) + 1};
  if (group.begin >= group.end)
    refuse_value("--groups", str("'", text, "' ends before it begins; give first-last, as in 0-3"));
  return group;
}

// "0-3,4-7"
void add_groups(std::vector<LayerGroup>& groups, const std::string& text) {
  for (const std::string& group : split_commas(text)) groups.push_back(read_group(group));
}

HeatMap heat_map(const Measured& m, const std::string& name, double (LayerCollapse::*number)(size_t) const) {
  HeatMap map{name, {}};
  for (const LayerCollapse& layer : m.layers) {
    map.rows.emplace_back();
    for (size_t h = 0; h < layer.heads.size(); ++h) map.rows.back().push_back((layer.*number)(h));
  }
  return map;
}

class AttentionCollapse : public AnalysisOf<Measured> {
 public:
  AttentionCollapse() : AnalysisOf("attention", "rank and mass of every head's attention, lazy layers") {}
  void add_flags(CLI::App& app) override {
    const auto set_groups = [this](const std::vector<std::string>& texts) {
      for (const std::string& text : texts) add_groups(o_.groups, text);
    };
    own(app, {add_number(app, "--tau", o_.tau, 0.01, 0.999, "attention: the rank takes in this share of the energy"),
              add_number(app, "--eta", o_.eta, 0.01, 0.999, "attention: so does the mass"),
              add_parsed_list(app, "--groups", set_groups, "INT-INT,...",
                              "attention: AvgRank of these groups of layers too, from 0: 0-5,6-11")});
  }
  std::string refuses(const Subject& subject) const override {
    for (const LayerGroup& group : o_.groups)
      if (group.end > static_cast<size_t>(subject.layers()))
        return str("--groups: there is no layer ", group.end - 1, "; the layers are 0 to ", subject.layers() - 1);
    return "";
  }
  void measure(Subject& subject, const AnalysisOptions& o) override {
    if (Probe(subject.model, 1, 1).attentions().empty())
      fail(Exit::usage, subject.name, ": no layer of ", subject.config().arch, " has attention over tokens");
    all_.push_back(measured_of(subject, windows_of(subject, o, usual), o_));
  }
  Finding finding(const AnalysisOptions& o) const override;

 private:
  CollapseOptions o_;
};

Finding AttentionCollapse::finding(const AnalysisOptions& o) const {
  Finding found{"Rank and mass of attention"};
  HeatMapBand rank{str("attention rank, k* of ", o_.tau), {}}, mass{str("attention mass, m* of ", o_.eta), {}};
  for (size_t i = 0; i < all_.size(); ++i) {
    found.add(table_of(all_[i], o_, o.seed), to_json(all_[i], o_));
    rank.maps.push_back(heat_map(all_[i], names()[i], &LayerCollapse::rank));
    mass.maps.push_back(heat_map(all_[i], names()[i], &LayerCollapse::mass));
    add_mean_column(rank.maps.back()), add_mean_column(mass.maps.back());
  }
  found.shown = numbers("Mean rank over all heads", "%.2f",
                        [](const Measured& m) { return mean_of_rows(heat_map(m, "", &LayerCollapse::rank).rows); });
  std::vector<HeatMapBand> bands = {rank, mass};
  if (!o_.groups.empty()) bands.push_back(groups_band(all_, names(), o_.groups));
  found.json.update(
      {{"sequences", all_[0].lengths.windows}, {"tau", o_.tau}, {"eta", o_.eta}, {"same_windows", same_windows()}});
  found.csv = csv_of(all_);
  found.svg = heat_map_svg(str("Attention of ", all_[0].lengths.text(), if_of_first()), "layer", "head", bands);
  found.measured = str(
      "Of the matrix of a head's attention probabilities over one window, causal: the rank is how many of its singular "
      "values, the largest first, hold ",
      o_.tau, " of the sum of their squares; the mass is how many of its columns hold ", o_.eta,
      " of it. Means over the windows. Under a causal mask a head of rank 1 looks almost only at one early token, a "
      "sink; part of a row may still lie elsewhere. A layer is lazy where all of its heads have rank 1 in all windows.",
      o_.groups.empty() ? ""
                        : " AvgRank of a group of layers is the mean of MaxRank, the largest rank of a layer's heads.");
  found.paper =
      "Inheritune (arXiv 2404.08634): in trained GPT-2 models, deeper layers are lazy more often than the others, "
      "their attention having collapsed to rank 1 and to one column.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> attention_analysis() { return std::make_unique<AttentionCollapse>(); }

}  // namespace crossply
