// analyze: what goes on inside trained models, measured on data: the numbers that papers on depth argue with. One model
// or several beside each other; a table for each, and files of all numbers with a picture.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>

#include "cli/program.h"
#include "eval/analysis.h"

using namespace crossply;

namespace {

struct Analysis {
  std::string name, about;
  std::function<void(const AnalysisOptions&)> run;
};

const std::vector<Analysis> analyses = {
    {"attention", "rank and mass of every head's attention, lazy layers (arXiv 2404.08634)", analyze_attention}};

const Analysis* find_analysis(const std::string& name) {
  for (const Analysis& analysis : analyses)
    if (analysis.name == name) return &analysis;
  return nullptr;
}

std::string check_analysis(const std::string& name) {
  std::string known;
  for (const Analysis& analysis : analyses) known += " " + analysis.name;
  return find_analysis(name) != nullptr ? "" : str("'", name, "' is not one of:", known);
}

std::string what_help() {
  std::string help;
  for (const Analysis& analysis : analyses) help += str(help.empty() ? "" : "\n", analysis.name, ": ", analysis.about);
  return help;
}

Exit run(const AnalysisOptions& o, const std::vector<std::string>& what) {
  for (size_t i = 0; i < what.size(); ++i) {
    if (std::find(what.begin(), what.begin() + static_cast<int64_t>(i), what[i]) !=
        what.begin() + static_cast<int64_t>(i))
      fail(Exit::usage, "--what: ", what[i], " is there twice; once is enough");
    if (!o.out.empty()) prepare_analysis_out(o.out, what[i]);
  }
  for (const std::string& name : what) find_analysis(name)->run(o);
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What goes on inside models, measured on data.", "analyze");
  AnalysisOptions o;
  std::vector<std::string> what;
  auto flags = [&] {
    app.add_option("--model", o.models, "model or run directories, to be compared")->type_name("DIR...")->required();
    add_text(app, "--data", o.data.spec, "SOURCE", data_specs)->required();
    app.add_option("--what", what, what_help())
        ->type_name("NAME...")
        ->required()
        ->check(CLI::Validator(check_analysis, ""));
    add_text(app, "--out", o.out, "DIR", "write NAME.json, NAME.csv and NAME.svg there (default: nowhere)");
    add_integer(app, "--sequences", o.sequences, 1, most_size, "random windows of the data");
    add_integer(app, "--length", o.length, 0, most_size,
                "tokens of a window (0: 100, or fewer where model or data have no more)");
    add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(), "of the choice of windows");
    add_number(app, "--tau", o.tau, 0.01, 0.999, "attention: the rank takes in this share of the energy");
    add_number(app, "--eta", o.eta, 0.01, 0.999, "attention: so does the mass");
    add_choice(app, "--split", o.split, {"all", "test", "train"},
               "all of a file, its test or its train part (default: as evaluate: what the model was not trained on)");
    add_text(app, "--val-data", o.data.val_spec, "GLOB",
             "validation shards, which are then the test set (default: those of the training run)");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o, what); });
}
