#include "data/prosqa.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <numeric>
#include <sstream>

#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

using namespace prosqa;

constexpr int max_nodes = 28;

// A graph while it grows: small fixed arrays, because a data set has hundreds of thousands of graphs.
struct Growth {
  std::array<int, max_nodes> label{1, 2}, depth{};  // depth: distance to the own root, 0 for labels 0 and 3
  std::array<bool, max_nodes> has_parent{}, has_child{};
  std::vector<ProsqaGraph::Edge> edges;

  bool is_isolated(int node) const { return node > 1 && !has_parent[node] && !has_child[node]; }
};

int poisson(double mean, Random& random) {
  const double floor = std::exp(-mean);
  int n = 0;
  for (double product = random.uniform(); product > floor; product *= random.uniform()) ++n;
  return n;
}

// Draws the parents of `node` among the nodes before it.
void grow(Growth& g, int node, Random& random) {
  const double mode = random.uniform();
  const int only = mode < .35 ? 1 : mode < .80 ? 2 : -1;  // the label that parents must have; -1: any
  std::array<int, max_nodes> candidate{};
  std::array<double, max_nodes> weight{};
  int n = 0;
  double total = 0;
  for (int p = 0; p < node; ++p) {
    if (only >= 0 && g.label[p] != only) continue;
    candidate[n] = p;
    weight[n] = 1 + 1.5 * g.depth[p];
    total += weight[n++];
  }
  int label = 0;
  for (int wanted = std::min(poisson(1.5, random), n); wanted > 0; --wanted) {
    double left = random.uniform() * total;
    int i = 0;
    while (i + 1 < n && left >= weight[i]) left -= weight[i++];
    const int parent = candidate[i];
    total -= weight[i];
    candidate[i] = candidate[--n];
    weight[i] = weight[n];
    g.edges.push_back({parent, node});
    g.has_child[parent] = g.has_parent[node] = true;
    label |= g.label[parent];
  }
  g.label[node] = label;
  if (label != 1 && label != 2) return;
  int depth = max_nodes;
  for (auto e = g.edges.rbegin(); e != g.edges.rend() && e->child == node; ++e)
    if (g.label[e->parent] == label) depth = std::min(depth, g.depth[e->parent]);
  g.depth[node] = depth + 1;
}

// The leaves that descend from this root alone.
std::vector<int> family_leaves(const Growth& g, int root) {
  std::vector<int> leaves;
  for (int i = 2; i < max_nodes; ++i)
    if (g.label[i] == root + 1 && !g.has_child[i]) leaves.push_back(i);
  return leaves;
}

int choose(const std::vector<int>& from, Random& random) {
  return from[static_cast<size_t>(random.below(static_cast<int64_t>(from.size())))];
}

template <class T>
void shuffle(std::vector<T>& v, Random& random) {
  for (int64_t left = static_cast<int64_t>(v.size()); left > 1; --left)
    std::swap(v[static_cast<size_t>(left - 1)], v[static_cast<size_t>(random.below(left))]);
}

// One of the shortest paths from the root to the target, each with the same probability.
std::vector<int> shortest_path(const Growth& g, int root, int target, Random& random) {
  const auto is_step = [&](const ProsqaGraph::Edge& e) {
    return g.label[e.parent] == root + 1 && g.label[e.child] == root + 1 && g.depth[e.child] == g.depth[e.parent] + 1;
  };
  std::array<int64_t, max_nodes> paths{};  // from the root to each node
  paths[static_cast<size_t>(root)] = 1;
  for (const auto& e : g.edges)
    if (is_step(e)) paths[static_cast<size_t>(e.child)] += paths[static_cast<size_t>(e.parent)];
  std::vector<int> path = {target};
  while (path.back() != root) {
    int64_t nth = random.below(paths[static_cast<size_t>(path.back())]);
    for (const auto& e : g.edges) {
      if (e.child != path.back() || !is_step(e)) continue;
      nth -= paths[static_cast<size_t>(e.parent)];
      if (nth < 0) {
        path.push_back(e.parent);
        break;
      }
    }
  }
  std::reverse(path.begin(), path.end());
  return path;
}

