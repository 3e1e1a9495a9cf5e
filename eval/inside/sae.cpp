// analyze --what sae: a sparse autoencoder of the first layer's values, its features by the tokens that make them
// active, and, where a model has gates, how these treat tokens of each kind.
#include "eval/inside/sae.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "cli/format.h"
#include "cli/standard_streams.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/io/safetensors.h"
#include "eval/inside/probe.h"
#include "eval/inside/sae_vectors.h"
#include "eval/inside/token_labels.h"

namespace crossply {
int64_t sae_held_out_windows(int64_t windows) { return std::max<int64_t>(1, windows / 10); }

std::vector<int64_t> sae_train_windows(const std::vector<TokenWindow>& windows, bool files) {
  const auto held_out = std::span(windows).last(static_cast<size_t>(sae_held_out_windows(std::ssize(windows))));
  const int64_t apart = files ? std::ssize(windows[0].tokens) : 1;
  std::vector<int64_t> list;
  for (int64_t i = 0; i < std::ssize(windows) - std::ssize(held_out); ++i)
    if (std::ranges::none_of(held_out, [&](const TokenWindow& other) {
          return std::abs(other.place - windows[static_cast<size_t>(i)].place) < apart;
        }))
      list.push_back(i);
  return list;
}

namespace {

constexpr UsualWindows usual_sae = {256, 256};
constexpr double usual_sae_flops = 4e12;  // of the training: half a minute on two cores
constexpr double sae_lr = 5e-4;
constexpr int64_t min_sae_batch = 128, paper_sae_batch = 4096;
constexpr double paper_density_factor = 0.005 * 24576 / 32;  // the limit over the mean density of a paper's feature
constexpr double usual_buffer_bytes = 1 << 30;

struct SaeFlags {
  int64_t dictionary = 0, active = 32, tokens = 0, buffer = 0;
  double max_density = 0;
  std::string labels;
};

int64_t sae_token_count(std::span<const TokenWindow> windows) {
  int64_t count = 0;
  for (const TokenWindow& window : windows) count += window.length;
  return count;
}

// Sums over vectors.
struct SaeSpread {
  explicit SaeSpread(int64_t D) : sums(static_cast<size_t>(D), 0.0) {}
  void add(std::span<const float> values) {
    for (size_t i = 0; i < values.size(); ++i) {
      const double x = static_cast<double>(values[i]);
      sums[i % sums.size()] += x, square += x * x;
    }
    count += std::ssize(values) / std::ssize(sums);
  }
  std::vector<double> mean() const {
    std::vector<double> mean = sums;
    for (double& x : mean) x /= static_cast<double>(count);
    return mean;
  }
  double variance() const {  // sum |v - mean|^2
    double of_mean = 0;
    for (const double sum : sums) of_mean += sum * sum / static_cast<double>(count);
    return square - of_mean;
  }
  std::vector<double> sums;
  double square = 0;  // sum |v|^2
  int64_t count = 0;
};

SaeSpread sae_spread(SaeReader& reader, int64_t begin, int64_t end, const std::string& name) {
  SaeSpread spread(reader.D());
  Ticker ticker(printable(name), "window");
  for (int64_t i = begin; i < end; ++i) {
    spread.add(reader.read(i).values);
    ticker.tell(i - begin + 1, end - begin);
  }
  return spread;
}

// How large, and how long to train: by the flags, and what they leave open by the size of a vector and of the data.
struct SaePlan {
  AutoencoderSizes sizes;
  int64_t tokens;
  int64_t capacity = 0;  // vectors in memory
};
SaePlan sae_plan(const SaeFlags& flags, const Probe& probe, std::span<const TokenWindow> train) {
  const int64_t D = probe.shape(sae_value).numel() / std::ssize(train[0].tokens);
  SaePlan plan{{D, flags.dictionary > 0 ? flags.dictionary : 16 * D, flags.active, 1}, flags.tokens};
  if (plan.sizes.k > plan.sizes.m) {
    say_note(str("sae: ", plan.sizes.k, " active features of a dictionary of ", plan.sizes.m, ": all of them"));
    plan.sizes.k = plan.sizes.m;
  }
  if (plan.tokens == 0)
    plan.tokens = std::clamp(static_cast<int64_t>(usual_sae_flops / plan.sizes.step_flops()), int64_t{32'768},
                             int64_t{2'000'000});
  // The paper's batch if that leaves 8192 steps; fewer tokens make smaller batches rather than few steps.
  const auto small = std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(1, plan.tokens / 8192)));
  plan.sizes.rows =
      std::min(std::clamp(static_cast<int64_t>(small), min_sae_batch, paper_sae_batch), sae_token_count(train));
  const double vector_bytes = 4 * static_cast<double>(D);
  plan.capacity = flags.buffer > 0 ? flags.buffer : static_cast<int64_t>(usual_buffer_bytes / vector_bytes);
  return plan;
}

struct SaeToken {
  int64_t window;
  int32_t id;
  std::vector<double> gates;  // of each layer with gates
};

// Calls each(token, active features, loss) for the tokens of the windows [begin, end). Batches go over windows' ends.
template <class F>
void encode_windows(SaeReader& reader, Autoencoder& model, int64_t begin, int64_t end, const std::string& name,
                    F&& each) {
  std::vector<float> batch;
  std::vector<SaeToken> tokens;
  const auto flush = [&] {
    const Autoencoder::Codes codes = model.encode(batch.data(), std::ssize(tokens));
    for (size_t n = 0; n < tokens.size(); ++n) each(tokens[n], codes.active[n], codes.losses[n]);
    batch.clear(), tokens.clear();
  };
  Ticker ticker(printable(name), "window");
  for (int64_t i = begin; i < end; ++i) {
    const SaeWindow& window = reader.read(i);
    for (int64_t t = 0; t < reader.window(i).length; ++t) {
      const auto first = window.values.begin() + t * reader.D();
      batch.insert(batch.end(), first, first + reader.D());
      tokens.push_back({i, reader.window(i).tokens[static_cast<size_t>(t)], {}});
      for (const auto& layer : window.gates) tokens.back().gates.push_back(layer[static_cast<size_t>(t)]);
      if (std::ssize(tokens) == model.sizes.rows) flush();
    }
    ticker.tell(i - begin + 1, end - begin);
  }
  if (!tokens.empty()) flush();
}

// Windows from this one on are held out.
void count_features(SaeFinding* found, FeatureCounts* counts, Autoencoder& model, SaeReader& reader, int64_t held_out,
                    const SaeSpread& trained_on) {
  double losses[2] = {0, 0};
  int64_t active = 0;
  encode_windows(reader, model, 0, reader.size(), found->model,
                 [&](const SaeToken& token, const std::vector<Autoencoder::Active>& features, double loss) {
                   losses[token.window >= held_out] += loss;
                   counts->add(token.id, features);
                   active += std::ssize(features);
                 });
  const auto reconstruction = [](const SaeSpread& spread, double loss) {
    return Reconstruction{spread.count, loss / static_cast<double>(spread.count), 1 - loss / spread.variance()};
  };
  found->train = reconstruction(trained_on, losses[0]);
  found->held_out = reconstruction(sae_spread(reader, held_out, reader.size(), found->model), losses[1]);
  found->active = static_cast<double>(active) / static_cast<double>(counts->tokens());
  found->live = counts->live();
  found->activations = counts->activations();
}

// Of the tokens that are held out.
std::vector<LabelledGates> gates_by_category(const SaeFinding& found, Autoencoder& model, SaeReader& reader,
                                             int64_t held_out) {
  const size_t categories = feature_categories().size(), layers = reader.gate_layers().size();
  if (layers == 0) return {};
  std::vector<int> category(static_cast<size_t>(found.sizes.m), -1);  // of retained features
  for (const Feature& feature : found.selection.retained)
    for (size_t c = 0; c < categories && !feature.label.empty(); ++c)
      if (category_of(feature.label) == feature_categories()[c])
        category[static_cast<size_t>(feature.index)] = static_cast<int>(c);
  CategoryGates sums(layers, categories + 1);  // the last one: every token counts 1
  encode_windows(reader, model, held_out, reader.size(), found.model,
                 [&](const SaeToken& token, const std::vector<Autoencoder::Active>& features, double) {
                   std::vector<double> weights(categories + 1, 0.0);
                   for (const auto& [feature, value] : features)
                     if (const int c = category[static_cast<size_t>(feature)]; c >= 0)
                       ++weights[static_cast<size_t>(c)];
                   weights.back() = 1;
                   sums.add(token.gates, weights);
                 });
  std::vector<LabelledGates> list;
  for (size_t n = 0; n < layers; ++n) {
    list.push_back({reader.gate_layers()[n], {}, sums.at(n, categories)});
    for (size_t c = 0; c < categories; ++c) list.back().by_category.push_back(sums.at(n, c));
  }
  return list;
}

// -----------------------------------------------------------------------------------------------------------------
// The file of the weights.

void write_sae_weights(const std::string& path, const Autoencoder& model, double scale, const std::string& name) {
  const auto [D, m, k, rows] = model.sizes;
  const std::vector<float> W_e = model.weight("W_e"), W_d = model.weight("W_d"), b_e = model.weight("b_e"),
                           b_d = model.weight("b_d");
  const int64_t active = k;
  write_safetensors(path,
                    {{"scale", "F64", {1}, &scale},
                     {"k", "I64", {1}, &active},
                     {"W_e", "F32", {D, m}, W_e.data()},
                     {"W_d", "F32", {m, D}, W_d.data()},
                     {"b_e", "F32", {m}, b_e.data()},
                     {"b_d", "F32", {D}, b_d.data()}},
                    {{"crossply", "analyze"}, {"of", sae_value}, {"model", utf8_or_escaped(name)}});
}

// -----------------------------------------------------------------------------------------------------------------

// Scales the vectors so that those trained on have mean |v|^2 = D.
double scale_vectors(SaeReader& reader, int64_t held_out, const std::string& model) {
  const SaeSpread spread = sae_spread(reader, 0, held_out, model);
  const double square = spread.square / static_cast<double>(spread.count);
  const double scale = std::sqrt(static_cast<double>(reader.D()) / square);
  if (!std::isfinite(scale) || !std::isfinite(static_cast<float>(scale)))
    fail(Exit::not_finite, model, ": all values of the first layer are 0; there is nothing to explain");
  reader.scale_by(scale);
  return scale;
}

FeatureRules sae_rules(const SaeFlags& flags, const AutoencoderSizes& sizes) {
  FeatureRules rules;
  const double as_paper = paper_density_factor * static_cast<double>(sizes.k) / static_cast<double>(sizes.m);
  rules.max_density = flags.max_density > 0 ? flags.max_density : std::max(rules.max_density, as_paper);
  return rules;
}

// How often the model is run: once a window where all vectors are kept.
double sae_runs(const SaeReader& reader, int64_t held_out, const SaePlan& plan) {
  const auto all = static_cast<double>(reader.size()), train = static_cast<double>(held_out);
  if (reader.keeps_all()) return all;
  const auto tokens = static_cast<double>(reader.tokens(0, held_out));
  const double passes = reader.tokens(0, held_out) <= plan.capacity ? 1 : static_cast<double>(plan.tokens) / tokens;
  // Twice for mean and scale, once to encode all; what is held out also for its variance and for gates.
  return train * (2 + passes) + all + (reader.gate_layers().empty() ? 1 : 2) * (all - train);
}

void say_sae_cost(const Subject& subject, const Probe& probe, const std::vector<TokenWindow>& windows,
                  const SaeReader& reader, int64_t held_out, const SaePlan& plan) {
  const double rows = static_cast<double>(plan.sizes.rows), m = static_cast<double>(plan.sizes.m);
  const double D = static_cast<double>(plan.sizes.D), tokens = static_cast<double>(reader.tokens(0, reader.size()));
  // An encoding is a third of a training step. Memory: the vectors, weights with gradients and moments, batches.
  const double training = plan.sizes.step_flops() / rows * (static_cast<double>(plan.tokens) + tokens / 3);
  const double vectors =
      (reader.keeps_all() ? tokens : 0) + static_cast<double>(std::min(reader.tokens(0, held_out), plan.capacity));
  say_cost("sae", subject, windows, sae_runs(reader, held_out, plan) * probe.forward_flops() + training,
           probe.bytes() + 4 * (vectors * D + 8 * m * D + 3 * rows * m));
}

// Trains an autoencoder on the vectors, and looks at all of them with it.
std::unique_ptr<Autoencoder> explore_sae(SaeFinding* found, Subject& subject, SaeReader& reader, int64_t held_out,
                                         const SaePlan& plan, const TokenLabels& labels, uint64_t seed) {
  const SaeSpread spread = sae_spread(reader, 0, held_out, subject.name);
  found->start_variance = spread.variance() / static_cast<double>(spread.count);
  auto model = std::make_unique<Autoencoder>(*subject.model.device, found->sizes, spread.mean(), seed);
  {
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < held_out; ++i) lengths.push_back(reader.window(i).length);
    VectorBuffer buffer(reader.D(), found->sizes.rows, std::move(lengths), plan.capacity, seed,
                        [&](int64_t i) { return std::span<const float>(reader.read(i).values); });
    found->buffer = std::min(buffer.capacity(), reader.tokens(0, held_out));
    Ticker ticker(printable(subject.name), "step");
    found->losses = train_autoencoder(
        *model, [&](float* batch) { buffer.next(batch); }, {plan.tokens, found->lr},
        [&](int64_t done, int64_t steps) { ticker.tell(done, steps); });
  }
  found->steps = std::ssize(found->losses);
  FeatureCounts counts(found->sizes.m);
  count_features(found, &counts, *model, reader, held_out, spread);

