#include "models/disk/checkpoint.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <linux/filter.h>
#include <linux/seccomp.h>

#include <chrono>
#include <cstddef>

#include "engine/io/sha256.h"
#include "engine/rng.h"
#include "tests/support/child.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;

namespace {

std::string sha256_of(const std::string& text) {
  Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex();
}

std::string step_dir(const std::string& run, int step) {
  const std::string number = std::to_string(step);
  return run + "/step_" + std::string(8 - number.size(), '0') + number;
}

void save(const std::string& dir, const std::string& contents) {
  CheckpointWriter writer;
  writer.begin(dir);
  write_file_atomically(writer.path("model.safetensors"), contents);
  std::ofstream(writer.path("train_state.json")) << "{\"size\": " << contents.size() << "}";
  writer.commit();
}

// As check_fails, for a child, whose checks nobody would see.
bool fails_with_io(const std::vector<std::string>& parts, const std::function<void()>& action) {
  const Error error = error_of(action);
  return error.code == Exit::io &&
         std::all_of(parts.begin(), parts.end(), [&](const std::string& part) { return has(error.what(), part); });
}

constexpr int not_possible_here = 99;  // a child that lacks the rights for its test

// The number of a process that has ended.
pid_t dead_process() {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(0);
  ::waitpid(pid, nullptr, 0);
  return pid;
}

// Kills a child; it must not have ended by itself, but as one that lacks rights (false).
bool kill_child(pid_t child) {
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == not_possible_here) return false;
  CHECK(WIFSIGNALED(status));
  return true;
}

}  // namespace

