#include "data/prosqa.h"

#include <array>
#include <map>

#include "engine/io/json.h"
#include "tests/support/data_check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Means = std::map<std::string, double>;

// Means over graphs, computed from the edges alone, so that they say the same of generated and of published graphs.
struct Figures {
  double graphs = 0;
  Means sums;
  std::array<double, 4> label{};  // counts without the two roots
  double common_leaves = 0;       // nodes of both families that are leaves

  void add(int n, const std::vector<ProsqaGraph::Edge>& graph_edges, int root, int target) {
    std::vector<int> labels(static_cast<size_t>(n), 0), parents(labels), children(labels);
    std::vector<int> distance(labels.size(), -1), paths(labels);
    const auto at = [](std::vector<int>& v, int i) -> int& { return v[static_cast<size_t>(i)]; };
    labels[0] = 1, labels[1] = 2, at(distance, root) = 0, at(paths, root) = 1;
    for (const auto& [p, c] : graph_edges) {  // grouped by child, increasing: the parent is finished
      REQUIRE(p < c);
      ++at(parents, c), ++at(children, p);
      at(labels, c) |= at(labels, p);
      const int via = at(distance, p) + 1;
      if (via == 0) continue;  // the parent is out of the root's reach
      if (at(distance, c) < 0 || via < at(distance, c)) at(distance, c) = via, at(paths, c) = 0;
      if (via == at(distance, c)) at(paths, c) += at(paths, p);
    }
    ++graphs, sums["nodes"] += n, sums["edges"] += static_cast<double>(graph_edges.size());
    sums["steps"] += at(distance, target), sums["shortest paths"] += at(paths, target), sums["root is 1"] += root;
    sums["entities"] += static_cast<double>(std::count(parents.begin(), parents.end(), 0));
    for (int i = 2; i < n; ++i) {
      ++label[static_cast<size_t>(at(labels, i))];
      common_leaves += at(labels, i) == 3 && at(children, i) == 0;
    }
  }
  void add(const ProsqaGraph& graph) {
    add(static_cast<int>(graph.label.size()), graph.edges, graph.root, graph.target);
  }
  Means means() const {
    Means out = {{"leaves of both", common_leaves / label[3]}};
    for (const auto& [name, sum] : sums) out[name] = sum / graphs;
    return out;
  }
  std::array<double, 4> label_shares() const {
    const double all = label[0] + label[1] + label[2] + label[3];
    return {label[0] / all, label[1] / all, label[2] / all, label[3] / all};
  }
};

void check_means(const Means& got, const Means& want, double tolerance) {
  for (const auto& mean : want)
    CHECK_MESSAGE(std::abs(got.at(mean.first) / mean.second - 1) < tolerance,
                  mean.first << ": " << got.at(mean.first) << ", expected " << mean.second);
}

// The published text in our words: punctuation stands apart, a line break is <nl>.
std::string words_of(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '.' || c == '?') out += ' ';
    out += c == '\n' ? " <nl> " : std::string(1, c);
  }
  return out;
}

TaskSample sample_of(const Tokenizer& tokenizer, const std::string& prompt, const std::string& rest) {
  const auto first = tokenizer.encode(prompt), all = tokenizer.encode(prompt + " " + rest);
  return {{all.begin(), all.end()}, static_cast<int64_t>(first.size())};
}

TaskSample sample_of(const nlohmann::json& item, const Tokenizer& tokenizer) {
  std::string prompt = item["question"].get<std::string>() + "\n", rest;
  for (const auto& step : item["steps"]) rest += step.get<std::string>() + "\n";
  rest += "### " + item["answer"].get<std::string>() + " <eos>";
  return sample_of(tokenizer, words_of(prompt), words_of(rest));
}

// The published splits where they are at hand; they are not part of the project.
nlohmann::json published_items() {
  for (const std::string dir : {"../shared/data/", "../../shared/data/"}) {
    if (!std::filesystem::exists(dir + "prosqa_valid.json")) continue;
    auto items = known_json(read_text(dir + "prosqa_valid.json"));
    const auto more = known_json(read_text(dir + "prosqa_test.json"));
    items.insert(items.end(), more.begin(), more.end());
    return items;
  }
  return {};
}

double share_of_hard(const ProsqaSource& source) {
  double hard = 0;
  for (int64_t i = 0; i < source.size(); ++i) hard += source.is_hard(i);
  return hard / static_cast<double>(source.size());
}

}  // namespace

