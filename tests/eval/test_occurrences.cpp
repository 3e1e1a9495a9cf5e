// Where the tokens of the classes stand in a text, and what a model holds there; the analyses that start from it.
#include "engine/io/json.h"
#include "eval/inside/occurrences.h"

#include <CLI/CLI.hpp>

#include "eval/inside/probe.h"
#include "tests/support/inside.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Sequences of tokens as they are, each the beginning of a text of its own that one more token ends.
class GivenTokens : public Source {
 public:
  explicit GivenTokens(std::vector<std::vector<int32_t>> sequences) : sequences_(std::move(sequences)) {}
  int64_t size() const override { return std::ssize(sequences_); }
  int64_t seq_len() const override { return std::ssize(sequences_[0]) - 1; }
  int64_t vocab_size() const override { return 0; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    const std::vector<int32_t>& all = sequences_[static_cast<size_t>(index)];
    std::copy_n(all.begin(), seq_len(), tokens);
    std::copy_n(all.begin() + 1, seq_len(), targets);
  }

 private:
  std::vector<std::vector<int32_t>> sequences_;
};

// One text, over and over, with one more token at the end of each.
GivenTokens repeated(const Tokenizer& tokenizer, const std::string& text, int times) {
  return GivenTokens(std::vector(static_cast<size_t>(times), tokenizer.encode(text)));
}

// A model of width 8 at scratch/NAME.
void train_one_step(const TempDir& scratch, const std::string& arch, const std::string& layers, const std::string& data,
                    const std::string& name) {
  const std::vector<std::string> words =
      split_words("--width 8 --ffn 8 --heads 2 --seq 64 --steps 1 --layers " + layers);
  check_outcome(
      train(scratch, joined(words, std::vector{std::string("--data"), data, std::string("--out"), scratch.file(name)}),
            arch),
      Exit::done, "step 1/1");
}

using Found = std::vector<std::pair<int64_t, std::string>>;

// The places of the first window, with their classes' names.
Found first_places(const OccurrencePlan& plan) {
  Found found;
  for (const auto& [t, label] : plan.places.at(0))
    found.emplace_back(t, plan.classes.names[static_cast<size_t>(label)]);
  return found;
}

Found places_in(const Tokenizer& tokenizer, const std::string& text, const OccurrenceOptions& o) {
  const GivenTokens source = repeated(tokenizer, text, 30);
  const TokenClasses classes = token_classes(tokenizer, tokenizer.vocab_size(), source, o);
  return first_places(plan_occurrences(source, classes, source.seq_len(), 30, 1 << 20));
}

// tiny_bpe with the tokens " is" (260) and " are" (263), which its words in the middle of a text are.
Tokenizer bpe_of_words(const TempDir& scratch) {
  nlohmann::json json = tiny_bpe_json();
  const std::string space = byte_names()[' '];
  int id = 259;
  for (const auto& [a, b] : std::vector<std::pair<std::string, std::string>>{
           {space, "i"}, {space + "i", "s"}, {space, "a"}, {space + "a", "r"}, {space + "ar", "e"}}) {
    json["model"]["vocab"][a + b] = id++;
    json["model"]["merges"].push_back(a + " " + b);
  }
  write_text(scratch.file("tokenizer.json"), json_text(json));
  return Tokenizer::read(scratch.file("tokenizer.json"));
}

}  // namespace

TEST_CASE("occurrences: of bytes, the last byte of whole words") {
  OccurrenceOptions o;
  o.words = {"is", "was"};
  //                                           0         1         2         3         4
  //                                           012345678901234567890123456789012345678901234567
  const Found found =
      places_in(Tokenizer::bytes(), "is this is. It was\nis isn wasp as was, is' \xC3\xA9is is\xC3\xA9 was", o);
  CHECK(found == Found{{9, "is"}, {17, "was"}, {20, "is"}, {36, "was"}, {40, "is"}});
}