// Chooses root, target, distractor and path; false if the graph does not offer them.
bool ask(ProsqaGraph& graph, const Growth& g, Random& random) {
  const std::array<std::vector<int>, 2> leaves = {family_leaves(g, 0), family_leaves(g, 1)};
  if (leaves[0].empty() || leaves[1].empty()) return false;
  std::array<int, 2> farthest{};
  for (size_t r = 0; r < 2; ++r)
    for (int leaf : leaves[r]) farthest[r] = std::max(farthest[r], g.depth[leaf]);
  const int longest = std::max(farthest[0], farthest[1]);
  if (longest < 3 || longest > 6) return false;
  const size_t root = farthest[0] == farthest[1] ? static_cast<size_t>(random.below(2)) : farthest[1] > farthest[0];
  std::vector<int> targets = leaves[root];
  std::erase_if(targets, [&](int leaf) { return g.depth[leaf] != longest; });
  graph.root = static_cast<int>(root);
  graph.target = choose(targets, random);
  graph.distractor = choose(leaves[1 - root], random);
  graph.path = shortest_path(g, graph.root, graph.target, random);
  return true;
}

// Leaves out the nodes that have neither parents nor children, and closes the gaps in the numbering.
void finish(ProsqaGraph& graph, const Growth& g) {
  std::array<int, max_nodes> renamed{};
  for (int i = 0; i < max_nodes; ++i) {
    renamed[i] = static_cast<int>(graph.label.size());
    if (!g.is_isolated(i)) graph.label.push_back(g.label[i]);
  }
  for (const auto& e : g.edges) graph.edges.push_back({renamed[e.parent], renamed[e.child]});
  for (int* node : {&graph.root, &graph.target, &graph.distractor}) *node = renamed[*node];
  for (int& node : graph.path) node = renamed[node];
}

void append(std::vector<uint8_t>& to, std::initializer_list<int> tokens) {
  for (int token : tokens) to.push_back(static_cast<uint8_t>(token));
}

bool is_entity(int32_t token) { return token >= first_entity && token < first_concept; }
bool is_concept(int32_t token) { return token >= first_concept && token < prosqa::vocab_size; }

void append_statement(std::vector<uint8_t>& to, int parent, int child) {
  if (!is_entity(parent)) append(to, {every});
  append(to, {parent, is, a, child, period});
}

// A random name for every node: entities for those without parents, concepts for the others.
std::vector<int> name_nodes(const ProsqaGraph& graph, Random& random) {
  std::vector<int> entity(entities), concept_(concepts), names(graph.label.size(), -1);
  std::iota(entity.begin(), entity.end(), first_entity);
  std::iota(concept_.begin(), concept_.end(), first_concept);
  shuffle(entity, random);
  shuffle(concept_, random);
  size_t used_entities = 0, used_concepts = 0;
  for (const auto& e : graph.edges) {
    int& name = names[static_cast<size_t>(e.child)];
    if (name < 0) name = concept_[used_concepts++];
  }
  for (int& name : names)
    if (name < 0) name = entity[used_entities++];
  return names;
}

bool has_too_many_entities(const ProsqaGraph& graph) {
  std::array<bool, max_nodes> has_parent{};
  for (const auto& e : graph.edges) has_parent[static_cast<size_t>(e.child)] = true;
  return static_cast<int>(graph.label.size()) - std::count(has_parent.begin(), has_parent.end(), true) > entities;
}

// "<subject> is a <object> ." or "Every <subject> is a <object> .", taken apart.
struct Statement {
  int32_t subject, object;
  bool operator==(const Statement&) const = default;
};

