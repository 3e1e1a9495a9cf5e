#include "data/shards.h"

#include <glob.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "data/file.h"
#include "engine/file.h"

namespace crossply {
namespace {

constexpr int64_t header_ints = 256, header_bytes = header_ints * 4;

struct Format {
  int32_t magic, version;
  int64_t token_bytes;
};
constexpr Format format_of(ShardFormat format) {
  return format == ShardFormat::uint16 ? Format{20240520, 1, 2} : Format{20240801, 7, 4};
}

struct Shard {
  MappedFile file;
  ShardFormat format;
  int64_t tokens;  // how many

  // Calls body(first token), typed as the file has them.
  template <class F>
  auto with_tokens(F&& body) const {
    const uint8_t* data = file.data() + header_bytes;
    return format == ShardFormat::uint16 ? body(reinterpret_cast<const uint16_t*>(data))
                                         : body(reinterpret_cast<const uint32_t*>(data));
  }
};

Shard open_shard(const std::string& path) {
  MappedFile file(path);
  if (file.size() < header_bytes)
    fail(Exit::bad_data, path, ": has ", file.size(), " bytes, but a shard begins with a header of ", header_bytes);
  std::array<int32_t, 3> header{};
  std::memcpy(header.data(), file.data(), sizeof header);
  ShardFormat format = ShardFormat::uint16;
  if (header[0] == format_of(ShardFormat::uint32).magic) format = ShardFormat::uint32;
  const Format want = format_of(format);
  if (header[0] != want.magic)
    fail(Exit::bad_data, path, ": the magic number is ", header[0], ", expected 20240520 (uint16 tokens) or 20240801 ",
         "(uint32 tokens)");
  if (header[1] != want.version)
    fail(Exit::bad_data, path, ": the version is ", header[1], ", expected ", want.version, " with magic ", want.magic);
  const int64_t tokens = header[2], bytes = header_bytes + tokens * want.token_bytes;
  if (bytes != file.size())
    fail(Exit::bad_data, path, ": the header says ", tokens, " tokens, a file of ", bytes, " bytes, but it has ",
         file.size());
  return {std::move(file), format, tokens};
}

std::vector<std::string> glob_paths(const std::string& pattern) {
  glob_t found{};
  const int error = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (error == GLOB_NOMATCH) fail(Exit::no_input, pattern, ": no such file");
  if (error != 0) fail(Exit::io, pattern, ": cannot list the files");
  return paths;
}

// The shards of one glob, and where each one's windows begin in the numbering of all windows.
struct ShardSet {
  std::vector<Shard> shards;
  std::vector<int64_t> first_window;  // (shards + 1), the last one is the number of windows
  int64_t T;

  ShardSet(const std::string& pattern, int64_t length, bool whole = false) : first_window{0}, T(length) {
    int64_t longest = 0;
    for (const std::string& path : glob_paths(pattern)) {
      shards.push_back(open_shard(path));
      require_same_format(shards.back(), shards.front());
      longest = std::max(longest, shards.back().tokens);
    }
    if (whole) T = std::max<int64_t>(1, std::min(T, longest - 1));
    for (const Shard& shard : shards) {
      const int64_t full = std::max<int64_t>(0, shard.tokens - 1) / T;
      first_window.push_back(first_window.back() + (whole ? count_windows(shard.tokens, T) : full));
    }
    if (windows() == 0)
      fail(Exit::bad_data, pattern, ": no shard has the ", whole ? 2 : T + 1, " tokens of one window");
  }
  int64_t windows() const { return first_window.back(); }
  size_t shard_of(int64_t window) const {
    const auto after = std::upper_bound(first_window.begin(), first_window.end(), window);
    return static_cast<size_t>(after - first_window.begin()) - 1;
  }
  static void require_same_format(const Shard& a, const Shard& b) {
    if (a.format != b.format)
      fail(Exit::bad_data, a.file.path(), " and ", b.file.path(), ": one has uint16 and the other uint32 tokens");
  }
};

void check_shard(const Shard& shard, int64_t vocab) {
  shard.with_tokens([&](const auto* tokens) {
    constexpr int64_t chunk = 1 << 16;  // first the largest of a chunk, which is quick; then, if need be, the culprit
    for (int64_t begin = 0; begin < shard.tokens; begin += chunk) {
      const int64_t end = std::min(begin + chunk, shard.tokens);
      uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
      for (int64_t i = begin; i < end; ++i) largest = std::max<uint32_t>(largest, tokens[i]);
      if (static_cast<int64_t>(largest) < vocab) continue;
      const auto* bad = std::find_if(tokens + begin, tokens + end, [&](uint32_t token) { return token >= vocab; });
      fail(Exit::bad_data, shard.file.path(), ": token ", bad - tokens, " is ", *bad,
           ", but the model's vocabulary has only ", vocab);
    }
  });
}

class ShardSource : public Source {
 public:
  ShardSource(std::shared_ptr<const ShardSet> set, int64_t T, int64_t first, int64_t count, bool whole = false)
      : set_(std::move(set)), T_(T), first_(first), count_(count), whole_(whole) {}

  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return 0; }
  int64_t file_tokens() const override {
    int64_t sum = 0;
    for (const Shard& shard : set_->shards) sum += shard.tokens;
    return sum;
  }

  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    CHECK_THAT(index >= 0 && index < count_, "window ", index, " of ", count_);
    const size_t s = set_->shard_of(first_ + index);
    const int64_t in_shard = first_ + index - set_->first_window[s];
    set_->shards[s].with_tokens([&](const auto* all) {
      if (whole_) return read_window(all, set_->shards[s].tokens, T_, in_shard, tokens, targets);
      const auto* window = all + in_shard * T_;
      for (int64_t t = 0; t < T_; ++t) tokens[t] = static_cast<int32_t>(window[t]);
      for (int64_t t = 0; t < T_; ++t) targets[t] = static_cast<int32_t>(window[t + 1]);
    });
  }

