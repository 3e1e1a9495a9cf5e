#pragma once

#include "dev/figures/page.h"

namespace crossply::figures {

// How far the best rate of a size is from the base shape's, with --transfer and without; of what run.sh has trained.
void transfer(Page& page);

}  // namespace crossply::figures