TEST_CASE("prosqa: 20,000 graphs have the statistics of the published splits") {
  Figures figures;
  Random random(1, 2);
  std::map<size_t, int> steps;
  for (int i = 0; i < 20000; ++i) {
    const ProsqaGraph graph = prosqa_graph(random);
    figures.add(graph);
    ++steps[graph.path.size() - 1];
  }
  const Means want = {{"nodes", 22.8},    {"edges", 36.2},    {"steps", 3.81},        {"shortest paths", 1.63},
                      {"entities", 2.58}, {"root is 1", .61}, {"leaves of both", .88}};
  check_means(figures.means(), want, .02);
  const std::array<double, 4> labels = {.034, .391, .514, .061}, got = figures.label_shares();
  for (size_t i = 0; i < 4; ++i) CHECK_MESSAGE(std::abs(got[i] - labels[i]) < .01, "label " << i << ": " << got[i]);
  CHECK((steps.begin()->first == 3 && steps.rbegin()->first == 6));
}

TEST_CASE("prosqa: every graph is what the task promises") {
  Random random(3, 4);
  for (int g = 0; g < 2000; ++g) {
    const ProsqaGraph graph = prosqa_graph(random);
    const int n = static_cast<int>(graph.label.size());
    std::set<int> from_root = {graph.root};
    std::set<std::pair<int, int>> edges;
    std::vector<int> degree(static_cast<size_t>(n), 0), children(degree);
    for (const auto& [p, c] : graph.edges) {
      REQUIRE((0 <= p && p < c && c < n));
      CHECK(edges.emplace(p, c).second);
      ++degree[static_cast<size_t>(p)], ++degree[static_cast<size_t>(c)], ++children[static_cast<size_t>(p)];
      if (from_root.count(p)) from_root.insert(c);
    }
    for (int i = 2; i < n; ++i) CHECK(degree[static_cast<size_t>(i)] > 0);
    CHECK((graph.root == 0 || graph.root == 1));
    CHECK(children[static_cast<size_t>(graph.target)] == 0);
    CHECK(children[static_cast<size_t>(graph.distractor)] == 0);
    CHECK(from_root.count(graph.target) == 1);
    CHECK(from_root.count(graph.distractor) == 0);
    CHECK((graph.path.front() == graph.root && graph.path.back() == graph.target));
    for (size_t i = 1; i < graph.path.size(); ++i) CHECK(edges.count({graph.path[i - 1], graph.path[i]}) == 1);
    Figures one;  // the path is a shortest one
    one.add(graph);
    CHECK(one.sums["steps"] == static_cast<double>(graph.path.size() - 1));
  }
}

TEST_CASE("prosqa: the text of a sample") {
  DataOptions options = task_options("prosqa", 3000, 300, DataOptions().seed);
  const Dataset data = open_dataset(options), again = open_dataset(options);
  const auto& source = dynamic_cast<const ProsqaSource&>(*data.train);
  CHECK((source.seq_len() == 384 && source.vocab_size() == 66 && data.tokenizer.vocab_size() == 66));
  std::set<std::vector<int32_t>> prompts;
  double target_first = 0, tokens = 0;
  std::map<int32_t, int> uses;
  for (int64_t i = 0; i < source.size(); ++i) {
    const auto prompt = source.prompt(i), rest = solution_of(source, i);
    prompts.insert(prompt);
    tokens += static_cast<double>(prompt.size() + rest.size());
    target_first += prompt[prompt.size() - 5] == rest[rest.size() - 3];
    std::set<int32_t> names;
    for (int32_t token : prompt)
      if (token >= prosqa::first_entity) names.insert(token);
    for (int32_t name : names) ++uses[name];
    const auto v = source.judge(i, rest);
    CHECK((v.answer && v.steps && static_cast<int64_t>(rest.size()) <= source.max_new_tokens()));
    CHECK(read_sample(source, i) == read_sample(*again.train, i));
  }
  for (int64_t i = 0; i < data.test->size(); ++i) prompts.insert(data.test->task()->prompt(i));
  CHECK(prompts.size() == 3300);
  CHECK(std::abs(target_first / 3000 - .5) < .05);  // five standard deviations
  CHECK(tokens / 3000 == doctest::Approx(251).epsilon(.02));
  // Names are uniform: about 2.58 of 17 entities and 20.2 of 38 concepts a graph.
  CHECK(uses.size() == 55);
  for (const auto& [name, count] : uses)
    CHECK(count / 3000. == doctest::Approx(name < prosqa::first_concept ? 2.58 / 17 : 20.2 / 38).epsilon(.2));
  CHECK(share_of_hard(source) == doctest::Approx(.495).epsilon(.08));

  const Sample s = read_sample(source, 0);
  const auto prompt = source.prompt(0), rest = solution_of(source, 0);
  std::vector<int32_t> all = prompt;
  all.insert(all.end(), rest.begin(), rest.end());
  for (size_t t = 0; t < 384; ++t) {
    CHECK(s.tokens[t] == (t < all.size() ? all[t] : prosqa::pad));
    CHECK(s.targets[t] == (t + 1 >= prompt.size() && t + 1 < all.size() ? all[t + 1] : -1));
  }
  options.seq_len = 256;
  check_fails(Exit::usage, {"at least 384"}, [&] { open_dataset(options); });
}

