#include "train/step/saved_model.h"

#include <filesystem>

#include "models/disk/library_files.h"
#include "models/disk/model_dir.h"

namespace crossply {

std::vector<std::string> write_model(const CheckpointWriter& writer, const TrainPlan& plan, const World& world,
                                     const ParameterTable& params, const Tokenizer& tokenizer) {
  std::vector<std::string> weights =
      save_weights(writer, params, plan.config, world.rank, world.size, plan.shard_bytes);
  if (!world.leads()) return weights;
  save_config(writer.path("config.json"), plan.config);
  tokenizer.save(std::filesystem::path(writer.path("config.json")).parent_path());
  auto files = plan.carried;  // which are of the same model, and may say more than what is known here
  files.merge(library_files(plan.config, tokenizer));
  for (const auto& [name, contents] : files) write_file_atomically(writer.path(name), contents);
  return weights;
}

}  // namespace crossply
