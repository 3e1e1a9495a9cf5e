// analyze --what similarity: of the hidden states of all layers, within a model and between two.
#include "eval/inside/similarity.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cli/format.h"
#include "cli/standard_streams.h"
#include "cli/ticker.h"
#include "engine/at_once.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/rng.h"
#include "eval/inside/analysis.h"
#include "eval/inside/heat_map.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"

namespace crossply {

void centre_columns(StateRows& features, int64_t n) {
  const int64_t C = features.columns;
  for (int64_t c = 0; c < C; ++c) {
    double* const x = features.x.data() + c;
    double mean = 0;
    bool constant = true;
    for (int64_t t = 0; t < n; ++t) mean += x[t * C] / static_cast<double>(n), constant &= x[t * C] == x[0];
    if (constant) mean = x[0];
    for (int64_t t = 0; t < n; ++t) x[t * C] -= mean;
  }
}

// The kernels are symmetric: of each block of their rows what stands from its own columns on, and what stands beyond
// these counts twice. n^2 C multiply-adds in all, whether C is below n or not; the products of the columns, n C^2 for
// each pair of layers, would cost more from some n / C layers on.
std::vector<std::vector<double>> linear_cka(const std::vector<const StateRows*>& all, int64_t n) {
  constexpr int64_t block = 32;
  const size_t L = all.size();
  std::vector<std::vector<double>> kernels(L), products(L, std::vector<double>(L, 0.0));
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t rows = std::min(block, n - begin), columns = n - begin;
    at_once(L, [&](size_t l) {
      const double* const x = all[l]->x.data() + begin * all[l]->columns;
      kernels[l].resize(static_cast<size_t>(rows * columns));
      row_products(x, rows, x, columns, all[l]->columns, kernels[l].data(), columns);
    });
    at_once(L, [&](size_t l) {
      std::vector<double> twice = kernels[l];
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = rows; j < columns; ++j) twice[static_cast<size_t>(i * columns + j)] *= 2;
      for (size_t m = 0; m <= l; ++m) {
        double sum = 0;
        row_products(twice.data(), 1, kernels[m].data(), 1, rows * columns, &sum, 1);
        products[l][m] += sum;
      }
    });
  }
  std::vector<std::vector<double>> cka(L, std::vector<double>(L, NAN));
  for (size_t l = 0; l < L; ++l)
    for (size_t m = 0; m <= l; ++m)
      if (const double size = std::sqrt(products[l][l]) * std::sqrt(products[m][m]); size > 0)
        cka[l][m] = cka[m][l] = std::clamp(products[l][m] / size, 0.0, 1.0);
  return cka;
}

std::vector<int64_t> sample_tokens(int64_t total, int64_t count, uint64_t seed) {
  std::vector<int64_t> all(static_cast<size_t>(total));
  std::iota(all.begin(), all.end(), int64_t{0});
  if (count >= total) return all;
  Random random(seed, stream_of("similarity"));
  for (int64_t i = 0; i < count; ++i)
    std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(i + random.below(total - i))]);
  all.resize(static_cast<size_t>(count));
  std::sort(all.begin(), all.end());
  return all;
}

// -----------------------------------------------------------------------------------------------------------------
// Measuring.

namespace {

constexpr UsualWindows usual_similarity = {64, 128};
using Alikeness = std::vector<std::vector<double>>;  // a row for each hidden state of one model

struct SimilarityOfModel : WindowedModel {
  using WindowedModel::WindowedModel;
  std::vector<int64_t> tokens = {};   // of all windows' one after the other, without padding
  Alikeness own = {}, to_first = {};  // to_first: its rows are the first model's; empty: there is none to compare with
  int64_t channels = 0;

