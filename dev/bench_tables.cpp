// What bench knows, told as soon as it knows it: rows on standard output, and all tables in the JSON file.

#include "cli/format.h"
#include "dev/bench.h"
#include "engine/io/file.h"
#include "engine/io/json.h"

namespace crossply {
namespace {

std::string json_file;  // "": none
Exit first_failure = Exit::done;

// The file is the only place where the tables are, so that processes after each other can add to it.
void keep(const std::string& name, const std::vector<std::vector<std::string>>& rows) {
  if (json_file.empty()) return;
  auto all = known_json<nlohmann::ordered_json>(read_file(json_file, size_t{1} << 30));
  all[name] = rows;
  write_file_atomically(json_file, json_text(all, 1) + "\n");
}

}  // namespace

void keep_tables_in(const std::string& path, bool with_those_there) {
  json_file = path;
  if (!path.empty() && !with_those_there) write_file_atomically(path, "{}\n");
}

void print_table(const std::string& name, const std::vector<std::vector<std::string>>& rows) {
  print_text(format_table(rows));
  keep(name, rows);
}

GrowingTable::GrowingTable(std::string name, const std::vector<std::string>& titles, size_t first, size_t least)
    : name_(std::move(name)) {
  for (const std::string& title : titles) widths_.push_back(std::max(title.size(), widths_.empty() ? first : least));
  add(titles);
}

void GrowingTable::add(const std::vector<std::string>& row) {
  std::string line;
  for (size_t i = 0; i < row.size(); ++i) {
    const std::string room(widths_[i] - std::min(widths_[i], row[i].size()), ' ');
    line += i == 0 ? row[i] + (row.size() > 1 ? room : "") : "  " + room + row[i];
  }
  print_text(line, "\n");
  rows_.push_back(row);
  keep(name_, rows_);
}

void note_failure(const std::string& what, const std::string& why, Exit code, const std::string& of) {
  static std::vector<std::vector<std::string>> all;
  print_text("FAILED: ", what, ": ", why, "\n");
  all.push_back({what, why});
  keep("failures of " + (of.empty() ? all.front().front() : of), all);
  if (first_failure == Exit::done) first_failure = code;
}

Exit exit_code() { return first_failure; }

std::string attempt(const std::string& what, const std::function<std::string()>& measure) {
  try {
    return measure();
  } catch (const Error& error) {
    note_failure(what, error.what(), error.code);
  } catch (const std::bad_alloc&) {
    note_failure(what, "the host has not enough memory", Exit::device);
  }
  return "failed";
}

}  // namespace crossply
