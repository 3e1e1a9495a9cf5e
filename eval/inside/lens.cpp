#include "eval/inside/lens.h"

#include <algorithm>
#include <cmath>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/look.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/inside/analysis.h"
#include "eval/inside/representation.h"

namespace crossply {

namespace {

// About 16 MiB of logits.
int64_t lens_rows(int64_t T, int64_t V) { return std::clamp<int64_t>((int64_t{1} << 22) / V, 1, T); }

}  // namespace

LogitLens::LogitLens(Device& device, ParameterTable& params, const Config& config, int64_t T)
    : device_(device),
      T_(T),
      C_(config.hidden_size),
      V_(config.vocab_size),
      rows_(lens_rows(T, V_)),
      scores_(params.dtype()),
      logits_(params.dtype()) {
  const auto begin = [&](Head& head, int64_t rows) {
    head.stream = head.tape.input("stream", Shape{1, rows, C_}, params.dtype());
    return record_head(Build{head.tape, params, config, 1, rows, nullptr}, head.stream);
  };
  const ops::LogitHead scored = begin(scores_, T), shown = begin(logits_, rows_);
  scores_.tokens = scores_.tape.input("tokens", Shape{1, T}, Dtype::i32);
  scores_.out = ops::cross_entropy(scores_.tape, "loss", scored, scores_.tokens);
  // Which logit is the largest, a cap does not change.
  logits_.out = ops::linear(logits_.tape, "logits", shown.inp, shown.weight, Shape{1, rows_, V_});
  for (Head* head : {&scores_, &logits_}) {
    head->tape.plan(PlanMode::reuse);
    head->tape.allocate(device);
  }
}

void LogitLens::load(const Head& head, const double* stream) {
  const Tensor& to = head.stream->tensor;
  put_back({stream, stream + to.numel()}, to, device_);
}

std::vector<double> LogitLens::losses(const std::vector<double>& stream, const int32_t* tokens) {
  CHECK_THAT(std::ssize(stream) == T_ * C_, stream.size(), " numbers of a stream of ", T_, " rows of ", C_);
  load(scores_, stream.data());
  const Tensor& to = scores_.tokens->tensor;
  device_.copy_in(to.data, tokens, to.bytes());
  scores_.tape.forward(Step{});
  return copy_of(scores_.out->tensor, device_);
}

std::vector<int32_t> LogitLens::predictions(const std::vector<double>& stream) {
  std::vector<int32_t> tokens(static_cast<size_t>(T_));
  for (int64_t next = 0; next < T_; next += rows_) {
    const int64_t begin = std::min(next, T_ - rows_);  // the last rows overlap those before them
    load(logits_, &stream[static_cast<size_t>(begin * C_)]);
    logits_.tape.forward(Step{});
    const std::vector<double> logits = copy_of(logits_.out->tensor, device_);
    for (int64_t r = 0; r < rows_; ++r) {
      const auto row = logits.begin() + r * V_;
      tokens[static_cast<size_t>(begin + r)] = static_cast<int32_t>(std::max_element(row, row + V_) - row);
    }
  }
  return tokens;
}

double LensReading::perplexity() const { return std::exp(loss); }

LensStudy lens_streams(const Probe& probe, int layers) {
  LensStudy study;
  for (int i = 0; i <= layers; ++i) study.hidden.push_back({str("hidden.", i), i});
  for (int i = 0; i < layers; ++i)
    if (const std::string value = str("mixed.", i); probe.has(value) && !probe.same_value(value, str("hidden.", i)))
      study.mixed.push_back({value, i});
  return study;
}

LensStudy study_streams(Probe& probe, LogitLens& lens, int layers, const std::string& model,
                        const std::vector<TokenWindow>& windows,
                        const std::function<void(int64_t done, int64_t all)>& told) {
  LensStudy study = lens_streams(probe, layers);
  study.scored = scored_positions(model, windows);
  const double share = 1 / static_cast<double>(study.scored);
  for (const auto* streams : {&study.hidden, &study.mixed})
    for (const LensReading& reading : *streams) probe.keep(reading.value);
  for (size_t i = 0; i < windows.size(); ++i) {
    const std::vector<int32_t>& targets = windows[i].targets;
    probe.run(windows[i].tokens.data());
    std::vector<int32_t> final = lens.predictions(probe.at(study.hidden.back().value));
    for (size_t t = 0; t < final.size(); ++t)
      if (targets[t] < 0) final[t] = -1;
    for (auto* streams : {&study.hidden, &study.mixed})
      for (LensReading& reading : *streams) {
        const std::vector<double>& stream = probe.at(reading.value);
        const std::vector<double> truth = lens.losses(stream, targets.data()), own = lens.losses(stream, final.data());
        for (size_t t = 0; t < targets.size(); ++t) {
          if (targets[t] < 0) continue;
          reading.loss += truth[t] * share;
          reading.p_truth += std::exp(-truth[t]) * share;
          reading.p_final += std::exp(-own[t]) * share;
        }
        if (!std::isfinite(reading.loss) || !std::isfinite(reading.p_final))
          fail_not_finite(model, "what the head makes of " + reading.value);
      }
    told(static_cast<int64_t>(i) + 1, std::ssize(windows));
  }
  return study;
}

// -----------------------------------------------------------------------------------------------------------------
// analyze --what lens

namespace {

constexpr int64_t lens_windows = 100;                            // the paper's, at least
constexpr int64_t shortest_lens_window = 64, lens_window = 256;  // tokens
constexpr double lens_budget = 3e12;                             // FLOP

struct LensOfModel : WindowedModel {
  using WindowedModel::WindowedModel;
  LensStudy study = {};
};

// Of a token: the model's forward, and the head twice for every stream.
double lens_cost(double forward, const LensStudy& streams, const Config& c) {
  return forward + static_cast<double>(streams.hidden.size() + streams.mixed.size()) * 4 *
                       static_cast<double>(c.hidden_size) * static_cast<double>(c.vocab_size);
}

// So long that the windows stay within the budget.
int64_t usual_lens_length(Subject& subject) {
  const Probe probe(subject.model, 1, 1);
  const double token = lens_cost(probe.forward_flops(), lens_streams(probe, subject.layers()), subject.config());
  const auto longest = static_cast<int64_t>(lens_budget / (token * lens_windows));
  return std::clamp<int64_t>(longest / 64 * 64, shortest_lens_window, lens_window);
}

LensOfModel lens_of(Subject& subject, const std::vector<TokenWindow>& windows) {
  const Config& c = subject.config();
  const auto T = static_cast<int64_t>(windows[0].tokens.size());
  LensOfModel m(subject, windows);
  Probe probe(subject.model, 1, T);
  LogitLens lens(*subject.model.device, subject.model.params, c, T);
  const LensStudy streams = lens_streams(probe, subject.layers());
  const double readings = 2 * static_cast<double>(streams.hidden.size() + streams.mixed.size()) + 1;
  say_cost("lens", subject, windows,
           static_cast<double>(windows.size()) * (probe.forward_flops() + readings * lens.flops()),
           probe.bytes() + lens.bytes());
  Ticker ticker(printable(subject.name), "window");
  m.study = study_streams(probe, lens, subject.layers(), subject.name, windows,
                          [&](int64_t done, int64_t all) { ticker.tell(done, all); });
  return m;
}

std::string lens_table(const LensOfModel& m, uint64_t seed) {
  std::vector<std::vector<std::string>> table = {{"what the head reads", "perplexity", "p(final)", "p(truth)"}};
  for (const auto* readings : {&m.study.hidden, &m.study.mixed})
    for (const LensReading& r : *readings)
      table.push_back({r.value, format_number("%.6g", r.perplexity()), format_number("%.5f", r.p_final),
                       format_number("%.5f", r.p_truth)});
  return str(m.title, "\n", m.lengths.text(), ", seed ", seed, ", ", format_count(m.study.scored),
             " positions scored\n\n", format_table(table), "\nhidden.i: what block i-1 has put out",
             m.study.mixed.empty() ? "" : "; mixed.i: what block i reads", "\n");
}

nlohmann::json lens_json(const std::vector<LensReading>& readings) {
  nlohmann::json list = nlohmann::json::array();
  for (const LensReading& r : readings)
    list.push_back({{"value", r.value},
                    {"layer", r.layer},
                    {"loss", r.loss},
                    {"perplexity", r.perplexity()},
                    {"p_final", r.p_final},
                    {"p_truth", r.p_truth}});
  return list;
}

nlohmann::json lens_json(const LensOfModel& m) {
  return m.json({{"windows", m.lengths.windows},
                 {"scored", m.study.scored},
                 {"hidden", lens_json(m.study.hidden)},
                 {"mixed", lens_json(m.study.mixed)}});
}

// The same number of every reading over the layers.
template <class Number>
void add_lens_curve(Panel& panel, const std::string& name, int look, const std::vector<LensReading>& readings,
                    Number number) {
  if (readings.empty()) return;
  Curve& curve = panel.curves.emplace_back(Curve{name, {}, {}});
  curve.look = look;
  for (const LensReading& r : readings) curve.x.push_back(r.layer), curve.y.push_back(number(r));
}

// A tied head takes the embeddings for the token that is there, not for the next one: a perplexity of millions, which
// would press all others flat.
double shown_perplexity(const LensReading& r) { return r.layer == 0 ? NAN : r.perplexity(); }

class LensAnalysis : public AnalysisOf<LensOfModel> {
 public:
  LensAnalysis() : AnalysisOf("lens", "the logit lens: what each layer's output says about the next token") {}
  void measure(Subject& subject, const AnalysisOptions& o) override {
    if (length_ == 0) length_ = usual_lens_length(subject);  // the same for all models beside each other
    all_.push_back(lens_of(subject, windows_of(subject, o, {lens_windows, length_})));
  }
  Finding finding(const AnalysisOptions& o) const override;