  const Tensor& embedding = subject.model.params.at("model.embed_tokens.weight").value;
  const Tokenizer& tokenizer = subject.data.tokenizer;
  found->selection = select_features(counts, subject.model.params.read(embedding), embedding.dim(1), found->rules,
                                     tokenizer, labels.labels);
  found->labels_file = labels.file, found->labels_given = std::ssize(labels.labels);
  if (!tokenizer.knows_texts())
    say_note(str("sae: no tokenizer says what the tokens of ", subject.name, " are: ids, and no labels"));
  for (const Feature& feature : found->selection.retained) {
    if (!tokenizer.knows_texts()) break;
    found->texts.emplace_back();
    for (const FeatureToken& one : feature.top) found->texts.back().push_back(tokenizer.name_of(one.token));
  }
  found->gates = gates_by_category(*found, *model, reader, held_out);
  return model;
}

// "32 of 2,048, trained on 635,776 tokens, density at most 6.00 %", once where it is the same for all models.
std::string sae_settings(const std::vector<SaeFinding>& all, const std::vector<std::string>& names) {
  std::vector<std::string> each;
  for (const SaeFinding& m : all)
    each.push_back(str("at most ", format_count(m.sizes.k), " of ", format_count(m.sizes.m), ", trained on ",
                       format_count(m.steps * m.sizes.rows), " tokens, density limit ",
                       format_number("%.2f %%", 100 * m.rules.max_density)));
  return text_of_each(names, each);
}

