// analyze --what maps: the attention of one text, token by token.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "cli/format.h"
#include "engine/json.h"
#include "engine/printable.h"
#include "eval/inside/analysis.h"
#include "eval/inside/probe.h"
#include "eval/inside/representation.h"
#include "eval/inside/token_map.h"

namespace crossply {
namespace {

constexpr int64_t shown_tokens = 32;             // of a text in the picture, and of a window at all
constexpr double most_shares = 4 * 1024 * 1024;  // that are written: about 200 MB

struct HeadPlace {
  int64_t layer, head;
};

// One model's attention of one text of n tokens.
struct MapsOfModel {
  std::string model, arch, backbone, title;
  bool given;  // the text of --text, and not of the data
  std::vector<int32_t> ids;
  std::vector<std::string> tokens;                            // their text, as it is
  std::vector<std::vector<std::vector<double>>> layers = {};  // by layer and head: P (n, n)
  int64_t n() const { return std::ssize(ids); }
};

// Row t of the mean over a layer's heads.
std::vector<double> mean_row(const MapsOfModel& m, size_t layer, int64_t t) {
  std::vector<double> row(static_cast<size_t>(t + 1));
  for (const std::vector<double>& P : m.layers[layer])
    for (int64_t j = 0; j <= t; ++j)
      row[static_cast<size_t>(j)] +=
          P[static_cast<size_t>(t * m.n() + j)] / static_cast<double>(m.layers[layer].size());
  return row;
}

std::vector<double> head_row(const MapsOfModel& m, const HeadPlace& at, int64_t t) {
  const auto row = m.layers[static_cast<size_t>(at.layer)][static_cast<size_t>(at.head)].begin() + t * m.n();
  return {row, row + t + 1};
}

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

MapsOfModel maps_of(Subject& subject, const std::vector<int32_t>& ids, int64_t n, bool given) {
  const Config& config = subject.config();
  MapsOfModel m{subject.name, config.arch, config.backbone, subject.title(), given, {ids.begin(), ids.begin() + n}, {}};
  for (const int32_t id : m.ids) m.tokens.push_back(subject.data.tokenizer.name_of(id));
  Probe probe(subject.model, 1, std::ssize(ids));
  if (probe.attentions().empty()) fail(Exit::usage, m.model, ": no layer of ", m.arch, " has attention over tokens");
  double shares = 0;
  for (const Probe::Attention& op : probe.attentions()) shares += static_cast<double>(op.heads * n * n);
  if (shares > most_shares)
    fail(Exit::usage, "--what maps: ", n, " tokens make ", format_count(static_cast<int64_t>(shares)),
         " shares of attention, more than anyone reads; give a shorter --text, or --dump 'attention.*' for programs");
  say_cost("maps", subject, {{ids, {}, n}}, probe.forward_flops(), probe.bytes() + 8 * shares);
  m.layers.resize(static_cast<size_t>(subject.layers()));
  probe.watch_attention([&](size_t i, const AttentionInputs& inputs) {
    for (int64_t h = 0; h < probe.attentions()[i].heads; ++h) {
      auto& heads = m.layers.at(static_cast<size_t>(probe.attentions()[i].layer));
      inputs.probabilities(0, h, n, heads.emplace_back(static_cast<size_t>(n * n)).data());
    }
  });
  probe.run(ids.data());
  return m;
}

// -----------------------------------------------------------------------------------------------------------------
// Telling.

std::string maps_table(const MapsOfModel& m) {
  const int64_t last = m.n() - 1;
  std::vector<std::vector<std::string>> rows = {{"layer", "looks most at", "share", "then at", "share", "heads"}};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    if (m.layers[l].empty()) {
      rows.push_back({std::to_string(l), "-", "-", "-", "-", "0"});
      continue;
    }
    const std::vector<double> row = mean_row(m, l, last);
    std::vector<std::string> cells = {std::to_string(l)};
    std::vector<size_t> order(row.size());
    for (size_t j = 0; j < order.size(); ++j) order[j] = j;
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return row[a] > row[b]; });
    for (size_t i = 0; i < 2; ++i) {
      const bool there = i < order.size();
      cells.push_back(there ? str(order[i], " ", token_label(m.tokens[order[i]])) : "-");
      cells.push_back(there ? format_number("%.3f", row[order[i]]) : "-");
    }
    cells.push_back(std::to_string(m.layers[l].size()));
    rows.push_back(cells);
  }
  return str(m.title, "\nthe last of ", m.n(), " tokens, ", last, " ", token_label(m.tokens.back()),
             ", in the mean over a layer's heads\n\n", format_table(rows));
}

