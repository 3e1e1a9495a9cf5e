// Any bytes as the index of a model whose weights are in two files.
#include "engine/device.h"
#include "kernels/devices.h"
#include "models/disk/model_dir.h"
#include "models/model.h"
#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

namespace {

struct Model {
  Config config;
  std::unique_ptr<Device> device = make_device("cpu");
  ParameterTable params;

  Model() {
    config.vocab_size = 5, config.hidden_size = 4, config.intermediate_size = 3;
    config.num_hidden_layers = config.num_attention_heads = 1;
    config.check(Exit::usage, "test");
    declare_model(params, config);
    params.allocate(*device, Dtype::f32, false);
    params.initialise(1);
    std::vector<TensorToWrite> parts[2];
    std::vector<float> zeros(static_cast<size_t>(params.flat_size()));
    for (const Parameter& row : params.rows())
      parts[row.name.find("mlp") == std::string::npos].push_back(
          {row.name, "F32", {row.shape.dim.begin(), row.shape.dim.begin() + row.shape.rank}, zeros.data()});
    write_safetensors(scratch() + "/a.safetensors", parts[0]);
    write_safetensors(scratch() + "/b.safetensors", parts[1]);
  }
};

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Model model;
  write_file(scratch() + "/model.safetensors.index.json", text_of(data, size));
  accept_or_refuse([&] { load_weights(scratch(), model.config, model.params); });
  return 0;
}
