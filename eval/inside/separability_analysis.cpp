// analyze --what separability: how well a linear probe tells the words is, are, was and were apart, by layer.
#include <algorithm>
#include <ranges>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/standard_streams.h"
#include "engine/at_once.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"
#include "eval/inside/separability.h"

namespace crossply {
namespace {

constexpr VectorKind separated_kinds[] = {values_read, own_values, hidden_states};

struct SeparatedModel : OccurrencesOfModel {
  int layers = 0;
  std::map<std::string, Separability> found = {};  // by the value's name

  int64_t updates() const { return updates_of_probe(plan.vectors()); }

  const Separability* at(const VectorKind& kind, int layer) const {
    const auto it = found.find(kind.name(layer));
    return it == found.end() ? nullptr : &it->second;
  }
  // Does attention read what the layer itself has made, everywhere?
  bool own_only() const {
    for (int i = 0; i < layers; ++i) {
      const Separability *own = at(separated_kinds[1], i), *read = at(separated_kinds[0], i);
      if (own != nullptr && read != nullptr && own->folds != read->folds) return false;
    }
    return true;
  }
};

std::vector<std::string> separated_names(const Subject& subject, const Probe& probe) {
  std::vector<std::string> names;
  for (const VectorKind& kind : separated_kinds)
    for (int i = 0; i < subject.layers(); ++i)
      if (probe.has(kind.name(i))) names.push_back(kind.name(i));
  return names;
}

std::string accuracy_text(const Separability* s) {
  return s == nullptr ? "-" : format_number("%.3f", s->mean()) + format_number(" +-%.3f", s->deviation());
}

// "5 updates of ... (the paper's: 84)".
std::string updates_text(int64_t updates, const std::string& of = "") {
  return str(updates, updates == 1 ? " update" : " updates", of,
             updates == separability::paper_updates ? "" : str(" (the paper's: ", separability::paper_updates, ")"));
}

std::string separability_table(const SeparatedModel& m, uint64_t seed) {
  std::string out =
      str(m.title, "\n",
          wrap(str(occurrences_text(m.plan), "; ", updates_text(m.updates(), " of the probe"), "; seed ", seed,
                   "; chance ", format_number("%.3f", 1 / static_cast<double>(m.plan.classes.names.size()))),
               80, 0),
          "\n\n");
  std::vector<std::vector<std::string>> table = {{"layer"}};
  for (const VectorKind& kind : separated_kinds) table[0].push_back(kind.column);
  for (int i = 0; i < m.layers; ++i) {
    table.push_back({std::to_string(i)});
    for (const VectorKind& kind : separated_kinds) table.back().push_back(accuracy_text(m.at(kind, i)));
  }
  return out + format_table(table);
}

nlohmann::json separability_json(const SeparatedModel& m) {
  nlohmann::json json = occurrences_json(m.plan);
  json["updates"] = m.updates();
  json["model"] = utf8_or_escaped(m.model), json["arch"] = m.arch;
  for (const VectorKind& kind : separated_kinds)
    for (int i = 0; i < m.layers; ++i) {
      nlohmann::json one;  // null: there is no such value
      if (const Separability* s = m.at(kind, i))
        one = {{"mean", s->mean()}, {"std", s->deviation()}, {"folds", s->folds}};
      json[kind.key].push_back(one);
    }
  return json;
}

std::string separability_csv(const std::vector<SeparatedModel>& all) {
  std::string out = "model,layer,what,accuracy,std\n";
  for (const SeparatedModel& m : all)
    for (const VectorKind& kind : separated_kinds)
      for (int i = 0; i < m.layers; ++i)
        if (const Separability* s = m.at(kind, i)) out += csv_row(m.model, i, kind.key, s->mean(), s->deviation());
  return out;
}

std::string title_of_separability(const std::vector<SeparatedModel>& all) {
  const auto [least, most] = std::ranges::minmax(all | std::views::transform(&SeparatedModel::updates));
  return str("Accuracy of a linear probe, ", all[0].plan.classes.names.size(), " classes, after ",
             least == most ? updates_text(least)
                           : str(least, " to ", most, " updates (the paper's: ", separability::paper_updates, ")"));
}

std::string separability_svg(const std::vector<SeparatedModel>& all, const AnalysisOptions& o) {
  const std::vector<std::string> names = short_names_of(all);
  const bool own_only = std::ranges::all_of(all, &SeparatedModel::own_only);
  const double chance = 1 / static_cast<double>(all[0].plan.classes.names.size());
  std::vector<Panel> panels;
  for (const VectorKind& kind : separated_kinds) {
    if (own_only && &kind == &separated_kinds[1]) continue;  // it would be the first panel again
    Panel panel{kind.caption, "", {}, true};
    double deepest = 0;
    for (size_t n = 0; n < all.size(); ++n) {
      const SeparatedModel& m = all[n];
      Curve curve{names[n], {}, {}};
      curve.look = model_look(o, m.model);
      for (int i = 0; i < m.layers; ++i)
        if (const Separability* s = m.at(kind, i)) {
          curve.x.push_back(i), curve.y.push_back(s->mean());
          curve.low.push_back(std::max(0.0, s->mean() - s->deviation()));
          curve.high.push_back(std::min(1.0, s->mean() + s->deviation()));
        }
      deepest = std::max(deepest, static_cast<double>(m.layers - 1));
      panel.curves.push_back(std::move(curve));
    }
    panel.curves.push_back({"chance", {0, deepest}, {chance, chance}});
    panel.curves.back().reference = true;
    panels.push_back(std::move(panel));
  }
  return curve_svg(title_of_separability(all), "layer", panels);
}

constexpr int64_t paper_vectors = 1668;  // of each class

class SeparabilityAnalysis : public OccurrenceAnalysis<SeparatedModel> {
 public:
  explicit SeparabilityAnalysis(std::shared_ptr<OccurrenceOptions> shared)
      : OccurrenceAnalysis("separability", "a linear probe for four words, on values and hidden states by layer",
                           std::move(shared), paper_vectors) {}
  void add_flags(CLI::App& app) override {
    add_occurrence_flags(app, *shared_);
    own(app, {add_integer(
                 app, "--vectors", per_class_, 20, max_size,
                 "separability: vectors of each class, the first in reading order of at most --sequences windows")});
  }
  void measure(Subject& subject, const AnalysisOptions& o) override;
  Finding finding(const AnalysisOptions& o) const override;
};

// A short training ranks values by how fast they are learned, and may rank them otherwise than a longer one.
void note_few_updates(const SeparatedModel& m, const std::string& split) {
  if (m.updates() >= separability::paper_updates) return;
  say_note(str("the probe of ", m.model, " makes ", updates_text(m.updates()),
               "; so few tell how fast it learns, not how well the classes can be told apart; more vectors make more: "
               "--vectors N, ",
               split == "all" ? "" : "--split all, ", "larger data"));
}

void SeparabilityAnalysis::measure(Subject& subject, const AnalysisOptions& o) {
  SeparatedModel m{plan(subject, o), subject.layers()};
  note_few_updates(m, subject.data.choice.split);
  const int64_t classes = std::ssize(m.plan.classes.names);
  const VectorsByName vectors = collect(subject, o, m.plan, separated_names(subject, Probe(subject.model, 1, 1)),
                                        [&](int64_t C) { return separability_flops(m.plan.vectors(), classes, C); });
  std::vector<int> labels;
  for (int64_t row = 0; row < m.plan.vectors(); ++row) labels.push_back(static_cast<int>(row / m.plan.per_class));
  std::vector<const Vectors*> inputs;
  std::vector<Separability*> outputs;
  for (const auto& [value, of_value] : vectors) inputs.push_back(&of_value), outputs.push_back(&m.found[value]);
  at_once(inputs.size(), [&](size_t i) { *outputs[i] = linear_separability(*inputs[i], labels, classes, o.seed); });
  all_.push_back(std::move(m));
}

Finding SeparabilityAnalysis::finding(const AnalysisOptions& o) const {
  Finding found{"Linear separability of words"};
  std::vector<std::string> settings;
  bool few = false;
  for (const SeparatedModel& m : all_) {
    found.add(separability_table(m, o.seed), separability_json(m));
    settings.push_back(str(occurrences_text(m.plan), ", ", updates_text(m.updates())));
    few = few || m.updates() < separability::paper_updates;
  }
  found.json.update({{"folds", separability::folds},
                     {"batch", separability::batch},
                     {"rate", separability::rate},
                     {"paper_updates", separability::paper_updates},
                     {"same_places", all_same_places()}});
  found.csv = separability_csv(all_);
  found.svg = separability_svg(all_, o);
  found.measured =
      str("Accuracy of a linear layer that learns to tell from one vector which word it belongs to, after one epoch of "
          "Adam (rate 0.01, batches of 64) on raw vectors in double precision; mean over five folds, the band is their "
          "standard deviation. ",
          text_of_each(names(), settings), ". Higher: the classes lie further apart.",
          few ? " With fewer updates than the paper's it tells how fast such a probe learns rather than how well the "
                "classes can be told apart; more data makes more updates (--split all, or a larger file)."
              : "");
  found.shown = numbers("Mean accuracy on values over the layers", "%.1f %%", [](const SeparatedModel& m) {
    std::vector<double> layers;
    for (int i = 0; i < m.layers; ++i)
      if (const Separability* s = m.at(separated_kinds[0], i)) layers.push_back(100 * s->mean());
    return mean_of_finite(layers);
  });
  found.paper =
      "LIMe (arXiv 2502.09245v2), of 1,668 places of each of is, are, was and were in FineWeb-Edu: values are told "
      "apart better with LIMe than in a LLaMA, layer by layer, and hidden states less well. Version 1 says how much "
      "(figures 7 and 12): values of late layers reach nearly 1.0 with LIMe and much less in a LLaMA, while LIMe's "
      "hidden states of late layers are slightly harder to tell apart.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> separability_analysis(std::shared_ptr<OccurrenceOptions> shared) {
  return std::make_unique<SeparabilityAnalysis>(std::move(shared));
}

}  // namespace crossply
