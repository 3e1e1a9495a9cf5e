#include "train/step/replica_check.h"

#include <nlohmann/json.hpp>

#include "ranks/agree.h"
#include "train/step/declare.h"

namespace crossply {

void ReplicaCheck::restore(const nlohmann::json& state, const std::string&) { check(state["step"].get<int64_t>()); }

void ReplicaCheck::check(int64_t steps_done) {
  group_.enter(Stage::check, steps_done);
  if (const std::string others = ranks_that_differ(group_, digest_of(params_)); !others.empty())
    fail_at_all(group_, Exit::internal,
                str("after step ", steps_done, " the weights of ", others, " are not those of rank 0: ",
                    "memory or network may be broken; resume from a checkpoint, without these machines"));
}

}  // namespace crossply
