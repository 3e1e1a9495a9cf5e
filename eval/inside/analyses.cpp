// The analyses of the program `analyze`.
#include "eval/inside/analysis.h"

namespace crossply {

std::vector<std::unique_ptr<Analysis>> all_analyses() {
  std::vector<std::unique_ptr<Analysis>> list;
  list.push_back(attention_analysis());
  list.push_back(sae_analysis());
  return list;
}

}  // namespace crossply
