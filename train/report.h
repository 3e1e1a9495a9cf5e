// What a run says before it starts: its data, and the memory that it will take.
#pragma once

#include <string>
#include <vector>

#include "data/source.h"
#include "train/options.h"
#include "train/replicas.h"

namespace crossply {

// "data: 1,003,776 training tokens in 3,921 sequences of 256; 40 steps x 32 sequences = 0.3 epochs; test set 436
// sequences"
std::string describe_data(const TrainOptions& options, const Dataset& data);

struct MemoryPart {
  std::string name;
  double bytes;
};
// What training by these complete options takes, before any of it is allocated. On a GPU that of its arrays only; on a
// CPU the peak of resident memory, to about a tenth: the scratch of the kernels is estimated. Mapped data files are not
// counted. tape: recorded and planned for the layout.
std::vector<MemoryPart> memory_parts(const TrainOptions& options, ParameterTable& params, const Tape& tape,
                                     const Layout& layout);
double total(const std::vector<MemoryPart>& parts);

double peak_memory();  // bytes that this process had resident at most

}  // namespace crossply
