#include "train/lab/sweep_plan.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "cli/bounds.h"
#include "cli/format.h"
#include "engine/check.h"
#include "engine/io/byte_names.h"
#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"
#include "engine/split.h"
#include "models/config.h"
#include "train/settings/arch_list.h"

namespace crossply {
namespace {

constexpr uint64_t max_plan = 1 << 20;
constexpr size_t max_tables = 1000;
constexpr const char* axes[] = {"width", "heads", "ffn"};  // as many values of each, or one
constexpr const char* lists[] = {"arch",    "optimizer", "lr",    "muon-lr", "seeds", "backbone-seeds",
                                 "budgets", "layers",    "width", "heads",   "ffn"};

// A key and its value, in the order of the file; a later one of the same key takes the place of an earlier one.
struct Entry {
  std::string key, value;
  bool is_switch = false;
};
using Entries = std::vector<Entry>;

void put(Entries& entries, const Entry& entry) {
  const auto same = std::ranges::find(entries, entry.key, &Entry::key);
  if (same == entries.end()) entries.push_back(entry);
  else *same = entry;
}

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r"), end = text.find_last_not_of(" \t\r");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

std::string without_spaces(std::string text) {
  std::erase_if(text, [](char c) { return c == ' ' || c == '\t'; });
  return text;
}

bool is_list(const std::string& key) { return std::ranges::find(lists, key) != std::end(lists); }

// Takes a key out; "" where there is none.
std::string take(Entries& entries, const std::string& key) {
  const auto found = std::ranges::find(entries, key, &Entry::key);
  if (found == entries.end()) return "";
  std::string value = found->value;
  entries.erase(found);
  return value;
}

struct Section {
  std::string name, where;
  Entries entries;
};

class Reader {
 public:
  Reader(const std::string& file, const std::string& path) : path_(path) {
    size_t begin = 0;
    while (begin < file.size()) {
      const size_t end = std::min(file.find('\n', begin), file.size());
      read(file.substr(begin, end - begin));
      begin = end + 1;
    }
    finish_entry();
  }
  std::string text;
  std::vector<Section> sections;

 private:
  std::string where() const { return str(path_, ":", number_); }