 private:
  std::string picture(const AnalysisOptions& o) const;
  int64_t length_ = 0;
};

std::string LensAnalysis::picture(const AnalysisOptions& o) const {
  std::vector<Panel> panels = {{"perplexity, of the true next token, from the first block on", "", {}},
                               {"mean probability, of the last layer's own prediction", "", {}},
                               {"mean probability, of the true next token", "", {}}};
  panels[0].log_y = panels[0].whole = panels[1].shares = panels[2].shares = true;
  for (size_t i = 0; i < all_.size(); ++i)
    for (const bool mixed : {false, true}) {
      const std::vector<LensReading>& readings = mixed ? all_[i].study.mixed : all_[i].study.hidden;
      const std::string name = names()[i] + (mixed ? ", next reads" : "");
      const int look = model_look(o, all_[i].model), own = mixed ? same_colour(look, 2) : look;
      add_lens_curve(panels[0], name, own, readings, shown_perplexity);
      add_lens_curve(panels[1], name, own, readings, [](const LensReading& r) { return r.p_final; });
      add_lens_curve(panels[2], name, own, readings, [](const LensReading& r) { return r.p_truth; });
    }
  return curve_svg("Logit lens", "blocks passed (0: the embeddings, of a GPT-2 with their positions)", panels);
}

Finding LensAnalysis::finding(const AnalysisOptions& o) const {
  Finding found{"Logit lens"};
  found.csv = "model,value,layer,loss,perplexity,p_final,p_truth\n";
  for (const LensOfModel& m : all_) {
    found.add(lens_table(m, o.seed), lens_json(m));
    for (const auto* readings : {&m.study.hidden, &m.study.mixed})
      for (const LensReading& r : *readings)
        found.csv += csv_row(m.model, r.value, r.layer, r.loss, r.perplexity(), r.p_final, r.p_truth);
  }
  found.json.update({{"sequences", all_[0].lengths.windows}, {"same_windows", same_windows()}});
  found.svg = picture(o);
  const auto perplexity = [&](const char* what, bool half) {
    return numbers(what, "%.3g", [half](const LensOfModel& m) {
      return m.study.hidden.at(half ? m.study.hidden.size() / 2 : m.study.hidden.size() - 1).perplexity();
    });
  };
  found.shown = perplexity("Perplexity halfway through the blocks", true) + " " + perplexity("At the end", false);
  const bool any_mixed = std::ranges::any_of(all_, [](const LensOfModel& m) { return !m.study.mixed.empty(); });
  found.measured = str(
      "The model's own final norm and head, without any tuning, read the stream after each block as if it were the "
      "last: the perplexity of the true next token, the probability of the token that the last layer itself finds most "
      "likely, and that of the true one. Means over ",
      format_count(all_[0].study.scored), " positions in ", all_[0].lengths.text(), if_of_first(),
      "; 0 is the embeddings, of a GPT-2 with their positions, and the last point is what the model says itself.",
      any_mixed ? " Lines named \"next reads\": the stream that the connection makes of it for the next block." : "");
  found.paper =
      "SATFormer (arXiv 2605.03953): its early layers are behind a Transformer's in perplexity, and it crosses over at "
      "the depth where its gates open. Vertical attention (openreview.net, A6uabXKiXc): in a plain Transformer the "
      "probability of the final "
      "prediction rises gradually over depth, with vertical attention it stays near zero until the last layer.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> lens_analysis() { return std::make_unique<LensAnalysis>(); }

}  // namespace crossply