  // Whole files: every one that a window of this split is in.
  void check_tokens(int64_t vocab) const override {
    for (size_t s = set_->shard_of(first_); s <= set_->shard_of(first_ + count_ - 1); ++s)
      check_shard(set_->shards[s], vocab);
  }

 private:
  std::shared_ptr<const ShardSet> set_;
  int64_t T_, first_, count_;
  bool whole_;
};

}  // namespace

Dataset open_shards(const DataOptions& options) {
  const int64_t T = options.seq_len ? options.seq_len : 1024;
  if (options.whole) {
    const auto all = std::make_shared<const ShardSet>(options.spec, T, true);
    const int64_t count = count_samples(options.spec, "test", options.test_samples, all->windows());
    return {nullptr, std::make_unique<ShardSource>(all, all->T, 0, count, true), Tokenizer()};
  }
  const auto set = std::make_shared<const ShardSet>(options.spec, T);
  auto test_set = set;
  int64_t train = set->windows(), test = 0, first_test = 0;
  if (options.val_spec.empty()) {
    test = std::max<int64_t>(1, train / 100);
    train -= test;
    first_test = train;
    if (train < 1) fail(Exit::bad_data, options.spec, ": has one window of ", T + 1, " tokens, testing needs another");
  } else {
    test_set = std::make_shared<const ShardSet>(options.val_spec, T);
    ShardSet::require_same_format(test_set->shards[0], set->shards[0]);
    test = test_set->windows();
  }
  train = count_samples(options.spec, "train", options.train_samples, train);
  test = count_samples(options.val_spec.empty() ? options.spec : options.val_spec, "test", options.test_samples, test);
  return {std::make_unique<ShardSource>(set, T, 0, train),
          std::make_unique<ShardSource>(test_set, T, first_test, test), Tokenizer()};
}

std::vector<int32_t> read_shard(const std::string& path, int64_t count) {
  const Shard shard = open_shard(path);
  return shard.with_tokens([&](const auto* tokens) {
    return std::vector<int32_t>(tokens, tokens + std::min(count, shard.tokens));
  });
}

void write_shard(const std::string& path, const std::vector<uint32_t>& tokens, ShardFormat format) {
  const Format f = format_of(format);
  CHECK_THAT(tokens.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()), "a shard's count is an int32");
  std::array<int32_t, header_ints> header{f.magic, f.version, static_cast<int32_t>(tokens.size())};
  std::string bytes(static_cast<size_t>(header_bytes) + tokens.size() * static_cast<size_t>(f.token_bytes), '\0');
  std::memcpy(bytes.data(), header.data(), sizeof header);
  for (size_t i = 0; i < tokens.size(); ++i) {
    char* to = bytes.data() + header_bytes + i * static_cast<size_t>(f.token_bytes);
    CHECK_THAT(f.token_bytes == 4 || tokens[i] <= 0xFFFF, "token ", i, " is ", tokens[i], ": too large for uint16");
    std::memcpy(to, &tokens[i], static_cast<size_t>(f.token_bytes));  // little-endian: the low bytes come first
  }
  write_file_atomically(path, bytes);
}

}  // namespace crossply
