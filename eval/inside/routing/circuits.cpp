// analyze --what circuits: what the routers of lime_dynamic look for: the tokens whose embeddings they answer to most.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "cli/format.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/analysis.h"
#include "eval/inside/heat_map.h"
#include "eval/inside/representation.h"
#include "eval/inside/routing/routing.h"

namespace crossply {
namespace {

constexpr size_t nearest_tokens = 30;  // the paper's
constexpr size_t told_circuits = 12;

// What of a token's embedding is multiplied with a router's row, told first the one that tables and pictures are of.
// unit: the embedding as the router reads it, scaled to RMS 1. raw: as it is. published: divided by the final norm's
// gain, then scaled to RMS 1, as in the code of the paper.
constexpr const char* circuit_metrics[] = {"unit", "raw", "published"};
constexpr size_t metrics_of_circuits = std::size(circuit_metrics);

// Tokens, the nearest first, with what makes them near.
struct NearestTokens {
  std::vector<int32_t> ids;
  std::vector<double> scores;
};

// The row of a router that weighs stream m for head h of layer l.
struct Circuit {
  size_t layer, head, source;
  double norm;                                 // of the row times the gain
  NearestTokens nearest[metrics_of_circuits];  // as circuit_metrics
  double consistency;                          // mean cosine of all pairs of the first list's embeddings, centred
};

// One of circuit_metrics: (embedding * factor - shift) * scale.
struct CircuitMetric {
  std::vector<double> factor;        // of each channel
  std::vector<double> shift, scale;  // of each token
};

struct TokenEmbeddings {
  std::vector<double> rows;  // (V, C)
  size_t V, C;
  std::vector<double> mean = {};  // over tokens
  std::vector<CircuitMetric> metrics = {};

  double product(size_t v, const std::vector<double>& u, const CircuitMetric& m) const {
    double sum = 0;
    for (size_t c = 0; c < C; ++c) sum += (rows[v * C + c] * m.factor[c] - m.shift[v]) * u[c];
    return sum * m.scale[v];
  }
};

// The embeddings times factor as a backbone's norm without gain has them, but for its epsilon; centred: a LayerNorm.
CircuitMetric normalised_embeddings(const TokenEmbeddings& e, const std::vector<double>& factor, bool centred) {
  CircuitMetric m{factor, std::vector<double>(e.V), std::vector<double>(e.V)};
  const auto C = static_cast<double>(e.C);
  for (size_t v = 0; v < e.V; ++v) {
    double squares = 0;
    for (size_t c = 0; c < e.C && centred; ++c) m.shift[v] += e.rows[v * e.C + c] * factor[c] / C;
    for (size_t c = 0; c < e.C; ++c) squares += std::pow(e.rows[v * e.C + c] * factor[c] - m.shift[v], 2) / C;
    m.scale[v] = squares > 0 ? 1 / std::sqrt(squares) : 0;
  }
  return m;
}

TokenEmbeddings token_embeddings_of(const RoutingInput& in) {
  TokenEmbeddings e{in.parameter("model.embed_tokens.weight"), static_cast<size_t>(in.config.vocab_size),
                    static_cast<size_t>(in.config.hidden_size)};
  e.mean.resize(e.C);
  for (size_t i = 0; i < e.rows.size(); ++i) e.mean[i % e.C] += e.rows[i] / static_cast<double>(e.V);
  const std::vector<double> ones(e.C, 1.0);
  std::vector<double> inverse = in.parameter("model.norm.weight");
  for (double& gain : inverse) gain = gain != 0 ? 1 / gain : 0;
  e.metrics = {normalised_embeddings(e, ones, in.config.gpt2()),
               {ones, std::vector<double>(e.V, 0.0), std::vector<double>(e.V, 1.0)},
               normalised_embeddings(e, inverse, in.config.gpt2())};
  return e;
}

// Those of the largest scores; of equal ones the smaller id first.
NearestTokens nearest_by(const std::vector<double>& scores) {
  std::vector<int32_t> ids(scores.size());
  std::iota(ids.begin(), ids.end(), 0);
  const size_t n = std::min(nearest_tokens, ids.size());
  const auto score = [&](int32_t id) { return scores[static_cast<size_t>(id)]; };
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n), ids.end(),
                    [&](int32_t a, int32_t b) { return score(a) > score(b) || (score(a) == score(b) && a < b); });
  ids.resize(n);
  NearestTokens nearest{ids, {}};
  for (const int32_t id : ids) nearest.scores.push_back(score(id));
  return nearest;
}