TEST_CASE("prosqa: the judge") {
  const Tokenizer words = Tokenizer::words(prosqa_words());
  ProsqaSource source;
  TaskSource::Seen seen;
  source.fill(1, seen, [&] {
    return sample_of(words,
                     "Every terpus is a brimpus . Tom is a terpus . Every brimpus is a lempus . Tom is a dumpus . "
                     "Every dumpus is a lempus . Davis is a scrompus . Is Tom a lempus or scrompus ? <nl>",
                     "Tom is a dumpus . <nl> Every dumpus is a lempus . <nl> ### Tom is a lempus . <eos>");
  });
  const auto verdict = [&](const std::string& text) { return verdict_of(source, words.encode(text)); };
  const std::string right = "### Tom is a lempus . <eos>";
  CHECK(verdict("Tom is a dumpus . <nl> Every dumpus is a lempus . <nl> " + right) == "answer+steps");
  // Another valid chain, even a longer one.
  CHECK(verdict("Tom is a terpus . <nl> Every terpus is a brimpus . <nl> Every brimpus is a lempus . <nl> " + right) ==
        "answer+steps");
  CHECK(verdict("Tom is a dumpus . <nl> Every dumpus is a lempus . <nl> " + right + " Tom ###") == "answer+steps");
  CHECK(verdict(right) == "answer");                                                                // no chain
  CHECK(verdict("Every dumpus is a lempus . <nl> " + right) == "answer");                           // not from Tom
  CHECK(verdict("Tom is a dumpus . <nl> Every brimpus is a lempus . <nl> " + right) == "answer");   // a gap
  CHECK(verdict("Tom is a brimpus . <nl> Every brimpus is a lempus . <nl> " + right) == "answer");  // never stated
  CHECK(verdict("Tom is a dumpus . <nl> " + right) == "answer");                                    // ends too early
  CHECK(verdict("Tom is a dumpus . Every dumpus is a lempus . <nl> " + right) == "answer");         // one line
  CHECK(verdict("Tom is a dumpus . <nl> Every dumpus is a lempus . " + right) == "answer");
  CHECK(verdict("Tom is a dumpus . <nl> Every dumpus is a lempus . <nl> ### ### Tom is a lempus .") == "answer");
  CHECK(verdict("Davis is a scrompus . <nl> ### Tom is a scrompus . <eos>") == "wrong");
  CHECK(verdict("Tom is a dumpus . <nl> ### Tom is a dumpus . <eos>") == "wrong");  // not an option
  CHECK(verdict("Tom is a lempus . <eos>") == "wrong");
  CHECK(verdict("### Tom is a lempus <eos>") == "wrong");
  CHECK(verdict("###") == "wrong");
  CHECK(verdict("") == "wrong");
  CHECK(!source.judge(0, {-1, 1 << 30, prosqa::hashes, -7}).answer);
  CHECK(source.is_hard(0));  // lempus is stated twice, scrompus once
}

