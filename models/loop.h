// Which block is applied when. Without a loop each block on disk is applied once, in order. Connections and blocks are
// recorded and declared by application: the layer that they are given counts applications, from 0.
#pragma once

#include <string>
#include <unordered_set>

#include "models/config.h"

namespace crossply {

struct Applications {
  int64_t prelude = 0, core = 0, coda = 0, passes = 1;  // P, M, Q, R; without a loop all blocks are the prelude
  bool tied = true;

  int64_t count() const { return prelude + passes * core + coda; }  // A
  int64_t end_of_pass(int64_t r) const { return prelude + (r + 1) * core; }
  int64_t pass(int64_t v) const;    // in which application v is; 0 outside of the core
  int64_t stored(int64_t v) const;  // the block on disk
};
Applications applications_of(const Config& config);
bool has_loop(const Config& config);         // of any kind
bool has_anchor(const Config& config);       // whose applications are counted; a stack counts those of one pass
int64_t stack_passes(const Config& config);  // 1 without a stack
// "6", or "6, run as 10": all executions of blocks.
std::string described_layers(const Config& config);
// Throws `code` with `where` for options that do not fit together, or the blocks.
void check_loop(const Config& config, Exit code, const std::string& where);
// Of options that fit together and have no effect; mostly "".
std::string loop_remark(const Config& config);
// The configuration in which every application is a layer of its own: what a connection is made for. Its loop_layers
// are given, so that applications_of() is the same.
Config applied(const Config& config);

// How rows of applications are named on disk: model.layers.{v}.X of a block's own rows is model.layers.{p}.X; that of a
// row that a connection adds is so in the first pass, and in pass r model.passes.{r}.layers.{p}.X.
class RowNames {
 public:
  explicit RowNames(const Config& config);
  std::string of(const std::string& name) const;

 private:
  Applications applications_;
  std::unordered_set<std::string> of_blocks_;  // rows of the backbone, by application; empty where names stay
};

}  // namespace crossply
