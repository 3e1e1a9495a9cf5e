// analyze --what maps: the attention of a text, or the mean of several, token by token or in bins of tokens.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "cli/format.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/analysis.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"
#include "eval/inside/token_map.h"

namespace crossply {
namespace {

constexpr int64_t usual_tokens = 32;            // of a window
constexpr int64_t named_tokens = 48;            // that still have their text beside a map
constexpr double max_cells = 64;                // of a map's side in the figure
constexpr double max_shares = 4 * 1024 * 1024;  // that are written: about 200 MB

struct HeadPlace {
  int64_t layer, head;
};

// One model's attention of a text of n tokens, or its mean over several.
struct MapsOfModel : AnalysedModel {
  using AnalysedModel::AnalysedModel;
  bool causal_mask = true;
  TokenBins bins = {0};
  std::vector<std::vector<int32_t>> texts = {};
  std::vector<std::vector<std::string>> tokens = {};          // their text, as it is
  std::vector<std::vector<std::vector<double>>> layers = {};  // by layer and head: shares (bins, bins)
  double on_first = NAN;                                      // mean share that tokens after the first give to it
  int64_t rows() const { return bins.count(); }
  std::vector<double> row_of(const std::vector<double>& map, int64_t t) const {
    const auto row = map.begin() + t * rows();
    return {row, row + (causal_mask ? t + 1 : rows())};
  }
  std::vector<double> mean_of_heads(size_t layer) const {
    std::vector<double> mean(layers[layer].empty() ? 0 : layers[layer][0].size());
    for (const std::vector<double>& head : layers[layer])
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += head[i] / static_cast<double>(layers[layer].size());
    return mean;
  }
  // "17 the" where the map is of one text's tokens, else "17" or "32-47".
  std::string name(int64_t t) const {
    const bool of_token = texts.size() == 1 && bins.bin == 1;
    return bins.name(t) + (of_token ? " " + token_label(tokens[0][static_cast<size_t>(t)]) : "");
  }
  std::string size_text() const {
    return str(format_count(bins.n), bins.n == 1 ? " token" : " tokens",
               texts.size() > 1 ? str(", mean of ", texts.size(), " texts") : "");
  }
};

std::vector<int32_t> ids_of_text(const Subject& subject, const std::string& text) {
  const Config& config = subject.config();
  std::vector<int32_t> ids;
  try {
    ids = encode_prompt(subject.data.tokenizer, text);
  } catch (const Error& error) {
    fail(Exit::usage, "--text: ", error.what());
  }
  if (ids.empty()) fail(Exit::usage, "--text has no tokens");
  for (const int32_t id : ids)
    if (id < 0 || id >= config.vocab_size)
      fail(Exit::usage, "--text: token ", id, " is outside the vocabulary of ", config.vocab_size, " of ",
           subject.name);
  if (std::ssize(ids) > config.max_position_embeddings)
    fail(Exit::usage, "--text has ", ids.size(), " tokens; ", subject.name, " takes sequences of at most ",
         config.max_position_embeddings);
  return ids;
}

// Adds one text's share of the mean to the maps of an op's heads (count), and to what later tokens give the first one.
void add_heads(std::vector<double>* heads, double* on_first, int64_t count, const MapsOfModel& m,
               const AttentionInputs& inputs) {
  const int64_t n = m.bins.n;
  const double weight = 1 / static_cast<double>(m.texts.size());
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t h = 0; h < count; ++h) {
    std::vector<double> P(static_cast<size_t>(n * n));
    inputs.probabilities(0, h, n, P.data(), m.causal_mask);
    add_binned(&heads[h], m.bins, P.data(), TokenBins{n}, weight);
    for (int64_t t = 1; t < n; ++t) on_first[h] += weight * P[static_cast<size_t>(t * n)];
  }
}

// Of the first n tokens of all windows, which have n or more.
MapsOfModel maps_of(Subject& subject, const std::vector<TokenWindow>& windows, bool causal_mask) {
  const int64_t n = WindowLengths(windows).shortest;
  MapsOfModel m(subject);
  m.causal_mask = causal_mask;
  for (const TokenWindow& window : windows) {
    m.texts.emplace_back(window.tokens.begin(), window.tokens.begin() + n);
    m.tokens.emplace_back();
    for (const int32_t id : m.texts.back()) m.tokens.back().push_back(subject.data.tokenizer.name_of(id));
  }
  Probe probe(subject.model, 1, std::ssize(windows[0].tokens));
  if (probe.attentions().empty()) fail(Exit::usage, m.model, ": no layer of ", m.arch, " has attention over tokens");
  m.layers.resize(static_cast<size_t>(subject.layers()));
  int64_t all_heads = 0;
  for (const Probe::Attention& op : probe.attentions()) {
    m.layers.at(static_cast<size_t>(op.layer)).resize(static_cast<size_t>(op.end()));
    all_heads += op.heads;
  }
  m.bins = TokenBins::at_most(n, std::sqrt(max_shares / static_cast<double>(all_heads)));
  const auto shares = static_cast<size_t>(m.rows() * m.rows());
  for (auto& heads : m.layers)
    for (auto& head : heads) head.resize(shares);
  say_cost("maps", subject, windows, static_cast<double>(windows.size()) * probe.forward_flops(),
           probe.bytes() + 8 * static_cast<double>(all_heads) * static_cast<double>(shares));
  double on_first = 0;
  probe.watch_attention([&](size_t i, const AttentionInputs& inputs) {
    const Probe::Attention& op = probe.attentions()[i];
    std::vector<double> of_heads(static_cast<size_t>(op.heads));
    add_heads(&m.layers[static_cast<size_t>(op.layer)][static_cast<size_t>(op.first)], of_heads.data(), op.heads, m,
              inputs);
    for (const double share : of_heads) on_first += share;
  });
  for (const TokenWindow& window : windows) probe.run(window.tokens.data());
  if (n > 1) m.on_first = on_first / static_cast<double>(all_heads * (n - 1));
  return m;
}

// -----------------------------------------------------------------------------------------------------------------
// Telling.

std::string maps_table(const MapsOfModel& m) {
  const int64_t last = m.rows() - 1;
  std::vector<std::vector<std::string>> rows = {{"layer", "looks most at", "share", "then at", "share", "heads"}};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    if (m.layers[l].empty()) {
      rows.push_back({std::to_string(l), "-", "-", "-", "-", "0"});
      continue;
    }
    const std::vector<double> row = m.row_of(m.mean_of_heads(l), last);
    std::vector<std::string> cells = {std::to_string(l)};
    std::vector<size_t> order(row.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return row[a] > row[b]; });
    for (size_t i = 0; i < 2; ++i) {
      const bool there = i < order.size();
      cells.push_back(there ? m.name(static_cast<int64_t>(order[i])) : "-");
      cells.push_back(there ? format_number("%.3f", row[order[i]]) : "-");
    }
    cells.push_back(std::to_string(m.layers[l].size()));
    rows.push_back(cells);
  }
  const bool tokens = m.texts.size() == 1 && m.bins.bin == 1;
  const std::string binned = m.bins.bin == 1 ? "" : str(", in bins of ", m.bins.bin, " tokens");
  const std::string which = tokens ? str("the last of ", m.size_text(), ", ", m.name(last))
                                   : str("row ", m.name(last), " of ", m.size_text(), binned);
  return str(m.title, "\n", wrap(which + ", mean over a layer's heads", 80, 0), "\n\n", format_table(rows));
}

