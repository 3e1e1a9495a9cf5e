// What every analysis of the program `analyze` is: it looks at one model after the other, and then tells of all of them
// beside each other, in a table, in numbers for other programs, and in a picture with a caption. A new one is one file
// here and one line in analyses.cpp.
#pragma once

#include <concepts>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/flags.h"
#include "eval/data_choice.h"
#include "eval/inside/windows.h"
#include "eval/loaded_model.h"
#include "eval/statistics.h"

namespace crossply {

// What is the same for all analyses of one call.
struct AnalysisOptions {
  std::vector<std::string> models;  // model or run directories
  DataOptions data;
  std::string split, device = "cpu";
  std::string out;                    // a directory; empty: nothing is written
  int64_t sequences = 0, length = 0;  // of the windows; 0: as many as the analysis is usually made of
  uint64_t seed = 42;
  std::vector<int> looks = {};  // of the models' curves, as many; empty: by their place
};

// A model under the glass, and the data to look at it with.
struct Subject {
  std::string name;  // as the user gave it
  LoadedModel model;
  ModelData data;

  Subject(const std::string& given, const AnalysisOptions& o);
  const Config& config() const { return model.config; }
  int layers() const { return static_cast<int>(applications_of(model.config).count()); }
  // "runs/lime: lime on gpt2, 6 layers" and the split of the data, two lines, safe for a terminal.
  std::string title() const;
};

// How many windows of how many tokens an analysis is usually made of.
struct UsualWindows {
  int64_t sequences, length;
};

// Says on stderr, before the work begins, what it will be: "entropy of runs/lime: 128 windows of 256 tokens, 41 GFLOP,
// 12 MiB".
void say_cost(const std::string& what, const Subject& subject, const std::vector<TokenWindow>& windows, double flops,
              double bytes);

// What every analysis says of a model, beside what it measures.
struct AnalysedModel {
  std::string model, arch, backbone, title;

  explicit AnalysedModel(const Subject& subject);
  // "model", "arch" and "backbone", and these numbers.
  nlohmann::json json(const nlohmann::json& numbers) const;
};
// The same where it looks at windows of the data.
struct WindowedModel : AnalysedModel {
  std::string split;
  WindowLengths lengths;

  WindowedModel(const Subject& subject, const std::vector<TokenWindow>& windows);
  // And "split", "shortest_window" and "longest_window".
  nlohmann::json json(const nlohmann::json& numbers) const;
};

// What an analysis has found in all models.
struct Finding {
  std::string title;          // of the section: "Entropy of hidden states and values"
  std::string table = "";     // for a terminal of 80 columns
  nlohmann::json json = {};   // all numbers; {"models": [...]} beside settings
  std::string csv = "";       // the same as rows, or what of it is rows
  std::string svg = "";       // the picture, one self-contained file
  std::string measured = "";  // what is measured and how: the definition, units, settings, what "higher" means
  std::string paper = "";     // what a paper saw, with its name and arXiv number; "" where none did
  std::string shown = "";     // what these models show, in a sentence or two

  // One more model: its table comes below those before it, its numbers at the end of json["models"].
  void add(const std::string& table_of_model, nlohmann::json numbers);
};

class Analysis {
 public:
  // name: of --what, of the files: "entropy"; about: one line, for --help.
  Analysis(std::string name, std::string about) : name_(std::move(name)), about_(std::move(about)) {}
  virtual ~Analysis() = default;
  const std::string& name() const { return name_; }
  const std::string& about() const { return about_; }
  // Its own flags, each of which begins its help with the analysis' name.
  virtual void add_flags(CLI::App&) {}
  // "" where it can look at such a model; else one sentence: why not, and what the architecture has instead.
  virtual std::string refuses(const Subject&) const { return ""; }
  // The names of files that it writes to the directory beside NAME.json, .csv and .svg: safetensors with "crossply":
  // "analyze" in their metadata.
  virtual std::vector<std::string> more_files(const AnalysisOptions&) const { return {}; }
  // Looks at one more model. Says its cost first and shows how far it is.
  virtual void measure(Subject& subject, const AnalysisOptions& o) = 0;
  // The same; but where that fails, the model's windows are forgotten too, as if nobody had asked.
  void try_measure(Subject& subject, const AnalysisOptions& o);
  // Of all models since the start of the program.
  virtual Finding finding(const AnalysisOptions& o) const = 0;
  // "100 windows of 256 tokens, the same for all", or those of each model; "" where none was asked for.
  std::string looked_at() const;

 protected:
  // These flags have an effect only where --what names it, or all.
  void own(CLI::App& app, std::initializer_list<Flag> flags) const;
  // What to look at: as many windows and as long as the options say, or else the usual ones. Two models with the same
  // data get the same wherever they can; says on stderr where not.
  const std::vector<TokenWindow>& windows_of(const Subject& subject, const AnalysisOptions& o,
                                             const UsualWindows& usual);
  // Of all models so far.
  bool same_windows() const;
  // Of the last model so far.
  bool windows_of_first() const;
  // For a caption, behind counts of the first model's windows: says so where another model had other ones.
  std::string if_of_first() const;

