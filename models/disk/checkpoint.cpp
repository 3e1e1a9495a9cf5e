#include "models/disk/checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>

#include "engine/io/json.h"
#include "engine/io/leftovers.h"
#include "engine/io/printable.h"
#include "engine/io/sha256.h"
#include "engine/platform.h"
#include "models/disk/modelling_file.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;

const std::string manifest_name = "manifest.json", old_suffix = ".old";
constexpr uint64_t max_manifest = 16 << 20;

struct FileEntry {
  uint64_t bytes = 0;
  std::string sha256;
};
using Manifest = std::map<std::string, FileEntry>;

bool is_plain_name(const std::string& name) {
  const bool short_enough = !name.empty() && name.size() <= 255;
  return short_enough && name != "." && name != ".." && name.find_first_of(std::string("/\0", 2)) == std::string::npos;
}

std::string sha256_of(const InputFile& file) {
  std::vector<char> buffer(std::min<uint64_t>(file.size(), 1 << 20));
  Sha256 hash;
  for (uint64_t at = 0; at < file.size(); at += buffer.size()) {
    const uint64_t n = std::min<uint64_t>(buffer.size(), file.size() - at);
    file.read(at, buffer.data(), n);
    hash.update(buffer.data(), n);
  }
  return hash.hex();
}

// Brings a file to the disk and reads it.
FileEntry entry_of(const std::string& path) {
  sync_file(path);
  const InputFile file(path);
  return {file.size(), sha256_of(file)};
}

std::string text_of(const Manifest& manifest) {
  nlohmann::json files = nlohmann::json::object();
  for (const auto& [name, entry] : manifest) files[name] = {{"bytes", entry.bytes}, {"sha256", entry.sha256}};
  return json_text(nlohmann::json{{"files", files}}, 2) + "\n";
}

// path: for errors.
Manifest parse_manifest(const std::string& text, const std::string& path) {
  Manifest manifest;
  try {
    const auto json = parse_json(text, path);
    for (const auto& [name, entry] : json.at("files").items()) {
      if (!is_plain_name(name)) fail(Exit::bad_data, path, ": lists a file outside its directory");
      if (!entry.at("bytes").is_number_unsigned()) fail(Exit::bad_data, path, ": the size of ", name, " is no integer");
      manifest[name] = {entry.at("bytes").get<uint64_t>(), entry.at("sha256").get<std::string>()};
    }
  } catch (const nlohmann::json::exception&) {
    fail(Exit::bad_data, path, ": is not a manifest");
  }
  if (manifest.empty()) fail(Exit::bad_data, path, ": lists no files");
  return manifest;
}

Manifest read_manifest(const std::string& path) { return parse_manifest(read_file(path, max_manifest), path); }

// Fails unless every listed file but those in `except` is there with the listed size and, if `contents`, the listed
// digest. Returns the manifest.
Manifest verify(const std::string& dir, bool contents, const std::set<std::string>& except = {}) {
  Manifest manifest = read_manifest(dir + "/" + manifest_name);
  for (const auto& [name, entry] : manifest) {
    if (except.contains(name)) continue;
    const InputFile file(dir + "/" + name);
    if (file.size() != entry.bytes)
      fail(Exit::bad_data, file.path(), ": has ", file.size(), " bytes, the manifest says ", entry.bytes);
    if (contents && sha256_of(file) != entry.sha256)
      fail(Exit::bad_data, file.path(), ": its SHA-256 is not the one in the manifest: the file was damaged");
  }
  return manifest;
}

// Whether an error says that the contents are wrong, and not that they could not be read.
bool is_damage(const Error& error) { return error.code == Exit::bad_data || error.code == Exit::no_input; }

bool passes(const std::string& dir, bool contents, std::string* why) {
  try {
    verify(dir, contents);
    return true;
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    if (why != nullptr) *why = error.what();
    return false;
  }
}

// Names in a directory, sorted.
std::vector<std::string> names_in(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  if (error) fail_io("list", dir, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

// True if everything in the directory is a checkpoint's own: then it may be removed.
bool is_only_a_checkpoint(const std::string& dir) {
  try {
    const Manifest manifest = read_manifest(dir + "/" + manifest_name);
    const auto names = names_in(dir);
    return std::all_of(names.begin(), names.end(),
                       [&](const std::string& name) { return name == manifest_name || manifest.count(name) != 0; });
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    return false;
  }
}

void remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail_io("remove", path, error.value());
}

void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_io("rename " + from + " to", to, errno);
}

std::string parent_of(const std::string& path) { return fs::path(path).parent_path().string(); }

