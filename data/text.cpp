#include "data/text.h"

#include <algorithm>

#include "data/file.h"

namespace crossply {
namespace {

class TextSource : public Source {
 public:
  TextSource(std::shared_ptr<const MappedFile> file, int64_t T, int64_t first, int64_t count, bool whole = false)
      : file_(std::move(file)), T_(T), first_(first), count_(count), whole_(whole) {}

  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return 256; }
  int64_t file_tokens() const override { return file_->size(); }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    CHECK_THAT(index >= 0 && index < count_, "window ", index, " of ", count_);
    if (whole_) return read_window(file_->data(), file_->size(), T_, index, tokens, targets);
    const uint8_t* window = file_->data() + (first_ + index) * (T_ + 1);
    std::copy(window, window + T_, tokens);
    std::copy(window + 1, window + T_ + 1, targets);
  }

 private:
  std::shared_ptr<const MappedFile> file_;
  int64_t T_, first_, count_;
  bool whole_;
};

}  // namespace

Dataset open_text(const std::string& path, const DataOptions& options) {
  int64_t T = options.seq_len ? options.seq_len : 256;
  const auto file = std::make_shared<const MappedFile>(path);
  if (options.whole) {
    if (file->size() < 2)
      fail(Exit::bad_data, path, ": has ", file->size(), " bytes; the second one is the first to score");
    T = std::min(T, file->size() - 1);
    const int64_t all = count_windows(file->size(), T);
    return {nullptr,
            std::make_unique<TextSource>(file, T, 0, count_samples(path, "test", options.test_samples, all), true),
            Tokenizer::bytes()};
  }
  const int64_t windows = file->size() / (T + 1), test = std::max<int64_t>(1, windows / 10), train = windows - test;
  if (train < 1)
    fail(Exit::bad_data, path, ": has ", file->size(), " bytes, but training and testing with a sequence length of ", T,
         " needs at least ", 2 * (T + 1));
  return {std::make_unique<TextSource>(file, T, 0, count_samples(path, "train", options.train_samples, train)),
          std::make_unique<TextSource>(file, T, train, count_samples(path, "test", options.test_samples, test)),
          Tokenizer::bytes()};
}

}  // namespace crossply
