#include "data/shards.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "cli/ticker.h"
#include "data/digest.h"
#include "data/foreign_format.h"
#include "data/open_files.h"
#include "data/paths.h"
#include "engine/io/file.h"

namespace crossply {
namespace {

struct Format {
  int32_t magic, version;
};
constexpr Format format_of(ShardFormat format) {
  return format == ShardFormat::uint16 ? Format{20240520, 1} : Format{20240801, 7};
}
constexpr int32_t knows_tokenizer = 1;  // header[3]

// What one pass over all tokens of a shard tells.
struct Scan {
  uint32_t largest = 0;
  uint64_t digest = 0;
};

template <class Token>
uint32_t largest_of(const Token* tokens, int64_t count) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = std::max<uint32_t>(largest, tokens[i]);
  return largest;
}

class Shard {
 public:
  // prefix: uint16: or uint32: of a file without a header. The file is number `index` of `files`.
  Shard(const std::string& path, const std::string& prefix, std::shared_ptr<OpenFiles> files, size_t index);
  const std::string& path() const { return path_; }
  ShardFormat format() const { return format_; }
  int64_t tokens() const { return tokens_; }  // how many
  int64_t bytes() const { return tokens_ * token_bytes(format_); }
  uint64_t fingerprint() const { return fingerprint_; }  // of its tokenizer; 0: it does not say
  const FileIdentity& identity() const { return identity_; }
  const std::optional<Scan>& known() const { return scan_; }  // of an earlier scan
  void adopt(const Scan& scan) { scan_ = scan; }              // of the same file under another name
  // Reads the file, unless an earlier call did; reports the bytes of each piece.
  template <class F>
  const Scan& scan(F&& report);
  // Calls body(tokens [first, first + count), typed as the file has them). None may be larger than the largest that an
  // earlier scan saw, and all must be below `vocab` (0: any).
  template <class F>
  void read(int64_t first, int64_t count, int64_t vocab, F&& body) const {
    with_tokens(first, count, [&](const auto* tokens) {
      const uint32_t largest = largest_of(tokens, count);
      if (scan_ && largest > scan_->largest) fail_changed(first, count, largest);
      if (vocab > 0 && largest >= vocab) fail_vocabulary(tokens, first, count, vocab);
      body(tokens);
    });
  }
  // Fails, with its place, for the first token that is not below `vocab`. Needs a scan.
  void check(int64_t vocab) const;

 private:
  // By a read, not a map: a file that is cut short while a program runs is an error then, not a signal.
  template <class F>
  auto with_tokens(int64_t first, int64_t count, F&& body) const {
    return with_tokens_of(*open(), first, count, body);
  }
  template <class F>
  auto with_tokens_of(const InputFile& file, int64_t first, int64_t count, F&& body) const {
    const int64_t each = token_bytes(format_);
    const auto bytes = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(count * each));
    file.read(static_cast<uint64_t>(begin_ + first * each), bytes.get(), static_cast<uint64_t>(count * each));
    return format_ == ShardFormat::uint16 ? body(reinterpret_cast<const uint16_t*>(bytes.get()))
                                          : body(reinterpret_cast<const uint32_t*>(bytes.get()));
  }
  std::shared_ptr<const InputFile> open() const;
  void check_unchanged(const InputFile& file) const;
  template <class F>
  Scan scan_of(const InputFile& file, F&& report) const;
  void read_header(const InputFile& file);
  [[noreturn]] void fail_changed(int64_t first, int64_t count, uint32_t largest) const;
  template <class Token>
  void fail_vocabulary(const Token* tokens, int64_t first, int64_t count, int64_t vocab) const {
    const auto* bad = std::find_if(tokens, tokens + count, [&](uint32_t token) { return token >= vocab; });
    if (bad != tokens + count)
      fail(Exit::bad_data, path(), ": token ", first + (bad - tokens), " is ", *bad,
           ", but the model's vocabulary has only ", vocab);
  }