nlohmann::json tokens_json(const MapsOfModel& m, size_t text) {
  nlohmann::json tokens = nlohmann::json::array();
  for (size_t t = 0; t < m.texts[text].size(); ++t)
    tokens.push_back({{"id", m.texts[text][t]}, {"text", utf8_or_escaped(m.tokens[text][t])}});
  return tokens;
}

nlohmann::json map_json(const MapsOfModel& m, const std::vector<double>& map) {
  nlohmann::json rows = nlohmann::json::array();
  for (int64_t t = 0; t < m.rows() && !map.empty(); ++t) rows.push_back(m.row_of(map, t));
  return rows;
}

nlohmann::json maps_json(const MapsOfModel& m) {
  nlohmann::json texts = nlohmann::json::array(), layers = nlohmann::json::array();
  for (size_t i = 0; i < m.texts.size(); ++i) texts.push_back(tokens_json(m, i));
  for (size_t l = 0; l < m.layers.size(); ++l) {
    nlohmann::json heads = nlohmann::json::array();
    for (const std::vector<double>& head : m.layers[l]) heads.push_back(map_json(m, head));
    layers.push_back({{"mean", map_json(m, m.mean_of_heads(l))}, {"heads", heads}});
  }
  return m.json({{"texts", texts}, {"bin", m.bins.bin}, {"layers", layers}});
}

