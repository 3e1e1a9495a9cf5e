// safetensors: named arrays in one file. Layout: an 8-byte little-endian length N, N bytes of JSON that say the name,
// dtype, shape and byte range of every tensor, then the bytes.
//
// Opening a file believes nothing in it: every length is compared with the size of the file before anything is
// allocated or read by it. A file that opens is consistent to the last byte; one that is not is Exit::bad_data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/io/file.h"

namespace crossply {

struct TensorInfo {
  std::string name, dtype;  // dtype in the file's words: "F32", "BF16", "I64", ...
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // byte range, counted from the first byte after the header

  int64_t numel() const;    // 1 for rank 0
  std::string str() const;  // "a.weight" F32 [2, 3]
};

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // in the order of their bytes
  const TensorInfo* find(const std::string& name) const;               // nullptr if it is not there
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // out: info.numel() numbers, from F64, F32, F16 or BF16. Any other dtype is Exit::bad_data.
  void read_f32(const TensorInfo& info, float* out) const;
  // The same of `count` elements from `first` on, in the order of the bytes.
  void read_f32(const TensorInfo& info, int64_t first, int64_t count, float* out) const;
  void read_f64(const TensorInfo& info, double* out) const;
  void read_f64(const TensorInfo& info, int64_t first, int64_t count, double* out) const;
  // out: the bytes as they are, for integers; the tensor must be of this dtype.
  void read_raw(const TensorInfo& info, const std::string& dtype, void* out) const;

 private:
  template <class Out>
  void read_real(const TensorInfo& info, int64_t first, int64_t count, Out* out) const;
  InputFile file_;
  uint64_t data_start_ = 0;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

struct TensorToWrite {
  std::string name, dtype;
  std::vector<int64_t> shape;
  const void* data;
};

// Writes the wider dtypes first, so that every tensor is aligned, and equal ones in the order given. The file appears
// complete or not at all. The metadata gets {"format": "pt"}, without which some loaders refuse the file.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace crossply