  static constexpr int64_t chunk = 1 << 18;  // tokens to read at a time
  std::string path_;
  std::shared_ptr<OpenFiles> files_;
  size_t index_;
  mutable FileIdentity identity_;  // while the file is opened, and then by one thread at a time
  ShardFormat format_ = ShardFormat::uint16;
  int64_t begin_ = 0, tokens_ = 0;  // begin_: of the tokens, in bytes
  uint64_t fingerprint_ = 0;
  std::optional<Scan> scan_;
};

// A table or an array may be called .bin, too, or be given as tokens alone: its bytes are no tokens.
void refuse_other_formats(const InputFile& file) {
  const std::string format = foreign_format_of(file, 4);
  if (!format.empty() && !format.starts_with("is a token shard")) fail(Exit::bad_data, file.path(), ": ", format);
}

Shard::Shard(const std::string& path, const std::string& prefix, std::shared_ptr<OpenFiles> files, size_t index)
    : path_(path), files_(std::move(files)), index_(index) {
  const auto opened = files_->open(index, path, [](const InputFile&) {});
  const InputFile& file = *opened;
  identity_ = file.identity();
  if (prefix.empty()) {
    read_header(file);
    return;
  }
  refuse_other_formats(file);
  format_ = prefix == "uint16:" ? ShardFormat::uint16 : ShardFormat::uint32;
  const int64_t each = token_bytes(format_), bytes = static_cast<int64_t>(file.size());
  if (bytes % each != 0)
    fail(Exit::bad_data, path, ": has ", bytes, " bytes, but with ", prefix, " each token has ", each);
  tokens_ = bytes / each;
  std::array<int32_t, 2> first{};
  if (bytes >= shard_header_bytes) file.read(0, first.data(), sizeof first);
  for (const ShardFormat format : {ShardFormat::uint16, ShardFormat::uint32})
    if (first[0] == format_of(format).magic && first[1] == format_of(format).version)
      fail(Exit::bad_data, path, ": begins with the header of a shard, so it is no file of tokens alone; leave out ",
           prefix);
}

void Shard::read_header(const InputFile& file) {
  const std::string& name = path();
  if (file.size() < shard_header_bytes) {
    refuse_other_formats(file);
    fail(Exit::bad_data, name, ": has ", file.size(), " bytes, but a shard begins with a header of ",
         shard_header_bytes, "; of tokens alone: uint16:", name);
  }
  std::array<int32_t, 6> header{};
  file.read(0, header.data(), sizeof header);
  if (header[0] == format_of(ShardFormat::uint32).magic) format_ = ShardFormat::uint32;
  const Format want = format_of(format_);
  if (header[0] != want.magic) {
    refuse_other_formats(file);
    fail(Exit::bad_data, name, ": the magic number is ", header[0], ", expected 20240520 (uint16 tokens) or 20240801 ",
         "(uint32 tokens); a file of tokens alone, as nanoGPT writes it, is uint16:", name, " or uint32:", name);
  }
  if (header[1] != want.version)
    fail(Exit::bad_data, name, ": the version is ", header[1], ", expected ", want.version, " with magic ", want.magic);
  begin_ = shard_header_bytes;
  tokens_ = header[2];
  const int64_t bytes = begin_ + tokens_ * token_bytes(format_);
  if (tokens_ < 0 || static_cast<uint64_t>(bytes) != file.size())
    fail(Exit::bad_data, name, ": the header says ", tokens_, " tokens, a file of ", bytes, " bytes, but it has ",
         file.size());
  if (header[3] == knows_tokenizer)
    fingerprint_ = static_cast<uint64_t>(static_cast<uint32_t>(header[5])) << 32 | static_cast<uint32_t>(header[4]);
}

std::shared_ptr<const InputFile> Shard::open() const {
  return files_->open(index_, path_, [this](const InputFile& file) { check_unchanged(file); });
}

