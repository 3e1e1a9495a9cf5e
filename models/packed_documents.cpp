#include "models/packed_documents.h"

namespace crossply {

void DocumentInput::load(Device& device, const int32_t* tokens) {
  const int64_t B = bounds->shape[0], T = bounds->shape[1];
  host_bounds.resize(static_cast<size_t>(2 * B * T));
  for (int64_t b = 0; b < B; ++b) find_bounds(host_bounds.data() + 2 * b * T, tokens + b * T, T, mark);
  device.copy_in(bounds->tensor.data, host_bounds.data(), bounds->bytes());
  if (positions == nullptr) return;
  host_positions.clear();
  for (int64_t i = 0; i < B * T; ++i)
    host_positions.push_back(static_cast<int32_t>(i % T) - host_bounds[static_cast<size_t>(2 * i)]);
  device.copy_in(positions->tensor.data, host_positions.data(), positions->bytes());
}

std::shared_ptr<DocumentInput> add_documents(Tape& tape, const DocumentMark& mark, int64_t B, int64_t T,
                                             bool with_positions) {
  if (!mark.any()) return nullptr;
  Value* bounds = tape.input("documents", Shape{B, T, 2}, Dtype::i32);
  Value* positions = with_positions ? tape.input("positions_in_documents", Shape{B, T}, Dtype::i32) : nullptr;
  return std::make_shared<DocumentInput>(DocumentInput{mark, bounds, positions});
}

}  // namespace crossply
