#include "eval/inside/exits.h"

#include <algorithm>
#include <cmath>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/analysis.h"

namespace crossply {

namespace {

// Adds one position, of which these are the weights and losses of all exits. Returns its mean passes.
double add_position(ExitStudy& study, const std::vector<double>& weight, const std::vector<double>& loss) {
  double passes = 0, so_far = weight[0];
  size_t leaves = 0;
  while (so_far < 0.5 && leaves + 1 < weight.size()) so_far += weight[++leaves];
  for (size_t t = 0; t < weight.size(); ++t) {
    study.exits[t].weight += weight[t], study.exits[t].loss += loss[t];
    passes += weight[t] * static_cast<double>(t + 1);
  }
  ++study.exits[static_cast<size_t>(std::ranges::max_element(weight) - weight.begin())].likeliest;
  study.early_passes += static_cast<double>(leaves + 1), study.early_loss += loss[leaves];
  return passes;
}

}  // namespace

ExitStudy study_exits(Probe& probe, int64_t exits, const std::string& model, const std::vector<TokenWindow>& windows,
                      const std::function<void(int64_t done, int64_t all)>& told) {
  ExitStudy study{scored_positions(model, windows)};
  const auto R = static_cast<size_t>(exits);
  study.exits.resize(R);
  std::vector<double> parts(exit_parts), counts(exit_parts), weight(R), loss(R);
  for (size_t t = 0; t < R; ++t)
    for (const char* what : {"exit_weight.", "exit_loss."}) probe.keep(str(what, t));
  for (size_t i = 0; i < windows.size(); ++i) {
    const std::vector<int32_t>& targets = windows[i].targets;
    probe.run(windows[i].tokens.data(), targets.data());
    for (size_t n = 0; n < targets.size(); ++n) {
      if (targets[n] < 0) continue;
      for (size_t t = 0; t < R; ++t)
        weight[t] = probe.at(str("exit_weight.", t))[n], loss[t] = probe.at(str("exit_loss.", t))[n];
      const double passes = add_position(study, weight, loss);
      const size_t part = n * exit_parts / targets.size();
      parts[part] += passes, ++counts[part], study.passes += passes;
    }
    told(static_cast<int64_t>(i) + 1, std::ssize(windows));
  }
  const auto all = static_cast<double>(study.scored);
  for (ExitReading& exit : study.exits) exit.weight /= all, exit.likeliest /= all, exit.loss /= all;
  study.passes /= all, study.early_passes /= all, study.early_loss /= all;
  for (size_t part = 0; part < parts.size(); ++part) study.by_part.push_back(parts[part] / counts[part]);
  return study;
}

// -----------------------------------------------------------------------------------------------------------------
// analyze --what exits

namespace {

constexpr UsualWindows usual_exits{100, 256};

struct ExitsOfModel : WindowedModel {
  using WindowedModel::WindowedModel;
  ExitStudy study = {};
};

ExitsOfModel exits_of(Subject& subject, const std::vector<TokenWindow>& windows) {
  const Config& c = subject.config();
  const auto T = static_cast<int64_t>(windows[0].tokens.size());
  ExitsOfModel m(subject, windows);
  Probe probe(subject.model, 1, T);
  const double heads = 2 * static_cast<double>((c.loop.passes - 1) * T * c.hidden_size * c.vocab_size);
  say_cost("exits", subject, windows, static_cast<double>(windows.size()) * (probe.forward_flops() + heads),
           probe.bytes());
  Ticker ticker(printable(subject.name), "window");
  m.study = study_exits(probe, c.loop.passes, subject.name, windows,
                        [&](int64_t done, int64_t all) { ticker.tell(done, all); });
  return m;
}

std::string exits_table(const ExitsOfModel& m, uint64_t seed) {
  std::vector<std::vector<std::string>> table = {{"exit, after pass", "weight", "likeliest", "loss"}};
  for (size_t t = 0; t < m.study.exits.size(); ++t) {
    const ExitReading& exit = m.study.exits[t];
    table.push_back({str(t + 1), format_number("%.4f", exit.weight), format_number("%.1f%%", 100 * exit.likeliest),
                     format_number("%.4f", exit.loss)});
  }
  return str(m.title, "\n", m.lengths.text(), ", seed ", seed, ", ", format_count(m.study.scored),
             " positions scored\n\n", format_table(table),
             "\nmean passes by weight: ", format_number("%.3f", m.study.passes),
             "\nleaving where the weights reach a half: ", format_number("%.3f passes", m.study.early_passes),
             format_number(", loss %.4f\n", m.study.early_loss));
}

nlohmann::json exits_json(const ExitsOfModel& m) {
  nlohmann::json exits = nlohmann::json::array();
  for (const ExitReading& exit : m.study.exits)
    exits.push_back({{"weight", exit.weight}, {"likeliest", exit.likeliest}, {"loss", exit.loss}});
  return m.json({{"windows", m.lengths.windows},
                 {"scored", m.study.scored},
                 {"exits", exits},
                 {"passes", m.study.passes},
                 {"passes_by_part", m.study.by_part},
                 {"early", {{"passes", m.study.early_passes}, {"loss", m.study.early_loss}}}});
}

class ExitsAnalysis : public AnalysisOf<ExitsOfModel> {
 public:
  ExitsAnalysis() : AnalysisOf("exits", "where tokens leave a model with an exit gate, and the loss of every exit") {}
  std::string refuses(const Subject& subject) const override {
    return subject.config().loop.exit_gate
               ? ""
               : str(printable(subject.name), " has one exit; models trained with --exit-gate true have several");
  }
  void measure(Subject& subject, const AnalysisOptions& o) override {
    all_.push_back(exits_of(subject, windows_of(subject, o, usual_exits)));
  }
  Finding finding(const AnalysisOptions& o) const override;

