// Feeds a fuzz target where libFuzzer is not at hand: first every file of the corpus as it is, then mutations of them.
// Mutation i depends on the seed, i and the corpus only, so that a failure repeats. The work is done in a child, which
// may die of an input in any way; the parent then keeps the input and goes on behind it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>

#include "cli/program.h"
#include "engine/rng.h"
#include "tests/fuzz/target.h"

#if defined(__SANITIZE_ADDRESS__)
#define FUZZ_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FUZZ_ASAN 1
#endif
#endif

// Where addresses cannot be limited, because the sanitizer takes most of them.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "hard_rss_limit_mb=4096:detect_leaks=0"; }

using namespace crossply;
using namespace crossply::fuzz;
using namespace std::string_literals;
namespace fs = std::filesystem;

namespace {

constexpr size_t longest = 1 << 20;
constexpr rlim_t max_memory = rlim_t{4} << 30;
constexpr int max_cpu_seconds = 30, max_seconds = 300;  // for one input; the second is for one that waits
constexpr int max_failures = 10;

struct Options {
  std::vector<std::string> corpus;
  std::string keep = ".";
  uint64_t seed = 1, first = 0;
  int64_t count = 0;
};

struct Seed {
  std::string name, bytes;
};

// What parent and child share: the input that is being tried.
struct Current {
  uint64_t index;
  size_t size;
  uint8_t bytes[longest];
};

std::vector<Seed> read_corpus(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!fs::exists(path)) fail(Exit::no_input, path, ": no such file or directory");
    if (!fs::is_directory(path)) files.push_back(path);
    else
      for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  std::vector<Seed> corpus;
  for (const std::string& file : files) corpus.push_back({file, read_file(file).substr(0, longest)});
  if (corpus.empty()) fail(Exit::no_input, "the corpus is empty");
  return corpus;
}

// The strings, keys and words of the corpus.
std::vector<std::string> dictionary_of(const std::vector<Seed>& corpus) {
  std::vector<std::string> words;
  for (const Seed& seed : corpus) {
    const auto is_part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_-.\"", c); };
    const std::string& text = seed.bytes;
    for (size_t begin = 0, end; begin < text.size() && words.size() < 10000; begin = end + 1) {
      for (end = begin; end < text.size() && text[end] != '\0' && is_part(text[end]);) ++end;
      if (end >= begin + 2 && end < begin + 60) words.push_back(text.substr(begin, end - begin));
    }
  }
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  if (words.empty()) words.push_back("0");
  return words;
}