nlohmann::json maps_json(const MapsOfModel& m) {
  nlohmann::json tokens = nlohmann::json::array(), layers = nlohmann::json::array();
  for (size_t t = 0; t < m.ids.size(); ++t)
    tokens.push_back({{"id", m.ids[t]}, {"text", utf8_or_escaped(m.tokens[t])}});
  for (size_t l = 0; l < m.layers.size(); ++l) {
    nlohmann::json mean = nlohmann::json::array(), heads = nlohmann::json::array();
    for (int64_t t = 0; t < m.n() && !m.layers[l].empty(); ++t) mean.push_back(mean_row(m, l, t));
    for (int64_t h = 0; h < std::ssize(m.layers[l]); ++h) {
      heads.push_back(nlohmann::json::array());
      for (int64_t t = 0; t < m.n(); ++t) heads.back().push_back(head_row(m, {static_cast<int64_t>(l), h}, t));
    }
    layers.push_back({{"mean", mean}, {"heads", heads}});
  }
  return {{"model", utf8_or_escaped(m.model)},
          {"arch", m.arch},
          {"backbone", m.backbone},
          {"tokens", tokens},
          {"layers", layers}};
}

void add_maps_csv(std::string& out, const MapsOfModel& m) {
  const std::string name = csv_field(printable(m.model));
  const auto add = [&](size_t layer, const std::string& head, int64_t t, const std::vector<double>& row) {
    for (size_t j = 0; j < row.size(); ++j)
      out += str(name, ",", layer, ",", head, ",", t, ",", j, ",", csv_cell(row[j]), "\n");
  };
  for (size_t l = 0; l < m.layers.size(); ++l) {
    for (int64_t t = 0; t < m.n() && !m.layers[l].empty(); ++t) add(l, "mean", t, mean_row(m, l, t));
    for (int64_t h = 0; h < std::ssize(m.layers[l]); ++h)
      for (int64_t t = 0; t < m.n(); ++t) add(l, std::to_string(h), t, head_row(m, {static_cast<int64_t>(l), h}, t));
  }
}

TokenMapBand band_of(const MapsOfModel& m, const std::string& name, const std::vector<HeadPlace>& single) {
  TokenMapBand band{name, {}, {}};
  const int64_t n = std::min(m.n(), shown_tokens);
  for (int64_t t = 0; t < n; ++t) band.tokens.push_back(token_label(m.tokens[static_cast<size_t>(t)]));
  const auto add = [&](const std::string& caption, const auto& row) {
    band.maps.push_back({caption, {}});
    for (int64_t t = 0; t < n; ++t) band.maps.back().rows.push_back(row(t));
  };
  for (size_t l = 0; l < m.layers.size(); ++l)
    if (!m.layers[l].empty())
      add(str("layer ", l, ", mean of ", m.layers[l].size(), " heads"), [&](int64_t t) { return mean_row(m, l, t); });
  for (const HeadPlace& at : single)
    add(str("layer ", at.layer, ", head ", at.head), [&](int64_t t) { return head_row(m, at, t); });
  return band;
}

// -----------------------------------------------------------------------------------------------------------------

constexpr int64_t max_usual_heads = 8;

