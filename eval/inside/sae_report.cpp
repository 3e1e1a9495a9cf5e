#include <algorithm>
#include <cmath>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/look.h"
#include "cli/svg.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/analysis.h"
#include "eval/inside/sae.h"
#include "eval/inside/token_map.h"

namespace crossply {
namespace {

constexpr size_t best_features = 12, tokens_shown = 6;  // of the table
constexpr size_t sae_curve_points = 200;

std::string sae_percent(double share) { return format_number("%.2f %%", 100 * share); }

// A token's text in one line, or its id.
std::string shown_token(const SaeFinding& m, size_t feature, size_t token) {
  const std::string text = m.texts.empty() ? "" : token_label(m.texts[feature][token]);
  return text.empty() ? str(m.selection.retained[feature].top[token].token) : text;
}

std::string tokens_of_feature(const SaeFinding& m, size_t feature, size_t most) {
  std::string list;
  for (size_t t = 0; t < std::min(most, m.selection.retained[feature].top.size()); ++t)
    list += (t == 0 ? "" : " ") + shown_token(m, feature, t);
  return list;
}

struct LossPoint {
  double tokens, loss;  // after so many; the mean since the point before
};
std::vector<LossPoint> loss_curve(const SaeFinding& m) {
  const size_t block = (m.losses.size() + sae_curve_points - 1) / sae_curve_points;
  std::vector<LossPoint> points;
  for (size_t begin = 0; begin < m.losses.size(); begin += block) {
    const size_t end = std::min(m.losses.size(), begin + block);
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += m.losses[i];
    points.push_back(
        {static_cast<double>(end) * static_cast<double>(m.sizes.rows), sum / static_cast<double>(end - begin)});
  }
  return points;
}

// -----------------------------------------------------------------------------------------------------------------
// The table.

std::string sae_training_text(const SaeFinding& m) {
  const FeatureSelection& s = m.selection;
  const std::vector<LossPoint> curve = loss_curve(m);
  return str("values of layer 0: ", m.sizes.D, " numbers, ", format_count(m.sizes.m), " features, ", m.sizes.k,
             " active\n", "trained on ", format_count(m.steps * m.sizes.rows), " tokens, ", format_count(m.steps),
             " steps of ", format_count(m.sizes.rows), ", from ", format_count(m.train.tokens), " places\n",
             "loss: ", format_number("%.4g", curve.front().loss), " at the start, ",
             format_number("%.4g", m.train.loss), " at the end, held out ", format_number("%.4g", m.held_out.loss),
             "\n", "variance explained: ", sae_percent(m.train.fve), ", held out ", sae_percent(m.held_out.fve), " of ",
             format_count(m.held_out.tokens), " tokens\n", "features: ", format_count(m.live), " live, ",
             format_number("%.1f", m.active), " active on a token, mean density ", sae_percent(m.density()), "\n",
             "dropped: ", format_count(s.rare), " of less than ", m.rules.min_activations, " activations, ",
             format_count(s.dense), " of density above ", sae_percent(m.rules.max_density), "\n", "kept ",
             format_count(std::ssize(s.retained)), " of ", format_count(s.scored), " by MonoScore (",
             format_count(s.single), " active on one token only, MonoScore 1)\n");
}

std::string labels_text(const SaeFinding& m) {
  std::vector<std::vector<std::string>> table = {{"category", "label", "features"}};
  for (const std::string& category : feature_categories()) {
    for (const std::string& label : feature_labels())
      if (category_of(label) == category) table.push_back({category, label, format_count(m.label_count(label))});
    table.push_back({category, "all", format_count(m.category_count(category))});
  }
  return "\n" + format_table(table);
}

std::string features_text(const SaeFinding& m) {
  std::string out = "\nbest features: number, MonoScore, activations, label, top tokens\n";
  for (size_t i = 0; i < std::min(best_features, m.selection.retained.size()); ++i) {
    const Feature& f = m.selection.retained[i];
    std::string line = str("  ", f.index, "  ", format_number("%.3f", f.score), "  ", format_count(f.activations), "  ",
                           f.label.empty() ? "" : f.label + " ");
    for (size_t t = 0; t < std::min(tokens_shown, f.top.size()); ++t) {  // no break within a token
      const std::string token = " " + shown_token(m, i, t);
      if (line.size() + token.size() > 80) out += line + "\n", line = "     ";
      line += token;
    }
    out += line + "\n";
  }
  return out;
}

std::string sae_gates_text(const SaeFinding& m) {
  std::vector<std::vector<std::string>> table = {{"layer"}};
  for (const std::string& category : feature_categories()) table[0].push_back(category);
  table[0].push_back("all tokens");
  for (const LabelledGates& gates : m.gates) {
    table.push_back({std::to_string(gates.layer)});
    for (const double gate : gates.by_category) table.back().push_back(number_or_dash(gate, "%.4f"));
    table.back().push_back(format_number("%.4f", gates.all));
  }
  return "\nmean gate of held-out tokens, by category of their features\n" + format_table(table);
}

// -----------------------------------------------------------------------------------------------------------------
// Numbers.

nlohmann::json reconstruction_json(const Reconstruction& r) {
  return {{"tokens", r.tokens}, {"loss", number_or_null(r.loss)}, {"fve", number_or_null(r.fve)}};
}

nlohmann::json feature_json(const SaeFinding& m, size_t i) {
  const Feature& f = m.selection.retained[i];
  nlohmann::json tokens = nlohmann::json::array();
  for (size_t t = 0; t < f.top.size(); ++t) {
    tokens.push_back({{"id", f.top[t].token}, {"activation", f.top[t].value}});
    if (!m.texts.empty()) tokens.back()["text"] = utf8_or_escaped(m.texts[i][t]);
  }
  nlohmann::json json = {{"feature", f.index},
                         {"activations", f.activations},
                         {"distinct_tokens", f.distinct},
                         {"mono_score", f.score},
                         {"tokens", tokens}};
  if (!f.label.empty()) json["label"] = f.label, json["category"] = category_of(f.label);
  return json;
}

nlohmann::json label_counts_json(const SaeFinding& m) {
  nlohmann::json labels, categories;
  for (const std::string& label : feature_labels()) labels[label] = m.label_count(label);
  for (const std::string& category : feature_categories()) categories[category] = m.category_count(category);
  return {{"labels", labels}, {"categories", categories}};
}

nlohmann::json sae_gates_json(const SaeFinding& m) {
  nlohmann::json list = nlohmann::json::array();
  for (const LabelledGates& gates : m.gates) {
    list.push_back({{"layer", gates.layer}, {"all", number_or_null(gates.all)}});
    for (size_t c = 0; c < gates.by_category.size(); ++c)
      list.back()[feature_categories()[c]] = number_or_null(gates.by_category[c]);
  }
  return list;
}

// -----------------------------------------------------------------------------------------------------------------
// The picture.

constexpr double sae_picture_width = 920;

// With the model's colour, as in all figures. A second model of that colour is paler.
std::string style_of_bar(const std::vector<int>& looks, size_t i) {
  const std::string colour = colour_of_look(static_cast<size_t>(looks[i]));
  const auto same = std::count_if(looks.begin(), looks.begin() + static_cast<std::ptrdiff_t>(i),
                                  [&](int look) { return colour_of_look(static_cast<size_t>(look)) == colour; });
  return "fill=\"" + colour + (same == 0 ? "" : "\" fill-opacity=\"" + svg::fixed(std::pow(0.55, same), 2)) + "\"";
}

// Bars for each label, one for each model, with their numbers at the end.
std::string label_bars_svg(const std::vector<SaeFinding>& all, const std::vector<std::string>& names,
                           const std::vector<int>& looks) {
  const double begin = 240, top = 70, each = 13, room = sae_picture_width - begin - 90;
  const double row = each * static_cast<double>(all.size()) + 10;
  int64_t most = 1;
  for (const SaeFinding& m : all)
    for (const std::string& label : feature_labels()) most = std::max(most, m.label_count(label));
  std::string out =
      svg::text(24, 30, "font-size=\"16\" fill=\"#1f2933\"", "Retained features by label of their tokens");
  double x = 24;
  for (size_t i = 0; i < all.size(); ++i) {
    out += svg::rectangle(x, 44, 12, 12, style_of_bar(looks, i)) + svg::text(x + 18, 54, "", names[i], 40);
    x += 40 + 7 * static_cast<double>(std::min<size_t>(40, names[i].size()));
  }
  double y = top;
  std::string before;
  for (const std::string& label : feature_labels()) {
    const std::string& category = category_of(label);
    if (category != before) {
      y += before.empty() ? 0 : 8;
      out += svg::text(24, y + row / 2 + 4, "font-weight=\"bold\"", category);
      before = category;
    }
    out += svg::text(begin - 8, y + row / 2 + 4, "text-anchor=\"end\" font-size=\"11\"", label.substr(0, 26));
    for (size_t i = 0; i < all.size(); ++i) {
      const int64_t count = all[i].label_count(label);
      const double length = room * static_cast<double>(count) / static_cast<double>(most);
      const double at = y + 5 + each * static_cast<double>(i);
      out += svg::rectangle(begin, at, std::max(length, 0.5), each - 2, style_of_bar(looks, i)) +
             svg::text(begin + length + 6, at + each - 3, "font-size=\"10\"", format_count(count));
    }
    y += row;
  }
  return svg::document(sae_picture_width, y + 20, "Retained features by label", out);
}

std::string sae_losses_svg(const std::vector<SaeFinding>& all, const std::vector<std::string>& names,
                           const std::vector<int>& looks) {
  Panel panel{"share of the variance that is not explained", "of held-out tokens", {}};
  panel.log_y = true;
  for (size_t i = 0; i < all.size(); ++i) {
    const SaeFinding& m = all[i];
    Curve curve{names[i], {}, {}};
    for (const auto& [tokens, loss] : loss_curve(m)) {
      curve.x.push_back(tokens);
      curve.y.push_back(loss / m.start_variance);
    }
    curve.look = looks[i];
    curve.marks_x = {curve.x.back()}, curve.marks_y = {1 - m.held_out.fve};
    panel.curves.push_back(std::move(curve));
  }
  return curve_svg("Sparse autoencoder of the first layer's values", "tokens of training", {panel});
}

std::string sae_gates_svg(const SaeFinding& m, const std::string& name) {
  Panel panel{"mean gate of held-out tokens, by how many features of a category are active on them", "", {}};
  panel.whole = true;
  for (size_t c = 0; c <= feature_categories().size(); ++c) {
    Curve curve{c < feature_categories().size() ? feature_categories()[c] : "all tokens", {}, {}};
    for (const LabelledGates& gates : m.gates) {
      const double gate = c < gates.by_category.size() ? gates.by_category[c] : gates.all;
      if (!std::isfinite(gate)) continue;
      curve.x.push_back(gates.layer);
      curve.y.push_back(gate);
    }
    if (!curve.x.empty()) panel.curves.push_back(std::move(curve));
  }
  return curve_svg("Gates by category of features: " + name, "layer", {panel});
}

}  // namespace

int64_t SaeFinding::label_count(const std::string& label) const {
  return std::count_if(selection.retained.begin(), selection.retained.end(),
                       [&](const Feature& feature) { return feature.label == label; });
}

int64_t SaeFinding::category_count(const std::string& category) const {
  int64_t count = 0;
  for (const std::string& label : feature_labels())
    if (category_of(label) == category) count += label_count(label);
  return count;
}

std::string sae_table(const SaeFinding& m) {
  std::string out = str(m.title, "\n", format_count(m.windows), " windows of ", m.longest, " tokens, the last ",
                        m.held_out_windows, " held out, apart from all others\n", sae_training_text(m));
  if (!m.labels_file.empty())
    out += str("labels of ", format_count(m.labels_given), " tokens from ", printable(m.labels_file),
               ", of the others by rules\n");
  if (!m.texts.empty()) out += labels_text(m);
  if (!m.selection.retained.empty()) out += features_text(m);
  if (!m.gates.empty()) out += sae_gates_text(m);
  return m.weights.empty() ? out : out + str("\nweights: ", printable(m.weights), "\n");
}

nlohmann::json sae_json(const SaeFinding& m) {
  nlohmann::json curve = nlohmann::json::array(), features = nlohmann::json::array();
  for (const auto& [tokens, loss] : loss_curve(m)) curve.push_back({tokens, loss});
  for (size_t i = 0; i < m.selection.retained.size(); ++i) features.push_back(feature_json(m, i));
  nlohmann::json json = m.json({{"split", m.split},
                                {"longest_window", m.longest},
                                {"held_out_windows", m.held_out_windows},
                                {"train_windows", m.train_windows},
                                {"width", m.sizes.D},
                                {"dictionary", m.sizes.m},
                                {"active", m.sizes.k},
                                {"batch", m.sizes.rows},
                                {"steps", m.steps},
                                {"buffer", m.buffer},
                                {"labels_file", utf8_or_escaped(m.labels_file)},
                                {"labels_given", m.labels_given},
                                {"lr", m.lr},
                                {"scale", m.scale},
                                {"variance", m.start_variance},
                                {"loss_curve", curve},
                                {"train", reconstruction_json(m.train)},
                                {"held_out", reconstruction_json(m.held_out)},
                                {"live_features", m.live},
                                {"active_on_a_token", m.active},
                                {"mean_density", m.density()},
                                {"activations", m.activations},
                                {"min_activations", m.rules.min_activations},
                                {"max_density", m.rules.max_density},
                                {"rare", m.selection.rare},
                                {"dense", m.selection.dense},
                                {"of_one_token", m.selection.single},
                                {"scored", m.selection.scored},
                                {"retained", features},
                                {"gates", sae_gates_json(m)}});
  if (m.labelled()) json.update(label_counts_json(m));
  return json;
}

std::string sae_csv(const std::vector<SaeFinding>& all) {
  std::string out = "model,feature,activations,distinct_tokens,mono_score,label,category,tokens\n";
  for (const SaeFinding& m : all)
    for (size_t i = 0; i < m.selection.retained.size(); ++i) {
      const Feature& f = m.selection.retained[i];
      out += str(csv_field(printable(m.model)), ",", f.index, ",", f.activations, ",", f.distinct, ",", f.score, ",",
                 f.label, ",", f.label.empty() ? "" : category_of(f.label), ",",
                 csv_field(tokens_of_feature(m, i, f.top.size())), "\n");
    }
  return out;
}

std::string sae_svg(const std::vector<SaeFinding>& all, const std::vector<std::string>& names,
                    const std::vector<int>& looks) {
  std::vector<std::string> parts = {sae_losses_svg(all, names, looks)};
  if (std::any_of(all.begin(), all.end(), [](const SaeFinding& m) { return !m.texts.empty(); }))
    parts.push_back(label_bars_svg(all, names, looks));
  for (size_t i = 0; i < all.size(); ++i)
    if (!all[i].gates.empty()) parts.push_back(sae_gates_svg(all[i], names[i]));
  return svg::below_each_other("Sparse autoencoder of the first layer's values", parts);
}

}  // namespace crossply
