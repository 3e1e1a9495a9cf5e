// --shuffle documents: each epoch lays the training documents end to end in another order and cuts windows anew, so
// that no two epochs train on the same windows. With one epoch it changes only what stands side by side.
//
// Documents are found by the token between them, as engine/document_bounds.h says; a file begins one in any case. They
// are found in one pass over the training tokens and take 16 bytes each.
#pragma once

#include <memory>
#include <mutex>

#include "data/source.h"

namespace crossply {

inline const std::vector<std::string> shuffles = {"windows", "documents"};

class DocumentShuffle : public Source {
 public:
  // source: a training split of files. mark: one of document_marks. eot: the token between documents.
  DocumentShuffle(std::unique_ptr<Source> source, const std::string& mark, int64_t eot, uint64_t seed);

  // Windows of T tokens of all documents, the last one short of its end by at most T.
  int64_t size() const override { return (tokens() - 1) / seq_len(); }
  int64_t seq_len() const override { return source_->seq_len(); }
  int64_t vocab_size() const override { return source_->vocab_size(); }
  // Documents in the order of the files.
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override { read_at(0, index, tokens, targets); }
  // In the order that (seed, epoch) determines: the position in the stream alone restores everything.
  void read_of_epoch(int64_t epoch, int64_t index, int32_t* tokens, int32_t* targets) const override {
    read_at(epoch + 1, index, tokens, targets);
  }
  int64_t documents() const override;
  // Also finds the documents. Exit::usage where the tokens are a single one.
  void check_tokens(int64_t vocab) const override;
  void check_when_read(int64_t vocab) override { source_->check_when_read(vocab); }
  uint64_t digest() const override { return source_->digest(); }
  int64_t file_tokens() const override { return source_->file_tokens(); }
  std::vector<std::string> files() const override { return source_->files(); }
  std::vector<std::string> files_of_both() const override { return source_->files_of_both(); }

 private:
  int64_t tokens() const { return piece_begins_.back(); }
  void find_documents() const;
  void find_in(size_t piece, bool before) const;
  // order: 0: that of the files; e + 1: that of epoch e.
  int64_t document_at(int64_t order, int64_t place) const;
  void lay_out(int64_t order) const;
  void read_at(int64_t order, int64_t index, int32_t* tokens, int32_t* targets) const;
  void read_document(int64_t document, int64_t from, int64_t count, int32_t* out) const;

  const std::unique_ptr<Source> source_;
  const std::string mark_;
  const int64_t eot_;
  const uint64_t seed_;
  std::vector<int64_t> piece_begins_ = {0};  // (pieces + 1), in the tokens of all pieces
  mutable std::mutex reading_;
  mutable std::vector<int64_t> starts_;  // (documents + 1) in the tokens of all pieces; empty: not found yet
  mutable std::vector<int64_t> ends_;    // (documents) in the order laid_out_
  mutable int64_t laid_out_ = -1;
};

}  // namespace crossply