// Of the embeddings less the mean of all tokens, which all share. With u the sum of n unit vectors, the mean cosine of
// two different ones is (|u|^2 - n) / (n (n - 1)).
double consistency_of(const NearestTokens& nearest, const TokenEmbeddings& e) {
  std::vector<double> sum(e.C), row(e.C);
  double n = 0;
  for (const int32_t id : nearest.ids) {
    for (size_t c = 0; c < e.C; ++c) row[c] = e.rows[static_cast<size_t>(id) * e.C + c] - e.mean[c];
    const double norm = std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
    if (!(norm > 0)) continue;
    for (size_t c = 0; c < e.C; ++c) sum[c] += row[c] / norm;
    ++n;
  }
  return n < 2 ? 0 : (std::inner_product(sum.begin(), sum.end(), sum.begin(), 0.0) - n) / (n * (n - 1));
}

// u: the router's row times the layer's gain. (A norm's bias adds the same to all tokens.)
Circuit circuit_of(size_t layer, size_t head, size_t source, const std::vector<double>& u, const TokenEmbeddings& e) {
  Circuit circuit{layer, head, source, std::sqrt(std::inner_product(u.begin(), u.end(), u.begin(), 0.0)), {}, 0};
  std::vector<double> scores(e.V);
  for (size_t i = 0; i < metrics_of_circuits; ++i) {
#pragma omp parallel for
    for (size_t v = 0; v < e.V; ++v) scores[v] = e.product(v, u, e.metrics[i]);
    circuit.nearest[i] = nearest_by(scores);
  }
  circuit.consistency = consistency_of(circuit.nearest[0], e);
  return circuit;
}

std::vector<Circuit> circuits_of(const RoutingInput& in) {
  const TokenEmbeddings e = token_embeddings_of(in);
  const auto L = static_cast<size_t>(in.layers()), K = static_cast<size_t>(in.config.num_key_value_heads);
  std::vector<Circuit> all;
  for (size_t l = 1; l < L; ++l) {
    const std::string layer = str("model.layers.", l, ".");
    const std::vector<double> gain = in.parameter(layer + "lime_layernorm.weight");
    const std::vector<double> router = in.parameter(layer + "self_attn.lime_router.proj.weight");  // (K*(l+1), C)
    for (size_t row = 0; row < K * (l + 1); ++row) {
      std::vector<double> u = gain;
      for (size_t c = 0; c < e.C; ++c) u[c] *= router[row * e.C + c];
      all.push_back(circuit_of(l, row / (l + 1), row % (l + 1), u, e));
      in.tell(std::ssize(all));
    }
  }
  return all;
}

// -----------------------------------------------------------------------------------------------------------------
// Telling.

struct CircuitsOfModel {
  std::string model, title;
  Tokenizer tokenizer;
  size_t layers, heads;
  std::vector<Circuit> circuits;

  // One line, whatever the token is.
  std::string token_text(int32_t id) const {
    if (!tokenizer.knows_texts()) return str(id);
    std::string text;
    for (const char c : printable(tokenizer.name_of(id))) text += c == '\n' ? "\\n" : c == '\t' ? "\\t" : str(c);
    return text;
  }
};

