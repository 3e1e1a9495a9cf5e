#include "engine/leftovers.h"

#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <vector>

#include "engine/check.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;

// Whether a process has ended. One that nobody has waited for yet is still listed, and in a container may be for ever.
bool is_gone(pid_t pid) {
  if (::kill(pid, 0) != 0) return errno == ESRCH;
  std::ifstream stat(str("/proc/", pid, "/stat"));  // "17 (name) Z ..."; the name may be anything
  std::string text;
  std::getline(stat, text, '\0');
  const size_t name_end = text.rfind(')');
  return name_end != std::string::npos && text.compare(name_end, 3, ") Z") == 0;
}

}  // namespace

bool is_leftover(const std::string& name, std::string* of) {
  const std::string prefix = ".tmp-";
  const size_t dash = name.rfind('-');
  if (!name.starts_with(prefix) || dash < prefix.size()) return false;
  const char* last = name.data() + name.size();
  pid_t pid = 0;
  const auto [rest, error] = std::from_chars(name.data() + dash + 1, last, pid);
  if (error != std::errc() || rest != last || pid <= 0) return false;
  *of = name.substr(prefix.size(), dash - prefix.size());
  return pid == ::getpid() || is_gone(pid);
}

void remove_leftovers_of(const std::string& path) {
  std::error_code ignored;  // of a directory that cannot be listed: then they stay
  fs::path target = fs::weakly_canonical(fs::absolute(path, ignored), ignored);
  if (!target.has_filename()) target = target.parent_path();
  std::vector<fs::path> leftovers;
  std::string of;
  for (fs::directory_iterator it(target.parent_path(), ignored), end; !ignored && it != end; it.increment(ignored))
    if (is_leftover(it->path().filename(), &of) && of == target.filename()) leftovers.push_back(it->path());
  for (const fs::path& leftover : leftovers) fs::remove_all(leftover, ignored);
}

}  // namespace crossply
