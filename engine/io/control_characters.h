// Characters that steer a terminal or a page instead of showing something.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace crossply {

// The control characters (C0, DEL, C1), the line separators of Unicode, and what reorders the text around it
// (Bidi_Control), such as U+202E.
bool is_control(uint32_t code);

// JSON text with every control character in its strings as \uNNNN: the same value, safe for a terminal.
std::string printable_json(std::string_view json);

}  // namespace crossply