// query and key: the first tokens of the bins.
void add_maps_csv(std::string& out, const MapsOfModel& m) {
  const auto add = [&](size_t layer, const std::string& head, const std::vector<double>& map) {
    for (int64_t t = 0; t < m.rows() && !map.empty(); ++t) {
      const std::vector<double> row = m.row_of(map, t);
      for (int64_t j = 0; j < std::ssize(row); ++j)
        out += csv_row(m.model, layer, head, t * m.bins.bin, j * m.bins.bin, row[static_cast<size_t>(j)]);
    }
  };
  for (size_t l = 0; l < m.layers.size(); ++l) {
    add(l, "mean", m.mean_of_heads(l));
    for (size_t h = 0; h < m.layers[l].size(); ++h) add(l, std::to_string(h), m.layers[l][h]);
  }
}

// The bins of the figure: those of the numbers, or several of them in one.
TokenBins drawn_bins(const MapsOfModel& m) {
  return TokenBins::at_most(m.bins.n, std::min(max_cells, static_cast<double>(m.rows())));
}

TokenMapBand band_of(const MapsOfModel& m, const std::string& name, const std::vector<HeadPlace>& single) {
  const TokenBins bins = drawn_bins(m);
  const std::string binned = bins.bin > 1 ? str(", a cell is ", bins.bin, " x ", bins.bin, " tokens") : "";
  TokenMapBand band{str(name, ": ", m.size_text(), binned), {}, {}};
  const bool named = m.texts.size() == 1 && m.bins.n <= named_tokens;
  band.small = !named;
  for (int64_t t = 0; t < bins.count(); ++t)
    band.tokens.push_back(named ? token_label(m.tokens[0][static_cast<size_t>(t)]) : bins.name(t));
  const auto add = [&](const std::string& caption, const std::vector<double>& map) {
    std::vector<double> drawn(static_cast<size_t>(bins.count() * bins.count()));
    add_binned(&drawn, bins, map.data(), m.bins, 1);
    band.maps.push_back({caption, {}});
    for (int64_t t = 0; t < bins.count(); ++t) {
      const auto row = drawn.begin() + t * bins.count();
      band.maps.back().rows.emplace_back(row, row + (m.causal_mask ? t + 1 : bins.count()));
    }
  };
  for (size_t l = 0; l < m.layers.size(); ++l)
    if (!m.layers[l].empty()) add(str("layer ", l, ", mean of ", m.layers[l].size(), " heads"), m.mean_of_heads(l));
  for (const HeadPlace& at : single)
    add(str("layer ", at.layer, ", head ", at.head),
        m.layers[static_cast<size_t>(at.layer)][static_cast<size_t>(at.head)]);
  return band;
}

// -----------------------------------------------------------------------------------------------------------------

constexpr int64_t max_usual_heads = 8;

class AttentionMaps : public AnalysisOf<MapsOfModel> {
 public:
  AttentionMaps() : AnalysisOf("maps", "attention of a text, token by token, by layer and head") {}
  void add_flags(CLI::App& app) override {
    const auto set_text = [this](const std::string& text) { text_ = text; };
    const Flag text =
        add_parsed(app, "--text", set_text, "TEXT", "maps: of this text (default: a window of 32 tokens)");
    own(app, {text,
              add_integer(app, "--texts", texts_, 1, max_size,
                          "maps: the mean of this many windows of --length tokens (default: of 32)")
                  .excludes(text),
              add_truth(app, "--causal-mask", causal_mask_,
                        "maps: false: softmax over all tokens, also later ones, as Inheritune draws it"),
              add_texts(app, "--heads", heads_, "L.H...",
                        "maps: draw these heads too, as LAYER.HEAD, from 0: 3.0 3.7 "
                        "(default: the middle layer's first 8)")});
  }
  void measure(Subject& subject, const AnalysisOptions& o) override;
  Finding finding(const AnalysisOptions& o) const override;

 private:
  std::vector<HeadPlace> heads_of(const MapsOfModel& m) const;
  std::optional<std::string> text_;
  int64_t texts_ = 1;
  bool causal_mask_ = true;
  std::vector<std::string> heads_;
};

