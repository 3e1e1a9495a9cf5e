#include "eval/loaded_model.h"

#include "kernels/devices.h"
#include "models/model_dir.h"

namespace crossply {

LoadedModel::LoadedModel(const std::string& path, const std::string& device_name, bool with_gradients,
                         const std::string& matmul)
    : source(path),
      dir(source.path()),
      config(load_config(dir + "/config.json")),
      device(make_device(device_name, matmul)) {
  declare_model(params, config);
  params.allocate(*device, device_name == "reference" ? Dtype::f64 : Dtype::f32, with_gradients);
  load_weights(dir, config, params);
}

}  // namespace crossply
