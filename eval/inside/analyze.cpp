// analyze: what goes on inside trained models, measured on data: the numbers that papers on depth argue with. One model
// or several beside each other; a table for each, files of all numbers with a picture, and a page of all pictures.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cli/look.h"
#include "cli/program.h"
#include "cli/standard_streams.h"
#include "cli/stop.h"
#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "eval/inside/dump.h"
#include "eval/inside/page.h"

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
  return help +
         "\nall: every one that these models allow, sae last, and report.html, a page of all pictures, which is "
         "written anew after each: Ctrl-C leaves what is there";
}

Analysis& find_analysis(const Analyses& analyses, const std::string& name) {
  for (const auto& analysis : analyses)
    if (analysis->name() == name) return *analysis;
  fail(Exit::usage, "--what: '", name, "' is not one of:", names_of(analyses));
}

// What one call asks for.
struct Asked {
  AnalysisOptions o;
  std::vector<std::string> what, dump;
  std::string command;
  bool page() const { return what == std::vector<std::string>{"all"}; }
};

std::vector<Analysis*> choose(const Analyses& analyses, const Asked& asked) {
  const std::vector<std::string>& what = asked.what;
  std::vector<Analysis*> chosen;
  if (asked.page()) {
    for (const auto& analysis : analyses) chosen.push_back(analysis.get());
    return chosen;
  }
  for (const std::string& name : what) {
    if (name == "all") fail(Exit::usage, "--what: all stands alone: it is every one of:", names_of(analyses));
    chosen.push_back(&find_analysis(analyses, name));
    if (std::count(what.begin(), what.end(), name) > 1)
      fail(Exit::usage, "--what: ", name, " is there twice; once is enough");
  }
  return chosen;
}

void check_asked(const Asked& asked, const std::vector<Analysis*>& chosen) {
  if (asked.what.empty() && asked.dump.empty()) fail(Exit::usage, "give --what or --dump: what to look at");
  if (!asked.dump.empty() && asked.o.out.empty())
    fail(Exit::usage, "--dump writes values.safetensors, so give --out DIR too");
  if (asked.page() && asked.o.out.empty()) fail(Exit::usage, "--what all writes report.html, so give --out DIR too");
  std::vector<std::filesystem::path> models;
  for (const std::string& model : asked.o.models) {
    std::error_code failed;
    const std::filesystem::path real = std::filesystem::weakly_canonical(model, failed);
    models.push_back(failed ? std::filesystem::path(model) : real);
    if (std::ranges::count(models, models.back()) > 1)
      fail(Exit::usage, "--model: ", model, " is there twice; once is enough");
  }
  if (asked.o.out.empty()) return;
  std::vector<std::string> names;
  for (const Analysis* analysis : chosen) names.push_back(analysis->name());
  prepare_analysis_out(asked.o.out, names);
  for (const Analysis* analysis : chosen)
    for (const std::string& file : analysis->more_files(asked.o)) check_dump_path(asked.o.out + "/" + file);
  for (const std::string& file : model_files("values", asked.o))
    if (!asked.dump.empty()) check_dump_path(asked.o.out + "/" + file);
  if (asked.page()) check_page_out(asked.o.out);
}

using Subjects = std::deque<Subject>;

// Calls work(), and returns "", or why it cannot be with these flags, this model or text, which is told on the page.
// Whatever else fails, such as weights that are not finite, ends the program.
template <class F>
std::string reason_against(F&& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.code != Exit::usage && error.code != Exit::bad_data) throw;
    return error.what();
  } catch (const std::exception& error) {
    if (!is_flag_error(error)) throw;
    return error.what();
  }
  return "";
}

// For the page: a model that the analysis cannot look at is left out.
void measure_or_leave_out(Analysis& analysis, Subject& subject, const AnalysisOptions& o, PageSection* section) {
  std::string why = analysis.refuses(subject);
  if (why.empty()) why = reason_against([&] { analysis.try_measure(subject, o); });
  if (why.starts_with(subject.name + ": ")) why.erase(0, subject.name.size() + 2);
  if (why.empty()) return;
  section->left_out.emplace_back(subject.name, why);
  std::fprintf(stderr, "left out: %s\n", one_line(why).c_str());
}

// Prints what was found, and writes it where that was asked for.
void tell(const Analysis& analysis, const Finding& found, const AnalysisOptions& o, bool first) {
  std::printf("%s%s\n\n%s", first ? "" : "\n", found.title.c_str(), printable(found.table).c_str());
  if (!o.out.empty()) std::printf("\nwrote %s\n", write_finding(o.out, analysis.name(), found, o).c_str());
  std::fflush(stdout);
}

// One after the other, and each is told as soon as all models are measured.
void tell_chosen(const std::vector<Analysis*>& chosen, Subjects& subjects, const AnalysisOptions& o) {
  for (const Analysis* analysis : chosen)  // before hours of work, not after
    for (const Subject& subject : subjects)
      if (const std::string why = analysis->refuses(subject); !why.empty()) fail(Exit::usage, subject.name, ": ", why);
  for (Analysis* analysis : chosen) {
    for (Subject& subject : subjects) analysis->measure(subject, o);
    tell(*analysis, analysis->finding(o), o, analysis == chosen[0]);
  }
}

