// The files that a name, a pattern or a directory stands for, in an order that does not depend on the file system.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossply {

// Those that a pattern of the shell's (* ? [...]) matches; a file of exactly that name wins over the pattern. Throws
// Exit::no_input if there is none, unless there may be, and io if one cannot be told.
std::vector<std::string> match_paths(const std::string& pattern, bool maybe_none = false);

// The name of a file without its directory and without .gz or .zst, in lower case.
std::string unpacked_name(const std::string& path);

// Files of text: one of that name; of a directory, all in it and below it that end with .txt, .text, .md, .jsonl or
// .ndjson, in capitals or not, perhaps followed by .gz or .zst, and do not begin with a dot; otherwise what the pattern
// matches, where a directory counts as its files. A name without the characters of a pattern need not be there. Throws
// Exit::no_input for a directory without such a file and for a pattern that matches none. passed_over: counts the other
// files of directories, but for those that begin with a dot.
std::vector<std::string> text_files(const std::string& path, int64_t* passed_over = nullptr);

}  // namespace crossply
