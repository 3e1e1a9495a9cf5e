#include "data/vocabulary.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "cli/format.h"
#include "cli/stop.h"
#include "data/digest.h"
#include "data/documents.h"
#include "data/encoding_progress.h"
#include "engine/file.h"
#include "engine/python_files.h"
#include "engine/rng.h"

extern char** environ;

namespace crossply {

namespace {

constexpr size_t most_bytes = 200'000'000, batch_bytes = 4 << 20;

struct Sample {
  std::vector<std::pair<uint64_t, std::string>> texts;  // with their hashes
  size_t bytes = 0;
  uint64_t below = ~uint64_t{0};  // of the hashes that are kept

  void add(uint64_t hash, std::string text) {
    if (hash > below) return;
    bytes += text.size();
    texts.emplace_back(hash, std::move(text));
    while (bytes > most_bytes && texts.size() > 1) {
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

Sample draw_sample(const std::vector<std::string>& files, const std::string& field) {
  Sample sample;
  uint64_t all = 0, before = 0;
  for (const std::string& file : files) all += InputFile(file).size();
  EncodingProgress progress("reading for the vocabulary", all);
  int64_t text = 0;
  for (const std::string& file : files) {
    DocumentReader reader(file);
    for (bool more = true; more;) {
      std::vector<Document> batch;
      more = read_batch(reader, batch_bytes, batch);
      parse_documents(batch, field);
      for (Document& document : batch) {
        text += std::ssize(document.text);
        const uint64_t hash = document_hash(document.text, stream_of("vocabulary"));
        if (!document.text.empty()) sample.add(hash, std::move(document.text));
      }
      progress.tell(before + reader.bytes().taken(), text, 0);
      check_stop();
    }
    before += reader.bytes().taken();
  }
  if (sample.bytes == 0) fail(Exit::bad_data, "there is no text to train a vocabulary on");
  return sample;
}

// False where the reader has gone.
bool write_all(int fd, const char* from, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = uninterrupted([&] { return ::write(fd, from, bytes); });
    if (n < 0) return false;
    from += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

void feed(int fd, const Sample& sample) {
  size_t left = most_bytes;
  for (const auto& [hash, text] : sample.texts) {
    size_t n = std::min(left, text.size());
    while (n < text.size() && n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;  // no half character
    left -= n;
    if (!write_all(fd, text.data(), n) || (n > 0 && text[n - 1] != '\n' && !write_all(fd, "\n", 1))) return;
  }
}

// Starts the script with its standard input at the other end of the pipe. 0: there is no such program.
pid_t start_script(const std::vector<std::string>& words, int input, int other_end) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  posix_spawn_file_actions_addclose(&actions, other_end);
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0 && error != ENOENT) fail_io("start", words[0], error);
  return error == 0 ? pid : 0;
}

}  // namespace

uint64_t document_hash(const std::string& text, uint64_t purpose) {
  Digest digest;
  digest.add(text.data(), text.size());
  return mix_bits(digest.value() ^ mix_bits(purpose));
}

void train_vocabulary(const std::vector<std::string>& files, const VocabularyOptions& options, const std::string& out) {
  const Sample sample = draw_sample(files, options.field);
  const char* named = std::getenv("PYTHON");
  const std::string python = named != nullptr && *named != '\0' ? named : "python3";
  const std::string unfinished = temporary_sibling(out);
  std::printf("training a vocabulary of %s on %.1f MB of text\n", format_count(options.size).c_str(),
              static_cast<double>(std::min(sample.bytes, most_bytes)) / 1e6);
  std::fflush(stdout);
  int ends[2];
  if (::pipe(ends) != 0) fail_io("make", "a pipe", errno);
  Descriptor theirs(ends[0]), ours(ends[1]);
  const std::string size = std::to_string(options.size);
  const pid_t pid = start_script({python, "-c", python_files().at("train_tokenizer.py"), "--vocab", size, "--style",
                                  options.style, "--out", unfinished},
                                 theirs.get(), ours.get());
  if (pid == 0)
    fail(Exit::no_input, "--vocab needs Python with the package tokenizers, but there is no program ", python,
         "; install both (pip install tokenizers), or name another Python in the variable PYTHON");
  theirs = Descriptor();
  feed(ours.get(), sample);
  ours = Descriptor();
  int status = 0;
  uninterrupted([&] { return ::waitpid(pid, &status, 0); });
  check_stop();
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    ::unlink(unfinished.c_str());
    fail(Exit::no_input, "--vocab: ", python, " did not train the vocabulary; what it says stands above. It needs the ",
         "package tokenizers (pip install tokenizers); the variable PYTHON names another Python");
  }
  sync_file(unfinished);
  if (::rename(unfinished.c_str(), out.c_str()) != 0) fail_io("rename " + unfinished + " to", out, errno);
}

}  // namespace crossply
