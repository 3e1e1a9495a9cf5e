// analyze: what goes on inside trained models, measured on data: the numbers that papers on depth argue with. One model
// or several beside each other; a table for each, and files of all numbers with a picture.
#include <algorithm>
#include <cstdio>

#include "cli/program.h"
#include "eval/inside/dump.h"

using namespace crossply;

namespace {

using Analyses = std::vector<std::unique_ptr<Analysis>>;

std::string names_of(const Analyses& analyses) {
  std::string names;
  for (const auto& analysis : analyses) names += " " + analysis->name();
  return names;
}

std::string what_help(const Analyses& analyses) {
  std::string help;
  for (const auto& analysis : analyses)
    help += str(help.empty() ? "" : "\n", analysis->name(), ": ", analysis->about());
  return help;
}

Analysis& find_analysis(const Analyses& analyses, const std::string& name) {
  for (const auto& analysis : analyses)
    if (analysis->name() == name) return *analysis;
  fail(Exit::usage, "--what: '", name, "' is not one of:", names_of(analyses));
}

// DIR/values.safetensors of one model; of several, DIR/values.1.safetensors and so on, in their order.
std::string dump_path(const AnalysisOptions& o, size_t model) {
  return str(o.out, "/values", o.models.size() > 1 ? str(".", model + 1) : "", ".safetensors");
}

Exit run(const Analyses& analyses, const AnalysisOptions& o, const std::vector<std::string>& what,
         const std::vector<std::string>& dump) {
  if (what.empty() && dump.empty()) fail(Exit::usage, "give --what or --dump: what to look at");
  if (!dump.empty() && o.out.empty()) fail(Exit::usage, "--dump writes values.safetensors, so give --out DIR too");
  std::vector<Analysis*> chosen;
  for (const std::string& name : what) {
    chosen.push_back(&find_analysis(analyses, name));
    if (std::count(what.begin(), what.end(), name) > 1)
      fail(Exit::usage, "--what: ", name, " is there twice; once is enough");
  }
  for (const std::string& model : o.models)
    if (std::ranges::count(o.models, model) > 1)
      fail(Exit::usage, "--model: ", model, " is there twice; once is enough");
  if (!o.out.empty()) prepare_analysis_out(o.out, what);
  for (size_t i = 0; i < o.models.size() && !dump.empty(); ++i) check_dump_path(dump_path(o, i));
  for (size_t i = 0; i < o.models.size(); ++i) {
    const std::string& model = o.models[i];
    Subject subject(model, o);
    if (!dump.empty()) std::printf("%s", dump_values(subject, dump, o, dump_path(o, i)).c_str());
    for (Analysis* analysis : chosen) {
      if (const std::string why = analysis->refuses(subject); !why.empty()) fail(Exit::usage, model, ": ", why);
      analysis->measure(subject, o);
    }
  }
  for (const Analysis* analysis : chosen) {
    const Finding found = analysis->finding(o);
    std::printf("%s%s", analysis == chosen[0] ? "" : "\n", found.table.c_str());
    if (!o.out.empty()) std::printf("\nwrote %s\n", write_finding(o.out, analysis->name(), found, o).c_str());
    std::fflush(stdout);
  }
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What goes on inside models, measured on data.", "analyze");
  AnalysisOptions o;
  std::vector<std::string> what, dump;
  const Analyses analyses = all_analyses();
  auto flags = [&] {
    app.add_option("--model", o.models, "model or run directories, to be compared")->type_name("DIR...")->required();
    add_text(app, "--data", o.data.spec, "SOURCE", data_specs)->required();
    app.add_option("--what", what, what_help(analyses))->type_name("NAME...");
    app.add_option("--dump", dump, "write these values to DIR/values.safetensors; * is any part: hidden.* attention.3")
        ->type_name("VALUE...");
    add_text(app, "--out", o.out, "DIR", "write NAME.json, NAME.csv and NAME.svg there (default: nowhere)");
    add_integer(app, "--sequences", o.sequences, 0, most_size, "random windows of the data (0: as the analysis needs)");
    add_integer(app, "--length", o.length, 0, most_size,
                "tokens of a window (0: as the analysis needs, or fewer where model or data have no more)");
    add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(), "of all that is random");
    add_choice(app, "--split", o.split, {"all", "test", "train"},
               "all of a file, its test or its train part (default: as evaluate: what the model was not trained on)");
    add_text(app, "--val-data", o.data.val_spec, "GLOB",
             "validation shards, which are then the test set (default: those of the training run)");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
    for (const auto& analysis : analyses) analysis->add_flags(app);
  };
  return run_program(app, argc, argv, flags, [&] { return run(analyses, o, what, dump); });
}