std::vector<std::string> split_words(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

const std::vector<std::string> edges = split_words(R"(
  0 -1 1 -0 010 2 255 256 65535 65536 2147483647 2147483648 4294967295 4294967296 9007199254740993
  9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616 -9223372036854775808 1e30
  1e308 1e400 1e-400 0.5 -0.5 inf nan null true "1" "" [] {} [1] {"a":1})");
const std::string special = "\"\\{}[]:,\n\r\t \0\x01\x1b\x7f\x80\xc3\xff./*-="s;

class Mutator {
 public:
  Mutator(const std::vector<Seed>& corpus, uint64_t seed)
      : corpus_(corpus), words_(dictionary_of(corpus)), seed_(seed) {}

  std::string input(uint64_t index) const {
    if (index < corpus_.size()) return corpus_[index].bytes;
    Random random(seed_, index);
    std::string text = any(corpus_, random).bytes;
    for (int64_t left = 1 + random.below(random.below(4) == 0 ? 16 : 4); left > 0; --left) mutate(text, random);
    return text.substr(0, longest);
  }

 private:
  template <class T>
  static const T& any(const std::vector<T>& list, Random& random) {
    return list[static_cast<size_t>(random.below(static_cast<int64_t>(list.size())))];
  }
  static size_t below(size_t n, Random& random) { return static_cast<size_t>(random.below(static_cast<int64_t>(n))); }
  // [at, at + length) lies in text; short pieces are likelier.
  static std::pair<size_t, size_t> piece(const std::string& text, Random& random) {
    const size_t at = below(text.size() + 1, random), rest = text.size() - at;
    return {at, below(1 + std::min(rest, size_t{1} << random.below(12)), random)};
  }

  void mutate(std::string& text, Random& random) const {
    const auto [at, length] = piece(text, random);
    switch (random.below(11)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
        break;
      case 1:
        if (at < text.size()) text[at] = special[below(special.size(), random)];
        break;
      case 2: text.insert(at, 1, special[below(special.size(), random)]); break;
      case 3: text.erase(at, length); break;
      case 4: text.insert(below(text.size() + 1, random), text.substr(at, length)); break;
      case 5: text.resize(at); break;
      case 6: splice(text, random); break;
      case 7: replace_word(text, random.below(8) ? any(edges, random) : nested(random), true, random); break;
      case 8: replace_word(text, random.below(8) ? any(words_, random) : nested(random), false, random); break;
      case 9: binary_number(text, random); break;
      default: repeat(text, random);
    }
  }

  void splice(std::string& text, Random& random) const {
    const std::string& other = any(corpus_, random).bytes;
    const auto [from, length] = piece(other, random);
    text.insert(below(text.size() + 1, random), other.substr(from, length));
  }

  // Another number in place of a number, or another word in place of a word; the first one from a random place on.
  static void replace_word(std::string& text, const std::string& by, bool number, Random& random) {
    const auto is_part = [&](char c) {
      return number ? std::strchr("0123456789+-.e", c) != nullptr && c != '\0'
                    : std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '"' || c == '-' || c == '.';
    };
    const auto begin =
        std::find_if(text.begin() + static_cast<std::ptrdiff_t>(below(text.size() + 1, random)), text.end(), is_part);
    text.replace(begin, std::find_if_not(begin, text.end(), is_part), by);
  }

  static void binary_number(std::string& text, Random& random) {
    const size_t bytes = size_t{1} << random.below(4);
    if (text.size() < bytes) return;
    constexpr uint64_t values[] = {0,          1,         INT8_MAX,   0x80,       UINT8_MAX, INT16_MAX,
                                   UINT16_MAX, INT32_MAX, 0x80000000, UINT32_MAX, INT64_MAX, uint64_t{1} << 63,
                                   UINT64_MAX};
    std::memcpy(&text[below(text.size() - bytes + 1, random)], &values[random.below(std::size(values))], bytes);
  }

  // A list in a list in a list.
  static std::string nested(Random& random) {
    const size_t depth = random.below(2) ? 100'000 : size_t{1} << random.below(12);
    const char* const parts[] = {"[", "]", "{\"a\":", "}"};
    const int64_t kind = 2 * random.below(2);
    std::string text, end;
    for (size_t i = 0; i < depth; ++i) text += parts[kind], end += parts[kind + 1];
    return text + "1" + end;
  }

  static void repeat(std::string& text, Random& random) {
    const size_t at = below(text.size() + 1, random);
    const std::string unit = text.substr(at, 1 + below(6, random));
    const size_t times = size_t{1} << random.below(random.below(8) == 0 ? 18 : 8);
    std::string many;
    for (size_t i = 0; i < times && many.size() < longest; ++i) many += unit;
    text.insert(at, many);
  }

  const std::vector<Seed>& corpus_;
  std::vector<std::string> words_;
  uint64_t seed_;
};

void limit_resources() {
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
#ifndef FUZZ_ASAN
  const rlimit memory{max_memory, max_memory};
  ::setrlimit(RLIMIT_AS, &memory);
#endif
}

// Time for one input; the signals end the process.
void start_clock() {
  const itimerval cpu{{0, 0}, {max_cpu_seconds, 0}};
  ::setitimer(ITIMER_PROF, &cpu, nullptr);
  ::alarm(max_seconds);
}

// The child: tries inputs until one kills it. What it prints for an input goes to `output`.
[[noreturn]] void work(const Mutator& mutator, uint64_t first, uint64_t end, Current& current,
                       const char* output) noexcept {
  limit_resources();
  const int null = ::open("/dev/null", O_RDWR), log = ::open(output, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (null < 0 || log < 0 || ::dup2(null, 0) < 0 || ::dup2(null, 1) < 0 || ::dup2(log, 2) < 0) ::_exit(1);
  for (uint64_t i = first; i < end; ++i) {
    const std::string input = mutator.input(i);
    current.index = i, current.size = input.size();
    std::memcpy(current.bytes, input.data(), input.size());
    if (::ftruncate(2, 0) != 0) ::_exit(1);
    start_clock();
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
  ::_exit(0);
}

std::string cause_of(int status) {
  if (!WIFSIGNALED(status)) return str("it ended the process with exit code ", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  if (signal == SIGPROF) return str("more than ", max_cpu_seconds, " s of CPU time");
  if (signal == SIGALRM) return str("more than ", max_seconds, " s");
  return str("signal ", signal, ", ", ::strsignal(signal));
}

void report(const std::string& name, const std::string& origin, int status, const Current& current, const Options& o,
            const std::string& output) {
  const std::string kept = (fs::absolute(o.keep) / str("fuzz-", name, "-", current.index)).lexically_normal().string();
  write_file(kept, text_of(current.bytes, current.size));
  std::printf("FAIL: %s: %s: %s\n  the input is kept; repeat with: fuzz_%s %s\n", name.c_str(), origin.c_str(),
              cause_of(status).c_str(), name.c_str(), kept.c_str());
  std::printf("%s\n", read_file(output).substr(0, 4000).c_str());
  std::fflush(stdout);
}

Exit run(const Options& o, const std::string& name) {
  const std::vector<Seed> corpus = read_corpus(o.corpus);
  const Mutator mutator(corpus, o.seed);
  void* shared = ::mmap(nullptr, sizeof(Current), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) fail(Exit::io, "cannot share memory with a child");
  Current& current = *static_cast<Current*>(shared);
  const std::string output = scratch() + "/output";
  const uint64_t end = corpus.size() + static_cast<uint64_t>(o.count);
  int failures = 0;
  for (uint64_t next = o.first; next < end && failures < max_failures; next = current.index + 1) {
    current.index = next;
    std::fflush(stdout);
    const pid_t child = ::fork();
    if (child == 0) work(mutator, next, end, current, output.c_str());
    int status = 0;
    if (child < 0 || ::waitpid(child, &status, 0) != child) fail(Exit::io, "cannot run a child");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
    const std::string origin =
        current.index < corpus.size() ? corpus[current.index].name : str("seed ", o.seed, ", mutation ", current.index);
    report(name, origin, status, current, o, output);
    ++failures;
  }
  std::printf("%s: %zu inputs of the corpus, %lld mutations, %d failures\n", name.c_str(), corpus.size(),
              static_cast<long long>(o.count), failures);
  return failures == 0 ? Exit::done : Exit::internal;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Feeds a reader with a corpus of files and mutations of them.", fs::path(argv[0]).filename().string());
  Options o;
  auto flags = [&] {
    app.add_option("corpus", o.corpus, "files, or directories of them")->required();
    app.add_option("--count", o.count, "how many mutations")->check(CLI::NonNegativeNumber)->capture_default_str();
    app.add_option("--seed", o.seed, "of the mutations")->check(CLI::NonNegativeNumber)->capture_default_str();
    app.add_option("--first", o.first, "the first input to try")->check(CLI::NonNegativeNumber)->capture_default_str();
    app.add_option("--keep", o.keep, "where inputs that fail are written")->capture_default_str();
  };
  return run_program(app, argc, argv, flags, [&] { return run(o, app.get_name().substr(5)); });
}
