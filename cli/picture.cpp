#include "cli/picture.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/io/python_program.h"
#include "engine/platform.h"

namespace crossply {
namespace {

// Of "fig.pdf" "pdf"; of anything but png and pdf "svg".
std::string kind_of(const std::string& path) {
  for (const std::string kind : {"png", "pdf"})
    if (path.ends_with("." + kind)) return kind;
  return "svg";
}

// Whether the program is there and ends well. It says nothing.
bool runs(std::vector<std::string> words) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t quiet;
  posix_spawn_file_actions_init(&quiet);
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    posix_spawn_file_actions_addopen(&quiet, descriptor, "/dev/null", O_RDWR, 0);
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, arguments[0], &quiet, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&quiet);
  if (error != 0) return false;
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Twice as many pixels as a figure has, for sharp text.
bool convert(const std::string& kind, const std::string& from, const std::string& to) {
  if (runs({"rsvg-convert", "--format", kind, "--zoom", kind == "png" ? "2" : "1", "--output", to, from})) return true;
  clean_python_path();
  const std::string code = "import sys\nsys.path[:] = [place for place in sys.path if place != '']\nimport cairosvg\n" +
                           str("cairosvg.svg2", kind, "(url=sys.argv[1], write_to=sys.argv[2], scale=") +
                           (kind == "png" ? "2)" : "1)");
  return runs({python_program(), "-c", code, from, to});
}

}  // namespace

void write_picture(const std::string& path, const std::string& svg) {
  const std::string kind = kind_of(path);
  if (kind == "svg") return write_file_atomically(path, svg);
  // Both beside the picture, which takes its place only when it is whole.
  const std::string from = path + ".part.svg", to = path + ".part." + kind;
  write_file_atomically(from, svg);
  const bool done = convert(kind, from, to);
  std::error_code failed;
  std::filesystem::remove(from, failed);
  if (!done) {
    std::filesystem::remove(to, failed);
    fail(Exit::no_input, printable(path), ": a ", kind,
         " needs rsvg-convert (the package librsvg2-bin) or Python with ",
         "cairosvg (pip install cairosvg; the variable PYTHON names another Python); or give --out a name in .svg");
  }
  std::filesystem::rename(to, path, failed);
  if (failed) fail_io("write", path, failed.value());
}

bool begins_as_picture(const std::string& path) {
  std::string start(4, ' ');
  std::ifstream(path, std::ios::binary).read(start.data(), std::ssize(start));
  return start == "<svg" || start == "\x89PNG" || start == "%PDF";
}

}  // namespace crossply