// False if the tokens up to `end` are no statement.
template <class It>
bool parse_statement(It begin, It end, Statement& out) {
  const bool is_about_concept = begin != end && *begin == every;
  if (is_about_concept) ++begin;
  if (end - begin != 5 || begin[1] != is || begin[2] != a || begin[4] != period) return false;
  out = {begin[0], begin[3]};
  return (is_about_concept ? is_concept(out.subject) : is_entity(out.subject)) && is_concept(out.object);
}

std::vector<Statement> statements_of(std::span<const uint8_t> question) {
  std::vector<Statement> statements;
  for (auto begin = question.begin(); begin != question.end();) {
    const auto mark = std::find(begin, question.end(), period);
    if (mark == question.end()) break;  // what is left is the question itself
    CHECK_THAT(parse_statement(begin, mark + 1, statements.emplace_back()), "a question holds no statement");
    begin = mark + 1;
  }
  return statements;
}

// The end of every prompt: Is <entity> a <option> or <option> ? <nl>
struct Question {
  int32_t entity;
  std::array<int32_t, 2> options;
};

Question question_of(std::span<const uint8_t> prompt) {
  const auto q = prompt.last(8);
  return {q[1], {q[3], q[5]}};
}

// Whether the lines lead over given statements from the entity to the concept `to`.
bool is_valid_chain(std::span<const int32_t> lines, const std::vector<Statement>& given, int32_t entity, int32_t to) {
  int32_t at = entity;
  while (!lines.empty()) {
    const auto end = std::find(lines.begin(), lines.end(), newline);
    Statement step;
    if (end == lines.end() || !parse_statement(lines.begin(), end, step)) return false;
    if (step.subject != at || std::find(given.begin(), given.end(), step) == given.end()) return false;
    at = step.object;
    lines = lines.subspan(static_cast<size_t>(end - lines.begin()) + 1);
  }
  return at == to;
}

// The words of a text: punctuation stands apart, a line break is <nl>.
std::vector<std::string> split_text(const std::string& text) {
  std::string spaced;
  for (const char c : text)
    spaced += c == '.' || c == '?' ? std::string{' ', c} : c == '\n' ? std::string(" <nl> ") : std::string(1, c);
  std::istringstream in(spaced);
  return {std::istream_iterator<std::string>(in), {}};
}

int32_t id_of(const std::string& word) {  // -1: no word of this task
  const auto& words = prosqa_words();
  const auto found = std::find(words.begin(), words.end(), word);
  return found == words.end() ? -1 : static_cast<int32_t>(found - words.begin());
}

// The published text in our words, behind those that are there.
void append_text(std::vector<uint8_t>& to, const std::string& text, const std::string& where) {
  for (const std::string& word : split_text(text)) {
    const int32_t id = id_of(word);
    if (id < 0) fail(Exit::bad_data, where, ": '", excerpt(word), "' is no word of this task");
    to.push_back(static_cast<uint8_t>(id));
  }
}

// Whether a prompt is statements and then a question, and what follows ends in an answer to it.
bool is_sound(const TaskSample& sample) {
  const std::span<const uint8_t> all(sample.tokens), prompt = all.first(static_cast<size_t>(sample.prompt));
  if (prompt.size() < 8 || all.size() < prompt.size() + 7) return false;
  const auto q = prompt.last(8), gold = all.last(7);
  const bool asks = q[0] == is_asked && is_entity(q[1]) && q[2] == a && is_concept(q[3]) && q[4] == or_ &&
                    is_concept(q[5]) && q[6] == question_mark && q[7] == newline;
  const bool answers = gold[0] == hashes && gold[1] == q[1] && gold[2] == is && gold[3] == a &&
                       (gold[4] == q[3] || gold[4] == q[5]) && gold[5] == period;
  for (auto begin = prompt.begin(); begin != prompt.end() - 8;) {
    const auto mark = std::find(begin, prompt.end() - 8, period);
    Statement statement;
    if (mark == prompt.end() - 8 || !parse_statement(begin, mark + 1, statement)) return false;
    begin = mark + 1;
  }
  return asks && answers;
}