  // About what n tokens of unrelated states have, whose channels are of the same size: this estimate is biased upwards.
  double unrelated() const {
    return static_cast<double>(channels) / static_cast<double>(std::ssize(tokens) + channels);
  }
};

// Of the tokens that are sampled, hidden.0 to hidden.L, centred.
std::vector<StateRows> hidden_features(Subject& subject, const std::vector<TokenWindow>& windows,
                                       const std::vector<int64_t>& tokens, Probe& probe) {
  std::vector<StateRows> features;
  for (int l = 0; l <= subject.layers(); ++l) {
    probe.keep(str("hidden.", l));
    features.push_back({probe.shape(str("hidden.", l))[2], {}});
  }
  Ticker ticker(printable(subject.name), "window");
  int64_t first = 0, done = 0;  // first: of the window's tokens among all
  auto next = tokens.begin();
  for (const TokenWindow& window : windows) {
    const auto end = std::lower_bound(next, tokens.end(), first + window.length);
    if (end != next) probe.run(window.tokens.data());
    for (size_t l = 0; l < features.size() && end != next; ++l) {
      const std::vector<double>& x = probe.at(str("hidden.", l));
      for (auto token = next; token != end; ++token) {
        const auto row = x.begin() + static_cast<std::ptrdiff_t>((*token - first) * features[l].columns);
        features[l].x.insert(features[l].x.end(), row, row + static_cast<std::ptrdiff_t>(features[l].columns));
      }
    }
    next = end, first += window.length;
    ticker.tell(++done, std::ssize(windows));
  }
  for (StateRows& one : features) centre_columns(one, std::ssize(tokens));
  return features;
}

// The rows of all and the columns of all between these.
Alikeness block_of(const Alikeness& all, size_t row, size_t rows, size_t column, size_t columns) {
  Alikeness part;
  for (size_t r = row; r < row + rows; ++r) {
    const auto from = all[r].begin() + static_cast<std::ptrdiff_t>(column);
    part.emplace_back(from, from + static_cast<std::ptrdiff_t>(columns));
  }
  return part;
}

// -----------------------------------------------------------------------------------------------------------------
// Telling.

// Of a hidden state to all others of the model.
double mean_of_others(const std::vector<double>& row, size_t own) {
  double sum = 0, count = 0;
  for (size_t l = 0; l < row.size(); ++l)
    if (l != own && std::isfinite(row[l])) sum += row[l], count += 1;
  return count > 0 ? sum / count : NAN;
}

// Which one of a column's hidden states of the first model is the most like it: "3: 0.912".
std::string nearest_text(const Alikeness& to_first, size_t column) {
  size_t best = to_first.size();
  for (size_t r = 0; r < to_first.size(); ++r)
    if (std::isfinite(to_first[r][column]) && (best == to_first.size() || to_first[r][column] > to_first[best][column]))
      best = r;
  return best == to_first.size() ? "-" : str(best, ": ", number_or_dash(to_first[best][column]));
}

std::string similarity_table(const SimilarityOfModel& m, uint64_t seed) {
  std::vector<std::vector<std::string>> table = {{"hidden", "one before", "first", "last", "mean of others"}};
  if (!m.to_first.empty()) table[0].push_back("nearest of model 1");
  for (size_t l = 0; l < m.own.size(); ++l) {
    table.push_back({std::to_string(l), l == 0 ? "-" : number_or_dash(m.own[l][l - 1]),
                     number_or_dash(m.own[l].front()), number_or_dash(m.own[l].back()),
                     number_or_dash(mean_of_others(m.own[l], l))});
    if (!m.to_first.empty()) table.back().push_back(nearest_text(m.to_first, l));
  }
  return str(m.title, "\n", format_count(std::ssize(m.tokens)), " tokens of ", m.lengths.text(), ", seed ", seed,
             "\nlinear CKA of a hidden state with\n\n", format_table(table), "\nabout ", number_or_dash(m.unrelated()),
             " of states that have nothing in common, of ", m.channels, " channels\n");
}

nlohmann::json similarity_json(const SimilarityOfModel& m) {
  nlohmann::json json =
      m.json({{"tokens", m.tokens}, {"unrelated_cka", m.unrelated()}, {"cka", numbers_or_nulls(m.own)}});
  if (!m.to_first.empty()) json["cka_of_first_model"] = numbers_or_nulls(m.to_first);
  return json;
}

std::string alikeness_csv(const std::string& row, const std::string& column, const Alikeness& alike) {
  std::string out;
  for (size_t r = 0; r < alike.size(); ++r)
    for (size_t c = 0; c < alike[r].size(); ++c) out += csv_row(row, r, column, c, alike[r][c]);
  return out;
}

class LayerSimilarity : public AnalysisOf<SimilarityOfModel> {
 public:
  LayerSimilarity() : AnalysisOf("similarity", "linear CKA of the hidden states of all layers, and of two models") {}
  void add_flags(CLI::App& app) override {
    own(app, {add_integer(app, "--cka-tokens", tokens_, 2, 20'000, "similarity: sampled from the windows")});
  }
  void measure(Subject& subject, const AnalysisOptions& o) override;
  Finding finding(const AnalysisOptions& o) const override;

 private:
  int64_t tokens_ = 2000;
  std::vector<StateRows> first_;  // of the first model
};

void LayerSimilarity::measure(Subject& subject, const AnalysisOptions& o) {
  const std::vector<TokenWindow>& windows = windows_of(subject, o, usual_similarity);
  const Config& config = subject.config();
  SimilarityOfModel m(subject, windows);
  m.channels = config.hidden_size;
  m.tokens = sample_tokens(m.lengths.tokens, tokens_, o.seed);
  const int64_t n = std::ssize(m.tokens);
  if (n < 10 * config.hidden_size)
    say_note(str(n, " tokens are few for ", config.hidden_size, " channels: states of ", subject.name,
                 " that have nothing in common have a CKA of about ", format_number("%.2f", m.unrelated()),
                 "; give more --cka-tokens and --sequences"));
  Probe probe(subject.model, 1, std::ssize(windows[0].tokens));
  const bool compare = !all_.empty() && windows_of_first();
  double columns = static_cast<double>((subject.layers() + 1) * config.hidden_size);
  for (size_t l = 0; compare && l < first_.size(); ++l) columns += static_cast<double>(first_[l].columns);
  say_cost("similarity", subject, windows,
           static_cast<double>(windows.size()) * probe.forward_flops() +
               static_cast<double>(n) * static_cast<double>(n) * columns,
           probe.bytes() + 8 * static_cast<double>(n) * columns);
  std::vector<StateRows> features = hidden_features(subject, windows, m.tokens, probe);
  std::vector<const StateRows*> both;
  if (compare)
    for (const StateRows& one : first_) both.push_back(&one);
  const size_t before = both.size(), own = features.size();
  for (const StateRows& one : features) both.push_back(&one);
  const Alikeness all = linear_cka(both, n);
  m.own = block_of(all, before, own, before, own);
  m.to_first = block_of(all, 0, before, before, own);
  if (all_.empty()) first_ = std::move(features);
  all_.push_back(std::move(m));
}

Finding LayerSimilarity::finding(const AnalysisOptions& o) const {
  Finding found{"Similarity of layers"};
  found.csv = "model,hidden,other_model,other_hidden,cka\n";
  const std::string& first = all_[0].model;
  HeatMapBand own{"linear CKA of hidden states within a model", {}, HeatScale::shares};
  HeatMapBand across{
      "linear CKA of the first model's hidden states, the rows, with those of another", {}, HeatScale::shares};
  for (size_t i = 0; i < all_.size(); ++i) {
    const SimilarityOfModel& m = all_[i];
    found.add(similarity_table(m, o.seed), similarity_json(m));
    found.csv += alikeness_csv(m.model, m.model, m.own) + alikeness_csv(first, m.model, m.to_first);
    own.maps.push_back({names()[i], m.own});
    if (!m.to_first.empty()) across.maps.push_back({names()[i], m.to_first});
  }
  std::vector<HeatMapBand> bands = {own};
  if (!across.maps.empty()) bands.push_back(across);
  const SimilarityOfModel& m = all_[0];
  const std::string sample = str(format_count(std::ssize(m.tokens)), " tokens of ", m.lengths.text(), if_of_first());
  found.json.update({{"sequences", m.lengths.windows}, {"same_windows", same_windows()}});
  found.svg = heat_map_svg(str("Similarity of hidden states, ", sample), "hidden state", "hidden state", bands);
  found.measured = str(
      "Linear centred kernel alignment (Kornblith et al., arXiv 1905.00414) of hidden states over ", sample,
      ", columns centred: |Y'X|^2 / (|X'X| |Y'Y|), up to 1, the same up to rotation and scale. The estimate is biased "
      "upwards: states of C channels that have nothing in common have about C / (n + C) over n tokens, here ",
      number_or_dash(m.unrelated()), if_of_first(),
      ". Hidden state 0 is the embeddings, of a GPT-2 with their positions. ", hidden_text(all_));
  found.shown = numbers("Mean similarity of adjacent hidden states", "%.2f", [](const SimilarityOfModel& one) {
    std::vector<double> next;
    for (size_t l = 0; l + 1 < one.own.size(); ++l) next.push_back(one.own[l][l + 1]);
    return mean_of_finite(next);
  });
  return found;
}

}  // namespace

std::unique_ptr<Analysis> similarity_analysis() { return std::make_unique<LayerSimilarity>(); }

}  // namespace crossply