  void read(std::string line) {
    ++number_;
    if (const size_t comment = line.find('#'); comment != std::string::npos) line.resize(comment);
    const std::string inside = trimmed(line);
    if (inside.empty()) return;
    text += inside + "\n";
    if (line[0] == ' ' || line[0] == '\t') return go_on(inside);
    finish_entry();
    if (inside[0] == '[') return begin_section(inside);
    const size_t equals = inside.find('=');
    entry_ = {trimmed(inside.substr(0, equals)), "", equals == std::string::npos};
    if (!entry_.is_switch) entry_.value = trimmed(inside.substr(equals + 1));
    if (entry_.key.empty() || entry_.key[0] == '-' ||
        entry_.key.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") != std::string::npos)
      fail(Exit::bad_data, where(), ": a line is a flag of compare without its dashes, '", excerpt(entry_.key),
           "' is none; tables begin with [NAME]");
  }

  void go_on(const std::string& inside) {
    if (entry_.key.empty()) fail(Exit::bad_data, where(), ": an indented line goes on with one above; there is none");
    const bool comma = entry_.value.empty() || entry_.value.ends_with(',') || inside.starts_with(',');
    entry_.value += (comma ? "" : is_list(entry_.key) ? "," : " ") + inside;
    entry_.is_switch = false;
  }

  void finish_entry() {
    if (entry_.key.empty()) return;
    if (is_list(entry_.key)) entry_.value = without_spaces(entry_.value);
    put(sections.empty() ? shared_ : sections.back().entries, entry_);
    entry_ = {};
  }

  void begin_section(const std::string& inside) {
    const std::string name = inside.substr(1, inside.size() - 2);
    const bool safe = !name.empty() && inside.ends_with(']') && name[0] != '-' &&
                      name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") == std::string::npos;
    if (!safe) fail(Exit::bad_data, where(), ": a table is named [LETTERS], of a-z, 0-9, - and _");
    sections.push_back({name, where(), shared_});
  }

  const std::string path_;
  int64_t number_ = 0;
  Entry entry_;
  Entries shared_;
};

PlannedTable table_of(const Section& section, const std::string& name, const Entries& entries) {
  PlannedTable table{name, {}, "", 1, section.where};
  for (const Entry& entry : entries) {
    table.flags.push_back("--" + entry.key);
    if (!entry.is_switch) table.flags.push_back(entry.value);
  }
  return table;
}

void refuse_many_tables(size_t tables, const std::string& where) {
  if (tables > max_tables)
    fail(Exit::bad_data, where, ": that makes ", tables, " tables, more than ", max_tables, "; split the plan");
}

// The same table for each of several layers, then for each of several widths.
std::vector<PlannedTable> sizes_of(const Section& section, const Entries& entries) {
  std::vector<PlannedTable> out = {table_of(section, section.name, entries)};
  const auto spread = [&](const char* key, const char* letter, auto&& set_all) {
    const std::vector<std::string> values = split_commas(out[0].flag(std::string("--") + key));
    if (values.size() < 2) return;
    refuse_many_tables(out.size() * values.size(), section.where);
    std::vector<PlannedTable> more;
    for (const PlannedTable& table : out)
      for (size_t i = 0; i < values.size(); ++i) {
        if (values[i].empty() || values[i].find_first_not_of("0123456789") != std::string::npos)  // it is in a path
          fail(Exit::bad_data, section.where, ": ", key, " are whole numbers, '", excerpt(values[i]), "' is none");
        more.push_back(table);
        more.back().name += str("-", letter, values[i]);
        set_all(more.back(), i, values.size());
      }
    out = more;
  };
  const auto set_one = [&](const char* key, PlannedTable& table, size_t i, size_t count) {
    const std::string flag = std::string("--") + key;
    const std::vector<std::string> values = split_commas(table.flag(flag));
    if (values.size() < 2) return;
    if (values.size() != count)
      fail(Exit::bad_data, section.where, ": ", key, " has ", values.size(), " values, width ", count,
           "; give as many, or one");
    table.set(flag, values[i]);
  };
  spread("layers", "L", [&](PlannedTable& table, size_t i, size_t count) { set_one("layers", table, i, count); });
  spread("width", "C", [&](PlannedTable& table, size_t i, size_t count) {
    for (const char* key : axes) set_one(key, table, i, count);
  });
  return out;
}

// The first architecture alone, for other numbers of steps, with warm-up and cool-down in the same proportion.
std::vector<PlannedTable> budgets_of(const PlannedTable& whole, const std::string& list, const std::string& where) {
  std::vector<PlannedTable> out;
  const auto steps = parse_number(whole.flag("--steps"));
  const std::vector<std::string> texts = split_commas(list);
  refuse_many_tables(texts.size(), where);
  for (const std::string& text : texts) {
    const auto budget = parse_number(text);
    if (!budget || !(*budget > 0 && *budget <= 100) || *budget == 1)
      fail(Exit::bad_data, where, ": budgets are numbers above 0 and other than 1, '", excerpt(text), "' is none");
    if (!steps) fail(Exit::bad_data, where, ": budgets are times steps, which has to stand there, too");
    PlannedTable table = whole;
    table.name += "-x" + text, table.of = whole.name, table.budget = *budget;
    for (const char* scaled : {"--steps", "--warmup", "--cooldown"})  // 0 stays
      if (const auto value = parse_number(table.flag(scaled)); value && *value > 0)
        table.set(scaled, std::to_string(std::max<long long>(1, std::llround(*value * *budget))));
    const ArchChoice first = parse_arch_list(whole.flag("--arch"))[0];
    table.set("--arch", first.text);
    for (const char* flag : {"--backbone-seeds", "--pairs"}) table.set(flag, "");
    if (is_plain(first.arch)) table.set("--router-lr", "");  // which would have no effect
    std::erase(table.flags, "--more-seeds");
    out.push_back(std::move(table));
  }
  return out;
}

}  // namespace

std::string PlannedTable::flag(const std::string& flag_name) const {
  const auto found = std::ranges::find(flags, flag_name);
  return found == flags.end() || found + 1 == flags.end() ? "" : *(found + 1);
}

void PlannedTable::set(const std::string& flag_name, const std::string& value) {
  const auto found = std::ranges::find(flags, flag_name);
  if (found != flags.end()) {
    if (!value.empty()) *(found + 1) = value;
    else flags.erase(found, found + 2);
  } else if (!value.empty()) {
    flags.push_back(flag_name), flags.push_back(value);
  }
}

SweepPlan parse_sweep_plan(const std::string& text, const std::string& path) {
  const Reader reader(text, path);
  SweepPlan plan{reader.text, {}};
  if (reader.sections.empty()) fail(Exit::bad_data, path, ": there is no table; one begins with [NAME]");
  for (const Section& section : reader.sections) {
    Entries entries = section.entries;
    const std::string budgets = take(entries, "budgets");
    for (const PlannedTable& table : sizes_of(section, entries)) {
      plan.tables.push_back(table);
      if (!budgets.empty())
        for (PlannedTable& budget : budgets_of(table, budgets, section.where)) plan.tables.push_back(std::move(budget));
      refuse_many_tables(plan.tables.size(), section.where);
    }
  }
  std::map<std::string, std::string> names;
  for (const PlannedTable& table : plan.tables)
    if (const auto [other, is_new] = names.emplace(table.name, table.where); !is_new)
      fail(Exit::bad_data, table.where, ": there is a table ", table.name, " already, by ", other->second);
  return plan;
}

SweepPlan read_sweep_plan(const std::string& path) { return parse_sweep_plan(read_file(path, max_plan), path); }

}  // namespace crossply