// The items of a file of the published form: a list of objects with "question", "steps" and "answer".
std::vector<TaskSample> read_items(const std::string& path) {
  constexpr int64_t max_bytes = int64_t{1} << 30;
  const nlohmann::json all = parse_json(read_file(path, max_bytes), path);
  if (!all.is_array() || all.empty()) fail(Exit::bad_data, path, ": is no list of questions");
  std::vector<TaskSample> items;
  for (const nlohmann::json& item : all) {
    const std::string where = str(path, ": item ", items.size() + 1);
    const auto text = [&](const nlohmann::json& value) {
      if (!value.is_string()) fail(Exit::bad_data, where, ": lacks \"question\", \"steps\" or \"answer\"");
      return value.get<std::string>();
    };
    if (!item.is_object()) fail(Exit::bad_data, where, " is no object");
    TaskSample& sample = items.emplace_back();
    append_text(sample.tokens, text(item.value("question", nlohmann::json())) + "\n", where);
    sample.prompt = static_cast<int64_t>(sample.tokens.size());
    const nlohmann::json steps = item.value("steps", nlohmann::json());
    if (!steps.is_array()) text(nlohmann::json());
    for (const nlohmann::json& step : steps) append_text(sample.tokens, text(step) + "\n", where);
    append_text(sample.tokens, "### " + text(item.value("answer", nlohmann::json())), where);
    append(sample.tokens, {prosqa::eos});
    if (static_cast<int64_t>(sample.tokens.size()) > prosqa::context + 1 || !is_sound(sample))
      fail(Exit::bad_data, where, " is no question of this task, or longer than ", prosqa::context, " words");
  }
  return items;
}

}  // namespace

const std::vector<std::string>& prosqa_words() {
  // <nl> and not a line break, because words are separated by whitespace.
  static const std::vector<std::string> words = {
      "<pad>",   "<eos>",    "<nl>",    "###",     ".",       "?",      "Every",  "Is",      "is",      "a",
      "or",      "Alex",     "Bob",     "Carol",   "Davis",   "Eva",    "Fae",    "Gabriel", "Jack",    "Max",
      "Oliver",  "Polly",    "Rex",     "Sally",   "Sam",     "Stella", "Tom",    "Wren",    "bompus",  "boompus",
      "brimpus", "chorpus",  "dumpus",  "felpus",  "fompus",  "gerpus", "gorpus", "grimpus", "gwompus", "hilpus",
      "impus",   "jelpus",   "jompus",  "kerpus",  "lempus",  "lorpus", "numpus", "quimpus", "rempus",  "rompus",
      "rorpus",  "scrompus", "shumpus", "sterpus", "storpus", "terpus", "timpus", "tumpus",  "vumpus",  "worpus",
      "wumpus",  "yerpus",   "yimpus",  "yumpus",  "zhorpus", "zumpus"};
  return words;
}

ProsqaGraph prosqa_graph(Random& random) {
  while (true) {
    Growth g;
    for (int node = 2; node < max_nodes; ++node) grow(g, node, random);
    ProsqaGraph graph;
    if (!ask(graph, g, random)) continue;
    finish(graph, g);
    if (!has_too_many_entities(graph)) return graph;
  }
}

TaskSample prosqa_text(const ProsqaGraph& graph, Random& random) {
  const std::vector<int> names = name_nodes(graph, random);
  const auto name = [&](int node) { return names[static_cast<size_t>(node)]; };
  std::vector<ProsqaGraph::Edge> edges = graph.edges;
  shuffle(edges, random);
  TaskSample sample;
  auto& text = sample.tokens;
  for (const auto& e : edges) append_statement(text, name(e.parent), name(e.child));
  int first = name(graph.target), second = name(graph.distractor);
  if (random.below(2) == 1) std::swap(first, second);
  append(text, {is_asked, name(graph.root), a, first, or_, second, question_mark, newline});
  sample.prompt = static_cast<int64_t>(text.size());
  for (size_t i = 1; i < graph.path.size(); ++i) {
    append_statement(text, name(graph.path[i - 1]), name(graph.path[i]));
    append(text, {newline});
  }
  append(text, {hashes, name(graph.root), is, a, name(graph.target), period, prosqa::eos});
  return sample;
}

