#include "train/run_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "models/checkpoint.h"

namespace crossply {
namespace fs = std::filesystem;

void check_run_dir(const TrainOptions& o) {
  if (o.out.empty()) fail(Exit::usage, "--out is needed: the directory for the run");
  if (o.resume && o.steps == 0) fail(Exit::usage, "--resume with --steps 0: there is nothing to continue");
  std::error_code error;
  const fs::file_type type = fs::status(o.out, error).type();
  if (type == fs::file_type::none) fail_io("inspect", o.out, error.value());
  const bool directory = type == fs::file_type::directory;
  // What --dump-tensors writes does not make it a run directory.
  const bool used = path_exists(o.out) && !(directory && holds_only_leftovers(o.out, "tensors.safetensors"));
  if (!used && o.resume && o.data.spec.empty())
    fail(Exit::usage, "--resume: there is no run in ", o.out, " yet; to start one, give its flags");
  if (!used) return;
  if (!o.resume)
    fail(Exit::usage, o.out, " exists and is not empty; choose another --out, or --resume to continue the run in it");
  if (path_exists(o.out + "/config.json"))
    fail(Exit::usage, "--resume: ", o.out,
         " is a model directory, not a run directory; give another --out,"
         " and --init ",
         o.out, " to start from its weights");
  if (!path_exists(o.out + "/flags.json"))
    fail(Exit::usage, "--resume: ", o.out, " is not a run directory: it has no flags.json; choose another --out");
}

RunDir::RunDir(const std::string& path) : path_(path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail_io("create", path, error.value());
  fd_ = Descriptor(uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (fd_.get() < 0) fail_io("open", path, errno);
  // Any other failure means a file system without locks.
  if (uninterrupted([&] { return ::flock(fd_.get(), LOCK_EX | LOCK_NB); }) != 0 && errno == EWOULDBLOCK)
    fail(Exit::usage, path, " is in use by another training process; wait for it or choose another --out");
}

void RunDir::check_present() const {
  struct stat named, held;
  if (::fstat(fd_.get(), &held) != 0) fail_io("inspect", path_, errno);
  const bool found = ::stat(path_.c_str(), &named) == 0;
  if (!found && errno != ENOENT && errno != ENOTDIR) fail_io("inspect", path_, errno);
  if (!found || named.st_dev != held.st_dev || named.st_ino != held.st_ino)
    fail(Exit::io, "the run directory ", path_, " was removed, moved or replaced during the run");
}

std::string find_checkpoint(const TrainOptions& o) {
  if (!o.resume) return "";
  std::vector<std::string> skipped;
  const std::string checkpoint = newest_valid_checkpoint(o.out, &skipped);
  for (const std::string& line : skipped) std::printf("%s %s\n", o.label.c_str(), line.c_str());
  if (checkpoint.empty() && !skipped.empty())
    fail(Exit::bad_data, "--resume: no checkpoint in ", o.out, " is valid; move it away to start again");
  if (!skipped.empty()) set_aside_damaged_checkpoints(o.out);
  if (!checkpoint.empty()) return checkpoint;
  const nlohmann::json settings = read_run_settings(o.out);
  if (!settings.is_null()) {
    refuse_other_settings(settings, o, o.out + "/flags.json");
    refuse_other_config(parse_config(settings.value("config", nlohmann::json()), o.out + "/flags.json: config"),
                        o.config, o.out + "/flags.json");
  }
  const std::string picture = o.out + "/curve.svg";
  if (path_exists(picture) && ::rename(picture.c_str(), free_kept_name(picture).c_str()) != 0)
    fail_io("rename", picture, errno);
  std::printf("%s no checkpoint in %s yet: starting at step 0\n", o.label.c_str(), o.out.c_str());
  return "";
}

}  // namespace crossply
