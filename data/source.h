// Source: a fixed, indexable set of samples of equal length T. Task: a set whose samples can also be answered by
// generation. open_dataset turns what the user writes after --data into a training and a test set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "engine/check.h"
#include "engine/document_bounds.h"

namespace crossply {

class Task {
 public:
  virtual ~Task() = default;
  virtual std::vector<int32_t> prompt(int64_t index) const = 0;
  virtual int32_t eos() const = 0;
  // Enough for every right answer. The caller stops earlier at eos, or where its own context ends.
  virtual int64_t max_new_tokens() const = 0;

  struct Verdict {
    bool answer;  // the final answer is right
    bool steps;   // so is every step on the way to it
  };
  // `generated` is what followed the prompt, whatever it is; what follows the first eos is ignored.
  virtual Verdict judge(int64_t index, const std::vector<int32_t>& generated) const = 0;
  // True where the shortcut that is known for this task does not find the answer: report these samples separately.
  virtual bool is_hard(int64_t) const { return false; }
};

class Source {
 public:
  virtual ~Source() = default;
  virtual int64_t size() const = 0;
  virtual int64_t seq_len() const = 0;
  // 0 where the files do not say; the model's config decides then.
  virtual int64_t vocab_size() const = 0;
  // targets are shifted already: targets[t] is what follows tokens[t], or -1 where it is not scored.
  virtual void read(int64_t index, int32_t* tokens /*(T)*/, int32_t* targets /*(T)*/) const = 0;
  // A sample of an epoch that has its own windows (data/document_shuffle.h); otherwise all epochs have the same.
  virtual void read_of_epoch(int64_t /*epoch*/, int64_t index, int32_t* tokens, int32_t* targets) const {
    read(index, tokens, targets);
  }
  // How many documents an epoch lays in another order; 0: it does not.
  virtual int64_t documents() const { return 0; }
  // This split's tokens, for windows of another cut: how many of each file, in the order of the files, none of
  // generated sets; and `count` of them.
  virtual std::vector<int64_t> pieces() const { return {}; }
  virtual void read_piece(size_t piece, int64_t begin, int64_t count, int32_t* out) const;
  // The same of a window of T tokens, at most seq_len(), that begins anywhere in the files of a split, not just where
  // one before it ends; `offset` counts the places where one can, (offsets(T)). Of a generated set, its samples, whole.
  virtual int64_t offsets(int64_t /*T*/) const { return size(); }
  virtual void read_at(int64_t offset, int64_t /*T*/, int32_t* tokens, int32_t* targets) const {
    read(offset, tokens, targets);
  }
  // Fails unless every token is below `vocab`. Shards read all their tokens for it: call it once, before training.
  virtual void check_tokens(int64_t vocab) const {
    if (vocab_size() > vocab)
      fail(Exit::bad_data, "the data has a vocabulary of ", vocab_size(), ", the model only of ", vocab);
  }
  // The same for each token when it is read, for programs that read a part, or lose nothing when they fail late.
  virtual void check_when_read(int64_t vocab) { check_tokens(vocab); }
  // Changes when any of the data does; where it is in files, whatever is in them, also in those of the other split.
  // Reads all of it.
  virtual uint64_t digest() const;
  virtual const Task* task() const { return nullptr; }
  // Tokens of the files behind it, unread ones included; 0 where there is no file.
  virtual int64_t file_tokens() const { return 0; }
  // The shards that samples of this split are in; and those of them that the other split has, too, under the same or
  // another name. A copy is known by its contents, after digest(). None where the data is not in shards.
  virtual std::vector<std::string> files() const { return {}; }
  virtual std::vector<std::string> files_of_both() const { return {}; }
};

// `count` samples of another source, drawn with replacement, from any offset with the same chance: the same ones for
// the same seed. The other source must live as long.
class RandomSamples : public Source {
 public:
  RandomSamples(const Source& source, int64_t count, uint64_t seed)
      : source_(source), count_(count), offsets_(source.offsets(source.seq_len())), seed_(seed) {}
  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return source_.seq_len(); }
  int64_t vocab_size() const override { return source_.vocab_size(); }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override;

 private:
  const Source& source_;
  int64_t count_, offsets_;
  uint64_t seed_;
};

// `count` of another source's sequences, evenly spread: sequence i is floor((i + 0.5) N / count) of its N, so that the
// mean over a few is not that of the file's beginning. The other source must live as long.
class SpreadSamples : public Source {
 public:
  SpreadSamples(const Source& source, int64_t count) : source_(source), count_(std::min(count, source.size())) {}
  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return source_.seq_len(); }
  int64_t vocab_size() const override { return source_.vocab_size(); }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    source_.read(place(index), tokens, targets);
  }
  int64_t place(int64_t index) const {  // in two parts, because (2 i + 1) N may not fit
    const int64_t whole = source_.size() / count_, rest = source_.size() % count_;
    return index * whole + (whole * count_ + (2 * index + 1) * rest) / (2 * count_);
  }

 private:
  const Source& source_;
  int64_t count_;
};