// The same for a page: what cannot be is left out.
PageSection section_of(Analysis& analysis, Subjects& subjects, const AnalysisOptions& o, size_t done, size_t all) {
  PageSection section{analysis.name(), analysis.about(), {}, {}, {}, {}};
  for (Subject& subject : subjects) {
    std::fprintf(stderr, "%zu of %zu: %s of %s\n", ++done, all, section.name.c_str(), one_line(subject.name).c_str());
    measure_or_leave_out(analysis, subject, o, &section);
  }
  if (section.left_out.size() == subjects.size()) return section;
  const std::string why = reason_against([&] { section.finding = analysis.finding(o); });
  if (!why.empty()) section.left_out.emplace_back("all models", why);
  else section.windows = analysis.looked_at();
  return section;
}

// What lies there under the name of an analysis that this call could not make.
void note_earlier_files(const Page& page, const AnalysisOptions& o) {
  for (const PageSection& section : page.sections)
    if (const std::string file = str(o.out, "/", section.name, ".json"); !section.finding && path_exists(file))
      std::fprintf(stderr, "note: %s, .csv and .svg are of an earlier call\n", one_line(file).c_str());
}

// What is there so far, complete in itself: whoever stops the program here keeps it.
void write_part(const AnalysisOptions& o, const Page& page) {
  const std::string path = write_page(o.out, page);
  exit_on_stop(str("stopped: ", path, " has ", page.sections.size(), " of ", page.analyses, " analyses"));
}

void tell_all(const std::vector<Analysis*>& chosen, Subjects& subjects, const Asked& asked) {
  const AnalysisOptions& o = asked.o;
  Page page{asked.command, o.data.spec, o.seed, {}, {}};
  for (const Subject& subject : subjects) page.models.push_back(page_model(subject, model_look(o, subject.name)));
  page.analyses = chosen.size();
  exit_on_stop("stopped: no analysis is done yet, so nothing was written");
  std::string first_reason;
  bool first = true;
  for (size_t i = 0; i < chosen.size(); ++i) {
    const Analysis& analysis = *chosen[i];
    PageSection section = section_of(*chosen[i], subjects, o, i * subjects.size(), chosen.size() * subjects.size());
    if (first_reason.empty() && !section.left_out.empty())
      first_reason = section.left_out[0].first + ": " + section.left_out[0].second;
    const HeldStop whole_files;
    if (section.finding) tell(analysis, *section.finding, o, first), first = false;
    for (const std::string& file : analysis.more_files(o))
      if (section.finding && path_exists(o.out + "/" + file)) section.files.push_back(file);
    page.sections.push_back(std::move(section));
    if (!first) write_part(o, page);
  }
  if (first) fail(Exit::usage, "nothing could be measured, so there is no page; the first reason: ", first_reason);
  std::printf("\nwrote %s/report.html\n", printable(o.out).c_str());
  note_earlier_files(page, o);
}

// All models stay open until the end, so that an analysis can be told before the next one begins.
Exit run(const Analyses& analyses, Asked& asked) {
  AnalysisOptions& o = asked.o;
  const std::vector<Analysis*> chosen = choose(analyses, asked);
  check_asked(asked, chosen);
  if (!asked.dump.empty() && !chosen.empty() && (o.sequences == 0 || o.length == 0))
    say_note("--dump and --what look at other windows; give --sequences and --length to have the same windows");
  Subjects subjects;
  for (const std::string& model : o.models) subjects.emplace_back(model, o);
  std::vector<std::string> archs;
  for (const Subject& subject : subjects) archs.push_back(subject.config().arch);
  o.looks = looks_of(archs);
  for (size_t i = 0; i < subjects.size() && !asked.dump.empty(); ++i)
    std::printf("%s", dump_values(subjects[i], asked.dump, o, model_file("values", o, o.models[i])).c_str());
  if (asked.page()) tell_all(chosen, subjects, asked);
  else tell_chosen(chosen, subjects, o);
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app("What goes on inside models, measured on data.", "analyze");
  Asked asked;
  AnalysisOptions& o = asked.o;
  for (int i = 0; i < argc; ++i) asked.command += i == 0 ? "analyze" : " " + shell_word(argv[i]);  // wherever it lies
  const Analyses analyses = all_analyses();
  auto flags = [&] {
    add_texts(app, "--model", o.models, "DIR...", "model or run directories, to be compared").required();
    o.data.documents.clear();  // as the model was trained
    add_text(app, "--data", o.data.spec, "SOURCE", data_specs).required();
    add_texts(app, "--what", asked.what, "NAME...",
              "analyses, or all, which also writes report.html (--help-all lists them)\n" + what_help(analyses));
    add_texts(app, "--dump", asked.dump, "VALUE...",
              "write these values to DIR/values.safetensors; * is any part: hidden.* attention.3");
    add_text(app, "--out", o.out, "DIR",
             "write NAME.json, NAME.csv and NAME.svg there, and report.html of all (default: nowhere)");
    add_integer(app, "--sequences", o.sequences, 0, max_size, "random windows of the data (0: as the analysis needs)");
    add_integer(app, "--length", o.length, 0, max_size,
                "tokens of a window (0: as the analysis needs, or fewer where model or data have no more)");
    add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(), "of all that is random");
    add_choice(app, "--split", o.split, {"all", "test", "train"},
               "all of a file, its test or its train part (default: as evaluate: what the model was not trained on)");
    add_text(app, "--val-data", o.data.val_spec, "GLOB",
             "validation shards, which are then the test set (default: those of the training run)");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
    for (const auto& analysis : analyses) analysis->add_flags(app);
    set_short_help(app, {{"--model", "--data"},
                         {"--what", "--out", "--sequences", "--length", "--split", "--seed", "--device"},
                         {"analyze --model runs/mine --data text:my.txt",
                          "analyze --model runs/a runs/b --data text:my.txt --what all --out report"}});
  };
  return run_program(app, argc, argv, flags, [&] { return run(analyses, asked); });
}