// Absolute, without links and without a slash at the end.
std::string full_path(const std::string& path) {
  std::error_code error;
  fs::path full = fs::weakly_canonical(fs::absolute(path, error), error);
  if (error) fail_io("find", path, error.value());
  if (!full.has_filename()) full = full.parent_path();
  return full.string();
}

// Removes a checkpoint; under a temporary name, so that nobody sees half of it under a real one.
void remove_checkpoint(const std::string& dir) {
  const std::string doomed = temporary_sibling(dir);
  remove_tree(doomed);
  rename_path(dir, doomed);
  remove_tree(doomed);
}

// Frees the name `dir`: removes a checkpoint, keeps anything else as FINAL.kept-1, -2, ...
void make_way(const std::string& dir, const std::string& final_dir) {
  if (!path_exists(dir)) return;
  if (is_only_a_checkpoint(dir)) return remove_checkpoint(dir);
  rename_path(dir, free_kept_name(final_dir));
}

struct SavedStep {
  uint64_t number;
  bool old;  // the version that was replaced
  std::string dir;
};

// Every step_NUMBER and step_NUMBER.old in a run directory, newest first, a replaced one after its replacement.
std::vector<SavedStep> steps_in(const std::string& run_dir) {
  std::vector<SavedStep> steps;
  for (const std::string& name : names_in(run_dir)) {
    const std::string prefix = "step_";
    if (!name.starts_with(prefix)) continue;
    SavedStep step{0, false, run_dir + "/" + name};
    const char* last = name.data() + name.size();
    const auto [rest, error] = std::from_chars(name.data() + prefix.size(), last, step.number);
    step.old = rest != last && rest == name.data() + name.size() - old_suffix.size() && name.ends_with(old_suffix);
    if (error == std::errc() && (rest == last || step.old)) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end(), [](const SavedStep& a, const SavedStep& b) {
    return a.number != b.number ? a.number > b.number : a.old < b.old;
  });
  return steps;
}

// The leftovers among the names in a run directory: of the files and checkpoints that a run writes, of nothing else.
bool is_leftover_of_run(const std::string& name) {
  std::string of;
  if (!is_leftover(name, &of)) return false;
  for (const std::string file : {"metrics.jsonl", "metrics.csv", "environment.jsonl", "flags.json", "curve.svg",
                                 "tensors.safetensors", ".job", ".meet"})
    if (of == file || of.starts_with(file + ".kept-")) return true;
  const std::string start = "step_";
  if (of.starts_with("damaged_")) of = of.substr(8);
  if (of.ends_with(old_suffix)) of.resize(of.size() - old_suffix.size());
  return of.size() > start.size() && of.starts_with(start) &&
         of.find_first_not_of("0123456789", start.size()) == std::string::npos;
}

}  // namespace

std::string free_kept_name(const std::string& path) {
  int number = 1;
  while (path_exists(str(path, ".kept-", number))) ++number;
  return str(path, ".kept-", number);
}

bool holds_only_leftovers(const std::string& dir, const std::vector<std::string>& besides) {
  const auto names = names_in(dir);
  return std::all_of(names.begin(), names.end(), [&](const std::string& name) {
    return std::find(besides.begin(), besides.end(), name) != besides.end() || is_leftover_of_run(name);
  });
}

void remove_leftovers_in(const std::string& run_dir) {
  for (const std::string& name : names_in(run_dir))
    if (is_leftover_of_run(name)) remove_tree(run_dir + "/" + name);
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code ignored;  // a destructor cannot report; remove_old_checkpoints tries again
  if (!temporary_.empty() && !joined_) fs::remove_all(temporary_, ignored);
}

void CheckpointWriter::begin(const std::string& final_dir) {
  CHECK_THAT(temporary_.empty(), "a checkpoint is already being written to ", final_);
  final_ = full_path(final_dir);
  make_directories(parent_of(final_));
  // Listing also fails if the name belongs to a file.
  if (path_exists(final_) && !names_in(final_).empty() && !path_exists(final_ + "/" + manifest_name))
    fail(Exit::io, "cannot write a checkpoint to ", final_, ": it holds files but no ", manifest_name,
         ", so it is not a checkpoint to replace: move it away or choose another name");
  remove_leftovers_of(final_);
  const std::string temporary = temporary_sibling(final_);
  if (::mkdir(temporary.c_str(), 0777) != 0) fail_io("create", temporary, errno);
  temporary_ = temporary;
}

std::string CheckpointWriter::building() const {
  CHECK_THAT(!temporary_.empty(), "begin() comes first");
  return fs::path(temporary_).filename().string();
}

