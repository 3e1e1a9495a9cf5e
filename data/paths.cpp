#include "data/paths.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "engine/io/file.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;

int glob_error = 0;  // glob's callback gets no context
std::string glob_error_path;

// A directory that is not there matches nothing; one that cannot be listed is an error.
int note_glob_error(const char* path, int error) {
  if (error == ENOENT || error == ENOTDIR) return 0;
  glob_error = error;
  glob_error_path = path;
  return 1;
}

bool is_text_name(const std::string& path) {
  const std::string name = unpacked_name(path);
  return name.ends_with(".txt") || name.ends_with(".text") || name.ends_with(".md") || name.ends_with(".jsonl") ||
         name.ends_with(".ndjson") || name.ends_with(".parquet");
}

// Links to directories are not followed, so that there is no circle.
void list_directory(const std::string& dir, std::vector<std::string>& files, int64_t& passed_over) {
  std::error_code error;
  fs::recursive_directory_iterator it(dir, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::error_code ignored;
    if (it->path().filename().string().starts_with('.') || !it->is_regular_file(ignored)) continue;
    if (is_text_name(it->path().string())) files.push_back(it->path().string());
    else ++passed_over;
  }
  if (error) fail_io("list", dir, error.value());
}

}  // namespace

std::vector<std::string> match_paths(const std::string& pattern, bool maybe_none) {
  struct stat status {};
  if (::stat(pattern.c_str(), &status) == 0) return {pattern};
  if (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG) fail_io("open", pattern, errno);
  glob_t found{};
  int error = ::glob(pattern.c_str(), 0, note_glob_error, &found);
  while (error == GLOB_ABORTED && glob_error == EINTR) {
    ::globfree(&found);
    error = ::glob(pattern.c_str(), 0, note_glob_error, &found);
  }
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (error == GLOB_NOMATCH && maybe_none) return {};
  if (error == GLOB_NOMATCH) fail(Exit::no_input, pattern, ": no such file");
  if (error == GLOB_ABORTED) fail_io("list", glob_error_path, glob_error);
  if (error != 0) fail_io("list", pattern, ENOMEM);
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string unpacked_name(const std::string& path) {
  std::string name = fs::path(path).filename().string();
  for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  for (const char* packed : {".gz", ".zst"})
    if (name.ends_with(packed)) name.resize(name.rfind('.'));
  return name;
}

std::vector<std::string> text_files(const std::string& path, int64_t* passed_over) {
  std::error_code ignored;
  int64_t others = 0;
  const bool is_name = fs::exists(path, ignored) || path.find_first_of("*?[") == path.npos;
  std::vector<std::string> files;
  for (const std::string& one : is_name ? std::vector{path} : match_paths(path)) {
    if (!fs::is_directory(one, ignored)) {
      files.push_back(one);
      continue;
    }
    std::vector<std::string> below;
    list_directory(one, below, others);
    if (below.empty() && is_name)
      fail(Exit::no_input, one, ": no file in it ends with .txt, .text, .md, .jsonl, .ndjson (perhaps with .gz or ",
           ".zst behind) or .parquet; a pattern takes others: ", one, one.ends_with('/') ? "" : "/", "*");
    std::sort(below.begin(), below.end());
    files.insert(files.end(), below.begin(), below.end());
  }
  if (files.empty()) fail(Exit::no_input, path, ": no file of text in what the pattern matches");
  if (passed_over != nullptr) *passed_over += others;
  return files;
}

}  // namespace crossply
