#include "engine/io/new_directory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>

#include "engine/io/file.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

bool is_mount_point(const std::string& dir, const struct stat& status) {
  struct stat parent {};
  if (::stat((dir + "/..").c_str(), &parent) != 0) fail_io("inspect", dir + "/..", errno);
  if (parent.st_dev != status.st_dev || parent.st_ino == status.st_ino) return true;  // the second: the root
#ifdef STATX_ATTR_MOUNT_ROOT
  struct statx known {};  // also tells of a bind mount of the same file system
  if (::statx(AT_FDCWD, dir.c_str(), 0, 0, &known) == 0) return (known.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
#endif
  return false;
}

}  // namespace

std::string resolve_out(const std::string& out) {
  std::string path = out;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  std::error_code error, ignored;
  const std::string name = fs::path(path).filename().string();
  if (name != "." && name != ".." && !fs::is_symlink(path, ignored)) return path;
  std::string target = fs::weakly_canonical(path, error).string();
  if (error) fail_io("find", path, error.value());
  while (target.size() > 1 && target.ends_with('/')) target.pop_back();
  return target;
}

void require_replaceable(const std::string& out) {
  struct stat own {
  }, current{};
  if (::stat(out.c_str(), &own) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return;
    fail_io("inspect", out, errno);
  }
  if (!S_ISDIR(own.st_mode)) return;
  const std::string advice = str("a new directory takes its place when it is complete; name one in it, as ", out,
                                 out.ends_with('/') ? "" : "/", "NAME");
  if (::stat(".", &current) == 0 && same_file(own, current))
    fail(Exit::usage, "--out ", out, " is the current directory, which cannot be replaced: ", advice);
  if (is_mount_point(out, own))
    fail(Exit::usage, "--out ", out, " is a mount point, which cannot be replaced: ", advice);
}

void require_new_directory(const std::string& out) {
  std::error_code error;
  if (out.empty()) fail(Exit::usage, "--out is empty; give the directory to make");
  if (path_exists(out) && !(fs::is_directory(out, error) && fs::is_empty(out, error)))
    fail(Exit::usage, "--out ", out, " exists and is not empty; choose another name");
  require_replaceable(out);
}

}  // namespace crossply
