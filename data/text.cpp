#include "data/text.h"

#include <algorithm>
#include <memory>

#include "data/digest.h"
#include "engine/file.h"

namespace crossply {
namespace {

class TextSource : public Source {
 public:
  TextSource(std::shared_ptr<const InputFile> file, int64_t T, int64_t first, int64_t count)
      : file_(std::move(file)), T_(T), first_(first), count_(count) {}

  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return 256; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    CHECK_THAT(index >= 0 && index < count_, "window ", index, " of ", count_);
    const int64_t bytes = T_ + 1;
    const auto window = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(bytes));
    file_->read(static_cast<uint64_t>((first_ + index) * bytes), window.get(), static_cast<uint64_t>(bytes));
    std::copy(window.get(), window.get() + T_, tokens);
    std::copy(window.get() + 1, window.get() + bytes, targets);
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
  std::shared_ptr<const InputFile> file_;
  int64_t T_, first_, count_;
};

}  // namespace

Dataset open_text(const std::string& path, const DataOptions& options) {
  const int64_t T = options.seq_len ? options.seq_len : 256;
  const auto file = std::make_shared<const InputFile>(path);
  const int64_t windows = static_cast<int64_t>(file->size()) / (T + 1);
  const int64_t test = std::max<int64_t>(1, windows / 10), train = windows - test;
  if (train < 1)
    fail(Exit::bad_data, path, ": has ", file->size(), " bytes, but training and testing with a sequence length of ", T,
         " needs at least ", 2 * (T + 1));
  return {std::make_unique<TextSource>(file, T, 0, count_samples(path, "train", options.train_samples, train)),
          std::make_unique<TextSource>(file, T, train, count_samples(path, "test", options.test_samples, test)),
          Tokenizer::bytes()};
}

}  // namespace crossply
