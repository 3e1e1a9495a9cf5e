// Text as one sequence of tokens, cut into consecutive windows of T + 1 that do not overlap: T tokens, and the same
// shifted by one as targets. The last tenth of the windows (at least one) is the test set.
//
// Without a tokenizer the tokens are bytes: of one file of plain text those that it has, read where they are needed. A
// byte order mark at the start of a file is left out; a file of another format is refused (data/foreign_format.h).
// With one, of several files (text_files), of JSON lines and of packed files, what they hold is read as documents
// (data/documents.h), encoded at the start, and stays in memory. Documents stand one behind the other in the order of
// the files; with a tokenizer each begins with its beginning-of-text token and ends with its end-of-text token, where
// it has these. Windows run across.
#pragma once

#include "data/source.h"

namespace crossply {

// path: a file, a directory or a pattern.
Dataset open_text(const std::string& path, const DataOptions& options);

}  // namespace crossply