ProsqaSource::ProsqaSource(int64_t seq_len) : TaskSource({seq_len, prosqa::vocab_size, prosqa::pad, prosqa::eos}) {}

Task::Verdict ProsqaSource::judge(int64_t index, const std::vector<int32_t>& generated) const {
  const std::span<const uint8_t> given = prompt_tokens(index), gold = sequence(index).last(6).first(5);
  const std::vector<int32_t> text = cut_at_eos(generated, prosqa::eos).tokens;
  const auto mark = std::find(text.rbegin(), text.rend(), hashes).base();  // right behind the last ###
  if (mark == text.begin()) return {false, false};
  const bool answer = std::equal(mark, text.end(), gold.begin(), gold.end());
  const Question question = question_of(given);
  Statement claim;
  if (!parse_statement(mark, text.end(), claim) || claim.subject != question.entity) return {answer, false};
  const bool names_option = claim.object == question.options[0] || claim.object == question.options[1];
  const std::span<const int32_t> lines(text.begin(), mark - 1);
  return {answer, names_option && is_valid_chain(lines, statements_of(given), question.entity, claim.object)};
}

bool ProsqaSource::is_hard(int64_t index) const {
  const auto given = prompt_tokens(index);
  const auto [first, second] = question_of(given).options;
  const int32_t target = sequence(index).last(3)[0], other = target == first ? second : first;
  const auto mentions = [&](int32_t name) { return std::count(given.begin(), given.end(), name); };
  return mentions(target) >= mentions(other);
}

std::string ProsqaSource::text_of(std::span<const uint8_t> words) const {
  std::string text;
  for (const uint8_t word : words) {
    if (word == prosqa::pad || word == prosqa::eos) continue;
    const bool joined = text.empty() || text.ends_with('\n') || word == period || word == question_mark;
    text += word == newline ? "\n" : (joined ? "" : " ") + prosqa_words()[word];
  }
  return text;
}

std::vector<int32_t> ProsqaSource::words_of(const std::string& text) const {
  std::vector<int32_t> words;
  for (const std::string& word : split_text(text)) words.push_back(id_of(word));
  return words;
}

TaskSplits open_prosqa(const DataOptions& options, const std::string& file) {
  const int64_t T = options.seq_len ? options.seq_len : prosqa::context;
  if (T < prosqa::context)
    fail(Exit::usage, "prosqa needs a sequence length of at least ", prosqa::context, ", not ", T);
  const auto draw = [](Random& random) {
    // About one graph in ten thousand is too long. The limit does not depend on T, so neither do the data.
    while (true) {
      TaskSample sample = prosqa_text(prosqa_graph(random), random);
      if (static_cast<int64_t>(sample.tokens.size()) <= prosqa::context + 1) return sample;
    }
  };
  auto train = std::make_unique<ProsqaSource>(T), test = std::make_unique<ProsqaSource>(T);
  if (file.empty())
    return fill_task(options, "prosqa", std::move(train), 20000, std::move(test), 500, prosqa_words(), draw);
  TaskSource::Seen seen;
  const std::vector<TaskSample> items = read_items(file);
  const int64_t available = static_cast<int64_t>(items.size());
  auto next = items.begin();
  test->fill(count_samples(file, "test", options.test_samples, available), seen, [&] {
    if (next == items.end()) fail(Exit::bad_data, file, ": has an item twice");
    return *next++;
  });
  Random random(options.seed, stream_of("prosqa.train"));
  train->fill(options.train_samples ? options.train_samples : 20000, seen, [&] { return draw(random); });
  return {std::move(train), std::move(test), Tokenizer::words(prosqa_words())};
}

}  // namespace crossply
