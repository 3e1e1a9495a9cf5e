// How far the encoding of text is, on standard error: a line that is renewed on a terminal, otherwise one each half a
// minute.
#pragma once

#include <cstdint>
#include <string>

namespace crossply {

class EncodingProgress {
 public:
  // all: bytes to read, as they lie on the disk; 0: not known. before: of them, how many an earlier process has read.
  EncodingProgress(std::string label, uint64_t all, uint64_t before = 0);
  ~EncodingProgress();
  // taken: bytes read of the disk so far; text, tokens: bytes of text and tokens since this began.
  void tell(uint64_t taken, int64_t text, int64_t tokens);
  double seconds() const;

 private:
  std::string label_;
  uint64_t all_, before_;
  bool terminal_, shown_ = false;
  double start_, last_;
};

}  // namespace crossply
