#include "data/documents.h"

#include <algorithm>
#include <exception>
#include <filesystem>

#include "engine/json.h"
#include "engine/printable.h"

namespace crossply {
namespace {

constexpr size_t piece = 1 << 20;
// A document from here on is encoded by all threads together, shorter ones are encoded at the same time.
constexpr size_t long_document = 1 << 20;

enum class Form { text, lines, unknown };
Form form_of(const std::string& path) {
  std::string name = std::filesystem::path(path).filename().string();
  for (const char* packed : {".gz", ".zst"})
    if (name.ends_with(packed)) name.resize(name.rfind('.'));
  const auto ends = [&](auto... endings) { return (name.ends_with(endings) || ...); };
  return ends(".jsonl", ".ndjson") ? Form::lines : ends(".txt", ".text", ".md") ? Form::text : Form::unknown;
}

std::string place_of(const Document& document) {
  return document.file + (document.line > 0 ? str(", line ", document.line) : "");
}

std::string parse_line(const Document& document, const std::string& field) {
  const std::string where = place_of(document);
  const nlohmann::json object = parse_json(document.text, where);
  if (!object.is_object()) fail(Exit::bad_data, where, ": is no JSON object: ", excerpt(document.text));
  const auto found = object.find(field);
  std::string keys;
  for (const auto& [key, value] : object.items()) keys += (keys.empty() ? "" : ", ") + excerpt(key);
  if (found == object.end())
    fail(Exit::bad_data, where, ": has no field \"", excerpt(field), "\", but ", keys.empty() ? "none" : excerpt(keys));
  if (!found->is_string())
    fail(Exit::bad_data, where, ": \"", excerpt(field), "\" is no text: ", excerpt(found->dump()));
  return found->get<std::string>();
}

// Calls body(document) for those that `chosen` says, at the same time; throws what the first one threw.
template <class Chosen, class F>
void at_once(std::vector<Document>& documents, Chosen&& chosen, F&& body) {
  std::vector<std::exception_ptr> errors(documents.size());
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < documents.size(); ++i) {
    try {
      if (chosen(documents[i])) body(documents[i]);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

void encode(Document& document, const Tokenizer& tokenizer, int32_t eot) {
  try {
    document.ids = tokenizer.prefix();
    const std::vector<int32_t> ids = tokenizer.encode(document.text);
    document.ids.insert(document.ids.end(), ids.begin(), ids.end());
    if (eot >= 0) document.ids.push_back(eot);
  } catch (const Error& error) {
    fail(Exit::bad_data, place_of(document), ": ", error.what());
  }
}

}  // namespace

DocumentReader::DocumentReader(const std::string& path) : stream_(path) {
  const Form form = form_of(path);
  fill();
  is_lines_ = form == Form::lines || (form == Form::unknown && buffer_.starts_with('{'));
}

bool DocumentReader::fill() {
  if (begin_ > 0) buffer_.erase(0, begin_), begin_ = 0;
  const size_t before = buffer_.size();
  if (before > most_document_bytes)
    fail(Exit::bad_data, stream_.name(), is_lines_ ? str(", line ", line_ + 1) : "", ": the document has more than ",
         most_document_bytes, " bytes; cut it into several files or JSON lines");
  buffer_.resize(before + piece);
  buffer_.resize(before + stream_.read(buffer_.data() + before, piece));
  return buffer_.size() > before;
}

bool DocumentReader::next(Document& document) {
  document = {stream_.name(), 0, "", {}};
  if (is_lines_) {
    while (next_line(document.text)) {
      document.line = line_;
      if (document.text.find_first_not_of(" \t\r") != std::string::npos) return true;
    }
    return false;
  }
  if (done_) return false;
  while (fill()) {
  }
  document.text = std::move(buffer_);
  return done_ = true;
}

bool DocumentReader::next_line(std::string& line) {
  size_t end = buffer_.find('\n', begin_), looked = buffer_.size() - begin_;
  while (end == std::string::npos && fill()) {
    end = buffer_.find('\n', looked);
    looked = buffer_.size();
  }
  if (begin_ == buffer_.size()) return false;
  line = buffer_.substr(begin_, end == std::string::npos ? end : end - begin_);
  begin_ = end == std::string::npos ? buffer_.size() : end + 1;
  ++line_;
  return true;
}

bool read_batch(DocumentReader& reader, size_t bytes, std::vector<Document>& batch) {
  constexpr size_t each = 256;  // what a document needs beside its text
  bool more = true;
  for (size_t have = 0; more && have < bytes;) {
    Document document;
    more = reader.next(document);
    have += document.text.size() + each;
    if (more) batch.push_back(std::move(document));
  }
  return more;
}

void parse_documents(std::vector<Document>& documents, const std::string& field) {
  at_once(
      documents, [](const Document& d) { return d.line > 0; }, [&](Document& d) { d.text = parse_line(d, field); });
}

void encode_documents(std::vector<Document>& documents, const Tokenizer& tokenizer, int32_t eot) {
  for (Document& d : documents)
    if (d.text.size() >= long_document) encode(d, tokenizer, eot);
  at_once(
      documents, [](const Document& d) { return d.text.size() < long_document; },
      [&](Document& d) { encode(d, tokenizer, eot); });
}

}  // namespace crossply
