#include "eval/inside/occurrences.h"

#include <limits>
#include <numeric>

#include "cli/format.h"
#include "cli/needs.h"
#include "cli/standard_streams.h"
#include "cli/ticker.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/io/safetensors.h"
#include "engine/numbers.h"
#include "eval/inside/probe.h"

namespace crossply {
namespace {

constexpr int64_t usual_length = 512, min_of_class = 20;
constexpr size_t max_classes = 12;
const std::vector<std::string> usual_words = {"is", "are", "was", "were"};
// Of a model's forward over what is read, so that 10 million parameters take less than a minute on two cores.
constexpr double usual_flops = 4e12;
constexpr int64_t fewest_tokens = 1 << 16, max_tokens_read = 1 << 22;

bool is_word_byte(int32_t byte) {
  return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || byte >= 0x80;  // or a part of one
}

std::string quoted_list(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + printable(name);
  return list;
}

// How often each token is there in the first sequences.
std::vector<int64_t> frequencies(const Source& source, int64_t vocab) {
  const auto T = static_cast<size_t>(source.seq_len());
  std::vector<int64_t> counts(static_cast<size_t>(vocab));
  std::vector<int32_t> tokens(T), targets(T);
  for (int64_t i = 0; i < std::min<int64_t>(source.size(), 200); ++i) {
    source.read(i, tokens.data(), targets.data());
    for (size_t t = 0; t < static_cast<size_t>(scored_length(targets)); ++t)
      if (tokens[t] >= 0 && tokens[t] < vocab) ++counts[static_cast<size_t>(tokens[t])];
  }
  return counts;
}

TokenClasses classes_of_ids(const std::vector<int64_t>& ids, int64_t vocab) {
  TokenClasses classes{{}, "the tokens of these numbers", {}};
  for (const int64_t id : ids) {
    if (id >= vocab) fail(Exit::usage, "--ids ", id, ": the tokens of this model are 0 to ", vocab - 1);
    classes.ids.push_back(static_cast<int32_t>(id));
    classes.names.push_back("token " + std::to_string(id));
  }
  return classes;
}

// A tokenizer of words: its numbers, or else the four most frequent tokens.
TokenClasses usual_words_of(const Tokenizer& tokenizer, int64_t vocab, const Source& source) {
  TokenClasses classes{{}, "the numbers of the task's vocabulary", {}};
  const auto V = static_cast<int32_t>(std::min(vocab, tokenizer.vocab_size()));
  const auto add = [&](int32_t id) {
    classes.names.push_back(tokenizer.decode({id}));
    classes.ids.push_back(id);
  };
  for (int32_t id = 0; id < V && classes.ids.size() < max_classes; ++id)
    if (parse_integer(tokenizer.decode({id}))) add(id);
  if (classes.ids.size() > 1) return classes;
  classes = {{}, "the four most frequent tokens of the data", {}};
  const std::vector<int64_t> counts = frequencies(source, V);
  std::vector<int32_t> by_count(static_cast<size_t>(V));
  std::iota(by_count.begin(), by_count.end(), 0);
  std::ranges::stable_sort(by_count, std::greater(), [&](int32_t id) { return counts[static_cast<size_t>(id)]; });
  for (size_t i = 0; i < std::min<size_t>(4, by_count.size()); ++i) add(by_count[i]);
  return classes;
}

TokenClasses classes_of_words(const Tokenizer& tokenizer, const std::vector<std::string>& words, bool space) {
  TokenClasses classes{words, "", {}};
  if (tokenizer.is_bytes()) {
    classes.how = "the last byte of these words, where they stand alone";
    classes.words = words;
    for (const std::string& word : words)
      if (word.empty() || word.find(' ') != word.npos)
        fail(Exit::usage, "--words: '", printable(word), "' is not a word: it is empty or has a space in it");
    return classes;
  }
  const bool before = tokenizer.is_bpe() && space;
  classes.how = before ? "the tokens of these words with a space before them" : "the tokens of these words";
  for (const std::string& word : words) {
    const std::vector<int32_t> ids = tokenizer.encode(before ? " " + word : word);
    if (ids.size() != 1)
      fail(Exit::usage, "--words: '", printable(word), "' ", before ? "with a space before it " : "", "is ", ids.size(),
           " tokens of this model, not one; choose other words, or tokens by --ids",
           before ? ", or look for words without a space: --word-space false" : "");
    classes.ids.push_back(ids[0]);
  }
  return classes;
}

}  // namespace

void add_occurrence_flags(CLI::App& app, OccurrenceOptions& o) {
  const Flag words = add_texts(app, "--words", o.words, "WORD...",
                               "separability, tsne: the words whose vectors are the classes (default: is are "
                               "was were; of a vocabulary of words: its numbers, or its four most frequent)");
  const Flag ids =
      add_counts(app, "--ids", o.ids, "separability, tsne: the same by tokens, as 318 389 373 547 of GPT-2")
          .excludes(words);
  const Flag space = add_truth(app, "--word-space", o.word_space,
                               "separability, tsne: of a subword tokenizer, take the words with a space before them")
                         .excludes(ids);
  const Flag keep = add_truth(app, "--keep-vectors", o.keep_vectors,
                              "separability, tsne: write the vectors of the classes too, as DIR/NAME.safetensors");
  for (const Flag flag : {words, ids, space, keep}) needs(app, flag, {{"--what", {"separability", "tsne", "all"}}});
  needs(app, keep, {{"--out"}});
}

Flag add_counts(CLI::App& app, const std::string& name, std::vector<int64_t>& list, const std::string& help) {
  const auto set = [name, &list](const std::vector<std::string>& texts) {
    list.clear();
    for (const std::string& text : texts)
      list.push_back(read_integer(name, text, 0, std::numeric_limits<int32_t>::max()));
  };
  return add_parsed_list(app, name, set, "INT...", help);
}

int TokenClasses::at(const int32_t* tokens, int64_t n, int64_t t, int32_t next) const {
  const auto found = std::find(ids.begin(), ids.end(), tokens[t]);
  if (found != ids.end()) return static_cast<int>(found - ids.begin());
  const int32_t after = t + 1 < n ? tokens[t + 1] : next;
  if (words.empty() || after < 0 || is_word_byte(after)) return -1;
  for (size_t c = 0; c < words.size(); ++c) {
    const std::string& word = words[c];
    const int64_t begin = t + 1 - std::ssize(word);
    if (begin < 1 || (tokens[begin - 1] != ' ' && tokens[begin - 1] != '\n')) continue;
    const auto same = [](char a, int32_t b) { return static_cast<unsigned char>(a) == b; };
    if (std::equal(word.begin(), word.end(), tokens + begin, same)) return static_cast<int>(c);
  }
  return -1;
}

TokenClasses token_classes(const Tokenizer& tokenizer, int64_t vocab, const Source& source,
                           const OccurrenceOptions& o) {
  if (!o.words.empty() && !o.ids.empty()) fail(Exit::usage, "--words and --ids: give one of them");
  const bool none = !tokenizer.knows_texts();
  if (none && o.ids.empty())
    fail(Exit::usage,
         "the model has no tokenizer that tells which token is which word; choose tokens by their numbers: "
         "--ids 318 389 373 547 are is, are, was and were of GPT-2");
  const bool of_words = !none && !tokenizer.is_bytes() && !tokenizer.is_bpe();
  TokenClasses classes = !o.ids.empty() ? classes_of_ids(o.ids, vocab)
                         : of_words && o.words.empty()
                             ? usual_words_of(tokenizer, vocab, source)
                             : classes_of_words(tokenizer, o.words.empty() ? usual_words : o.words, o.word_space);
  if (classes.names.size() < 2 || classes.names.size() > max_classes)
    fail(Exit::usage, "there must be 2 to ", max_classes, " words or ids to compare, not ", classes.names.size());
  for (size_t a = 0; a < classes.names.size(); ++a)
    for (size_t b = 0; b < a; ++b)
      if (classes.names[a] == classes.names[b] || (!classes.ids.empty() && classes.ids[a] == classes.ids[b]))
        fail(Exit::usage, "'", printable(classes.names[b]), "' and '", printable(classes.names[a]),
             "' are the same token; choose words or ids that differ");
  return classes;
}

// -----------------------------------------------------------------------------------------------------------------
// Where they stand

namespace {

// Reads on, window after window, as a text is read.
class OccurrenceReader {
 public:
  OccurrenceReader(const Source& source, int64_t T)
      : source_(source), T_(T), S_(source.seq_len()), tokens_(static_cast<size_t>(S_)), targets_(tokens_.size()) {}

