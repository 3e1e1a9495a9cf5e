#include "eval/inside/analysis.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <set>

#include "cli/format.h"
#include "cli/needs.h"
#include "data/document_marks.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"

namespace crossply {
namespace {

// Once in a program, on stderr.
void note(const std::string& text) {
  static std::set<std::string> said;
  if (said.insert(text).second) std::fprintf(stderr, "note: %s\n", one_line(text).c_str());
}

}  // namespace

Subject::Subject(const std::string& given, const AnalysisOptions& o)
    : name(given), model(given, o.device, false), data(open_data(o.data, o.split, std::nullopt, model, given)) {
  model.documents = data.dataset.documents;
}

std::string Subject::title() const {
  const Config& c = model.config;
  const int64_t passes = stack_passes(c);
  return str(one_line(name), ": ", c.arch, c.arch == c.backbone ? "" : str(" on ", c.backbone), ", ",
             described_layers(c), " layers", passes > 1 ? str(", here the last of ", passes, " passes") : "", "\n",
             describe_split(data.choice, false), model.documents.any() ? "; " : "",
             model.documents.any() ? attention_within(model.documents) : "");
}

AnalysedModel::AnalysedModel(const Subject& subject)
    : model(subject.name), arch(subject.config().arch), backbone(subject.config().backbone), title(subject.title()) {}

nlohmann::json AnalysedModel::json(const nlohmann::json& numbers) const {
  nlohmann::json all = {{"model", utf8_or_escaped(model)}, {"arch", arch}, {"backbone", backbone}};
  all.update(numbers);
  return all;
}

WindowedModel::WindowedModel(const Subject& subject, const std::vector<TokenWindow>& windows)
    : AnalysedModel(subject), split(describe_split(subject.data.choice, false)), lengths(windows) {}

nlohmann::json WindowedModel::json(const nlohmann::json& numbers) const {
  nlohmann::json all = AnalysedModel::json(numbers);
  all.update({{"split", split}, {"shortest_window", lengths.shortest}, {"longest_window", lengths.longest}});
  return all;
}

void Analysis::own(CLI::App& app, std::initializer_list<Flag> flags) const {
  for (const Flag flag : flags) needs(app, flag, {{"--what", {name(), "all"}}});
}

int64_t Analysis::Looked::longest() const { return WindowLengths(windows).longest; }

bool Analysis::same(const Looked& a, const Looked& b) {
  return std::ranges::equal(a.windows, b.windows,
                            [](const TokenWindow& x, const TokenWindow& y) { return x.tokens == y.tokens; });
}

// Do both know what their ids mean, and not the same?
bool Analysis::other_ids(const Looked& a, const Looked& b) {
  return a.tokenizer != 0 && b.tokenizer != 0 && a.tokenizer != b.tokenizer;
}

bool Analysis::same_windows() const {
  return std::ranges::all_of(looked_, [&](const Looked& one) { return same(one, looked_[0]); });
}

bool Analysis::windows_of_first() const { return same(looked_.back(), looked_[0]); }

std::string Analysis::if_of_first() const { return same_windows() ? "" : " (of the first model)"; }

// Why, and what makes them equal, if anything does.
void Analysis::note_other_windows(const Looked& m, const Looked& first) {
  if (other_ids(m, first))
    return note(str(m.model, " has another tokenizer than ", first.model,
                    ": its ids stand for other texts, and numbers per token, such as perplexities, do not compare"));
  const int64_t length = std::min(m.longest(), first.longest());
  const std::string why = m.longest() != first.longest() ? str("of ", m.longest(), " tokens, not ", first.longest())
                          : m.split != first.split       ? "from another split, or one of another run"
                                                         : "from a split that is cut at another place";
  note(str(m.model, " was measured on other windows than ", first.model, ": ", why,
           m.files ? str("; --split all --length ", length, " gives both the same") : ""));
}

const std::vector<TokenWindow>& Analysis::windows_of(const Subject& subject, const AnalysisOptions& o,
                                                     const UsualWindows& usual) {
  const Source& source = subject.data.source();
  const int64_t T = window_length(o.length, usual.length, subject.name, subject.config(), o.data.spec, source);
  const int64_t N = o.sequences > 0 ? o.sequences : usual.sequences;
  const DataChoice& choice = subject.data.choice;
  looked_.push_back({subject.name, describe_split(choice, false), subject.data.tokenizer.fingerprint(), choice.files,
                     random_windows(source, T, N, o.seed)});
  if (!same(looked_.back(), looked_[0]) || other_ids(looked_.back(), looked_[0]))
    note_other_windows(looked_.back(), looked_[0]);
  return looked_.back().windows;
}

void Analysis::try_measure(Subject& subject, const AnalysisOptions& o) {
  const size_t before = looked_.size();
  try {
    measure(subject, o);
  } catch (const Error&) {
    looked_.resize(before);
    throw;
  }
}

std::string Analysis::looked_at() const {
  std::vector<std::string> texts;
  for (const Looked& m : looked_) {
    const std::string text = WindowLengths(m.windows).text();
    if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(text);
  }
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : "; ") + text;
  const bool several = std::ranges::any_of(looked_, [&](const Looked& m) { return m.model != looked_[0].model; });
  if (std::ranges::any_of(looked_, [&](const Looked& m) { return other_ids(m, looked_[0]); }))
    return out +
           ", not the same for all models: their tokenizers differ, so that numbers per token, such as "
           "perplexities, do not compare";
  return out + (!several ? "" : same_windows() ? ", the same for all models" : ", not the same for all models");
}