void CheckpointWriter::join(const std::string& final_dir, const std::string& building) {
  CHECK_THAT(temporary_.empty() && is_plain_name(building), building, " beside ", final_dir);
  final_ = full_path(final_dir);
  temporary_ = parent_of(final_) + "/" + building;
  joined_ = true;
}

std::string CheckpointWriter::path(const std::string& file) const {
  CHECK_THAT(!temporary_.empty(), "begin() comes first");
  CHECK_THAT(is_plain_name(file) && file != manifest_name, "not a name for a file of a checkpoint: ", file);
  return temporary_ + "/" + file;
}

std::string CheckpointWriter::record(const std::vector<std::string>& files) const {
  Manifest manifest;
  for (const std::string& file : files) manifest[file] = entry_of(path(file));
  return text_of(manifest);
}

void CheckpointWriter::commit(const std::vector<std::string>& records, const std::function<void()>& may_publish) {
  CHECK_THAT(!temporary_.empty() && !joined_, "begin() comes first");
  Manifest manifest;
  for (const std::string& record : records)
    for (const auto& [name, entry] : parse_manifest(record, "another process's record"))
      CHECK_THAT(manifest.emplace(name, entry).second, "two processes wrote ", name);
  for (const auto& [name, entry] : manifest)
    if (const uint64_t bytes = InputFile(path(name)).size(); bytes != entry.bytes)
      fail(Exit::io, path(name), ": has ", bytes, " bytes here, where another process wrote ", entry.bytes);
  for (const std::string& name : names_in(temporary_))
    if (!manifest.contains(name)) manifest[name] = entry_of(temporary_ + "/" + name);
  CHECK_THAT(!manifest.empty(), "a checkpoint without files: ", final_);
  write_file_atomically(temporary_ + "/" + manifest_name, text_of(manifest));  // syncs itself and the directory
  may_publish();
  publish();
}

// Moves the finished directory to its final name. A directory cannot be renamed onto one that has files, so the two
// change places in one system call. Where the file system cannot do that (NFS, some FUSE), or where the one to replace
// must be kept, it steps aside as NAME.old: newest_valid_checkpoint looks there if we are killed between two renames.
void CheckpointWriter::publish() {
  const std::string fresh = std::exchange(temporary_, "");  // complete, so no longer to be thrown away
  const std::string aside = final_ + old_suffix;
  if (::rename(fresh.c_str(), final_.c_str()) == 0) return sync_directory(parent_of(final_));
  if (errno != ENOTEMPTY && errno != EEXIST) fail_io("rename " + fresh + " to", final_, errno);
  if (is_only_a_checkpoint(final_) && exchange_paths(fresh, final_)) {
    sync_directory(parent_of(final_));
    return remove_tree(fresh);
  }
  make_way(aside, final_);
  rename_path(final_, aside);
  rename_path(fresh, final_);
  sync_directory(parent_of(final_));
  make_way(aside, final_);
}

bool is_valid_checkpoint(const std::string& dir, std::string* why) { return passes(dir, true, why); }

std::string newest_valid_checkpoint(const std::string& run_dir, std::vector<std::string>* skipped) {
  if (skipped != nullptr) skipped->clear();
  if (!path_exists(run_dir)) return "";
  for (const SavedStep& step : steps_in(run_dir)) {
    std::string why;
    if (is_valid_checkpoint(step.dir, &why)) return step.dir;
    // Removed while we were reading, by a run that has saved a newer one.
    if (!path_exists(step.dir)) return newest_valid_checkpoint(run_dir, skipped);
    if (skipped != nullptr) skipped->push_back("skipped the checkpoint " + step.dir + ": " + why);
  }
  return "";
}

void check_manifest(const std::string& dir) {
  const std::string path = dir + "/" + manifest_name;
  std::string why;
  if (!path_exists(path) || passes(dir, true, &why)) return;
  if (why.find("/modeling_crossply_") != std::string::npos)
    fail(Exit::bad_data, why, "; to rewrite it, give the directory to build/transplant --refresh");
  fail(Exit::bad_data, why, "; if it was changed on purpose, remove ", manifest_name, " from a copy of ", dir);
}

