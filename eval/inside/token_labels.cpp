#include "eval/inside/token_labels.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <vector>

#include "engine/check.h"
#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "eval/inside/features.h"

namespace crossply {
namespace {

constexpr uint64_t max_file_bytes = uint64_t{1} << 30;

// Rows of a CSV file, one after the other.
class CsvReader {
 public:
  CsvReader(const std::string& path, std::string_view text) : path_(path), text_(text) {
    if (text_.starts_with("\xef\xbb\xbf")) at_ = 3;
  }
  // False after the last one. Empty lines are passed over.
  bool next(std::vector<std::string>& values) {
    while (at_ < text_.size() && (text_[at_] == '\n' || text_[at_] == '\r')) line_ += text_[at_++] == '\n';
    if (at_ == text_.size()) return false;
    row_ = line_;
    values.assign(1, "");
    for (bool quoted = false; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '"' && quoted && text_.substr(at_ + 1).starts_with('"')) values.back() += text_[++at_];
      else if (c == '"' && (quoted || values.back().empty())) quoted = !quoted, open_ = quoted ? line_ : 0;
      else if (c == ',' && !quoted) values.emplace_back();
      else if (c == '\n' && !quoted) break;
      else if (c != '\r' || quoted) values.back() += c;
      line_ += c == '\n';
    }
    if (open_ > 0)
      fail(Exit::bad_data, path_, ", line ", open_, ": a quote is not closed; write \"\" for one in a value");
    return true;
  }
  std::string where() const { return str(path_, ", line ", row_); }

 private:
  std::string path_;
  std::string_view text_;
  size_t at_ = 0;
  int64_t line_ = 1, row_ = 1;
  int64_t open_ = 0;  // line of a quote that is open
};

std::string joined(const std::vector<std::string>& values) {
  std::string all;
  for (const std::string& value : values) all += (all.empty() ? "" : ",") + value;
  return excerpt(all);
}

size_t column_of(const std::vector<std::string>& columns, const std::string& name, const std::string& where) {
  const auto count = std::ranges::count(columns, name);
  if (count != 1)
    fail(Exit::bad_data, where, ": names ", count == 0 ? "no column " : "two columns ", name, ", but ", joined(columns),
         "; write id,label there");
  return static_cast<size_t>(std::ranges::find(columns, name) - columns.begin());
}

}  // namespace

TokenLabels read_token_labels(const std::string& path, int64_t vocab) {
  TokenLabels read{path, {}};
  if (path.empty()) return read;
  const std::string text = read_file(path, max_file_bytes);
  CsvReader rows(path, text);
  std::vector<std::string> columns, values;
  if (!rows.next(columns)) fail(Exit::bad_data, path, ": is empty; its first line must name the columns: id,label");
  const size_t id_column = column_of(columns, "id", rows.where()),
               label_column = column_of(columns, "label", rows.where());
  while (rows.next(values)) {
    if (values.size() != columns.size())
      fail(Exit::bad_data, rows.where(), ": has ", values.size(), " values for ", columns.size(),
           " columns: ", joined(values), "; put a value with a comma in quotes");
    const std::string &id = values[id_column], &label = values[label_column];
    int32_t token = -1;
    const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), token);
    if (error != std::errc() || end != id.data() + id.size() || token < 0 || token >= vocab)
      fail(Exit::bad_data, rows.where(), ": id '", excerpt(id), "' is no token of the model; it must be 0 to ",
           vocab - 1);
    if (std::ranges::count(feature_labels(), label) == 0) {
      std::string known;
      for (const std::string& one : feature_labels()) known += (known.empty() ? "" : ", ") + one;
      fail(Exit::bad_data, rows.where(), ": label '", excerpt(label), "' of token ", token, " is none of: ", known);
    }
    if (const auto [before, added] = read.labels.emplace(token, label); !added)
      fail(Exit::bad_data, rows.where(), ": token ", token, " has a label already, '", before->second, "', and now '",
           label, "'; keep one");
  }
  return read;
}

}  // namespace crossply