void say_cost(const std::string& what, const Subject& subject, const std::vector<TokenWindow>& windows, double flops,
              double bytes) {
  const double giga = flops / 1e9;
  std::fprintf(stderr, "%s of %s: %s, about %s GFLOP, %s\n", what.c_str(), one_line(subject.name).c_str(),
               WindowLengths(windows).text().c_str(),
               (giga < 100 ? format_number("%.3g", giga) : format_count(std::llround(giga))).c_str(),
               format_bytes(bytes).c_str());
}

std::vector<std::string> short_names(std::vector<std::string> names) {
  const auto begin_of = [](const std::string& name) { return name.rfind('/') + 1; };
  size_t common = std::string::npos;
  for (std::string& name : names) {
    while (name.size() > 1 && name.ends_with('/')) name.pop_back();
    common = std::min(common, begin_of(name));
    while (common > 0 && name.compare(0, common, names[0], 0, common) != 0)
      common = common < 2 ? 0 : names[0].rfind('/', common - 2) + 1;
  }
  for (std::string& name : names) name.erase(0, common);
  return names;
}

std::vector<std::string> model_files(const std::string& stem, const AnalysisOptions& o) {
  if (o.models.size() == 1) return {stem + ".safetensors"};
  std::vector<std::string> files;
  for (size_t i = 0; i < o.models.size(); ++i) files.push_back(str(stem, ".", i + 1, ".safetensors"));
  return files;
}

int model_place(const AnalysisOptions& o, const std::string& name) {
  return static_cast<int>(std::ranges::find(o.models, name) - o.models.begin());
}

int model_look(const AnalysisOptions& o, const std::string& name) {
  const int place = model_place(o, name);
  return o.looks.empty() ? place : o.looks.at(static_cast<size_t>(place));
}

std::string model_file(const std::string& stem, const AnalysisOptions& o, const std::string& name) {
  return o.out + "/" + model_files(stem, o).at(static_cast<size_t>(model_place(o, name)));
}

std::string numbers_of_models(const std::string& what, const std::vector<std::string>& names,
                              const std::vector<double>& numbers, const char* format) {
  std::string out = what + ":";
  for (size_t i = 0; i < names.size(); ++i)
    out += str(i == 0 ? " " : ", ", std::isfinite(numbers[i]) ? format_number(format, numbers[i]) : "none", " (",
               names[i], ")");
  return out + ".";
}

std::string text_of_each(const std::vector<std::string>& names, const std::vector<std::string>& texts) {
  if (std::ranges::count(texts, texts[0]) == std::ssize(texts)) return texts[0];
  std::string out;
  for (size_t i = 0; i < names.size(); ++i) out += str(i > 0 ? "; " : "", printable(names[i]), ": ", texts[i]);
  return out;
}

