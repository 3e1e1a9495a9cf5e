// The features of a sparse autoencoder as tokens see them: which tokens make each one active, how alike these are, what
// kind of tokens they are, and how a model's gates treat tokens of each kind.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "eval/inside/autoencoder.h"

namespace crossply {

// -----------------------------------------------------------------------------------------------------------------
// Labels, by the text of tokens.

// In three categories:
//   Semantic    Semantic Root Fragments, Entity Marker Fragments, Logic Quantifier Keywords, Morphological Suffixes,
//               Functional Leading Space
//   Functional  Multilingual Unicode, Byte-Level Fallbacks, Numerical Digit Fragments
//   Structural  Structural Punctuation, Code Formatting Symbols
const std::vector<std::string>& feature_labels();      // in this order
const std::vector<std::string>& feature_categories();  // in this order
const std::string& category_of(const std::string& label);

// The first of these rules that fits a token's text, which may begin with one space; the rest of it is its body:
//   Byte-Level Fallbacks       it is no UTF-8, as a part of a character, or it names a byte, <0x0A>
//   Code Formatting Symbols    nothing but spaces, tabs and line breaks
//   Multilingual Unicode       a character beyond ASCII that is no punctuation (U+00A0 to U+00BF, U+2000 to U+206F)
//   Numerical Digit Fragments  digits, and no letters
//   Code Formatting Symbols    no letters, but one of {}[]<>=+*/\|_^~#$@%&`
//   Structural Punctuation     no letters
//   Logic Quantifier Keywords  the body is one, whatever its case: not, if, because, all, some, more ...
//   Functional Leading Space   the body is an article, pronoun, preposition or auxiliary (the, of, he, was), behind a
//                              space or as a whole word
//   Morphological Suffixes     no space before it, no whole word, and the body is an English ending: ing, ed, ly, tion
//   Entity Marker Fragments    the first letter is a capital
//   Semantic Root Fragments    what is left
// whole_word: are the tokens of this vocabulary words? special: does it mark the structure of a text, as what ends it
// does? Then it is Structural Punctuation.
std::string label_of_token(const std::string& text, bool whole_word, bool special = false);
// What most of these labels are; of equals the one that comes first in the list. The list is not empty.
std::string majority_label(const std::vector<std::string>& labels);

// -----------------------------------------------------------------------------------------------------------------

// The mean cosine of all pairs of these rows of `width` numbers, 1 of a single row. A row of zeros has cosine 0.
double mono_score(const std::vector<const float*>& rows, int64_t width);

struct FeatureToken {
  int32_t token;
  float value;  // the largest activation that it caused
};
struct Feature {
  int32_t index = 0;
  int64_t activations = 0;        // tokens on which it was active
  int64_t distinct = 0;           // different ones
  std::vector<FeatureToken> top;  // different tokens, the most active first; of equals the lower id
  double score = 0;               // mono_score of their embeddings: 1 of one token
  std::string label;              // "" where the tokens' texts are not known
};

struct FeatureRules {
  int64_t min_activations = 10;
  double max_density = 0.005;  // share of the tokens
  double kept_share = 0.2;     // of those not dropped, rounded up
  int64_t top_tokens = 20;
};

// Counts on which tokens each of m features was active.
class FeatureCounts {
 public:
  explicit FeatureCounts(int64_t m) : tokens_(static_cast<size_t>(m)), activations_(tokens_.size(), 0) {}
  void add(int32_t token, const std::vector<Autoencoder::Active>& active);
  int64_t tokens() const { return count_; }
  const std::vector<int64_t>& activations() const { return activations_; }  // of each feature
  int64_t live() const;                                                     // features that were ever active
  Feature feature(int64_t index, int64_t top) const;

 private:
  int64_t count_ = 0;
  std::vector<std::map<int32_t, float>> tokens_;  // of each feature, the largest activation of each token
  std::vector<int64_t> activations_;
};

struct FeatureSelection {
  int64_t rare = 0, dense = 0;    // dropped, in this order
  int64_t scored = 0;             // all others
  int64_t single = 0;             // of these: active on one token only
  std::vector<Feature> retained;  // the best first; of equals the more active, then the lower index
};
// embedding: (V, width). Labels come with a tokenizer that knows its tokens' texts. given: labels of tokens, which come
// before those by rules.
FeatureSelection select_features(const FeatureCounts& counts, const std::vector<float>& embedding, int64_t width,
                                 const FeatureRules& rules, const Tokenizer& tokenizer,
                                 const std::map<int32_t, std::string>& given = {});

// -----------------------------------------------------------------------------------------------------------------

// G[c] = sum_t w[t,c] g[t] / sum_t w[t,c]: the mean gate of tokens, weighted by how many retained features of a
// category are active on them.
class CategoryGates {
 public:
  CategoryGates(size_t layers, size_t categories)
      : sums_(layers, std::vector<double>(categories, 0.0)), weights_(categories, 0.0) {}
  // gates: the mean over heads, of each layer; weights: of each category.
  void add(const std::vector<double>& gates, const std::vector<double>& weights);
  double at(size_t layer, size_t category) const { return sums_[layer][category] / weights_[category]; }
  double weight(size_t category) const { return weights_[category]; }

 private:
  std::vector<std::vector<double>> sums_;
  std::vector<double> weights_;
};

}  // namespace crossply
