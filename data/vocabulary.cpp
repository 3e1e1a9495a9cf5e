#include "data/vocabulary.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "cli/format.h"
#include "cli/stop.h"
#include "data/documents.h"
#include "data/encoding_progress.h"
#include "data/python_script.h"
#include "engine/io/file.h"
#include "engine/io/python_program.h"
#include "engine/rng.h"

namespace crossply {

namespace {

constexpr size_t max_bytes = 200'000'000;

struct Sample {
  std::vector<std::pair<uint64_t, std::string>> texts;  // with their hashes
  size_t bytes = 0;
  uint64_t below = ~uint64_t{0};  // of the hashes that are kept

  void add(uint64_t hash, std::string text) {
    if (hash > below) return;
    bytes += text.size();
    texts.emplace_back(hash, std::move(text));
    while (bytes > max_bytes && texts.size() > 1) {
      below /= 2;
      std::erase_if(texts, [&](const auto& one) { return one.first > below; });
      bytes = 0;
      for (const auto& one : texts) bytes += one.second.size();
    }
  }
};

void check_stop() {
  if (stop_requested()) fail(Exit::stopped, "stopped; nothing of the vocabulary is kept");
}

Sample draw_sample(const std::vector<SourceFile>& sources, const VocabularyOptions& options) {
  Sample sample;
  const Faults faults = options.skip_bad > 0 ? Faults::keep : Faults::fail;
  DocumentFeed feed(sources, {}, "", faults, options.field);
  EncodingProgress progress("reading for the vocabulary", total_bytes(sources));
  int64_t text = 0, bad = 0;
  for (bool more = true; more;) {
    FeedBatch batch = feed.next();
    more = batch.more;
    parse_documents(batch.documents, options.field, faults);
    require_utf8(batch.documents, faults);
    for (Document& document : batch.documents) {
      if (!document.fault.empty() && ++bad > options.skip_bad) fail(Exit::bad_data, document.fault);
      text += std::ssize(document.text);
      const uint64_t hash = document_hash(document.text, stream_of("vocabulary"));
      if (!document.text.empty()) sample.add(hash, std::move(document.text));
    }
    progress.tell(batch.taken, text, 0);
    check_stop();
  }
  if (sample.bytes == 0) fail(Exit::bad_data, "there is no text to train a vocabulary on");
  return sample;
}

// False where the reader has gone, or a stop is requested: so much that the pipe takes it at once.
bool write_all(int fd, const char* from, size_t bytes) {
  while (bytes > 0 && !stop_requested()) {
    pollfd one{fd, POLLOUT, 0};
    if (::poll(&one, 1, 100) <= 0) continue;
    const ssize_t n = uninterrupted([&] { return ::write(fd, from, std::min<size_t>(bytes, PIPE_BUF)); });
    if (n < 0) return false;
    from += n, bytes -= static_cast<size_t>(n);
  }
  return bytes == 0;
}

void feed(int fd, const Sample& sample) {
  size_t left = max_bytes;
  for (const auto& [hash, text] : sample.texts) {
    size_t n = std::min(left, text.size());
    while (n < text.size() && n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;  // no half character
    left -= n;
    if (!write_all(fd, text.data(), n) || (n > 0 && text[n - 1] != '\n' && !write_all(fd, "\n", 1))) return;
  }
}

[[noreturn]] void fail_script(const std::string& python, int status) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == no_package)
    fail(Exit::no_input, "--vocab needs the package tokenizers, which ", python,
         " does not have: pip install tokenizers, or name another Python in the variable PYTHON");
  fail(Exit::io, "--vocab: ", python, " did not train the vocabulary: it ended with ", script_status(status),
       "; what it says stands above");
}

}  // namespace

std::vector<std::string> special_tokens(const std::string& style) {
  if (style == "llama3") return {"<|begin_of_text|>", "<|end_of_text|>"};
  return {"<|endoftext|>"};
}

void train_vocabulary(const std::vector<SourceFile>& sources, const VocabularyOptions& options,
                      const std::string& out) {
  const Sample sample = draw_sample(sources, options);
  const std::string python = python_program();
  const std::string unfinished = temporary_sibling(out);
  std::printf("training a vocabulary of %s on %.1f MB of text\n", format_count(options.size).c_str(),
              static_cast<double>(std::min(sample.bytes, max_bytes)) / 1e6);
  std::fflush(stdout);
  Descriptor theirs, ours;
  make_pipe(theirs, ours);
  const std::string size = std::to_string(options.size);
  const pid_t pid = start_script("train_tokenizer.py", {"--vocab", size, "--style", options.style, "--out", unfinished},
                                 ScriptEnd::input, theirs.get());
  if (pid == 0)
    fail(Exit::no_input, "--vocab needs Python with the package tokenizers, but there is no program ", python,
         "; install both (pip install tokenizers), or name another Python in the variable PYTHON");
  theirs = Descriptor();
  feed(ours.get(), sample);
  ours = Descriptor();
  const int status = wait_for_script(pid);
  const bool trained = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (!trained || stop_requested()) ::unlink(unfinished.c_str());
  check_stop();
  if (!trained) fail_script(python, status);
  sync_file(unfinished);
  if (::rename(unfinished.c_str(), out.c_str()) != 0) fail_io("rename " + unfinished + " to", out, errno);
}

}  // namespace crossply
