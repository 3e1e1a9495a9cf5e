// Checkpoints are directories that survive a kill and a power loss at any moment. One comes into being in three steps:
//   1. complete: all files are on the disk in a temporary directory, .tmp-NAME-PID. manifest.json is written last and
//      lists every file with its size and SHA-256. A checkpoint is valid if its files are as listed.
//   2. visible: the rename to the final name. From here on a resume finds it.
//   3. durable: the parent directory is synced. From here on it survives a power loss.
// A directory that holds a file which no checkpoint lists, somebody's notes, is never removed.
//
// Several processes write one together: the first begins it and tells the others building(), they join(), all write
// their files, the others tell the first their record(), and it commits. Whoever dies before that, the old
// checkpoint stays. What they tell each other goes ways that this file does not know (train/step/trainer_state.cpp).
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/io/file.h"

namespace crossply {

class CheckpointWriter {
 public:
  CheckpointWriter() = default;
  ~CheckpointWriter();  // without commit(): removes the temporary directory, if begin() made it
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // final_dir may be new, empty, or a checkpoint that is going to be replaced; its parents are created.
  void begin(const std::string& final_dir);
  // The name of the temporary directory, which stands beside the final one; and in another process, what this gave.
  std::string building() const;
  void join(const std::string& final_dir, const std::string& building);
  // Where to write a file of the checkpoint; `file` is a plain name.
  std::string path(const std::string& file) const;
  // Brings files that were written to the disk. Returns their sizes and digests, as text for the process that commits.
  std::string record(const std::vector<std::string>& files) const;
  // After this returns the checkpoint is on the disk. A checkpoint it replaces is there until the new one is, and stays
  // as NAME.kept-1, -2, ... if it held files that it did not list. records: of the files that others wrote, which are
  // not read again. may_publish is called when all is ready, right before the checkpoint gets its name; it may throw.
  void commit(
      const std::vector<std::string>& records = {}, const std::function<void()>& may_publish = [] {});

 private:
  void publish();
  std::string final_, temporary_;
  bool joined_ = false;
};

// Reads every byte. If false, *why says what is wrong. That is only what is proven: contents other than the
// manifest's, or a file that is missing. A read that fails says nothing about the checkpoint and is thrown as Exit::io,
// here and in all that look for valid ones below.
bool is_valid_checkpoint(const std::string& dir, std::string* why);

// The valid directory named step_NUMBER with the largest number; "" if there is none. Each newer one that is not valid
// adds a line to *skipped. Also considers step_NUMBER.old, which a kill may leave: see CheckpointWriter::publish.
std::string newest_valid_checkpoint(const std::string& run_dir, std::vector<std::string>* skipped = nullptr);

// Exit::bad_data unless every file that DIR/manifest.json lists is there and as listed. A directory without one passes.
void check_manifest(const std::string& dir);

// --model of every program: a model directory, or a run directory, which stands for its newest valid checkpoint; a
// note on standard error names newer ones that are damaged. Throws Exit::no_input where there is neither, and what
// check_manifest throws.
std::string resolve_model_dir(const std::string& path);

// The same, held: a training run beside this process removes no checkpoint that somebody holds.
class ModelDir {
 public:
  explicit ModelDir(const std::string& path);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Descriptor lock_;
};

// Files of a model directory: name and contents.
using NamedContents = std::vector<std::pair<std::string, std::string>>;
// Replaces these files in their order, unless they have these contents already, and lists them in the manifest, if
// there is one. A kill at any moment leaves a valid directory: the manifest does not list a file while it changes.
// Throws what check_manifest throws, before anything has changed; code (.py) need not be as listed. Returns the names
// of the files that were replaced.
std::vector<std::string> replace_files(const std::string& dir, NamedContents files);

// The model directories that a path stands for: itself, or all checkpoints of a run directory, the newest first.
std::vector<std::string> model_dirs_in(const std::string& path);

// Renames every step_NUMBER newer than the newest valid checkpoint to damaged_step_NUMBER, so that the resumed run can
// write its own. Call it only where a valid one exists.
void set_aside_damaged_checkpoints(const std::string& run_dir);

// Keeps the newest valid checkpoint and the keep - 1 complete ones before it; removes older complete ones that nobody
// holds, and temporaries of dead processes. Invalid directories stay for a person to look at. Not during a write of
// this process. committed: the newest one, as RUN_DIR/step_NUMBER, where this process has just written it, so that its
// digests need not be computed again. spared: steps whose checkpoints stay, and do not count.
void remove_old_checkpoints(const std::string& run_dir, int64_t keep, const std::string& committed = "",
                            const std::set<int64_t>& spared = {});

// Temporaries of dead processes, which a kill leaves (engine/io/leftovers.h). The first: whether there is nothing else
// in a directory, but for the files `besides`. The second: removes them there.
bool holds_only_leftovers(const std::string& dir, const std::vector<std::string>& besides = {});
void remove_leftovers_in(const std::string& run_dir);

// PATH.kept-1, -2, ...: the first that is free.
std::string free_kept_name(const std::string& path);

}  // namespace crossply
