// The texts of a Parquet table as JSON lines, one for each row: Python with pyarrow reads it, at the other end of a
// pipe (data/parquet_text.py).
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/io/file.h"

namespace crossply {

// By the first bytes of a file.
inline bool is_parquet(std::string_view first) { return first.starts_with("PAR1"); }

class ParquetTable {
 public:
  // Starts to read this column. format: what the file is and how to convert it (data/foreign_format.h). Throws
  // Exit::bad_data, with both, where there is no Python.
  ParquetTable(const std::string& path, const std::string& column, const std::string& format);
  ~ParquetTable();
  ParquetTable(const ParquetTable&) = delete;
  ParquetTable& operator=(const ParquetTable&) = delete;

  // As many bytes as asked for; fewer at the end only. Throws Exit::bad_data where Python has no pyarrow or does not
  // read the table, and Exit::stopped where a stop is requested while there is nothing yet.
  size_t read(char* out, size_t bytes);
  // How far it is, as if the file's bytes were those of its lines.
  uint64_t taken() const { return std::min(taken_, size_); }

 private:
  void finish();

  std::string path_, format_;
  pid_t pid_ = 0;  // 0: it has ended
  Descriptor pipe_;
  uint64_t taken_ = 0, size_ = 0;
};

}  // namespace crossply