// As many tokens as a line has room for.
std::string circuit_tokens(const CircuitsOfModel& m, const NearestTokens& nearest, size_t width) {
  std::string out;
  for (const int32_t id : nearest.ids) {
    const std::string text = m.tokenizer.knows_texts() ? str("'", m.token_text(id), "'") : m.token_text(id);
    if (out.size() + text.size() + 1 > width) break;
    out += (out.empty() ? "" : " ") + text;
  }
  return out;
}

std::string table_of_circuits(const CircuitsOfModel& m) {
  std::vector<const Circuit*> order;
  for (const Circuit& circuit : m.circuits) order.push_back(&circuit);
  std::stable_sort(order.begin(), order.end(),
                   [](const Circuit* a, const Circuit* b) { return a->consistency > b->consistency; });
  order.resize(std::min(order.size(), told_circuits));
  std::string out = str(m.title, "\n", m.circuits.size(), " rows of routers",
                        m.tokenizer.knows_texts() ? "" : "; the model has no tokenizer that is read here, so ids",
                        "\n\nlayer head stream  alike  nearest tokens\n");
  for (const Circuit* c : order) {
    const std::string consistency = format_number("%.2f", c->consistency);
    const auto cell = [](const std::string& text, size_t width) {
      return std::string(width - std::min(width, text.size()), ' ') + text;
    };
    out += cell(str(c->layer), 5) + cell(str(c->head), 5) + cell(str(c->source), 7) + cell(consistency, 7) + "  " +
           circuit_tokens(m, c->nearest[0], 54) + "\n";
  }
  return out +
         "the rows whose nearest tokens are most alike: mean cosine, embeddings centred;\n"
         "tokens that training never saw are not known here, and may be alike, too\n";
}

nlohmann::json nearest_tokens_json(const CircuitsOfModel& m, const NearestTokens& nearest) {
  nlohmann::json texts = nlohmann::json::array();
  for (const int32_t id : nearest.ids)
    if (m.tokenizer.knows_texts()) texts.push_back(utf8_or_escaped(m.tokenizer.name_of(id)));
  return {{"ids", nearest.ids}, {"scores", nearest.scores}, {"tokens", texts}};
}

nlohmann::json circuits_json(const CircuitsOfModel& m) {
  nlohmann::json list = nlohmann::json::array();
  for (const Circuit& c : m.circuits) {
    list.push_back(
        {{"layer", c.layer}, {"head", c.head}, {"stream", c.source}, {"norm", c.norm}, {"consistency", c.consistency}});
    for (size_t i = 0; i < metrics_of_circuits; ++i)
      list.back()[circuit_metrics[i]] = nearest_tokens_json(m, c.nearest[i]);
  }
  return {{"model", utf8_or_escaped(m.model)}, {"tokenizer", m.tokenizer.knows_texts()}, {"circuits", list}};
}

std::string csv_of_circuits(const std::vector<CircuitsOfModel>& all) {
  std::string out = "model,layer,head,stream,norm,consistency,metric,rank,id,token,score\n";
  for (const CircuitsOfModel& m : all)
    for (const Circuit& c : m.circuits)
      for (size_t metric = 0; metric < metrics_of_circuits; ++metric) {
        const NearestTokens& nearest = c.nearest[metric];
        for (size_t i = 0; i < nearest.ids.size(); ++i)
          out += csv_row(m.model, c.layer, c.head, c.source, c.norm, c.consistency, circuit_metrics[metric], i,
                         nearest.ids[i], m.token_text(nearest.ids[i]), nearest.scores[i]);
      }
  return out;
}

// For every head, layers by streams.
HeatMapBand circuits_band(const CircuitsOfModel& m, const std::string& caption, HeatScale scale,
                          double Circuit::*number) {
  HeatMapBand band{str(printable(m.model), ": ", caption), {}, scale};
  for (size_t h = 0; h < m.heads; ++h) band.maps.push_back({str("head ", h), routing_rows(m.layers, m.layers)});
  for (const Circuit& c : m.circuits) band.maps[c.head].rows[c.layer][c.source] = c.*number;
  return band;
}

