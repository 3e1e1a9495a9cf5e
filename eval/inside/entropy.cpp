// analyze --what entropy: of hidden states and of values, by layer.
#include "eval/inside/entropy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/ticker.h"
#include "engine/at_once.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/analysis.h"
#include "eval/inside/attention_rank.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"

namespace crossply {

void ChannelMoments::add(const double* x, int64_t n, int64_t C) {
  if (n == 0) return;
  mean.resize(static_cast<size_t>(C)), squares.resize(static_cast<size_t>(C));
  std::vector<double> own(mean.size(), 0.0), spread(mean.size(), 0.0);
  for (int64_t t = 0; t < n; ++t)
    for (size_t c = 0; c < own.size(); ++c) own[c] += x[t * C + static_cast<int64_t>(c)];
  for (double& sum : own) sum /= static_cast<double>(n);
  for (int64_t t = 0; t < n; ++t)
    for (size_t c = 0; c < own.size(); ++c) {
      const double away = x[t * C + static_cast<int64_t>(c)] - own[c];
      spread[c] += away * away;
    }
  const double before = static_cast<double>(rows), more = static_cast<double>(n), all = before + more;
  for (size_t c = 0; c < own.size(); ++c) {
    const double apart = own[c] - mean[c];
    squares[c] += spread[c] + apart * apart * before * more / all * (before > 0);
    mean[c] = before > 0 ? mean[c] + apart * more / all : own[c];
  }
  rows += n;
}

double ChannelMoments::deviation(size_t channel) const {
  return rows < 2 ? 0 : std::sqrt(squares[channel] / static_cast<double>(rows - 1));
}

MatrixEntropy entropy_of_spectrum(const std::vector<double>& eigenvalues, double alpha) {
  const double largest = eigenvalues.empty() ? 0 : *std::max_element(eigenvalues.begin(), eigenvalues.end());
  const double rounding = largest * static_cast<double>(eigenvalues.size()) * std::numeric_limits<double>::epsilon();
  std::vector<double> shares;
  for (const double value : eigenvalues)
    if (value > rounding) shares.push_back(value);
  const double trace = std::accumulate(shares.begin(), shares.end(), 0.0);
  if (shares.empty()) return {};
  double powers = 0, shannon = 0;
  for (double& p : shares) p /= trace, powers += std::pow(p, alpha), shannon -= p * std::log(p);
  shannon = std::max(shannon, 0.0);
  return {std::abs(alpha - 1) < 1e-8 ? shannon : std::max(std::log(powers) / (1 - alpha), 0.0), shannon};
}

MatrixEntropy matrix_entropy(const double* x, int64_t n, int64_t C, const ChannelMoments& moments, double alpha) {
  const bool channels = C < n;  // Z^T Z, the smaller, has the same spectrum but for zeros
  const int64_t m = channels ? C : n, k = channels ? n : C;
  std::vector<double> Z(static_cast<size_t>(m * k)), gram(static_cast<size_t>(m * m));
  for (int64_t c = 0; c < C; ++c) {
    const double mean = moments.mean[static_cast<size_t>(c)];
    const double width = moments.deviation(static_cast<size_t>(c)) + 1e-5;
    for (int64_t t = 0; t < n; ++t)
      Z[static_cast<size_t>(channels ? c * n + t : t * C + c)] = (x[t * C + c] - mean) / width;
  }
  row_products(Z.data(), m, Z.data(), m, k, gram.data(), m);
  return entropy_of_spectrum(symmetric_eigenvalues(gram.data(), m), alpha);
}

// -----------------------------------------------------------------------------------------------------------------
// Measuring.

namespace {

constexpr UsualWindows usual_entropy = {128, 256};

// What is looked at in each layer, in the order of tables and panels.
struct EntropyKind {
  const char *key, *column, *caption;
};
constexpr EntropyKind entropy_kinds[] = {{"hidden", "hidden", "entropy of hidden states, nats"},
                                         {"value", "values", "entropy of values as attention reads them, nats"},
                                         {"own_value", "own", "entropy of the layer's own values, nats"}};
constexpr size_t kinds_of_entropy = std::size(entropy_kinds);

// Of the windows.
struct EntropyNumbers {
  double mean = NAN, std = NAN, shannon_mean = NAN, shannon_std = NAN, bound = NAN;
  int64_t channels = 0;  // 0: the layer has no such thing
};

struct EntropyOfModel : WindowedModel {
  using WindowedModel::WindowedModel;
  std::vector<std::array<EntropyNumbers, kinds_of_entropy>> layers = {};