// Of a file that was closed meanwhile. Without a scan nobody knows what it held, so any change counts.
void Shard::check_unchanged(const InputFile& file) const {
  const FileIdentity& now = file.identity();
  if (now == identity_) return;
  if (file.size() < identity_.bytes)
    fail(Exit::io, "cannot read ", path_, ": it has ", file.size(), " bytes, it had ", identity_.bytes,
         ": it was shortened while in use");
  const bool same = file.size() == identity_.bytes && scan_ && scan_of(file, [](int64_t) {}).digest == scan_->digest;
  if (!same) fail(Exit::bad_data, path_, ": was changed while in use; put it back, or start a new run");
  identity_ = now;
}

template <class F>
Scan Shard::scan_of(const InputFile& file, F&& report) const {
  Scan scan;
  Digest digest;
  for (int64_t first = 0; first < tokens_; first += chunk) {
    const int64_t n = std::min(chunk, tokens_ - first);
    with_tokens_of(file, first, n, [&](const auto* tokens) {
      digest.add(tokens, static_cast<size_t>(n) * sizeof *tokens);
      scan.largest = std::max(scan.largest, largest_of(tokens, n));
    });
    report(n * token_bytes(format_));
  }
  scan.digest = digest.value();
  return scan;
}

template <class F>
const Scan& Shard::scan(F&& report) {
  if (!scan_) scan_ = scan_of(*open(), report);
  return *scan_;
}

void Shard::fail_changed(int64_t first, int64_t count, uint32_t largest) const {
  fail(Exit::bad_data, path(), ": was changed while in use: one of the tokens ", first, " to ", first + count - 1,
       " is ", largest, ", but the largest was ", scan_->largest, " before");
}

void Shard::check(int64_t vocab) const {
  if (static_cast<int64_t>(scan_->largest) < vocab) return;
  for (int64_t first = 0; first < tokens_; first += chunk) {
    const int64_t n = std::min(chunk, tokens_ - first);
    with_tokens(first, n, [&](const auto* tokens) { fail_vocabulary(tokens, first, n, vocab); });
  }
}

// The shards of one glob, and where each one's windows begin in the numbering of all windows.
struct ShardSet {
  std::vector<Shard> shards;
  std::vector<int64_t> first_window;  // (shards + 1), the last one is the number of windows
  int64_t T;

  ShardSet(const std::string& pattern, int64_t length, bool whole = false) : first_window{0}, T(length) {
    int64_t longest = 0;
    const DataSpec spec = parse_data_spec(pattern);
    const auto files = std::make_shared<OpenFiles>();
    for (const std::string& path : match_paths(spec.path)) {
      shards.emplace_back(path, spec.prefix, files, shards.size());
      require_same_format(shards.back(), shards.front());
      longest = std::max(longest, shards.back().tokens());
    }
    if (whole) T = std::max<int64_t>(1, std::min(T, longest - 1));
    for (const Shard& shard : shards) {
      const int64_t full = std::max<int64_t>(0, shard.tokens() - 1) / T;
      first_window.push_back(first_window.back() + (whole ? count_windows(shard.tokens(), T) : full));
    }
    if (windows() == 0)
      fail(Exit::bad_data, pattern, ": no shard has the ", whole ? 2 : T + 1, " tokens of one window",
           whole ? "" : "; a smaller --seq needs fewer");
  }
  int64_t windows() const { return first_window.back(); }
  size_t shard_of(int64_t window) const {
    const auto after = std::upper_bound(first_window.begin(), first_window.end(), window);
    return static_cast<size_t>(after - first_window.begin()) - 1;
  }
  static void require_same_format(const Shard& a, const Shard& b) {
    if (a.format() != b.format())
      fail(Exit::bad_data, a.path(), " and ", b.path(), ": one has uint16 and the other uint32 tokens");
  }

