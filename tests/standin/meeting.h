// How processes on one machine that know a folder find each other and swap bytes.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace crossply::standin {

// A rank is gone, or did not come in time.
struct Lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Span {
  void* data = nullptr;
  size_t bytes = 0;
};

// Every rank connected with every other.
class Mesh {
 public:
  // Returns when all have come. Throws Lost if they do not, within `patience` seconds, or if somebody has this rank.
  Mesh(const std::string& folder, int rank, int ranks, double patience);
  ~Mesh() { close(); }
  Mesh(const Mesh&) = delete;
  // Sends out[r] to rank r and receives in[r] from it, for all r but this rank, at once. Throws Lost.
  void swap(const std::vector<Span>& out, const std::vector<Span>& in, double patience);
  void close();

 private:
  int rank_;
  std::vector<int> sockets_;  // by rank; -1: none
};

// A new folder.
std::string new_folder();

}  // namespace crossply::standin