class AttentionMaps : public Analysis {
 public:
  std::string name() const override { return "maps"; }
  std::string about() const override { return "attention of a text, token by token, by layer and head"; }
  void add_flags(CLI::App& app) override {
    own(app, {app.add_option("--text", text_, "maps: of this text (default: the first window's first 32 tokens)")
                  ->type_name("TEXT"),
              app.add_option("--heads", heads_,
                             "maps: draw these heads too, as LAYER.HEAD, from 0: 3.0 3.7 "
                             "(default: the middle layer's first 8)")
                  ->type_name("L.H...")});
  }
  void measure(Subject& subject, const AnalysisOptions& o) override;
  Finding finding(const AnalysisOptions& o) const override;

 private:
  std::vector<HeadPlace> heads_of(const MapsOfModel& m) const;
  std::optional<std::string> text_;
  std::vector<std::string> heads_;
  std::vector<MapsOfModel> all_;
};

std::vector<HeadPlace> AttentionMaps::heads_of(const MapsOfModel& m) const {
  std::vector<HeadPlace> list;
  if (heads_.empty()) {  // those of the middle layer, as many as are still easy to compare
    const auto middle = std::ssize(m.layers) / 2, heads = std::ssize(m.layers[static_cast<size_t>(middle)]);
    for (int64_t h = 0; h < std::min(heads, max_usual_heads); ++h) list.push_back({middle, h});
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
    all_.push_back(maps_of(subject, ids, std::ssize(ids), true));
  } else {
    AnalysisOptions one = o;
    one.sequences = 1;  // is looked at, however many others have
    const TokenWindow& window = windows_of(subject, one, {1, shown_tokens})[0];
    all_.push_back(maps_of(subject, window.tokens, std::min(window.length, shown_tokens), false));
  }
  heads_of(all_.back());  // known before the next model is looked at
}

Finding AttentionMaps::finding(const AnalysisOptions&) const {
  Finding found;
  found.title = "Attention of a text";
  std::vector<TokenMapBand> bands;
  const std::vector<std::string> names = short_names_of(all_);
  found.csv = "model,layer,head,query,key,share\n";
  int64_t longest = 0;
  for (const MapsOfModel& m : all_) {
    found.add(maps_table(m), maps_json(m));
    add_maps_csv(found.csv, m);
    longest = std::max(longest, m.n());
  }
  for (size_t i = 0; i < all_.size(); ++i) bands.push_back(band_of(all_[i], names[i], heads_of(all_[i])));
  found.json["given_text"] = text_ ? nlohmann::json(utf8_or_escaped(*text_)) : nlohmann::json();
  found.svg = token_map_svg("Attention, token by token", bands);
  found.measured = str(
      "How each token, a row, shares its attention among itself and the tokens before it, the columns, of ",
      text_ ? "a given text" : str("the first ", longest, " tokens of one window of the data"),
      longest > shown_tokens ? str(", in the picture its first ", shown_tokens, " tokens") : "",
      "; means over a layer's heads", ", and single heads",
      ". The shares of a row sum to 1; the shade grows with their square root, so that small ones are seen. Where an "
      "architecture routes keys and values between layers, these are the shares of what the layer really reads. Maps "
      "of single texts illustrate and prove nothing: attention weights need not explain a prediction (Jain and "
      "Wallace, arXiv 1902.10186).");
  std::vector<double> first;
  for (const MapsOfModel& m : all_) {
    std::vector<double> shares;
    for (size_t l = 0; l < m.layers.size(); ++l)
      if (!m.layers[l].empty())
        for (int64_t t = 1; t < m.n(); ++t) shares.push_back(100 * mean_row(m, l, t)[0]);
    first.push_back(mean_of_rows({shares}));
  }
  found.shown = numbers_of_models("Mean attention on the text's first token, in percent", names, first, "%.1f");
  return found;
}

}  // namespace

std::unique_ptr<Analysis> maps_analysis() { return std::make_unique<AttentionMaps>(); }

}  // namespace crossply