  // Reads the shards [first, last), each file once: not those of an earlier scan, and not a second name of a file.
  void scan(size_t first, size_t last) {
    const std::lock_guard lock(scanning_);
    int64_t all = 0, done = 0;
    for (size_t s = first; s < last; ++s) all += shards[s].known() ? 0 : shards[s].bytes();
    Ticker ticker("checking data", "MB");
    for (size_t s = first; s < last; ++s) {
      if (shards[s].known()) continue;
      const auto read = scanned_.find(shards[s].identity().number());
      if (read != scanned_.end()) {
        all -= shards[s].bytes();
        shards[s].adopt(read->second);
        continue;
      }
      scanned_[shards[s].identity().number()] = shards[s].scan([&](int64_t bytes) {
        done += bytes;
        ticker.tell(std::max<int64_t>(1, done >> 20), all >> 20);
      });
    }
  }

 private:
  std::mutex scanning_;
  std::map<decltype(FileIdentity().number()), Scan> scanned_;
};

// The first so many windows of the other split's files, where it has its own.
struct OtherSplit {
  std::shared_ptr<ShardSet> set;
  int64_t first = 0, count = 0;
};

class ShardSource : public Source {
 public:
  ShardSource(std::shared_ptr<ShardSet> set, OtherSplit other, int64_t vocab, int64_t T, int64_t first, int64_t count,
              bool whole = false)
      : set_(std::move(set)),
        other_(std::move(other)),
        vocab_(vocab),
        T_(T),
        first_(first),
        count_(count),
        whole_(whole) {}

  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return vocab_; }
  int64_t file_tokens() const override {
    int64_t sum = 0;
    for (const Shard& shard : set_->shards) sum += shard.tokens();
    return sum;
  }

  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    CHECK_THAT(index >= 0 && index < count_, "window ", index, " of ", count_);
    const size_t s = set_->shard_of(first_ + index);
    const int64_t in_shard = first_ + index - set_->first_window[s];
    read(s, whole_ ? whole_window(set_->shards[s].tokens(), T_, in_shard) : Window{in_shard * T_, T_, 0}, T_, tokens,
         targets);
  }

  int64_t offsets(int64_t T) const override {
    int64_t sum = 0;
    for (size_t s = 0; s < set_->shards.size(); ++s) sum += part_of(s, T).offsets;
    return sum;
  }
  void read_at(int64_t offset, int64_t T, int32_t* tokens, int32_t* targets) const override {
    int64_t left = offset;
    for (size_t s = 0; left >= 0 && s < set_->shards.size(); ++s) {
      const Part part = part_of(s, T);
      if (left < part.offsets)
        return read(s, Window{part.begin + left, std::min(T, set_->shards[s].tokens() - 1), 0}, T, tokens, targets);
      left -= part.offsets;
    }
    CHECK_THAT(false, "offset ", offset, " of ", offsets(T));
  }

  std::vector<int64_t> pieces() const override {
    std::vector<int64_t> all;
    for (size_t s = 0; s < set_->shards.size(); ++s) {
      const Range windows = windows_of(s);
      const bool to_end = windows.end == set_->first_window[s + 1] - set_->first_window[s];
      const int64_t end = to_end ? set_->shards[s].tokens() : windows.end * T_ + 1;
      all.push_back(windows.begin < windows.end ? end - windows.begin * T_ : 0);
    }
    return all;
  }
  void read_piece(size_t piece, int64_t begin, int64_t count, int32_t* out) const override {
    set_->shards[piece].read(windows_of(piece).begin * T_ + begin, count, limit_,
                             [&](const auto* from) { std::copy_n(from, count, out); });
  }

  // Whole files: every one that a window of this split is in.
  void check_tokens(int64_t vocab) const override {
    const auto [first, last] = files_of(*set_, first_, count_);
    set_->scan(first, last);
    for (size_t s = first; s < last; ++s) set_->shards[s].check(vocab);
  }
  void check_when_read(int64_t vocab) override { limit_ = vocab; }

  uint64_t digest() const override {
    Digest all;
    for (ShardSet* files : {set_.get(), other_.set.get()}) {
      if (files == nullptr) continue;
      files->scan(0, files->shards.size());
      for (const Shard& shard : files->shards) {
        const uint64_t one = shard.known()->digest;
        all.add(&one, sizeof one);
      }
    }
    return all.value();
  }

  std::vector<std::string> files() const override {
    std::vector<std::string> paths;
    for (const Shard* shard : used(*set_, first_, count_)) paths.push_back(shard->path());
    return paths;
  }
  std::vector<std::string> files_of_both() const override {
    std::vector<std::string> both;
    if (other_.set == nullptr) return both;
    std::set<decltype(FileIdentity().number())> names;
    std::set<std::pair<int64_t, uint64_t>> contents;
    for (const Shard* shard : used(*other_.set, other_.first, other_.count)) {
      names.insert(shard->identity().number());
      if (shard->known()) contents.insert({shard->tokens(), shard->known()->digest});
    }
    for (const Shard* shard : used(*set_, first_, count_)) {
      const bool copied = shard->known() && contents.contains({shard->tokens(), shard->known()->digest});
      if (copied || names.contains(shard->identity().number())) both.push_back(shard->path());
    }
    return both;
  }

 private:
  struct Range {
    int64_t begin, end;
  };
  // This split's windows of a shard, counted in it.
  Range windows_of(size_t s) const {
    const int64_t before = set_->first_window[s];
    return {std::max(first_, before) - before, std::min(first_ + count_, set_->first_window[s + 1]) - before};
  }
  // This split's tokens of a shard: where they begin, and how many windows of T can begin there; none: 0.
  struct Part {
    int64_t begin, offsets;
  };
  Part part_of(size_t s, int64_t T) const {
    const Range windows = windows_of(s);
    if (windows.begin >= windows.end) return {0, 0};
    const int64_t begin = windows.begin * T_, end = std::min(set_->shards[s].tokens(), windows.end * T_ + 1);
    return {begin, count_offsets(end - begin, T)};
  }
  // Of windows [first, first + count): their shards, and those between.
  static std::pair<size_t, size_t> files_of(const ShardSet& set, int64_t first, int64_t count) {
    return {set.shard_of(first), set.shard_of(first + count - 1) + 1};
  }
  static std::vector<const Shard*> used(const ShardSet& set, int64_t first, int64_t count) {
    std::vector<const Shard*> used;
    const auto [begin, end] = files_of(set, first, count);
    for (size_t s = begin; s < end; ++s)
      if (set.first_window[s] < set.first_window[s + 1]) used.push_back(&set.shards[s]);
    return used;
  }
  void read(size_t s, const Window& window, int64_t T, int32_t* tokens, int32_t* targets) const {
    set_->shards[s].read(window.begin, window.length + 1, limit_,
                         [&](const auto* from) { copy_window(from, window, T, tokens, targets); });
  }

  std::shared_ptr<ShardSet> set_;
  OtherSplit other_;
  int64_t vocab_, T_, first_, count_;
  bool whole_;
  int64_t limit_ = 0;  // of the tokens that are read; 0: none
};