// One half of another source's samples, also as a task. Of an odd number the first half has one less.
class HalfOfSamples : public Source, public Task {
 public:
  HalfOfSamples(std::unique_ptr<Source> source, bool first)
      : source_(std::move(source)),
        begin_(first ? 0 : source_->size() / 2),
        size_(first ? source_->size() / 2 : source_->size() - begin_) {}
  int64_t size() const override { return size_; }
  int64_t seq_len() const override { return source_->seq_len(); }
  int64_t vocab_size() const override { return source_->vocab_size(); }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    source_->read(begin_ + index, tokens, targets);
  }
  void check_tokens(int64_t vocab) const override { source_->check_tokens(vocab); }
  void check_when_read(int64_t vocab) override { source_->check_when_read(vocab); }
  uint64_t digest() const override { return source_->digest(); }
  int64_t file_tokens() const override { return source_->file_tokens(); }
  std::vector<std::string> files() const override { return source_->files(); }
  std::vector<std::string> files_of_both() const override { return source_->files_of_both(); }

  const Task* task() const override { return source_->task() != nullptr ? this : nullptr; }
  std::vector<int32_t> prompt(int64_t index) const override { return source_->task()->prompt(begin_ + index); }
  int32_t eos() const override { return source_->task()->eos(); }
  int64_t max_new_tokens() const override { return source_->task()->max_new_tokens(); }
  Verdict judge(int64_t index, const std::vector<int32_t>& generated) const override {
    return source_->task()->judge(begin_ + index, generated);
  }
  bool is_hard(int64_t index) const override { return source_->task()->is_hard(begin_ + index); }

 private:
  std::unique_ptr<Source> source_;
  int64_t begin_, size_;
};

// What --data names, in words; and the same for --help.
inline const char* const data_specs =
    "arith:3|4|5|6 (operators; 4-6 mixes them; with an i behind it, arith:6i, integers and not residues modulo 11), "
    "prosqa (prosqa:FILE.json: tested on the published questions), text:PATH (a file, a directory or a glob), a "
    "directory that prepare wrote, or token shards (*.bin; of "
    "tokens alone uint16:PATH or uint32:PATH)";

// A spec in its parts.
struct DataSpec {
  enum class Kind { unknown, generated, text, shards, directory };
  Kind kind = Kind::unknown;
  std::string prefix;  // text:, uint16: or uint32:, which says that shards have no header
  std::string path;    // what follows it, a name or a pattern; "" of what is generated
  bool files() const { return kind >= Kind::text; }
};
DataSpec parse_data_spec(const std::string& spec);

struct DataOptions {
  std::string spec;           // data_specs
  int64_t seq_len = 0;        // T, tokens per sequence; of files > 0, of a generated task 0 is its longest sample
  uint64_t seed = 0;          // of generated tasks
  int64_t train_samples = 0;  // 0: the source's own number; of files, the first so many windows
  int64_t test_samples = 0;
  std::string val_spec;             // shards only: a glob of validation shards; without it, the last 1% of the windows
  std::string shuffle = "windows";  // of the training set: one of shuffles (data/document_shuffle.h)
  std::string documents = "none";   // one of document_marks (data/document_marks.h)
  int64_t eot = -1;                 // the token between documents; -1: the tokenizer's
  std::string test_part = "all";    // one of test_parts: what is left of the test set
  std::string tokenizer;  // text only: a tokenizer.json, or a directory with one; "": that of the model, if it is bpe
  Tokenizer of_model;     // encodes text if it is bpe, and tasks if it is bpe or bytes
  bool whole = false;     // files only: no training set, and all of each file as the test set (whole_window)
};

// The first half is for choosing, such as a learning rate, and the second for reporting what was chosen.
inline const std::vector<std::string> test_parts = {"all", "first_half", "second_half"};

struct Dataset {
  std::unique_ptr<Source> train, test;  // train: null where all is for testing
  Tokenizer tokenizer;
  DocumentMark documents = {};
};

// Where spec is a directory of shards, or val_spec one: the globs of its train_*.bin and val_*.bin in their place.
// Throws Exit::no_input where there are none.
void expand_directories(DataOptions& options);

Dataset open_dataset(const DataOptions& options);

// The share of a task's prompts that a guess answers: one of the numbers there are, one of the two options. NaN where
// the data is no task.
double chance_of(const std::string& spec);

// A spec without the directories of its files, for a title; of what `prepare` wrote, its directory's name.
std::string short_name(const std::string& spec);

// The files behind a spec or a val_spec, unopened; none where the data is generated. Throws as match_paths does.
std::vector<std::string> data_files(const std::string& spec);

// What a sample takes from a file: `length` tokens from `begin` on, and their followers as targets from the one at
// `scored` on.
struct Window {
  int64_t begin, length, scored;
};
// A file of N tokens in windows of T, so that every token but the first is a target once. The last window begins early
// enough to be full, and what the one before has scored is not scored again; a file shorter than T is padded.
inline int64_t count_windows(int64_t N, int64_t T) { return N < 2 ? 0 : (N - 2) / T + 1; }
inline Window whole_window(int64_t N, int64_t T, int64_t index) {
  const int64_t length = std::min(T, N - 1), begin = std::min(index * T, N - 1 - length);
  return {begin, length, index * T - begin};
}
// The places where a window of T tokens and a last target can begin among `tokens` ones; one too few has one, padded.
inline int64_t count_offsets(int64_t tokens, int64_t T) { return std::max<int64_t>(1, tokens - T); }
// from: the window's length + 1 tokens
template <class Token>
void copy_window(const Token* from, const Window& window, int64_t T, int32_t* tokens, int32_t* targets) {
  std::fill_n(tokens, T, 0);
  std::fill_n(targets, T, -1);
  std::copy_n(from, window.length, tokens);
  std::copy_n(from + 1 + window.scored, window.length - window.scored, targets + window.scored);
}

// How many of the available samples a split of a file has: those that were asked for, or all. `where` is for the error.
int64_t count_samples(const std::string& where, const char* split, int64_t asked, int64_t available);

}  // namespace crossply