TEST_CASE("occurrences: of a subword tokenizer, the words' tokens with a space before them, or without") {
  const TempDir scratch;
  const Tokenizer tokenizer = bpe_of_words(scratch);
  OccurrenceOptions o;
  o.words = {"is", "are"};
  CHECK(tokenizer.encode("is are is") == std::vector<int32_t>{'i', 's', 263, 260});
  CHECK(places_in(tokenizer, "is are is x", o) == Found{{2, "are"}, {3, "is"}});
  const GivenTokens source = repeated(tokenizer, "is are is x", 30);
  const auto classes = [&](const std::vector<std::string>& words, bool space) {
    OccurrenceOptions other;
    other.words = words, other.word_space = space;
    return token_classes(tokenizer, tokenizer.vocab_size(), source, other);
  };
  CHECK(classes({"is", "are"}, true).ids == std::vector<int32_t>{260, 263});
  CHECK(classes({"the", "a"}, false).ids == std::vector<int32_t>{258, 'a'});
  check_fails(Exit::usage, {"'was' with a space before it is 4 tokens of this model", "--word-space false"}, [&] {
    classes({"is", "was"}, true);
  });
  check_fails(Exit::usage, {"'is' is 2 tokens"}, [&] { classes({"the", "is"}, false); });
  check_fails(Exit::usage, {"'is' and 'is' are the same"}, [&] { classes({"is", "are", "is"}, true); });
  check_fails(Exit::usage, {"2 to 12 words", "not 1"}, [&] { classes({"is"}, true); });
  o.ids = {258, 97};
  check_fails(Exit::usage, {"give one of them"}, [&] { token_classes(tokenizer, 264, source, o); });
  o.words.clear();
  CHECK(token_classes(tokenizer, 264, source, o).ids == std::vector<int32_t>{258, 97});
  CHECK(token_classes(Tokenizer(), 264, source, o).names == std::vector<std::string>{"token 258", "token 97"});
  check_fails(Exit::usage, {"--ids 258", "0 to 257"}, [&] { token_classes(tokenizer, 258, source, o); });
  check_fails(Exit::usage, {"no tokenizer", "--ids 318 389 373 547"},
              [&] { token_classes(Tokenizer(), 264, source, OccurrenceOptions()); });
}

TEST_CASE("occurrences: of words, the numbers of the vocabulary, or its four most frequent tokens") {
  const Tokenizer few = Tokenizer::words({"p", "q", "r", "s", "t", "u"});
  CHECK(places_in(few, "u q t q t r u s s q p", {}) ==
        Found{{0, "u"}, {1, "q"}, {2, "t"}, {3, "q"}, {4, "t"}, {6, "u"}, {7, "s"}, {8, "s"}, {9, "q"}});
  const Tokenizer numbers = Tokenizer::words({"x", "0", "1", "y", "10"});
  CHECK(places_in(numbers, "x 1 0 x y 10 10 x", {}) == Found{{1, "1"}, {2, "0"}, {5, "10"}, {6, "10"}});
  OccurrenceOptions o;
  o.words = {"y", "x"};
  CHECK(places_in(numbers, "x 1 0 x y 10 10 x", o) == Found{{0, "x"}, {3, "x"}, {4, "y"}});
  DataOptions arith;
  arith.spec = "arith:3", arith.train_samples = arith.test_samples = 60;
  const Dataset data = open_dataset(arith);
  const TokenClasses classes = token_classes(data.tokenizer, data.tokenizer.vocab_size(), *data.test, {});
  CHECK(classes.names.size() == 11);
  // Also of the prompt, which is not scored, and nothing of the padding.
  const OccurrencePlan plan = plan_occurrences(*data.test, classes, data.test->seq_len(), 1000, 1 << 20);
  CHECK(plan.places[0][0].t <= 3);
  for (size_t w = 0; w < plan.windows.size(); ++w) CHECK(plan.places[w].back().t < plan.windows[w].length);
}

