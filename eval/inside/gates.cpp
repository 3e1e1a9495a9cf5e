#include "eval/inside/gates.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/svg.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"
#include "eval/inside/analysis.h"
#include "eval/inside/heat_map.h"
#include "eval/inside/representation.h"

namespace crossply {

void GateMoments::add(const std::vector<double>& gates, int64_t heads, int64_t tokens) {
  sums_.resize(static_cast<size_t>(heads)), zeros_.resize(static_cast<size_t>(heads));
  for (int64_t at = 0; at < tokens * heads; ++at) {
    const double gate = gates[static_cast<size_t>(at)];
    const auto j = static_cast<size_t>(at % heads);
    sums_[j] += gate;
    zeros_[j] += gate == 0;
  }
  tokens_ += tokens;
}

double GateMoments::mean() const {
  return std::accumulate(sums_.begin(), sums_.end(), 0.0) / static_cast<double>(tokens_ * std::ssize(sums_));
}

double GateMoments::zeros() const {
  return static_cast<double>(std::accumulate(zeros_.begin(), zeros_.end(), int64_t{0})) /
         static_cast<double>(tokens_ * std::ssize(zeros_));
}

double GateMoments::head_variation() const {
  const double middle = mean();
  if (middle == 0) return NAN;
  double squares = 0;
  for (size_t j = 0; j < heads(); ++j) squares += std::pow(head_mean(j) - middle, 2);
  return std::sqrt(squares / static_cast<double>(heads())) / std::abs(middle);
}

double paired_error(const std::vector<double>& changed, const std::vector<double>& plain,
                    const std::vector<double>& scored) {
  const double N = static_cast<double>(plain.size()), all = std::accumulate(scored.begin(), scored.end(), 0.0);
  double ratio = 0, squares = 0;
  for (size_t i = 0; i < plain.size(); ++i) ratio += (changed[i] - plain[i]) / all;
  for (size_t i = 0; i < plain.size(); ++i) squares += std::pow(changed[i] - plain[i] - ratio * scored[i], 2);
  return N < 2 ? NAN : std::sqrt(squares * N / (N - 1)) / all;
}

double GateStudy::change(double changed) const { return std::exp(changed) - std::exp(loss); }

std::vector<int> gated_layers(const Probe& probe) {
  const std::string gate = "gate.";
  std::vector<int> layers;
  for (const std::string& name : probe.names())
    if (name.starts_with(gate)) layers.push_back(static_cast<int>(parse_integer(name.substr(gate.size())).value()));
  return layers;
}

namespace {

// A run of the probe over windows, of which it has the mean loss.
class GateRuns {
 public:
  GateRuns(Probe& probe, const std::string& model, const std::vector<TokenWindow>& windows,
           const std::function<void(int64_t, int64_t)>& told)
      : probe_(probe), model_(model), windows_(windows), told_(told) {}
  int64_t all = 0;  // forwards there will be

  // The sum of the losses of window i.
  double run(size_t i) {
    probe_.run(windows_[i].tokens.data(), windows_[i].targets.data());
    told_(++done_, all);
    const std::vector<double> losses = probe_.losses();
    const double sum = std::accumulate(losses.begin(), losses.end(), 0.0);
    if (!std::isfinite(sum)) fail_not_finite(model_, "the loss");
    return sum;
  }
  // Adds the block's gates of the last run, of window i.
  void add(GateMoments& moments, int layer, size_t i) const {
    const std::string name = str("gate.", layer);
    moments.add(probe_.at(name), probe_.shape(name)[2], windows_[i].length);
  }
  // The sum of the losses of window i with the gates of this layer set to heads[j].
  double run_with(int layer, const std::vector<double>& heads, size_t i) {
    const std::string name = str("gate.", layer);
    probe_.change(name, [&](std::vector<double>& gates) {
      for (size_t at = 0; at < gates.size(); ++at) gates[at] = heads[at % heads.size()];
    });
    const double sum = run(i);
    probe_.change(name, nullptr);
    return sum;
  }