std::string sae_measured(const std::vector<SaeFinding>& all, const std::vector<std::string>& names, uint64_t seed,
                         bool usual_limit) {
  return str(
      "The first layer's values of a token, all heads together, are put together again from a few of many learnt "
      "directions, the features (seed ",
      seed, "; ", sae_settings(all, names),
      "); the variance explained (FVE) is 1 - sum |v - v_hat|^2 / sum |v - mean|^2, higher is better. Features of "
      "fewer than 10 activations, or active on a larger share of the tokens than this limit, are dropped",
      usual_limit ? " (the paper's 0.5 % is --most-density 0.005)" : "",
      "; of the others the fifth stays whose 20 top tokens have the most similar embeddings (MonoScore: mean cosine of "
      "all pairs, 1 of a single token; of equals the more active). Rules for the text of these tokens give each a "
      "label: 'Semantic Root Fragments' is what fits no other rule, and 'Structural' needs features of hardly anything "
      "but punctuation, of which a smaller --active leaves more. A tenth of the windows is held out; those that share "
      "a token with one of them are not trained on. A gate by category is its mean over held-out tokens, weighted by "
      "how many features of the category are active on them; '-' where none is.");
}

class SparseAutoencoder : public AnalysisOf<SaeFinding> {
 public:
  SparseAutoencoder() : AnalysisOf("sae", "a sparse autoencoder of the first layer's values; kinds of features") {}
  std::vector<std::string> more_files(const AnalysisOptions& o) const override { return model_files("sae", o); }
  void add_flags(CLI::App& app) override {
    own(app,
        {add_integer(app, "--dictionary", flags_.dictionary, 0, max_size,
                     "sae: features (0: 16 times the values' width)"),
         add_integer(app, "--active", flags_.active, 1, max_size, "sae: features that a token may have active"),
         add_integer(app, "--sae-tokens", flags_.tokens, 0, max_count,
                     "sae: tokens to train on, each as often as it takes (0: about half a minute's on two cores)"),
         add_integer(app, "--sae-buffer", flags_.buffer, 0, max_count,
                     "sae: vectors in memory; of more tokens the model is run again (0: 1 GiB of them)"),
         add_text(app, "--sae-labels", flags_.labels, "FILE",
                  "sae: labels of tokens, such as a judge model's: a CSV whose first line names the columns id and "
                  "label; other tokens get theirs by rules"),
         add_number(app, "--most-density", flags_.max_density, 0, 1,
                    "sae: drop features active on a larger share of the tokens (0: 3.84 times --active over "
                    "--dictionary, at least 0.005, what it is at the paper's sizes)")});
  }
  void measure(Subject& subject, const AnalysisOptions& o) override;
  Finding finding(const AnalysisOptions& o) const override;

