// ProsQA: follow a chain of "is a" statements through a random graph to tell which of two concepts an entity is.
//
//   Tom is a terpus . Every terpus is a brimpus . ... Is Tom a lempus or scrompus ? <nl>      prompt, not scored
//   Tom is a terpus . <nl> Every terpus is a brimpus . <nl> ... ### Tom is a lempus . <eos>   scored
//
// The graph grows from two roots, and every node carries a label: bit 1 if it descends from node 0, bit 2 if from node
// 1. The target is a farthest leaf of one root, the distractor a leaf of the other. The weights are fitted to the
// published splits, and tests/data/test_prosqa.cpp holds the generator to their statistics.
#pragma once

#include <string>
#include <vector>

#include "data/task_source.h"

namespace crossply {

namespace prosqa {
constexpr uint8_t pad = 0, eos = 1, newline = 2, hashes = 3, period = 4, question_mark = 5, every = 6, is_asked = 7,
                  is = 8, a = 9, or_ = 10;
constexpr int32_t first_entity = 11, entities = 17, first_concept = first_entity + entities, concepts = 38,
                  vocab_size = first_concept + concepts;
constexpr int64_t context = 384;
}  // namespace prosqa

const std::vector<std::string>& prosqa_words();  // by id

struct ProsqaGraph {
  struct Edge {
    int parent, child;  // "<parent> is a <child>"; parent < child
  };
  std::vector<Edge> edges;  // grouped by child, increasing
  std::vector<int> label;   // (nodes) the roots are nodes 0 and 1
  int root = 0, target = 0, distractor = 0;
  std::vector<int> path;  // a shortest one: root, ..., target
};

ProsqaGraph prosqa_graph(Random& random);
// Names the nodes, shuffles the statements and the two options, and writes the text.
TaskSample prosqa_text(const ProsqaGraph& graph, Random& random);

class ProsqaSource : public TaskSource {
 public:
  explicit ProsqaSource(int64_t seq_len = prosqa::context);
  int64_t max_new_tokens() const override { return 128; }
  // answer: what follows the last ### is the answer sentence. steps: every line before it is a given statement, the
  // first starts at the entity, each next one where the last ended, the final one at the option that the answer names.
  Verdict judge(int64_t index, const std::vector<int32_t>& generated) const override;
  // Counting which option fewer statements mention finds two thirds of the answers; hard is where it errs or ties.
  bool is_hard(int64_t index) const override;
  // As published: "Tom is a terpus. ... Is Tom a lempus or scrompus?\nTom is a terpus.\n ... ### Tom is a lempus."
  std::string text_of(std::span<const uint8_t> words) const override;
  std::vector<int32_t> words_of(const std::string& text) const override;
};

// file: of the published form, whose questions are then the test set, and in no training set; "": both are generated.
// Throws Exit::no_input, Exit::bad_data for what is no such file.
TaskSplits open_prosqa(const DataOptions& options, const std::string& file = "");

}  // namespace crossply
