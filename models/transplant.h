// A model made of another one's blocks: Inheritune's starts and its baselines (arXiv 2404.08634).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "engine/params.h"
#include "models/config.h"

namespace crossply {

// What can be taken over: the embeddings with the head, GPT-2's positions, of each block its attention and feed-forward
// weights and the norms in front of them, the final norm, and what a connection adds.
inline const std::vector<std::string> transplant_parts = {"embedding", "positions", "attention",  "attention_norm",
                                                          "mlp",       "mlp_norm",  "final_norm", "connection"};

struct Transplant {
  // For each block of the new model the source's block that it comes from (from 0), or fresh_block.
  std::vector<int> blocks;
  std::set<std::string> parts{transplant_parts.begin(), transplant_parts.end()};
  // Where logits are divided by the layer's number, a block that moves from layer a to b (from 0) gets its queries'
  // weights times (b + 1) / (a + 1), so that it computes what it computed.
  bool rescale_queries = false;
};
constexpr int fresh_block = -1;

// "0-5,0-5", "0,2,4,18-21", "fresh:15,15-23": the list, for a source of L blocks. Throws Exit::usage with the entry
// that is no block.
std::vector<int> parse_blocks(const std::string& text, int64_t L);

// The source's configuration with as many blocks as the list, the width C and H heads of the source's head width; 0 is
// the source's C, and the same share of its heads. F shrinks as C does, K as H. Throws Exit::usage for sizes that the
// source cannot give.
Config transplanted_config(const Config& source, const Transplant& transplant, int64_t C = 0, int64_t H = 0);

// The part that a row belongs to, by its name.
std::string transplant_part(const std::string& row);

// The values of a new model, for what starts fresh, from random numbers of their own: those of the seed itself would be
// what a source of the same seed began with.
void initialise_fresh(ParameterTable& to, uint64_t seed);

// Copies what is taken over into `to`, which is declared as transplanted_config says and keeps the rest of its values:
// those of initialise_fresh. Into a narrower model goes the leading part of each tensor in every dimension.
//
// What a connection added to a block comes with it where it has the same shape and means the same at any place, as a
// gate on the first layer's values does. What speaks of other layers by their number, as a router of LIMe or
// DenseFormer's weights, comes only where the block keeps its place, and what is there for all blocks together where
// all of them do. An Engram is of a place: it stays there, whichever block comes to it.
//
// Both tables have memory. Returns the names of rows that the parts ask for and that keep their values all the same.
std::vector<std::string> transplant(const ParameterTable& from, const Config& source, ParameterTable& to,
                                    const Config& target, const Transplant& transplant);

}  // namespace crossply