  // Of the layers that have it.
  template <class Choose>
  double over_layers(size_t kind, const Choose& choose) const {
    double sum = 0, count = 0;
    for (const auto& layer : layers)
      if (layer[kind].channels > 0) sum += choose(layer[kind]), ++count;
    return count > 0 ? sum / count : NAN;
  }
};

// Which heads of a value are no copies, bit for bit and in all windows, of one before them: a connection that expands
// key/value heads to query heads has the same one several times.
struct DistinctHeads {
  int64_t heads = 1, D = 0;                    // 1: one that is taken as it is
  std::vector<std::vector<bool>> differ = {};  // heads i and j < i, in a window so far
  std::vector<int64_t> kept = {};

  // x: (T, heads, D), of which n tokens count.
  void look(const std::vector<double>& x, int64_t n);
  void decide();
  bool copies() const { return std::ssize(kept) < heads; }
  // Of n rows (heads, D): those of the heads that are kept.
  std::vector<double> of(const std::vector<double>& x, int64_t n) const;
};

void DistinctHeads::look(const std::vector<double>& x, int64_t n) {
  const auto H = static_cast<size_t>(heads);
  differ.resize(H, std::vector<bool>(H));
  for (size_t i = 0; i < H; ++i)
    for (size_t j = 0; j < i; ++j)
      for (int64_t t = 0; t < n && !differ[i][j]; ++t) {
        const double* const row = x.data() + t * heads * D;
        const double *const a = row + static_cast<int64_t>(i) * D, *const b = row + static_cast<int64_t>(j) * D;
        differ[i][j] = !std::equal(a, a + D, b);
      }
}

void DistinctHeads::decide() {
  for (size_t i = 0; i < static_cast<size_t>(heads); ++i) {
    size_t j = 0;
    while (j < i && differ[i][j]) ++j;
    if (j == i) kept.push_back(static_cast<int64_t>(i));
  }
}

std::vector<double> DistinctHeads::of(const std::vector<double>& x, int64_t n) const {
  std::vector<double> rows;
  for (int64_t t = 0; t < n; ++t)
    for (const int64_t head : kept) {
      const auto begin = x.begin() + (t * heads + head) * D;
      rows.insert(rows.end(), begin, begin + D);
    }
  return rows;
}

// One value of the model under the glass.
struct EntropyOfValue {
  std::string name;
  size_t layer, kind;
  int64_t channels;
  const EntropyOfValue* twin = nullptr;  // a value that may be the same as this one, as the own and the routed values
  bool same = false;                     // it is so, in all windows so far
  ChannelMoments moments = {};
  std::vector<MatrixEntropy> windows = {};
  double bounds = 0;
  DistinctHeads heads = {};