 private:
  SaeFlags flags_;
};

void SparseAutoencoder::measure(Subject& subject, const AnalysisOptions& o) {
  if (!Probe(subject.model, 1, 1).has(sae_value))
    fail(Exit::usage, subject.name, ": the first layer of ", subject.config().arch,
         " has no values of its own; try --what entropy");
  const TokenLabels labels = read_token_labels(flags_.labels, subject.config().vocab_size);
  if (!flags_.labels.empty() && !subject.data.tokenizer.knows_texts())
    fail(Exit::usage, subject.name, ": no tokenizer says what its tokens are, so --sae-labels ", flags_.labels,
         " has no effect; leave it out, or give --tokenizer");
  const std::vector<TokenWindow>& drawn = windows_of(subject, o, usual_sae);
  if (drawn.size() < 2) fail(Exit::usage, "--what sae holds a tenth of the windows out; give --sequences 2 or more");
  const std::vector<int64_t> trained_on = sae_train_windows(drawn, subject.data.choice.files);
  if (trained_on.empty())
    fail(Exit::usage, subject.name, ": every window shares tokens with one that is held out, so nothing is left to ",
         "train on; give a longer text, or a smaller --length");
  std::vector<TokenWindow> windows;
  for (const int64_t i : trained_on) windows.push_back(drawn[static_cast<size_t>(i)]);
  const int64_t held_out = std::ssize(windows);
  const auto last = std::span(drawn).last(static_cast<size_t>(sae_held_out_windows(std::ssize(drawn))));
  for (const auto& part : {std::span<const TokenWindow>(windows), std::span<const TokenWindow>(last)})
    scored_positions(subject.name, part);  // or else nothing to train on or to hold out
  windows.insert(windows.end(), last.begin(), last.end());
  const std::string path = o.out.empty() ? "" : model_file(name(), o, subject.name);

  const int64_t T = std::ssize(windows[0].tokens);
  Probe probe(subject.model, 1, T);
  const SaePlan plan = sae_plan(flags_, probe, std::span(windows).first(trained_on.size()));
  SaeReader reader(probe, subject.layers(), windows, plan.capacity);
  say_sae_cost(subject, probe, windows, reader, held_out, plan);
  SaeFinding found{AnalysedModel(subject), describe_split(subject.data.choice, false)};
  found.windows = reader.size(), found.held_out_windows = reader.size() - held_out;
  found.train_windows = trained_on;
  found.longest = T;
  found.sizes = plan.sizes, found.lr = sae_lr;
  found.scale = scale_vectors(reader, held_out, subject.name);
  found.rules = sae_rules(flags_, plan.sizes);
  const auto model = explore_sae(&found, subject, reader, held_out, plan, labels, o.seed);
  if (!path.empty()) write_sae_weights(path, *model, found.scale, subject.name);
  found.weights = path;
  all_.push_back(std::move(found));
}

