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

Tokenizer model_tokenizer(const LoadedModel& model, const std::string& path) {
  const Tokenizer own = Tokenizer::load(model.dir);
  if (path.empty()) return own;
  const Tokenizer given = Tokenizer::read(path);
  if (!own.is_none() && !own.is_foreign() && !(own == given))
    fail(Exit::usage, "--tokenizer ", path, " is ", given.describe(), ", but ", model.dir, " has ", own.describe(),
         "; leave out --tokenizer");
  if (given.vocab_size() > model.config.vocab_size)
    fail(Exit::bad_data, path, ": has ", given.vocab_size(), " tokens, but the model's vocabulary has only ",
         model.config.vocab_size, ": it is another model's");
  return given;
}

}  // namespace crossply
