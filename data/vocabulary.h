// A vocabulary for somebody's text, trained by data/train_tokenizer.py, which needs Python and its package tokenizers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossply {

struct VocabularyOptions {
  int64_t size = 0;
  std::string style = "gpt2";  // or llama3
  std::string field = "text";  // of JSON lines
};

// Trains on the documents of these files, or where they are more than 200 MB, on as many drawn by their content, the
// same each time; writes `out` when it is complete. Python is $PYTHON, or python3. Throws Exit::no_input where Python
// or its package is missing, Exit::stopped after a signal, and what reading the documents throws.
void train_vocabulary(const std::vector<std::string>& files, const VocabularyOptions& options, const std::string& out);

// 64 bits of a document's content; what is drawn, and by whom, depends on `purpose`.
uint64_t document_hash(const std::string& text, uint64_t purpose);

}  // namespace crossply