Finding SparseAutoencoder::finding(const AnalysisOptions& o) const {
  Finding found{"A sparse autoencoder of the first layer's values"};
  std::vector<int> looks;
  for (const SaeFinding& one : all_) {
    found.add(sae_table(one), sae_json(one));
    looks.push_back(model_look(o, one.model));
  }
  found.json.update({{"sequences", all_[0].windows}, {"same_windows", same_windows()}});
  found.csv = sae_csv(all_);
  found.svg = sae_svg(all_, names(), looks);
  found.shown = numbers("Variance of held-out values explained", "%.1f %%",
                        [](const SaeFinding& one) { return 100 * one.held_out.fve; });
  found.measured = sae_measured(all_, names(), o.seed, flags_.max_density == 0);
  found.paper =
      "SATFormer (arXiv 2605.03953), at 760M parameters, 24,576 features and 100 million tokens: more than 99 % of the "
      "variance explained; 3,939 monosemantic features in SATFormer against 3,261 in the Transformer, chosen with a "
      "language model as the judge. Its gates treat all categories alike in the first half of the layers, later they "
      "let more through for Semantic features than for Structural and Functional ones.";
  return found;
}

}  // namespace

std::unique_ptr<Analysis> sae_analysis() { return std::make_unique<SparseAutoencoder>(); }

}  // namespace crossply