  void leave_out_copies();
  EntropyNumbers numbers() const;
};

void EntropyOfValue::leave_out_copies() {
  heads.decide();
  if (!heads.copies()) return;
  moments.mean = heads.of(moments.mean, 1), moments.squares = heads.of(moments.squares, 1);
  channels = std::ssize(moments.mean);
}

EntropyNumbers EntropyOfValue::numbers() const {
  const double N = static_cast<double>(windows.size());
  const auto mean_and_std = [&](double MatrixEntropy::*number) {
    double mean = 0, square = 0;
    for (const MatrixEntropy& window : windows) mean += window.*number / N;
    for (const MatrixEntropy& window : windows) square += (window.*number - mean) * (window.*number - mean) / N;
    return std::pair{mean, std::sqrt(square)};
  };
  const auto [mean, std] = mean_and_std(&MatrixEntropy::renyi);
  const auto [shannon_mean, shannon_std] = mean_and_std(&MatrixEntropy::shannon);
  return {mean, std, shannon_mean, shannon_std, bounds / N, channels};
}

std::deque<EntropyOfValue> values_to_look_at(Probe& probe, const Config& config, int64_t T) {
  const auto layers = static_cast<size_t>(applications_of(config).count());
  std::deque<EntropyOfValue> values;
  for (size_t l = 0; l < layers; ++l) {
    const EntropyOfValue* routed = nullptr;
    for (size_t kind = 0; kind < kinds_of_entropy; ++kind) {
      const std::string name = str(entropy_kinds[kind].key, ".", kind == 0 ? l + 1 : l);
      if (!probe.has(name)) continue;
      probe.keep(name);
      const bool own = kind == 2 && routed != nullptr;
      values.push_back({name, l, kind, probe.shape(name).numel() / T, own ? routed : nullptr, own});
      if (kind != 1) continue;
      routed = &values.back();
      if (const Shape shape = probe.shape(name); shape[2] > config.num_key_value_heads)
        values.back().heads = {shape[2], shape[3]};
    }
  }
  return values;
}

// The products of Z with itself, and of every spectrum about 4/3 multiply-adds a cube.
double flops_of_entropy(const Probe& probe, const std::deque<EntropyOfValue>& values, double N, double T) {
  double flops = 2 * probe.forward_flops();
  for (const EntropyOfValue& value : values) {
    const double C = static_cast<double>(value.channels), m = std::min(T, C);
    flops += 2 * m * T * C + 8 * m * m * m / 3;
  }
  return N * flops;
}

// The model runs twice over all windows, for the moments and for the spectra, so that no more than one window's values
// are ever in memory.
EntropyOfModel entropy_of_model(Subject& subject, const std::vector<TokenWindow>& windows, double alpha) {
  const Config& config = subject.config();
  const auto T = static_cast<int64_t>(windows[0].tokens.size());
  Probe probe(subject.model, 1, T);
  std::deque<EntropyOfValue> values = values_to_look_at(probe, config, T);
  double kept = 0;
  for (const EntropyOfValue& value : values) kept += static_cast<double>(value.channels * T) * sizeof(double);
  say_cost("entropy", subject, windows,
           flops_of_entropy(probe, values, static_cast<double>(windows.size()), static_cast<double>(T)),
           probe.bytes() + kept);
  Ticker ticker(printable(subject.name), "window");
  int64_t done = 0;
  const auto run_all = [&](const auto& look) {
    for (const TokenWindow& window : windows) {
      probe.run(window.tokens.data());
      at_once(values.size(), [&](size_t i) { look(values[i], probe.at(values[i].name), window.length); });
      ticker.tell(++done, 2 * std::ssize(windows));
    }
  };
  run_all([&](EntropyOfValue& value, const std::vector<double>& x, int64_t n) {
    value.moments.add(x.data(), n, value.channels);
    if (value.heads.heads > 1) value.heads.look(x, n);
    if (value.same) value.same = x == probe.at(value.twin->name);
  });
  for (EntropyOfValue& value : values) value.leave_out_copies();
  run_all([&](EntropyOfValue& value, const std::vector<double>& all, int64_t n) {
    const std::vector<double> distinct = value.heads.copies() ? value.heads.of(all, n) : std::vector<double>();
    const std::vector<double>& x = value.heads.copies() ? distinct : all;
    value.bounds += std::log(static_cast<double>(std::min(n, value.channels)));
    if (!value.same) value.windows.push_back(matrix_entropy(x.data(), n, value.channels, value.moments, alpha));
  });
  EntropyOfModel m(subject, windows);
  m.layers.resize(static_cast<size_t>(subject.layers()));
  for (EntropyOfValue& value : values) {
    if (value.same) value.windows = value.twin->windows;
    m.layers[value.layer][value.kind] = value.numbers();
  }
  return m;
}

// -----------------------------------------------------------------------------------------------------------------
// Telling.

std::string entropy_table(const EntropyOfModel& m, double alpha, uint64_t seed) {
  std::vector<std::vector<std::string>> table = {{"layer"}};
  for (const EntropyKind& kind : entropy_kinds)
    for (const char* column : {kind.column, "std", "Shannon"}) table[0].push_back(column);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    table.push_back({std::to_string(l)});
    for (const EntropyNumbers& numbers : m.layers[l])
      for (const double nats : {numbers.mean, numbers.std, numbers.shannon_mean})
        table.back().push_back(number_or_dash(nats));
  }
  std::vector<std::string> means = {"mean"}, bounds = {"bound"};
  for (size_t kind = 0; kind < kinds_of_entropy; ++kind) {
    const auto mean = [&](double EntropyNumbers::*number) {
      return number_or_dash(m.over_layers(kind, [&](const EntropyNumbers& layer) { return layer.*number; }));
    };
    for (double EntropyNumbers::*number : {&EntropyNumbers::mean, &EntropyNumbers::std, &EntropyNumbers::shannon_mean})
      means.push_back(mean(number));
    for (const std::string& text : {mean(&EntropyNumbers::bound), std::string("-"), mean(&EntropyNumbers::bound)})
      bounds.push_back(text);
  }
  table.push_back(means), table.push_back(bounds);
  return str(m.title, "\n", m.lengths.text(), ", seed ", seed, ", alpha ", alpha, "; in nats\n\n", format_table(table));
}

nlohmann::json entropy_json(const EntropyOfModel& m) {
  nlohmann::json layers = nlohmann::json::array(), means;
  for (const auto& layer : m.layers) {
    layers.emplace_back();
    for (size_t kind = 0; kind < kinds_of_entropy; ++kind) {
      const EntropyNumbers& numbers = layer[kind];
      nlohmann::json& to = layers.back()[entropy_kinds[kind].key];
      if (numbers.channels == 0) continue;
      to = {{"mean", numbers.mean},
            {"std", numbers.std},
            {"shannon_mean", numbers.shannon_mean},
            {"shannon_std", numbers.shannon_std},
            {"bound", numbers.bound},
            {"channels", numbers.channels}};
    }
  }
  for (size_t kind = 0; kind < kinds_of_entropy; ++kind)
    means[entropy_kinds[kind].key] =
        number_or_null(m.over_layers(kind, [](const EntropyNumbers& layer) { return layer.mean; }));
  return m.json({{"layers", layers}, {"mean", means}});
}

std::string entropy_csv(const std::vector<EntropyOfModel>& all) {
  std::string out = "model,layer,value,mean,std,shannon_mean,shannon_std,bound,channels\n";
  for (const EntropyOfModel& m : all)
    for (size_t l = 0; l < m.layers.size(); ++l)
      for (size_t kind = 0; kind < kinds_of_entropy; ++kind) {
        const EntropyNumbers& numbers = m.layers[l][kind];
        if (numbers.channels == 0) continue;
        out += csv_row(m.model, l, entropy_kinds[kind].key, numbers.mean, numbers.std, numbers.shannon_mean,
                       numbers.shannon_std, numbers.bound, numbers.channels);
      }
  return out;
}

// NaN where a layer has none.
Curve entropy_curve(const EntropyOfModel& m, const std::string& name, size_t kind) {
  Curve curve{name, {}, {}};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const EntropyNumbers& numbers = m.layers[l][kind];
    curve.x.push_back(static_cast<double>(l)), curve.y.push_back(numbers.mean);
    curve.low.push_back(numbers.mean - numbers.std), curve.high.push_back(numbers.mean + numbers.std);
  }
  return curve;
}

