#include "eval/inside/features.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

#include "engine/io/printable.h"

namespace crossply {

// -----------------------------------------------------------------------------------------------------------------
// Labels

namespace {

constexpr size_t semantic_labels = 5, functional_labels = 3;

// What narrows a statement down, joins two or denies one.
const std::set<std::string>& logic_words() {
  static const std::set<std::string> words = {
      "not",     "no",      "nor",   "or",      "and",     "but",       "if",   "then",  "else",    "unless",
      "because", "since",   "so",    "thus",    "hence",   "therefore", "all",  "any",   "each",    "every",
      "some",    "none",    "both",  "either",  "neither", "only",      "many", "much",  "more",    "most",
      "few",     "less",    "least", "several", "never",   "always",    "when", "while", "whether", "although",
      "though",  "however", "until", "except",  "even",    "also",      "true", "false", "than"};
  return words;
}

const std::set<std::string>& function_words() {
  static const std::set<std::string> words = {
      "a",     "an",      "the",     "this",   "that", "these",   "those", "of",   "to",    "in",    "on",
      "at",    "by",      "for",     "from",   "with", "into",    "onto",  "over", "under", "after", "before",
      "about", "between", "through", "during", "as",   "against", "upon",  "up",   "down",  "out",   "off",
      "i",     "you",     "he",      "she",    "it",   "we",      "they",  "me",   "him",   "her",   "us",
      "them",  "my",      "your",    "his",    "its",  "our",     "their", "who",  "whom",  "whose", "which",
      "what",  "where",   "there",   "here",   "is",   "are",     "was",   "were", "be",    "been",  "being",
      "am",    "do",      "does",    "did",    "has",  "have",    "had",   "will", "would", "shall", "should",
      "can",   "could",   "may",     "might",  "must"};
  return words;
}

const std::set<std::string>& english_suffixes() {
  static const std::set<std::string> endings = {
      "s",     "es",   "ed",   "d",    "ing",  "ings", "er",      "ers",   "or",    "ors",    "est",   "ly",
      "y",     "al",   "ally", "ial",  "ion",  "ions", "tion",    "tions", "ation", "ations", "sion",  "ment",
      "ments", "ness", "less", "ful",  "able", "ible", "ability", "ity",   "ities", "ive",    "ively", "ous",
      "ously", "ish",  "ism",  "ist",  "ists", "ize",  "ized",    "ise",   "ised",  "ate",    "ated",  "ates",
      "en",    "ant",  "ent",  "ance", "ence", "ship", "hood",    "dom",   "ward",  "wards",  "th",    "n",
      "t",     "ic",   "ical", "ies",  "ied",  "age",  "ian",     "ary",   "ery"};
  return endings;
}

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool has_letter(std::string_view text) { return std::any_of(text.begin(), text.end(), is_letter); }
bool has_digit(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}
bool is_white(std::string_view text) { return text.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos; }

std::string lowered(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

bool names_byte(std::string_view text) { return text.size() == 6 && text.starts_with("<0x") && text.ends_with('>'); }

enum class TokenCharacters { ascii, punctuation, others, broken };
TokenCharacters characters_of(std::string_view text) {
  TokenCharacters found = TokenCharacters::ascii;
  while (!text.empty()) {
    const auto [length, code] = first_character(text);
    if (length == 0) return TokenCharacters::broken;
    const bool punctuation = (code >= 0xA0 && code <= 0xBF) || (code >= 0x2000 && code <= 0x206F);
    if (code >= 0x80 && !punctuation) found = TokenCharacters::others;
    else if (code >= 0x80 && found == TokenCharacters::ascii) found = TokenCharacters::punctuation;
    text.remove_prefix(length);
  }
  return found;
}

}  // namespace

const std::vector<std::string>& feature_labels() {
  static const std::vector<std::string> labels = {
      "Semantic Root Fragments",  "Entity Marker Fragments", "Logic Quantifier Keywords", "Morphological Suffixes",
      "Functional Leading Space", "Multilingual Unicode",    "Byte-Level Fallbacks",      "Numerical Digit Fragments",
      "Structural Punctuation",   "Code Formatting Symbols"};
  return labels;
}

const std::vector<std::string>& feature_categories() {
  static const std::vector<std::string> categories = {"Semantic", "Functional", "Structural"};
  return categories;
}

const std::string& category_of(const std::string& label) {
  const auto& labels = feature_labels();
  const auto at = static_cast<size_t>(std::find(labels.begin(), labels.end(), label) - labels.begin());
  CHECK_THAT(at < labels.size(), "'", label, "' is no label of a feature");
  return feature_categories()[at < semantic_labels ? 0 : at < semantic_labels + functional_labels ? 1 : 2];
}

std::string label_of_token(const std::string& text, bool whole_word, bool special) {
  if (special) return "Structural Punctuation";
  const TokenCharacters characters = characters_of(text);
  if (characters == TokenCharacters::broken || names_byte(text)) return "Byte-Level Fallbacks";
  if (is_white(text)) return "Code Formatting Symbols";
  if (characters == TokenCharacters::others) return "Multilingual Unicode";
  const bool space = text[0] == ' ';
  const std::string body = lowered(text.substr(space ? 1 : 0));
  if (!has_letter(body)) {
    if (has_digit(body)) return "Numerical Digit Fragments";
    const bool code = body.find_first_of("{}[]<>=+*/\\|_^~#$@%&`") != std::string::npos;
    return code ? "Code Formatting Symbols" : "Structural Punctuation";
  }
  if (logic_words().contains(body)) return "Logic Quantifier Keywords";
  if ((space || whole_word) && function_words().contains(body)) return "Functional Leading Space";
  if (!space && !whole_word && english_suffixes().contains(text)) return "Morphological Suffixes";
  const char first = *std::find_if(text.begin(), text.end(), is_letter);
  return first >= 'A' && first <= 'Z' ? "Entity Marker Fragments" : "Semantic Root Fragments";
}

std::string majority_label(const std::vector<std::string>& labels) {
  CHECK_THAT(!labels.empty(), "a majority of no labels");
  const auto votes = [&](const std::string& label) { return std::count(labels.begin(), labels.end(), label); };
  const std::string* best = &labels[0];
  for (const std::string& label : labels)
    if (votes(label) > votes(*best)) best = &label;
  return *best;
}

// -----------------------------------------------------------------------------------------------------------------
// Features

double mono_score(const std::vector<const float*>& rows, int64_t width) {
  CHECK_THAT(!rows.empty(), "a MonoScore of no tokens");
  if (rows.size() == 1) return 1;
  const auto dot = [width](const float* a, const float* b) {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
  };
  std::vector<double> norms;
  for (const float* row : rows) norms.push_back(std::sqrt(dot(row, row)));
  double sum = 0;
  for (size_t i = 0; i < rows.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (norms[i] > 0 && norms[j] > 0) sum += dot(rows[i], rows[j]) / (norms[i] * norms[j]);
  return sum / (0.5 * static_cast<double>(rows.size() * (rows.size() - 1)));
}

void FeatureCounts::add(int32_t token, const std::vector<Autoencoder::Active>& active) {
  ++count_;
  for (const auto& [feature, value] : active) {
    const auto at = static_cast<size_t>(feature);
    ++activations_[at];
    float& most = tokens_[at][token];
    most = std::max(most, value);
  }
}

int64_t FeatureCounts::live() const {
  return std::count_if(activations_.begin(), activations_.end(), [](int64_t count) { return count > 0; });
}

Feature FeatureCounts::feature(int64_t index, int64_t top) const {
  const auto at = static_cast<size_t>(index);
  Feature feature;
  feature.index = static_cast<int32_t>(index);
  feature.activations = activations_[at];
  feature.distinct = std::ssize(tokens_[at]);
  for (const auto& [token, value] : tokens_[at]) feature.top.push_back({token, value});
  std::stable_sort(feature.top.begin(), feature.top.end(),
                   [](const FeatureToken& a, const FeatureToken& b) { return a.value > b.value; });
  if (std::ssize(feature.top) > top) feature.top.resize(static_cast<size_t>(top));
  return feature;
}

FeatureSelection select_features(const FeatureCounts& counts, const std::vector<float>& embedding, int64_t width,
                                 const FeatureRules& rules, const Tokenizer& tokenizer,
                                 const std::map<int32_t, std::string>& given) {
  FeatureSelection selection;
  for (size_t j = 0; j < counts.activations().size(); ++j) {
    const int64_t activations = counts.activations()[j];
    if (activations < rules.min_activations) {
      ++selection.rare;
    } else if (static_cast<double>(activations) > rules.max_density * static_cast<double>(counts.tokens())) {
      ++selection.dense;
    } else {
      Feature feature = counts.feature(static_cast<int64_t>(j), rules.top_tokens);
      std::vector<const float*> rows;
      for (const FeatureToken& one : feature.top) rows.push_back(&embedding[static_cast<size_t>(one.token * width)]);
      feature.score = mono_score(rows, width);
      selection.single += rows.size() == 1;
      selection.retained.push_back(std::move(feature));
    }
  }
  auto& retained = selection.retained;
  selection.scored = std::ssize(retained);
  std::stable_sort(retained.begin(), retained.end(), [](const Feature& a, const Feature& b) {
    return a.score != b.score ? a.score > b.score : a.activations > b.activations;
  });
  retained.resize(static_cast<size_t>(std::ceil(rules.kept_share * static_cast<double>(selection.scored) - 1e-9)));
  for (Feature& feature : retained) {
    if (!tokenizer.knows_texts()) break;
    std::vector<std::string> labels;
    for (const FeatureToken& one : feature.top) {
      const auto found = given.find(one.token);
      labels.push_back(found != given.end()
                           ? found->second
                           : label_of_token(tokenizer.name_of(one.token), std::string(tokenizer.separator()) == " ",
                                            tokenizer.is_special(one.token)));
    }
    feature.label = majority_label(labels);
  }
  return selection;
}

// -----------------------------------------------------------------------------------------------------------------

void CategoryGates::add(const std::vector<double>& gates, const std::vector<double>& weights) {
  for (size_t c = 0; c < weights_.size(); ++c) {
    weights_[c] += weights[c];
    for (size_t n = 0; n < sums_.size(); ++n) sums_[n][c] += weights[c] * gates[n];
  }
}

}  // namespace crossply
