// All programs of the package in one file: each is a link to it, and the name it is called by says which one is meant.
#include <cstdio>
#include <filesystem>

#include <programs_inside.h>
#include "engine/check.h"

int bench_main(int argc, char** argv);

int main(int argc, char** argv) {
  auto programs = programs_inside();
  programs.emplace("bench", bench_main);
  const std::string name = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "";
  const auto program = programs.find(name);
  if (program != programs.end()) return program->second(argc, argv);
  std::fprintf(stderr, "error: call this by the name of one of its programs, which are links to it:");
  for (const auto& each : programs) std::fprintf(stderr, " %s", each.first.c_str());
  std::fprintf(stderr, "\n");
  return static_cast<int>(crossply::Exit::usage);
}