// What the entropies of the models cannot exceed; one line for models where that is the same in the layers of both.
std::vector<Curve> entropy_bounds(const std::vector<EntropyOfModel>& all, const std::vector<std::string>& names,
                                  size_t kind) {
  std::vector<Curve> bounds;
  for (size_t i = 0; i < all.size(); ++i) {
    Curve curve{"bound, " + names[i], {}, {}};
    curve.reference = true;
    for (size_t l = 0; l < all[i].layers.size(); ++l)
      curve.x.push_back(static_cast<double>(l)), curve.y.push_back(all[i].layers[l][kind].bound);
    const auto same = [&](const Curve& other) {
      for (size_t l = 0; l < std::min(curve.y.size(), other.y.size()); ++l)
        if (curve.y[l] != other.y[l] && !std::isnan(curve.y[l]) && !std::isnan(other.y[l])) return false;
      return true;
    };
    const auto found = std::find_if(bounds.begin(), bounds.end(), same);
    if (found == bounds.end()) bounds.push_back(curve);
    else if (curve.y.size() > found->y.size()) found->x = curve.x, found->y = curve.y;
  }
  if (bounds.size() == 1) bounds[0].name = "bound";
  return bounds;
}

class EntropyByLayer : public AnalysisOf<EntropyOfModel> {
 public:
  EntropyByLayer() : AnalysisOf("entropy", "matrix-based Renyi entropy of hidden states and values by layer") {}
  void add_flags(CLI::App& app) override {
    own(app, {add_number(app, "--alpha", alpha_, 0.01, 10, "entropy: the order of Renyi's entropy; 1: Shannon's")});
  }
  void measure(Subject& subject, const AnalysisOptions& o) override {
    all_.push_back(entropy_of_model(subject, windows_of(subject, o, usual_entropy), alpha_));
  }
  Finding finding(const AnalysisOptions& o) const override;

