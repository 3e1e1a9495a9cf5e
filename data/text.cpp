#include "data/text.h"

#include <algorithm>
#include <memory>

#include "data/digest.h"
#include "engine/file.h"

namespace crossply {
namespace {

class TextSource : public Source {
 public:
  TextSource(std::shared_ptr<const InputFile> file, int64_t T, int64_t first, int64_t count, bool whole = false)
      : file_(std::move(file)), T_(T), first_(first), count_(count), whole_(whole) {}

  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return 256; }
  int64_t file_tokens() const override { return static_cast<int64_t>(file_->size()); }
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
  uint64_t digest() const override {
    std::vector<uint8_t> chunk(std::min<uint64_t>(file_->size(), 1 << 20));
    Digest digest;
    for (uint64_t at = 0; at < file_->size(); at += chunk.size()) {
      const uint64_t n = std::min<uint64_t>(chunk.size(), file_->size() - at);
      file_->read(at, chunk.data(), n);
      digest.add(chunk.data(), n);
    }
    return digest.value();
  }

 private:
  void read(const Window& window, int64_t T, int32_t* tokens, int32_t* targets) const {
    const auto bytes = static_cast<size_t>(window.length + 1);
    const auto from = std::make_unique_for_overwrite<uint8_t[]>(bytes);
    file_->read(static_cast<uint64_t>(window.begin), from.get(), bytes);
    copy_window(from.get(), window, T, tokens, targets);
  }

  std::shared_ptr<const InputFile> file_;
  int64_t T_, first_, count_;
  bool whole_;
};

}  // namespace

Dataset open_text(const std::string& path, const DataOptions& options) {
  int64_t T = options.seq_len ? options.seq_len : 256;
  const auto file = std::make_shared<const InputFile>(path);
  const auto bytes = static_cast<int64_t>(file->size());
  if (options.whole) {
    if (bytes < 2) fail(Exit::bad_data, path, ": has ", bytes, " bytes; the second one is the first to score");
    T = std::min(T, bytes - 1);
    const int64_t all = count_windows(bytes, T);
    return {nullptr,
            std::make_unique<TextSource>(file, T, 0, count_samples(path, "test", options.test_samples, all), true),
            Tokenizer::bytes()};
  }
  const int64_t windows = bytes / (T + 1), test = std::max<int64_t>(1, windows / 10), train = windows - test;
  if (train < 1)
    fail(Exit::bad_data, path, ": has ", file->size(), " bytes, but training and testing with a sequence length of ", T,
         " needs at least ", 2 * (T + 1), "; a smaller --seq needs fewer");
  return {std::make_unique<TextSource>(file, T, 0, count_samples(path, "train", options.train_samples, train)),
          std::make_unique<TextSource>(file, T, train, count_samples(path, "test", options.test_samples, test)),
          Tokenizer::bytes()};
}

}  // namespace crossply
