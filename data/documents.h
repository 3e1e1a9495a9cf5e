// Documents of files of text, read in order and encoded in parallel.
//
// A file holds JSON lines, one object with a text each, where its name says so (.jsonl, .ndjson, perhaps with .gz or
// .zst behind), or where its name says nothing (not .txt, .text, .md; standard input) and it begins with {, perhaps
// after white space or a byte order mark. Any other file is one document, but a .json that begins with [ is refused.
// Lines of white space only are passed over. A byte order mark at the start of a file is not part of its text. A file
// of another format (data/foreign_format.h) is refused by the format's name; but Python reads a Parquet table
// (data/parquet_table.h), each row as such a line.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/byte_stream.h"
#include "data/parquet_table.h"
#include "data/tokenizer.h"

namespace crossply {

// Of one document: a longer one, which is in memory as a whole, is refused.
constexpr size_t max_document_bytes = size_t{1} << 30;

// What becomes of a special token's text within a document: "<|endoftext|>".
enum class SpecialText { token, text, refuse };

struct Document {
  std::string file;   // where it is from, for messages
  int64_t line = 0;   // from 1, of JSON lines; 0: the document is the file
  size_t offset = 0;  // of the text in its file, for messages: 3 behind a byte order mark
  size_t source = 0;  // which of the files that DocumentFeed reads
  std::string text;   // as it stands there: JSON, or the text itself; parse_documents makes it the text
  std::string fault;  // what is wrong with it, where faults are kept; "": nothing
  // By encode_documents:
  std::vector<int32_t> ids;
  bool begun = false, ended = false;  // did the text have its begin and end tokens itself?
  int64_t special = 0;                // other special tokens in it
};

// A document that is not as it must be: the first one ends the program, or each is marked in Document::fault, and its
// text goes.
enum class Faults { fail, keep };

class DocumentReader {
 public:
  // path: as ByteStream takes it, and what it throws. field: the column of a Parquet table.
  explicit DocumentReader(const std::string& path, const std::string& field = "text");
  // False at the end. Throws what ByteStream::read and ParquetTable::read do, and Exit::bad_data for a document that is
  // too long.
  bool next(Document& document);
  bool is_lines() const { return is_lines_; }  // JSON lines
  bool is_table() const { return table_ != nullptr; }
  // Whether the file's bytes are the text as they stand.
  bool is_plain_text() const { return !is_lines_ && !stream_.is_packed(); }
  // Where the text begins in such a file: behind a byte order mark.
  size_t text_begin() const { return text_begin_; }
  const ByteStream& bytes() const { return stream_; }
  ByteStream& bytes() { return stream_; }
  uint64_t taken() const { return table_ ? table_->taken() : stream_.taken(); }

 private:
  bool fill();  // more into buffer_; false at the end
  bool next_line(std::string& line);
  ByteStream stream_;
  std::unique_ptr<ParquetTable> table_;  // null: the text is the stream's
  std::string buffer_;
  size_t begin_ = 0;        // of what of it was not given out
  size_t piece_ = 1 << 14;  // what to read next; many files are small
  size_t text_begin_ = 0;
  bool is_lines_ = false, done_ = false;
  int64_t line_ = 0;
};

// Whether a file of this name is read as one document, and not as lines.
bool is_one_document(const std::string& path);

// Adds the next documents, about so many bytes of them as they stand there; false after the last.
bool read_batch(DocumentReader& reader, size_t bytes, std::vector<Document>& batch);

// JSON lines become the texts in their field. Throws Exit::bad_data with file and line for the first that is not JSON,
// no object, or without such a text; or keeps each one's fault.
void parse_documents(std::vector<Document>& documents, const std::string& field, Faults faults = Faults::fail);

// Throws Exit::bad_data, with file, line and byte, for the first text that is not UTF-8; or keeps each one's fault.
void require_utf8(std::vector<Document>& documents, Faults faults = Faults::fail);

// Every document's ids: the tokenizer's beginning of a text, if it has one, the text, and `eot`, unless that is
// negative; where the text has one of them itself, it is not added again. With SpecialText::text the tokenizer is one
// with_special_text(). A tokenizer that is not bytes needs UTF-8: see require_utf8. Throws Exit::bad_data, with file
// and line, for the first text that has a special token in it which may not be there, or keeps each one's fault;
// Exit::device where a long document needs more memory than there is; and Exit::stopped after a signal.
void encode_documents(std::vector<Document>& documents, const Tokenizer& tokenizer, int32_t eot,
                      SpecialText special = SpecialText::token, Faults faults = Faults::fail);

// 64 bits of a document's content; what is drawn by them depends on `purpose`.
uint64_t document_hash(const std::string& text, uint64_t purpose);

}  // namespace crossply
