#include "train/step/inputs_digest.h"

#include <nlohmann/json.hpp>

#include "engine/rng.h"
#include "ranks/agree.h"
#include "train/step/declare.h"

namespace crossply {
namespace {

using nlohmann::json;

// What only looks at a batch, or at nothing, does not read all of the data.
bool needs_digest(const TrainPlan& plan, bool resumed) {
  return resumed || (plan.steps > 0 && plan.dump_tensors.empty());
}

// All that older checkpoints know of their data: its size and the contents of some samples.
std::string fingerprint(const Source& source) {
  const size_t T = static_cast<size_t>(source.seq_len());
  std::vector<int32_t> tokens(2 * T);
  uint64_t hash = static_cast<uint64_t>(source.size());
  for (int64_t i = 0; i < 16; ++i) {
    source.read(i * (source.size() - 1) / 15, tokens.data(), tokens.data() + T);
    for (const int32_t token : tokens) hash = mix_bits(hash * 31 + static_cast<uint32_t>(token));
  }
  return str(std::hex, hash);
}

// Throws Exit::bad_data at all ranks if what they read is not the same, by its Source::digest.
void compare_data(const TrainPlan& plan, ProcessGroup& group, const std::string& digest) {
  if (group.world.alone()) return;
  if (const std::string others = ranks_that_differ(group, digest); !others.empty())
    fail_at_all(group, Exit::bad_data,
                str("what ", others, " read as ", plan.data.spec,
                    " has other contents than rank 0's: all ranks need the same files"));
}

}  // namespace

InputsDigest digest_inputs(const TrainPlan& plan, const Source& train, const Teacher* teacher, ProcessGroup& group,
                           bool resumed) {
  InputsDigest digest{fingerprint(train), needs_digest(plan, resumed) ? str(std::hex, train.digest()) : "",
                      teacher != nullptr ? digest_of(teacher->params) : ""};
  compare_data(plan, group, digest.data_digest);
  return digest;
}

void InputsDigest::save(json& state) const {
  state["data"] = data, state["data_digest"] = data_digest;
  if (!teacher.empty()) state["teacher_digest"] = teacher;
}

std::set<std::string> InputsDigest::moved(const json& state) const {
  std::set<std::string> moved;
  if (state.value("data", json()) == data && state.value("data_digest", json()) == data_digest) moved = data_settings;
  if (!teacher.empty() && state.value("teacher_digest", json()) == teacher) moved.insert("teacher");
  return moved;
}

void InputsDigest::refuse_others(const json& state, const TrainPlan& plan, const std::string& dir) const {
  if (state.value("data", json()) != data || state.value("data_digest", json(data_digest)) != data_digest)
    fail(Exit::bad_data, "--resume: ", plan.data.spec, plan.data.val_spec.empty() ? "" : " or " + plan.data.val_spec,
         " is not the data that the run in ", dir, " was trained on; its size or contents changed");
  if (!teacher.empty() && state.value("teacher_digest", json()) != teacher)
    fail(Exit::bad_data, "--resume: --teacher ", plan.teacher, " has other weights than those that the run in ", dir,
         " learned from; put them back, or start a new run");
}

}  // namespace crossply
