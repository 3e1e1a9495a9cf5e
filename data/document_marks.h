// --documents and --eot: which token separates the documents of files.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "data/source.h"

namespace crossply {

// --documents. auto: before where the first token is the end-of-text token, else after. So does --shuffle documents go
// where it is none.
inline const std::vector<std::string> document_marks = {"none", "auto", "after", "before"};
bool begin_with_eot(const std::string& mark, int64_t first, int64_t eot);
int32_t first_token(const Source& source);  // of files
// visit(place) at every place of a file, between its first token and its end, at which a document begins, until it
// returns false. piece: of source.pieces().
void visit_beginnings(const Source& source, size_t piece, const DocumentMark& mark,
                      const std::function<bool(int64_t place)>& visit);
// "tokens attend within documents, which begin after token 0"
std::string attention_within(const DocumentMark& mark);
// Throws Exit::usage where no token of the training files ends a document: --documents would change nothing.
void check_documents(const Source& train, const DocumentMark& mark);
// Runs from before the z-loss had --documents for --shuffle documents alone; their attention knew none. settings: those
// that a run keeps.
bool mark_shuffle_alone(const nlohmann::json& settings);

}  // namespace crossply
