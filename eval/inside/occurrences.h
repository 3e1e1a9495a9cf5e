// What a model holds at the places of a text where certain tokens stand, the four words is, are, was and were for one:
// vectors in classes, as many of each, for a probe or a picture that asks whether the classes lie apart.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "eval/inside/analysis.h"

namespace crossply {

// What of a layer i is looked at. A hidden state is what the layer puts out.
struct VectorKind {
  const char *key, *caption, *column;
  std::string name(int layer) const { return str(key, ".", layer + (std::string(key) == "hidden" ? 1 : 0)); }
};
inline constexpr VectorKind values_read{"value", "values as attention reads them", "values read"};
inline constexpr VectorKind own_values{"own_value", "the layer's own values", "own values"};
inline constexpr VectorKind hidden_states{"hidden", "hidden states", "hidden states"};

// Flags that analyses of classes share.
struct OccurrenceOptions {
  std::vector<std::string> words;  // at most one of words and ids; none: the usual words
  std::vector<int64_t> ids;        // not negative; of which model is not known yet
  bool word_space = true;          // is a bpe's word the one with a space before it?
  bool keep_vectors = false;
};
void add_occurrence_flags(CLI::App& app, OccurrenceOptions& o);
// A flag of several integers from 0 on. Whether they fit a model is seen when it is there.
Flag add_counts(CLI::App& app, const std::string& name, std::vector<int64_t>& list, const std::string& help);

// Which tokens belong to which class.
struct TokenClasses {
  std::vector<std::string> names;
  std::string how;                      // what stands at such a place, for a caption
  std::vector<int32_t> ids = {};        // a class is a token, or else
  std::vector<std::string> words = {};  // of bytes: a class is the end of a whole word

  // Of position t < n; next: the token after the n-th, -1 where that is not known. -1: of none.
  int at(const int32_t* tokens, int64_t n, int64_t t, int32_t next) const;
};
// The usual classes are the words is, are, was and were; of a tokenizer of words they are its numbers, or where it has
// none, the four most frequent tokens of the source's beginning. Throws Exit::usage for a word that is not one token,
// for an id that the model does not have, for two that are the same, for fewer than 2 or more than 12, and where there
// is no tokenizer and no ids.
TokenClasses token_classes(const Tokenizer& tokenizer, int64_t vocab, const Source& source, const OccurrenceOptions& o);

struct OccurrencePlan {
  struct Place {
    int64_t t;
    int label;
    bool operator==(const Place&) const = default;
  };
  TokenClasses classes;
  int64_t per_class = 0;
  int64_t tokens = 0;          // that were read
  bool stopped = false;        // at the limit, where a class was not full and the data had more
  std::vector<int64_t> found;  // of each class, at most as many as asked for
  std::vector<TokenWindow> windows;
  std::vector<std::vector<Place>> places;  // of each window, one or more, in order

  int64_t vectors() const { return per_class * static_cast<int64_t>(classes.names.size()); }
};
// The first places of each class in reading order, `most` or as many as the rarest class has; the source's sequences
// are cut into windows of T tokens, of a task's only the beginning, until every class is full or max_tokens were read.
// Throws Exit::usage, with the counts, where a class has fewer than 20.
OccurrencePlan plan_occurrences(const Source& source, const TokenClasses& classes, int64_t T, int64_t most,
                                int64_t max_tokens);
// The same of the subject's data with what the flags say. limit: of tokens, 0: as many as a run of about a minute
// takes; it then has them, for the next model to read as many. Says nothing.
OccurrencePlan plan_occurrences(const Subject& subject, const AnalysisOptions& o, const OccurrenceOptions& own,
                                int64_t most, int64_t* limit);
// For Analysis::refuses: why the subject's tokens give no classes, "" where they do.
std::string refuses_classes(const Subject& subject, const OccurrenceOptions& own);
// Two models can stand beside each other only with the same classes. Throws Exit::usage.
void require_same_classes(const OccurrencePlan& first, const std::string& first_model, const OccurrencePlan& plan,
                          const std::string& model);
// Are all vectors from the same places of the same windows?
bool same_places(const OccurrencePlan& a, const OccurrencePlan& b);
// On stderr, where there are fewer vectors than asked for, and why.
void note_fewer(const OccurrencePlan& plan, int64_t most, const Subject& subject);

// (rows, C), a row for each place, class after class, each in reading order.
struct Vectors {
  int64_t C = 0;
  std::vector<float> rows = {};
};
using VectorsByName = std::map<std::string, Vectors>;
// What is done with a value's vectors afterwards: FLOP, by their channels.
using FlopsOfVectors = std::function<double(int64_t C)>;
// Runs the model over the windows and collects these values of the probe. Says the cost, with what comes afterwards,
// and shows how far it is.
VectorsByName collect_vectors(const std::string& what, Subject& subject, const OccurrencePlan& plan,
                              const std::vector<std::string>& names, const FlopsOfVectors& afterwards);
// DIR/ANALYSIS.safetensors (of several models, DIR/ANALYSIS.N.safetensors by the model's place among all that were
// given, as values.N.safetensors): the values (rows, C), labels (rows). model: one of o.models.
std::string write_vectors(const std::string& analysis, const AnalysisOptions& o, const std::string& model,
                          const OccurrencePlan& plan, const VectorsByName& vectors);

// For a caption: "1,668 vectors of each class, at the tokens ...".
std::string occurrences_text(const OccurrencePlan& plan);
nlohmann::json occurrences_json(const OccurrencePlan& plan);

// What an analysis of classes has of each model.
struct OccurrencesOfModel {
  std::string model, arch, title;
  OccurrencePlan plan;
};
template <class OfModel>
class OccurrenceAnalysis : public AnalysisOf<OfModel> {
 public:
  std::string refuses(const Subject& subject) const override { return refuses_classes(subject, *shared_); }
  std::vector<std::string> more_files(const AnalysisOptions& o) const override {
    return shared_->keep_vectors ? model_files(this->name(), o) : std::vector<std::string>();
  }

 protected:
  OccurrenceAnalysis(const std::string& name, const std::string& about, std::shared_ptr<OccurrenceOptions> shared,
                     int64_t per_class)
      : AnalysisOf<OfModel>(name, about), shared_(std::move(shared)), per_class_(per_class) {}
  OccurrencesOfModel plan(const Subject& subject, const AnalysisOptions& o) {
    OccurrencesOfModel m{subject.name, subject.config().arch, subject.title(),
                         plan_occurrences(subject, o, *shared_, per_class_, &limit_)};
    note_fewer(m.plan, per_class_, subject);
    if (!this->all_.empty()) require_same_classes(this->all_[0].plan, this->all_[0].model, m.plan, m.model);
    return m;
  }
  // As collect_vectors; they are also written where the flags say so.
  VectorsByName collect(Subject& subject, const AnalysisOptions& o, const OccurrencePlan& plan,
                        const std::vector<std::string>& names, const FlopsOfVectors& afterwards) {
    VectorsByName vectors = collect_vectors(this->name(), subject, plan, names, afterwards);
    if (shared_->keep_vectors && !o.out.empty())
      std::printf("%s", write_vectors(this->name(), o, subject.name, plan, vectors).c_str());
    return vectors;
  }
  bool all_same_places() const {
    return std::ranges::all_of(this->all_, [&](const auto& m) { return same_places(m.plan, this->all_[0].plan); });
  }
  std::shared_ptr<OccurrenceOptions> shared_;
  int64_t per_class_;  // vectors of each class

 private:
  int64_t limit_ = 0;
};

}  // namespace crossply
