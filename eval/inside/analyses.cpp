// The analyses of the program `analyze`.
#include "eval/inside/occurrences.h"

namespace crossply {

std::vector<std::unique_ptr<Analysis>> all_analyses() {
  std::vector<std::unique_ptr<Analysis>> list;
  const auto classes = std::make_shared<OccurrenceOptions>();
  list.push_back(lens_analysis());
  list.push_back(entropy_analysis());
  list.push_back(similarity_analysis());
  list.push_back(separability_analysis(classes));
  list.push_back(tsne_analysis(classes));
  list.push_back(routing_analysis());
  list.push_back(circuits_analysis());
  list.push_back(gates_analysis());
  list.push_back(exits_analysis());
  list.push_back(attention_analysis());
  list.push_back(sinks_analysis());
  list.push_back(maps_analysis());
  list.push_back(sae_analysis());
  return list;
}

}  // namespace crossply