 private:
  Probe& probe_;
  const std::string& model_;
  const std::vector<TokenWindow>& windows_;
  const std::function<void(int64_t, int64_t)>& told_;
  int64_t done_ = 0;
};

}  // namespace

GateStudy study_gates(Probe& probe, const std::string& model, const std::vector<TokenWindow>& windows,
                      size_t calibration, const std::function<void(int64_t, int64_t)>& told) {
  CHECK_THAT(calibration > 0 && calibration < windows.size(), calibration, " of ", windows.size(), " windows");
  GateStudy study;
  study.scored = scored_positions(model, std::span(windows).subspan(calibration));
  for (const int layer : gated_layers(probe)) {
    study.blocks.push_back({layer});
    probe.keep(str("gate.", layer));
  }
  GateRuns runs(probe, model, windows, told);
  const size_t others = windows.size() - calibration;
  runs.all = static_cast<int64_t>(windows.size() + others * 3 * study.blocks.size());
  for (size_t i = 0; i < calibration; ++i) {
    runs.run(i);
    for (GatedBlock& block : study.blocks) runs.add(block.means, block.layer, i);
  }
  const double share = 1 / static_cast<double>(study.scored);
  std::vector<double> plain, scored;                                          // of each window
  std::vector<std::array<std::vector<double>, 3>> sums(study.blocks.size());  // the same, of each block's interventions
  for (size_t i = calibration; i < windows.size(); ++i) {
    plain.push_back(runs.run(i));
    scored.push_back(static_cast<double>(std::ranges::count_if(windows[i].targets, [](int t) { return t >= 0; })));
    study.loss += plain.back() * share;
    for (GatedBlock& block : study.blocks) runs.add(block.gates, block.layer, i);
    for (size_t b = 0; b < study.blocks.size(); ++b) {
      const GatedBlock& block = study.blocks[b];
      std::vector<double> heads;
      for (size_t j = 0; j < block.means.heads(); ++j) heads.push_back(block.means.head_mean(j));
      sums[b][0].push_back(runs.run_with(block.layer, std::vector(heads.size(), 0.0), i));
      sums[b][1].push_back(runs.run_with(block.layer, std::vector(heads.size(), block.means.mean()), i));
      sums[b][2].push_back(runs.run_with(block.layer, heads, i));
    }
  }
  for (size_t b = 0; b < study.blocks.size(); ++b)
    for (size_t k = 0; k < std::size(gate_interventions); ++k) {
      GateIntervention& made = study.blocks[b].*gate_interventions[k];
      for (const double sum : sums[b][k]) made.loss += sum * share;
      made.error = paired_error(sums[b][k], plain, scored);
    }
  return study;
}

// -----------------------------------------------------------------------------------------------------------------
// analyze --what gates

namespace {

// A quarter for the constants; three forwards a layer for the rest: 7 TFLOP for 10 M parameters in 12 layers.
constexpr UsualWindows usual_gates = {32, 256};

// A quarter of the windows is for the constants.
int64_t calibration_of(int64_t windows) { return std::max<int64_t>(1, windows / 4); }

struct GatesOfModel : WindowedModel {
  using WindowedModel::WindowedModel;
  int64_t layers = 0;
  int64_t calibration = calibration_of(lengths.windows);  // windows for the constants
  GateStudy study = {};
};

// Forwards over all windows: one over each, and of those that are scored three more for every block.
double gate_forwards(int64_t windows, size_t blocks) {
  return static_cast<double>(windows) +
         static_cast<double>((windows - calibration_of(windows)) * 3) * static_cast<double>(blocks);
}

bool has_gates(const Config& config) {
  ParameterTable params;
  declare_model(params, config);
  Tape tape(Dtype::f32);
  record_model(tape, params, config, 1, 1);
  return std::ranges::any_of(tape.marks(), [](const auto& mark) { return mark.first.starts_with("gate."); });
}

// What an architecture without gates has instead.
std::string instead_of_gates(const std::string& arch) {
  if (is_plain(arch)) return "its layers read the residual stream alone; try --what lens";
  if (arch == "satformer" || arch == "relay") return "it takes in an earlier layer's values, and has only one layer";
  if (arch == "resformer") return "its first layer's values come in by one scale for each layer; try --what routing";
  if (arch == "sla" || arch == "ala")
    return "its queries read an earlier layer's keys and values; try --what attention";
  if (arch == "gated_streams") return "its gates are on what a sublayer reads of the streams; try --what routing";
  return "its layers read mixtures of earlier ones; try --what routing";
}

GatesOfModel gates_of(Subject& subject, const std::vector<TokenWindow>& windows) {
  const auto N = std::ssize(windows), T = std::ssize(windows[0].tokens);
  GatesOfModel m(subject, windows);
  m.layers = subject.layers();
  Probe probe(subject.model, 1, T);
  say_cost("gates", subject, windows, gate_forwards(N, gated_layers(probe).size()) * probe.forward_flops(),
           probe.bytes());
  Ticker ticker(printable(subject.name), "forward");
  m.study = study_gates(probe, subject.name, windows, static_cast<size_t>(m.calibration),
                        [&](int64_t done, int64_t all) { ticker.tell(done, all); });
  return m;
}

std::string gates_table(const GatesOfModel& m, uint64_t seed) {
  const GateStudy& study = m.study;
  std::vector<std::vector<std::string>> table = {{"layer", "mean gate", "exact 0", "CV of heads"}},
                                        changes = {{"layer", "gates:=0", "+-", ":=mean", "+-", ":=means", "+-"}};
  for (const GatedBlock& block : study.blocks) {
    table.push_back({std::to_string(block.layer), format_number("%.4f", block.gates.mean()),
                     format_number("%.1f%%", 100 * block.gates.zeros()), number_or_dash(block.gates.head_variation())});
    changes.push_back({std::to_string(block.layer)});
    for (const auto made : gate_interventions) {
      const auto [loss, error] = block.*made;
      changes.back().push_back(format_number("%+.4g", study.change(loss)));
      changes.back().push_back(std::isnan(error) ? "-" : format_number("%.2g", study.change_error(loss, error)));
    }
  }
  return str(m.title, "\n", m.lengths.text(), ", seed ", seed, ": ", format_count(m.calibration),
             " for the means to set gates to,\nthe others scored: ", format_count(study.scored),
             " positions, perplexity ", format_number("%.6g", std::exp(study.loss)), "\n\n", format_table(table), "\n",
             format_table(changes),
             "\ngates:=  change of perplexity with this layer's gates set to 0, to their mean,\n"
             "         to each head's mean; +-: its standard error over windows, paired\n");
}

nlohmann::json gates_json(const GatesOfModel& m) {
  nlohmann::json blocks = nlohmann::json::array();
  for (const GatedBlock& block : m.study.blocks) {
    nlohmann::json means, zeros, constants;
    for (size_t j = 0; j < block.gates.heads(); ++j) {
      means.push_back(block.gates.head_mean(j)), zeros.push_back(block.gates.head_zeros(j));
      constants.push_back(block.means.head_mean(j));
    }
    const auto intervention = [&](const GateIntervention& made) {
      return nlohmann::json{{"loss", made.loss},
                            {"loss_error", number_or_null(made.error)},
                            {"delta_perplexity", m.study.change(made.loss)},
                            {"delta_perplexity_error", number_or_null(m.study.change_error(made.loss, made.error))}};
    };
    blocks.push_back({{"layer", block.layer},
                      {"mean", block.gates.mean()},
                      {"sparsity", block.gates.zeros()},
                      {"head_variation", block.gates.head_variation()},
                      {"head_means", means},
                      {"head_sparsity", zeros},
                      {"calibration_mean", block.means.mean()},
                      {"calibration_head_means", constants},
                      {"zero", intervention(block.zero)},
                      {"set_to_mean", intervention(block.mean)},
                      {"set_to_head_means", intervention(block.heads)}});
  }
  return m.json({{"windows", m.lengths.windows},
                 {"calibration_windows", m.calibration},
                 {"scored", m.study.scored},
                 {"loss", m.study.loss},
                 {"perplexity", std::exp(m.study.loss)},
                 {"blocks", blocks}});
}

std::string gates_csv(const GatesOfModel& m) {
  std::string out;
  const std::string name = csv_field(printable(m.model));
  for (const GatedBlock& block : m.study.blocks) {
    out += str(name, ",", block.layer, ",all,", csv_cell(block.gates.mean()), ",", csv_cell(block.gates.zeros()), ",",
               csv_cell(block.gates.head_variation()));
    for (const auto made : gate_interventions)
      out += str(",", csv_cell(m.study.change((block.*made).loss)), ",",
                 csv_cell(m.study.change_error((block.*made).loss, (block.*made).error)));
    out += "\n";
    for (size_t j = 0; j < block.gates.heads(); ++j)
      out += str(name, ",", block.layer, ",", j, ",", csv_cell(block.gates.head_mean(j)), ",",
                 csv_cell(block.gates.head_zeros(j)), ",,,,,,,\n");
  }
  return out;
}

std::string gates_heat_map(const std::vector<GatesOfModel>& all, const std::vector<std::string>& names) {
  HeatMapBand band{"mean gate", {}, HeatScale::shares};
  for (size_t i = 0; i < all.size(); ++i) {
    HeatMap& map = band.maps.emplace_back(HeatMap{names[i], {}});
    map.rows.resize(static_cast<size_t>(all[i].layers));
    for (const GatedBlock& block : all[i].study.blocks)
      for (size_t j = 0; j < block.gates.heads(); ++j) {
        map.rows[static_cast<size_t>(block.layer)].push_back(block.gates.head_mean(j));
        if (block.gates.head_mean(j) < 0) band.scale = HeatScale::signs;
      }
    add_mean_column(map);
  }
  return heat_map_svg("Gates", "layer", "key/value head", {band});
}

std::string gates_curves(const std::vector<GatesOfModel>& all, const std::vector<std::string>& names,
                         const AnalysisOptions& o) {
  std::vector<Panel> panels = {{"mean gate", "", {}},
                               {"gates that are exactly 0", "", {}},
                               {"variation of the heads' means: standard deviation / mean", "", {}},
                               {"change of perplexity, with one layer's gates set to 0", "set to their mean", {}}};
  panels[1].shares = true;
  for (Panel& panel : panels) panel.whole = true;
  for (size_t i = 0; i < all.size(); ++i) {
    Curve curves[] = {{names[i], {}, {}}, {names[i], {}, {}}, {names[i], {}, {}}, {names[i], {}, {}}};
    for (const GatedBlock& block : all[i].study.blocks) {
      const double y[] = {block.gates.mean(), block.gates.zeros(), block.gates.head_variation(),
                          all[i].study.change(block.zero.loss)};
      for (size_t k = 0; k < std::size(curves); ++k) curves[k].x.push_back(block.layer), curves[k].y.push_back(y[k]);
      curves[3].marks_x.push_back(block.layer), curves[3].marks_y.push_back(all[i].study.change(block.mean.loss));
    }
    for (size_t k = 0; k < std::size(curves); ++k) {
      curves[k].look = model_look(o, all[i].model);
      panels[k].curves.push_back(curves[k]);
    }
  }
  return curve_svg("Gates over depth", "layer", panels);
}

class GatesAnalysis : public AnalysisOf<GatesOfModel> {
 public:
  GatesAnalysis() : AnalysisOf("gates", "gates on values over depth, and the perplexity without them") {}
  std::string refuses(const Subject& subject) const override {
    const Config& c = subject.config();
    return has_gates(c) ? "" : str(with_article(c.arch), " has no gates on values: ", instead_of_gates(c.arch));
  }
  void measure(Subject& subject, const AnalysisOptions& o) override {
    if (o.sequences == 1)
      fail(Exit::usage, "--sequences 1: gates need 2 windows at least, one for the means to set them to");
    all_.push_back(gates_of(subject, windows_of(subject, o, usual_gates)));
  }
  Finding finding(const AnalysisOptions& o) const override;
};

Finding GatesAnalysis::finding(const AnalysisOptions& o) const {
  Finding found{"Gates on values of earlier layers"};
  found.csv =
      "model,layer,head,mean,sparsity,head_variation,delta_perplexity_zero,delta_perplexity_zero_error,"
      "delta_perplexity_mean,delta_perplexity_mean_error,delta_perplexity_head_means,"
      "delta_perplexity_head_means_error\n";
  for (const GatesOfModel& m : all_) {
    found.add(gates_table(m, o.seed), gates_json(m));
    found.csv += gates_csv(m);
  }
  const GatesOfModel& first = all_[0];
  found.json.update({{"sequences", first.lengths.windows}, {"same_windows", same_windows()}});
  found.svg = svg::below_each_other("Gates", {gates_heat_map(all_, names()), gates_curves(all_, names(), o)});
  found.shown = numbers("Mean gate over the layers", "%.3f", [](const GatesOfModel& m) {
    double sum = 0;
    for (const GatedBlock& block : m.study.blocks) sum += block.gates.mean();
    return sum / static_cast<double>(m.study.blocks.size());
  });
  found.measured =
      str("A gate says how much of an earlier layer's value a token's key/value head takes in. Means and exact zeros "
          "over the ",
          format_count(first.lengths.windows - first.calibration), " windows that are scored", if_of_first(),
          "; the variation is the population standard deviation of the heads' means over their mean. Then the gates of "
          "one layer at a time are set to 0, or to their mean in ",
          format_count(first.calibration),
          " other windows, drawn at random like them, everything else left as it is: the change of perplexity, above 0 "
          "where the model needs them. Its standard error is that of the mean difference of losses, paired by windows, "
          "times the changed perplexity; changes of less than two of these are noise.");
  found.paper =
      "SATFormer (arXiv 2605.03953): over depth the mean gate rises, exact zeros become fewer and heads differ more. "
      "Without the gates of some early layers perplexity rises most, although these gates are small.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> gates_analysis() { return std::make_unique<GatesAnalysis>(); }

}  // namespace crossply
