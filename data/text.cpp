#include "data/text.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "data/digest.h"
#include "data/documents.h"
#include "data/encoding_progress.h"
#include "data/paths.h"
#include "engine/io/file.h"
#include "engine/memory.h"

namespace crossply {
namespace {

// The tokens of a split and of the other one.
class Tokens {
 public:
  virtual ~Tokens() = default;
  virtual int64_t size() const = 0;
  virtual void read(int64_t begin, size_t count, int32_t* out) const = 0;
  virtual uint64_t digest() const = 0;
};

class FileBytes : public Tokens {
 public:
  FileBytes(InputFile file, uint64_t first) : file_(std::move(file)), first_(std::min(first, file_.size())) {}
  int64_t size() const override { return static_cast<int64_t>(file_.size() - first_); }
  void read(int64_t begin, size_t count, int32_t* out) const override {
    const auto bytes = std::make_unique_for_overwrite<uint8_t[]>(count);
    file_.read(first_ + static_cast<uint64_t>(begin), bytes.get(), count);
    std::copy_n(bytes.get(), count, out);
  }
  uint64_t digest() const override {
    std::vector<uint8_t> chunk(std::min<uint64_t>(file_.size(), 1 << 20));
    Digest digest;
    for (uint64_t at = first_; at < file_.size(); at += chunk.size()) {
      const uint64_t n = std::min<uint64_t>(chunk.size(), file_.size() - at);
      file_.read(at, chunk.data(), n);
      digest.add(chunk.data(), n);
    }
    return digest.value();
  }

 private:
  InputFile file_;
  uint64_t first_;  // behind a byte order mark
};

class EncodedText : public Tokens {
 public:
  EncodedText(const std::vector<std::string>& files, const Tokenizer& tokenizer) {
    EncodingProgress progress("encoding", total_size(files));
    uint64_t before = 0;
    for (const std::string& file : files) {
      DocumentReader reader(file);
      for (bool more = true; more;) {
        more = take_batch(reader, tokenizer);
        progress.tell(before + reader.taken(), bytes_, size());
      }
      before += reader.taken();
    }
    if (progress.seconds() > 20)
      std::fprintf(stderr, "note: encoding took %.0f s, and will each time; `prepare` does it once\n",
                   progress.seconds());
  }
  int64_t size() const override { return size_; }
  void read(int64_t begin, size_t count, int32_t* out) const override {
    for (auto at = static_cast<size_t>(begin); count > 0;) {
      const size_t n = std::min(count, block - at % block);
      std::copy_n(blocks_[at / block].begin() + static_cast<int64_t>(at % block), n, out);
      at += n, out += n, count -= n;
    }
  }
  uint64_t digest() const override {
    Digest digest;
    for (const std::vector<int32_t>& ids : blocks_) digest.add(ids.data(), ids.size() * sizeof ids[0]);
    return digest.value();
  }

 private:
  static uint64_t total_size(const std::vector<std::string>& files) {
    uint64_t sum = 0;
    for (const std::string& file : files) sum += InputFile(file).size();
    return sum;
  }
  // False after the last one of the reader.
  bool take_batch(DocumentReader& reader, const Tokenizer& tokenizer) {
    std::vector<Document> batch;
    const bool more = read_batch(reader, 4 << 20, batch);
    parse_documents(batch, "text");
    std::erase_if(batch, [](const Document& d) { return d.text.empty(); });
    encode_documents(batch, tokenizer, tokenizer.eos());
    for (const Document& document : batch) {
      bytes_ += std::ssize(document.text);
      append(document.ids);
    }
    return more;
  }
  void append(const std::vector<int32_t>& ids) {
    for (size_t at = 0; at < ids.size();) {
      if (size_ % block == 0) add_block();
      const size_t n = std::min(ids.size() - at, block - blocks_.back().size());
      const auto from = ids.begin() + static_cast<int64_t>(at);
      blocks_.back().insert(blocks_.back().end(), from, from + static_cast<int64_t>(n));
      at += n, size_ += static_cast<int64_t>(n);
    }
  }

  // The machine must not run out of memory, which ends other programs, too.
  void add_block() {
    if (blocks_.size() % 4 == 0)
      require_memory(min_free, str("the text has ", size_, " tokens so far, and going on takes"),
                     "prepare writes them into token shards, which stay on the disk");
    blocks_.emplace_back().reserve(block);
  }

