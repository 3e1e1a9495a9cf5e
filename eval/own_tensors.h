// Files of tensors that a program may replace: only those that it wrote.
#pragma once

#include <map>
#include <string>

namespace crossply {

// What tells them from weights, and from each other, in their metadata.
inline std::map<std::string, std::string> kind_of_tensors(const std::string& kind) { return {{"crossply", kind}}; }

// Whether the file is of that kind. Throws what opening it throws.
bool holds_tensors_of(const std::string& path, const std::string& kind);

// Throws Exit::usage where the file has anything else in it, and Exit::io where it cannot be looked at.
// what: the flag, in front of the path.
void check_replaceable_tensors(const std::string& what, const std::string& path, const std::string& kind);

}  // namespace crossply
