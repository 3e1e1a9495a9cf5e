// tokenize: text on standard input, its token ids out, separated by spaces; or back with --decode. The ids are those of
// the text alone: what the tokenizer's template puts around a text, such as <s>, is left out. Both go along with
// the input, and little of it is held at a time where Tokenizer::encode_begin() can say what is final; else all of it.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "cli/program.h"
#include "cli/standard_streams.h"
#include "data/encoding_progress.h"
#include "data/foreign_format.h"
#include "data/tokenizer.h"
#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"

using namespace crossply;

namespace {

constexpr size_t block = 8 << 20;
constexpr const char* whitespace = " \t\n\v\f\r";

struct Options {
  std::string tokenizer;
  bool decode = false;
};

// How far the input is read; nothing where that or the result is on the terminal itself.
class Progress {
 public:
  void add(size_t bytes) {
    read_ += bytes;
    if (shows_) progress_.tell(read_, static_cast<int64_t>(read_), 0);
  }

 private:
  static uint64_t input_size() {
    struct stat status {};
    return ::fstat(STDIN_FILENO, &status) == 0 && S_ISREG(status.st_mode) ? static_cast<uint64_t>(status.st_size) : 0;
  }
  bool shows_ = ::isatty(STDIN_FILENO) == 0 && ::isatty(STDOUT_FILENO) == 0;
  uint64_t read_ = 0;
  EncodingProgress progress_{"tokenize", input_size()};
};

// Reads on until `text` has this many bytes. False: it ended before.
bool read_to(std::string& text, size_t size, Progress& progress) {
  while (text.size() < size) {
    const size_t before = text.size();
    text.resize(size);
    const ssize_t got = uninterrupted([&] { return ::read(STDIN_FILENO, text.data() + before, size - before); });
    const int error = errno;
    text.resize(before + static_cast<size_t>(got > 0 ? got : 0));
    if (got < 0) fail_io("read", "standard input", error);
    if (got == 0) return false;
    progress.add(static_cast<size_t>(got));
  }
  return true;
}

// Takes a byte order mark from the first piece of the input, and returns its bytes. Refuses other formats than text.
size_t check_beginning(std::string& text) {
  if (const std::string format = foreign_format(text, ""); !format.empty())
    fail(Exit::bad_data, "standard input: ", format);
  constexpr std::string_view mark = "\ufeff";
  if (!text.starts_with(mark)) return 0;
  text.erase(0, mark.size());
  return mark.size();
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
  Progress progress;
  std::string text;
  size_t offset = 0;  // of `text` in the input
  bool first = true;
  for (size_t size = block, more = true, begins = true; more; begins = false) {
    more = read_to(text, size, progress);
    if (begins) offset = check_beginning(text);
    size_t valid = tokenizer.is_bpe() ? valid_utf8(text) : text.size();
    if (text.size() - valid > 3 || (!more && valid < text.size()))
      fail(Exit::bad_data, "standard input is not UTF-8: wrong at byte ", offset + valid, ", ",
           printable(text.substr(valid, 1)), "; if it is Latin-1: iconv -f latin1 -t utf-8 converts it");
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

// The ids in a text, which are separated by whitespace.
std::vector<int32_t> ids_of(std::string_view text, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  for (size_t end = 0;;) {
    const size_t begin = text.find_first_not_of(whitespace, end);
    if (begin == std::string_view::npos) return ids;
    end = std::min(text.size(), text.find_first_of(whitespace, begin));
    const std::string_view word = text.substr(begin, end - begin);
    const auto id = parse_all<int32_t>(word);
    if (!id || *id < 0) fail(Exit::usage, "\"", excerpt(word), "\" is not a token id");
    if (*id >= tokenizer.vocab_size()) fail(Exit::bad_data, "the id ", *id, " is none of ", tokenizer.describe());
    ids.push_back(*id);
  }
}

void decode(const Tokenizer& tokenizer) {
  Progress progress;
  std::string text;
  bool first = true;
  for (bool more = true, begins = true; more; begins = false) {
    more = read_to(text, block, progress);
    if (begins) check_beginning(text);
    const size_t end = more ? text.find_last_of(whitespace) : text.size();
    if (end == std::string::npos) fail(Exit::usage, "\"", excerpt(text), "\" is not a token id");
    const std::vector<int32_t> ids = ids_of(std::string_view(text).substr(0, end), tokenizer);
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
  CommandLine app(
      "Token ids of the text on standard input, separated by spaces: of the text alone, without the tokens that the "
      "tokenizer's template puts around a text, such as <s>.",
      "tokenize");
  Options o;
  auto flags = [&] {
    add_text(app, "--tokenizer", o.tokenizer, "FILE", "tokenizer.json, or a directory that has one").required();
    add_switch(app, "--decode", o.decode, "ids on standard input, their text out");
  };
  return run_program(app, argc, argv, flags, [&] {
    const Tokenizer tokenizer = Tokenizer::read(o.tokenizer);
    if (o.decode) decode(tokenizer);
    else encode(tokenizer);
    flush_standard_output();
    return Exit::done;
  });
}
