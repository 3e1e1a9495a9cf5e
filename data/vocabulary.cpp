#include "data/vocabulary.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "cli/format.h"
#include "cli/stop.h"
#include "data/documents.h"
#include "data/encoding_progress.h"
#include "engine/file.h"
#include "engine/python_files.h"
#include "engine/rng.h"

namespace crossply {

namespace {

constexpr size_t max_bytes = 200'000'000;
constexpr int no_package = 3;  // train_tokenizer.py's exit code

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
  DocumentFeed feed(sources, {}, "", faults);
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

// In the child: becomes the program. On Linux it ends with the parent, however that ends.
[[noreturn]] void run_script(char* const* argv, int input, int report, pid_t parent) {
#ifdef __linux__
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
  if (::getppid() != parent) ::_exit(127);  // it ended before
  if (input == STDIN_FILENO) ::fcntl(input, F_SETFD, 0);
  else ::dup2(input, STDIN_FILENO);
  ::execvp(argv[0], argv);
  const int error = errno;
  if (::write(report, &error, sizeof error) < 0) ::_exit(126);
  ::_exit(127);
}

// An empty part of PYTHONPATH ("/x:") means the current directory, and Python takes modules from there before it reads
// the script: a re.py of somebody's data is not what is meant.
void clean_python_path() {
  const char* given = std::getenv("PYTHONPATH");
  if (given == nullptr) return;
  std::istringstream parts(given);
  std::string kept;
  for (std::string part; std::getline(parts, part, ':');)
    if (!part.empty()) kept += (kept.empty() ? "" : ":") + part;
  ::setenv("PYTHONPATH", kept.c_str(), 1);
}

void make_pipe(Descriptor& read, Descriptor& write) {
  int ends[2];
#ifdef __linux__
  if (::pipe2(ends, O_CLOEXEC) != 0) fail_io("make", "a pipe", errno);
#else
  if (::pipe(ends) != 0) fail_io("make", "a pipe", errno);
  for (const int end : ends) ::fcntl(end, F_SETFD, FD_CLOEXEC);
#endif
  read = Descriptor(ends[0]), write = Descriptor(ends[1]);
}

// Starts the script with its standard input at the end of the pipe. 0: there is no such program.
pid_t start_script(const std::vector<std::string>& words, int input) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  Descriptor answer, report;
  make_pipe(answer, report);
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_io("start", words[0], errno);
  if (pid == 0) run_script(argv.data(), input, report.get(), parent);
  report = Descriptor();
  int error = 0;  // of exec; the pipe ends without one where it succeeds
  const ssize_t got = uninterrupted([&] { return ::read(answer.get(), &error, sizeof error); });
  if (got <= 0) return pid;
  ::waitpid(pid, nullptr, 0);
  if (error != ENOENT) fail_io("start", words[0], error);
  return 0;
}

// The script's status, as waitpid tells it; after a signal to this process it is ended, by force if it does not listen.
int wait_for(pid_t pid) {
  constexpr int patience = 100;
  int status = 0;
  for (int asked = 0; ::waitpid(pid, &status, WNOHANG) == 0;) {
    if (stop_requested()) ::kill(pid, asked++ < patience ? SIGTERM : SIGKILL);
    ::poll(nullptr, 0, 20);
  }
  return status;
}

[[noreturn]] void fail_script(const std::string& python, int status) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == no_package)
    fail(Exit::no_input, "--vocab needs the package tokenizers, which ", python,
         " does not have: pip install tokenizers, or name another Python in the variable PYTHON");
  fail(Exit::io, "--vocab: ", python, " did not train the vocabulary: it ended with ",
       WIFSIGNALED(status) ? str("signal ", WTERMSIG(status)) : str("exit code ", WEXITSTATUS(status)),
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
  const char* named = std::getenv("PYTHON");
  const std::string python = named != nullptr && *named != '\0' ? named : "python3";
  const std::string unfinished = temporary_sibling(out);
  std::printf("training a vocabulary of %s on %.1f MB of text\n", format_count(options.size).c_str(),
              static_cast<double>(std::min(sample.bytes, max_bytes)) / 1e6);
  std::fflush(stdout);
  clean_python_path();
  Descriptor theirs, ours;
  make_pipe(theirs, ours);
  const std::string size = std::to_string(options.size);
  const pid_t pid = start_script({python, "-c", python_files().at("train_tokenizer.py"), "--vocab", size, "--style",
                                  options.style, "--out", unfinished},
                                 theirs.get());
  if (pid == 0)
    fail(Exit::no_input, "--vocab needs Python with the package tokenizers, but there is no program ", python,
         "; install both (pip install tokenizers), or name another Python in the variable PYTHON");
  theirs = Descriptor();
  feed(ours.get(), sample);
  ours = Descriptor();
  const int status = wait_for(pid);
  const bool trained = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (!trained || stop_requested()) ::unlink(unfinished.c_str());
  check_stop();
  if (!trained) fail_script(python, status);
  sync_file(unfinished);
  if (::rename(unfinished.c_str(), out.c_str()) != 0) fail_io("rename " + unfinished + " to", out, errno);
}

}  // namespace crossply
