#include "train/run/run_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "engine/io/new_directory.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "engine/rng.h"
#include "models/disk/checkpoint.h"
#include "models/disk/config_json.h"
#include "models/disk/modelling_file.h"
#include "train/run/branch.h"

namespace crossply {
namespace fs = std::filesystem;
namespace {

const std::string mark_name = ".job";

// The job's number in a run directory; "" where there is none.
std::string read_mark(const std::string& run_dir) {
  try {
    return read_file(run_dir + "/" + mark_name, 64);
  } catch (const Error& error) {
    if (error.code == Exit::no_input) return "";
    throw;
  }
}

std::string random_number() { return str(std::hex, system_random_bits(), "-", system_random_bits()); }

}  // namespace

void check_run_dir(const Settings& settings, const World& world) {
  if (settings.out.empty()) fail(Exit::usage, "--out is needed: the directory for the run");
  if (settings.resume && settings.steps == 0)
    fail(Exit::usage, "--resume with --steps 0: there is nothing to continue");
  if (!world.leads()) return;
  if (settings.steps == 0 && settings.dump_tensors.empty()) require_replaceable(settings.out);
  std::error_code error;
  const fs::file_type type = fs::status(settings.out, error).type();
  if (type == fs::file_type::none) fail_io("inspect", settings.out, error.value());
  const bool directory = type == fs::file_type::directory;
  // What --dump-tensors writes does not make it a run directory, nor what ranks find each other by, nor what a job left
  // that ended before its run began.
  const bool used =
      path_exists(settings.out) &&
      !(directory && holds_only_leftovers(settings.out, {"tensors.safetensors", ".meet", "last_exit.json", mark_name}));
  if (!used && settings.resume && settings.data.spec.empty())
    fail(Exit::usage, "--resume: there is no run in ", settings.out, " yet; to start one, give its flags");
  if (!used) return;
  if (!settings.resume)
    fail(Exit::usage, settings.out,
         " exists and is not empty; choose another --out, or --resume to continue the run in it");
  if (path_exists(settings.out + "/config.json"))
    fail(Exit::usage, "--resume: ", settings.out,
         " is a model directory, not a run directory; give another --out,"
         " and --init ",
         shell_word(settings.out), " to start from its weights");
  if (!path_exists(settings.out + "/flags.json"))
    fail(Exit::usage, "--resume: ", settings.out,
         " is not a run directory: it has no flags.json; choose another --out");
}

RunDir::RunDir(const std::string& path, const World& world) : path_(path) {
  if (!world.leads()) return;
  make_directories(path);
  if (lock_directory(path, LOCK_EX, &fd_)) return;
  if (fd_.get() < 0) fail_io("open", path, ENOENT);
  fail(Exit::usage, path, " is in use by another training process; wait for it or choose another --out");
}

void RunDir::open() {
  fd_ = Descriptor(uninterrupted([&] { return ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (fd_.get() < 0) fail_io("open", path_, errno);
}

void RunDir::mark(std::shared_ptr<ProcessGroup> ranks, double patience) {
  group_ = std::move(ranks);
  ProcessGroup& group = *group_;
  if (group.world.alone()) {
    if (::unlink((path_ + "/" + mark_name).c_str()) != 0 && errno != ENOENT) fail_io("remove", mark_name, errno);
    return;
  }
  if (group.world.leads()) {
    mark_ = random_number();
    write_file_atomically(path_ + "/" + mark_name, mark_);
  }
  const std::string mine = group.share(mark_);
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience);
  while (read_mark(path_) != mine) {
    if (std::chrono::steady_clock::now() >= limit)
      fail(Exit::no_input, path_, " is not the directory that rank 0 has under this name: rank ", group.world.rank,
           " does not find ", mark_name, " of this job in it. All ranks need one file system: choose an --out that ",
           "they share");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (!group.world.leads()) open();
}

void RunDir::check_mine() const {
  if (!mark_.empty() && read_mark(path_) != mark_)
    fail(Exit::io, path_, " belongs to another job by now, which was started while this one was cut off; nothing is ",
         "saved here");
}

void RunDir::check_present() const {
  struct stat named, held;
  if (::fstat(fd_.get(), &held) != 0) fail_io("inspect", path_, errno);
  const bool found = ::stat(path_.c_str(), &named) == 0;
  if (!found && errno != ENOENT && errno != ENOTDIR) fail_io("inspect", path_, errno);
  if (!found || named.st_dev != held.st_dev || named.st_ino != held.st_ino)
    fail(Exit::io, "the run directory ", path_, " was removed, moved or replaced during the run");
}

std::string step_dir(const std::string& run_dir, int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "/step_%08lld", static_cast<long long>(step));
  return run_dir + name;
}

std::vector<int64_t> checkpoint_steps(const std::string& run_dir) {
  std::vector<int64_t> steps;
  for (const std::string& dir : model_dirs_in(run_dir)) {
    const std::string name = fs::path(dir).filename().string();
    int64_t step = 0;
    std::from_chars(name.data() + std::min<size_t>(5, name.size()), name.data() + name.size(), step);
    if (dir == step_dir(run_dir, step)) steps.push_back(step);  // not of step_N.old, which was replaced
  }
  return steps;
}

std::string list_of(const std::vector<int64_t>& steps) {
  std::string list;
  for (const int64_t step : steps) list += str(list.empty() ? "" : ", ", step);
  return list.empty() ? "none" : list;
}

void write_run_settings(const Settings& settings) {
  write_file_atomically(settings.out + "/flags.json", json_text(all_settings(settings), 2) + "\n");
}

namespace {

// Of rank 0.
std::string choose_checkpoint(const Settings& settings) {
  std::vector<std::string> skipped;
  const std::string checkpoint = newest_valid_checkpoint(settings.out, &skipped);
  for (const std::string& line : skipped) std::printf("%s %s\n", settings.label.c_str(), printable(line).c_str());
  if (checkpoint.empty() && !skipped.empty())
    fail(Exit::bad_data, "--resume: no checkpoint in ", settings.out, " is valid; move it away to start again");
  if (!skipped.empty()) set_aside_damaged_checkpoints(settings.out);
  if (!checkpoint.empty()) {
    note_outdated_modelling_file(checkpoint, settings.out);
    return checkpoint;
  }
  if (!settings.branch.run.empty()) return make_branch(settings);
  const nlohmann::json saved = read_run_settings(settings.out);
  if (!saved.is_null()) {
    // No step was taken by the teacher yet, so that one under any name can take its place.
    const bool has_teacher =
        saved.is_object() && !settings.teacher.empty() && saved.value("teacher", nlohmann::json("")) != "";
    refuse_other_settings(saved, settings, settings.out + "/flags.json",
                          has_teacher ? std::set<std::string>{"teacher"} : std::set<std::string>{});
    refuse_other_config(parse_config(saved.value("config", nlohmann::json()), settings.out + "/flags.json: config"),
                        settings.config, settings.out + "/flags.json");
  }
  const std::string picture = settings.out + "/curve.svg";
  if (path_exists(picture) && ::rename(picture.c_str(), free_kept_name(picture).c_str()) != 0)
    fail_io("rename", picture, errno);
  std::printf("%s no checkpoint in %s yet: starting at step 0\n", settings.label.c_str(),
              printable(settings.out).c_str());
  return "";
}

}  // namespace

std::string find_checkpoint(const Settings& settings, const RunDir& dir) {
  if (!settings.resume && settings.branch.run.empty()) return "";
  ProcessGroup& group = *dir.group();
  const std::string chosen = group.world.leads() ? fs::path(choose_checkpoint(settings)).filename().string() : "";
  const std::string name = group.share(chosen);
  return name.empty() ? "" : settings.out + "/" + name;
}

}  // namespace crossply