 private:
  double alpha_ = 0.5;
};

Finding EntropyByLayer::finding(const AnalysisOptions& o) const {
  Finding found{"Entropy of hidden states and values"};
  std::vector<Panel> panels;
  for (const EntropyOfModel& m : all_) found.add(entropy_table(m, alpha_, o.seed), entropy_json(m));
  for (size_t kind = 0; kind < kinds_of_entropy; ++kind) {
    Panel panel{entropy_kinds[kind].caption, "", {}};
    for (size_t i = 0; i < all_.size(); ++i) {
      panel.curves.push_back(entropy_curve(all_[i], names()[i], kind));
      panel.curves.back().look = model_look(o, all_[i].model);
    }
    for (const Curve& bound : entropy_bounds(all_, names(), kind)) panel.curves.push_back(bound);
    panels.push_back(panel);
  }
  const WindowLengths& lengths = all_[0].lengths;
  found.json.update({{"sequences", lengths.windows}, {"alpha", alpha_}, {"same_windows", same_windows()}});
  found.csv = entropy_csv(all_);
  found.svg =
      curve_svg(str("Entropy, alpha ", alpha_, ", of ", lengths.text(), if_of_first()), "layer, from 0", panels);
  found.measured = str(
      "How many directions the tokens of a window take up, in nats: every channel is z-scored over all windows, the "
      "eigenvalues of a window's Gram matrix are divided by their sum to shares p, and the entropy of order ",
      alpha_, " is ", alpha_ == 1 ? "-sum of p log p" : str("log(sum of p^", alpha_, ") / (1 - ", alpha_, ")"),
      ". Lines are means over ", lengths.text(), if_of_first(),
      ", bands one standard deviation; higher means that the tokens are spread more evenly over more directions, and "
      "the bound is the logarithm of the number of tokens or channels, whichever is smaller. A key/value head that a "
      "layer's attention reads several times counts once. ",
      hidden_text(all_));
  const auto mean = [&](const char* what, size_t kind) {
    return numbers(what, "%.2f", [kind](const auto& m) { return mean_of_finite(entropy_curve(m, "", kind).y); });
  };
  found.shown = mean("Mean entropy over the layers, in nats: of values", 1) + " " + mean("Of hidden states", 0);
  found.paper =
      "LIMe (arXiv 2502.09245): with LIMe the entropy of values is higher than a LLaMA's, while that of "
      "hidden states cannot be told apart.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> entropy_analysis() { return std::make_unique<EntropyByLayer>(); }

}  // namespace crossply
