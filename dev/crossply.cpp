// All programs in one file, for packages and installations: `crossply train_lime --out runs/lime`. A link to the file
// that has the name of a program is that program.
#include <cstdio>
#include <filesystem>

#include <programs_inside.h>
#include "cli/format.h"
#include "cli/version.h"
#include "engine/check.h"
#include "engine/io/printable.h"

#ifdef CROSSPLY_BENCH
int bench_main(int argc, char** argv);
#endif

namespace {

using Programs = std::map<std::string, int (*)(int, char**)>;

std::string help(const Programs& programs) {
  std::string names;
  for (const auto& program : programs) names += (names.empty() ? "" : " ") + program.first;
  return "Usage: crossply PROGRAM [FLAGS]\ncrossply PROGRAM --help lists the flags of a program.\n\nPrograms:\n  " +
         crossply::wrap(names, 78, 2) + "\n";
}

}  // namespace

int main(int argc, char** argv) {
  Programs programs = programs_inside();
#ifdef CROSSPLY_BENCH
  programs.emplace("bench", bench_main);
#endif
  const std::filesystem::path file = argc > 0 ? argv[0] : "";
  std::string name = file.filename().string();
  // A program that starts itself once more (cli/spin.h) is called like this.
  if (name.starts_with("crossply ")) name.erase(0, 9);
  if (const auto linked = programs.find(name); linked != programs.end()) return linked->second(argc, argv);

  name = argc > 1 ? argv[1] : "";
  if (name == "--version") return std::printf("crossply %s\n", crossply::version().c_str()) < 0 ? 74 : 0;
  if (name == "--help" || name == "-h") return std::printf("%s", help(programs).c_str()) < 0 ? 74 : 0;
  const auto program = programs.find(name);
  if (program == programs.end()) {
    const std::string what = name.empty() ? "name a program" : "there is no program '" + name + "'";
    std::fprintf(stderr, "error: %s\n%s", crossply::printable(what).c_str(), help(programs).c_str());
    return static_cast<int>(crossply::Exit::usage);
  }
  std::string command = (file.parent_path() / ("crossply " + name)).string();
  argv[1] = command.data();
  return program->second(argc - 1, argv + 1);
}
