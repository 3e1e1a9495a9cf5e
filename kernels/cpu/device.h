// The CPU as a device: of the fast kernels, or of the reference.
#pragma once

#include <memory>

#include "engine/device.h"

namespace crossply {

std::unique_ptr<Device> make_cpu_device(Backend backend, MatmulPrecision precision);

}  // namespace crossply
