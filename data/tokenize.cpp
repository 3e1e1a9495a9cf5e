// tokenize: text on standard input, its token ids out, separated by spaces; or back with --decode. Both go along with
// the input: of a tokenizer whose ids a later text cannot change, little of it is held at a time.
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>

#include "cli/program.h"
#include "cli/standard_streams.h"
#include "data/bpe/character_set.h"
#include "data/tokenizer.h"
#include "engine/file.h"
#include "engine/numbers.h"
#include "engine/printable.h"

using namespace crossply;

namespace {

constexpr size_t block = 8 << 20;

struct Options {
  std::string tokenizer;
  bool decode = false;
};

// Says on a terminal how far it is: on standard error, for standard output has the result.
class Ticker {
 public:
  Ticker() : shows_(::isatty(STDERR_FILENO) == 1 && ::isatty(STDIN_FILENO) == 0 && ::isatty(STDOUT_FILENO) == 0) {
    struct stat status {};
    if (::fstat(STDIN_FILENO, &status) == 0 && S_ISREG(status.st_mode)) total_ = static_cast<double>(status.st_size);
  }
  ~Ticker() {
    if (shown_) std::fprintf(stderr, "\r\x1b[K");
  }
  void add(size_t bytes) {
    done_ += static_cast<double>(bytes);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (!shows_ || seconds < last_ + 0.2) return;
    last_ = seconds, shown_ = true;
    const double rate = done_ / seconds;
    std::fprintf(stderr, "\r\x1b[K%.0f MB, %.1f MB/s", done_ / 1e6, rate / 1e6);
    if (total_ > done_) std::fprintf(stderr, ", %.0f s left", (total_ - done_) / rate);
    std::fflush(stderr);
  }

 private:
  bool shows_, shown_ = false;
  double total_ = 0, done_ = 0, last_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Reads on until `text` has this many bytes. False: it ended before.
bool read_to(std::string& text, size_t size, Ticker& ticker) {
  while (text.size() < size) {
    const size_t before = text.size();
    text.resize(size);
    const ssize_t got = uninterrupted([&] { return ::read(STDIN_FILENO, text.data() + before, size - before); });
    const int error = errno;
    text.resize(before + static_cast<size_t>(got > 0 ? got : 0));
    if (got < 0) fail_io("read", "standard input", error);
    if (got == 0) return false;
    ticker.add(static_cast<size_t>(got));
  }
  return true;
}

void print(const std::vector<int32_t>& ids, bool& first) {
  std::string text;
  for (const int32_t id : ids) {
    char digits[16];
    if (!first) text += ' ';
    first = false;
    text.append(digits, std::to_chars(digits, digits + sizeof digits, id).ptr);
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
  flush_standard_output();
}

void encode(const Tokenizer& tokenizer) {
  Ticker ticker;
  std::string text;
  size_t offset = 0;  // of `text` in the input
  bool first = true;
  for (size_t size = block, more = true; more;) {
    more = read_to(text, size, ticker);
    size_t valid = tokenizer.needs_utf8() ? valid_utf8(text) : text.size();
    if (text.size() - valid > 3 || (!more && valid < text.size()))
      fail(Exit::bad_data, "standard input is not UTF-8: wrong at byte ", offset + valid);
    std::vector<int32_t> ids;
    size_t done = text.size();
    if (more) done = tokenizer.encode_begin(std::string_view(text).substr(0, valid), ids);
    else ids = tokenizer.encode(text);
    print(ids, first);
    if (done == 0) size *= 2;
    text.erase(0, done), offset += done;
  }
  std::printf("\n");
}

void decode(const Tokenizer& tokenizer) {
  Ticker ticker;
  std::string text;
  bool first = true;
  for (bool more = true; more;) {
    more = read_to(text, block, ticker);
    const size_t end = more ? text.find_last_of(" \t\n\r") : text.size();
    if (end == std::string::npos) fail(Exit::usage, "\"", excerpt(text), "\" is not a token id");
    const std::vector<int32_t> ids = Tokenizer().encode(std::string_view(text).substr(0, end));
    for (const int32_t id : ids)
      if (id >= tokenizer.vocab_size()) fail(Exit::bad_data, "the id ", id, " is none of ", tokenizer.describe());
    const std::string decoded = tokenizer.decode(ids, first);
    if (!first && !ids.empty()) std::fputs(tokenizer.separator(), stdout);
    first = first && ids.empty();
    std::fwrite(decoded.data(), 1, decoded.size(), stdout);
    flush_standard_output();
    text.erase(0, end);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Token ids of the text on standard input, separated by spaces.", "tokenize");
  Options o;
  auto flags = [&] {
    add_text(app, "--tokenizer", o.tokenizer, "FILE", "tokenizer.json, or a directory that has one")->required();
    app.add_flag("--decode", o.decode, "ids on standard input, their text out");
  };
  return run_program(app, argc, argv, flags, [&] {
    const Tokenizer tokenizer = Tokenizer::read(o.tokenizer);
    if (o.decode) decode(tokenizer);
    else encode(tokenizer);
    flush_standard_output();
    return Exit::done;
  });
}