  static constexpr size_t block = 1 << 20;
  static constexpr uint64_t min_free = 256 << 20;  // bytes
  std::vector<std::vector<int32_t>> blocks_;  // full but for the last: one vector would need thrice the memory to grow
  int64_t size_ = 0, bytes_ = 0;
};

class TextSource : public Source {
 public:
  TextSource(std::shared_ptr<const Tokens> all, int64_t vocab, int64_t T, int64_t first, int64_t count,
             bool whole = false)
      : all_(std::move(all)), vocab_(vocab), T_(T), first_(first), count_(count), whole_(whole) {}

  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return vocab_; }
  int64_t file_tokens() const override { return all_->size(); }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    CHECK_THAT(index >= 0 && index < count_, "window ", index, " of ", count_);
    read(whole_ ? whole_window(file_tokens(), T_, index) : Window{(first_ + index) * (T_ + 1), T_, 0}, T_, tokens,
         targets);
  }
  int64_t offsets(int64_t T) const override {
    return count_offsets(whole_ ? std::min(file_tokens(), count_ * T_ + 1) : count_ * (T_ + 1), T);
  }
  void read_at(int64_t offset, int64_t T, int32_t* tokens, int32_t* targets) const override {
    CHECK_THAT(offset >= 0 && offset < offsets(T), "offset ", offset, " of ", offsets(T));
    const int64_t length = std::min(T, file_tokens() - 1);
    read(Window{first_ * (T_ + 1) + offset, length, 0}, T, tokens, targets);
  }
  uint64_t digest() const override { return all_->digest(); }
  std::vector<int64_t> pieces() const override { return {count_ * (T_ + 1)}; }
  void read_piece(size_t, int64_t begin, int64_t count, int32_t* out) const override {
    all_->read(first_ * (T_ + 1) + begin, static_cast<size_t>(count), out);
  }

 private:
  void read(const Window& window, int64_t T, int32_t* tokens, int32_t* targets) const {
    const auto count = static_cast<size_t>(window.length + 1);
    const auto from = std::make_unique_for_overwrite<int32_t[]>(count);
    all_->read(window.begin, count, from.get());
    copy_window(from.get(), window, T, tokens, targets);
  }

  std::shared_ptr<const Tokens> all_;
  int64_t vocab_, T_, first_, count_;
  bool whole_;
};

Tokenizer tokenizer_of(const DataOptions& options) {
  if (!options.tokenizer.empty()) return Tokenizer::read(options.tokenizer);
  return options.of_model.is_bpe() ? options.of_model : Tokenizer::bytes();
}

std::shared_ptr<const Tokens> open_tokens(const std::string& path, const Tokenizer& tokenizer) {
  const std::vector<std::string> files = text_files(path);
  if (tokenizer.is_bytes() && files == std::vector{path}) {
    InputFile file(path);
    const DocumentReader reader(path);
    if (reader.is_plain_text()) return std::make_shared<const FileBytes>(std::move(file), reader.text_begin());
  }
  return std::make_shared<const EncodedText>(files, tokenizer);
}

}  // namespace

Dataset open_text(const std::string& path, const DataOptions& options) {
  int64_t T = options.seq_len;
  const Tokenizer tokenizer = tokenizer_of(options);
  const char* unit = tokenizer.is_bytes() ? "bytes" : "tokens";
  const auto all = open_tokens(path, tokenizer);
  const int64_t N = all->size(), V = tokenizer.vocab_size();
  if (options.whole) {
    if (N < 2) fail(Exit::bad_data, path, ": has ", N, " ", unit, "; the second one is the first to score");
    T = std::min(T, N - 1);
    const int64_t count = count_samples(path, "test", options.test_samples, count_windows(N, T));
    return {nullptr, std::make_unique<TextSource>(all, V, T, 0, count, true), tokenizer};
  }
  const int64_t windows = N / (T + 1), test = std::max<int64_t>(1, windows / 10), train = windows - test;
  if (train < 1)
    fail(Exit::bad_data, path, ": has ", N, " ", unit, ", but training and testing with a sequence length of ", T,
         " needs at least ", 2 * (T + 1), "; a smaller --seq needs fewer");
  return {std::make_unique<TextSource>(all, V, T, 0, count_samples(path, "train", options.train_samples, train)),
          std::make_unique<TextSource>(all, V, T, train, count_samples(path, "test", options.test_samples, test)),
          tokenizer};
}

}  // namespace crossply