TEST_CASE("prosqa: the published splits read with our words, judge and statistics") {
  const auto items = published_items();
  if (items.empty()) {
    MESSAGE("skipped: there is no ../shared/data/prosqa_valid.json");
    return;
  }
  const Tokenizer words = Tokenizer::words(prosqa_words());
  ProsqaSource source;
  TaskSource::Seen seen;
  auto next = items.begin();
  source.fill(static_cast<int64_t>(items.size()), seen, [&] { return sample_of(*next++, words); });
  CHECK(source.size() == 800);
  double tokens = 0;
  Figures figures;
  for (int64_t i = 0; i < source.size(); ++i) {
    const auto& item = items[static_cast<size_t>(i)];
    tokens += static_cast<double>(source.sequence(i).size());
    const auto v = source.judge(i, solution_of(source, i));
    CHECK((v.answer && v.steps));
    std::vector<ProsqaGraph::Edge> edges;
    for (const auto& edge : item["edges"]) edges.push_back({edge[0].get<int>(), edge[1].get<int>()});
    figures.add(static_cast<int>(item["idx_to_symbol"].size()), edges, item["root"].get<int>(),
                item["target"].get<int>());
  }
  CHECK(figures.sums["steps"] / 800 == doctest::Approx(3.77).epsilon(.002));
  CHECK(tokens / 800 == doctest::Approx(249.5).epsilon(.001));
  CHECK(share_of_hard(source) == doctest::Approx(.5).epsilon(.03));

  Figures ours;
  Random random(5, 6);
  for (int g = 0; g < 20000; ++g) ours.add(prosqa_graph(random));
  // 800 graphs do not pin a mean better: the share of root 1, the least certain, has a standard error of 2.7%.
  check_means(ours.means(), figures.means(), .06);
}

TEST_CASE("prosqa: a file of the published form is the test set, and what is none is refused") {
  const TempDir scratch;
  const std::string path = scratch.file("questions.json");
  nlohmann::json item = {{"question", "Tom is a terpus. Every terpus is a brimpus. Is Tom a lempus or brimpus?"},
                         {"steps", {"Tom is a terpus.", "Every terpus is a brimpus."}},
                         {"answer", "Tom is a brimpus."}};
  const auto open = [&](const nlohmann::json& file) {
    write_text(path, json_text(file));
    DataOptions options;
    options.spec = "prosqa:" + path;
    options.train_samples = 30;
    return open_dataset(options);
  };
  nlohmann::json other = item;
  other["question"] = "Tom is a terpus. Every terpus is a brimpus. Is Tom a brimpus or lempus?";
  const Dataset data = open({item, other});
  CHECK(data.train->size() == 30);
  CHECK(data.test->size() == 2);
  const auto& test = dynamic_cast<const ProsqaSource&>(*data.test);
  const Tokenizer words = Tokenizer::words(prosqa_words());
  const auto all = test.sequence(0);
  CHECK(words.decode({all.begin(), all.end()}) ==
        "Tom is a terpus . Every terpus is a brimpus . Is Tom a lempus or brimpus ? <nl> Tom is a terpus . <nl> Every "
        "terpus is a brimpus . <nl> ### Tom is a brimpus . <eos>");
  CHECK(test.judge(0, solution_of(test, 0)).steps);
  CHECK(test.is_hard(0));  // the answer has two mentions, the other one
  const auto check_refused = [&](const nlohmann::json& file, const std::string& says) {
    check_fails(Exit::bad_data, {"questions.json", says}, [&] { open(file); });
  };
  check_refused({item, item}, "twice");
  check_refused(nlohmann::json::array(), "no list");
  check_refused({{"question", "x"}}, "no list");
  check_refused({3}, "item 1 is no object");
  const std::pair<const char*, nlohmann::json> changes[] = {
      {"question", 3},
      {"question", "Tom is a terpus. Is Tom a lempus or horse?"},
      {"question", "Tom is a terpus. Every is a brimpus. Is Tom a lempus or brimpus?"},
      {"question", "Tom is a terpus."},
      {"question", ""},
      {"steps", "Tom is a terpus."},
      {"steps", {1}},
      {"answer", "Sally is a brimpus."},
      {"answer", "Tom is a gerpus."},
      {"answer", nullptr}};
  for (const auto& [key, value] : changes) {
    CAPTURE(key);
    nlohmann::json bad = item;
    bad[key] = value;
    check_refused({item, bad}, "item 2");
  }
  nlohmann::json longer = item;
  for (int i = 0; i < 100; ++i) longer["steps"].push_back("Tom is a terpus.");
  check_refused(nlohmann::json::array({longer}), "longer than 384 words");
  DataOptions missing;
  missing.spec = "prosqa:" + scratch.file("missing.json");
  check_fails(Exit::no_input, {"missing.json"}, [&] { open_dataset(missing); });
  missing.spec = "prosqa:" + path;
  missing.test_samples = 3;
  write_text(path, json_text(nlohmann::json({item, other})));
  check_fails(Exit::usage, {"3", "2"}, [&] { open_dataset(missing); });
  CHECK(parse_data_spec("prosqa:a/b.json").path == "a/b.json");
  CHECK(parse_data_spec("prosqa:a").kind == DataSpec::Kind::unknown);
}