std::string resolve_model_dir(const std::string& path) {
  if (path_exists(path + "/config.json")) {
    check_manifest(path);
    return path;
  }
  std::error_code error;
  const auto type = fs::status(path, error).type();
  if (type == fs::file_type::none) fail_io("look into", path, error.value());
  if (type != fs::file_type::directory)
    fail(Exit::no_input, path, ": no such directory; expected a model or run directory");
  std::vector<std::string> skipped;
  std::string newest = newest_valid_checkpoint(path, &skipped);
  if (!newest.empty()) {
    for (const std::string& line : skipped) std::fprintf(stderr, "note: %s\n", printable(line).c_str());
    return newest;
  }
  std::string why;
  for (const std::string& line : skipped) why += "; " + line;
  fail(Exit::no_input, path, ": neither config.json nor a valid checkpoint (step_*) in it", why);
}

ModelDir::ModelDir(const std::string& path) {
  do path_ = resolve_model_dir(path);
  while (!lock_directory(path_, LOCK_SH, &lock_) || !path_exists(path_));  // removed before we held it
  note_outdated_modelling_file(path_, path);
}

std::vector<std::string> replace_files(const std::string& dir, NamedContents files) {
  Descriptor lock;  // a training run beside this process removes no checkpoint that is locked
  if (!lock_directory(dir, LOCK_SH, &lock) || !path_exists(dir)) return {};
  const std::string path = dir + "/" + manifest_name;
  const bool listed = path_exists(path);
  std::set<std::string> code;  // it need not be as listed: it is made anew
  for (const auto& [name, contents] : files)
    if (name.ends_with(".py")) code.insert(name);
  Manifest manifest = listed ? verify(dir, true, code) : Manifest();
  std::erase_if(files, [&](const auto& file) {
    const std::string name = dir + "/" + file.first;
    if (!file_holds(name, file.second)) return false;
    const auto entry = manifest.find(file.first);
    return !listed || (entry != manifest.end() && entry->second.sha256 == sha256_of(InputFile(name)));
  });
  if (files.empty()) return {};
  remove_leftovers_of(path);
  for (const auto& [name, contents] : files) manifest.erase(name);
  if (listed && manifest.empty()) fail(Exit::bad_data, path, ": lists no weights, so it is no model's");
  if (listed) write_file_atomically(path, text_of(manifest));
  std::vector<std::string> names;
  for (const auto& [name, contents] : files) {
    CHECK_THAT(is_plain_name(name) && name != manifest_name, "not a name for a file of a checkpoint: ", name);
    write_file_atomically(dir + "/" + name, contents);
    manifest[name] = entry_of(dir + "/" + name);
    names.push_back(name);
  }
  if (listed) write_file_atomically(path, text_of(manifest));
  return names;
}

std::vector<std::string> model_dirs_in(const std::string& path) {
  if (path_exists(path + "/config.json")) return {path};
  std::vector<std::string> dirs;
  std::error_code error;
  if (fs::is_directory(path, error))
    for (const SavedStep& step : steps_in(path)) dirs.push_back(step.dir);
  if (error && error.value() != ENOENT && error.value() != ENOTDIR) fail_io("inspect", path, error.value());
  if (dirs.empty())
    fail(Exit::no_input, path,
         ": neither config.json nor a checkpoint (step_*) in it; expected a model or run directory");
  return dirs;
}

void set_aside_damaged_checkpoints(const std::string& run_dir) {
  if (!path_exists(run_dir)) return;
  for (const SavedStep& step : steps_in(run_dir)) {
    if (is_valid_checkpoint(step.dir, nullptr)) return;
    const std::string aside = run_dir + "/damaged_" + fs::path(step.dir).filename().string();
    make_way(aside, aside);
    rename_path(step.dir, aside);
  }
}

void remove_old_checkpoints(const std::string& run_dir, int64_t keep, const std::string& committed,
                            const std::set<int64_t>& spared) {
  CHECK_THAT(keep >= 1, "the newest checkpoint must stay, keep = ", keep);
  const bool known = !committed.empty() && passes(committed, false, nullptr);
  const std::string newest = known ? committed : newest_valid_checkpoint(run_dir);
  bool older = false;
  for (const SavedStep& step : newest.empty() ? std::vector<SavedStep>() : steps_in(run_dir)) {
    if (step.dir == newest) {
      older = true, --keep;
      continue;
    }
    // Complete is enough here: reading every byte of every checkpoint at every save would be slow.
    if (!older || !passes(step.dir, false, nullptr)) continue;
    if (!step.old && spared.contains(static_cast<int64_t>(step.number))) continue;
    if (!step.old && keep-- > 0) continue;
    Descriptor lock;  // against a ModelDir; kept until the name is gone
    if (is_only_a_checkpoint(step.dir) && lock_directory(step.dir, LOCK_EX, &lock)) remove_checkpoint(step.dir);
  }
  remove_leftovers_in(run_dir);
}

}  // namespace crossply
