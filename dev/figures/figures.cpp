// figures: the pictures and tables of dev/experiments, from its records; and the records, from comparisons.
//
//   figures                                                   what `make figures` does, in seconds
//   figures --take COMPARISON --as RECORD.json                what dev/experiments/run.sh does after each comparison
#include <cstdio>

#include "cli/format.h"
#include "cli/program.h"
#include "dev/figures/experiments.h"
#include "dev/figures/record.h"
#include "engine/io/file.h"
#include "train/lab/comparison.h"

using namespace crossply;
using namespace crossply::figures;

int main(int argc, char** argv) {
  CommandLine app("Draws the experiments of a directory from their records, with tables: results.md.", "figures");
  std::string directory = "dev/experiments", comparison, record, arm;
  const auto flags = [&] {
    add_text(app, "directory", directory, "DIR", "of the experiments");
    const Flag take = add_text(app, "--take", comparison, "DIR", "of a comparison: write its record instead");
    const Flag best = add_text(app, "--best", arm, "NAME", "of the record: print an architecture's best rate instead");
    const Flag as = add_text(app, "--as", record, "FILE", "the record that --take writes or --best reads");
    take.needs(as), best.needs(as), take.excludes(best);
  };
  return run_program(app, argc, argv, flags, [&] {
    if (!arm.empty()) std::printf("%s\n", lr_text(read_record(record).arm(arm).lr).c_str());
    else if (comparison.empty()) draw_experiments(directory);
    else write_file_atomically(record, make_record(comparison));
    return Exit::done;
  });
}
