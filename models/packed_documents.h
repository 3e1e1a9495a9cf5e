// Documents packed into the rows of a batch (--documents): inputs of a tape that whoever loads the tokens fills.
#pragma once

#include <memory>
#include <vector>

#include "engine/document_bounds.h"
#include "engine/tape.h"

namespace crossply {

struct DocumentInput {
  DocumentMark mark;
  Value* bounds;     // (B, T, 2) i32, ops::Attended's
  Value* positions;  // (B, T) i32, positions within documents; null where no model has learned positions
  // As last loaded.
  std::vector<int32_t> host_bounds{}, host_positions{};

  void load(Device& device, const int32_t* tokens /*(B,T)*/);
};

// Null where rows are whole documents.
std::shared_ptr<DocumentInput> add_documents(Tape& tape, const DocumentMark& mark, int64_t B, int64_t T,
                                             bool with_positions);

}  // namespace crossply
