// analyze --what attention: how far each head's attention has collapsed, by layer and group of layers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <exception>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "cli/ticker.h"
#include "engine/file.h"
#include "engine/json.h"
#include "engine/printable.h"
#include "eval/analysis.h"
#include "eval/attention_probe.h"
#include "eval/attention_rank.h"
#include "eval/data_choice.h"
#include "eval/heat_map.h"
#include "models/json_file.h"

namespace crossply {
namespace {

constexpr int64_t usual_length = 100;  // the paper's

struct Measured {
  std::string model, arch, backbone, split;
  bool files;  // not generated data
  std::vector<TokenWindow> windows;
  std::vector<LayerCollapse> layers = {};
  size_t heads = 0;  // the most of a layer

  int64_t shortest() const {
    int64_t length = windows[0].length;
    for (const TokenWindow& window : windows) length = std::min(length, window.length);
    return length;
  }
  int64_t longest() const {
    int64_t length = 0;
    for (const TokenWindow& window : windows) length = std::max(length, window.length);
    return length;
  }
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

[[noreturn]] void fail_not_finite(const std::string& model, const std::string& what) {
  fail(Exit::not_finite, model, ": ", what,
       " is not finite; the weights are too large, so give an earlier checkpoint, or train again at a lower rate");
}

// Adds the ranks and masses of one op's heads for one sequence of n tokens. The threads share the heads.
void add_heads(HeadCollapse* heads, const std::string& model, const AttentionProbe::Op& op,
               const AttentionInputs& inputs, int64_t n, const AnalysisOptions& o) {
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

int64_t window_length(const AnalysisOptions& o, const std::string& name, const Config& config, const Source& source) {
  const int64_t model = config.max_position_embeddings, data = source.seq_len(), most = std::min(model, data);
  if (o.length > model)
    fail(Exit::usage, "--length ", o.length, ": ", name, " takes sequences of at most ", model, " tokens");
  if (o.length > data)
    fail(Exit::usage, "--length ", o.length, ": the sequences of ", o.data.spec, " have only ", data, " tokens here");
  if (o.length == 0 && most < usual_length)
    std::fprintf(stderr, "note: windows of %lld tokens, not of %lld: %s no more\n", static_cast<long long>(most),
                 static_cast<long long>(usual_length), model <= data ? "the model takes" : "the data's sequences have");
  return o.length > 0 ? o.length : std::min(usual_length, most);
}

Measured measure(const std::string& name, const AnalysisOptions& o) {
  LoadedModel model(name, o.device, false);
  const ModelData data = open_data(o.data, o.split, std::nullopt, model, name);
  const int64_t T = window_length(o, name, model.config, data.source());
  Measured measured{name,
                    model.config.arch,
                    model.config.backbone,
                    describe_split(data.choice, false),
                    data.choice.files,
                    random_windows(data.source(), T, o.sequences, o.seed)};
  AttentionProbe probe(*model.device, model.params, model.config, T);
  measured.layers.resize(static_cast<size_t>(model.config.num_hidden_layers), LayerCollapse{o.sequences, {}});
  std::vector<size_t> first;  // of each op among the heads of its layer
  for (const AttentionProbe::Op& op : probe.ops()) {
    std::vector<HeadCollapse>& heads = measured.layers.at(static_cast<size_t>(op.layer)).heads;
    first.push_back(heads.size());
    heads.resize(heads.size() + static_cast<size_t>(op.heads));
    measured.heads = std::max(measured.heads, heads.size());
  }
  if (probe.ops().empty()) fail(Exit::usage, name, ": no layer of ", model.config.arch, " has attention over tokens");
  Ticker ticker(printable(name), "window");
  for (int64_t i = 0; i < o.sequences; ++i) {
    const TokenWindow& window = measured.windows[static_cast<size_t>(i)];
    probe.run(window.tokens.data(), [&](size_t at, const AttentionInputs& inputs) {
      const AttentionProbe::Op& op = probe.ops()[at];
      std::vector<HeadCollapse>& heads = measured.layers[static_cast<size_t>(op.layer)].heads;
      add_heads(&heads[first[at]], name, op, inputs, window.length, o);
    });
    ticker.tell(i + 1, o.sequences);
  }
  return measured;
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

std::string windows_text(const Measured& m) {
  const int64_t shortest = m.shortest(), longest = m.longest();
  return str(format_count(static_cast<int64_t>(m.windows.size())), " windows of ",
             shortest == longest ? "" : str(shortest, " to "), longest, " tokens");
}

void print(const Measured& m, const AnalysisOptions& o) {
  std::printf("%s: %s%s, %zu layers\n%s\n%s, seed %llu, tau %g, eta %g\n\n", printable(m.model).c_str(), m.arch.c_str(),
              m.arch == m.backbone ? "" : (" on " + m.backbone).c_str(), m.layers.size(), m.split.c_str(),
              windows_text(m).c_str(), static_cast<unsigned long long>(o.seed), o.tau, o.eta);
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
  std::printf("%s\nhalves:\n%s", format_table(table).c_str(), groups_text(m, m.halves()).c_str());
  const std::vector<LayerGroup> lazy = lazy_groups(m.layers);
  std::printf("lazy groups, of AvgRank below 2:%s\n%s", lazy.empty() ? " none" : "", groups_text(m, lazy).c_str());
  const int64_t lazy_layers =
      std::count_if(m.layers.begin(), m.layers.end(), [](const LayerCollapse& layer) { return layer.lazy(); });
  std::printf("lazy layers: %lld of %zu\ncollapsed heads, of rank below 1.5: %lld of %lld, %.1f%%\n",
              static_cast<long long>(lazy_layers), m.layers.size(), static_cast<long long>(m.collapsed()),
              static_cast<long long>(m.all_heads()),
              100 * static_cast<double>(m.collapsed()) / static_cast<double>(m.all_heads()));
}

nlohmann::json groups_json(const Measured& m, const std::vector<LayerGroup>& groups) {
  nlohmann::json list = nlohmann::json::array();
  for (const LayerGroup& group : groups)
    list.push_back({{"first_layer", group.begin},
                    {"last_layer", group.end - 1},
                    {"avg_rank", average_rank(m.layers, group.begin, group.end)}});
  return list;
}

nlohmann::json to_json(const Measured& m) {
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
  return {{"model", utf8_or_escaped(m.model)},
          {"arch", m.arch},
          {"backbone", m.backbone},
          {"split", m.split},
          {"shortest_window", m.shortest()},
          {"longest_window", m.longest()},
          {"layers", layers},
          {"halves", groups_json(m, m.halves())},
          {"lazy_groups", groups_json(m, lazy_groups(m.layers))},
          {"heads", m.all_heads()},
          {"collapsed_heads", m.collapsed()}};
}

std::string csv_of(const std::vector<Measured>& all) {
  std::string out = "model,layer,head,rank,mass\n";
  for (const Measured& m : all) {
    std::string name = printable(m.model);
    for (size_t at = 0; (at = name.find('"', at)) != std::string::npos; at += 2) name.insert(at, "\"");
    for (size_t l = 0; l < m.layers.size(); ++l)
      for (size_t h = 0; h < m.layers[l].heads.size(); ++h)
        out += str("\"", name, "\",", l, ",", h, ",", m.layers[l].rank(h), ",", m.layers[l].mass(h), "\n");
  }
  return out;
}

HeatMap heat_map(const Measured& m, double (LayerCollapse::*number)(size_t) const) {
  HeatMap map{m.model, {}};
  for (const LayerCollapse& layer : m.layers) {
    map.rows.emplace_back(m.heads, NAN);
    for (size_t h = 0; h < layer.heads.size(); ++h) map.rows.back()[h] = (layer.*number)(h);
  }
  return map;
}

bool same_windows(const Measured& a, const Measured& b) {
  return std::ranges::equal(a.windows, b.windows,
                            [](const TokenWindow& x, const TokenWindow& y) { return x.tokens == y.tokens; });
}

// Why, and what makes them equal, if anything does.
void note_other_windows(const Measured& m, const Measured& first) {
  const int64_t length = std::min(m.longest(), first.longest());
  const std::string why = m.longest() != first.longest() ? str("of ", m.longest(), " tokens, not ", first.longest())
                          : m.split != first.split       ? "from another split, or one of another run"
                                                         : "from a split that is cut at another place";
  std::fprintf(stderr, "note: %s was measured on other windows than %s: %s%s\n", printable(m.model).c_str(),
               printable(first.model).c_str(), why.c_str(),
               m.files ? str("; --split all --length ", length, " gives both the same").c_str() : "");
}

void write(const std::vector<Measured>& all, const AnalysisOptions& o) {
  nlohmann::json models = nlohmann::json::array();
  const bool same = std::ranges::all_of(all, [&](const Measured& m) { return same_windows(m, all[0]); });
  HeatMapBand rank{str("attention rank, k* of ", o.tau), {}}, mass{str("attention mass, m* of ", o.eta), {}};
  for (const Measured& m : all) {
    models.push_back(to_json(m));
    rank.maps.push_back(heat_map(m, &LayerCollapse::rank));
    mass.maps.push_back(heat_map(m, &LayerCollapse::mass));
  }
  const nlohmann::json json = {{"crossply", "analyze"},
                               {"what", "attention"},
                               {"data", utf8_or_escaped(o.data.spec)},
                               {"sequences", o.sequences},
                               {"seed", o.seed},
                               {"tau", o.tau},
                               {"eta", o.eta},
                               {"same_windows", same},
                               {"models", models}};
  const std::string base = o.out + "/attention";
  const std::pair<const char*, std::string> contents[] = {
      {".json", json.dump(1) + "\n"},  // first: it says whose the others are
      {".csv", csv_of(all)},
      {".svg", heat_map_svg(str("Attention of ", windows_text(all[0])), "layer", "head", {rank, mass})}};
  std::deque<OutputFile> files;  // complete, all three, before the first takes its place
  for (const auto& [type, text] : contents)
    files.emplace_back(base + type, text.size()).write(text.data(), text.size());
  for (OutputFile& file : files) file.commit();
  std::printf("\nwrote %s.json, .csv and .svg\n", printable(base).c_str());
}

}  // namespace

void analyze_attention(const AnalysisOptions& o) {
  std::vector<Measured> all;
  for (const std::string& name : o.models) {
    if (!all.empty()) std::printf("\n");
    all.push_back(measure(name, o));
    print(all.back(), o);
    std::fflush(stdout);
    if (!same_windows(all.back(), all[0])) note_other_windows(all.back(), all[0]);
  }
  if (!o.out.empty()) write(all, o);
}

}  // namespace crossply
