// The analyses of the program `analyze`.
#include "eval/inside/occurrences.h"

namespace crossply {

std::vector<std::unique_ptr<Analysis>> all_analyses() {
  std::vector<std::unique_ptr<Analysis>> list;
  list.push_back(attention_analysis());
  const auto classes = std::make_shared<OccurrenceOptions>();
  list.push_back(separability_analysis(classes));
  list.push_back(tsne_analysis(classes));
  return list;
}

}  // namespace crossply