TEST_CASE("occurrences: in reading order, as many of each class, each place once, until enough was read") {
  // A file of 1,000 bytes; sequences of 128 of which the last begins before the one before it ends, in windows of 48.
  const TempDir scratch;
  std::string text;
  int64_t a = 0, b = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    const uint64_t drawn = random_bits(3, 1, i) % 10;
    text += drawn == 0 ? 'a' : drawn < 3 ? 'b' : '-';
    if (i < 999) a += drawn == 0, b += drawn == 1 || drawn == 2;  // nothing follows the last
  }
  DataOptions options;
  options.spec = text_file(scratch, text), options.seq_len = 128, options.whole = true;
  const Dataset data = open_dataset(options);
  OccurrenceOptions o;
  o.ids = {97, 98};
  const TokenClasses classes = token_classes(Tokenizer::bytes(), 256, *data.test, o);
  const OccurrencePlan all = plan_occurrences(*data.test, classes, 48, 100000, 100000);
  CHECK(all.found == std::vector<int64_t>{a, b});
  CHECK(all.per_class == std::min(a, b));
  CHECK(!all.stopped);
  CHECK(all.windows.size() <= 24);  // three of each of eight sequences
  std::vector<int64_t> counts(2);
  for (size_t w = 0; w < all.windows.size(); ++w) {
    CHECK(!all.places[w].empty());
    for (const auto& [t, label] : all.places[w]) {
      CHECK(all.windows[w].tokens[static_cast<size_t>(t)] == (label == 0 ? 'a' : 'b'));
      ++counts[static_cast<size_t>(label)];
    }
  }
  CHECK(counts == std::vector<int64_t>{all.per_class, all.per_class});
  const OccurrencePlan few = plan_occurrences(*data.test, classes, 48, 20, 100000);
  CHECK(few.per_class == 20);
  CHECK(few.tokens < 500);
  CHECK(!few.stopped);
  const OccurrencePlan cut = plan_occurrences(*data.test, classes, 48, 1000, 450);
  CHECK(cut.stopped);
  CHECK(cut.tokens >= 450);
  CHECK(cut.tokens < 450 + 48);
  CHECK(same_places(few, few));
  CHECK(!same_places(few, cut));
  check_fails(Exit::usage, {"too few places", "token 97 ", "token 98 ", "at least 20", "--sequences"},
              [&] { plan_occurrences(*data.test, classes, 48, 1000, 100); });
  const TokenClasses rare{{"none", "b"}, "", {'z', 'b'}};
  check_fails(Exit::usage, {"none 0, b ", "choose other words"},
              [&] { plan_occurrences(*data.test, rare, 48, 1000, 100000); });
}

TEST_CASE("analyze: separability and t-SNE of a model of bytes: its vectors, and what is written") {
  const TempDir scratch;
  std::string text;
  const char* const words[] = {" is", " are", " was", " were", " island", " we"};
  for (uint64_t i = 0; i < 1200; ++i) text += words[random_bits(8, 1, i) % 6];
  AnalysisOptions o;
  o.data.spec = text_file(scratch, text), o.split = "all";
  for (const std::string arch : {"llama", "lime"}) train_one_step(scratch, arch, "3", o.data.spec, arch);
  Subject subject(scratch.file("lime"), o);
  int64_t limit = 0;
  const OccurrencePlan plan = plan_occurrences(subject, o, {}, 25, &limit);
  CHECK(plan.classes.names == std::vector<std::string>{"is", "are", "was", "were"});
  const VectorsByName vectors =
      collect_vectors("test", subject, plan, {"value.1", "hidden.3"}, [](int64_t) { return 0; });
  Probe probe(subject.model, 1, 64);
  probe.keep("value.1"), probe.keep("hidden.3");
  std::vector<int64_t> rows = {0, 25, 50, 75};
  for (size_t w = 0; w < plan.windows.size(); ++w) {
    probe.run(plan.windows[w].tokens.data());
    for (const auto& [t, label] : plan.places[w]) {
      const int64_t row = rows[static_cast<size_t>(label)]++;
      for (const auto& [name, of_name] : vectors) {
        CHECK(of_name.C == 8);
        for (int64_t i = 0; i < 8; ++i)
          CHECK(of_name.rows[static_cast<size_t>(row * 8 + i)] ==
                static_cast<float>(probe.at(name)[static_cast<size_t>(t * 8 + i)]));
      }
    }
  }
  CHECK(rows == std::vector<int64_t>{25, 50, 75, 100});

  const auto call = [&] {
    return analyze(scratch, {"llama", "lime"}, o.data.spec,
                   "--split all --what separability tsne --vectors 40 --tsne-vectors 20 --keep-vectors true");
  };
  const Outcome got = call();
  check_outcome(got, Exit::done, "40 vectors of each class, at the last byte of these words");
  check_outcome(got, Exit::done, "KL divergence");
  check_width(got, scratch);
  const nlohmann::json probes = out_json(scratch, "separability");
  CHECK(probes["same_places"] == true);
  for (const nlohmann::json& model : probes["models"]) {
    CHECK(model["per_class"] == 40);
    CHECK(model["updates"] == 2);
    for (const char* kind : {"value", "own_value", "hidden"}) {
      CHECK(model[kind].size() == 3);
      for (const nlohmann::json& layer : model[kind]) CHECK(layer["folds"].size() == 5);
    }
  }
  CHECK(probes["models"][0]["value"] == probes["models"][0]["own_value"]);  // a LLaMA reads its own
  CHECK(probes["models"][1]["value"] != probes["models"][1]["own_value"]);
  const nlohmann::json planes = out_json(scratch, "tsne");
  const std::vector<std::string> drawn = {"value.1", "value.2", "hidden.2", "hidden.3"};  // layers 1 and 2 of 3
  for (const nlohmann::json& model : planes["models"]) {
    std::vector<std::string> values;
    for (const nlohmann::json& panel : model["panels"]) {
      values.push_back(panel["value"]);
      CHECK(panel["x"].size() == 80);
      CHECK(panel["kl_divergence"] > 0);
    }
    CHECK(values == drawn);
  }
  CHECK(planes["models"][0]["panels"][1]["x"] != planes["models"][0]["panels"][3]["x"]);
  const std::string planes_svg = out_text(scratch, "tsne.svg");
  check_has(planes_svg, {"lime: values as attention reads them", "llama: hidden states"});
  CHECK(has(out_text(scratch, "tsne.1.safetensors"), "\"hidden.3\""));
  check_outcome(got, Exit::done, "makes 2 updates (the paper's: 84); so few tell how fast it learns");
  const std::string csv = out_text(scratch, "tsne.csv");
  CHECK(has(csv, "," + json_text(planes["models"][0]["panels"][0]["x"][0]) + ","));  // with all its digits
  CHECK(has(out_text(scratch, "separability.csv"), "," + json_text(probes["models"][0]["value"][0]["std"])));
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 1 + 2 * 4 * 80);
  const std::string svg = out_text(scratch, "separability.svg");
  check_has(svg, {"values as attention reads them", "own values", "chance", ">lime<", ">llama<", "(the paper's: 84)"});
  CHECK(std::filesystem::exists(scratch.file("out") + "/separability.2.safetensors"));
  check_outcome(call(), Exit::done, "wrote");
  CHECK(out_json(scratch, "separability") == probes);
  CHECK(out_json(scratch, "tsne") == planes);

  const auto refused = [&](std::vector<std::string> more, const std::string& says) {
    more.insert(more.begin(), {"analyze", "--model", scratch.file("llama"), "--data", o.data.spec, "--what"});
    check_outcome(run_program_inside(scratch, more), Exit::usage, says);
  };
  refused({"separability", "--words", "is", "never"}, "too few places to compare");
  refused({"tsne", "--words", "is", "is"}, "are the same token");
  refused({"tsne", "--ids", "32", "256"}, "--ids");
  refused({"tsne", "--layers", "1", "x"}, "--layers");
  refused({"tsne", "--layers", "3", "--split", "all", "--tsne-vectors", "20"}, "--layers");
}

