// What all ranks of a job find out together.
#pragma once

#include <functional>
#include <string>

#include "engine/device.h"
#include "ranks/process_group.h"

namespace crossply {

// The ranks whose text is not rank 0's, "ranks 1, 3", at all ranks; "" if there is none.
std::string ranks_that_differ(ProcessGroup& group, const std::string& text);
// gpu: which one, of all machines'. Throws Exit::usage at all ranks if two of them have the same, which NCCL would
// refuse with fewer words; not with CROSSPLY_SHARE_GPU=1.
void refuse_shared_gpu(ProcessGroup& group, const std::string& gpu);
// On GPUs the algorithms that rank 0 finds by timing, while it runs `run`, become everybody's. One rank finds its own
// as it goes.
void share_choices(ProcessGroup& group, Device& device, const std::function<void()>& run);
// For an error that all ranks find: rank 0 prints it.
[[noreturn]] void fail_at_all(const ProcessGroup& group, Exit code, const std::string& why);

}  // namespace crossply
