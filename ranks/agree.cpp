#include "ranks/agree.h"

#include <cstdlib>
#include <map>
#include <vector>

#include "engine/io/json.h"

namespace crossply {

void refuse_shared_gpu(ProcessGroup& group, const std::string& gpu) {
  std::map<std::string, size_t> first;
  std::string shared;
  const std::vector<std::string> gpus = group.collect(gpu);
  for (size_t rank = gpus.size(); rank-- > 0;) {
    const auto [other, fresh] = first.try_emplace(gpus[rank], rank);
    if (!fresh) shared = str("ranks ", rank, " and ", other->second, " have the same GPU, ", gpus[rank]);
    other->second = rank;
  }
  const char* allowed = std::getenv("CROSSPLY_SHARE_GPU");
  shared = group.share(allowed == nullptr || *allowed == '\0' ? shared : "");
  if (!shared.empty())
    fail_at_all(group, Exit::usage, shared + ": start one process a GPU, or look at CUDA_VISIBLE_DEVICES");
}

std::string ranks_that_differ(ProcessGroup& group, const std::string& text) {
  const std::vector<std::string> texts = group.collect(text);
  std::string others;
  for (size_t rank = 1; rank < texts.size(); ++rank)
    if (texts[rank] != texts[0]) others += str(others.empty() ? "" : ", ", rank);
  others = group.share(others);
  return others.empty() ? "" : (others.find(',') == others.npos ? "rank " : "ranks ") + others;
}

void share_choices(ProcessGroup& group, Device& device, const std::function<void()>& run) {
  if (group.world.alone() || device.arithmetic().versions.empty()) return;
  if (group.world.leads()) run();
  const nlohmann::json choices = known_json(group.share(json_text(nlohmann::json(device.arithmetic().choices))));
  device.adopt(choices.get<std::map<std::string, std::string>>(), "rank 0");
}

void fail_at_all(const ProcessGroup& group, Exit code, const std::string& why) {
  if (!group.world.leads()) throw SharedError(code, why);
  throw Error(code, why);
}

}  // namespace crossply