TEST_CASE("analyze: where the first model is left out, the next keeps its name and its number") {
  const TempDir scratch;
  std::string text;
  for (int i = 0; i < 300; ++i) text += " is are";
  AnalysisOptions o;
  o.data.spec = text_file(scratch, text), o.split = "all", o.out = scratch.path.string();
  for (const auto& [model, layers] : {std::pair("shallow", "2"), std::pair("deep", "3")}) {
    o.models.push_back(scratch.file(model));
    train_one_step(scratch, "llama", layers, o.data.spec, model);
  }
  Subject shallow(o.models[0], o), deep(o.models[1], o);
  const auto shared = std::make_shared<OccurrenceOptions>();
  for (const bool probe : {true, false}) {
    const auto analysis = probe ? separability_analysis(shared) : tsne_analysis(shared);
    CLI::App app;
    if (probe) add_occurrence_flags(app, *shared);
    else analysis->add_flags(app);
    app.parse(probe ? "--ids 105 97 --keep-vectors true" : "--layers 2 --tsne-vectors 30");
    if (!probe) check_fails(Exit::usage, {"--layers 2", "0 to 1"}, [&] { analysis->measure(shallow, o); });
    analysis->measure(deep, o);
    CHECK(has(analysis->finding(o).svg, probe ? ">deep<" : ">deep: hidden states<"));
    CHECK(!std::filesystem::exists(scratch.file(analysis->name() + ".1.safetensors")));
    CHECK(has(read_text(scratch.file(analysis->name() + ".2.safetensors")), scratch.file("deep")));
  }
  CHECK(text_of_each({"a", "b"}, {"same", "same"}) == "same");
  CHECK(text_of_each({"a", "b"}, {"40", "20"}) == "a: 40; b: 20");
}