 private:
  std::string picture(const AnalysisOptions& o) const;
};

std::string ExitsAnalysis::picture(const AnalysisOptions& o) const {
  std::vector<Panel> panels = {{"weight of an exit, mean over tokens", "", {}},
                               {"share of tokens, by their likeliest exit", "", {}},
                               {"loss, of what an exit says of the next token", "", {}}};
  panels[0].shares = panels[1].shares = panels[2].whole = true;
  for (size_t i = 0; i < all_.size(); ++i) {
    const auto add = [&](Panel& panel, double ExitReading::*number) {
      Curve& curve = panel.curves.emplace_back(Curve{names()[i], {}, {}});
      curve.look = model_look(o, all_[i].model);
      for (size_t t = 0; t < all_[i].study.exits.size(); ++t)
        curve.x.push_back(static_cast<double>(t + 1)), curve.y.push_back(all_[i].study.exits[t].*number);
    };
    add(panels[0], &ExitReading::weight);
    add(panels[1], &ExitReading::likeliest);
    add(panels[2], &ExitReading::loss);
  }
  return curve_svg("Where tokens leave", "passes", panels);
}

Finding ExitsAnalysis::finding(const AnalysisOptions& o) const {
  Finding found{"Exits"};
  found.csv = "model,exit,weight,likeliest,loss\n";
  for (const ExitsOfModel& m : all_) {
    found.add(exits_table(m, o.seed), exits_json(m));
    for (size_t t = 0; t < m.study.exits.size(); ++t) {
      const ExitReading& exit = m.study.exits[t];
      found.csv += csv_row(m.model, t + 1, exit.weight, exit.likeliest, exit.loss);
    }
  }
  found.json.update({{"sequences", all_[0].lengths.windows}, {"same_windows", same_windows()}});
  found.svg = picture(o);
  found.shown = numbers("Mean passes", "%.2f", [](const ExitsOfModel& m) { return m.study.passes; }) + " " +
                numbers("Loss of the first exit", "%.3f", [](const ExitsOfModel& m) { return m.study.exits[0].loss; }) +
                " " + numbers("Of the last", "%.3f", [](const ExitsOfModel& m) { return m.study.exits.back().loss; });
  found.measured = str(
      "A stack with an exit gate: after each pass a gate says how likely a token leaves there. Above, the mean of "
      "these weights, and the share of tokens of which an exit has the largest; below, the loss of what the head makes "
      "of each exit. Means over ",
      format_count(all_[0].study.scored), " positions in ", all_[0].lengths.text(), if_of_first(),
      ". Generation and evaluation read the last exit.");
  found.paper = "Ouro (arXiv 2510.25741): passes beyond those that were trained make the model worse.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> exits_analysis() { return std::make_unique<ExitsAnalysis>(); }

}  // namespace crossply
