// The GPUs that --gpu names, for plans of jobs that run elsewhere.
#pragma once

#include <string>
#include <vector>

#include "engine/dtype.h"

namespace crossply {

// What a GPU's data sheet says, of dense products, and of its links what transfers attain.
struct Gpu {
  std::string name;
  double bf16, fp32;  // FLOP/s
  double memory;      // bytes
  double b_hbm;
  double b_nv;  // sent inside a node by one GPU
  double b_ib;  // sent to other nodes: a network card for each GPU
};
const std::vector<Gpu>& gpus();
std::vector<std::string> gpu_names();
const Gpu& find_gpu(const std::string& name);
// FLOP/s of dense products of this type, of a GPU that describes itself so; 0: not known.
double peak_flops(const std::string& description, Dtype dtype);

}  // namespace crossply
