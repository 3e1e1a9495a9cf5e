#pragma once

#include <string>

namespace crossply::figures {

// Every picture and table whose records are in this directory. Throws Exit::no_input where it is no directory of
// experiments, Exit::bad_data, Exit::io.
void draw_experiments(const std::string& directory);

}  // namespace crossply::figures
