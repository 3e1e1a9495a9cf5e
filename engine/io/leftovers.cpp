#include "engine/io/leftovers.h"

#include <signal.h>
#include <sys/types.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/statfs.h>
#else
#include <sys/mount.h>
#endif

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
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

bool was_modified_lately(const fs::path& path) {
  const auto limit = fs::file_time_type::clock::now() - std::chrono::hours(1);
  std::error_code error;
  const auto is_new = [&](const fs::path& one) {  // what has gone meanwhile was at work, too
    return fs::last_write_time(one, error) > limit || error;
  };
  if (is_new(path)) return true;
  if (!fs::is_directory(fs::symlink_status(path, error))) return false;
  for (fs::recursive_directory_iterator it(path, error), end; !error && it != end; it.increment(error))
    if (is_new(it->path())) return true;
  return static_cast<bool>(error);
}

}  // namespace

bool is_on_local_disk(const std::string& dir) {
  struct statfs system {};
  if (::statfs(dir.c_str(), &system) != 0) return false;
#ifdef __linux__
  switch (static_cast<uint32_t>(system.f_type)) {
    case 0xEF53:      // ext2, ext3, ext4
    case 0x58465342:  // XFS
    case 0x9123683E:  // Btrfs
    case 0x2FC12FC1:  // ZFS
    case 0xF2F52010:  // F2FS
    case 0x01021994:  // tmpfs
    case 0x858458F6:  // ramfs
    case 0x794C7630:  // overlayfs
      return true;
    default: return false;
  }
#else
  return (system.f_flags & MNT_LOCAL) != 0;
#endif
}

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

void remove_leftovers_of(const std::string& path, bool (*local_disk)(const std::string& dir)) {
  std::error_code ignored;  // of a directory that cannot be listed: then they stay
  fs::path target = fs::weakly_canonical(fs::absolute(path, ignored), ignored);
  if (!target.has_filename()) target = target.parent_path();
  const bool local = local_disk(target.parent_path().string());
  const std::string own = str("-", ::getpid());
  std::vector<fs::path> leftovers;
  std::string of;
  for (fs::directory_iterator it(target.parent_path(), ignored), end; !ignored && it != end; it.increment(ignored))
    if (is_leftover(it->path().filename(), &of) && of == target.filename()) leftovers.push_back(it->path());
  for (const fs::path& leftover : leftovers)
    if (local || leftover.string().ends_with(own) || !was_modified_lately(leftover)) fs::remove_all(leftover, ignored);
}

}  // namespace crossply