std::string number_or_dash(double number, const char* format) {
  return std::isfinite(number) ? format_number(format, number) : "-";
}

double mean_of_rows(const std::vector<std::vector<double>>& rows) {
  std::vector<double> all;
  for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
  return mean_of_finite(all);
}

std::string one_line(const std::string& text) {
  std::string out = printable(text);
  for (char& c : out)
    if (c == '\n' || c == '\t') c = ' ';
  return out;
}

namespace {

// Whether a spreadsheet takes the text for a formula and runs it: not a number such as -1.5.
bool is_formula(const std::string& text) {
  const auto begins = [&](const char* sign) { return text.starts_with(sign); };
  constexpr const char* signs[] = {"=", "+", "-", "@", "\t", "\r", "\uFF1D", "\uFF0B", "\uFF0D", "\uFF20"};
  return std::ranges::any_of(signs, begins) && !parse_number(text);
}

}  // namespace

std::string csv_field(const std::string& given) {
  const std::string text = is_formula(given) ? "'" + given : given;
  if (text.find_first_of("\",\r\n") == std::string::npos) return text;
  std::string quoted = text;
  for (size_t at = 0; (at = quoted.find('"', at)) != std::string::npos; at += 2) quoted.insert(at, "\"");
  return "\"" + quoted + "\"";
}

std::string csv_cell(const std::string& name) { return csv_field(printable(name)); }

std::string csv_cell(double number) { return std::isfinite(number) ? json_text(nlohmann::json(number)) : ""; }

void Finding::add(const std::string& table_of_model, nlohmann::json numbers) {
  table += (table.empty() ? "" : "\n") + table_of_model;
  json["models"].push_back(std::move(numbers));
}

// -----------------------------------------------------------------------------------------------------------------
// Files

namespace {

const char* const types[] = {".json", ".csv", ".svg"};

void check_ours(const std::string& base) {
  std::error_code failed;
  for (const char* type : types)
    if (path_exists(base + type) && !std::filesystem::is_regular_file(base + type, failed))
      fail(Exit::usage, "--out: ", base, type, " is no file; move it away or choose another directory");
  bool ours = false;
  try {
    ours = path_exists(base + ".json") && read_json(base + ".json").value("crossply", nlohmann::json()) == "analyze";
  } catch (const Error& error) {
    if (error.code != Exit::bad_data) throw;
  }
  for (const char* type : types)
    if (path_exists(base + type) && !ours) refuse_foreign_file(base + type);
}

}  // namespace

void refuse_foreign_file(const std::string& path) {
  fail(Exit::usage, "--out: ", path,
       " exists and was not written by this program; move it away or choose another directory");
}

void prepare_analysis_out(const std::string& dir, const std::vector<std::string>& names) {
  if (path_exists(dir) && !std::filesystem::is_directory(dir))
    fail(Exit::usage, "--out ", dir, " is no directory; choose another name");
  make_directories(dir);
  if (::faccessat(AT_FDCWD, dir.c_str(), W_OK | X_OK, AT_EACCESS) != 0) fail_io("write to", dir, errno);
  for (const std::string& name : names) check_ours(dir + "/" + name);
}

std::string write_finding(const std::string& dir, const std::string& name, const Finding& finding,
                          const AnalysisOptions& o) {
  nlohmann::json json = {
      {"crossply", "analyze"}, {"what", name}, {"data", utf8_or_escaped(o.data.spec)}, {"seed", o.seed}};
  json.update(finding.json);
  const std::string base = dir + "/" + name;
  const std::string contents[] = {json_text(json, 1) + "\n", finding.csv, finding.svg};  // the first says whose all are
  std::deque<OutputFile> files;  // complete, all three, before the first takes its place
  for (size_t i = 0; i < std::size(types); ++i)
    files.emplace_back(base + types[i], contents[i].size()).write(contents[i].data(), contents[i].size());
  for (OutputFile& file : files) file.commit();
  return printable(base) + ".json, .csv and .svg";
}

}  // namespace crossply