 private:
  struct Looked {
    std::string model, split;
    uint64_t tokenizer;  // its fingerprint
    bool files;          // not generated data
    std::vector<TokenWindow> windows;
    int64_t longest() const;
  };
  static bool same(const Looked& a, const Looked& b);
  static bool other_ids(const Looked& a, const Looked& b);
  static void note_other_windows(const Looked& m, const Looked& first);
  std::string name_, about_;
  std::deque<Looked> looked_;
};

// Names of models for a picture: without the directories that all have in common, of a single one without all.
std::vector<std::string> short_names(std::vector<std::string> names);
// The same of what an analysis has of each model, which names it `model`.
template <class OfModel>
std::vector<std::string> short_names_of(const std::vector<OfModel>& all) {
  std::vector<std::string> names;
  for (const OfModel& m : all) names.push_back(m.model);
  return short_names(std::move(names));
}

// "Mean gate: 0.41 (lime), 0.52 (satformer)."; of what is not finite: none.
std::string numbers_of_models(const std::string& what, const std::vector<std::string>& names,
                              const std::vector<double>& numbers, const char* format);
// For a caption: a text that is the same for all models, or else each after its model's name.
std::string text_of_each(const std::vector<std::string>& names, const std::vector<std::string>& texts);

// One that has found an OfModel in each model so far.
template <class OfModel>
class AnalysisOf : public Analysis {
 protected:
  using Analysis::Analysis;
  std::vector<std::string> names() const { return short_names_of(all_); }
  // number(m) of each model m, for a caption.
  template <class Number>
  std::string numbers(const std::string& what, const char* format, const Number& number) const {
    std::vector<double> all;
    for (const OfModel& m : all_) all.push_back(number(m));
    return numbers_of_models(what, names(), all, format);
  }
  std::vector<OfModel> all_;
};

// All of them, in the order of a page.
std::vector<std::unique_ptr<Analysis>> all_analyses();
std::unique_ptr<Analysis> attention_analysis();
std::unique_ptr<Analysis> circuits_analysis();
std::unique_ptr<Analysis> entropy_analysis();
std::unique_ptr<Analysis> exits_analysis();
std::unique_ptr<Analysis> gates_analysis();
std::unique_ptr<Analysis> lens_analysis();
std::unique_ptr<Analysis> maps_analysis();
std::unique_ptr<Analysis> routing_analysis();
std::unique_ptr<Analysis> sae_analysis();
std::unique_ptr<Analysis> similarity_analysis();
std::unique_ptr<Analysis> sinks_analysis();
struct OccurrenceOptions;  // flags that these two share
std::unique_ptr<Analysis> separability_analysis(std::shared_ptr<OccurrenceOptions> shared);
std::unique_ptr<Analysis> tsne_analysis(std::shared_ptr<OccurrenceOptions> shared);

// STEM.safetensors of one model; of several STEM.1.safetensors and so on, in their order.
std::vector<std::string> model_files(const std::string& stem, const AnalysisOptions& o);

// The place of a model among those that the user named. name: of the Subject.
int model_place(const AnalysisOptions& o, const std::string& name);
// Its Curve::look: its architecture's, the same in all pictures, whoever is left out there.
int model_look(const AnalysisOptions& o, const std::string& name);
// Its file, with the directory.
std::string model_file(const std::string& stem, const AnalysisOptions& o, const std::string& name);

// "0.412", or "-" where there is none.
std::string number_or_dash(double number, const char* format = "%.3f");
// Of what is finite; NaN of none.
double mean_of_rows(const std::vector<std::vector<double>>& rows);

// Text from outside, such as a name, in one line that is safe for a terminal.
std::string one_line(const std::string& text);

// A text as a field of a CSV file, in quotes where it needs them. An apostrophe comes before a text that a spreadsheet
// would run as a formula, such as "=1+1" or "@a".
std::string csv_field(const std::string& text);
// The same of a name from outside, safe for a terminal, and of a number, with the digits that JSON has; nothing where
// it is not finite.
std::string csv_cell(const std::string& name);
std::string csv_cell(double number);
template <std::integral Integer>
std::string csv_cell(Integer number) {
  return std::to_string(number);
}
// A line of a CSV file.
template <class... Cells>
std::string csv_row(const Cells&... cells) {
  std::string row;
  ((row += csv_cell(cells) + ","), ...);
  row.back() = '\n';
  return row;
}

// Throws Exit::usage: --out has a file of this path that is not ours.
[[noreturn]] void refuse_foreign_file(const std::string& path);
// Throws Exit::usage unless the program may write these files of the directory without losing what it did not write;
// makes the directory. names: of analyses (NAME.json, .csv, .svg).
void prepare_analysis_out(const std::string& dir, const std::vector<std::string>& names);
// Writes NAME.json, .csv and .svg, all three or none. Returns what was written, for the terminal.
std::string write_finding(const std::string& dir, const std::string& name, const Finding& finding,
                          const AnalysisOptions& o);

}  // namespace crossply
