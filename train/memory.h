// The memory that training takes: what it will be, before any of it is allocated, and what it was.
#pragma once

#include <string>
#include <vector>

#include "eval/batch_model.h"
#include "train/options.h"

namespace crossply {

struct MemoryPart {
  std::string name;
  double bytes;
};
// What training by these complete options takes. On a GPU that of its arrays only; on a CPU the peak of resident
// memory, to about a tenth: the scratch of the kernels is estimated. tape: recorded and planned for the layout.
std::vector<MemoryPart> memory_parts(const TrainOptions& options, ParameterTable& params, const Tape& tape,
                                     const Layout& layout);
double total(const std::vector<MemoryPart>& parts);

double peak_memory();  // bytes that this process had resident at most

}  // namespace crossply
