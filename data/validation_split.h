// Which tokens of a corpus are for validation: a share of the tokens, in whole documents if possible.
//
// Documents are drawn in the order of their hashes until the share is reached. Equal documents have equal hashes, so
// they stay on one side. If this misses the share by more than a fifth of it, the documents are few or very unequal.
// Then the end of each file is for validation instead. The cut is at the end of a document if one is near, else inside
// a document. If a file gives too much or too little, the next files make up for it.
//
// Memory does not grow with tokens or documents, only by 8 bytes a file.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/shard_writer.h"

namespace crossply {

// What the split must know of a document. A table of them is kept in shards of 32 bits, entry_words words each.
struct DocumentEntry {
  uint64_t hash = 0;  // of its text, 63 bits
  int64_t tokens = 0, bytes = 0;
  int64_t file = 0;  // which input; the documents of one are contiguous
};
constexpr int64_t entry_words = 5;
std::vector<int32_t> words_of(const DocumentEntry& entry);

class ValidationSplit {
 public:
  // table: of `files` inputs, flushed. share: of the tokens, at most a half. Throws Exit::stopped after a signal.
  ValidationSplit(const ShardWriter& table, int64_t files, double share);
  bool by_document() const { return ends_.empty(); }
  double drawn() const { return drawn_; }  // the share that whole documents gave
  // The first so many tokens of a document are for training. place: of its first token, among those of its file.
  int64_t train_tokens(const DocumentEntry& document, int64_t place) const;

 private:
  int64_t draw(const ShardWriter& table, double wanted);
  void cut(const ShardWriter& table, int64_t files, double share, double wanted);
  double drawn_ = 0;
  uint64_t limit_ = 0;         // smaller hashes are for validation
  std::vector<int64_t> ends_;  // of each file's tokens for training
};

struct SplitPart {
  int64_t documents = 0, bytes = 0;  // bytes: of text
  std::unique_ptr<ShardWriter> writer;
  int64_t tokens() const { return writer->tokens(); }
};

// Copies all tokens of the table's documents, in their order, and flushes them. A document that is cut counts as one
// for training. Throws Exit::stopped after a signal.
void split_tokens(const ShardWriter& tokens, const ShardWriter& table, const ValidationSplit& split, SplitPart& train,
                  SplitPart& validation);

}  // namespace crossply