  bool more() const { return sequence_ < source_.size(); }
  // The next window's places, of those that no window before had; of a window that has ended before it begins, none.
  std::vector<OccurrencePlan::Place> next(const TokenClasses& classes, TokenWindow* window) {
    if (begin_ == 0) source_.read(sequence_, tokens_.data(), targets_.data());
    const bool task = source_.task() != nullptr;
    const int64_t n = std::clamp<int64_t>(scored_length(targets_) - begin_, 0, std::min(T_, S_ - begin_));
    const int32_t* tokens = tokens_.data() + begin_;
    const int32_t* targets = targets_.data() + begin_;
    std::vector<OccurrencePlan::Place> places;
    for (int64_t t = 0; t < n; ++t) {
      if (targets[t] < 0 && !task) continue;  // of files: the window before had it
      if (const int label = classes.at(tokens, n, t, targets[n - 1]); label >= 0) places.push_back({t, label});
    }
    window->tokens.assign(tokens, tokens + n);
    window->tokens.resize(static_cast<size_t>(T_));  // what follows a token changes nothing of it
    window->length = n;
    begin_ += T_;
    if (begin_ >= S_ || task) begin_ = 0, ++sequence_;
    return places;
  }

 private:
  const Source& source_;
  int64_t T_, S_, sequence_ = 0, begin_ = 0;
  std::vector<int32_t> tokens_, targets_;
};

std::string counts_text(const OccurrencePlan& plan) {
  std::string text;
  for (size_t c = 0; c < plan.found.size(); ++c)
    text += str(c > 0 ? ", " : "", printable(plan.classes.names[c]), " ", format_count(plan.found[c]));
  return text;
}

}  // namespace

OccurrencePlan plan_occurrences(const Source& source, const TokenClasses& classes, int64_t T, int64_t most,
                                int64_t max_tokens) {
  OccurrencePlan plan;
  plan.classes = classes;
  plan.found.resize(classes.names.size());
  OccurrenceReader reader(source, T);
  const auto full = [&] { return std::ranges::all_of(plan.found, [&](int64_t n) { return n >= most; }); };
  while (reader.more() && plan.tokens < max_tokens && !full()) {
    TokenWindow window;
    std::vector<OccurrencePlan::Place> places = reader.next(classes, &window);
    plan.tokens += window.length;
    std::erase_if(places, [&](const auto& place) { return ++plan.found[static_cast<size_t>(place.label)] > most; });
    if (places.empty()) continue;
    plan.windows.push_back(std::move(window));
    plan.places.push_back(std::move(places));
  }
  for (int64_t& n : plan.found) n = std::min(n, most);
  plan.stopped = !full() && reader.more();
  plan.per_class = std::ranges::min(plan.found);
  if (plan.per_class < min_of_class)
    fail(Exit::usage, "too few places to compare in ", format_count(plan.tokens), " tokens (", counts_text(plan),
         "); at least ", min_of_class, " of each are needed: ",
         plan.stopped ? "let it read more by --sequences, or choose other words by --words"
                      : "choose other words by --words, or more data, as by --split all");
  std::vector<int64_t> taken(plan.found.size());
  size_t kept = 0;
  for (size_t w = 0; w < plan.windows.size(); ++w) {
    auto& places = plan.places[w];
    std::erase_if(places,
                  [&](const auto& place) { return ++taken[static_cast<size_t>(place.label)] > plan.per_class; });
    if (places.empty()) continue;
    if (kept != w) plan.windows[kept] = std::move(plan.windows[w]), plan.places[kept] = std::move(places);
    ++kept;
  }
  plan.windows.resize(kept), plan.places.resize(kept);
  return plan;
}

OccurrencePlan plan_occurrences(const Subject& subject, const AnalysisOptions& o, const OccurrenceOptions& own,
                                int64_t most, int64_t* limit) {
  const Source& source = subject.data.source();
  const TokenClasses classes = token_classes(subject.data.tokenizer, subject.config().vocab_size, source, own);
  const int64_t longest = std::min(subject.config().max_position_embeddings, source.seq_len());
  const int64_t T = o.length > 0
                        ? window_length(o.length, usual_length, subject.name, subject.config(), o.data.spec, source)
                        : std::min(usual_length, longest);
  const double flops = 2 * static_cast<double>(subject.model.params.count());  // of a token
  if (*limit == 0)
    *limit = o.sequences > 0 ? o.sequences * T
                             : std::clamp(static_cast<int64_t>(usual_flops / flops), fewest_tokens, max_tokens_read);
  return plan_occurrences(source, classes, T, most, *limit);
}

std::string refuses_classes(const Subject& subject, const OccurrenceOptions& own) {
  try {
    token_classes(subject.data.tokenizer, subject.config().vocab_size, subject.data.source(), own);
  } catch (const Error& error) {
    if (error.code != Exit::usage) throw;
    return error.what();
  }
  return "";
}

void require_same_classes(const OccurrencePlan& first, const std::string& first_model, const OccurrencePlan& plan,
                          const std::string& model) {
  if (plan.classes.names != first.classes.names)
    fail(Exit::usage, printable(model), " has other classes (", quoted_list(plan.classes.names), ") than ",
         printable(first_model), " (", quoted_list(first.classes.names), "); give both the same by --words or --ids");
}

bool same_places(const OccurrencePlan& a, const OccurrencePlan& b) {
  const auto same = [](const TokenWindow& x, const TokenWindow& y) { return x.tokens == y.tokens; };
  return a.per_class == b.per_class && a.places == b.places && std::ranges::equal(a.windows, b.windows, same);
}

void note_fewer(const OccurrencePlan& plan, int64_t most, const Subject& subject) {
  if (plan.per_class == most) return;
  const auto rarest = static_cast<size_t>(std::ranges::min_element(plan.found) - plan.found.begin());
  say_note(str(format_count(plan.per_class), " vectors of each class, not ", format_count(most), ": ",
               plan.classes.names[rarest], " has no more in the ", format_count(plan.tokens), " tokens of ",
               subject.data.choice.scored(), " that were read",
               plan.stopped                         ? "; --sequences N reads N windows"
               : subject.data.choice.split == "all" ? ", which are all; larger data has more"
                                                    : ", which are all; --split all or larger data has more"));
}

// -----------------------------------------------------------------------------------------------------------------
// What the model holds there

VectorsByName collect_vectors(const std::string& what, Subject& subject, const OccurrencePlan& plan,
                              const std::vector<std::string>& names, const FlopsOfVectors& afterwards) {
  const auto T = static_cast<int64_t>(plan.windows[0].tokens.size());
  Probe probe(subject.model, 1, T);
  VectorsByName vectors;
  double bytes = probe.bytes(), flops = static_cast<double>(plan.windows.size()) * probe.forward_flops();
  for (const std::string& name : names) {
    Vectors& of_name = vectors[name];
    of_name.C = probe.shape(name).numel() / T;
    of_name.rows.resize(static_cast<size_t>(plan.vectors() * of_name.C));
    bytes += 4 * static_cast<double>(of_name.rows.size());
    flops += afterwards(of_name.C);
    probe.keep(name);
  }
  say_cost(what, subject, plan.windows, flops, bytes);
  std::vector<int64_t> taken(plan.classes.names.size());
  Ticker ticker(printable(subject.name), "window");
  for (size_t w = 0; w < plan.windows.size(); ++w) {
    probe.run(plan.windows[w].tokens.data());
    for (const auto& [t, label] : plan.places[w]) {
      const int64_t row = label * plan.per_class + taken[static_cast<size_t>(label)]++;
      for (auto& [name, of_name] : vectors)
        std::copy_n(probe.at(name).begin() + t * of_name.C, of_name.C, of_name.rows.begin() + row * of_name.C);
    }
    ticker.tell(static_cast<int64_t>(w + 1), std::ssize(plan.windows));
  }
  return vectors;
}

std::string write_vectors(const std::string& analysis, const AnalysisOptions& o, const std::string& model,
                          const OccurrencePlan& plan, const VectorsByName& vectors) {
  const int64_t rows = plan.vectors();
  std::vector<int64_t> labels;
  for (int64_t row = 0; row < rows; ++row) labels.push_back(row / plan.per_class);
  std::vector<TensorToWrite> tensors = {{"labels", "I64", {rows}, labels.data()}};
  for (const auto& [name, of_name] : vectors) tensors.push_back({name, "F32", {rows, of_name.C}, of_name.rows.data()});
  const std::string path = model_file(analysis, o, model);
  write_safetensors(path, tensors, {{"crossply", "analyze"}, {"model", utf8_or_escaped(model)}});
  return str("wrote ", printable(path), ", ", tensors.size(), " tensors\n");
}

std::string occurrences_text(const OccurrencePlan& plan) {
  return str(format_count(plan.per_class), " vectors of each class, at ", plan.classes.how, ": ",
             quoted_list(plan.classes.names));
}

nlohmann::json occurrences_json(const OccurrencePlan& plan) {
  nlohmann::json names = nlohmann::json::array();
  for (const std::string& name : plan.classes.names) names.push_back(utf8_or_escaped(name));
  return {{"classes", names},
          {"how", plan.classes.how},
          {"per_class", plan.per_class},
          {"found", plan.found},
          {"tokens_read", plan.tokens},
          {"stopped_early", plan.stopped},
          {"windows", std::ssize(plan.windows)},
          {"length", std::ssize(plan.windows[0].tokens)}};
}

}  // namespace crossply
