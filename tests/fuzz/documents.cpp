// Any bytes as a file of documents, by its name and by what it begins with: read, unpacked, parsed and encoded.
#include "data/documents.h"

#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (const char* name : {"/a.jsonl", "/a"}) {
    const std::string path = scratch() + name;
    write_file(path, text_of(data, size));
    accept_or_refuse([&] {
      DocumentReader reader(path);
      std::vector<Document> documents;
      size_t bytes = 0;
      while (bytes < (64 << 20) && read_batch(reader, 1000, documents)) {  // a little that is packed may be very much
        for (const Document& document : documents) bytes += document.text.size() + 1;
        parse_documents(documents, "text");
        encode_documents(documents, Tokenizer::bytes(), -1);
        for (const Document& document : documents)
          require(document.ids.size() == document.text.size(), "a byte is no token");
        documents.clear();
      }
    });
  }
  return 0;
}