class Circuits : public AnalysisOf<CircuitsOfModel> {
 public:
  Circuits() : AnalysisOf("circuits", "the tokens that lime_dynamic's routers look for") {}
  std::string refuses(const Subject& subject) const override {
    const std::string& arch = subject.config().arch;
    if (arch == "lime_dynamic") return "";
    return str("circuits are rows of lime_dynamic's routers, which ", with_article(arch), " has not; try --what ",
               !find_routings(subject.config()).parts.empty() ? "routing" : "attention");
  }
  void measure(Subject& subject, const AnalysisOptions&) override {
    const Config& config = subject.config();
    const int64_t L = subject.layers(), rows = config.num_key_value_heads * (L * (L + 1) / 2 - 1);
    std::fprintf(stderr, "circuits of %s: %s rows of routers with %s embeddings, about %.3g GFLOP\n",
                 printable(subject.name).c_str(), format_count(rows).c_str(), format_count(config.vocab_size).c_str(),
                 2e-9 * metrics_of_circuits * static_cast<double>(rows * config.vocab_size * config.hidden_size));
    CircuitsOfModel m{subject.name,
                      subject.title(),
                      model_tokenizer(subject.model, ""),
                      static_cast<size_t>(L),
                      static_cast<size_t>(config.num_key_value_heads),
                      {}};
    Probe probe(subject.model, 1, 1);
    Ticker ticker(printable(subject.name), "row");
    const std::vector<TokenWindow> none;
    m.circuits = circuits_of(
        {probe, subject.model.params, config, subject.name, none, [&](int64_t done) { ticker.tell(done, rows); }});
    all_.push_back(std::move(m));
  }
  Finding finding(const AnalysisOptions& o) const override;
};

Finding Circuits::finding(const AnalysisOptions&) const {
  Finding found{"Semantic circuits of the dynamic router"};
  std::vector<HeatMapBand> bands;
  for (const CircuitsOfModel& m : all_) {
    found.add(table_of_circuits(m), circuits_json(m));
    bands.push_back(circuits_band(m, "norm of a router's row times the gain", HeatScale::shares, &Circuit::norm));
    bands.push_back(circuits_band(m, "how alike its 30 nearest tokens are: mean cosine of their centred embeddings",
                                  HeatScale::signs, &Circuit::consistency));
  }
  found.json["nearest"] = nearest_tokens;
  found.csv = csv_of_circuits(all_);
  found.svg = heat_map_svg(found.title, "layer", "stream", bands);
  found.measured =
      "The row of layer l's router that weighs stream m for key/value head h, times the gain of the norm before it, is "
      "multiplied with every token's embedding as that norm scales it, to RMS 1 (on a GPT-2 centred, too), which ranks "
      "as the cosine does; the 30 tokens of the largest products are what it looks for. The files also have the "
      "products with the embeddings as they are (raw), whose norms then count, and with embeddings first divided by "
      "the final norm's gain (published). Alike: the mean cosine between the 30 embeddings less the mean of all "
      "tokens', higher for tokens that mean or look the same, but also for tokens that training never saw, which are "
      "not known here. Stream 0 is the embeddings, stream m what block m-1 has put out.";
  const char* alike = "How alike the nearest tokens are, mean cosine over all rows";
  found.shown = numbers(alike, "%.2f", [](const CircuitsOfModel& m) {
    std::vector<double> rows;
    for (const Circuit& c : m.circuits) rows.push_back(c.consistency);
    return mean_of_finite(rows);
  });
  found.paper =
      "LIMe (arXiv 2502.09245, version 1, table 2), with embeddings divided by the final norm's gain in its code: some "
      "rows look for suffixes, others for pieces of words, intensifiers, or words that connect sentences.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> circuits_analysis() { return std::make_unique<Circuits>(); }

}  // namespace crossply
