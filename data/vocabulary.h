// A vocabulary for somebody's text, trained by data/train_tokenizer.py, which needs Python and its package tokenizers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/document_feed.h"

namespace crossply {

struct VocabularyOptions {
  int64_t size = 0;
  std::string style = "gpt2";  // or llama3
  std::string field = "text";  // of JSON lines
  int64_t skip_bad = 0;        // at most so many documents that cannot be read as text are left out
};

// Trains on the documents of these sources, or where they are more than 200 MB, on as many drawn by their content, the
// same each time; writes `out` when it is complete. Python is $PYTHON, or python3. Throws Exit::no_input where Python
// or its package is missing, Exit::io where it fails otherwise, Exit::stopped after a signal, and what reading the
// documents throws.
void train_vocabulary(const std::vector<SourceFile>& sources, const VocabularyOptions& options, const std::string& out);

// The special tokens that a vocabulary of this style has.
std::vector<std::string> special_tokens(const std::string& style);

}  // namespace crossply