TEST_CASE("sha256: published vectors, in one piece and in many") {
  const std::string two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  CHECK(sha256_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256_of(two_blocks) == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha256_of(std::string(1000000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  for (size_t size : {55, 56, 63, 64, 65, 200}) {
    const std::string text = read_text("/proc/self/exe").substr(0, size);
    for (size_t piece : {1, 7, 64, 100}) {
      Sha256 hash;
      for (size_t i = 0; i < size; i += piece) hash.update(text.data() + i, std::min(piece, size - i));
      CHECK(hash.hex() == sha256_of(text));
    }
  }
}

TEST_CASE("checkpoint: a file is written completely or not at all") {
  const TempDir dir;
  write_file_atomically(dir.file("a"), "one");
  write_file_atomically(dir.file("a"), "two");
  CHECK(read_text(dir.file("a")) == "two");
  fs::create_symlink("a", dir.path / "link");
  write_file_atomically(dir.file("link"), "three");
  CHECK(read_text(dir.file("a")) == "three");
  CHECK(fs::is_symlink(dir.path / "link"));
  {
    OutputFile abandoned(dir.file("a"), 10);
    abandoned.write("x", 1);
  }
  CHECK(read_text(dir.file("a")) == "three");
  CHECK(names_in(dir.path) == std::vector<std::string>{"a", "link"});
  CHECK(error_of([&] { write_file_atomically(dir.file("none/a"), "x"); }).code == Exit::io);
  CHECK(error_of([&] { write_file_atomically(dir.path, "x"); }).code == Exit::io);
  CHECK(error_of([&] { write_file_atomically("/dev/null", "x"); }).code == Exit::io);
}

TEST_CASE("checkpoint: committed, valid, replaced; abandoned, gone") {
  const TempDir dir;
  const std::string target = dir.file("new/run/step_00000001");
  std::string why;
  CHECK(!is_valid_checkpoint(target, &why));
  save(target + "/", "first");
  CHECK_MESSAGE(is_valid_checkpoint(target, &why), why);
  CHECK(has(read_text(target + "/manifest.json"), sha256_of("first")));
  save(target, "second");
  CHECK(is_valid_checkpoint(target, &why));
  CHECK(read_text(target + "/model.safetensors") == "second");
  {
    CheckpointWriter writer;
    writer.begin(target);
    write_text(writer.path("x"), "x");
    CHECK(error_of([&] { writer.path("a/b"); }).code == Exit::internal);
    CHECK(error_of([&] { writer.path("manifest.json"); }).code == Exit::internal);
    CHECK(error_of([&] { writer.begin(target); }).code == Exit::internal);
  }
  CHECK(read_text(target + "/model.safetensors") == "second");
  CHECK(names_in(dir.file("new/run")) == std::vector<std::string>{"step_00000001"});
  CHECK(error_of([&] { CheckpointWriter().commit(); }).code == Exit::internal);
}

TEST_CASE("checkpoint: somebody else's files are never removed") {
  const TempDir dir;
  fs::create_directory(dir.path / "home");
  write_text(dir.file("home/thesis.tex"), "years");
  check_fails(Exit::io, {"move it away"}, [&] { save(dir.file("home"), "x"); });
  write_text(dir.file("file"), "x");
  CHECK(error_of([&] { save(dir.file("file"), "x"); }).code == Exit::io);
  CHECK(read_text(dir.file("file")) == "x");

  save(step_dir(dir.path, 1), "first");
  write_text(step_dir(dir.path, 1) + "/notes.txt", "mine");
  save(step_dir(dir.path, 1), "second");
  CHECK(read_text(step_dir(dir.path, 1) + "/model.safetensors") == "second");
  CHECK(read_text(step_dir(dir.path, 1) + ".kept-1/notes.txt") == "mine");
  CHECK(is_valid_checkpoint(step_dir(dir.path, 1) + ".kept-1", nullptr));
  write_text(step_dir(dir.path, 1) + "/notes.txt", "mine too");
  for (int step : {2, 3, 4}) save(step_dir(dir.path, step), "later");
  write_text(dir.file(".tmp-mine"), "not of our making");
  remove_old_checkpoints(dir.path, 1);
  CHECK(names_in(dir.path) == std::vector<std::string>{".tmp-mine", "file", "home", "step_00000001",
                                                       "step_00000001.kept-1", "step_00000004"});
  CHECK(read_text(step_dir(dir.path, 1) + "/notes.txt") == "mine too");
  CHECK(read_text(dir.file("home/thesis.tex")) == "years");
}

TEST_CASE("checkpoint: a flipped byte, a lost byte, an extra byte or a missing file is noticed in every file") {
  const TempDir dir;
  const std::string target = dir.file("c");
  save(target, std::string(1500000, 'm'));
  for (const std::string& name : names_in(target)) {
    const std::string file = target + "/" + name, good = read_text(file);
    CAPTURE(name);
    std::string why;
    for (size_t at : {size_t{0}, good.size() / 2, good.size() - 3}) {
      std::string flipped = good;
      flipped[at] = static_cast<char>(flipped[at] ^ 1);
      write_text(file, flipped);
      CHECK(!is_valid_checkpoint(target, &why));
      CHECK_MESSAGE(has(why, name == "manifest.json" ? "" : name), why);
    }
    write_text(file, good.substr(0, good.size() - (name == "manifest.json" ? 3 : 1)));
    CHECK(!is_valid_checkpoint(target, &why));
    write_text(file, good + "x");
    CHECK(!is_valid_checkpoint(target, &why));
    fs::remove(file);
    CHECK(!is_valid_checkpoint(target, &why));
    write_text(file, good);
    CHECK(is_valid_checkpoint(target, &why));
  }
  for (const char* manifest : {"", "{}", "[]", "7", R"({"files":{}})", R"({"files":[]})", R"({"files":5})",
                               R"({"files":{"../c/model.safetensors":{"bytes":1,"sha256":""}}})",
                               R"({"files":{"model.safetensors":{"bytes":"1","sha256":""}}})",
                               R"({"files":{"model.safetensors":{"sha256":""}}})"}) {
    write_text(target + "/manifest.json", manifest);
    CHECK_MESSAGE(!is_valid_checkpoint(target, nullptr), manifest);
  }
}

TEST_CASE("checkpoint: a model directory is checked against its own manifest, where it has one") {
  const TempDir dir;
  const std::string target = dir.file("c"), weights = target + "/model.safetensors";
  save(target, std::string(10000, 'm'));
  write_text(target + "/config.json", "{}");
  CHECK(resolve_model_dir(target) == target);
  std::string flipped = read_text(weights);
  flipped[5000] = static_cast<char>(flipped[5000] ^ 1);
  write_text(weights, flipped);
  check_fails(Exit::bad_data, {"manifest.json"}, [&] { resolve_model_dir(target); });
  fs::remove(weights);
  check_fails(Exit::bad_data, {}, [&] { resolve_model_dir(target); });
  fs::remove(target + "/manifest.json");
  CHECK(resolve_model_dir(target) == target);
}

TEST_CASE("checkpoint: a model directory that cannot be looked into is not a missing one") {
  const TempDir dir;
  fs::permissions(dir.path, static_cast<fs::perms>(0755));
  fs::create_directories(dir.file("locked/model"));
  fs::create_directory_symlink("loop", dir.file("loop"));
  CHECK(error_of([&] { resolve_model_dir(dir.file("loop")); }).code == Exit::io);
  CHECK(error_of([&] { resolve_model_dir(dir.file("none")); }).code == Exit::no_input);
  fs::permissions(dir.file("locked"), fs::perms::none);
  const int status = in_child([&] {
    if (::geteuid() == 0 && ::seteuid(65534) != 0) return not_possible_here;
    return fails_with_io({"Permission denied"}, [&] { resolve_model_dir(dir.file("locked/model")); }) ? 0 : 1;
  });
  fs::permissions(dir.file("locked"), fs::perms::owner_all);
  CHECK((status == 0 || status == not_possible_here));
}

TEST_CASE("checkpoint: the newest valid one is found, and old ones are removed") {
  const TempDir dir;
  const std::string run = dir.path;
  CHECK(newest_valid_checkpoint(dir.file("missing")) == "");
  CHECK(newest_valid_checkpoint(run) == "");
  remove_old_checkpoints(run, 1);
  for (int step : {5, 20, 100, 1000}) save(step_dir(run, step), "x");
  fs::create_directory(run + "/step_99999999");  // a kill cannot leave this, but a person can
  fs::create_directory(run + "/step_x");
  fs::resize_file(step_dir(run, 1000) + "/model.safetensors", 0);
  std::vector<std::string> skipped;
  CHECK(newest_valid_checkpoint(run, &skipped) == step_dir(run, 100));
  REQUIRE(skipped.size() == 2);
  CHECK_MESSAGE(has(skipped[1], "has 0 bytes, the manifest says 1"), skipped[1]);

  const pid_t dead = dead_process();
  fs::create_directory(run + str("/.tmp-step_00000007-", dead));
  write_text(run + str("/.tmp-metrics.jsonl-", dead), "x");
  CHECK(!holds_only_leftovers(run));
  const std::string thesis = str(".tmp-thesis-", dead);  // as ours are called, but nothing that we write
  write_text(run + "/" + thesis, "years");
  fs::create_directory(run + str("/.tmp-step_00000007-", ::getppid()));
  remove_old_checkpoints(run, 2);
  CHECK(names_in(run) == std::vector<std::string>{str(".tmp-step_00000007-", ::getppid()), thesis, "step_00000020",
                                                  "step_00000100", "step_00001000", "step_99999999", "step_x"});
  remove_old_checkpoints(run, 1);
  CHECK(!fs::exists(step_dir(run, 20)));
  CHECK(newest_valid_checkpoint(run) == step_dir(run, 100));
  CHECK(error_of([&] { remove_old_checkpoints(run, 0); }).code == Exit::internal);
  // A kill between two renames: the replaced one is all there is.
  fs::rename(step_dir(run, 100), step_dir(run, 100) + ".old");
  CHECK(newest_valid_checkpoint(run) == step_dir(run, 100) + ".old");
  remove_old_checkpoints(run, 1);
  CHECK(newest_valid_checkpoint(run) == step_dir(run, 100) + ".old");
  save(step_dir(run, 100), "x");
  remove_old_checkpoints(run, 3);
  CHECK(newest_valid_checkpoint(run) == step_dir(run, 100));
  CHECK(!fs::exists(step_dir(run, 100) + ".old"));
}

TEST_CASE("checkpoint: one that was just committed needs no second reading to be the newest, but it must be complete") {
  const TempDir dir;
  const std::string run = dir.path;
  for (int step : {5, 20, 100}) save(step_dir(run, step), "x");
  remove_old_checkpoints(run, 2, step_dir(run, 20));  // 100 is newer than what this process knows of
  CHECK(names_in(run) == std::vector<std::string>{"step_00000005", "step_00000020", "step_00000100"});
  fs::remove(step_dir(run, 100) + "/model.safetensors");
  remove_old_checkpoints(run, 1, step_dir(run, 100));  // 20 is the newest
  CHECK(names_in(run) == std::vector<std::string>{"step_00000020", "step_00000100"});
}

TEST_CASE("checkpoint: what a process left that was killed is a leftover, even before its parent has waited for it") {
  const TempDir dir;
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  siginfo_t info;
  REQUIRE(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
  write_text(dir.file(str(".tmp-flags.json-", child)), "{");
  CHECK(holds_only_leftovers(dir.path, {}));
  CHECK(::waitpid(child, nullptr, 0) == child);
  CHECK(holds_only_leftovers(dir.path, {}));
  write_text(dir.file(str(".tmp-flags.json-", ::getppid())), "{");
  CHECK(!holds_only_leftovers(dir.path, {}));
}

// From now on this process cannot make the system call: it gets `error`.
static void forbid(long call, int error) {
  sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{4, program};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    ::_exit(not_possible_here);
}

TEST_CASE("checkpoint: a read that fails proves no damage") {
  const TempDir dir;
  for (int step : {1, 2}) save(step_dir(dir.path, step), "x");
  for (const long call : {SYS_pread64, SYS_openat, SYS_newfstatat}) {
    for (int function = 0; function < 4; ++function) {
      const int status = in_child([&] {
        forbid(call, call == SYS_openat ? EMFILE : EIO);
        if (function == 0) is_valid_checkpoint(step_dir(dir.path, 2), nullptr);
        if (function == 1) newest_valid_checkpoint(dir.path);
        if (function == 2) set_aside_damaged_checkpoints(dir.path);
        if (function == 3) remove_old_checkpoints(dir.path, 1);
        return 0;
      });
      CAPTURE(call);
      CAPTURE(function);
      // fstat may be another system call here, and then nothing fails.
      const bool unused = call == SYS_newfstatat && status == 0;
      CHECK_MESSAGE((status == static_cast<int>(Exit::io) || status == not_possible_here || unused), status);
      if (function < 3) CHECK(names_in(dir.path) == std::vector<std::string>{"step_00000001", "step_00000002"});
    }
  }
  std::string why;
  fs::remove(step_dir(dir.path, 2) + "/train_state.json");
  CHECK(!is_valid_checkpoint(step_dir(dir.path, 2), &why));  // a file that the manifest lists is missing: that does
  CHECK(has(why, "train_state.json"));
}

TEST_CASE("checkpoint: a reader beside a run that keeps one never sees half of it") {
  const TempDir dir(memory_or_disk());
  const std::string run = dir.path;
  save(step_dir(run, 1), "first");
  {
    const ModelDir held(run);
    save(step_dir(run, 2), "second");
    remove_old_checkpoints(run, 1);
    CHECK(read_text(held.path() + "/model.safetensors") == "first");
    CHECK(ModelDir(run).path() == step_dir(run, 2));
  }
  remove_old_checkpoints(run, 1);
  CHECK(names_in(run) == std::vector<std::string>{"step_00000002"});

  const pid_t child = ::fork();
  if (child == 0) {
    try {
      for (int step = 3;; ++step) {
        save(step_dir(run, step), std::string(static_cast<size_t>(step % 7000), 'x'));
        remove_old_checkpoints(run, 1);
      }
    } catch (...) {
      ::_exit(100);
    }
  }
  std::string seen;
  for (int i = 0; i < 3000; ++i) {
    const Error error = error_of([&] {
      const ModelDir model(run);
      const auto size = read_text(model.path() + "/model.safetensors").size();
      CHECK(read_text(model.path() + "/train_state.json") == str("{\"size\": ", size, "}"));
      CHECK(names_in(model.path()).size() == 3);
      seen = model.path();
    });
    CHECK_MESSAGE(error.code == Exit::done, error.what());
  }
  CHECK(kill_child(child));
  CHECK(seen > step_dir(run, 2));
}

TEST_CASE("checkpoint: a temporary of a killed process is removed by the next save to the same name") {
  const TempDir dir;
  const pid_t dead = dead_process();
  fs::create_directory(dir.file(str(".tmp-model-", dead)));
  write_text(dir.file(str(".tmp-model-", dead)) + "/model.safetensors", "half");
  fs::create_directory(dir.file(str(".tmp-other-", dead)));
  save(dir.file("model"), "x");
  CHECK(names_in(dir.path) == std::vector<std::string>{str(".tmp-other-", dead), "model"});
}

// Saves for ever: either one directory again and again, or new steps, replaced steps, and retention.
[[noreturn]] static void save_until_killed(const std::string& run, int first, bool one_directory, bool can_exchange) {
  if (!can_exchange) forbid(SYS_renameat2, EINVAL);  // as on a file system that does not know RENAME_EXCHANGE
  try {
    for (int i = 0;; ++i) {
      const uint64_t seed = static_cast<uint64_t>(first + i);
      const int step = one_directory ? first : first + i / 3;
      save(step_dir(run, step), std::string(random_bits(1, seed, 0) % 50000, static_cast<char>(i)));
      if (!one_directory && i % 4 == 0) remove_old_checkpoints(run, 2);
    }
  } catch (...) {
    ::_exit(100);
  }
}

TEST_CASE("checkpoint: killed at any moment, the newest checkpoint is valid and the next save works") {
  const TempDir dir(memory_or_disk());
  const std::string run = dir.path;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 10; ++i) save(step_dir(run, 1), std::string(25000, 'x'));
  const std::chrono::duration<double, std::micro> ten_saves = std::chrono::steady_clock::now() - start;
  int number = 1, interrupted = 0, progressed = 0;
  for (int kill = 0; kill < 200; ++kill) {
    const bool one_directory = kill % 4 < 2;
    if (one_directory) remove_old_checkpoints(run, 1);  // nothing older to fall back on
    const pid_t child = ::fork();
    if (child == 0) save_until_killed(run, number, one_directory, kill % 2 == 0);
    ::usleep(static_cast<useconds_t>(500 + random_uniform(2, 0, static_cast<uint64_t>(kill)) * 2 * ten_saves.count()));
    if (!kill_child(child)) continue;
    for (const std::string& name : names_in(run)) interrupted += name.find(".tmp-") == 0 || name.ends_with(".old");

    std::vector<std::string> skipped;
    const std::string newest = newest_valid_checkpoint(run, &skipped);
    REQUIRE(!newest.empty());
    CHECK_MESSAGE(skipped.empty(), skipped[0]);  // there is nothing invalid under a real name, ever
    const int reached = std::stoi(newest.substr(newest.find("step_") + 5));
    CHECK(reached >= number);
    progressed += reached > number;
    number = reached;
    if (kill % 5 == 0) {
      save(step_dir(run, number), "again");
      CHECK(is_valid_checkpoint(step_dir(run, number), nullptr));
      remove_old_checkpoints(run, 1);
      CHECK(names_in(run) == std::vector<std::string>{fs::path(step_dir(run, number)).filename().string()});
    }
  }
  CAPTURE(interrupted);
  CAPTURE(progressed);
  CHECK(interrupted > 5);  // otherwise the kills came between the saves and tested nothing
  CHECK(progressed > 5);
}

TEST_CASE("checkpoint: no permission") {
  const TempDir dir;
  fs::permissions(dir.path, static_cast<fs::perms>(0555));
  const int status = in_child([&] {
    if (::geteuid() == 0 && ::seteuid(65534) != 0) return not_possible_here;
    return fails_with_io({"Permission denied", dir.path}, [&] { save(dir.file("c"), "x"); }) ? 0 : 1;
  });
  fs::permissions(dir.path, fs::perms::owner_all);
  CHECK((status == 0 || status == not_possible_here));
  CHECK(names_in(dir.path).empty());
}

TEST_CASE("checkpoint: a file larger than allowed leaves the old checkpoint") {
  const TempDir dir;
  save(dir.file("c"), "old");
  const int status = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100000, 100000};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return not_possible_here;
    return fails_with_io({"File too large"}, [&] { save(dir.file("c"), std::string(1000000, 'x')); }) ? 0 : 1;
  });
  CHECK(status == 0);
  CHECK(is_valid_checkpoint(dir.file("c"), nullptr));
  CHECK(read_text(dir.file("c/model.safetensors")) == "old");
  CHECK(names_in(dir.path) == std::vector<std::string>{"c"});
}

TEST_CASE("checkpoint: a full disk leaves the old checkpoint and says how much is missing") {
  const TempDir dir;
  const int status = in_child([&] {
    // A disk of one mebibyte, seen by this process only.
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", dir.path.c_str(), "tmpfs", 0, "size=1m") != 0) {
      return not_possible_here;
    }
    save(dir.file("c"), std::string(300000, 'o'));
    if (!fails_with_io({"no space left on device while writing", "free 1", "of 2000000 bytes fitted"},
                       [&] { save(dir.file("c"), std::string(2000000, 'x')); }))
      return 1;
    if (names_in(dir.path) != std::vector<std::string>{"c"}) return 3;
    if (!is_valid_checkpoint(dir.file("c"), nullptr)) return 4;
    save(dir.file("c"), std::string(400000, 'n'));  // room enough for the old and the new one
    return is_valid_checkpoint(dir.file("c"), nullptr) ? 0 : 5;
  });
  if (status == not_possible_here) MESSAGE("skipped: mounting a small disk takes more rights");
  else CHECK(status == 0);
}
