// The documents of many files in order, in batches, from any place on: what `prepare` reads.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "data/documents.h"

namespace crossply {

struct SourceFile {
  std::string path;      // absolute; "-": standard input
  uint64_t bytes = 0;    // 0 of what is no file
  int64_t modified = 0;  // when its content was changed last, as the file says, in nanoseconds
  bool is_file = false;  // else a pipe: it can be read once
  // Which file it is, and when the system changed it: nobody can set this time, so it tells where `modified` was put
  // back.
  uint64_t inode = 0;
  int64_t changed = 0;
};
// The files that the inputs stand for (data/paths.h), each once; says on standard error what it leaves out. Throws
// Exit::no_input.
std::vector<SourceFile> list_sources(const std::vector<std::string>& inputs);
uint64_t total_bytes(const std::vector<SourceFile>& sources);  // 0 where not all are files

// SHA-256 of a file. Throws Exit::stopped after a signal, where the file is long.
std::string digest_of_file(const std::string& path);
// The file that --tokenizer names.
std::string tokenizer_file(const std::string& path);
// Throws Exit::usage for the first of these sources that is not what the list of finished ones says: one of another
// size, time or inode is digested.
void require_unchanged(const std::vector<SourceFile>& sources, const nlohmann::ordered_json& finished,
                       const std::string& where, const std::string& advice);

// Digest of the sources' paths, sizes, inodes and times.
std::string digest_of_sources(const std::vector<SourceFile>& sources);

struct FeedPosition {
  size_t source = 0;
  int64_t documents = 0;  // of this source, before it
  uint64_t digest = 0;    // of these
};
// The digest of some documents and one more, as it stands in its file.
uint64_t document_digest(uint64_t before, const std::string& text);

struct Finished {
  SourceFile source;
  uint64_t bytes;  // that were read
  std::string sha256;
  int64_t documents;
};
struct FeedBatch {
  std::vector<Document> documents;
  FeedPosition after;
  std::vector<Finished> finished;  // the sources that end in it
  uint64_t taken = 0;              // bytes of all files so far
  bool more = true;
};

class DocumentFeed {
 public:
  // Throws Exit::usage where the documents before the position are not what they were; `where` was begun with those.
  // A file of one document that cannot be read as text is a fault of that document.
  // field: as DocumentReader takes it.
  DocumentFeed(const std::vector<SourceFile>& sources, const FeedPosition& from, const std::string& where,
               Faults faults = Faults::fail, const std::string& field = "text");
  FeedBatch next();
  uint64_t taken() const;

 private:
  void open();
  bool read(size_t bytes, std::vector<Document>& documents);
  void finish_source(FeedBatch& batch, uint64_t bytes, const std::string& sha256);
  std::vector<SourceFile> sources_;
  Faults faults_;
  std::string field_;
  FeedPosition at_;
  uint64_t before_ = 0;  // bytes of the files before this one
  std::unique_ptr<DocumentReader> reader_;
};

}  // namespace crossply
