// Numbers and tables as people read them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossply {

// "2:05" or "1:02:05".
std::string format_seconds(double seconds);
// "8,640".
std::string format_count(int64_t count);
// "a lime", "an ala".
std::string with_article(const std::string& arch);
// By a format of printf's for one double.
std::string format_number(const char* format, double value);
// The text in lines of at most `width` columns behind the indent, which all but the first have; what begins a new line
// in it still does, and hangs from there.
std::string wrap(const std::string& text, size_t width, size_t indent);
// Rows of cells as lines, in columns: the first one begins at the left, the others end at the right.
std::string format_table(const std::vector<std::vector<std::string>>& rows);
// Text for a cell of a Markdown table, whatever is in it; and cells as a row of one.
std::string format_markdown(const std::string& text);
std::string format_markdown_row(const std::vector<std::string>& cells);

}  // namespace crossply
