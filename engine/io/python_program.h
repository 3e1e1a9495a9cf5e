// The Python that programs of ours start.
#pragma once

#include <string>

namespace crossply {

// What the variable PYTHON names, or python3.
std::string python_program();

// Takes empty parts ("/x:") out of this process's PYTHONPATH, which a Python that it starts inherits. They mean the
// current directory, and Python takes modules from there first: a re.py of somebody's data is not what is meant.
void clean_python_path();

}  // namespace crossply
