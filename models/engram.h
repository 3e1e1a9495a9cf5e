// Engram (arXiv 2601.07372): before some applications of blocks each stream takes in what tables say of the n-grams
// that end at its token. kernels/depth/engram_gate.h is how it is written.
//
//   table's row of n and head   ((a_0 m_0) xor .. xor (a_{n-1} m_{n-1})) mod prime, in the part of the table that is
//                               theirs;  a_i: the i-th token back, n = 2 .. order, in int64
//   e (M)                       the rows of all n and heads, n first
//   [k_1 .. k_E, val]           Wkv e:  a key for each stream, one value
//
// Beyond the first token of a sequence, or a boundary token, there are pads. m are odd multipliers, the primes the
// first ones from engram_rows on, each used once in the model. Rows depend on tokens alone, so the host computes them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "models/connection.h"

namespace crossply {

bool has_engram(const Config& config);
// Reads engram_map where it is a file, whose numbers become the option. Throws `code` with `where` for options that do
// not fit together.
void check_engram(Config& config, Exit code, const std::string& where);
// Adds the rows of the applications that have an Engram; streams: as many as the connection has.
void declare_engram(ParameterTable& params, const Config& config, int64_t streams);
// Changes how they start, so that they write nothing: the model is then what it would be without, bit for bit.
void start_engram_as_plain(ParameterTable& params);

// The rows of a table for every token.
class EngramHash {
 public:
  EngramHash(const Config& config, size_t which);  // of the Engrams, from 0

  int64_t columns() const { return static_cast<int64_t>(primes_.size()); }  // Z, n-grams by head
  int64_t table_rows() const { return offsets_.back(); }
  // to (count, Z), of tokens[0 .. count); so many that stand before them are looked back to, but with documents,
  // (count, 2) of find_bounds(), none of another one. A token beyond the vocabulary is an error.
  void rows_of(int32_t* to, const int32_t* tokens, int64_t count, int64_t before,
               const int32_t* documents = nullptr) const;
  const std::vector<int64_t>& multipliers() const { return multipliers_; }

 private:
  int64_t mapped(int32_t token) const { return map_.empty() ? token : map_[static_cast<size_t>(token)]; }
  void row_of(int32_t* to, const int32_t* token, int64_t before) const;

  int64_t V_, heads_, pad_;
  std::vector<int32_t> map_;  // empty: every token is itself
  std::vector<char> ends_;    // by token: is it a boundary? Empty: none is
  std::vector<int64_t> multipliers_, primes_, offsets_;
};

// An input of a tape, (B, T, Z) i32, which whoever loads the tokens fills.
struct EngramInput {
  EngramHash hash;
  Value* rows;
  std::vector<int32_t> host;

  // Of sequences whose T tokens begin at tokens, tokens + stride and so on, each with `before` tokens in front of them;
  // documents: (B, T, 2), or null.
  void load(Device& device, const int32_t* tokens, int64_t stride, int64_t before, const int32_t* documents = nullptr);
};
using EngramInputs = std::vector<std::shared_ptr<EngramInput>>;

// Records the Engrams of a model, application by application.
class Engrams {
 public:
  Engrams(const Build& build, Connection& connection, EngramInputs& inputs);
  void before(int64_t application);

 private:
  const Build& b_;
  Connection& connection_;
  EngramInputs& inputs_;
  std::vector<int64_t> layers_;
};

}  // namespace crossply
