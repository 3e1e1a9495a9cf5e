#include "data/document_marks.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace crossply {

bool begin_with_eot(const std::string& mark, int64_t first, int64_t eot) {
  return mark == "before" || (mark != "after" && first == eot);
}

int32_t first_token(const Source& source) {
  int32_t first = -1;
  source.read_piece(0, 0, 1, &first);
  return first;
}

void visit_beginnings(const Source& source, size_t piece, const DocumentMark& mark,
                      const std::function<bool(int64_t place)>& visit) {
  constexpr int64_t chunk = 1 << 18;
  const int64_t count = source.pieces()[piece];
  std::vector<int32_t> tokens(static_cast<size_t>(std::min(chunk, count)));
  for (int64_t first = 0; first < count; first += chunk) {
    const int64_t n = std::min(chunk, count - first);
    source.read_piece(piece, first, n, tokens.data());
    for (int64_t i = 0; i < n; ++i) {
      const int64_t place = first + i + (mark.before ? 0 : 1);
      if (tokens[static_cast<size_t>(i)] == mark.eot && place > 0 && place < count && !visit(place)) return;
    }
  }
}

std::string attention_within(const DocumentMark& mark) {
  return str("tokens attend within documents, which begin ", mark.before ? "at" : "after", " token ", mark.eot);
}

void check_documents(const Source& train, const DocumentMark& mark) {
  bool found = train.documents() > 0;  // by the shuffle
  const size_t pieces = train.pieces().size();
  for (size_t piece = 0; piece < pieces && !found; ++piece)
    visit_beginnings(train, piece, mark, [&](int64_t) { return !(found = true); });
  if (!found)
    fail(Exit::usage, "--documents: no file of the training data has the token ", mark.eot,
         " between two documents; --eot has the right one, or leave out --documents");
}

bool mark_shuffle_alone(const nlohmann::json& settings) { return !settings.contains("z_loss"); }

}  // namespace crossply