// The one tokenizer of all shards that know theirs; none where no shard does.
Tokenizer tokenizer_of(const std::vector<const ShardSet*>& sets) {
  const Shard* known = nullptr;
  Tokenizer tokenizer;
  std::string read_from;
  for (const ShardSet* set : sets) {
    for (const Shard& shard : set->shards) {
      if (shard.fingerprint() == 0) continue;
      if (known == nullptr) known = &shard;
      if (shard.fingerprint() != known->fingerprint())
        fail(Exit::bad_data, known->path(), " and ", shard.path(), ": were made with different tokenizers");
      const std::string dir = std::filesystem::path(shard.path()).parent_path().string();
      const std::string file = (dir.empty() ? "." : dir) + "/tokenizer.json";
      if (file == read_from) continue;
      if (!path_exists(file))
        fail(Exit::no_input, shard.path(), " was made with a tokenizer, but ", file, " is missing; put it back");
      tokenizer = Tokenizer::read(file);
      if (tokenizer.fingerprint() != shard.fingerprint())
        fail(Exit::bad_data, file, ": is not the tokenizer that ", shard.path(), " was made with: it is ",
             tokenizer.describe(), "; put back the one that was beside the shards");
      read_from = file;
    }
  }
  return tokenizer;
}

}  // namespace