std::vector<HeadPlace> AttentionMaps::heads_of(const MapsOfModel& m) const {
  std::vector<HeadPlace> list;
  if (heads_.empty()) {  // those of the middle layer, as many as are still easy to compare
    const auto middle = std::ssize(m.layers) / 2, heads = std::ssize(m.layers[static_cast<size_t>(middle)]);
    for (int64_t h = 0; h < std::min<int64_t>(heads, max_usual_heads); ++h) list.push_back({middle, h});
  }
  for (const std::string& text : heads_) {
    HeadPlace at{-1, -1};
    const char* end = text.data() + text.size();
    const auto layer = std::from_chars(text.data(), end, at.layer);
    const bool dot = layer.ec == std::errc() && layer.ptr != end && *layer.ptr == '.';
    const bool read = dot && std::from_chars(layer.ptr + 1, end, at.head).ptr == end && layer.ptr + 1 != end;
    if (!read) fail(Exit::usage, "--heads ", text, ": give a layer and a head, from 0, as in 3.1");
    const int64_t L = std::ssize(m.layers);
    if (at.layer < 0 || at.layer >= L)
      fail(Exit::usage, "--heads ", text, ": the layers of ", m.model, " are 0 to ", L - 1);
    const int64_t H = std::ssize(m.layers[static_cast<size_t>(at.layer)]);
    if (at.head < 0 || at.head >= H)
      fail(Exit::usage, "--heads ", text, ": layer ", at.layer, " of ", m.model, " has ", H, " heads, from 0");
    list.push_back(at);
  }
  return list;
}

void AttentionMaps::measure(Subject& subject, const AnalysisOptions& o) {
  if (text_) {
    const std::vector<int32_t> ids = ids_of_text(subject, *text_);
    all_.push_back(maps_of(subject, {{ids, {}, std::ssize(ids)}}, causal_mask_));
  } else {
    AnalysisOptions own = o;
    own.sequences = texts_;  // however many others have
    all_.push_back(maps_of(subject, windows_of(subject, own, {texts_, usual_tokens}), causal_mask_));
  }
  heads_of(all_.back());  // known before the next model is looked at
}

Finding AttentionMaps::finding(const AnalysisOptions&) const {
  Finding found{texts_ == 1 ? "Attention of a text" : "Mean attention of several texts"};
  std::vector<TokenMapBand> bands;
  found.csv = "model,layer,head,query,key,share\n";
  int64_t longest = 0, bin = 1;
  for (size_t i = 0; i < all_.size(); ++i) {
    const MapsOfModel& m = all_[i];
    found.add(maps_table(m), maps_json(m));
    add_maps_csv(found.csv, m);
    bands.push_back(band_of(m, names()[i], heads_of(m)));
    longest = std::max(longest, m.bins.n), bin = std::max(bin, drawn_bins(m).bin);
  }
  found.json["given_text"] = text_ ? nlohmann::json(utf8_or_escaped(*text_)) : nlohmann::json();
  found.json["causal_mask"] = causal_mask_;
  found.svg = token_map_svg(found.title + (causal_mask_ ? "" : ", without the causal mask"), bands);
  const std::string others = causal_mask_ ? "itself and the tokens before it" : "all tokens";
  const std::string what = text_ ? "a given text"
                           : texts_ == 1
                               ? str("the first ", longest, " tokens of one window of the data")
                               : str(texts_, " windows of the data, the mean of the first ", longest, " tokens");
  found.measured = str(
      "How each token, a row, shares its attention among ", others, ", the columns, of ", what,
      "; means over a layer's heads, and single heads. The shares of a row sum to 1; the shade grows with their square "
      "root, so that small ones are seen. ",
      bin == 1 ? ""
               : str("A cell stands for up to ", bin, " x ", bin,
                     " tokens: the sum over its columns, the mean over its rows. "),
      causal_mask_ ? ""
                   : "The models compute causal attention; these shares are of the same queries and keys without "
                     "the mask. ",
      "Where an architecture routes keys and values between layers, these are the shares of what the layer really "
      "reads. Maps of single texts illustrate and prove nothing: attention weights need not explain a prediction (Jain "
      "and Wallace, arXiv 1902.10186).");
  found.paper =
      "Inheritune (arXiv 2404.08634), figures 9 and 12, drawn without the causal mask: in a GPT-2 Medium, early layers "
      "have structured patterns and late ones are almost uniform, but for the inherited model's. A lazy layer of an XL "
      "looks only at the first token.";
  found.shown = numbers("Mean attention on the text's first token", "%.1f %%",
                        [](const MapsOfModel& m) { return 100 * m.on_first; });
  return found;
}

}  // namespace

std::unique_ptr<Analysis> maps_analysis() { return std::make_unique<AttentionMaps>(); }

}  // namespace crossply
