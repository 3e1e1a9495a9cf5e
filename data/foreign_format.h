// Files that people give as text and that hold something else: tables, archives, compressed files, other encodings.
// Their first bytes tell, whatever their names say.
#pragma once

#include <string>
#include <string_view>

namespace crossply {

class InputFile;

// So many first bytes of a file are enough.
constexpr size_t foreign_format_bytes = 512;

// For a message behind a file's name: what the file is, and the command that makes text of it; "" if its first bytes
// are of no known format. path: of the file, for the command; "": there is none. A format whose mark is shorter than
// min_mark bytes does not count: any tokens may begin with two bytes.
std::string foreign_format(std::string_view first, const std::string& path, size_t min_mark = 2);

// The same of a file. By its path: "" if it is no regular file or cannot be read.
std::string foreign_format_of(const InputFile& file, size_t min_mark = 2);
std::string foreign_format_of(const std::string& path);

}  // namespace crossply