Dataset open_shards(const DataOptions& options) {
  const int64_t T = options.seq_len;
  if (options.whole) {
    const auto all = std::make_shared<ShardSet>(options.spec, T, true);
    const int64_t count = count_samples(options.spec, "test", options.test_samples, all->windows());
    const Tokenizer tokenizer = tokenizer_of({all.get()});
    const int64_t vocab = tokenizer.vocab_size();
    return {nullptr, std::make_unique<ShardSource>(all, OtherSplit(), vocab, all->T, 0, count, true), tokenizer};
  }
  const auto set = std::make_shared<ShardSet>(options.spec, T);
  std::shared_ptr<ShardSet> val_set;
  int64_t train = set->windows(), test = 0, first_test = 0;
  if (options.val_spec.empty()) {
    test = std::max<int64_t>(1, train / 100);
    train -= test;
    first_test = train;
    if (train < 1)
      fail(Exit::bad_data, options.spec, ": has one window of ", T + 1,
           " tokens, testing needs another: ", "--val-data, or a smaller --seq");
  } else {
    val_set = std::make_shared<ShardSet>(options.val_spec, T);
    ShardSet::require_same_format(val_set->shards[0], set->shards[0]);
    test = val_set->windows();
  }
  train = count_samples(options.spec, "train", options.train_samples, train);
  test = count_samples(options.val_spec.empty() ? options.spec : options.val_spec, "test", options.test_samples, test);
  const Tokenizer tokenizer = val_set ? tokenizer_of({set.get(), val_set.get()}) : tokenizer_of({set.get()});
  const int64_t vocab = tokenizer.vocab_size();
  const OtherSplit tested{val_set, 0, test}, trained{val_set ? set : nullptr, 0, train};
  return {std::make_unique<ShardSource>(set, tested, vocab, T, 0, train),
          std::make_unique<ShardSource>(val_set ? val_set : set, trained, vocab, T, first_test, test), tokenizer};
}

std::vector<int32_t> read_shard(const std::string& path, int64_t count) {
  const DataSpec spec = parse_data_spec(path);
  const Shard shard(spec.prefix.empty() ? path : spec.path, spec.prefix, std::make_shared<OpenFiles>(), 0);
  std::vector<int32_t> tokens(static_cast<size_t>(std::min(count, shard.tokens())));
  const int64_t n = static_cast<int64_t>(tokens.size());
  shard.read(0, n, 0, [&](const auto* all) { std::copy(all, all + n, tokens.begin()); });
  return tokens;
}

std::array<int32_t, shard_header_ints> shard_header(ShardFormat format, int64_t tokens, uint64_t fingerprint) {
  CHECK_THAT(tokens <= std::numeric_limits<int32_t>::max(), "a shard's count is an int32");
  const Format f = format_of(format);
  std::array<int32_t, shard_header_ints> header{f.magic, f.version, static_cast<int32_t>(tokens)};
  if (fingerprint == 0) return header;
  header[3] = knows_tokenizer;
  header[4] = static_cast<int32_t>(static_cast<uint32_t>(fingerprint));
  header[5] = static_cast<int32_t>(static_cast<uint32_t>(fingerprint >> 32));
  return header;
}

void write_shard(const std::string& path, const std::vector<uint32_t>& tokens, ShardFormat format,
                 uint64_t fingerprint) {
  const auto header = shard_header(format, std::ssize(tokens), fingerprint);
  const auto each = static_cast<size_t>(token_bytes(format));
  std::string bytes(sizeof header + tokens.size() * each, '\0');
  std::memcpy(bytes.data(), header.data(), sizeof header);
  for (size_t i = 0; i < tokens.size(); ++i) {
    CHECK_THAT(each == 4 || tokens[i] <= 0xFFFF, "token ", i, " is ", tokens[i], ": too large for uint16");
    // little-endian: the low bytes come first
    std::memcpy(bytes.data() + sizeof header + i * each, &tokens[i], each);
  }
  write_file_atomically(path, bytes);
}

}  // namespace crossply
