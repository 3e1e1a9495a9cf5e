// What a killed process left, on a disk of this machine and on one that others share.
#include "engine/io/leftovers.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>

#include "engine/io/file.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

namespace fs = std::filesystem;

constexpr int nobody = 1073741824;  // a process of this number there never is

void make_old(const std::string& path) {
  fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::minutes(61));
}

bool shared_disk(const std::string&) { return false; }
bool own_disk(const std::string&) { return true; }

}  // namespace

TEST_CASE("leftovers: on a shared disk those of other processes stay for an hour, this process's own do not") {
  const TempDir dir;
  const std::string other = dir.file(str(".tmp-file-", nobody)), own = temporary_sibling(dir.file("file"));
  write_text(other, "half");
  write_text(own, "half");
  remove_leftovers_of(dir.file("file"), shared_disk);
  CHECK(fs::exists(other));
  CHECK(!fs::exists(own));
  make_old(other);
  remove_leftovers_of(dir.file("file"), shared_disk);
  CHECK(!fs::exists(other));
  write_text(other, "half");
  remove_leftovers_of(dir.file("file"), own_disk);
  CHECK(!fs::exists(other));
}

TEST_CASE("leftovers: a directory is as young as what was modified last in it") {
  const TempDir dir;
  const std::string other = dir.file(str(".tmp-model-", nobody)), file = other + "/model.safetensors";
  fs::create_directory(other);
  write_text(file, "half");
  make_old(other);
  remove_leftovers_of(dir.file("model"), shared_disk);
  CHECK(fs::exists(file));
  make_old(file);
  remove_leftovers_of(dir.file("model"), shared_disk);
  CHECK(!fs::exists(other));
}

TEST_CASE("leftovers: a disk that is not known counts as shared") {
  CHECK(!is_on_local_disk("/proc"));
  CHECK(!is_on_local_disk("/not/there"));
}
